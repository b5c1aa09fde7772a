"""H-RAD, the predictor of SpecBranch: how far a chain of drafted tokens will be accepted, from the target's features.

A small network looks at the target's hidden states where it chose its newest token, and at that token's embedding.
Source: Shen et al. 2025, "Speculative Decoding via Hybrid Drafting and Rollback-Aware Branch Parallelism",
arXiv:2506.01979 (hidden states of the last 4 layers; a network of widths 256 and 64).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from card.errors import ModelError
from card.models.demo import demo_hrad
from card.models.torch_runner import TorchRunner

ALL_REJECTED, UNDECIDED, ALL_ACCEPTED = CLASSES = (0, 1, 2)  # of a chain: none of it, some of it, all of it is accepted
DEMO_HRAD = "demo"  # name of the predictor for the demo pair
HIDDEN_WIDTHS = (256, 64)

_FORMAT = "card-hrad-1"
_STORED_DTYPE = torch.float16  # inputs are standardised, so no weight is far from 1

Layer = tuple[Tensor, Tensor]  # weight [out, in] and bias [out] of a linear layer, float32


@dataclass(frozen=True, slots=True, kw_only=True)
class HRadFacts:
    """What a predictor was trained on. The target's figures are those of the original of an inflated one."""

    num_layers: int  # last layers of the target whose hidden states are inputs
    hidden_size: int  # D of the target
    vocab_size: int
    num_parameters: int
    draft: str  # name of the draft model whose tokens were counted
    num_speculative_tokens: int  # K: length of the chains

    @property
    def num_inputs(self) -> int:
        """Hidden states and embedding together."""
        return (self.num_layers + 1) * self.hidden_size


