"""An inflated model is the same function with the size that was asked for."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from card.backends.transformers.modules import modules_of
from card.backends.transformers.walking import walked
from card.config import parse_parameter_count
from card.errors import ModelError, SettingsError, ShortageError
from card.models.facts import parameter_count
from card.models.inflation import (
    InflatedShape,
    choose_shape,
    count_parameters,
    inflate,
    inflate_to_shape,
    inflated_from,
)
from card.models.own.decoder_model import DecoderModel
from tests.tiny import CLEAR, tiny

V = 40


def tiny_llama(*, tied: bool = True, biases: bool = False, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    changes = {"tie_word_embeddings": tied, "attention_bias": biases, "mlp_bias": biases, "initializer_range": CLEAR}
    sizes = {"hidden_size": 24, "intermediate_size": 40, "head_dim": 8, "max_position_embeddings": 128}
    model = LlamaForCausalLM(LlamaConfig(**tiny(V, **sizes, **changes, **ends))).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model


def demo_like_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=4096,
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )


def decoder_of(model: LlamaForCausalLM) -> DecoderModel:
    """Return the decoder of our own pass that has the weights of a model."""
    decoder = walked(model)
    assert decoder is not None
    return decoder


def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    any_model: Any = model
    with torch.no_grad():
        return any_model(input_ids=ids).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        InflatedShape(copies=1, layers=2, mlp_width=40),
        InflatedShape(copies=1, layers=4, mlp_width=57),
        InflatedShape(copies=2, layers=2, mlp_width=64),
        InflatedShape(copies=3, layers=3, mlp_width=41),
        InflatedShape(copies=4, layers=5, mlp_width=160),
    ],
)
def test_logits_are_those_of_the_original(shape: InflatedShape, tied: bool) -> None:
    model = tiny_llama(tied=tied)
    inflated = inflate_to_shape(decoder_of(model), shape)
    modules = modules_of(inflated)
    ids = torch.randint(0, V, (3, 50), generator=torch.Generator().manual_seed(1))
    expected = logits_of(model, ids)
    got = logits_of(modules, ids)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert parameter_count(inflated) == count_parameters(model.config, shape)
    assert not any(parameter.is_meta for parameter in [*modules.parameters(), *modules.buffers()])


def test_a_model_with_biases_has_its_logits_in_float64_but_for_the_float32_norms_of_transformers() -> None:
    model = tiny_llama(biases=True)
    shape = InflatedShape(copies=3, layers=4, mlp_width=64)
    ids = torch.arange(30)[None] % V
    inflated = inflate_to_shape(decoder_of(model), shape)
    doubled = modules_of(inflated).to(torch.float64)  # type: ignore[arg-type]
    torch.testing.assert_close(logits_of(doubled, ids), logits_of(model.double(), ids), rtol=0, atol=1e-5)
    assert inflated.dtype == np.float32
    assert parameter_count(inflated) == count_parameters(model.config, shape)


@pytest.mark.parametrize("copies", [2, 3])
def test_greedy_text_is_identical_with_a_kv_cache(copies: int) -> None:
    model = tiny_llama()
    inflated = modules_of(inflate_to_shape(decoder_of(model), InflatedShape(copies=copies, layers=4, mlp_width=96)))
    prompt = torch.tensor([[3, 14, 15, 9, 2, 6]])
    wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False)
    got = inflated.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False)
    assert wanted.shape[1] == 66
    assert got.tolist() == wanted.tolist()


def test_the_original_is_left_alone_and_the_result_says_what_it_was() -> None:
    model = decoder_of(tiny_llama())
    before = copy.deepcopy(dict(model.weights))
    config_before = model.config.to_dict()
    inflated = inflate(model, 100_000)
    assert all(np.array_equal(before[name], weight) for name, weight in model.weights)  # type: ignore[arg-type]
    assert model.config.to_dict() == config_before
    assert inflated_from(model) is None
    assert inflated_from(inflated) == parameter_count(model)
    assert inflated_from(inflate(inflated, 200_000)) == parameter_count(model)
    modules = modules_of(inflated)
    assert not modules.training
    assert not any(parameter.requires_grad for parameter in modules.parameters())


def test_most_added_weights_of_added_layers_are_not_zero() -> None:
    inflated = inflate_to_shape(decoder_of(tiny_llama()), InflatedShape(copies=1, layers=3, mlp_width=64))
    added = {name: np.asarray(linear.weight) for name, linear in inflated.layers[2].linears.items()}
    assert np.count_nonzero(added["mlp.gate_proj"]) == added["mlp.gate_proj"].size
    assert not added["mlp.down_proj"].any()
    assert not added["self_attn.o_proj"].any()


@pytest.mark.parametrize("num_parameters", [7_000, 7_500, 10_000, 33_333, 250_000])
def test_the_parameter_count_is_what_was_asked_for(num_parameters: int) -> None:
    model = decoder_of(tiny_llama())
    assert parameter_count(model) < 12_000
    wanted = max(num_parameters, parameter_count(model))
    inflated = inflate(model, wanted)
    assert abs(parameter_count(inflated) - wanted) <= 0.01 * wanted


@pytest.mark.parametrize(
    ("text", "width", "depths"), [("90M", 768, {11, 12, 13}), ("300M", 1536, {10, 11, 12}), ("1B", 2304, range(10, 20))]
)
def test_the_demo_target_inflates_to_a_realistic_shape(text: str, width: int, depths: set[int]) -> None:
    wanted, config = parse_parameter_count(text), demo_like_config()
    shape = choose_shape(config, wanted)
    assert shape.copies * config.hidden_size == width
    assert shape.layers in depths
    assert shape.mlp_width % 64 == 0
    assert 2.5 <= shape.mlp_width / width <= 3.5
    assert math.isclose(count_parameters(config, shape), wanted, rel_tol=0.01)


def test_the_count_by_arithmetic_is_the_count_of_the_model() -> None:
    config = demo_like_config()
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert count_parameters(config, InflatedShape(copies=1, layers=8, mlp_width=1152)) == parameter_count(model)


def test_what_cannot_be_inflated_raises() -> None:
    model = decoder_of(tiny_llama())
    with pytest.raises(SettingsError, match="cannot be smaller than its original: asked for 10 parameters"):
        inflate(model, 10)
    with pytest.raises(SettingsError, match="2 or more layers"):
        inflate_to_shape(model, InflatedShape(copies=1, layers=1, mlp_width=40))
    other = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=8, n_layer=1, n_head=2, n_positions=16))
    with pytest.raises(ModelError, match="only Llama models can be inflated, got this gpt2 model"):
        inflate(other, 10**6)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("300M", 300_000_000),
        ("1.5B", 1_500_000_000),
        ("0.5b", 500_000_000),
        ("12 k", 12_000),
        ("90_000_000", 90_000_000),
        (7, 7),
        (" 16m ", 16_000_000),
    ],
)
def test_a_parameter_count_is_read(text: str | int, number: int) -> None:
    assert parse_parameter_count(text) == number


@pytest.mark.parametrize(
    "text", ["", "M", "-3M", "0", "3T", "1.2.3M", "large", -5, "nan", "0.0001K", "1e9", "9" * 400 + "B"]
)
def test_what_is_no_parameter_count_raises(text: str | int) -> None:
    with pytest.raises(SettingsError, match=r"300M, 1\.5B or 90000000"):
        parse_parameter_count(text)


def test_a_model_that_memory_cannot_hold_is_refused_before_it_is_made() -> None:
    with pytest.raises(ShortageError, match=r"1,000,000,000,000,000 parameters take .* were left; lower target_cost"):
        inflate(decoder_of(tiny_llama()), 10**15)
