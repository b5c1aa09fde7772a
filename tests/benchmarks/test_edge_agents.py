"""Agents that share out: their shares are shares, their prices are the plan's, and training saves something."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from card.errors import PlanError
from card.tools.planner.edge.association import associate
from card.tools.planner.edge.costs import OVERLAPS, EdgeCosts
from card.tools.planner.edge.scenario import Device, Devices, EdgeServer, Floats, Scenario
from card.tools.planner.edge.study import all_shares
from card.tools.planner.edge.terms import Terms
from tests.tools.planner.edge.places import priced, small


@pytest.fixture
def agents(bench: dict[str, ModuleType]) -> ModuleType:
    """The module of the agents."""
    return bench["edge_agents"]


def _matched(seed: int = 0, overlap: str = "pearl") -> tuple[EdgeCosts, Terms, Devices]:
    costs, terms = priced(small(seed=seed, token_bytes=100_000, layer_bytes=100_000), overlap)  # type: ignore[arg-type]
    return costs, terms, associate(costs, terms, "random", seed=seed)


def _total_of(terms: Terms, servers: Devices, members: Devices, shares: tuple[Floats, Floats]) -> float:
    return float(terms.seconds(members, int(servers[members[0]]), *(part[members] for part in shares)).sum())


def _total(terms: Terms, servers: Devices, shares: tuple[Floats, Floats]) -> float:
    used = [np.flatnonzero(servers == server) for server in np.unique(servers)]
    return sum(_total_of(terms, servers, members, shares) for members in used)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_agents_see_the_prices_of_the_plan(agents, overlap):
    costs, terms, servers = _matched(overlap=overlap)
    place = agents.Place.of(costs, terms, servers)
    shares = all_shares(terms, servers, "square-root")
    seen = place.seconds(*(torch.tensor(part) for part in shares)).sum() / len(servers)
    equal = _total(terms, servers, all_shares(terms, servers, "equal"))
    assert float(seen) == pytest.approx(_total(terms, servers, shares) / equal, rel=1e-5)
    still = place.faded(torch.zeros(len(servers)))
    assert torch.allclose(still.prices, place.prices)
    louder = place.faded(torch.full((len(servers),), 6.0))
    assert (louder.prices[:, 1] < place.prices[:, 1]).all() and torch.equal(louder.prices[:, 2], place.prices[:, 2])


def test_a_reward_is_the_share_saved_over_equal_shares(agents):
    costs, terms, servers = _matched()
    place, roots = agents.Place.of(costs, terms, servers), all_shares(terms, servers, "square-root")
    rewards = place.rewards(*(torch.tensor(part) for part in roots))
    used = [np.flatnonzero(servers == server) for server in np.unique(servers)]
    for members, reward in zip(used, rewards, strict=True):
        equal = all_shares(terms, servers, "equal")
        ours, theirs = (_total_of(terms, servers, members, shares) for shares in (roots, equal))
        assert float(reward) == pytest.approx(1.0 - ours / theirs, abs=1e-5)


def test_places_that_are_joined_keep_their_agents_apart(agents):
    first, second = (agents.Place.of(*_matched(seed)) for seed in (0, 1))
    both = agents.Place.joined([first, second])
    equal = [1.0 / place.counts[place.agents] for place in (first, second, both)]
    assert both.counts.tolist() == first.counts.tolist() + second.counts.tolist()
    apart = torch.cat([place.features() for place in (first, second)])
    assert torch.equal(both.features(), apart) and torch.allclose(both.rewards(equal[2], equal[2]), torch.zeros(6))


def test_shares_of_an_actor_sum_to_one_and_the_same_seed_trains_the_same(agents):
    costs, terms, servers = _matched()
    place, settings = agents.Place.of(costs, terms, servers), agents.ActorSettings(steps=3, batch=2)
    first, second = (agents.train_actor([place], settings).shares(costs, terms, servers) for _ in range(2))
    for server in set(servers.tolist()):
        assert [part[servers == server].sum() for part in first] == pytest.approx([1.0, 1.0])
    assert all((one == other).all() and (one > 0).all() for one, other in zip(first, second, strict=True))


@pytest.mark.slow
def test_training_saves_over_equal_shares_where_radios_differ(agents):
    devices = tuple(Device(x_m=metres, y_m=0) for metres in (20, 30, 250, 350))
    scenario = Scenario(devices=devices, servers=(EdgeServer(x_m=0, y_m=0),), token_bytes=100_000, least_snr_db=-40.0)
    costs, terms = priced(scenario, "pearl")
    servers = np.zeros(4, dtype=np.int64)
    equal, roots = (_total(terms, servers, all_shares(terms, servers, rule)) for rule in ("equal", "square-root"))
    trained = agents.train_actor([agents.Place.of(costs, terms, servers)]).shares(costs, terms, servers)
    assert 1.0 - _total(terms, servers, trained) / equal > (1.0 - roots / equal) / 4.0 > 0.02


def test_what_cannot_be_trained_on_is_refused(agents):
    with pytest.raises(PlanError, match="no places to train on"):
        agents.train_actor([])
    with pytest.raises(PlanError, match="learning_rate"):
        agents.ActorSettings(learning_rate=float("nan"))
