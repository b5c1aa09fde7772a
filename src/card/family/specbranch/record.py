"""SpecBranch, and H-RAD, its predictor of rejections."""

from dataclasses import dataclass

from card.config.fields import Checked, setting
from card.config.record import Command, Record
from card.family.specbranch.branches import METHOD


@dataclass(frozen=True, slots=True, kw_only=True)
class HRadSettings(Checked):
    """The predictor that moves the branch point."""

    hrad: str = setting("off", "Predictor for specbranch: off, demo, a file, obey:FILE.", section="Models")


RECORD = Record(
    methods=(METHOD,),
    settings=HRadSettings,
    consumers="card.family.specbranch.network:hrad_consumers",
    commands=(
        Command(
            "train hrad",
            "Train H-RAD, which predicts rejections for method specbranch.",
            "card.family.specbranch.options:hrad",
            "torch",
        ),
    ),
)
