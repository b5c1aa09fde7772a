"""Frozen settings: what a request asks for and how the engine is set up."""

from card.config.drafting import DraftSettings, Growth, TreeShape, VerifyShape
from card.config.engine import (
    INT8,
    EngineSettings,
    Placement,
    PolicyName,
    ScheduleSetting,
    parse_size,
    split_settings,
)
from card.config.sampling import (
    MAX_LOGPROBS,
    Grammar,
    GrammarKind,
    LogitBias,
    SamplingParams,
    SamplingRule,
    ShapingRule,
)

__all__ = [
    "INT8",
    "MAX_LOGPROBS",
    "DraftSettings",
    "EngineSettings",
    "Grammar",
    "GrammarKind",
    "Growth",
    "LogitBias",
    "Placement",
    "PolicyName",
    "SamplingParams",
    "SamplingRule",
    "ScheduleSetting",
    "ShapingRule",
    "TreeShape",
    "VerifyShape",
    "parse_size",
    "split_settings",
]
