"""The acceptance rule: what is emitted has exactly the target's law, shown by enumeration; broken rules do not."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.api.llm import LLM
from card.config import SamplingParams
from card.engine.metrics import RequestStats
from card.errors import SettingsError
from card.tree.nodes import ROOT, Nodes
from card.tree.verify import MATCH, Verdict, Verification, match
from tests.pair import Pair

V = 3
Tree = tuple[list[int], list[int]]  # draft_ids, parents
Rule = Callable[[Sequence[int], Sequence[int], Sequence[int]], Verdict]


@st.composite
def trees(draw: st.DrawFn, most: int = 12) -> Tree:
    """Return a tree whose siblings have distinct tokens, in any order that puts parents first."""
    nodes: list[tuple[int, int]] = []  # parent, token
    for _ in range(draw(st.integers(0, most))):
        node = (draw(st.integers(ROOT, len(nodes) - 1)), draw(st.integers(0, V - 1)))
        if node not in nodes:
            nodes.append(node)
    return [token for _, token in nodes], [parent for parent, _ in nodes]


def paths(draft_ids: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Return each candidate's tokens from below the root."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft_ids, parents, strict=True):
        found.append((*(found[parent] if parent != ROOT else ()), token))
    return found


# ---- match ----------------------------------------------------------------------------------------------------------


@given(tree=trees(), data=st.data())
def test_match_follows_the_targets_choices_as_far_as_there_are_candidates(tree: Tree, data: st.DataObject) -> None:
    draft_ids, parents = tree
    choices = data.draw(st.lists(st.integers(0, V - 1), min_size=len(draft_ids) + 1, max_size=len(draft_ids) + 1))
    node_at = {(): ROOT} | {path: i for i, path in enumerate(paths(draft_ids, parents))}
    text: tuple[int, ...] = ()
    while text in node_at:
        text += (choices[node_at[text] + 1],)
    verdict = match(draft_ids, parents, choices)
    assert verdict.next_id == text[-1]
    assert verdict.accepted == tuple(node_at[text[:depth]] for depth in range(1, len(text)))


def test_match_without_candidates_commits_the_targets_choice() -> None:
    assert match([], [], [5]) == Verdict((), 5)


# A law after every text, with a zero; enough for two tokens of text and one more.
LAWS = {
    text: [weight / sum(weights) for weight in weights]
    for text, weights in {
        (): (5, 2, 0),
        (0,): (1, 1, 1),
        (1,): (0, 1, 3),
        (2,): (4, 4, 1),
    }.items()
}


def law_of_two_tokens(rule: Rule, draft_ids: Sequence[int], parents: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Enumerate all choices of a target and return the probability of each first two tokens of the emitted text."""
    texts = [(), *paths(draft_ids, parents)]
    law: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for choices in itertools.product(range(V), repeat=len(texts)):
        weight = 1.0
        for text, choice in zip(texts, choices, strict=True):
            weight *= LAWS.get(text, [1 / V] * V)[choice]
        verdict = rule(draft_ids, parents, choices)
        emitted = (*(draft_ids[i] for i in verdict.accepted), verdict.next_id)
        if len(emitted) == 1:  # the next round makes the second token
            for token in range(V):
                law[(*emitted, token)] += weight * LAWS[emitted][token]
        else:
            law[emitted[:2]] += weight
    return law


def is_target_law(law: dict[tuple[int, ...], float]) -> bool:
    return all(
        law[(first, second)] == pytest.approx(LAWS[()][first] * LAWS[(first,)][second], abs=1e-12)
        for first, second in itertools.product(range(V), repeat=2)
    )


@given(tree=trees(most=5))
def test_match_emits_exactly_the_target_distribution_for_any_candidates(tree: Tree) -> None:
    assert is_target_law(law_of_two_tokens(match, *tree))


