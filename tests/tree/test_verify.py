"""Acceptance rules: what is emitted has exactly the target's law, shown by enumeration; broken rules do not."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from card.errors import CardError
from card.tree.verify import ROOT, Verdict, acceptance_probs, match, residual_probs

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


# ---- ratio ----------------------------------------------------------------------------------------------------------


def simplex(size: int) -> st.SearchStrategy[Tensor]:
    """Return [size] float64 that sums to 1, zeros included, as top-k leaves them."""
    weights = st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any)
    return weights.map(lambda ws: torch.tensor(ws, dtype=torch.float64) / sum(ws))


def emitted_law(target: Tensor, draft: Tensor, keep: Tensor, residual: Tensor) -> Tensor:
    """Return the law of one token: drafted from ``draft``, kept with ``keep``, else drawn from ``residual``."""
    return draft * keep + (draft * (1 - keep)).sum(-1, keepdim=True) * residual


@given(laws=st.integers(1, 6).flatmap(lambda size: st.tuples(simplex(size), simplex(size))))
def test_one_ratio_step_emits_exactly_the_target_distribution(laws: tuple[Tensor, Tensor]) -> None:
    target, draft = laws
    keep, residual = acceptance_probs(target, draft), residual_probs(target, draft)
    assert ((keep >= 0) & (keep <= 1)).all()
    torch.testing.assert_close(residual.sum(), torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(emitted_law(target, draft, keep, residual), target, atol=1e-12, rtol=0)


@given(laws=st.tuples(simplex(4), simplex(4)))
def test_ratio_accepts_as_often_as_any_exact_rule_can(laws: tuple[Tensor, Tensor]) -> None:
    target, draft = laws
    accepted = (draft * acceptance_probs(target, draft)).sum()
    torch.testing.assert_close(accepted, torch.minimum(target, draft).sum())  # 1 - total variation distance


def test_the_ratio_law_test_finds_broken_rules() -> None:
    target = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
    draft = torch.tensor([0.1, 0.5, 0.1, 0.3], dtype=torch.float64)
    keep, residual = acceptance_probs(target, draft), residual_probs(target, draft)
    torch.testing.assert_close(emitted_law(target, draft, keep, residual), target)
    residual_by_argmax = torch.nn.functional.one_hot(residual.argmax(), 4).double()
    top_two = torch.where(draft >= 0.3, draft, 0)
    keep_by_renormalised = acceptance_probs(target, top_two / top_two.sum())  # not what the token was drawn from
    for broken in (
        emitted_law(target, draft, keep, residual_by_argmax),
        emitted_law(target, draft, keep, target),
        emitted_law(target, draft, keep_by_renormalised, residual),
    ):
        assert (broken - target).abs().max() > 0.01


@given(rows=st.lists(st.tuples(simplex(3), simplex(3)), min_size=1, max_size=4))
def test_ratio_treats_each_row_as_if_alone(rows: list[tuple[Tensor, Tensor]]) -> None:
    target, draft = (torch.stack(column) for column in zip(*rows, strict=True))
    for rule in (acceptance_probs, residual_probs):
        together = rule(target[None], draft[None])
        assert torch.equal(together[0], torch.stack([rule(t, d) for t, d in rows]))


def test_residual_of_equal_distributions_is_the_target() -> None:
    same = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    assert torch.equal(residual_probs(same, same.clone()), same)


def test_ratio_refuses_distributions_over_different_vocabularies() -> None:
    with pytest.raises(CardError, match=r"target_probs \(4,\) and draft_probs \(3,\) differ"):
        acceptance_probs(torch.ones(4) / 4, torch.ones(3) / 3)
