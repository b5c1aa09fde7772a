"""Seconds that passes and uploads take at the edge with all of a server's bandwidth and compute, by the profiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from card.errors import PlanError
from card.tools.planner.edge.scenario import Floats, Scenario, in_reach, snr
from card.tools.planner.profile import Profile

Overlap = Literal["pearl", "card"]
OVERLAPS: tuple[Overlap, ...] = ("pearl", "card")


@dataclass(frozen=True, slots=True)
class EdgeCosts:
    """Seconds of passes and uploads with all of a server's bandwidth and compute; N devices, M servers."""

    overlap: Overlap
    scenario: Scenario
    draft_s: Floats  # [N] a pass of the draft model
    upload_s: Floats  # [N, M] a token (PEARL) or layer (CARD), infinite out of reach
    verify_s: Floats  # [M] a pass of the target
    reach: Floats  # [N, M] 1 in reach, 0 out of it


def edge_costs(scenario: Scenario, target: Profile, draft: Profile, overlap: Overlap) -> EdgeCosts:
    """Return the costs of a scenario from the profiles of target and draft model.

    Raises: PlanError for an unknown overlap, or a device without a server in reach.
    """
    if overlap not in OVERLAPS:
        raise PlanError(f"the overlap must be one of {', '.join(OVERLAPS)}, got {overlap!r}")
    reach = in_reach(scenario)
    is_card = overlap == "card"
    rows = 1 + (scenario.budget if is_card else scenario.num_speculative_tokens)
    sent = scenario.layer_bytes if is_card else scenario.token_bytes
    bandwidths = np.array([one.bandwidth_hz for one in scenario.servers])
    rates = bandwidths * np.log2(1.0 + snr(scenario))
    return EdgeCosts(
        overlap=overlap,
        scenario=scenario,
        draft_s=draft.setup().true_cost().seconds(1) / np.array([one.speed for one in scenario.devices]),
        upload_s=np.where(reach, 8.0 * sent / rates, np.inf),
        verify_s=target.setup().true_cost().seconds(rows) / np.array([one.speed for one in scenario.servers]),
        reach=reach.astype(np.float64),
    )


def sender_watts(scenario: Scenario) -> Floats:
    """Return the power of each device's sender, [N]."""
    watts: Floats = 10.0 ** (np.array([one.tx_dbm for one in scenario.devices]) / 10.0) / 1000.0
    return watts