def _match_keeping_the_first_child(draft_ids: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> Verdict:
    verdict = match(draft_ids, parents, choices)
    return verdict if verdict.accepted or ROOT not in parents else Verdict((parents.index(ROOT),), choices[1])


def _match_with_choices_one_node_late(
    draft_ids: Sequence[int], parents: Sequence[int], choices: Sequence[int]
) -> Verdict:
    return match(draft_ids, parents, [*choices[1:], choices[0]])


@pytest.mark.parametrize("broken", [_match_keeping_the_first_child, _match_with_choices_one_node_late])
def test_the_law_test_finds_a_broken_match(broken: Rule) -> None:
    assert is_target_law(law_of_two_tokens(match, [1, 2], [ROOT, 0]))
    assert not is_target_law(law_of_two_tokens(broken, [1, 2], [ROOT, 0]))


# ---- verifiers ------------------------------------------------------------------------------------------------------


class KeepsEverything:
    """A lossy verifier: the first candidate at each depth stays, whatever the target thinks of it."""

    is_exact = False

    def decide(self, seen: Verification) -> Verdict:
        accepted: list[int] = []
        while (child := _first_child(seen, accepted[-1] if accepted else ROOT)) is not None:
            accepted.append(child)
        return Verdict(tuple(accepted), seen.choices[1 + (accepted[-1] if accepted else ROOT)])


def _first_child(seen: Verification, node: int) -> int | None:
    return next((i for i, parent in enumerate(seen.offer.parents) if parent == node), None)


@given(tree=trees(), data=st.data())
def test_the_exact_verifier_is_match_and_keeps_nothing_leniently(tree: Tree, data: st.DataObject) -> None:
    seen = _seen(tree, data)
    verdict = MATCH.decide(seen)
    assert MATCH.is_exact
    assert verdict == match(*tree, seen.choices)
    assert seen.leniently_accepted(verdict) == 0


@given(tree=trees(), data=st.data())
def test_what_is_kept_against_the_targets_choice_is_counted(tree: Tree, data: st.DataObject) -> None:
    seen = _seen(tree, data)
    verdict = KeepsEverything().decide(seen)
    differing = [i for i in verdict.accepted if tree[0][i] != seen.choices[tree[1][i] + 1]]
    assert seen.leniently_accepted(verdict) == len(differing)


def _seen(tree: Tree, data: st.DataObject) -> Verification:
    draft_ids, parents = tree
    choices = data.draw(st.lists(st.integers(0, V - 1), min_size=len(draft_ids) + 1, max_size=len(draft_ids) + 1))
    offer = Nodes(tokens=tuple(draft_ids), parents=tuple(parents), path_logprobs=(0.0,) * len(draft_ids))
    return Verification(offer, np.zeros((len(draft_ids) + 1, V), np.float32), choices, 0)


@pytest.mark.parametrize("placement", ["inline", "thread"])
def test_a_lossy_verifier_is_refused_unless_asked_for_and_every_result_says_so(pair: Pair, placement: str) -> None:
    models = {"target": pair.target, "draft": pair.draft, "method": "sps", "placement": placement}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with pytest.raises(SettingsError, match="would not choose: leave it out, or set allows_inexact=True"):
        LLM(**models, verifier=KeepsEverything())
    with LLM(pair.target, method="vanilla") as plain:
        expected = plain.generate("the cat sat", params)[0]
    with LLM(**models, verifier=KeepsEverything(), allows_inexact=True) as lossy:
        output, chunks = lossy.generate("the cat sat", params)[0], list(lossy.stream("the cat sat", params))
    assert not output.exact and not output.stats.is_exact and not chunks[-1].stats.as_dict()["is_exact"]
    assert output.stats.lenient_tokens > 0
    assert output.outputs[0].token_ids != expected.outputs[0].token_ids
    assert expected.exact and expected.stats.is_exact and expected.stats.lenient_tokens == 0
    assert not RequestStats.joined([expected.stats, output.stats]).is_exact
