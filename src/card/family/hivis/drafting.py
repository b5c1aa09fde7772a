"""Draft trees for several texts at once, layer by layer: the next layer is the likeliest nodes of each text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from card.family.hivis.head import FusedHead
from card.tree.nodes import ROOT, Nodes

BEAM_WIDTH = 4  # nodes of a layer
MOST_LAYERS = 8  # steps beyond the trained ones use the vector of the last


class TextMemory:
    """Rows of one text in the drafter's layer, made from the target's own states only."""

    def __init__(self, head: FusedHead) -> None:
        """Begin without rows."""
        self._head = head
        self.first = 0  # place of the first row
        self._rows = torch.zeros(1, 0, head.facts.width)
        self.keys, self.values = head.layer.memory(self._rows)

    @property
    def end(self) -> int:
        """Place after the last row."""
        return self.first + self.keys.shape[2]

    @property
    def last_row(self) -> Tensor:
        """The last row before the layer, [d]."""
        return self._rows[0, -1]

    def extend(self, first: int, states: Tensor, embeddings: Tensor) -> None:
        """Write rows at places from ``first`` on, replacing existing ones; after a gap the memory is cleared first.

        Args:
            states, embeddings: [n, D] scaled, of places and of their next tokens.
        """
        num_kept = first - self.first if self.first <= first <= self.end else 0
        if not num_kept:
            self.first = first
        self._rows = self._head.read(states, embeddings)[None]
        keys, values = self._head.layer.memory(self._rows, torch.arange(first, first + len(states))[None])
        self.keys = torch.cat((self.keys[:, :, :num_kept], keys), 2)
        self.values = torch.cat((self.values[:, :, :num_kept], values), 2)

    def until(self, num_rows: int, row: Tensor) -> TextMemory:
        """Return the memory of the text's first rows; ``row`` [d] is the last of them before the layer."""
        cut = TextMemory(self._head)
        cut.first, cut._rows = self.first, row[None, None]
        cut.keys, cut.values = self.keys[:, :, :num_rows], self.values[:, :, :num_rows]
        return cut


@torch.inference_mode()
def draft(head: FusedHead, texts: Sequence[TextMemory], num_layers: int = MOST_LAYERS) -> list[Nodes]:
    """Return candidates after the newest token of each text, the likeliest first: `BEAM_WIDTH` a layer at most."""
    keys, values, seen = _joined(texts)
    newest = torch.tensor([text.end - 1 for text in texts])[:, None]
    rows = head.layer(torch.stack([text.last_row for text in texts])[:, None], keys, values, seen, newest)
    width = min(BEAM_WIDTH, len(head.token_ids))
    tree = _Trees(len(texts), width)
    for step in range(1, num_layers + 1):
        states, logits = head.guess(rows)
        parents, labels = tree.grow(logits.log_softmax(-1))
        if step == num_layers:
            break
        own = head.own_state(states.take_along_dim(parents[..., None], 1), step)
        read = head.read(own, head.embedded(labels))
        places = (newest + step).expand(-1, width)
        more = head.layer.memory(read, places)
        keys, values = torch.cat((keys, more[0]), 2), torch.cat((values, more[1]), 2)
        rows = head.layer(read, keys, values, torch.cat((seen.expand(-1, width, -1), tree.ancestors), -1), places)
    return tree.nodes(head.token_ids)


def _joined(texts: Sequence[TextMemory]) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values of all texts, [B, H, S, d / H], and which rows exist in each text, [B, 1, S]."""
    longest = max(text.keys.shape[2] for text in texts)
    seen = torch.zeros(len(texts), 1, longest, dtype=torch.bool)
    shape = (len(texts), texts[0].keys.shape[1], longest, texts[0].keys.shape[3])
    keys, values = torch.zeros(shape), torch.zeros(shape)
    for idx, text in enumerate(texts):
        length = text.keys.shape[2]
        keys[idx, :, :length], values[idx, :, :length], seen[idx, :, :length] = text.keys[0], text.values[0], True
    return keys, values, seen


class _Trees:
    """Trees of B texts, W nodes a layer."""

    def __init__(self, num_texts: int, width: int) -> None:
        self._width = width
        self._labels: list[Tensor] = []
        self._parents: list[Tensor] = []  # places in the layer above
        self._logprobs = [torch.zeros(num_texts, 1)]
        self.ancestors = torch.zeros(num_texts, 1, 0, dtype=torch.bool)  # of the last layer, itself included

    def grow(self, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Add the best children of the last layer's nodes, [B, n, N]. Returns: parents and tokens of these, [B, W]."""
        best, tokens = logprobs.topk(self._width, -1)
        paths = (self._logprobs[-1][..., None] + best).flatten(1)
        chosen, flat = paths.topk(self._width, -1)
        parents, labels = flat // self._width, tokens.flatten(1).take_along_dim(flat, 1)
        self._logprobs.append(chosen)
        self._parents.append(parents)
        self._labels.append(labels)
        above = self.ancestors.take_along_dim(parents[..., None], 1)
        own = torch.eye(self._width, dtype=torch.bool).expand(len(above), -1, -1)
        self.ancestors = torch.cat((above, own), -1)
        return parents, labels

    def nodes(self, token_ids: Tensor) -> list[Nodes]:
        """Return each text's candidates, parents before their children."""
        tokens = token_ids[torch.cat(self._labels, 1)].tolist()
        logprobs = torch.cat(self._logprobs[1:], 1).tolist()
        above = [torch.full_like(self._parents[0], ROOT)]
        above += [parents + self._width * layer for layer, parents in enumerate(self._parents[1:])]
        parents = torch.cat(above, 1).tolist()
        depths = [layer for layer in range(1, len(self._labels) + 1) for _ in range(self._width)]
        return [_ordered(*text, depths) for text in zip(tokens, parents, logprobs, strict=True)]


def _ordered(tokens: Sequence[int], parents: Sequence[int], logprobs: Sequence[float], depths: Sequence[int]) -> Nodes:
    """Return nodes, given layer by layer, in the order of likelihood."""
    scores: list[float] = []
    for parent, score in zip(parents, logprobs, strict=True):
        scores.append(min(score, 0.0 if parent == ROOT else scores[parent]))  # against rounding
    order = sorted(range(len(scores)), key=lambda idx: (-scores[idx], idx))
    return Nodes(tuple(tokens), tuple(parents), tuple(scores), tuple(depths)).take(order)
