"""Step-wise routing: the draft model writes a step, and a router says whether the target writes it anew."""

from card.steps.arbitrage import Arbitrage, SteppedOutput, WrittenStep
from card.steps.names import parse_router
from card.steps.rewards import SolutionReward, equations_hold
from card.steps.routers import EntropyRouter, OracleRouter, RandomRouter, RewardRouter, Step
from card.steps.trained import TrainedRouter

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
