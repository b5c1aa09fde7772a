"""Draft trees for several texts at once, layer by layer: the next layer is the likeliest nodes of each text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from card.family.hivis.fused import Fused
from card.family.learning.array_head import log_softmax
from card.kernels.number_types import Floats
from card.models.rows.row_tree import BoolArray, IntArray
from card.tree.nodes import ROOT, Nodes

BEAM_WIDTH = 4  # nodes of a layer
MOST_LAYERS = 8  # steps beyond the trained ones use the vector of the last


class TextMemory:
    """Rows of one text in the drafter's layer, made from the target's own states only."""

    def __init__(self, head: Fused) -> None:
        """Begin without rows."""
        self._head = head
        self.first = 0  # place of the first row
        self._rows: Floats = np.zeros((1, 0, head.facts.width), np.float32)
        self.keys: Floats
        self.values: Floats
        self.keys, self.values = head.memory(self._rows)

    @property
    def end(self) -> int:
        """Place after the last row."""
        return self.first + int(self.keys.shape[2])

    @property
    def last_row(self) -> Floats:
        """The last row before the layer, [d]."""
        last: Floats = self._rows[0, -1]
        return last

    def extend(self, first: int, states: Floats, embeddings: Floats) -> None:
        """Write rows at places from ``first`` on, replacing existing ones; after a gap the memory is cleared first.

        Args:
            states, embeddings: [n, D] scaled, of places and of their next tokens.
        """
        num_kept = first - self.first if self.first <= first <= self.end else 0
        if not num_kept:
            self.first = first
        self._rows = self._head.read(states, embeddings)[None]
        keys, values = self._head.memory(self._rows, np.arange(first, first + len(states))[None])
        self.keys = np.concatenate([self.keys[:, :, :num_kept], keys], 2)
        self.values = np.concatenate([self.values[:, :, :num_kept], values], 2)

    def until(self, num_rows: int, row: Floats) -> TextMemory:
        """Return the memory of the text's first rows; ``row`` [d] is the last of them before the layer."""
        cut = TextMemory(self._head)
        cut.first, cut._rows = self.first, row[None, None]
        cut.keys, cut.values = self.keys[:, :, :num_rows], self.values[:, :, :num_rows]
        return cut


def draft(head: Fused, texts: Sequence[TextMemory], num_layers: int = MOST_LAYERS) -> list[Nodes]:
    """Return candidates after the newest token of each text, the likeliest first: `BEAM_WIDTH` a layer at most."""
    keys, values, seen = _joined(texts)
    newest = np.array([text.end - 1 for text in texts])[:, None]
    rows = head.layer(np.stack([text.last_row for text in texts])[:, None], keys, values, seen, newest)
    width = min(BEAM_WIDTH, len(head.token_ids))
    tree = _Trees(len(texts), width)
    for step in range(1, num_layers + 1):
        states, logits = head.guess(rows)
        parents, labels = tree.grow(log_softmax(logits))
        if step == num_layers:
            break
        own = head.own_state(np.take_along_axis(states, parents[..., None], 1), step)
        read = head.read(own, head.embedded(labels))
        places = np.repeat(newest + step, width, 1)
        more = head.memory(read, places)
        keys, values = np.concatenate([keys, more[0]], 2), np.concatenate([values, more[1]], 2)
        whole = np.concatenate([np.repeat(seen, width, 1), tree.ancestors], -1)
        rows = head.layer(read, keys, values, whole, places)
    return tree.nodes(head.token_ids)


def _joined(texts: Sequence[TextMemory]) -> tuple[Floats, Floats, BoolArray]:
    """Return keys and values of all texts, [B, H, S, d / H], and which rows exist in each text, [B, 1, S]."""
    longest = max(text.keys.shape[2] for text in texts)
    seen: BoolArray = np.zeros((len(texts), 1, longest), np.bool_)
    shape = (len(texts), texts[0].keys.shape[1], longest, texts[0].keys.shape[3])
    keys, values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for idx, text in enumerate(texts):
        length = text.keys.shape[2]
        keys[idx, :, :length], values[idx, :, :length], seen[idx, :, :length] = text.keys[0], text.values[0], True
    return keys, values, seen


class _Trees:
    """Trees of B texts, W nodes a layer."""

    def __init__(self, num_texts: int, width: int) -> None:
        self._width = width
        self._labels: list[IntArray] = []
        self._parents: list[IntArray] = []  # places in the layer above
        self._logprobs: list[Floats] = [np.zeros((num_texts, 1), np.float32)]
        self.ancestors: BoolArray = np.zeros((num_texts, 1, 0), np.bool_)  # of the last layer, itself included

    def grow(self, logprobs: Floats) -> tuple[IntArray, IntArray]:
        """Add the best children of the last layer's nodes, [B, n, N]. Returns: parents and tokens of these, [B, W]."""
        tokens = _best(logprobs, self._width)
        best = np.take_along_axis(logprobs, tokens, -1)
        paths = (self._logprobs[-1][..., None] + best).reshape(len(best), -1)
        flat = _best(paths, self._width)
        parents = flat // self._width
        labels = np.take_along_axis(tokens.reshape(len(best), -1), flat, 1)
        self._logprobs.append(np.take_along_axis(paths, flat, 1))
        self._parents.append(parents)
        self._labels.append(labels)
        above = np.take_along_axis(self.ancestors, parents[..., None], 1)
        own = np.broadcast_to(np.eye(self._width, dtype=np.bool_), (len(above), self._width, self._width))
        self.ancestors = np.concatenate([above, own], -1)
        return parents, labels

    def nodes(self, token_ids: IntArray) -> list[Nodes]:
        """Return each text's candidates, parents before their children."""
        tokens = token_ids[np.concatenate(self._labels, 1)].tolist()
        logprobs = np.concatenate(self._logprobs[1:], 1).tolist()
        above = [np.full_like(self._parents[0], ROOT)]
        above += [parents + self._width * layer for layer, parents in enumerate(self._parents[1:])]
        parents = np.concatenate(above, 1).tolist()
        depths = [layer for layer in range(1, len(self._labels) + 1) for _ in range(self._width)]
        return [_ordered(*text, depths) for text in zip(tokens, parents, logprobs, strict=True)]


def _best(scores: Floats, count: int) -> IntArray:
    """Return the places of the largest scores of the last axis, [..., count], the largest first."""
    found = np.argpartition(-scores, count - 1, -1)[..., :count]
    order = np.argsort(-np.take_along_axis(scores, found, -1), -1, "stable")
    return np.take_along_axis(found, order, -1)


def _ordered(tokens: Sequence[int], parents: Sequence[int], logprobs: Sequence[float], depths: Sequence[int]) -> Nodes:
    """Return nodes, given layer by layer, in the order of likelihood."""
    scores: list[float] = []
    for parent, score in zip(parents, logprobs, strict=True):
        scores.append(min(score, 0.0 if parent == ROOT else scores[parent]))  # against rounding
    order = sorted(range(len(scores)), key=lambda idx: (-scores[idx], idx))
    return Nodes(tuple(tokens), tuple(parents), tuple(scores), tuple(depths)).take(order)
