"""Frozen settings: parameters of a request and set-up of an engine."""

from card.config.drafting import DraftSettings, Growth, TreeShape, VerifyShape
from card.config.engine import (
    INT8,
    KERNEL_KINDS,
    KERNELS_VARIABLE,
    EngineSettings,
    Placement,
    PolicyName,
    parse_parameter_count,
    parse_size,
)
from card.config.sampling import NEUTRAL, Grammar, ResolvedParams, SamplingParams, SamplingRule, ShapingRule
from card.config.schedule import DrafterState, Schedule

__all__ = [
    "INT8",
    "KERNELS_VARIABLE",
    "KERNEL_KINDS",
    "NEUTRAL",
    "DraftSettings",
    "DrafterState",
    "EngineSettings",
    "Grammar",
    "Growth",
    "Placement",
    "PolicyName",
    "ResolvedParams",
    "SamplingParams",
    "SamplingRule",
    "Schedule",
    "ShapingRule",
    "TreeShape",
    "VerifyShape",
    "parse_parameter_count",
    "parse_size",
]
