"""The layer that reads a target's hidden states: what it reads, what it adds, and which targets it is refused for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from card.backends.transformers.arrays import as_array, as_tensor
from card.errors import ModelError
from card.family.pard.state_input import SCALE, StateInput, read_layers
from card.kernels.int8_linear import why_not_int8
from card.models.loading import load_decoder
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from tests.pair import Pair
from tests.tiny import tiny_llama

VOCAB = 30


def runner_of(**changes: Any) -> RowRunner:
    return plain_runner(tiny_llama(changes.pop("vocab_size", VOCAB), **changes), max_model_len=64)


@given(st.integers(1, 200))
def test_the_layers_read_are_there_and_those_published_where_there_are_enough(num_layers: int) -> None:
    layers = read_layers(num_layers)
    assert layers[0] == -1 and len(set(layers)) == len(layers) <= 4
    assert all(-num_layers <= layer <= -1 for layer in layers)
    if num_layers >= 24:
        assert layers == (-1, -8, -16, -24)
    elif num_layers >= 6:
        assert len(layers) == 4


def test_a_target_of_32_layers_is_read_as_published_and_one_of_8_in_quarters() -> None:
    assert read_layers(32) == (-1, -8, -16, -24)
    assert read_layers(8) == (-1, -2, -4, -6)


def test_what_is_added_does_not_depend_on_the_size_of_a_layers_states() -> None:
    layer = StateInput.for_target(tiny_llama(VOCAB), 16).requires_grad_(False)
    states = torch.randn(5, 2 * 32)
    louder = torch.cat([100 * states[:, :32], 0.1 * states[:, 32:]], -1)
    torch.testing.assert_close(layer(states), layer(louder), atol=1e-4, rtol=1e-3)
    assert float(layer(states).pow(2).mean().sqrt()) == pytest.approx(SCALE, rel=0.5)


def test_a_saved_layer_is_the_same_one_up_to_float16(tmp_path: Path) -> None:
    layer = StateInput.for_target(tiny_llama(VOCAB), 16, seed=4).requires_grad_(False)
    layer.save(tmp_path / "layer")
    again = StateInput.load(tmp_path / "layer")
    assert (again.facts, again.layers) == (layer.facts, layer.layers)
    states = torch.randn(3, 2 * 32)
    torch.testing.assert_close(again(states), layer(states), atol=1e-4, rtol=1e-2)
    again.check(runner_of(), 16, "it")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 31}, "its vocabulary has 30 tokens, this one 31"),
        ({"hidden_size": 64}, "its target has width 32, this one 64"),
        ({"num_hidden_layers": 3}, "its target has 2 layers, this one 3"),
        ({"seed": 9}, "the embeddings of its target are others"),
    ],
)
def test_another_target_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    layer = StateInput.for_target(tiny_llama(VOCAB), 16)
    with pytest.raises(ModelError, match=f"FILE was trained for another target: {said}"):
        layer.check(runner_of(**changes), 16, "FILE")


def test_a_target_with_the_same_embeddings_and_more_weights_is_refused_by_name() -> None:
    model, larger = tiny_llama(VOCAB), tiny_llama(VOCAB, intermediate_size=64)
    larger.get_input_embeddings().weight.data.copy_(model.get_input_embeddings().weight)
    with pytest.raises(ModelError, match=r"its target has [\d,]+ parameters, this one"):
        StateInput.for_target(model, 16).check(plain_runner(larger, max_model_len=64), 16, "FILE")


def test_a_drafter_of_another_width_is_refused_by_name() -> None:
    layer = StateInput.for_target(tiny_llama(VOCAB), 16)
    with pytest.raises(ModelError, match="FILE was trained for another drafter: it has width 16, this one 24"):
        layer.check(runner_of(), 24, "FILE")


@pytest.mark.parametrize("cut", [-50, 0, 12])
def test_a_file_that_is_cut_off_is_refused_by_name(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "layer"
    StateInput.for_target(tiny_llama(VOCAB), 16).save(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelError, match="layer is cut off or damaged"):
        StateInput.load(path)
    with pytest.raises(ModelError, match=r"there is no file .*none"):
        StateInput.load(tmp_path / "none")


# ---- passes ---------------------------------------------------------------------------------------------------------


def passed_together(runner: RowRunner, first: list[int], second: list[int], added: torch.Tensor) -> list[torch.Tensor]:
    """Run two texts in one pass; the second one's first tokens have something added to their embeddings."""
    extensions = [Extension.of_text(runner.open(), ids, first_logits=0) for ids in (first, second)]
    inputs = runner.embeddings(second[: len(added)]) + as_array(added)
    extensions[1] = replace(extensions[1], inputs=inputs)
    return [as_tensor(logits) for logits in runner.forward(extensions)]


@pytest.mark.parametrize("own_pass", [True, False])
def test_a_pass_takes_the_inputs_that_it_is_given_and_no_other_text_does(own_pass: bool) -> None:
    model, texts = tiny_llama(VOCAB), ([3, 1, 4, 1], [5, 9, 2, 6, 5])
    added = torch.randn(3, 32)
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(torch.tensor([texts[1]]))
        embeddings[0, :3] += added
        expected = [model(torch.tensor([texts[0]])).logits[0], model(inputs_embeds=embeddings).logits[0]]
    runner = plain_runner(model, max_model_len=64, own_pass=own_pass)
    for found, wanted in zip(passed_together(runner, *texts, added), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.slow  # integer kernels of these sizes are compiled
def test_integer_passes_take_them_too(pair: Pair) -> None:
    if why_not_int8() is not None:
        pytest.skip(str(why_not_int8()))
    texts, added = ([3, 1, 4, 1], [5, 9, 2, 6, 5]), torch.randn(3, 32)
    logits = {}
    for dtype in ("float32", "int8"):
        runner = plain_runner(load_decoder(pair.draft, dtype=dtype), max_model_len=64)
        logits[dtype] = passed_together(runner, *texts, added)
    for found, wanted in zip(logits["int8"], logits["float32"], strict=True):
        assert (found - wanted).abs().mean() < 0.05 * wanted.std()
