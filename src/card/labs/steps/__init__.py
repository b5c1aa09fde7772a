"""Step-wise routing: the draft model writes a step, and a router says whether the target writes it anew."""

from card.labs.steps.arbitrage import Arbitrage, SteppedOutput, WrittenStep
from card.labs.steps.names import parse_router
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
