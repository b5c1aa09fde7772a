"""Shares by multi-agent soft actor-critic: each server is an agent that shares out its bandwidth and compute.

All agents have one actor, which sees the server's devices one by one beside their mean. Two critics judge an agent's
action beside the means of all agents. The reward is the share of seconds saved over equal shares. Between slots the
radio fades.

Source: UARA (arXiv:2511.01695), which published no code; soft actor-critic (arXiv:1801.01290).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from card.config.fields import check, setting
from card.errors import PlanError
from card.tools.planner.edge.costs import EdgeCosts
from card.tools.planner.edge.scenario import Devices, Floats, snr
from card.tools.planner.edge.terms import Terms

_FEATURES, _ACTIONS, _HIDDEN = 3, 2, 64
_SPREAD = 2.0  # of the logits: the largest share is at most exp(4) times the smallest
_FADING_DB, _MEMORY = 4.0, 0.9  # standard deviation of the fading, and how much of it the next slot keeps
_LOG_STD = (-4.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSettings:
    """Settings of the training."""

    steps: int = setting(800, "Updates of actor and critics.", least=1)
    batch: int = setting(8, "Slots of an update.", least=1)
    memory: int = setting(2000, "Slots that are remembered.", least=1)
    learning_rate: float = setting(3e-3, "Of actor, critics and temperature.", above=0, below=math.inf)
    discount: float = setting(0.0, "Worth of the next slot, which no action changes.", least=0, below=1)
    smoothing: float = setting(0.01, "Share of the critics that their targets take over.", above=0, most=1)
    seed: int = setting(0, "Same seed, same actor.", least=0)

    def __post_init__(self) -> None:
        check(self, error=PlanError)


@dataclass(frozen=True, slots=True)
class Place:
    """One association, as agents see it; K devices. Times are in units of the mean with equal shares.

    Several places joined are one with more agents.
    """

    prices: Tensor  # [K, 8] float32: peak times draft, upload and verify; rest, its upload and verify; bound; energy
    agents: Tensor  # [K] int64: the server of each device, numbered without gaps
    snr: Tensor  # [K] at that server
    whole: Tensor  # [A] int64: which of the joined places each agent belongs to

    @classmethod
    def of(cls, costs: EdgeCosts, terms: Terms, servers: Devices) -> Place:
        """Return what agents see of devices that use these servers."""
        devices = np.arange(len(servers))
        upload, rest_upload = terms.upload[devices, servers], terms.rest_upload[devices, servers]
        verify, plain = terms.verify[servers], np.minimum(terms.plain[servers], 1e9)
        peaks = [terms.peak * part for part in (terms.draft, upload, verify)]
        prices = torch.tensor(
            np.stack([*peaks, terms.rest, rest_upload, terms.rest_verify[servers], plain, terms.energy], axis=1)
        )
        agents = torch.tensor(np.unique(servers, return_inverse=True)[1])
        whole = torch.zeros(int(agents.max()) + 1, dtype=torch.int64)
        place = cls(prices, agents, torch.tensor(snr(costs.scenario)[devices, servers]), whole)
        equal = 1.0 / place.counts[agents].double()
        unit = place.seconds(equal, equal).mean()
        return cls((prices / unit).float(), agents, place.snr, whole)

    @classmethod
    def joined(cls, places: Sequence[Place]) -> Place:
        """Return several places as one."""
        starts = np.cumsum([0, *(len(place.whole) for place in places[:-1])]).tolist()
        return cls(
            torch.cat([place.prices for place in places]),
            torch.cat([place.agents + start for place, start in zip(places, starts, strict=True)]),
            torch.cat([place.snr for place in places]),
            torch.cat([torch.full_like(place.whole, idx) for idx, place in enumerate(places)]),
        )

    @property
    def counts(self) -> Tensor:
        """Return the number of devices of each agent, [A] int64."""
        return torch.bincount(self.agents, minlength=len(self.whole))

    def seconds(self, bandwidth: Tensor, compute: Tensor) -> Tensor:
        """Return the worth of a token for each device by the shares, [K]; as `Terms.seconds`."""
        draft, upload, verify, rest, rest_upload, rest_verify, plain, energy = self.prices.unbind(1)
        slowest = torch.maximum(torch.maximum(draft, upload / bandwidth), verify / compute)
        rest = rest + rest_upload / bandwidth + rest_verify / compute
        return torch.minimum(slowest + rest, plain / compute + energy)

    def faded(self, decibels: Tensor) -> Place:
        """Return the place with this gain of each device's radio, [K]."""
        slower = torch.log2(1.0 + self.snr) / torch.log2(1.0 + self.snr * 10.0 ** (decibels / 10.0))
        prices = self.prices.clone()
        prices[:, [1, 4]] *= slower.to(prices.dtype)[:, None]
        return Place(prices, self.agents, self.snr, self.whole)

    def features(self) -> Tensor:
        """Return the logarithms of draft, upload and verification with equal shares, [K, 3]."""
        size = self.counts[self.agents]
        upload, verify = (self.prices[:, 1] + self.prices[:, 4]) * size, (self.prices[:, 2] + self.prices[:, 5]) * size
        return torch.log(torch.stack((self.prices[:, 0], upload, verify), dim=1).clamp_min(1e-6))

    def rewards(self, bandwidth: Tensor, compute: Tensor) -> Tensor:
        """Return the share of seconds that each agent saves over equal shares, [A]."""
        equal = 1.0 / self.counts[self.agents]
        ours, theirs = (_sums(self.seconds(*pair), self) for pair in ((bandwidth, compute), (equal, equal)))
        return 1.0 - ours / theirs


