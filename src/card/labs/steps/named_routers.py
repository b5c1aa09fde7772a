"""Routers by name, with an optional knob, such as ``entropy:1`` or ``router.safetensors``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from card.config.knobs import NamedKind
from card.errors import SettingsError
from card.labs.steps.rewards import Reward, equations_hold
from card.labs.steps.routers import EntropyRouter, OracleRouter, RandomRouter, RewardRouter, Router
from card.labs.steps.trained import TrainedRouter

ROUTER = NamedKind("router", "entropy:1")


@dataclass(frozen=True, slots=True)
class _Kind:
    make: Callable[[float, Reward], Router]
    usual: float  # default knob


ROUTERS: Mapping[str, _Kind] = MappingProxyType(
    {
        "entropy": _Kind(lambda knob, _: EntropyRouter(knob), 1.0),
        "reward": _Kind(lambda knob, _: RewardRouter(knob, equations_hold), 0.3),
        "oracle": _Kind(OracleRouter, 1.0),
        "random": _Kind(lambda knob, _: RandomRouter(knob), 0.5),
    }
)


def parse_router(text: str, oracle: Reward = equations_hold) -> Router:
    """Return the router named by ``entropy``, ``random:0.25`` or ``router.safetensors:0.3``.

    Args:
        oracle: the reward of the oracle; other rewards are the share of correct equations.
    Raises: SettingsError for an unknown router or a knob out of range; ModelError for a file that is no router.
    """
    found = ROUTER.parse(text, ROUTERS)
    name, kind = found.name, ROUTERS.get(found.name)
    knob = found.number(0, 0.0 if kind is None else kind.usual, float)
    if knob is None:
        raise SettingsError(f"the knob of router {name} must be a number, got {found.numbers[0]!r}; 0 is exact")
    if kind is None:
        return TrainedRouter.load(name, knob if found.numbers else None)
    return kind.make(knob, oracle)
