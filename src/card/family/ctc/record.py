"""CTC-drafter: a trained head over the target's hidden states drafts a tree, in turns with it (arXiv:2412.00061)."""

from dataclasses import dataclass

from card.config.fields import Checked, setting
from card.config.method import Method
from card.config.record import Command, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class CtcSettings(Checked):
    """The file that a training made."""

    ctc: str | None = setting(None, "Head for ctc.", section="Models", read_by="writer ctc")


RECORD = Record(
    methods=(
        Method(
            name="ctc",
            summary="a tree by a trained head over the target's hidden states; no draft model",
            needs_draft=False,
            needs_head=True,
            writers=("ctc",),
            is_tuned=True,
            reads=("ctc",),
        ),
    ),
    settings=CtcSettings,
    writers={"ctc": "card.family.ctc.writer:CtcWriter"},
    commands=(
        Command(
            "train ctc", "Train a head that drafts from the target's states.", "card.family.ctc.options:ctc", "torch"
        ),
    ),
)
