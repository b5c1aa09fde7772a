"""Slots to candidates: a tree of the likeliest beginnings of a text under the slots' distributions.

In CTC a path names a token or the blank for each slot. Its text results from merging equal neighbours and then deleting
blanks, so a repeated token has a blank between. Many paths have the same text. A candidate's chance is the sum over
*all* paths whose text begins with it, by the prefix probabilities of CTC decoding (Graves 2012, "Supervised sequence
labelling with recurrent neural networks", 7.5). So candidates are distinct, and chances fall from parent to child.
The published method transforms a template of slots afterwards, which leaves blanks and stale positions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from card.family.ctc.slots import Slots
from card.tree.nodes import ROOT, Nodes

_PER_SLOT = 8  # likeliest tokens of each slot that are considered

Floats = NDArray[np.floating[Any]]
Places = NDArray[np.signedinteger[Any]]


def candidates_of(head: Slots, logprobs: Floats, most: int) -> Nodes:
    """Return the ``most`` likeliest candidates of one request, [T, N + 1] float as `Slots.logprobs`."""
    tokens = logprobs[:, :-1]
    count = min(_PER_SLOT, tokens.shape[-1])
    likely = np.unique(np.argpartition(-tokens, count - 1, -1)[:, :count])
    probs = np.exp(tokens[:, likely].astype(np.float64))
    token_ids = head.token_ids[likely].tolist()
    if head.facts.loss == "ctc":
        tree = ctc_tree(probs, np.exp(logprobs[:, -1].astype(np.float64)), most)
    else:
        tree = slot_tree(probs, most)
    return Nodes(tuple([token_ids[i] for i in tree.tokens]), tree.parents, tree.path_logprobs)


def ctc_tree(probs: Floats, blank: Floats, most: int) -> Nodes:
    """Return the likeliest beginnings of texts of T slots.

    Args:
        probs: [T, C] chance of each of C tokens in each slot.
        blank: [T] chance of the blank.
        most: candidates, 1 or more.
    Returns: candidates whose tokens are 0 to C - 1, likeliest first.
    """
    num_slots = len(probs)
    # After t slots, for each of n beginnings: the chance that the text is exactly it, if the last slot is blank or not.
    by_token: Floats = np.zeros((1, num_slots + 1))
    by_blank: Floats = np.concatenate(([1.0], blank)).cumprod()[None]
    last: Places = np.full(1, -1, dtype=np.int64)
    tree = _Best(most)
    for _ in range(num_slots):
        any_end = by_token + by_blank
        chances = any_end[:, :-1] @ probs  # of each next token
        again = last >= 0
        rows = np.flatnonzero(again)
        chances[rows, last[rows]] = (by_blank[rows, :-1] * probs[:, last[rows]].T).sum(-1)  # repeated: after a blank
        parents, last_of = tree.grow(chances)
        if not len(parents):
            break
        is_same = last_of == last[parents]
        before = np.where(is_same[:, None], by_blank[parents], any_end[parents])
        by_token, by_blank = _after(before, probs[:, last_of].T, blank)
        last = last_of
    return tree.nodes()


def _after(before: Floats, token_probs: Floats, blank_probs: Floats) -> tuple[Floats, Floats]:
    """Return the chances, [n, T + 1] each, of beginnings one token longer than those of ``before``."""
    by_token, by_blank = np.zeros_like(before), np.zeros_like(before)
    for t in range(len(blank_probs)):
        by_token[:, t + 1] = (by_token[:, t] + before[:, t]) * token_probs[:, t]
        by_blank[:, t + 1] = (by_blank[:, t] + by_token[:, t]) * blank_probs[t]
    return by_token, by_blank


def slot_tree(probs: Floats, most: int) -> Nodes:
    """Return the likeliest texts if slot i is the token at i, independent of the others; as `ctc_tree`."""
    tree, reached = _Best(most), np.ones(1)
    for row in probs:
        parents, tokens = tree.grow(reached[:, None] * row)
        if not len(parents):
            break
        reached = reached[parents] * row[tokens]
    return tree.nodes()


class _Best:
    """The likeliest beginnings, grown layer by layer: only the ``most`` likeliest are considered."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._chances, self._tokens, self._parents = list[float](), list[int](), list[int]()
        self._layer, self._above = [ROOT], [1.0]  # the last layer's nodes and their chances

    def grow(self, chances: Floats) -> tuple[Places, Places]:
        """Add the best children of the last layer's nodes, [n, C] chances. Returns: their parents' rows, and tokens."""
        flat = chances.ravel()
        count = min(self._most, len(flat))
        best = np.argpartition(-flat, count - 1)[:count]
        best = best[np.argsort(-flat[best], kind="stable")]
        best = best[flat[best] > 0.0]
        rows, tokens = np.divmod(best, chances.shape[-1])
        first = len(self._tokens)
        bounded = [min(float(flat[i]), self._above[row]) for i, row in zip(best, rows, strict=True)]  # against rounding
        self._chances += bounded
        self._tokens += tokens.tolist()
        self._parents += [self._layer[row] for row in rows]
        self._layer, self._above = list(range(first, first + len(best))), bounded
        return rows, tokens

    def nodes(self) -> Nodes:
        """Return the best of all layers; a parent is at least as likely as its children, and comes before them."""
        order = sorted(range(len(self._tokens)), key=lambda idx: (-self._chances[idx], idx))[: self._most]
        place = {ROOT: ROOT} | {idx: i for i, idx in enumerate(order)}
        return Nodes(
            tuple(self._tokens[idx] for idx in order),
            tuple(place[self._parents[idx]] for idx in order),
            tuple(min(0.0, math.log(self._chances[idx])) for idx in order),
        )
