"""Verification by a density ratio: what it emits has the target's law, for patches and for tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from card.errors import SettingsError
from card.labs.series.laws import Gaussian, Law
from card.labs.series.verify import MODES, AcceptanceRule, ChainVerdict, density_ratio, find_rule, residual
from tests.examples import settings
from tests.labs.series.laws import Categorical, excess, normal_excess

MANY = 20_000  # chains verified side by side
BOUND = 8.0  # standard deviations of a chi-square; chance alone stays below it


def spread(law: Gaussian, num_places: int) -> Gaussian:
    """Return the same law at many paths and some places."""
    return Gaussian(law.mean.expand(MANY, num_places, -1), law.std.expand(MANY, num_places, -1))


def verified(rule: AcceptanceRule[Gaussian], p: Gaussian, q: Gaussian, num_proposed: int = 1, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    draft = spread(q, num_proposed)
    proposals = draft.sample(generator)
    return proposals, rule.verify(spread(p, num_proposed + 1), draft, proposals, generator)


def first_values(proposals: Tensor, verdict: ChainVerdict) -> Tensor:
    """Return the first value that each path emits."""
    is_kept = (verdict.num_accepted > 0).view(-1, *[1] * (proposals.ndim - 2))
    return torch.where(is_kept, proposals[:, 0], verdict.next_value)


@st.composite
def gaussians(draw: st.DrawFn) -> Gaussian:
    means = draw(st.lists(st.floats(-2, 2), min_size=2, max_size=2))
    stds = draw(st.lists(st.floats(0.3, 2), min_size=2, max_size=2))
    return Gaussian(torch.tensor(means, dtype=torch.float64), torch.tensor(stds, dtype=torch.float64))


def pair(shift: float = 0.8, width: float = 0.7) -> tuple[Gaussian, Gaussian]:
    """Return a target's and a draft's law that differ in mean and width."""
    p = Gaussian(torch.tensor([0.3, -0.2]).double(), torch.tensor([1.0, 0.8]).double())
    return p, Gaussian(p.mean + shift, width * p.std)


@settings(max_examples=25, deadline=None)
@given(p=gaussians(), q=gaussians(), num_proposed=st.integers(1, 3), seed=st.integers(0, 1 << 30))
def test_an_emitted_patch_has_exactly_the_targets_law(p, q, num_proposed, seed):
    values = first_values(*verified(find_rule("exact"), p, q, num_proposed, seed))
    for element in range(2):
        assert normal_excess(values[:, element], p.mean[element], p.std[element]) < BOUND
    products = ((values - p.mean) / p.std).prod(-1)  # of independent elements: mean 0, variance 1
    assert abs(float(products.mean())) < 6 / MANY**0.5


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "exact"])
def test_the_same_check_rejects_each_published_rule(mode):
    p, q = pair()
    values = first_values(*verified(find_rule(mode), p, q))
    assert max(normal_excess(values[:, i], p.mean[i], p.std[i]) for i in range(2)) > 2 * BOUND
    assert not find_rule(mode).is_exact


def test_a_proposal_stays_as_often_as_the_two_laws_overlap():
    p = Gaussian(torch.zeros(1).double(), torch.ones(1).double())
    q = Gaussian(torch.ones(1).double(), torch.ones(1).double())
    _, verdict = verified(find_rule("exact"), p, q)
    overlap = float(torch.special.erfc(torch.tensor(0.5 / 2**0.5)))  # 1 - TV of unit normals at distance 1
    assert abs(float(verdict.num_accepted.double().mean()) - overlap) < 0.02


def test_a_draft_that_equals_its_target_is_always_kept_and_the_bonus_has_the_targets_law():
    p, _ = pair()
    _, verdict = verified(find_rule("exact"), p, p, num_proposed=3)
    assert bool((verdict.num_accepted == 3).all())
    assert normal_excess(verdict.next_value[:, 0], p.mean[0], p.std[0]) < BOUND


def test_a_residual_that_is_never_met_ends_after_a_bounded_number_of_draws():
    law = Gaussian(torch.zeros(1, 3).double(), torch.ones(1, 3).double())
    value = residual(law, law, torch.Generator().manual_seed(0))
    assert value.shape == (1, 3)
    assert bool(value.isfinite().all())


def test_without_proposals_a_value_of_the_target_comes_out():
    p, _ = pair()
    nothing = Gaussian(torch.empty(MANY, 0, 2), torch.empty(MANY, 0, 2))
    verdict = find_rule("exact").verify(spread(p, 1), nothing, torch.empty(MANY, 0, 2), torch.Generator())
    assert bool((verdict.num_accepted == 0).all())
    assert normal_excess(verdict.next_value[:, 1], p.mean[1], p.std[1]) < BOUND


@st.composite
def simplex(draw: st.DrawFn) -> Tensor:
    weights = draw(st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any))
    return torch.tensor(weights).double() / sum(weights)


@settings(max_examples=25, deadline=None)
@given(p=simplex(), q=simplex(), seed=st.integers(0, 1 << 30))
def test_tokens_go_through_the_same_rule_and_keep_the_targets_law(p, q, seed):
    generator = torch.Generator().manual_seed(seed)
    target, draft = (Categorical(one.expand(MANY, places, -1)) for one, places in ((p, 3), (q, 2)))
    rule: AcceptanceRule[Law] = AcceptanceRule(density_ratio, residual, is_exact=True)
    proposals = draft.sample(generator)
    values = first_values(proposals, rule.verify(target, draft, proposals, generator))
    counts = torch.bincount(values, minlength=4)
    assert int(counts[p == 0].sum()) == 0
    assert excess(counts, p) < 2 * BOUND  # so few tokens have a law with a longer tail


@pytest.mark.parametrize(("mode", "tolerance"), [("exakt", 0.5), ("tolerance", -1.0), ("tolerance", float("nan"))])
def test_an_unknown_mode_or_a_tolerance_that_is_none_is_refused(mode, tolerance):
    with pytest.raises(SettingsError, match=r"must be"):
        find_rule(mode, tolerance)
