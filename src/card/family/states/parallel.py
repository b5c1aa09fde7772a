"""Draft with a head of several tokens a pass: rows of masks behind the newest token, each of which drafts one.

A mask sees the text but not the tokens before it in the draft, so all nodes of a layer share its logits. The rows of
masks are dropped after the pass, and no pass goes on from a candidate. Source: P-EAGLE, arXiv:2602.01469.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from card.drafting.beam import BeamWriter
from card.drafting.messages import DraftSpec
from card.drafting.protocol import DraftSequence
from card.family.states.sequence import StateSequence
from card.kernels.number_types import Floats
from card.models.own.eagle_head import HeadInputs
from card.models.own.row_inputs import RowInputs
from card.models.protocol import Extension
from card.tree.logits import Logits, as_array
from card.tree.nodes import NewNodes


class ParallelStateSequence(StateSequence):
    """The tree of one request, made by one pass after each commit."""

    def __init__(
        self, writer: BeamWriter, inputs: RowInputs, token_ids: Sequence[int], spec: DraftSpec, *, epoch: int
    ) -> None:
        """Take a sequence of the writer's pool. Raises: CapacityError if it has no room."""
        assert isinstance(inputs, HeadInputs)
        self._head = inputs
        self._num_text = 0  # rows of the text in the last pass
        super().__init__(writer, inputs, token_ids, spec, epoch=epoch)

    def frontier(self) -> list[int]:
        """Return the root, if the next pass would expand it; empty also while a state of the text is missing."""
        nodes = super().frontier()
        return nodes if self.cache.root_id in nodes else []

    @property
    def _num_masks(self) -> int:
        return max(0, min(self._head.num_tokens, self.num_layers) - 1)

    def _num_tokens(self, frontier: Sequence[int]) -> int:
        return super()._num_tokens(frontier) + self._num_masks if frontier else 0

    def extension(self, frontier: Sequence[int], max_tokens: int) -> Extension:
        """Return at most ``max_tokens`` tokens to run: unread text, and behind all of it masks."""
        plain = super().extension(frontier, max_tokens)
        self._num_text = len(plain.token_ids)
        count = 0 if self._num_text < self._num_unread else min(self._num_masks, max_tokens - self._num_text)
        if not count:
            return plain
        assert plain.inputs is not None
        last = self.num_committed_rows + self._num_text - 1
        return replace(
            plain,
            token_ids=[*plain.token_ids, *[self._head.mask_id] * count],
            parents=[*plain.parents, *range(last, last + count)],
            inputs=np.concatenate([plain.inputs, self._head.mask_rows(count)]),
        )

    def hand_on(self, frontier: Sequence[int], states: Floats) -> None:
        """Take no state of the head's own: no row goes on from one."""

    def grow(self, frontier: Sequence[int], logits: Logits) -> NewNodes:
        """Keep the rows of the text, and make a layer of the logits of each row behind it."""
        self._model.keep(self.slot, self.num_committed_rows + self._num_text)
        array = as_array(logits)
        layers = [super().grow(frontier, array[:1])]
        while not self._num_unread:
            depths = {node: self.cache.depth_of(node) for node in self._growth.frontier(self.growing)}
            nodes = [node for node, depth in depths.items() if 0 < depth < len(array)]
            if not nodes:
                break
            layers.append(DraftSequence.grow(self, nodes, array[[depths[node] for node in nodes]]))
        self._frontier = None
        return NewNodes.joined(layers)
