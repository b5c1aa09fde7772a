"""Shared parts of writers without a model: pools of n-grams, and the success rate of guesses by rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from card.drafting.local.protocol import Observation
from card.tree.nodes import MergedNodes, Nodes

Guesses = dict[int, "Guesses"]
"""Possible continuations of a text: the next tokens, best guess first, each with the guesses of what follows it."""

_NO_GUESSES: Guesses = {}


def merged(continuations: Iterable[Sequence[int]]) -> Guesses:
    """Return the continuations, best first, with common beginnings merged."""
    guesses: Guesses = {}
    for continuation in continuations:
        level = guesses
        for token in continuation:
            level = level.setdefault(token, {})
    return guesses


def paths_to(nodes: Nodes) -> list[tuple[int, ...]]:
    """Return the tokens from the root to each node, its own included."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(nodes.tokens, nodes.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def children_of(seen: Observation | Nodes) -> dict[tuple[int, int], int]:
    """Return the index of each candidate by (parent, token): a pass may cut, reorder or mix candidates."""
    return {pair: idx for idx, pair in enumerate(zip(seen.parents, seen.tokens, strict=True))}


def nodes_along(child_of: dict[tuple[int, int], int], node: int, path: Sequence[int]) -> list[int]:
    """Return the nodes along ``path`` from ``node`` on, itself included, as far as they were run."""
    nodes = [node]
    for token in path:
        child = child_of.get((nodes[-1], token))
        if child is None:
            break
        nodes.append(child)
    return nodes


class NgramPool:
    """The newest n-grams by their first token, a bounded number for each. A repeated n-gram counts as new."""

    def __init__(self, length: int, per_key: int, *, max_keys: int | None = None) -> None:
        """Make an empty pool.

        Args:
            length: tokens of an n-gram, the first one included; 2 or more.
            per_key: most n-grams that begin with one token; 1 or more.
            max_keys: most first tokens; the least recently seen one is dropped. None: no bound.
        """
        self.length = length
        self._per_key = per_key
        self._max_keys = max_keys
        self._by_key: dict[int, dict[tuple[int, ...], None]] = {}  # dicts keep the order: oldest first

    def insert(self, key: int, rest: tuple[int, ...]) -> None:
        """Record that ``rest`` followed ``key``."""
        known = self._by_key.pop(key, {})
        self._by_key[key] = known  # the newest key comes last
        if self._max_keys is not None and len(self._by_key) > self._max_keys:
            del self._by_key[next(iter(self._by_key))]
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self._per_key:
            del known[next(iter(known))]

    def learn_text(self, token_ids: Sequence[int]) -> None:
        """Record all n-grams of a text, the last one as the newest."""
        length = self.length
        for start in range(len(token_ids) - length + 1):
            self.insert(token_ids[start], tuple(token_ids[start + 1 : start + length]))

    def replace(self, key: int, old: tuple[int, ...], new: tuple[int, ...]) -> None:
        """Replace ``old`` by ``new``, which becomes the newest."""
        self._by_key.get(key, {}).pop(old, None)
        self.insert(key, new)

    def newest(self, key: int, most: int | None = None) -> list[tuple[int, ...]]:
        """Return the continuations of ``key``, newest first; at most ``most``, None for all."""
        return list(reversed(self._by_key.get(key, {})))[:most]


class RankRates:
    """Share of the guesses of each rank that the target chose: a prior, corrected by counts."""

    def __init__(self, prior: Sequence[float], weight: float) -> None:
        """Begin with ``prior``, a chance in (0, 1) for each rank, with the weight of ``weight`` observations."""
        self._hits = [weight * chance for chance in prior]
        self._trials = [weight] * len(prior)

    def learn(self, guesses: Iterable[int], token: int) -> None:
        """Count which of the ``guesses``, best first, was ``token``; guesses beyond the last rank are ignored."""
        hits, trials = self._hits, self._trials
        for rank, guess in zip(range(len(hits)), guesses, strict=False):
            trials[rank] += 1.0
            if guess == token:
                hits[rank] += 1.0

    def costs(self) -> list[float]:
        """Return -log of the chance of each rank, above 0."""
        return [math.log(trials / hits) for hits, trials in zip(self._hits, self._trials, strict=True)]


class GuessRates:
    """The chances of `Guesses`: one set for the next token, and one for each token after a correct guess."""

    def __init__(self, first: RankRates, later: RankRates) -> None:
        self._first = first
        self._later = later

    def learn(self, guesses: Guesses, token_ids: Sequence[int]) -> None:
        """Count which ``guesses`` were right: the text continued with ``token_ids``, which may be longer or shorter."""
        rates = self._first
        for token in token_ids:
            if not guesses:
                return
            rates.learn(guesses, token)
            rates = self._later
            guesses = guesses.get(token, _NO_GUESSES)

    def add_guesses(
        self, tree: MergedNodes, parent: int, guesses: Guesses, path_logprob: float, max_nodes: int
    ) -> None:
        """Add the likeliest guesses to ``tree`` until it has ``max_nodes``.

        Args:
            parent: node, or ROOT or PATH_END, that the guesses follow.
            path_logprob: of the parent.
        """
        ages = count()  # at equal costs the older goes first, hence parents before children
        later = self._later.costs()
        waiting = [
            (cost - path_logprob, next(ages), parent, token, after)
            for cost, (token, after) in zip(self._first.costs(), guesses.items(), strict=False)
        ]
        heapify(waiting)
        while waiting and len(tree) < max_nodes:
            path_cost, _, above, token, after = heappop(waiting)
            node = tree.add(above, token, -path_cost)
            for cost, (next_token, rest) in zip(later, after.items(), strict=False):
                heappush(waiting, (path_cost + cost, next(ages), node, next_token, rest))


def guess_rates(num_ranks: int) -> GuessRates:
    """Return the initial chances, before any counts: the newest of several n-grams is the likeliest."""
    first = [0.35 * 0.4**rank for rank in range(num_ranks)]
    later = [0.6 * 0.3**rank for rank in range(num_ranks)]
    return GuessRates(RankRates(first, weight=6.0), RankRates(later, weight=6.0))
