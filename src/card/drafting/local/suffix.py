"""A suffix automaton of the request's text: all tokens that followed its longest repeated suffix, weighted by counts.

Sources: Blumer et al. 1985, The smallest automaton recognizing the subwords of a text (the automaton, built online);
Hu et al. 2024, SAM Decoding, arXiv:2411.10666 (drafts from it); Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975
(trees by shares of counts).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from card.drafting.local.lookup import chance_per_count
from card.drafting.local.protocol import LocalWriter, Observation, WriterSequence
from card.tree.nodes import NO_NODES, Nodes

_MIN_PATH_CHANCE = 0.02  # less likely paths are not worth a row of any target
_MAX_COUNTED_LINKS = 32  # suffixes of the text, longest first, whose counts a new token raises
_MAX_EDGES = 64  # followers of one state that are considered
_BETWEEN = -1  # stands between texts of one automaton; no token, so that no match reaches beyond it
_ENDS = frozenset({_BETWEEN})
_NUM_BEFORE = 16  # tokens at the prompt's end after which an expected text begins

Place = TypeVar("Place")


def best_first(
    root: Place, followers: Callable[[Place, float], Iterable[tuple[int, float, Place]]], budget: int
) -> Nodes:
    """Return the likeliest candidates of a tree, best first; a parent comes before its children.

    Args:
        root: the place of the last committed token.
        followers: returns the distinct followers of a place with at least a given chance, as (token, chance, place).
        budget: most candidates.
    """
    tokens: list[int] = []
    parents: list[int] = []
    path_logprobs: list[float] = []
    waiting: list[tuple[float, int, int, int, Place]] = []
    place, path_chance = root, 1.0
    num_pushed = 0  # breaks ties in the heap, as places have no order; the older entry comes first
    while len(tokens) < budget:
        for token, chance, child in followers(place, _MIN_PATH_CHANCE / path_chance):
            heapq.heappush(waiting, (-path_chance * chance, num_pushed, len(tokens) - 1, token, child))
            num_pushed += 1
        if not waiting:
            break
        negative_chance, _, parent, token, place = heapq.heappop(waiting)
        path_chance = -negative_chance
        tokens.append(token)
        parents.append(parent)
        path_logprobs.append(math.log(path_chance))
    return Nodes(tuple(tokens), tuple(parents), tuple(path_logprobs))


class SuffixAutomaton:
    """The automaton of all substrings of a text that grows at its end; a token takes amortised constant time.

    A state stands for the substrings that end at the same places. Its link leads to their longest suffix that also ends
    elsewhere. So the link of the whole text's state is the longest suffix that occurred before, and no cursor needs to
    follow the text.

    A new token is one more occurrence of every suffix of the text, and there can be as many states of suffixes as
    tokens. Only the `_MAX_COUNTED_LINKS` longest suffixes are counted. That is exact in ordinary text, which seldom has
    more than ten. In a text that repeats one thing throughout, short contexts get too low a count, which only shifts
    guesses.
    """

    def __init__(self) -> None:
        self._edges: list[dict[int, int]] = [{}]
        self._links = [-1]
        self._lengths = [0]  # of the longest substring of each state
        self._counts = [0]  # places where it ends
        self._last = 0  # state of the whole text

    def extend(self, token: int) -> None:
        """Append a token to the text."""
        edges, links, lengths = self._edges, self._links, self._lengths
        new = self._add({}, lengths[self._last] + 1, 0)
        state = self._last
        while state >= 0 and token not in edges[state]:
            edges[state][token] = new
            state = links[state]
        if state >= 0:
            child = edges[state][token]
            if lengths[child] == lengths[state] + 1:
                links[new] = child
            else:
                links[new] = self._split(state, token, child)
        self._last = new
        self._count(new)

    def _add(self, edges: dict[int, int], length: int, count: int) -> int:
        self._edges.append(edges)
        self._links.append(0)
        self._lengths.append(length)
        self._counts.append(count)
        return len(self._links) - 1

    def _split(self, state: int, token: int, child: int) -> int:
        """Split off from ``child`` the substrings no longer than those of ``state`` plus the token."""
        edges, links = self._edges, self._links
        short = self._add(dict(edges[child]), self._lengths[state] + 1, self._counts[child])
        links[short] = links[child]
        links[child] = short
        while state >= 0 and edges[state].get(token) == child:
            edges[state][token] = short
            state = links[state]
        return short

    def _count(self, state: int) -> None:
        for _ in range(_MAX_COUNTED_LINKS):
            if state <= 0:  # the root's count is not used
                return
            self._counts[state] += 1
            state = self._links[state]

    def longest_repeated_suffix(self) -> tuple[int, int]:
        """Return (state, length) of the longest suffix of the text that also ends earlier; length 0: there is none."""
        state = max(0, self._links[self._last])
        return state, self._lengths[state]

    def after(self, match: tuple[int, int], token: int) -> tuple[int, int]:
        """Return the longest match that ends with this token behind a match; the text stays as it is."""
        state, length = match
        while token not in self._edges[state]:
            state = self._links[state]
            if state < 0:
                return 0, 0
            length = self._lengths[state]
        return self._edges[state][token], length + 1

    def followers(self, match: tuple[int, int], min_chance: float) -> list[tuple[int, float, tuple[int, int]]]:
        """Return the followers of a match, latest first, for `best_first`.

        A match at the end of a text has no followers; its longest suffix with followers takes its place. So guesses
        for a text that repeats itself at a short distance reach beyond that distance.
        """
        state, length = match
        if self._edges[state].keys() <= _ENDS:
            state = self._links[state]
            length = self._lengths[max(0, state)]
        if length == 0:
            return []
        children = list(itertools.islice(reversed(self._edges[state].items()), _MAX_EDGES))
        counts = [self._counts[child] for _, child in children]
        chance = chance_per_count(length, sum(counts))
        min_count = min_chance / chance
        return [
            (token, count * chance, (child, length + 1))
            for (token, child), count in zip(children, counts, strict=True)
            if count >= min_count and token != _BETWEEN
        ]


class SuffixSequence(WriterSequence):
    """The automaton of one request's prompt and output."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._automaton = SuffixAutomaton()
        self._proposed: tuple[int, Nodes] = 0, NO_NODES  # budget and proposal for the present text
        self._extend(prompt_ids)
        self._last_ids = tuple(prompt_ids[-_NUM_BEFORE:])

    def expect(self, token_ids: Sequence[int]) -> None:
        """Add a text as if it had followed the end of the prompt once before.

        What stood before the prompt's last tokens is out of reach for matches from here on.
        """
        self._extend((_BETWEEN, *self._last_ids, *token_ids, _BETWEEN, *self._last_ids))

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        """Return the tree of tokens that followed the longest repeated suffix of the text, likeliest first."""
        if budget > self._proposed[0]:  # a turn calls it twice; a smaller proposal is a prefix
            automaton = self._automaton
            self._proposed = budget, best_first(automaton.longest_repeated_suffix(), automaton.followers, budget)
        return self._proposed[1].leading(budget)

    def observe(self, seen: Observation) -> None:
        """Append the committed tokens."""
        self._proposed = 0, NO_NODES
        self._extend(seen.new_ids)

    def _extend(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self._automaton.extend(token)


class SuffixWriter(LocalWriter):
    """Proposes a tree of the tokens that followed the longest match in the request's own text, weighted by counts."""

    sequence = SuffixSequence


WRITER = SuffixWriter
