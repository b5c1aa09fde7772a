"""What others have published, and where it stands.

The body of CARD's paper was not at hand. Its abstract was, and the result files in its repository, from which the
figures by cache width are computed. So none of these is a figure that the paper itself prints, but the 4.83.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WIDTHS = (5, 25, 45, 65, 85, 105, 145, 185, 205)
PAIR = "Llama-3.2-1B -> Llama-3.1-70B"
SWEEP_SOURCE = (
    "computed from the result files of the repository hunzhizi/CARD (5 records of GSM8K and 20 of MT-bench for each K, "
    "7 drafter layers a round); not printed in arXiv:2508.04462"
)
BEST_SPEED_UP = 4.83  # "up to", a 70B target; abstract of arXiv:2508.04462
SCRIPTS_SOURCE = "run scripts of the repository hunzhizi/CARD"
SCRIPT_WIDTHS: Mapping[str, tuple[int, int]] = {  # draft: (K, drafter layers a round), target Llama-3.1-70B
    "Llama-3.2-1B": (100, 7),
    "Llama-3.1-8B": (50, 4),
}


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One width of the published sweep. Shares are of rounds."""

    beam_width: int
    tokens_per_pass: float
    miss_rate: float
    zero_rate: float | None  # rounds that accepted nothing; None: not known


SWEEP: Mapping[str, tuple[SweepPoint, ...]] = {
    "gsm8k": (
        SweepPoint(5, 4.43, 0.155, 0.299),
        SweepPoint(25, 4.92, 0.091, 0.239),
        SweepPoint(45, 5.40, 0.071, 0.187),
        SweepPoint(65, 5.43, 0.061, 0.171),
        SweepPoint(85, 5.48, 0.047, 0.182),
        SweepPoint(105, 5.54, 0.057, 0.187),
        SweepPoint(145, 5.78, 0.038, 0.142),
        SweepPoint(185, 5.75, 0.034, 0.140),
        SweepPoint(205, 5.88, 0.026, 0.126),
    ),
    "mt-bench": (
        SweepPoint(5, 2.40, 0.326, 0.546),
        SweepPoint(25, 2.63, 0.235, 0.488),
        SweepPoint(45, 2.73, 0.211, 0.469),
        SweepPoint(65, 2.78, 0.201, None),
        SweepPoint(85, 2.72, 0.198, None),
        SweepPoint(105, 2.84, 0.191, 0.455),
        SweepPoint(145, 2.85, 0.184, None),
        SweepPoint(185, 2.90, 0.169, None),
        SweepPoint(205, 2.91, 0.166, 0.420),
    ),
}
