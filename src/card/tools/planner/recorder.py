"""Make a recording of a pair: the target writes, then both models score each position of its texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np

from card.api.llm import LLM
from card.config import ResolvedParams, SamplingRule
from card.config.registry import find_method
from card.errors import PlanError
from card.kernels.number_types import Floats
from card.machine.importing import load_place
from card.models.block_loading import is_state_drafter
from card.models.candidate_scorer import CandidateScorer
from card.models.facts import context_limit
from card.models.loading import check_pair, load_decoder, load_tokenizer
from card.models.names import OWN_BLOCK
from card.models.protocol import Extension, LanguageModel
from card.models.runner import RowRunner
from card.models.runners import make_runner
from card.text.fit import tokenizer_fingerprint
from card.tools.bench.environment import describe_run
from card.tools.planner.measuring import state_draft_of
from card.tools.planner.own_drafts import check_recordable, record_method
from card.tools.planner.recording import HeadRows, RecordedText, Recording, Rows, TargetText, pack_text
from card.tools.planner.state_drafts import CHUNK, NUM_DEEPER, deeper_logits, inputs_of
from card.tree.logits import Logits, as_array, top

AT_ONCE = 8  # prompts that the target answers together; a pass of 8 rows takes far less than 8 passes
NUM_CANDIDATES = 32
NUM_TARGET_IDS = 8  # as many as token recycling keeps
_RULED_OUT_LOGPROB = -100.0  # of a candidate that top-k, top-p or min-p leave out
_RECORD_HEAD = "card.tools.planner.head_drafts:record_head"  # with a head


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRequest:
    """The models, prompts and settings to record."""

    target: str
    draft: str
    prompts: Sequence[tuple[int, ...]]  # token ids
    params: ResolvedParams
    dtype: str = "auto"
    device: str = "cpu"
    coupled_noise: bool = True
    methods: Sequence[str] = ()  # with drafters of their own, to be recorded, too
    ctc: str | None = None  # file of the head of method ctc
    kv_selection: str | None = None  # for methods whose target drafts for itself


def record(request: RecordRequest, tell: Callable[[str], None] = lambda _: None) -> Recording:
    """Let the target answer all prompts and record the pair; repeated prompts are left out.

    Raises: ModelError if a model cannot be loaded; VocabularyError if they do not share a tokenizer; PromptError.
    """
    check_recordable(request.methods, request.ctc)
    prompts = list(dict.fromkeys(request.prompts))
    if not prompts:
        raise PlanError("there are no prompts to record")
    tell("loading the models")
    tokenizer = load_tokenizer(request.target)
    model: Any = load_decoder(request.target, dtype=request.dtype, device=request.device)
    if request.draft == OWN_BLOCK or is_state_drafter(request.draft, cache_dir=None):
        draft_model = state_draft_of(request.target, request.draft, model, tokenizer, dtype=request.dtype)
    else:
        check_pair(tokenizer, request.target, request.draft)
        draft_model = load_decoder(request.draft, dtype=request.dtype, device=request.device)
    answers = []
    with LLM(model, tokenizer=tokenizer, method="vanilla", device=request.device, max_num_seqs=AT_ONCE) as llm:
        for first in range(0, len(prompts), AT_ONCE):
            tell(f"the target has answered {first} of {len(prompts)} prompts")
            some = prompts[first : first + AT_ONCE]
            for prompt_ids, output in zip(some, llm.generate([list(one) for one in some], request.params), strict=True):
                if output.error is not None:
                    raise output.error
                completion = output.outputs[0]
                reason: Literal["stop", "length"] = "stop" if completion.finish_reason == "stop" else "length"
                answers.append(TargetText(prompt_ids, completion.token_ids, reason))
    tell("asking both models at each position")
    longest = max(len(answer.prompt_ids) + len(answer.token_ids) for answer in answers)
    target, draft = (make_runner(m, max_model_len=min(longest, context_limit(m))) for m in (model, draft_model))
    recording = make_recording(request, target, draft, answers, tokenizer_fingerprint(tokenizer))
    return _with_own_drafts(recording, request, (model, draft_model, target), answers, tell, tokenizer=tokenizer)


def _with_own_drafts(
    recording: Recording,
    request: RecordRequest,
    models: tuple[Any, Any, RowRunner],
    answers: Sequence[TargetText],
    tell: Callable[[str], None],
    **settings: Any,
) -> Recording:
    """Return the recording with the drafts of the wanted methods."""
    target, draft, runner = models
    settings["device"] = request.device
    drafted: list[dict[str, bytes]] = [{} for _ in answers]
    heads: Sequence[HeadRows | None] = [None] * len(answers)
    for name in request.methods:
        if find_method(name).needs_head:
            tell("asking the head at each position")
            heads = load_place(_RECORD_HEAD, f"method {name}")(str(request.ctc), runner, answers)
            continue
        extra = {"kv_selection": request.kv_selection} if find_method(name).selection is not None else {}
        done = record_method(name, target, draft, answers, request.params, tell, **settings, **extra)
        for marks, flags in zip(drafted, done, strict=True):
            marks[name] = flags
    texts = (
        msgspec.structs.replace(text, drafted=marks, head=head)
        for text, marks, head in zip(recording.texts, drafted, heads, strict=True)
    )
    return msgspec.structs.replace(recording, texts=tuple(texts))


def make_recording(
    request: RecordRequest, target: RowRunner, draft: LanguageModel, answers: Sequence[TargetText], tokenizer: str
) -> Recording:
    """Return the recording of a pair on texts that its target has written.

    Args:
        request: as of `record`; its prompts are ignored.
        tokenizer: fingerprint of the one that both models share.
    Raises: as `record_texts`.
    """
    params, environment = request.params, describe_run()
    texts = record_texts(target, draft, answers, params, coupled_noise=request.coupled_noise)
    return Recording(
        target=request.target,
        draft=request.draft,
        source=environment.command,
        tokenizer=tokenizer,
        vocab_size=target.vocab_size,
        **{name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p", "max_tokens")},
        seed=params.seed,
        coupled_noise=request.coupled_noise,
        num_candidates=min(NUM_CANDIDATES, draft.vocab_size),
        num_target_ids=min(NUM_TARGET_IDS, target.vocab_size),
        dtype=str(target.dtype).removeprefix("torch."),
        date=environment.date,
        versions=environment.versions,
        texts=texts,
    )


def record_texts(
    target: LanguageModel,
    draft: LanguageModel,
    answers: Sequence[TargetText],
    params: ResolvedParams,
    *,
    coupled_noise: bool = True,
) -> tuple[RecordedText, ...]:
    """Return the likely tokens of both models at each position of the answers.

    Args:
        params: those that the answers were written with, the seed fixed.
        coupled_noise: whether the drafter knows the target's sampling noise.
    Raises: SettingsError if the seed is not fixed; CapacityError if a text does not fit into a model's context.
    """
    scorer = CandidateScorer(SamplingRule.of(params), draft.vocab_size, coupled=coupled_noise)
    num_candidates = min(NUM_CANDIDATES, draft.vocab_size)
    num_target_ids = min(NUM_TARGET_IDS, target.vocab_size)
    texts = []
    for answer in answers:
        inputs = inputs_of(draft, target, answer)
        pieces = [scorer.top(logits, positions, num_candidates) for positions, logits in _logits(draft, answer, inputs)]
        ids, logprobs = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
        num_deeper = 0 if inputs is None else NUM_DEEPER
        more = [np.repeat(one[None], num_deeper, 0) for one in (ids, logprobs)]
        for depth, places, logits in deeper_logits(draft, answer, inputs):
            positions = [len(answer.prompt_ids) + place for place in places]
            for one, deeper in zip(more, scorer.top(logits, positions, num_candidates), strict=True):
                one[depth - 1, places.start : places.stop] = deeper
        best = [top(as_array(logits), num_target_ids)[0] for _, logits in _logits(target, answer)]
        least = _RULED_OUT_LOGPROB
        rows = Rows(ids, np.maximum(logprobs, least), np.concatenate(best), more[0], np.maximum(more[1], least))
        texts.append(pack_text(answer.prompt_ids, answer.token_ids, answer.finish_reason, rows))
    return tuple(texts)


def _logits(model: LanguageModel, answer: TargetText, inputs: Floats | None = None) -> Iterator[tuple[range, Logits]]:
    """Yield (positions of answer tokens, [T, V] logits that predict them), in chunks.

    Args:
        inputs: of the rows of the text's last tokens, as many as the model has; None: it has all, of tokens alone.
    """
    whole = [*answer.prompt_ids, *answer.token_ids[:-1]]
    skipped = 0 if inputs is None else len(whole) - len(inputs)
    text, first = whole[skipped:], len(answer.prompt_ids) - 1 - skipped  # the row that predicts the first token
    slot = model.open(len(text))
    try:
        for begin, end in pairwise([0, *range(first, len(text), CHUNK), len(text)]):
            given = None if inputs is None else inputs[begin:end]
            if begin < first:
                model.forward([Extension(slot, text[:end], range(-1, end - 1), end, inputs=given)])
            elif end > begin:
                (logits,) = model.forward([Extension(slot, text[begin:end], range(begin - 1, end - 1), inputs=given)])
                yield range(skipped + begin + 1, skipped + end + 1), logits
    finally:
        model.close(slot)
