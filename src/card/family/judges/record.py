"""Judges: verifiers that accept candidates which the target would not have chosen."""

from dataclasses import dataclass

from card.config.fields import Checked, setting
from card.config.record import Command, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings(Checked):
    """The judge of an engine."""

    judge: str | None = setting(
        None, "Judge of candidates, such as relaxed:0.5; not exact.", section="Method", is_common=True
    )


RECORD = Record(
    settings=JudgeSettings,
    verifier="card.family.judges.choosing:choose_verifier",
    commands=(Command("train judge", "Train AutoJudge for --judge.", "card.family.judges.options:judge", "torch"),),
)
