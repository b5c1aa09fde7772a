"""Models whose rotary frequencies depend on the length of the text: each text is transformers' own for it alone.

transformers' `generate` without a cache is the truth: there every token comes from one pass over the whole text.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from card.api.async_llm import AsyncLLM
from card.api.llm import LLM
from card.backends.transformers.generic import GenericDecoder
from card.config import SamplingParams
from card.errors import ModelError
from card.models.protocol import Extension
from card.models.runners import plain_runner
from tests.models.test_torch_runner import CASES, SIZES, assert_same, make_model, runner_of, tokens_of
from tests.pair import make_tokenizer
from tests.server.running import serving

SHORT_LEN = 32  # tokens of the original context
MAX_LEN = 160
VOCAB_SIZE = 320
FACTORS: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": MAX_LEN / SHORT_LEN,
    "short_factor": [1.0 + 0.1 * i for i in range(4)],
    "long_factor": [1.5 + 2.0 * i for i in range(4)],
    "original_max_position_embeddings": SHORT_LEN,
}
MSCALES = {"short_mscale": 1.1, "long_mscale": 3.0}
LONG_ROPE: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", {"original_max_position_embeddings": SHORT_LEN}),
    "llama": ("Llama", {}),
    "phimoe": ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
WAYS: dict[str, dict[str, Any]] = {
    "vanilla": {"method": "vanilla"},
    "sps": {"method": "sps", "placement": "inline", "num_speculative_tokens": 6},
    "card": {"method": "card", "placement": "inline", "lead": 12},
    "card as a tree": {"method": "card", "placement": "inline", "verify": "tree", "beam_width": 4},
}
PAIRED = [("phi3", way) for way in WAYS] + [(name, way) for name in ("llama", "phimoe") for way in ("vanilla", "card")]
ALONE = [pytest.param(*one, marks=() if one in PAIRED[::3] else pytest.mark.slow) for one in PAIRED]
LENGTHS = (5, 20, 28, 32, 33, 50, 100)  # of prompts: their texts stay short, grow long, or are long from the start
NUM_NEW = 24

pytestmark = pytest.mark.timeout(180)


@functools.cache
def long_rope_model(name: str, noise: float = 0.0) -> PreTrainedModel:
    """Return a tiny random model; ``noise`` changes its weights by so many times their own spread."""
    family, changes = LONG_ROPE[name]
    rope = {**FACTORS, **(MSCALES if name == "phimoe" else {})}
    sizes = {**SIZES, "vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_LEN, "num_hidden_layers": 2}
    config = getattr(transformers, f"{family}Config")(**{**sizes, "rope_parameters": rope, **changes})
    torch.manual_seed(1)
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * weight.std() * torch.randn_like(weight))
    return model


def prompt_of(length: int) -> list[int]:
    return torch.randint(2, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@functools.cache
def expected(name: str, length: int, num_new: int = NUM_NEW) -> list[int]:
    """Return what transformers writes after the prompt alone, without a cache."""
    ids = torch.tensor([prompt_of(length)])
    model = copy.deepcopy(long_rope_model(name))
    options = {"do_sample": False, "max_new_tokens": num_new, "use_cache": False}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, length:].tolist()


def params_of(num_new: int = NUM_NEW) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_new, seed=0, ignore_eos=True)


def written(llm: LLM, *lengths: int, num_new: int = NUM_NEW) -> list[list[int]]:
    """Return the tokens after the prompts of these lengths, which are asked for at once."""
    results = llm.generate([prompt_of(length) for length in lengths], params_of(num_new))
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.fixture(scope="module")
def make() -> Iterator[Callable[..., LLM]]:
    """Make LLMs, each kind of them once."""
    made: dict[tuple[str, str, int], LLM] = {}

    def make_once(name: str, way: str, prefill_chunk: int = 64) -> LLM:
        key = name, way, prefill_chunk
        if key not in made:
            draft = None if way == "vanilla" else copy.deepcopy(long_rope_model(name, 0.05))
            made[key] = LLM(
                copy.deepcopy(long_rope_model(name)),
                draft,
                tokenizer=make_tokenizer(VOCAB_SIZE),
                policy="fixed",
                prefill_chunk=prefill_chunk,
                **WAYS[way],
            )
        return made[key]

    yield make_once
    for llm in made.values():
        llm.close()


# ---- whole texts ----------------------------------------------------------------------------------------------------


def test_the_two_factors_give_different_texts() -> None:
    """Without this the tests below would show nothing."""
    for name in LONG_ROPE:
        model = copy.deepcopy(long_rope_model(name))
        model.config.original_max_position_embeddings = MAX_LEN  # for those that read it anew in each pass
        model.config.rope_parameters["original_max_position_embeddings"] = MAX_LEN
        ids = torch.tensor([prompt_of(50)])
        options = {"do_sample": False, "max_new_tokens": NUM_NEW, "use_cache": False}
        assert model.generate(ids, **options)[0, 50:].tolist() != expected(name, 50)


@pytest.mark.parametrize("name", ["phi3", "phimoe"])
def test_the_truth_is_what_transformers_writes_with_its_cache_where_it_reads_a_text_once_more(name: str) -> None:
    ids = torch.tensor([prompt_of(20)])
    cached = copy.deepcopy(long_rope_model(name)).generate(ids, do_sample=False, max_new_tokens=NUM_NEW)
    assert cached[0, 20:].tolist() == expected(name, 20)


@pytest.mark.parametrize(("name", "way"), ALONE)
def test_a_text_alone_is_that_of_transformers_at_every_length(make: Callable[..., LLM], name: str, way: str) -> None:
    llm = make(name, way)
    for length in LENGTHS:
        llm.reset_prefix_cache()
        assert written(llm, length) == [expected(name, length)], length


@pytest.mark.parametrize(("name", "way"), PAIRED)
def test_texts_of_all_lengths_beside_each_other_stay_what_they_are_alone(
    make: Callable[..., LLM], name: str, way: str
) -> None:
    llm = make(name, way)
    for lengths in (LENGTHS, LENGTHS[::-1]):
        llm.reset_prefix_cache()
        assert written(llm, *lengths) == [expected(name, length) for length in lengths]


@pytest.mark.parametrize("way", ["vanilla", "card"])
def test_a_text_depends_neither_on_chunks_nor_on_its_limit(make: Callable[..., LLM], way: str) -> None:
    llm = make("phi3", way, prefill_chunk=7)
    assert written(llm, *LENGTHS) == [expected("phi3", length) for length in LENGTHS]
    for num_new in (1, 5, 12, 60):
        assert written(llm, 20, num_new=num_new) == [expected("phi3", 20, 60)[:num_new]]


def test_a_sampled_text_with_penalties_is_the_same_with_drafts(make: Callable[..., LLM]) -> None:
    params = params_of(40).replace(temperature=0.9, seed=7, repetition_penalty=1.2, top_p=0.95)
    prompts = [prompt_of(length) for length in (5, 28, 100)]
    plain, drafted = (make("phi3", way).generate(prompts, params) for way in ("vanilla", "card as a tree"))
    assert [result.outputs for result in drafted] == [result.outputs for result in plain]


def test_drafts_are_accepted_on_both_sides_of_the_switch(make: Callable[..., LLM]) -> None:
    llm = make("phi3", "card")
    for length in (5, 28, 100):
        assert llm.generate([prompt_of(length)], params_of())[0].stats.accepted_tokens > 0


@pytest.mark.parametrize("way", ["vanilla", "card"])
def test_rows_are_reused_among_short_texts_and_among_long_ones_only(make: Callable[..., LLM], way: str) -> None:
    llm = make("phi3", way)
    base = prompt_of(100)
    alone = copy.deepcopy(long_rope_model("phi3"))
    for order in ((20, 90, 24, 95, 25), (90, 20, 95, 24, 96)):
        llm.reset_prefix_cache()
        reused = []
        for length in order:
            ids = torch.tensor([base[:length]])
            truth = alone.generate(ids, do_sample=False, max_new_tokens=4, use_cache=False)[0, length:].tolist()
            result = llm.generate([base[:length]], params_of(4))[0]
            assert list(result.outputs[0].token_ids) == truth, (order, length)
            reused.append(result.stats.reused_prompt_tokens)
        assert reused[:2] == [0, 0]
        assert all(num_reused >= 20 for num_reused in reused[2:])


@pytest.mark.parametrize("chunk", [7, 64])
def test_the_scores_of_a_prompt_are_those_of_one_pass_over_all_of_it(chunk: int) -> None:
    model = copy.deepcopy(long_rope_model("phi3"))

    async def scores_of(length: int) -> list[float]:
        settings = {"method": "vanilla", "prefill_chunk": chunk}
        async with AsyncLLM(copy.deepcopy(model), tokenizer=make_tokenizer(VOCAB_SIZE), **settings) as llm:
            return [score.logprob for score in await llm.score(prompt_of(length))]

    for length in (30, 100):
        ids = torch.tensor(prompt_of(length))
        with torch.no_grad():
            logprobs = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
        truth = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
        assert_same(torch.tensor(asyncio.run(scores_of(length))), truth)


def test_a_server_gives_a_short_text_beside_a_long_one_as_if_it_were_alone(make: Callable[..., LLM]) -> None:
    lengths = 5, 100, 20
    results = make("phi3", "vanilla").generate([prompt_of(length) for length in lengths], params_of())
    assert [list(result.outputs[0].token_ids) for result in results] == [expected("phi3", length) for length in lengths]
    llm = AsyncLLM(copy.deepcopy(long_rope_model("phi3")), tokenizer=make_tokenizer(VOCAB_SIZE), method="vanilla")
    with serving(llm) as server:
        fields = {"temperature": 0, "max_tokens": NUM_NEW, "ignore_eos": True}
        choices = server.complete(prompt=[prompt_of(length) for length in lengths], **fields)["choices"]
    assert [choice["text"] for choice in choices] == [result.outputs[0].text for result in results]


# ---- the runner -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_model_len", [SHORT_LEN, SHORT_LEN + 1])
@pytest.mark.parametrize("own_pass", [True, False])
def test_rows_change_with_the_length_only_where_a_text_can_be_long(max_model_len: int, own_pass: bool) -> None:
    runner = plain_runner(copy.deepcopy(long_rope_model("llama")), max_model_len=max_model_len, own_pass=own_pass)
    assert (runner.switch_len, runner.has_own_pass) == (None if max_model_len == SHORT_LEN else SHORT_LEN, own_pass)
    slot, ids = runner.open(), prompt_of(SHORT_LEN)
    with torch.no_grad():
        truth = copy.deepcopy(long_rope_model("llama"))(torch.tensor([ids]), use_cache=False).logits[0]
    assert_same(runner.forward([Extension(slot, ids, range(-1, len(ids) - 1))])[0], truth)


def test_a_model_keeps_its_own_rule_for_other_uses() -> None:
    model = copy.deepcopy(long_rope_model("phi3"))
    runner = plain_runner(model, max_model_len=MAX_LEN, own_pass=False)
    slots = runner.open(), runner.open()
    runner.make_long(slots[1])
    runner.forward([Extension(slot, [3, 4, 5], [-1, 0, 1]) for slot in slots])
    assert all("forward" not in vars(module) for module in model.modules())
    runner.release()
    ids = torch.tensor([prompt_of(50)])
    assert model.generate(ids, do_sample=False, max_new_tokens=NUM_NEW)[0, 50:].tolist() == expected("phi3", 50)


def test_dynamic_scaling_never_sets_in_within_the_context_that_a_runner_has() -> None:
    config = transformers.LlamaConfig(
        **{**SIZES, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = tokens_of(range(64), 5)
    with torch.no_grad():
        truth = copy.deepcopy(model)(torch.tensor([ids]), use_cache=False).logits[0]
        model(torch.tensor([ids * 2]), use_cache=False)  # now it is scaled, until it is shown a short text
    for way in ("modules", "own pass", "walked by torch"):
        runner = runner_of(model, way, max_model_len=64)
        short, long = runner.open(), runner.open()
        parts = [Extension(short, ids[:5], range(-1, 4)), Extension(long, ids, range(-1, 63))]
        for got, length in zip(runner.forward(parts), (5, 64), strict=True):
            assert_same(got, truth[:length])
        runner.release()
    with pytest.raises(ModelError, match="max_model_len must be 1 to 64"):
        plain_runner(model, max_model_len=65)


# ---- rows and their neighbours --------------------------------------------------------------------------------------

EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
}


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    if name not in EXPERTS:
        return make_model(name)
    torch.manual_seed(2)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **EXPERTS[name]})
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    return model


@pytest.mark.parametrize(("name", "way"), [*CASES, *((name, "modules") for name in EXPERTS)])
def test_a_short_text_beside_a_long_one_gets_the_logits_that_it_gets_alone(name: str, way: str) -> None:
    model = copy.deepcopy(model_of(name))
    runner = runner_of(model, way, max_model_len=64, max_tree_rows=8)
    texts = [tokens_of(range(length), length) for length in (5, 60)]
    alone = []
    for ids in texts:
        slot = runner.open()
        alone.append(runner.forward([Extension(slot, ids, range(-1, len(ids) - 1))])[0])
        alone.append(runner.forward([Extension(slot, [7, 8], [len(ids) - 1] * 2)])[0])
        runner.close(slot)
    for order in ((0, 1), (1, 0)):
        slots = {which: runner.open() for which in order}
        prompts = [Extension(slots[i], texts[i], range(-1, len(texts[i]) - 1)) for i in order]
        forks = [Extension(slots[i], [7, 8], [len(texts[i]) - 1] * 2) for i in order]
        for step, parts in enumerate((prompts, forks)):
            for which, got in zip(order, runner.forward(parts), strict=True):
                assert_same(got, alone[2 * which + step])
    runner.release()


def test_a_model_that_makes_its_own_mask_is_refused() -> None:
    sizes = {key: value for key, value in SIZES.items() if key not in ("bos_token_id", "eos_token_id")}
    model = transformers.DogeForCausalLM(transformers.DogeConfig(**sizes))
    with pytest.raises(ModelError, match="a mask that it makes itself"):
        GenericDecoder(model, 16)


def test_layers_that_switch_at_different_lengths_are_refused() -> None:
    model = copy.deepcopy(long_rope_model("llama"))
    model.config.rope_parameters = {
        "full_attention": dict(FACTORS),
        "sliding_attention": {**FACTORS, "original_max_position_embeddings": 2 * SHORT_LEN},
    }
    with pytest.raises(ModelError, match=r"\[32, 64\]"):
        plain_runner(model, max_model_len=MAX_LEN)
