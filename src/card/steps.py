"""Answers written step by step by two models: the public door of `card.labs.steps`."""

from typing import TYPE_CHECKING

from card.machine.doors import door

if TYPE_CHECKING:
    from card.labs.steps.arbitrage import Arbitrage, SteppedOutput, WrittenStep
    from card.labs.steps.named_routers import parse_router
    from card.labs.steps.rewards import SolutionReward, equations_hold
    from card.labs.steps.routers import EntropyRouter, OracleRouter, RandomRouter, RewardRouter, Step
    from card.labs.steps.trained import TrainedRouter

__all__ = [
    "Arbitrage",
    "EntropyRouter",
    "OracleRouter",
    "RandomRouter",
    "RewardRouter",
    "SolutionReward",
    "Step",
    "SteppedOutput",
    "TrainedRouter",
    "WrittenStep",
    "equations_hold",
    "parse_router",
]

if not TYPE_CHECKING:
    _MODULES = (
        "card.labs.steps.arbitrage",
        "card.labs.steps.named_routers",
        "card.labs.steps.rewards",
        "card.labs.steps.routers",
        "card.labs.steps.trained",
    )
    __getattr__, __dir__ = door(__name__, __all__, _MODULES, needs=("torch", "transformers"), extra="torch")
