"""What the tests of the drafting side share: a spec, and the slow check that KV rows and tree fit each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from card.config import SamplingRule, TreeShape
from card.drafting.beam import BeamSequence
from card.drafting.messages import DraftSpec
from card.drafting.protocol import DraftSequence, DraftWriter
from card.errors import CardError
from card.models.protocol import NO_PARENT
from card.tree.logits import log_softmax
from card.tree.nodes import NewNodes
from tests.toy import TableModel

_SAMPLING = SamplingRule(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
_SHAPE = TreeShape(
    coupled_noise=False,
    beam_width=4,
    branch=3,
    lead=6,
    max_nodes=1000,
    min_path_logprob=-1e9,
    branch_below=0.4,
    fan_out=(2,),
    num_speculative_tokens=3,
)


def draft_spec(**changes: Any) -> DraftSpec:
    """Return a spec, with some values changed, whose scores are the plain log-probabilities of the model."""
    sampling = {name: changes.pop(name) for name in _SAMPLING.__slots__ if name in changes}
    shape = {name: changes.pop(name) for name in _SHAPE.__slots__ if name in changes}
    parts = {"sampling": replace(_SAMPLING, **sampling), "shape": replace(_SHAPE, **shape), "max_len": 1000}
    return DraftSpec(**parts | changes)


def assert_rows_fit_the_tree(model: TableModel, beam: BeamSequence) -> None:
    """Check that the rows are those of a fresh prefill of the text, and below it those of the expanded alive nodes."""
    held, cache = model._sequences[beam.slot], beam.cache
    num_committed = beam.num_committed_rows
    assert held.token_ids[:num_committed] == beam.token_ids[:num_committed]
    assert held.parents[:num_committed] == [NO_PARENT, *range(num_committed - 1)][:num_committed]
    assert held.positions[:num_committed] == list(range(num_committed))
    assert sorted(beam.row_of.values()) == list(range(num_committed, len(held.token_ids)))
    for node, row in beam.row_of.items():
        parent = cache.parent(node)
        assert held.token_ids[row] == cache.token(node)
        assert held.positions[row] == beam.root_position + cache.depth_of(node)
        assert held.parents[row] == (num_committed - 1 if parent == cache.root_id else beam.row_of[parent])


def assert_scores_are_those_of_the_model(model: TableModel, beam: BeamSequence) -> None:
    """Check each alive node's log-probability, and its path score, against the model run on its path alone."""
    cache, nodes = beam.cache, beam.cache.snapshot()
    for node, parent, token, logprob in zip(nodes.ids, nodes.parents, nodes.tokens, nodes.logprobs, strict=True):
        before = [] if parent == cache.root_id else cache.path_tokens(parent)
        expected = float(log_softmax(model.logits_after(beam.token_ids + before))[token])
        assert logprob == pytest.approx(expected, abs=1e-5)
        score_above = 0.0 if parent == cache.root_id else cache.path_logprob(parent)
        assert cache.path_logprob(node) == pytest.approx(score_above + logprob, abs=1e-9)


class LayersWriter(DraftWriter):
    """Drafts several layers in one pass: what a table model says of each path, without rows or passes of its own."""

    layers_per_pass = 3

    def __init__(self, model: TableModel) -> None:
        super().__init__(model.vocab_size, model.max_model_len)
        self._model = model

    def step(self, work: Sequence[tuple[DraftSequence, int]]) -> list[NewNodes | CardError]:
        """Make all layers of each sequence; the first one expands at most so many nodes."""
        return [self._layers(sequence, max_tokens) for sequence, max_tokens in work]

    def _layers(self, sequence: DraftSequence, max_tokens: int) -> NewNodes:
        layers: list[NewNodes] = []
        nodes = sequence.frontier()[:max_tokens]
        while nodes and len(layers) < self.layers_per_pass:
            texts = [sequence.token_ids + sequence.cache.path_tokens(node) for node in nodes]
            layers.append(sequence.grow(nodes, np.stack([self._model.logits_after(text) for text in texts])))
            nodes = sequence.frontier()
        return NewNodes.joined(layers)
