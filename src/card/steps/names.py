"""Routers by name, such as ``entropy:1``: the name, and perhaps the knob."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from card.errors import SettingsError
from card.steps.routers import EntropyRouter, OracleRouter, RandomRouter, RewardRouter, Router, equations_hold


@dataclass(frozen=True, slots=True)
class _Kind:
    make: Callable[[float], Router]
    usual: float  # knob that is taken if none is given


ROUTERS: Mapping[str, _Kind] = MappingProxyType(
    {
        "entropy": _Kind(EntropyRouter, 1.0),
        "reward": _Kind(lambda knob: RewardRouter(knob, equations_hold), 0.3),
        "oracle": _Kind(lambda knob: OracleRouter(knob, equations_hold), 1.0),
        "random": _Kind(RandomRouter, 0.5),
    }
)


def parse_router(text: str) -> Router:
    """Return the router that ``entropy`` or ``random:0.25`` means; rewards are the share of right equations.

    Raises: SettingsError for an unknown router or a knob out of range.
    """
    name, is_given, number = text.partition(":")
    if name not in ROUTERS:
        raise SettingsError(
            f"unknown router {name!r}; known: {', '.join(ROUTERS)}, each with a knob if you like, such as entropy:1"
        )
    kind = ROUTERS[name]
    try:
        knob = float(number) if is_given else kind.usual
    except ValueError:
        raise SettingsError(
            f"the knob of router {name} must be a number, got {number!r}; 0 is exact, {kind.usual:g} is usual"
        ) from None
    return kind.make(knob)
