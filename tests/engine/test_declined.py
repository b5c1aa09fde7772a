"""A text that the draft model cannot follow goes undrafted, and nobody beside it notices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from card.api.llm import LLM, RequestOutput
from card.config import DraftSettings, SamplingParams
from card.drafting.beam import BeamWriter
from card.drafting.messages import MAX_REQUEST_BYTES, Close, Declined, Open
from card.engine.metrics import RequestStats
from card.engine.request import Request
from card.kernels.number_types import Floats
from card.links.in_process import ThreadLink
from card.links.link import DrafterLink
from card.models.protocol import Extension
from tests.decoding import drafter_for, inline, make_engine, make_request, plain, toy_draft, toy_target
from tests.drafts import draft_spec
from tests.examples import settings
from tests.links.serving import connected, make_server, running
from tests.pair import Pair, make_model, make_tokenizer
from tests.toy import TableModel

pytestmark = pytest.mark.timeout(120)

TARGET = toy_target()  # of 12 tokens
FOREIGN, FATAL, NUMBERLESS = 11, 10, 9  # tokens that the draft model lacks, fails at, and makes no numbers of
CONTEXT = 60  # of the draft model; the target's is 128
METHODS = ("card", "sps", "pearl")
WAITING = DraftSettings(max_wait_s=5.0)
PARAMS = SamplingParams(temperature=0.0, seed=0, max_tokens=40)
SAMPLED = PARAMS.replace(temperature=1.0, seed=7)
HARMLESS = {"logit_bias": {FOREIGN: -100.0, FATAL: -100.0, NUMBERLESS: -100.0}}  # for texts without such tokens


class PoorDraft(TableModel):
    """A draft model like the target in most contexts, with fewer tokens, a shorter context and weak spots."""

    def __init__(self) -> None:
        super().__init__(TARGET.seed, FOREIGN, 2, spread=1.5, max_model_len=CONTEXT, num_tree_rows=512)
        self._like = toy_draft(TARGET, 0.8)

    def _make_logits(self, context: tuple[int, ...]) -> Floats:
        logits = self._like._make_logits(context)[:FOREIGN]
        return logits * np.float32(np.nan) if NUMBERLESS in context else logits

    def forward(self, extensions: Sequence[Extension]) -> list[Floats]:
        if any(FATAL in extension.token_ids for extension in extensions):
            raise RuntimeError("out of memory\nand a long story")
        return super().forward(extensions)


POISONS: dict[str, tuple[tuple[int, ...], str]] = {
    "a token in the prompt": ((3, FOREIGN, 4), "the draft model has no token 11: its tokens are 0 to 10"),
    "a token of the text": ((3, 1, 4), "the draft model has no token 11"),
    "a long prompt": (
        tuple(i % 9 for i in range(70)),
        "the text has 70 tokens, and the draft model's context holds 60",
    ),
    "a long text": (tuple(i % 9 for i in range(45)), "tokens, and the draft model's context holds 60"),
    "a pass that fails": ((3, FATAL, 4), "the draft model failed at it: RuntimeError: out of memory"),
    "no numbers": ((3, 4, NUMBERLESS), "the draft model failed at it: "),
}


def poison(kind: str, request_id: int, method: str, params: SamplingParams) -> Request:
    bias = {FOREIGN: 100.0} if kind == "a token of the text" else HARMLESS["logit_bias"]
    params = params.replace(logit_bias=bias)
    return make_request(request_id, method=method, params=params, draft=WAITING, prompt=POISONS[kind][0])


def harmless(request_id: int, method: str, params: SamplingParams) -> Request:
    prompt = (request_id % 9, 1, 4, 1, 5)
    return make_request(request_id, method=method, params=params.replace(**HARMLESS), draft=WAITING, prompt=prompt)


def run(link: DrafterLink, method: str, requests: Sequence[Request]) -> dict[int, tuple[list[int], RequestStats]]:
    """Return tokens and counters of requests that are decoded together."""
    engine = make_engine(TARGET, link, method)
    for request in requests:
        engine.add(engine.check(request))
    tokens: dict[int, list[int]] = {request.request_id: [] for request in requests}
    done: dict[int, RequestStats] = {}
    while engine.has_work:
        for update in engine.step():
            assert update.error is None
            tokens[update.request_id] += update.token_ids
            done[update.request_id] = update.stats
    return {i: (tokens[i], done[i]) for i in tokens}


@cache
def plainly(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    return plain(TARGET, prompt=prompt, params=params)[0]


def assert_undrafted(stats: RequestStats, reason: str) -> None:
    assert reason in stats.declined
    assert "\n" not in stats.declined
    assert (stats.schedule, stats.schedule_reason) == ("off", stats.declined)


@pytest.mark.parametrize("params", [PARAMS, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", POISONS)
def test_others_are_drafted_as_if_the_text_that_cannot_be_followed_were_not_there(
    kind: str, method: str, params: SamplingParams
) -> None:
    others = [harmless(i, method, params) for i in (1, 2, 3)]
    link = inline(PoorDraft())
    beside = run(link, method, [others[0], poison(kind, 0, method, params), *others[1:]])
    alone = run(inline(PoorDraft()), method, others)
    assert str(link.status) == "up"
    for request in others:
        (tokens, stats), (_, undisturbed) = beside[request.request_id], alone[request.request_id]
        assert tokens == plainly(request.prompt_ids, request.params)
        assert stats.accepted_tokens == undisturbed.accepted_tokens > 0
        assert (stats.hit_rate, stats.declined) == (undisturbed.hit_rate, "")
    tokens, stats = beside[0]
    poisoned = poison(kind, 0, method, params)
    assert tokens == plainly(poisoned.prompt_ids, poisoned.params)
    assert_undrafted(stats, POISONS[kind][1])


@settings(max_examples=40)
@given(
    kinds=st.lists(st.sampled_from([*POISONS, "harmless"]), min_size=1, max_size=5),
    method=st.sampled_from(METHODS),
    seed=st.integers(0, 99),
)
def test_any_mix_of_texts_that_can_and_cannot_be_followed_is_written_as_by_the_target_alone(
    kinds: list[str], method: str, seed: int
) -> None:
    params = SAMPLED.replace(seed=seed)
    requests = [
        harmless(i, method, params) if kind == "harmless" else poison(kind, i, method, params)
        for i, kind in enumerate(kinds)
    ]
    link = inline(PoorDraft())
    for request_id, (tokens, stats) in run(link, method, requests).items():
        request, kind = requests[request_id], kinds[request_id]
        assert tokens == plainly(request.prompt_ids, request.params)
        assert bool(stats.declined) == (kind != "harmless")
    assert str(link.status) == "up"


@contextlib.contextmanager
def threaded() -> Iterator[DrafterLink]:
    link = ThreadLink(drafter_for(PoorDraft()))
    link.start()
    try:
        yield link
    finally:
        link.close()


@contextlib.contextmanager
def remote() -> Iterator[DrafterLink]:
    with (
        running(make_server(PoorDraft(), tokenizer="shared")) as server,
        connected(server.address, vocab_size=TARGET.vocab_size, tokenizer="shared") as link,
    ):
        yield link


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", [threaded, remote])
def test_a_drafter_elsewhere_goes_on_for_the_others(
    place: Callable[[], contextlib.AbstractContextManager[DrafterLink]], method: str
) -> None:
    others = [harmless(i, method, PARAMS) for i in range(10, 13)]
    poisons = [poison(kind, i, method, PARAMS) for i, kind in enumerate(POISONS)]
    with place() as link:
        results = run(link, method, [*poisons, *others])
        assert (str(link.status), link.status.num_restarts) == ("up", 0)
    for request in (*poisons, *others):
        assert results[request.request_id][0] == plainly(request.prompt_ids, request.params)
    for request, (_, reason) in zip(poisons[:1], list(POISONS.values())[:1], strict=True):
        assert_undrafted(results[request.request_id][1], reason)
    assert all(results[request.request_id][1].declined == "" for request in others)
    if method != "card":  # which waits for nothing
        assert all(results[request.request_id][1].accepted_tokens > 0 for request in others)


def test_a_text_too_large_for_a_message_is_declined_on_the_way() -> None:
    text = (1,) * (MAX_REQUEST_BYTES + 1)
    with remote() as link:
        link.send(Open(1, text, draft_spec(max_len=len(text) + 1)))
        (declined,) = link.receive()
        assert isinstance(declined, Declined)
        assert f"a drafter accepts at most {MAX_REQUEST_BYTES}" in declined.reason
        link.send(Close(1))
        harmless_one = harmless(2, "sps", PARAMS)
        assert run(link, "sps", [harmless_one])[2][1].accepted_tokens > 0
        assert (str(link.status), link.status.num_restarts) == ("up", 0)


def test_a_small_memory_is_left_to_the_texts_that_fit() -> None:
    draft = PoorDraft()
    link = inline(draft)
    link.worker.writer = BeamWriter(draft, kv_cache_bytes=64 * draft.row_bytes)
    request = harmless(1, "sps", PARAMS)
    tokens, stats = run(link, "sps", [request])[1]
    assert tokens == plainly(request.prompt_ids, request.params)
    assert_undrafted(stats, "more than the drafter's memory holds")


# ---- real models ----------------------------------------------------------------------------------------------------

_NUM_TOKENS, _NUM_ROWS = len(make_tokenizer()), 330  # of the tokenizer, and of the padded model's embedding
PADDING_ID = 325


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model like the pair's target whose embedding has more rows."""
    folder, tokenizer = tmp_path_factory.mktemp("padded"), make_tokenizer()
    rng_state = torch.get_rng_state()
    model = make_model(len(tokenizer))
    model.resize_token_embeddings(_NUM_ROWS, mean_resizing=False)
    torch.set_rng_state(rng_state)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def generated(llm: LLM, *, has_padding: bool) -> list[RequestOutput]:
    prompts = [[40, 41, 42], [50, 51], *([[40, PADDING_ID, 41]] if has_padding else [])]
    params = PARAMS.replace(ignore_eos=True, logit_bias=dict.fromkeys(range(_NUM_TOKENS, _NUM_ROWS), -100.0))
    return llm.generate(prompts, [params] * len(prompts))


