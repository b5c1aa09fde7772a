"""Texts of the families that people run: transformers' own, whichever method writes them and whatever goes wrong.

The judge is transformers' forward over a whole text: each token must be what the request's rule chooses from it.
A dozen families are tried here; `make test-models` tries all that run, each with every method of the list.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from card.config import DraftSettings, SamplingParams, SamplingRule
from card.config.registry import methods
from card.engine.engine import Engine
from card.engine.queue import Limits
from card.engine.request import Request
from card.models.architectures import find_architecture
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from card.tree.sampling import Sampler
from tests.decoding import fake, inline, make_engine, make_request, run_all
from tests.every_family import ROOT, script
from tests.unreliable_link import Faults

MAX_MODEL_LEN = 64
NUM_NEW = 12
LENGTHS = (3, 13, 34)  # of prompts; windows and chunks are 8
MANY = ("llama", "qwen3", "mistral", "phi3", "gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v3", "mixtral")
MANY += ("llama4_text", "gpt2", "qwen3_5_text", "lfm2", "nemotron_h")
METHODS_TRIED = ("vanilla", "sps", "card", "suffix")
WITH_EVERY_METHOD = ("llama4_text", "gpt_oss", "qwen3_5_text")  # others: `sps`, and `card` with a drafter that dies
DRAFT = DraftSettings(num_speculative_tokens=4, verify="tree", beam_width=2, budget=6, lead=4, min_verify_prob=0.0)
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_NEW)
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=NUM_NEW, top_p=0.95)
NEW_IDS = itertools.count(1)

pytestmark = pytest.mark.timeout(300)


def running() -> list[str]:
    """Return the families that run, as docs/models.md tells."""
    rows = script().rows_of((ROOT / "docs" / "models.md").read_text("utf-8"))
    return list(dict.fromkeys([*MANY, *(row.family for row in rows if row.runs)]))


def marked(*values: str, is_quick: bool) -> Any:
    return pytest.param(*values, marks=[] if is_quick else pytest.mark.models)


FAMILIES = [marked(family, is_quick=family in MANY) for family in running()]
PAIRS = [
    marked(family, method, is_quick=family in WITH_EVERY_METHOD or (family in MANY and method == "sps"))
    for family in running()
    for method in METHODS_TRIED
]


@functools.lru_cache(3)
def truth_of(family: str) -> Any:
    return script().tiny_model(family)


def noisy(family: str, noise: float) -> Any:
    """Return a copy of a family's model, with noise of this share of each weight's deviation."""
    model = copy.deepcopy(truth_of(family))
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * weight.std(unbiased=False) * torch.randn_like(weight))
    return model


@functools.lru_cache(6)
def runner_of(family: str, noise: float = 0.0) -> RowRunner:
    return plain_runner(noisy(family, noise), max_model_len=MAX_MODEL_LEN, max_tree_rows=40)


def requests_of(family: str, method: str, params: Sequence[SamplingParams]) -> list[Request]:
    return [
        make_request(
            next(NEW_IDS),
            method=method,
            params=one,
            draft=DRAFT,
            prompt=prompt_of(length),
            uses_drafter=methods()[method].needs_draft,
        )
        for length, one in zip(LENGTHS, params, strict=False)
    ]


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(length)).tolist())


def engine_of(family: str, method: str) -> Engine:
    link = inline(runner_of(family, 0.1)) if methods()[method].needs_draft else None
    return make_engine(runner_of(family), link, method, limits=Limits(prefill_chunk=11))


def choices(model: Any, request: Request, written: Sequence[int]) -> list[int]:
    """Return what a request's rule chooses from transformers' logits at each place of a text, given all before it."""
    prompt = request.prompt_ids
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *written]]), use_cache=False).logits[0]
    rows = range(len(prompt) - 1, len(prompt) + len(written) - 1)
    sampler = Sampler(SamplingRule.of(request.params), logits.shape[1])
    return sampler.choose(logits[rows.start : rows.stop], [row + 1 for row in rows])


def judge(family: str, requests: Sequence[Request], texts: dict[int, tuple[list[int], str]]) -> None:
    """Check each text against what transformers' logits of it choose."""
    for request in requests:
        written, prompt = texts[request.request_id][0], list(request.prompt_ids)
        assert len(written) == NUM_NEW
        assert written == choices(truth_of(family), request, written), (request.params.temperature, len(prompt))


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_texts_are_those_of_transformers_alone_in_a_batch_and_on_reused_rows(family: str, method: str) -> None:
    engine = engine_of(family, method)
    alone = requests_of(family, method, [SAMPLED])
    judge(family, alone, run_all(engine, {0: alone}))
    for params in ((GREEDY, SAMPLED, GREEDY), (SAMPLED, GREEDY, SAMPLED)):
        requests = requests_of(family, method, params)
        judge(family, requests, run_all(engine, {0: requests}))
    assert engine.stats().prefix_hits > 0, "the second time the prompts' rows were there"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_that_dies_and_an_abort_in_the_middle_leave_the_other_texts_as_they_are(family: str) -> None:
    faults = Faults(seed=2, drop=0.1, duplicate=0.2, max_delay=2, kill=0.1)
    engine = make_engine(runner_of(family), fake(runner_of(family, 0.1), faults), "card")
    requests = requests_of(family, "card", (GREEDY, SAMPLED, GREEDY))
    texts: dict[int, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(engine.check(request))
    num_rounds = 0
    while engine.has_work:
        for update in engine.step():
            texts[update.request_id] += update.token_ids
        num_rounds += 1
        if num_rounds == 3:
            assert engine.abort(requests[2].request_id)
    judge(family, requests[:2], {i: (token_ids, "") for i, token_ids in texts.items()})
    again = requests_of(family, "card", (SAMPLED, GREEDY, GREEDY))
    judge(family, again, run_all(engine, {0: again}))


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next"])
def test_a_config_of_transformers_states_all_that_shapes_of_layers_with_experts_need(family: str) -> None:
    config = script().tiny_config(family)
    architecture = find_architecture(config.model_type)
    assert architecture is not None
    for layer in range(config.num_hidden_layers):
        shape = architecture.layer_shape(config, layer)
        assert shape.experts is not None and (shape.experts.count, shape.mlp_width) == (config.num_experts, 0)