def _sums(values: Tensor, place: Place) -> Tensor:
    return values.new_zeros(len(place.whole), *values.shape[1:]).index_add(0, place.agents, values)


def _means(values: Tensor, groups: Tensor) -> Tensor:
    """Return the mean of the rows of each group."""
    counts = torch.bincount(groups)
    return values.new_zeros(len(counts), values.shape[1]).index_add(0, groups, values) / counts[:, None]


def _shares(actions: Tensor, place: Place) -> tuple[Tensor, Tensor]:
    """Return the shares of bandwidth and compute that actions in [-1, 1], [K, 2], stand for."""
    weights = torch.exp(_SPREAD * actions)
    bandwidth, compute = (weights / _sums(weights, place)[place.agents]).unbind(1)
    return bandwidth, compute


class Actor(nn.Module):
    """The agents' common policy."""

    def __init__(self) -> None:
        super().__init__()
        self._net = _perceptron(2 * _FEATURES, 2 * _ACTIONS)

    def forward(self, place: Place) -> tuple[Tensor, Tensor]:
        """Return mean and logarithm of the standard deviation of the actions before their tanh, [K, 2] each."""
        features = place.features()
        seen = torch.cat((features, _means(features, place.agents)[place.agents]), dim=1)
        mean, log_std = self._net(seen).chunk(2, dim=1)
        return mean, log_std.clamp(*_LOG_STD)

    def draw(self, place: Place, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw actions, [K, 2]; with their log-probability as a mean over each agent's devices, [A]."""
        mean, log_std = self(place)
        noise = torch.randn(mean.shape, generator=generator)
        actions = torch.tanh(mean + log_std.exp() * noise)
        logprobs = -0.5 * noise**2 - log_std - 0.5 * math.log(2.0 * math.pi) - torch.log(1.0 - actions**2 + 1e-6)
        return actions, _means(logprobs.sum(dim=1, keepdim=True), place.agents)[:, 0]

    def shares(self, costs: EdgeCosts, terms: Terms, servers: Devices) -> tuple[Floats, Floats]:
        """Return the shares of bandwidth and compute of all devices, [N] each, without drawing anything."""
        place = Place.of(costs, terms, servers)
        with torch.no_grad():
            bandwidth, compute = _shares(torch.tanh(self(place)[0]).double(), place)
        return bandwidth.numpy(), compute.numpy()


class _Critic(nn.Module):
    """Worth of an agent's action beside what all agents do."""

    def __init__(self) -> None:
        super().__init__()
        self._device, self._agent = _perceptron(_FEATURES + _ACTIONS, _HIDDEN), _perceptron(2 * _HIDDEN, 1)

    def forward(self, place: Place, actions: Tensor) -> Tensor:
        """Return the worth for each agent, [A]."""
        own = _means(torch.relu(self._device(torch.cat((place.features(), actions), dim=1))), place.agents)
        values: Tensor = self._agent(torch.cat((own, _means(own, place.whole)[place.whole]), dim=1))
        return values[:, 0]


def _perceptron(num_inputs: int, num_outputs: int) -> nn.Sequential:
    hidden = nn.Linear(num_inputs, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _HIDDEN), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(_HIDDEN, num_outputs))