class HRad:
    """Predicts how far a chain of drafted tokens will be accepted: ALL_REJECTED, UNDECIDED or ALL_ACCEPTED."""

    def __init__(self, facts: HRadFacts, layers: Sequence[Layer], mean: Tensor, std: Tensor) -> None:
        """Take over the network.

        Args:
            layers: linear layers with ReLU between them, from facts.num_inputs to three scores; float32, on the CPU.
                Weights are rounded to what a file holds, so that a saved predictor is the same one.
            mean, std: [facts.num_inputs] float32; inputs are standardised with them.
        Raises: ModelError if the shapes do not fit.
        """
        widths = [facts.num_inputs, *(len(bias) for _, bias in layers)]
        shapes = [list(weight.shape) for weight, _ in layers]
        wanted = [[out, into] for into, out in itertools.pairwise(widths)]
        if shapes != wanted or widths[-1] != len(CLASSES) or not len(mean) == len(std) == widths[0]:
            raise ModelError(
                f"layers of shapes {shapes} with {len(mean)} means and {len(std)} deviations are no network from"
                f" {widths[0]} inputs to {len(CLASSES)} scores"
            )
        self.facts = facts
        self._layers = [(weight.to(_STORED_DTYPE).float(), bias) for weight, bias in layers]
        self._mean, self._std = mean, std
        (weight, bias), *deeper = self._layers
        scaled = weight / std  # the inputs' mean and spread are part of the first layer from here on
        self._folded = [(scaled, bias - scaled @ mean), *deeper]
        self._runner: TorchRunner | None = None

    @classmethod
    def load(cls, path: str | Path) -> HRad:
        """Read a predictor that `save` wrote. Raises: ModelError, one line, if there is none."""
        if not Path(path).is_file():
            raise ModelError(f"there is no file {path}; train a predictor with card train hrad, or name {DEMO_HRAD}")
        try:
            with safe_open(str(path), "pt") as file:
                metadata: Mapping[str, str] = file.metadata() or {}
                tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read as safetensors: {error}; train it again") from error
        if metadata.get("format") != _FORMAT:
            raise ModelError(f"{path} is no H-RAD predictor ({_FORMAT}); give a file that card train hrad wrote")
        try:
            facts = HRadFacts(**{f.name: _parse(f.name, metadata[f.name]) for f in fields(HRadFacts)})
            num_layers = sum(name.endswith(".weight") for name in tensors)
            layers = [(tensors[f"{i}.weight"], tensors[f"{i}.bias"]) for i in range(num_layers)]
            return cls(facts, layers, tensors["mean"], tensors["std"])
        except (KeyError, TypeError, ValueError, ModelError) as error:
            raise ModelError(f"{path} is damaged: {error}; train it again") from error

    def save(self, path: str | Path) -> None:
        """Write the predictor as safetensors; weights in float16. Raises: ModelError if it cannot be written."""
        tensors = {"mean": self._mean, "std": self._std}
        for i, (weight, bias) in enumerate(self._layers):
            tensors[f"{i}.weight"], tensors[f"{i}.bias"] = weight.to(_STORED_DTYPE), bias
        metadata = {"format": _FORMAT, **{name: str(value) for name, value in asdict(self.facts).items()}}
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(path), metadata)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"the predictor cannot be written to {path}: {error}") from error

    def attach(self, runner: TorchRunner) -> None:
        """Let ``runner`` keep the features that `classify` needs, and take embeddings from it.

        Raises: ModelError if the predictor was trained for another target.
        """
        facts = self.facts
        trained = (facts.num_parameters, facts.vocab_size, facts.hidden_size)
        given = (runner.original.num_parameters, runner.vocab_size, runner.original.hidden_size)
        if trained != given:
            raise ModelError(
                f"the predictor was trained for {_describe(*trained)}, not for this one, {_describe(*given)};"
                " train one for it with card train hrad"
            )
        runner.keep_features(facts.num_layers)
        self._runner = runner

    def classify(self, features_row: Tensor, new_token_id: int) -> int:
        """Return the class of the chain that will be drafted after a new token.

        Args:
            features_row: [num_layers * D] floating, one row of `TorchRunner.features`: the one whose logits gave the
                token.
        """
        assert self._runner is not None, "attach the predictor to the target first"
        return self.predict(torch.cat((features_row, self._runner.embedding(new_token_id))))

    def predict(self, features: Tensor) -> int:
        """Return the class for hidden states and embedding, [facts.num_inputs] floating, any device."""
        with torch.inference_mode():
            values = features.to(device="cpu", dtype=torch.float32)
            *hidden, (weight, bias) = self._folded
            for hidden_weight, hidden_bias in hidden:  # matrix times vector is faster than a batch of one
                values = torch.addmv(hidden_bias, hidden_weight, values).relu_()
            return int(torch.addmv(bias, weight, values).argmax())

    def predict_all(self, features: Tensor) -> Tensor:
        """Return the classes, [N] int64, for many rows at once, [N, facts.num_inputs] float32 on the CPU."""
        with torch.inference_mode():
            values = features
            *hidden, (weight, bias) = self._folded
            for hidden_weight, hidden_bias in hidden:
                values = functional.linear(values, hidden_weight, hidden_bias).relu_()
            return functional.linear(values, weight, bias).argmax(-1)


def load_hrad(path: str | Path, runner: TorchRunner) -> HRad:
    """Return a predictor for the target that ``runner`` runs; it keeps features from now on.

    Args:
        path: a file, or "demo" for the one that is shipped for the demo pair.
    Raises: ModelError if there is none, or it was trained for another target.
    """
    hrad = HRad.load(demo_hrad() if str(path) == DEMO_HRAD else path)
    hrad.attach(runner)
    return hrad


def target_facts(runner: TorchRunner, *, num_layers: int, draft: str, num_speculative_tokens: int) -> HRadFacts:
    """Return the facts of a predictor that is to be trained for the target of ``runner``."""
    return HRadFacts(
        num_layers=num_layers,
        hidden_size=runner.original.hidden_size,
        vocab_size=runner.vocab_size,
        num_parameters=runner.original.num_parameters,
        draft=draft,
        num_speculative_tokens=num_speculative_tokens,
    )


def _parse(name: str, text: str) -> Any:
    return text if name == "draft" else int(text)


def _describe(num_parameters: int, vocab_size: int, hidden_size: int) -> str:
    return f"a target of {num_parameters:,} parameters, {vocab_size} tokens and width {hidden_size}"
