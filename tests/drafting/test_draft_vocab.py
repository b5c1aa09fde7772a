"""A draft model with a part of the vocabulary proposes nothing else, and changes no text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from card.api.llm import LLM
from card.config import SamplingParams
from card.config.registry import methods
from card.drafting.drafted import Drafting
from card.drafting.messages import Layer
from card.errors import SettingsError
from card.kernels.int8_linear import why_not_int8
from card.models.draft_vocab import drafted_ids, first_used, restrict_head
from card.models.loading import load_decoder, load_tokenizer
from card.models.protocol import Extension
from card.models.runners import plain_runner
from card.models.token_ranks import used_ids
from card.theirs.transformers.loading import load_model
from card.tree.nodes import NewNodes
from tests.pair import Pair

pytestmark = pytest.mark.timeout(240)

NUM_TOKENS = 150
PROMPTS = ["the cat sat", "one two three"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, seed=0, ignore_eos=True)
SAMPLED = GREEDY.replace(temperature=0.8, seed=11)
ENDING = SamplingParams(temperature=2.0, max_tokens=200, seed=14)  # both texts end after 52 tokens
DRAFTING = [name for name, one in methods().items() if one.needs_draft and not one.needs_training]


@pytest.fixture(scope="module")
def expected(pair: Pair) -> Iterator[Callable[[SamplingParams], list[tuple[int, ...]]]]:
    """Decodes plainly."""
    with LLM(pair.target, dtype="float32", method="vanilla") as plain:
        yield cache(lambda params: [one.outputs[0].token_ids for one in plain.generate(PROMPTS, params)])


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The tokens that drafters in this process send."""
    tokens, layer = set[int](), Drafting.layer

    def noted(self: Drafting, request_id: int, nodes: NewNodes, **more: Any) -> Layer:
        tokens.update(nodes.tokens)
        return layer(self, request_id, nodes, **more)

    monkeypatch.setattr(Drafting, "layer", noted)
    return tokens


def logits(model: object) -> torch.Tensor:
    runner = plain_runner(model, max_model_len=64)  # type: ignore[arg-type]
    return torch.from_numpy(runner.forward([Extension(runner.open(), list(range(3, 20)), range(-1, 16))])[0])


@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS])
@pytest.mark.parametrize("method", DRAFTING)
def test_every_method_writes_the_text_of_plain_decoding(pair, expected, drafted, method, num_tokens):
    options = {"dtype": "float32", "placement": "inline", "policy": "fixed", "draft_vocab": num_tokens}
    with LLM(pair.target, pair.draft, method=method, **options) as llm:
        allowed = {*drafted_ids(llm.host.tokenizer, num_tokens), 0, 1}
        kinds = [params for params in (GREEDY, SAMPLED, ENDING) for _ in PROMPTS]
        outputs = [one.outputs[0].token_ids for one in llm.generate(PROMPTS * 3, kinds)]
        assert outputs == [*expected(GREEDY), *expected(SAMPLED), *expected(ENDING)]
        assert drafted
        assert drafted <= allowed


def test_drafters_elsewhere_are_restricted_too(pair, expected):
    common = {"dtype": "float32", "policy": "fixed", "method": "sps"}
    accepted = []
    for placement, num_tokens in (("thread", None), ("thread", 1), ("process", 1)):
        with LLM(pair.target, pair.draft, placement=placement, draft_vocab=num_tokens, **common) as llm:
            outputs = llm.generate(PROMPTS, GREEDY)
        assert [one.outputs[0].token_ids for one in outputs] == expected(GREEDY)
        assert all(one.stats.drafter_passes for one in outputs)
        accepted.append(sum(one.stats.mean_acceptance_length for one in outputs))
    assert accepted[0] > max(accepted[1:])  # nothing useful can be proposed of three tokens


def test_a_loaded_draft_model_stays_as_it_is(pair):
    draft = load_model(pair.draft, dtype="float32")
    before = logits(draft)
    options = {"tokenizer": load_tokenizer(pair.target), "method": "sps", "placement": "inline"}
    with LLM(load_model(pair.target, dtype="float32"), draft, draft_vocab=10, **options) as llm:
        llm.generate(PROMPTS, GREEDY)
    assert torch.equal(logits(draft), before)


@pytest.mark.parametrize("kind", ["own pass", "generic", "int8"])
def test_logits_are_those_of_the_whole_head_or_minus_infinity(pair, kind):
    if kind == "int8" and (reason := why_not_int8()):
        pytest.skip(reason)
    if kind == "generic":
        sizes = {"vocab_size": 320, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 64}
        model = GPT2LMHeadModel(GPT2Config(**sizes)).train(False)
    else:
        model = load_decoder(pair.draft, dtype="float32")
        if kind == "int8":
            model.computes_int8 = True
    kept = [*range(100), 200, 290]
    whole, part = logits(model), logits(restrict_head(model, [*range(100), 200, 290, 5000]))
    others = torch.ones(whole.shape[1], dtype=torch.bool)
    others[kept] = False
    torch.testing.assert_close(part[:, kept], whole[:, kept])
    assert part.shape == whole.shape
    assert torch.isneginf(part[:, others]).all()
    assert torch.equal(logits(restrict_head(model, range(whole.shape[1]))), whole)


@pytest.mark.parametrize("in_bytes", [True, False])
def test_tokens_that_texts_use_come_first_in_vocabularies_of_both_kinds(in_bytes: bool) -> None:
    blank = "\u0120" if in_bytes else "\u2581"
    words = [f"{blank}the", f"{blank}return", "ing", "\u00c3\u00a9" if in_bytes else "\u00e9"]
    rare = [f"{blank}zqxj{i}" for i in range(50)]
    vocabulary = {token: i for i, token in enumerate([blank, *rare, *words])}
    assert set(first_used(vocabulary, 5)) == {vocabulary[one] for one in (blank, *words)}
    assert first_used(vocabulary, 7)[5:] == [1, 2], "then the first ids"
    assert sorted(first_used(vocabulary, 99)) == list(range(len(vocabulary)))


def test_the_counts_know_most_words_of_a_text_that_they_were_not_made_of() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    words = set(re.findall(r"(?<= )[a-z]{2,9}(?=[ .,])", text))
    vocabulary = {"\u0120": 0, **{f"\u0120{word}": i + 1 for i, word in enumerate(sorted(words))}}
    assert len(words) > 100
    assert len(used_ids(vocabulary)) > 0.8 * len(words)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"draft_vocab": 0}, "draft_vocab must be a whole number of 1 or more, got 0"),
        ({"draft_vocab": -3}, "draft_vocab must be a whole number of 1 or more, got -3"),
        ({"draft_vocab": True}, "draft_vocab must be a whole number of 1 or more, got True"),
        ({"draft_vocab": 2.5}, "draft_vocab must be a whole number of 1 or more, got 2.5"),
        ({"draft_vocab": 99999}, "draft_vocab must be below 299, the number of tokens there are, got 99999"),
        ({"draft_vocab": 9, "method": "vanilla"}, "draft_vocab would do nothing"),
        ({"draft_vocab": 9, "method": "suffix"}, "draft_vocab would do nothing"),
        ({"draft_vocab": 9, "draft_address": "tcp://127.0.0.1:1"}, "draft_vocab would do nothing"),
    ],
)
def test_values_that_make_no_sense_are_one_line(pair, settings, said):
    draft = None if "draft_address" in settings else pair.draft
    with pytest.raises(SettingsError) as caught:
        LLM(pair.target, draft, **settings)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
