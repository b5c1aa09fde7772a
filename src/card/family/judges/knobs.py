"""Judges by name, with an optional knob, such as ``relaxed:0.5``. Quick to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from card.config.knobs import NamedKind
from card.errors import SettingsError


@dataclass(frozen=True, slots=True)
class KnobRange:
    """The knob of a kind of judge."""

    usual: float  # the default
    most: float  # the least is 0, which is exact


KNOBS: Mapping[str, KnobRange] = MappingProxyType(
    {
        "typical": KnobRange(usual=1.0, most=1e6),
        "relaxed": KnobRange(usual=0.5, most=1.0),
        "kl": KnobRange(usual=0.1, most=1e6),
        "fly": KnobRange(usual=0.7, most=1.0),
        "partial": KnobRange(usual=1.0, most=1.0),
    }
)
AUTO = "auto"
_OF_FILES = KnobRange(usual=1.0, most=1.0)
JUDGE = NamedKind("judge", "relaxed:0.5")
REWARD = NamedKind("reward", "reward.safetensors:0.2")


@dataclass(frozen=True, slots=True)
class JudgeChoice:
    """A judge as the user named it."""

    kind: str  # one of `KNOBS`, or AUTO
    knob: float | None  # None: that of the file
    file: str | None = None  # of a trained judge

    @property
    def is_exact(self) -> bool:
        """True if it tolerates nothing."""
        return self.knob == 0.0


def parse_judge(name: str) -> JudgeChoice:
    """Return the judge named by ``typical``, ``relaxed:0.5``, ``judge.safetensors`` or ``judge.safetensors:0.2``.

    Raises: SettingsError for an unknown judge or a knob out of range.
    """
    return _parse(name, JUDGE, KNOBS)


def parse_reward(name: str) -> JudgeChoice:
    """Return the reward named by ``reward.safetensors`` or ``reward.safetensors:0.2``. Raises: as `parse_judge`."""
    return _parse(name, REWARD, {})


def _parse(name: str, sort: NamedKind, known: Mapping[str, KnobRange]) -> JudgeChoice:
    parsed = sort.parse(name, known)
    kind, is_file = parsed.name, parsed.name not in known
    allowed = _OF_FILES if is_file else known[kind]
    knob = parsed.number(0, allowed.usual, float)
    if knob is None or not 0.0 <= knob <= allowed.most:
        usual = "a file says what is usual" if is_file else f"{allowed.usual:g} is usual"
        raise SettingsError(
            f"the knob of {sort.kind} {kind} must be a number from 0 to {allowed.most:g}, got {parsed.numbers[0]!r};"
            f" 0 is exact, {usual}"
        )
    if is_file:
        return JudgeChoice(AUTO, knob if parsed.numbers else None, kind)
    return JudgeChoice(kind, knob)
