"""Texts of the policy gate: what the demo pair did on shipped prompts, and draft models that were made up.

python benchmarks/engine/policy_texts.py  # records the demo pair again, for benchmarks/data
"""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import torch

from card.config import SamplingParams
from card.models.demo import DEMO_PROBLEMS
from card.models.loading import load_tokenizer
from card.text.prompts import encode_chat
from card.tools.bench.datasets import parse_spec, read_datasets
from card.tools.planner.recorder import RecordRequest, record
from card.tools.planner.recording import RecordedText, Recording, Rows, check_recording, pack_text, rows_of
from card.tools.planner.synthetic import make_text

FOLDER = Path(__file__).parents[1] / "data"
MOST_TOKENS = 160  # of a recorded answer
NUM_CANDIDATES, NUM_TARGET_IDS = 16, 8  # of each place
SAMPLED = "questions, T = 1"
RECORDED = ("demo", "questions", "code", "copy-edit", SAMPLED)

NUM_DISTINCT = 128  # texts of which the first has ended long before the last begins, whatever runs at once
NUM_TEXTS, TEXT_TOKENS, PROMPT_TOKENS, VOCAB_SIZE = 16, 128, 64, 2048  # of what is made up


@dataclass(frozen=True, slots=True)
class Draft:
    """How a made-up draft model behaves."""

    agreement: float  # share of places where its first choice is right
    claims: float  # mean probability that it gives its first choice
    num_wrong: int = 0  # places at the beginning of the first text where its first choice is wrong


MADE_UP: Mapping[str, Draft] = {
    "poor draft": Draft(0.45, 0.45),
    "adversarial draft": Draft(0.03, 0.9),
    "flat claims": Draft(0.8, 0.4),  # a good draft model whose probabilities say nothing
    "late draft": Draft(0.88, 0.88, num_wrong=32),  # a good one, after a beginning that speaks against it
}


@cache
def recording_of(text: str) -> Recording:
    """Return the recording of a kind of text. Raises: PlanError if a file of the folder is broken."""
    if text in MADE_UP:
        return make_recording(MADE_UP[text])
    recording = msgspec.msgpack.decode(gzip.decompress(_path(text).read_bytes()), type=Recording)
    check_recording(recording)
    return recording


@cache
def distinct_recording(text: str) -> Recording:
    """Return the texts of a kind again and again, each behind a token of its own.

    No prompt shares its beginning with another one, so each request reads all of its prompt, whatever runs beside it.
    """
    recording = recording_of(text)
    firsts = np.random.default_rng(0).choice(recording.vocab_size, NUM_DISTINCT, replace=False).tolist()
    texts = [
        msgspec.structs.replace(one, prompt_ids=(first, *one.prompt_ids))
        for first, one in zip(firsts, itertools.cycle(recording.texts), strict=False)
    ]
    return msgspec.structs.replace(recording, texts=tuple(texts))


def make_recording(draft: Draft, seed: int = 0) -> Recording:
    """Return texts in which tokens hardly repeat, and what the draft model says of them."""
    rng = np.random.default_rng(seed)
    texts = tuple(_text(rng, draft, num_wrong=0 if idx else draft.num_wrong) for idx in range(NUM_TEXTS))
    return Recording(
        target="made up",
        draft="made up",
        source=f"{draft}, seed {seed}",
        vocab_size=VOCAB_SIZE,
        seed=seed,
        max_tokens=TEXT_TOKENS,
        num_candidates=NUM_CANDIDATES,
        num_target_ids=NUM_TARGET_IDS,
        texts=texts,
    )


def _text(rng: np.random.Generator, draft: Draft, *, num_wrong: int) -> RecordedText:
    prompt = rng.choice(VOCAB_SIZE, PROMPT_TOKENS, replace=False)
    answer = rng.choice(VOCAB_SIZE, TEXT_TOKENS, replace=False)
    weights = 0.55 * 0.45 ** np.arange(NUM_CANDIDATES - 1)  # of what the first choice leaves
    ids = np.empty((TEXT_TOKENS, NUM_CANDIDATES + NUM_TARGET_IDS), np.int64)
    ranks, claims = [], []
    for place, token in enumerate(answer):
        others = rng.choice(VOCAB_SIZE - 1, NUM_CANDIDATES + NUM_TARGET_IDS, replace=False)
        others += others >= token  # all but the text's own token
        claimed = 0.08 + 0.92 * rng.beta(1.5 * (draft.claims - 0.08) / 0.92, 1.5 * (1 - draft.claims) / 0.92)
        claims.append(min(claimed, 1 - 1e-6))
        is_honest = draft.claims == draft.agreement
        is_first = rng.random() < (claims[-1] if is_honest else draft.agreement) and place >= num_wrong
        last = NUM_CANDIDATES - 1
        later = 1 + int(rng.choice(last, p=weights / weights.sum())) if is_honest else last
        ranks.append(0 if is_first else later)
        ids[place] = np.insert(others[:-1], ranks[-1], token)
    return make_text(prompt.tolist(), ids, ranks, np.array(claims), weights)


def _path(text: str) -> Path:
    return FOLDER / f"{text.replace(', T = ', '-T')}.rec.gz"


def record_demo_pair(text: str) -> Recording:
    """Let the demo pair answer shipped prompts, and return few of the candidates, roundly, so that files are small."""
    tokenizer = load_tokenizer("demo-target")
    if text == "demo":
        prompts = [tuple(encode_chat(tokenizer, [{"role": "user", "content": problem}])) for problem in DEMO_PROBLEMS]
    else:
        questions = read_datasets([parse_spec(text.split(",", maxsplit=1)[0])], limit=None)[0].questions
        prompts = [tuple(question.encode(tokenizer)) for question in questions]
    params = SamplingParams(temperature=float(text == SAMPLED), seed=0, max_tokens=MOST_TOKENS).resolved()
    full = record(RecordRequest(target="demo-target", draft="demo-draft", prompts=prompts, params=params), print)
    texts = []
    for one in full.texts:
        rows = rows_of(full, one)
        logprobs = np.minimum(rows.draft_logprobs.astype(np.float16), 0.0)[:, :NUM_CANDIDATES]
        few = Rows(rows.draft_ids[:, :NUM_CANDIDATES], logprobs, rows.target_ids)
        texts.append(pack_text(one.prompt_ids, one.token_ids, one.finish_reason, few))
    return msgspec.structs.replace(full, texts=tuple(texts), num_candidates=NUM_CANDIDATES)


def main() -> None:
    """Record all kinds anew."""
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for text in RECORDED:
        data = msgspec.msgpack.encode(record_demo_pair(text))
        _path(text).write_bytes(gzip.compress(data, mtime=0))


if __name__ == "__main__":
    main()
