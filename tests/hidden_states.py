"""What the tests of features share: one small Llama run in every way, and its hidden states by transformers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from card.backends.cuda.bucketed import BucketedRunner
from card.backends.transformers.modules import modules_of
from card.backends.transformers.walking import walked
from card.models.inflation import InflatedShape, inflate_to_shape
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from tests.tiny import NO_ENDS, tiny_llama

VOCAB_SIZE = 61
HIDDEN = 32
MAX_MODEL_LEN = 64
NUM_LAYERS = 4
CHAIN = (3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32)
INFLATED = InflatedShape(copies=2, layers=6, mlp_width=96)
KINDS = ("own pass", "generic", "bucketed", "inflated", "inflated generic", "inflated twice", "inflated bucketed")


def make_model(*, seed: int = 0, noise: float = 0.0) -> LlamaForCausalLM:
    """Return a small random Llama of four layers; ``noise`` moves its weights by so many times their spread."""
    sizes = {"num_hidden_layers": NUM_LAYERS, "max_position_embeddings": MAX_MODEL_LEN, **NO_ENDS}
    model = tiny_llama(VOCAB_SIZE, seed=seed, noise=noise, hidden_size=HIDDEN, **sizes)
    torch.manual_seed(seed)
    with torch.no_grad():
        model.model.norm.weight.normal_(1.0, 0.3)  # so that a state before the final norm is not one after it
    return model.train(False)


def make_runner(kind: str) -> RowRunner:
    """Return one of the ways in which the same model can be run."""
    model = walked(make_model())
    assert model is not None
    model.computes_int8 = kind == "int8"
    if "inflated" in kind:
        model = inflate_to_shape(model, INFLATED)
    if "twice" in kind:
        model = inflate_to_shape(model, InflatedShape(copies=3, layers=7, mlp_width=100))
    if "bucketed" in kind:
        return BucketedRunner(modules_of(model), max_model_len=MAX_MODEL_LEN)
    if "generic" in kind:
        return plain_runner(modules_of(model), max_model_len=MAX_MODEL_LEN, own_pass=False)
    return plain_runner(model, max_model_len=MAX_MODEL_LEN)


def own_states(ids: Sequence[int], layers: Sequence[int], model: PreTrainedModel | None = None) -> Tensor:
    """Return [T, layers * D]: the hidden states that transformers itself gives for a chain."""
    with torch.no_grad():
        states = (model or make_model())(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], -1)


def own_features(ids: Sequence[int], num_layers: int, model: PreTrainedModel | None = None) -> Tensor:
    """Return [T, num_layers * D]: the last of these states."""
    return own_states(ids, range(-num_layers, 0), model)


def assert_same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(got).clone(), expected, atol=2e-4, rtol=2e-4)


def chain(slot: int, ids: Sequence[int], start: int = 0, first: int = 0) -> Extension:
    return Extension(slot, ids, range(start - 1, start - 1 + len(ids)), first)
