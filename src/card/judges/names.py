"""Judges by name, such as ``relaxed:0.5``: the name, and perhaps the knob. Quick to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from card.errors import SettingsError


@dataclass(frozen=True, slots=True)
class KnobRange:
    """The knob of a kind of judge."""

    usual: float  # that is taken if none is given
    most: float  # the least is 0, which is exact


KNOBS: Mapping[str, KnobRange] = MappingProxyType(
    {
        "typical": KnobRange(usual=1.0, most=1e6),
        "relaxed": KnobRange(usual=0.5, most=1.0),
        "kl": KnobRange(usual=0.1, most=1e6),
        "fly": KnobRange(usual=0.7, most=1.0),
    }
)


@dataclass(frozen=True, slots=True)
class JudgeChoice:
    """A judge as it was asked for."""

    kind: str
    knob: float

    @property
    def is_exact(self) -> bool:
        """True if it tolerates nothing."""
        return self.knob == 0.0


def parse_judge(name: str) -> JudgeChoice:
    """Return the judge that ``typical`` or ``relaxed:0.5`` means.

    Raises: SettingsError for an unknown judge or a knob out of range.
    """
    kind, is_given, number = name.partition(":")
    if kind not in KNOBS:
        raise SettingsError(
            f"unknown judge {kind!r}; known: {', '.join(KNOBS)}, each with a knob if you like, such as relaxed:0.5"
        )
    allowed = KNOBS[kind]
    knob = _number(number) if is_given else allowed.usual
    if knob is None or not 0.0 <= knob <= allowed.most:
        raise SettingsError(
            f"the knob of judge {kind} must be a number from 0 to {allowed.most:g}, got {number!r}; 0 is exact, "
            f"{allowed.usual:g} is usual"
        )
    return JudgeChoice(kind, knob)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
