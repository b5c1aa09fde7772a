"""Candidates of several writers as one tree: nothing lost, nothing twice, parents first, cut without harm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.drafting.local.protocol import Observation, WriterSequence
from card.engine.offers import DRAFTER, DRAFTER_BIT, Offers, writer_label
from card.tree.candidates import CandidateCache
from card.tree.nodes import NO_NODES, PATH_END, ROOT, NewNodes, Nodes


class Fixed:
    """A writer that always proposes the same."""

    def __init__(self, proposal: Nodes) -> None:
        self.proposal = proposal
        self.best_paths: list[list[int]] = []
        self.budgets: list[int] = []

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        self.best_paths.append(list(best_path))
        self.budgets.append(budget)
        return self.proposal

    def observe(self, seen: Observation) -> None:
        pass

    def close(self) -> None:
        pass


@st.composite
def proposals(draw) -> Nodes:
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
    return Nodes(tuple(tokens), tuple(parents), tuple(scores), num_probes=draw(st.integers(0, len(tokens))))


def offers_of(writers: Mapping[str, WriterSequence]) -> Offers:
    """Return offers of writers that are there already."""
    return Offers({name: lambda writer=writer: writer for name, writer in writers.items()}, vocab_size=100)


def best_path_of(cached: Nodes) -> list[int]:
    """Return the tokens of the best path: of equal children the one that was made first goes on."""
    path, node = [], ROOT
    while node in cached.parents:
        kids = [idx for idx, parent in enumerate(cached.parents) if parent == node]
        node = max(kids, key=lambda idx: (cached.path_logprobs[idx], -idx))
        path.append(cached.tokens[node])
    return path


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Return each candidate's tokens from below the root down to it."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def drafted_from(proposal: Nodes) -> Nodes:
    """Return the same tree as a drafter's answer."""
    cache = CandidateCache(max_nodes=100)
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
    offers = offers_of(writers)
    merged = offers.merge(cached, 100, max_depth)
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
        assert writer_label(merged.writers[idx], offers.names).split("+") == [
            name for name, *_ in sources if name in by[path]
        ]


@given(drafted=proposals(), written=proposals(), count=st.integers(0, 20))
def test_probes_come_first_and_any_leading_part_is_a_tree(drafted, written, count):
    merged = offers_of({"w": Fixed(written)}).merge(drafted_from(drafted), 100, 100)
    probes = set(paths(written.tokens, written.parents)[: written.num_probes])
    assert set(paths(merged.tokens, merged.parents)[: merged.num_probes]) == probes
    rest = merged.path_logprobs[merged.num_probes :]
    assert list(rest) == sorted(rest, reverse=True)
    part = merged.leading(count)
    assert len(part) == min(count, len(merged))
    assert all(parent < idx for idx, parent in enumerate(part.parents))
    assert part.num_probes == min(merged.num_probes, count)


def test_a_part_has_no_more_probes_than_candidates():
    nodes = Nodes((1, 2, 3), (ROOT,) * 3, (-0.1,) * 3, (1,) * 3, num_probes=2)
    assert [nodes.leading(count).num_probes for count in range(4)] == [0, 1, 2, 2]


@pytest.mark.parametrize("order", [(1, 0), (0, 2, 1), (1,)])
def test_a_selection_that_puts_a_child_before_its_parent_is_refused(order):
    with pytest.raises(KeyError):
        Nodes.chain((1, 2, 3), (-0.1, -0.2, -0.3)).take(order)


@given(drafted=proposals(), data=st.data())
def test_a_selection_in_another_order_is_the_same_tree(drafted, data):
    cached = drafted_from(drafted)
    order: list[int] = []
    while len(order) < len(cached):
        ready = [i for i in range(len(cached)) if i not in order and cached.parents[i] in (ROOT, *order)]
        order.append(data.draw(st.sampled_from(ready)))
    chosen = cached.take(order)
    before = paths(cached.tokens, cached.parents)
    assert paths(chosen.tokens, chosen.parents) == [before[i] for i in order]


def test_without_local_writers_the_drafters_answer_is_passed_on_as_it_is():
    cached = drafted_from(Nodes.chain((1, 2), (-0.1, -0.3)))
    assert offers_of({}).merge(cached, 8, 8) is cached


