"""One draft step as tensor operations of fixed shape: run the newest layer, and replace it by its best children.

The state is on the device. A step reads nothing back and its operations depend on no value. So on CUDA it is captured
once and replayed, and steps can follow each other without the host. Results for the host are copied into pinned memory
asynchronously.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from card.backends.cuda.graphs import FetchedTensor, StagedTensor
from card.backends.cuda.recorded_filters import filter_on_device
from card.backends.cuda.static_cache import StaticDecoder
from card.config import SamplingRule
from card.models.rows.row_tree import BoolArray
from card.tree.noise import GumbelNoise
from card.tree.sampling import CHOICE_SHARPNESS

_NO_CHILD = -1  # entry of an empty place of the next layer


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes that are fixed in a recorded step; all else is in its tensors."""

    num_places: int  # most nodes of a layer, K below
    branch: int  # children considered per node, b below
    span: int  # rows of the desk in attention
    rule: SamplingRule  # with seed 0: noise is a tensor
    num_noise_rows: int  # positions with noise, 0 without coupled noise


@dataclass(frozen=True, slots=True)
class NewestLayer:
    """The nodes that the next step runs, F of at most K, best path score first."""

    token_ids: npt.NDArray[np.int64]  # [F]
    positions: npt.NDArray[np.int64]  # [F]
    visible: BoolArray  # [F, S + F]: rows of the desk that each sees; its own is S + its index
    path_logprobs: npt.NDArray[np.float64]  # [F]


@dataclass(frozen=True, slots=True)
class DraftStepResult:
    """Children of a layer's nodes, made by a step; rows beyond the layer's nodes have no meaning."""

    tokens: list[list[int]]  # [K][b] the best children of each node
    logprobs: list[list[float]]  # [K][b]
    chosen: list[tuple[int, int]]  # the next layer: (place of the parent, token), best path score first


class BeamStep:
    """A recorded draft step with its state. Calls follow each other on one stream."""

    def __init__(self, static: StaticDecoder, shape: StepShape) -> None:
        """Record it. Rows on the desk are garbage afterwards."""
        self.shape = shape
        self._static = static
        num_places, span, device = shape.num_places, shape.span, static.device
        self._nodes = StagedTensor((2, num_places), torch.int64, device)  # tokens and positions
        self._visible = StagedTensor((num_places, span), torch.bool, device)  # without the nodes' own rows
        self._scores = StagedTensor((num_places,), torch.float64, device)  # of the paths; -inf: no node
        self._numbers = StagedTensor((2,), torch.int64, device)  # row of the first node, nodes wanted in a layer
        self._floor = StagedTensor((1,), torch.float64, device)  # least path score of a new node
        self._noise = torch.zeros((shape.num_noise_rows, static.vocab_size), device=device)
        self._noise_held: dict[int, tuple[int, int]] = {}  # row -> (seed, position)
        self._places = torch.arange(num_places, device=device)
        self._columns = torch.arange(span, device=device)
        self._branch = min(shape.branch, static.vocab_size)
        self._entry = torch.zeros((num_places, 2 * self._branch + 1), dtype=torch.float64, device=device)
        self._fetched = [FetchedTensor(self._entry) for _ in range(2)]
        self._num_launched = 0
        self._replay = static.record(self._compute)

    def load(self, layer: NewestLayer, *, first_row: int, width: int, floor: float) -> None:
        """Set the state: the next launch runs this layer, its nodes going to rows ``first_row`` .. of the desk."""
        num_nodes, num_places = len(layer.token_ids), self.shape.num_places
        nodes = np.zeros((2, num_places), np.int64)
        nodes[0, :num_nodes], nodes[1, :num_nodes] = layer.token_ids, layer.positions
        visible = np.zeros((num_places, self.shape.span), np.bool_)
        visible[:num_nodes, : layer.visible.shape[1]] = layer.visible
        scores = np.full(num_places, -np.inf)
        scores[:num_nodes] = layer.path_logprobs
        self._nodes.fill(nodes)
        self._visible.fill(visible)
        self._scores.fill(scores)
        self._numbers.fill(np.asarray([first_row, width], np.int64))
        self._floor.fill(np.asarray([floor], np.float64))

    def load_noise(self, noise: GumbelNoise, seed: int, positions: set[int]) -> None:
        """Load the noise of these positions, at most `num_noise_rows` consecutive ones, if it is missing."""
        for position in positions if self.shape.num_noise_rows else ():
            row = position % self.shape.num_noise_rows
            if self._noise_held.get(row) != (seed, position):
                self._noise[row].copy_(torch.from_numpy(noise.row(position)), non_blocking=True)
                self._noise_held[row] = seed, position

    def launch(self) -> FetchedTensor:
        """Start the step on the loaded state, or on the state after the last step.

        Returns: the argument of `result`. Two launches may be unread at a time.
        """
        self._replay()
        fetched = self._fetched[self._num_launched % len(self._fetched)]
        self._num_launched += 1
        fetched.begin(self._entry)
        return fetched

    def result(self, fetched: FetchedTensor) -> DraftStepResult:
        """Wait for a launched step and return its result."""
        entry, branch = fetched.read(), self._branch
        tokens = entry[:, :branch].astype(np.int64).tolist()
        chosen = [int(child) for child in entry[:, -1] if child != _NO_CHILD]
        return DraftStepResult(
            tokens=tokens,
            logprobs=entry[:, branch:-1].tolist(),
            chosen=[(child // branch, tokens[child // branch][child % branch]) for child in chosen],
        )

    def _compute(self) -> None:
        """Run the layer and replace it with its best children. No value is read, no shape depends on one."""
        token_ids, positions = self._nodes.tensor.unbind(0)
        first_row, width = self._numbers.tensor.unbind(0)
        scores = self._scores.tensor
        row_idx = first_row + self._places
        seen = self._visible.tensor | (row_idx[:, None] == self._columns)
        logits = self._static.forward(token_ids, positions, row_idx, seen)
        tokens, logprobs = self._best_children(logits, positions)

        path_logprobs = scores[:, None] + logprobs.double()
        path_logprobs = path_logprobs.masked_fill(path_logprobs < self._floor.tensor, float("-inf")).flatten()
        best = path_logprobs.topk(self.shape.num_places)
        is_node = (best.values > float("-inf")) & (self._places < width)
        parents = best.indices.div(self._branch, rounding_mode="floor")

        chosen = best.indices.masked_fill(~is_node, _NO_CHILD)
        self._entry.copy_(torch.cat((tokens.double(), logprobs.double(), chosen.double()[:, None]), 1))
        num_nodes = (scores > float("-inf")).sum()
        children = torch.stack((tokens.flatten()[best.indices], positions[parents] + 1))
        self._nodes.tensor.copy_(children)
        self._visible.tensor.copy_(seen[parents])
        self._scores.tensor.copy_(best.values.masked_fill(~is_node, float("-inf")))
        first_row.add_(num_nodes)

    def _best_children(self, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [K, b] and log-probabilities [K, b], best first, as `CandidateScorer` scores them."""
        rule = self.shape.rule
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if rule.is_greedy:
            scores = scores * CHOICE_SHARPNESS
        else:
            scores = filter_on_device(scores, rule)
            if self.shape.num_noise_rows:
                noise = self._noise.index_select(0, (positions + 1) % self.shape.num_noise_rows)
                scores = (scores + noise) * CHOICE_SHARPNESS
        best = scores.topk(self._branch, dim=-1)
        return best.indices, (best.values - scores.logsumexp(-1, keepdim=True)).clamp_max(0)