@pytest.mark.parametrize("placement", ["inline", "process"])
def test_a_padding_token_in_one_prompt_costs_the_others_nothing(pair: Pair, padded: str, placement: str) -> None:
    with LLM(padded, dtype="float32", method="vanilla") as vanilla:
        wanted = [result.outputs[0].token_ids for result in generated(vanilla, has_padding=True)]
    settings = {"method": "sps", "placement": placement, "dtype": "float32", "policy": "fixed"}
    with LLM(padded, pair.target, **settings) as llm:
        *_, poisoned = generated(llm, has_padding=True)
        results = generated(llm, has_padding=True)
        assert [result.outputs[0].token_ids for result in results] == wanted
        assert "the draft model has no token 325" in poisoned.stats.declined
        for result in results[:2]:
            assert result.stats.accepted_tokens > 0
            assert (result.stats.drafter, result.stats.drafter_restarts, result.stats.declined) == ("up", 0, "")
        assert llm.stats().drafter_restarts == 0


def test_a_draft_model_with_more_rows_than_the_target_is_not_rejected_for_them(pair: Pair, padded: str) -> None:
    with LLM(pair.target, padded, method="sps", dtype="float32", policy="fixed") as llm:
        results = llm.generate([[40, 41, 42]] * 2, PARAMS.replace(ignore_eos=True, temperature=2.0))
    assert all(result.stats.drafter == "up" for result in results)
    assert all(result.stats.accepted_tokens > 0 for result in results)