def test_a_writer_is_shown_the_best_path_of_those_before_it():
    first, second = Fixed(Nodes.chain((3, 4), (-0.1, -0.2))), Fixed(NO_NODES)
    offers_of({"first": first, "second": second}).merge(drafted_from(Nodes.chain((1, 2), (-0.5, -0.6))), 8, 8)
    assert first.best_paths == [[1, 2]]
    assert second.best_paths == [[3, 4]]


def test_a_writer_is_asked_for_what_the_likely_candidates_before_it_leave_of_the_budget():
    def asked(chances: Sequence[float], budget: int) -> list[int]:
        first, second = (
            Fixed(Nodes.chain([1] * len(chances), [math.log(p) for p in chances])),
            Fixed(NO_NODES),
        )
        offers_of({"first": first, "second": second}).merge(NO_NODES, budget, 9)
        assert first.budgets == [budget]
        return second.budgets

    assert asked([], 4) == [4]
    assert asked([0.9, 0.6, 0.4, 0.1], 4) == [2]
    assert asked([0.9, 0.8, 0.7], 4) == [1]
    assert asked([0.9, 0.8, 0.7, 0.6], 4) == [], "there is no room"


def test_writers_are_asked_once_between_two_passes_unless_the_drafter_has_made_more():
    writer = Fixed(Nodes.chain((3, 4), (-0.1, -0.2)))
    offers = offers_of({"w": writer})
    drafted = drafted_from(Nodes.chain((1,), (-0.5,)))
    merged = offers.merge(NO_NODES, 8, 8)
    assert offers.merge(NO_NODES, 8, 8) is merged
    assert len(writer.best_paths) == 1
    assert 1 in offers.merge(drafted, 8, 8).tokens
    assert offers.merge(drafted, 8, 1).depths == (1, 1), "another depth is another question"
    offers.observe(Observation((3,), (), (), (3,), ()))
    writer.proposal = Nodes.chain((5,), (-0.1,))
    assert offers.merge(NO_NODES, 8, 8).tokens == (5,)


@given(drafted=proposals(), written=proposals(), data=st.data())
def test_what_hangs_below_the_best_path_is_scored_from_there_on_and_leaves_the_path_alone(drafted, written, data):
    cached = drafted_from(drafted)
    path = best_path_of(cached)
    tops = [data.draw(st.sampled_from((ROOT, PATH_END))) if parent == ROOT else parent for parent in written.parents]
    below = Nodes(written.tokens, tuple(tops), written.path_logprobs)
    merged = offers_of({"w": Fixed(below)}).merge(cached, 100, 100)
    drafted_scores = dict(zip(paths(cached.tokens, cached.parents), cached.path_logprobs, strict=True))
    expected: dict[tuple[int, ...], float] = {}
    is_below: list[bool] = []  # the best path's end, not the root
    hung = paths(written.tokens, written.parents)
    for end, parent, score in zip(hung, below.parents, below.path_logprobs, strict=True):
        is_below.append(is_below[parent] if parent >= 0 else parent == PATH_END)
        above = tuple(path) if is_below[-1] else ()
        whole_score = (drafted_scores[above] if above else 0.0) + score
        expected[*above, *end] = max(whole_score, expected.get((*above, *end), whole_score))
    found = paths(merged.tokens, merged.parents)
    assert set(found) == drafted_scores.keys() | expected.keys()
    rows = zip(found, merged.path_logprobs, merged.writers, strict=True)
    for one, score, writers in rows:
        assert score == max(scores[one] for scores in (drafted_scores, expected) if one in scores)
        assert bool(writers & 2) == (one in expected)


def test_what_one_writer_proposes_below_the_root_and_below_the_path_is_labelled_once():
    cached = drafted_from(Nodes.chain((1,), (-0.5,)))
    twice = Nodes((1, 2, 2), (ROOT, 0, PATH_END), (-0.3, -0.9, -0.2))
    merged = offers_of({"w": Fixed(twice)}).merge(cached, 8, 8)
    assert merged.tokens == (1, 2)
    assert merged.writers == (3, 2)
    assert merged.path_logprobs == pytest.approx((-0.3, -0.7))


# ---- writers that fail ----------------------------------------------------------------------------------------------


