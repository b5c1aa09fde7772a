"""Candidates of several writers as one tree: nothing lost, nothing twice, parents first, cut without harm."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from card.candidates import CandidateCache
from card.nodes import Candidates, NewNodes
from card.offers import DRAFTER, Offers, leading, select
from card.verify import ROOT
from card.writers.local.protocol import Observation, Proposal


class Fixed:
    """A writer that always proposes the same."""

    def __init__(self, proposal: Proposal) -> None:
        self._proposal = proposal
        self.best_paths: list[list[int]] = []

    def propose(self, best_path: Sequence[int], budget: int) -> Proposal:
        self.best_paths.append(list(best_path))
        return self._proposal

    def observe(self, seen: Observation) -> None:
        pass

    def close(self) -> None:
        pass


@st.composite
def proposals(draw) -> Proposal:
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    for idx in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(-1, idx - 1))
        token = draw(st.integers(0, 4))
        if (parent, token) in zip(parents, tokens, strict=True):
            break
        tokens.append(token)
        parents.append(parent)
        scores.append((scores[parent] if parent >= 0 else 0.0) - draw(st.floats(0, 2)))
    return Proposal(tuple(tokens), tuple(parents), tuple(scores), draw(st.integers(0, len(tokens))))


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Return each candidate's tokens from below the root down to it."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def drafted_from(proposal: Proposal) -> Candidates:
    """Return the same tree as a drafter's answer."""
    cache = CandidateCache(max_nodes=100, lead=100)
    ids, logprobs = range(1, len(proposal) + 1), []
    for idx, parent in enumerate(proposal.parents):
        above = proposal.path_logprobs[parent] if parent >= 0 else 0.0
        logprobs.append(min(0.0, proposal.path_logprobs[idx] - above))
    parents = tuple(parent + 1 for parent in proposal.parents)
    cache.extend(0, NewNodes(tuple(ids), parents, proposal.tokens, tuple(logprobs)))
    return cache.query(100, "tree")


@given(drafted=proposals(), written=st.lists(proposals(), min_size=1, max_size=3), max_depth=st.integers(1, 8))
def test_a_merged_tree_holds_every_path_once_with_its_best_score_and_all_who_proposed_it(drafted, written, max_depth):
    cached = drafted_from(drafted)
    writers = {f"w{i}": Fixed(proposal) for i, proposal in enumerate(written)}
    merged = Offers(writers).merge(cached, 100, max_depth)
    by: dict[tuple[int, ...], dict[str, float]] = {}
    sources = [(DRAFTER, cached.tokens, cached.parents, cached.path_logprobs)]
    sources += [(f"w{i}", p.tokens, p.parents, p.path_logprobs) for i, p in enumerate(written)]
    for name, tokens, parents, scores in sources:
        for path, score in zip(paths(tokens, parents), scores, strict=True):
            if len(path) <= max_depth:
                by.setdefault(path, {})[name] = score
    found = paths(merged.tokens, merged.parents)
    assert sorted(found) == sorted(by)
    for path, score, depth, parent, idx in zip(
        found, merged.path_logprobs, merged.depths, merged.parents, range(len(found)), strict=True
    ):
        assert depth == len(path)
        assert ROOT <= parent < idx
        assert score == max(by[path].values())
        assert merged.writers[idx].split("+") == [name for name, *_ in sources if name in by[path]]


@given(drafted=proposals(), written=proposals(), count=st.integers(0, 20))
def test_probes_come_first_and_any_leading_part_is_a_tree(drafted, written, count):
    merged = Offers({"w": Fixed(written)}).merge(drafted_from(drafted), 100, 100)
    probes = set(paths(written.tokens, written.parents)[: written.num_probes])
    assert set(paths(merged.tokens, merged.parents)[: merged.num_probes]) == probes
    rest = merged.path_logprobs[merged.num_probes :]
    assert list(rest) == sorted(rest, reverse=True)
    part = leading(merged, count)
    assert len(part) == min(count, len(merged))
    assert all(parent < idx for idx, parent in enumerate(part.parents))
    assert part.num_probes == min(merged.num_probes, count)


@given(drafted=proposals(), data=st.data())
def test_a_selection_in_another_order_is_the_same_tree(drafted, data):
    cached = drafted_from(drafted)
    order: list[int] = []
    while len(order) < len(cached):
        ready = [i for i in range(len(cached)) if i not in order and cached.parents[i] in (ROOT, *order)]
        order.append(data.draw(st.sampled_from(ready)))
    chosen = select(cached, order)
    before = paths(cached.tokens, cached.parents)
    assert paths(chosen.tokens, chosen.parents) == [before[i] for i in order]


def test_without_local_writers_the_drafters_answer_is_passed_on_as_it_is():
    cached = drafted_from(Proposal.chain((1, 2), (-0.1, -0.3)))
    assert Offers({}).merge(cached, 8, 8) is cached


def test_a_writer_is_shown_the_best_path_of_those_before_it():
    first, second = Fixed(Proposal.chain((3, 4), (-0.1, -0.2))), Fixed(Proposal.none())
    Offers({"first": first, "second": second}).merge(drafted_from(Proposal.chain((1, 2), (-0.5, -0.6))), 8, 8)
    assert first.best_paths == [[1, 2]]
    assert second.best_paths == [[3, 4]]
