"""Arbitrage: a draft model writes steps of an answer, and a router hands some to the target."""

from dataclasses import dataclass

from card.config.fields import Checked, setting
from card.config.method import Method
from card.config.record import Command, Record

STEPWISE = "arbitrage"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings(Checked):
    """The router."""

    router: str | None = setting(None, f"Of --method {STEPWISE}, such as entropy:1.")


RECORD = Record(
    methods=(
        Method(
            name=STEPWISE,
            summary="a draft model writes steps, and a router hands some to the target; not exact",
            runs="card.labs.steps.command:run",
            in_python="card.steps.Arbitrage",
            extra="torch",
            settings=RouterSettings,
        ),
    ),
    commands=(
        Command("train router", f"Train a router for --method {STEPWISE}.", "card.labs.steps.options:router", "torch"),
    ),
)
