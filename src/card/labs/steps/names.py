"""Routers by name, such as ``entropy:1`` or ``router.safetensors``: the name, and perhaps the knob."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from card.errors import SettingsError
from card.labs.steps.rewards import Reward, equations_hold
from card.labs.steps.routers import EntropyRouter, OracleRouter, RandomRouter, RewardRouter, Router
from card.labs.steps.trained import TrainedRouter

FILE_END = ".safetensors"


@dataclass(frozen=True, slots=True)
class _Kind:
    make: Callable[[float, Reward], Router]
    usual: float  # knob that is taken if none is given


ROUTERS: Mapping[str, _Kind] = MappingProxyType(
    {
        "entropy": _Kind(lambda knob, _: EntropyRouter(knob), 1.0),
        "reward": _Kind(lambda knob, _: RewardRouter(knob, equations_hold), 0.3),
        "oracle": _Kind(OracleRouter, 1.0),
        "random": _Kind(lambda knob, _: RandomRouter(knob), 0.5),
    }
)


def parse_router(text: str, oracle: Reward = equations_hold) -> Router:
    """Return the router that ``entropy``, ``random:0.25`` or ``router.safetensors:0.3`` means.

    Args:
        oracle: the reward of the oracle; other rewards are the share of right equations.
    Raises: SettingsError for an unknown router or a knob out of range; ModelError for a file that is no router.
    """
    head, is_given, number = text.rpartition(":")
    name = head if is_given else text
    is_file = name.endswith(FILE_END)
    if name not in ROUTERS and not is_file:
        raise SettingsError(
            f"unknown router {name!r}; known: {', '.join(ROUTERS)}, each with a knob if you like, such as entropy:1, "
            f"and files of card train router, which end in {FILE_END}"
        )
    knob = _number(name, number) if is_given else None
    if is_file:
        return TrainedRouter.load(name, knob)
    kind = ROUTERS[name]
    return kind.make(kind.usual if knob is None else knob, oracle)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingsError(f"the knob of router {name} must be a number, got {text!r}; 0 is exact") from None