class Failing(Fixed):
    """A writer that raises at one of its calls."""

    def __init__(self, fails_at: str) -> None:
        super().__init__(Nodes.chain((4,), (-0.1,)))
        self._fails_at = fails_at
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self._fails_at:
            raise ZeroDivisionError("a bug")

    def open(self) -> Failing:
        self._call("open")
        return self

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        self._call("propose")
        return super().propose(best_path, budget)

    def observe(self, seen: Observation) -> None:
        self._call("observe")

    def close(self) -> None:
        self._call("close")


@pytest.mark.parametrize(
    ("fails_at", "calls"),
    [
        ("open", ["open"]),
        ("propose", ["open", "propose", "close"]),
        ("observe", ["open", "propose", "observe", "close"]),
        ("close", ["open", *["propose", "observe"] * 2, "close"]),
    ],
)
def test_a_writer_that_raises_is_logged_once_and_heard_no_longer_while_others_go_on(fails_at, calls, caplog):
    failing, fixed = Failing(fails_at), Fixed(Nodes.chain((3,), (-0.3,)))
    cached = drafted_from(Nodes.chain((1, 2), (-0.5, -0.6)))
    offers = Offers({"failing": failing.open, "fixed": lambda: fixed}, vocab_size=5)
    for _ in range(2):
        merged = offers.merge(cached, 8, 8)
        assert {4, DRAFTER_BIT} <= set(merged.writers), "of the writer that goes on, and of the drafter"
        offers.observe(Observation((1,), (), (), (1,), ()))
    offers.close()
    assert failing.calls == calls
    assert [record.getMessage() for record in caplog.records] == [
        "the writer failing failed and is left out of this request: ZeroDivisionError: a bug"
    ]


@pytest.mark.parametrize(
    ("nonsense", "complaint"),
    [
        (Nodes((1, 2), (-1,), (-0.1, -0.2)), "equally many, got [2, 1, 2]"),
        (Nodes((5,), (-1,), (-0.1,)), "tokens must be ints from 0 to 4"),
        (Nodes((2.0,), (-1,), (-0.1,)), "has token 2.0"),  # type: ignore[arg-type]
        (Nodes((2,), (-1.0,), (-0.1,)), "parent -1.0"),  # type: ignore[arg-type]
        (Nodes((-1,), (-1,), (-0.1,)), "has token -1"),
        (Nodes((1, 2), (-1, 1), (-0.1, -0.2)), "parent 1"),
        (Nodes((1,), (-3,), (-0.1,)), "parent -3"),
        (Nodes((1,), (-1,), (0.1,)), "score 0.1"),
        (Nodes((1, 2), (-1, 0), (-0.2, -0.1)), "at most 0 and the parent's"),
        (Nodes((1,), (-1,), (math.nan,)), "score nan"),
        (Nodes((1,), (-1,), (-math.inf,)), "score -inf"),
        (Nodes((1,), (-1,), (-0.1,), num_probes=2), "2 probes"),
        (Nodes((1,), (PATH_END,), (-0.1,), num_probes=1), "below no path"),
    ],
)
def test_a_proposal_that_is_no_tree_of_the_targets_tokens_is_not_used(nonsense, complaint, caplog):
    cached = drafted_from(Nodes.chain((1, 2), (-0.5, -0.6)))
    merged = Offers({"w": lambda: Fixed(nonsense)}, vocab_size=5).merge(cached, 8, 8)
    assert (merged.tokens, merged.parents, merged.path_logprobs) == (cached.tokens, cached.parents, (-0.5, -0.6))
    assert set(merged.writers) == {DRAFTER_BIT}
    assert complaint in caplog.text


@given(proposal=proposals(), data=st.data())
def test_what_is_kept_is_the_tree_of_the_flagged_candidates_in_their_order_with_their_probes(proposal, data):
    offer = offers_of({"fixed": Fixed(proposal)}).merge(NO_NODES, budget=9, max_depth=9)
    flags: list[bool] = []
    for parent in offer.parents:
        flags.append(data.draw(st.booleans()) and (parent == ROOT or flags[parent]))
    found = offer.kept(flags)
    old = [idx for idx, flag in enumerate(flags) if flag]
    assert found.tokens == tuple(offer.tokens[idx] for idx in old)
    assert [old[parent] if parent != ROOT else ROOT for parent in found.parents] == [offer.parents[idx] for idx in old]
    assert found.num_probes == sum(idx < offer.num_probes for idx in old)
    assert offer.kept([True] * len(offer)) is offer
