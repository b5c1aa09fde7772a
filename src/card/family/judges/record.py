"""Judges: verifiers that accept candidates which the target would not have chosen. One kind judges whole steps."""

from dataclasses import dataclass

from card.config import DraftSettings
from card.config.fields import Checked, setting
from card.config.method import Method
from card.config.record import Command, Record
from card.family.classic.sps import chain_in_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings(Checked):
    """The judge of an engine, or the reward of a method that judges steps."""

    judge: str | None = setting(
        None, "Judge of candidates, such as relaxed:0.5; not exact.", section="Method", is_common=True
    )
    reward: str | None = setting(None, "Reward of steps for arbitrage.", section="Models", read_by="method arbitrage")


def chain_of_a_step(draft: DraftSettings) -> DraftSettings:
    """Return settings under which a chain of ``lead`` tokens is drafted in each round, so that it has a whole step."""
    return chain_in_turns(draft.replace(num_speculative_tokens=max(draft.lead, draft.num_speculative_tokens)))


METHOD = Method(
    name="arbitrage",
    summary="whole steps of a draft model that a learned reward finds as good as the target's; not exact",
    needs_head=True,
    is_exact=False,
    shape=chain_of_a_step,
    reads=("reward",),
)
RECORD = Record(
    methods=(METHOD,),
    settings=JudgeSettings,
    verifier="card.family.judges.choosing:choose_verifier",
    commands=(
        Command("train judge", "Train AutoJudge for --judge.", "card.family.judges.options:judge", "torch"),
        Command(
            "train reward",
            "Train a reward of steps for --method arbitrage.",
            "card.family.judges.options:reward",
            "torch",
        ),
    ),
)
