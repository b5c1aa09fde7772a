"""A draft model with a part of the vocabulary proposes nothing else, and changes no text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from card.api.llm import LLM
from card.assembly import drafters
from card.backends.transformers.loading import load_model
from card.config import SamplingParams
from card.config.registry import methods
from card.drafting.drafted import Drafting
from card.drafting.messages import Layer
from card.errors import SettingsError
from card.kernels.int8_linear import why_not_int8
from card.models import draft_vocab
from card.models.draft_vocab import drafted_ids, first_used, restrict_head, usual_ids
from card.models.drafter_facts import gains_by_trimming, head_size, pass_bytes
from card.models.loading import load_decoder, load_tokenizer
from card.models.own import output_head
from card.models.own.decoder_model import DecoderModel
from card.models.own.output_head import OutputHead
from card.models.protocol import Extension
from card.models.runners import plain_runner
from card.models.token_ranks import used_ids
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


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The tokens that trimmed heads in this process were given, in measured passes too."""
    tokens, read = set[int](), OutputHead.read

    def noted(self: OutputHead, token_ids: list[int]) -> None:
        if self.can_join:
            tokens.update(token_ids)
        read(self, token_ids)

    monkeypatch.setattr(OutputHead, "read", noted)
    return tokens


READ = range(3, 20)


def logits(model: object) -> torch.Tensor:
    runner = plain_runner(model, max_model_len=64)  # type: ignore[arg-type]
    return torch.from_numpy(runner.forward([Extension(runner.open(), list(READ), range(-1, 16))])[0])


@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS])
@pytest.mark.parametrize("method", DRAFTING)
def test_every_method_writes_the_text_of_plain_decoding(pair, expected, drafted, joined, method, num_tokens):
    options = {"dtype": "float32", "placement": "inline", "policy": "fixed", "draft_vocab": num_tokens}
    with LLM(pair.target, pair.draft, method=method, **options) as llm:
        allowed = {*drafted_ids(llm.host.tokenizer, num_tokens), 0, 1}
        kinds = [params for params in (GREEDY, SAMPLED, ENDING) for _ in PROMPTS]
        outputs = [one.outputs[0].token_ids for one in llm.generate(PROMPTS * 3, kinds)]
        assert outputs == [*expected(GREEDY), *expected(SAMPLED), *expected(ENDING)]
        assert drafted
        assert drafted <= allowed | joined


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


@pytest.fixture(params=["float32", "int8"])
def whole(request: pytest.FixtureRequest, pair: Pair) -> DecoderModel:
    """A draft model with floats, and as integers."""
    if request.param == "int8" and (reason := why_not_int8()):
        pytest.skip(reason)
    model = load_decoder(pair.draft, dtype="float32")
    assert isinstance(model, DecoderModel)
    model.computes_int8 = request.param == "int8"
    return model


def test_tokens_that_were_read_join_a_head_with_the_logits_of_the_whole_one(whole: DecoderModel) -> None:
    expected, found = logits(whole), logits(restrict_head(whole, [100, 200]))
    there = [100, 200, *READ]
    assert torch.equal(found[:, there], expected[:, there])
    assert torch.isfinite(found).sum() == len(found) * len(there)


def test_the_first_that_joined_makes_way(whole: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_head, "NUM_JOINING", 16)
    expected = logits(whole)
    runner = plain_runner(restrict_head(whole, [100, 200]), max_model_len=64)

    def there(*token_ids: int) -> set[int]:
        (found,) = runner.forward([Extension(runner.open(), token_ids, range(-1, len(token_ids) - 1))])
        return set(np.flatnonzero(np.isfinite(found[-1])).tolist())

    assert there(*READ) == {100, 200, *range(4, 20)}, "17 were read, and there is room for 16"
    assert there(100, 10, 4) == {100, 200, *range(4, 20)}, "none is new"
    assert there(30) == {100, 200, *range(5, 20), 30}
    (again,) = runner.forward([Extension(runner.open(), list(READ), range(-1, 16))])
    assert there(40, 41) == {100, 200, 3, 4, 30, 40, 41, *range(9, 20)}
    known = np.isfinite(again)
    np.testing.assert_array_equal(again[known], expected.numpy()[known])


@pytest.mark.parametrize("placement", ["inline", "process"])
def test_a_draft_model_whose_head_is_large_drafts_with_what_texts_use(pair, expected, monkeypatch, placement):
    monkeypatch.setattr(draft_vocab, "USUAL_TOKENS", NUM_TOKENS - 30)
    parts = list[tuple[int, bool]]()

    def noted(whole: DecoderModel, part: DecoderModel, target_bytes: int) -> bool:
        parts.append((head_size(part)[0], gains_by_trimming(whole, part, target_bytes)))
        return parts[-1][1]

    monkeypatch.setattr(drafters, "gains_by_trimming", noted)
    with LLM(pair.target, pair.draft, method="sps", placement=placement, dtype="float32", policy="fixed") as llm:
        answers = llm.generate(PROMPTS, GREEDY)
        tokenizer = llm.host.tokenizer
    assert [one.outputs[0].token_ids for one in answers] == expected(GREEDY)
    assert all(one.stats.drafter_passes for one in answers)
    if placement == "inline":
        assert parts == [(len({*usual_ids(tokenizer), 0, 1}), True)]


def test_a_step_that_costs_little_or_a_small_part_of_one_is_not_trimmed(whole: DecoderModel) -> None:
    part = restrict_head(whole, range(100))
    num_bytes = pass_bytes(whole)
    assert gains_by_trimming(whole, part, 4 * num_bytes)
    assert not gains_by_trimming(whole, part, 1000 * num_bytes), "what is lost costs more than a step in all"
    assert not gains_by_trimming(whole, whole, 4 * num_bytes)
    layer = whole.layers[0]
    whole.layers = [layer] * 20
    assert 4 * head_size(whole)[1] < pass_bytes(whole)
    assert not gains_by_trimming(whole, part, 4 * pass_bytes(whole)), "its head is less than a quarter of it"


def test_a_vocabulary_that_was_not_counted_stays_whole(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    monkeypatch.setattr(draft_vocab, "USUAL_TOKENS", NUM_TOKENS - 30)
    tokenizer = load_tokenizer(pair.target)
    kept = usual_ids(tokenizer)
    assert kept is not None and {*used_ids(tokenizer.get_vocab())[: NUM_TOKENS - 30]} < {*kept}
    counted = [NUM_TOKENS - 40]
    monkeypatch.setattr(draft_vocab, "used_ids", lambda vocabulary: used_ids(vocabulary)[: counted[0]])
    filled = usual_ids(tokenizer)
    assert filled is not None and len(filled) >= NUM_TOKENS - 30, "the first ids make up what was not counted"
    counted[0] = NUM_TOKENS // 2
    assert usual_ids(tokenizer) is None, "too few of its tokens were counted"
    monkeypatch.undo()
    assert usual_ids(tokenizer) is None, "it has hardly more tokens"


def test_all_tokens_can_be_asked_for(pair, expected, drafted):
    with LLM(pair.target, pair.draft, method="sps", placement="inline", dtype="float32", draft_vocab=299) as llm:
        assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY)] == expected(GREEDY)
        assert drafted_ids(llm.host.tokenizer, 299) is None


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
        ({"draft_vocab": 99999}, "draft_vocab must be 1 to 299, the number of tokens there are, got 99999"),
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
