"""All that the engine knows of H-RAD: after each pass it is asked where the drafter's trunk is to branch.

The runners know `card.models.hrad.features` alone. Whoever does not ask for a predictor runs nothing of this package.
"""

from __future__ import annotations

from collections.abc import Callable

from card.models.hrad.network import load_hrad
from card.models.torch_runner import TorchRunner

OFF = "off"

Foresight = Callable[[int, int, int], float]
"""(index of the extension in the pass, index of the logits that gave the new token, that token) -> branch_below."""


def foresight(predictor: str, runner: TorchRunner, usual: float) -> Foresight | None:
    """Return where to branch by what a predictor says of the passes of ``runner``; None leaves it at the settings.

    Args:
        predictor: "off", "demo", or a file of `card train hrad`.
        runner: of the target; if the predictor ever moves the branch point, it keeps hidden states from now on.
        usual: probability below which the drafter branches where nothing special is foreseen.
    Raises: ModelError if there is no such predictor, or it was trained for another target.
    """
    hrad = load_hrad(predictor, runner) if predictor != OFF else None
    if hrad is None or not hrad.is_heard:
        return None
    return lambda extension_idx, logits_idx, new_id: hrad.branch_below(
        runner.features(extension_idx)[logits_idx], new_id, usual
    )
