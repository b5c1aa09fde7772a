"""HiViS: a drafter reads text and the target's hidden states, and never places of images (arXiv:2509.23928)."""

from dataclasses import dataclass

from card.config.fields import Checked, setting
from card.config.method import Method
from card.config.record import Command, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class HivisSettings(Checked):
    """The file that a training made."""

    hivis: str | None = setting(None, "Drafter for hivis.", section="Models", read_by="writer hivis")


RECORD = Record(
    methods=(
        Method(
            name="hivis",
            summary="a tree by a trained drafter that reads text and the target's hidden states; no draft model",
            needs_draft=False,
            needs_head=True,
            writers=("hivis",),
            is_tuned=True,
            reads=("hivis",),
        ),
    ),
    settings=HivisSettings,
    writers={"hivis": "card.family.hivis.writer:HivisWriter"},
    commands=(
        Command(
            "train hivis", "Train a drafter for a target that sees images.", "card.family.hivis.options:hivis", "torch"
        ),
    ),
)