@dataclass(frozen=True, slots=True)
class _Slot:
    """One slot of one place, what was done in it, and the slot behind it."""

    place: Place
    actions: Tensor
    rewards: Tensor
    following: Place


class _Training:
    """Actor, critics and temperature, and the slots that they learn from."""

    def __init__(self, places: Sequence[Place], settings: ActorSettings) -> None:
        self._settings = settings
        self._generator = torch.Generator().manual_seed(settings.seed)
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)  # layers draw their weights from the global generator
            self.actor, self._critics = Actor(), nn.ModuleList([_Critic(), _Critic()])
        self._targets = deepcopy(self._critics).requires_grad_(False)
        self._log_temperature = torch.tensor(-3.0, requires_grad=True)
        rate = settings.learning_rate
        self._actor_steps = torch.optim.Adam(self.actor.parameters(), rate)
        self._critic_steps = torch.optim.Adam(self._critics.parameters(), rate)
        self._temperature_steps = torch.optim.Adam([self._log_temperature], rate)
        self._places, self._fading = places, [self._noise(place) for place in places]
        self._slots: deque[_Slot] = deque(maxlen=settings.memory)

    def step(self) -> None:
        """Let one place act for a slot, and learn from a few slots."""
        idx = int(torch.randint(len(self._places), (1,), generator=self._generator))
        base = self._places[idx]
        place = base.faded(self._fading[idx])
        self._fading[idx] = _MEMORY * self._fading[idx] + math.sqrt(1.0 - _MEMORY**2) * self._noise(base)
        with torch.no_grad():
            actions, _ = self.actor.draw(place, self._generator)
            rewards = place.rewards(*_shares(actions, place))
        self._slots.append(_Slot(place, actions, rewards, base.faded(self._fading[idx])))
        chosen = torch.randint(len(self._slots), (self._settings.batch,), generator=self._generator)
        slots = [self._slots[i] for i in chosen.tolist()]
        seen = _Slot(
            Place.joined([slot.place for slot in slots]),
            torch.cat([slot.actions for slot in slots]),
            torch.cat([slot.rewards for slot in slots]),
            Place.joined([slot.following for slot in slots]),
        )
        self._teach_critics(seen)
        self._teach_actor(seen.place)

    def _noise(self, place: Place) -> Tensor:
        return _FADING_DB * torch.randn(len(place.agents), generator=self._generator)

    def _teach_critics(self, seen: _Slot) -> None:
        with torch.no_grad():
            actions, logprobs = self.actor.draw(seen.following, self._generator)
            worth = torch.minimum(*(critic(seen.following, actions) for critic in self._targets))
            wanted = seen.rewards + self._settings.discount * (worth - self._log_temperature.exp() * logprobs)
        losses = [(critic(seen.place, seen.actions) - wanted).square().mean() for critic in self._critics]
        _descend(self._critic_steps, torch.stack(losses).sum())
        with torch.no_grad():
            for target, critic in zip(self._targets.parameters(), self._critics.parameters(), strict=True):
                target.lerp_(critic, self._settings.smoothing)

    def _teach_actor(self, place: Place) -> None:
        actions, logprobs = self.actor.draw(place, self._generator)
        worth = torch.minimum(*(critic(place, actions) for critic in self._critics))
        temperature = self._log_temperature.exp()
        _descend(self._actor_steps, (temperature.detach() * logprobs - worth).mean())
        missing = logprobs.detach().mean() - _ACTIONS  # of the entropy that is wanted, -1 for each action
        _descend(self._temperature_steps, -temperature * missing)


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def train_actor(
    places: Sequence[Place], settings: ActorSettings | None = None, tell: Callable[[str], None] = lambda _: None
) -> Actor:
    """Train the agents' policy on these places. Raises: PlanError for none."""
    if not places:
        raise PlanError("there are no places to train on; give one or more")
    settings = settings or ActorSettings()
    training = _Training(places, settings)
    for step in range(settings.steps):
        if step % 100 == 0:
            tell(f"training agents, step {step} of {settings.steps}")
        training.step()
    return training.actor
