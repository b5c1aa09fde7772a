"""The verifier of an engine, as its settings name a judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from card.errors import SettingsError
from card.judges.judge import Judge, JudgingVerifier
from card.judges.names import parse_judge
from card.judges.training_free import Fly, KullbackLeibler, Relaxed, Typical
from card.tree.verify import MATCH, Verifier

_MAKERS: Mapping[str, Callable[[float], Judge]] = MappingProxyType(
    {"typical": Typical, "relaxed": Relaxed, "kl": KullbackLeibler, "fly": Fly}
)


def choose_verifier(judge: str | None, given: Verifier) -> Verifier:
    """Return the verifier of an engine: the one that was given, unless a judge is named.

    Args:
        judge: such as ``typical`` or ``relaxed:0.5``.
    Raises: SettingsError for a judge that is unknown, has a knob out of range, or stands beside a verifier.
    """
    if judge is None:
        return given
    choice = parse_judge(judge)
    if given is not MATCH:
        raise SettingsError(f"judge {judge} and a verifier of your own both decide what stays; leave one of them out")
    return JudgingVerifier(_MAKERS[choice.kind](choice.knob), is_exact=choice.is_exact)
