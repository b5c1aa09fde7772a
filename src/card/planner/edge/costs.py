"""Latency and energy of a device at a server as functions of its shares of bandwidth and compute.

Devices upload while they draft, and servers verify meanwhile. Seconds a token are
    peak * max(draft, upload / y, verify / z) + rest + rest_upload / y + rest_verify / z
for shares y of the bandwidth and z of the compute, which is convex in both. Rounds on virtual clocks take within 8 %
of that for PEARL and 17 % for CARD, where it drafts faster than the target writes plainly: a test holds them together.

PEARL (arXiv:2408.11850): windows of G tokens. One that is accepted as a whole overlaps with its neighbours and takes as
long as the slowest of the three; any other empties the pipeline. CARD (arXiv:2508.04462): layers of a tree. A token
that is not its layer's first candidate costs layers, all of them where the tree lacks it. The target never waits, so
no token takes longer than plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from card.errors import PlanError
from card.planner.edge.scenario import Devices, Floats, Scenario, in_reach, snr
from card.planner.profile import Profile

Overlap = Literal["pearl", "card"]
_UNSEEN = 0.5  # passes of CARD's target that a wrong first candidate costs, by rounds on virtual clocks
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


@dataclass(frozen=True, slots=True)
class Terms:
    """Coefficients of the seconds that a token is worth, energy included; N devices, M servers."""

    peak: float
    draft: Floats  # [N]
    upload: Floats  # [N, M]
    verify: Floats  # [M]
    rest: Floats  # [N]
    energy: Floats  # [N] the part of rest that computing is worth
    rest_upload: Floats  # [N, M]
    rest_verify: Floats  # [M]
    plain: Floats  # [M] a token takes no longer than this by the share of compute; inf for no such bound

    def seconds(self, devices: Devices, server: int, bandwidth: Floats, compute: Floats) -> Floats:
        """Return the worth of a token for some devices of one server by their shares, each above 0."""
        upload, verify = self.upload[devices, server] / bandwidth, self.verify[server] / compute
        slowest = np.maximum(np.maximum(self.draft[devices], upload), verify)
        rest = self.rest[devices] + self.rest_upload[devices, server] / bandwidth + self.rest_verify[server] / compute
        bound = self.plain[server] / compute + self.energy[devices]
        total: Floats = np.minimum(self.peak * slowest + rest, bound)
        return total


def edge_costs(scenario: Scenario, target: Profile, draft: Profile, overlap: Overlap) -> EdgeCosts:
    """Return what a scenario costs by the profiles of target and draft model.

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


def terms_of(costs: EdgeCosts) -> Terms:
    """Return the coefficients of a token's seconds and of its energy, which the scenario turns into seconds."""
    place = costs.scenario
    accepted, window = place.acceptance, place.num_speculative_tokens
    if costs.overlap == "pearl":
        whole, tokens = accepted**window, _geometric(accepted, window)
        shares = (whole / tokens * window, (1.0 - whole) / tokens)
        drafted = window * (2.0 - whole) / tokens
        rest, per_window = shares[1] * (window * costs.draft_s + 2.0 * place.one_way_s), float(window)
        verify, rest_verify = costs.verify_s / window, shares[1] * costs.verify_s
        plain = np.full_like(costs.verify_s, np.inf)
    else:
        missed = (1.0 - accepted) * (1.0 - place.hit_rate / 2.0)  # of a hit, half of the layers live on
        shares = (1.0, missed)
        drafted = 1.0 + (1.0 - accepted) * place.lead / 2.0
        rest, per_window = missed * (costs.draft_s + 2.0 * place.one_way_s), 1.0
        verify = costs.verify_s / _geometric(accepted, place.budget + 1)
        rest_verify, plain = (1.0 - accepted) * _UNSEEN * costs.verify_s, costs.verify_s
    worth = place.energy_weight / np.array([one.battery for one in place.devices])
    computing = worth * drafted * costs.draft_s * np.array([one.compute_w for one in place.devices])
    sending = worth * drafted * sender_watts(place)
    return Terms(
        peak=shares[0],
        draft=costs.draft_s,
        upload=costs.upload_s,
        verify=verify,
        rest=rest + computing,
        energy=computing,
        rest_upload=costs.upload_s * (shares[1] * per_window + sending[:, None]),
        rest_verify=rest_verify,
        plain=plain,
    )


def sender_watts(scenario: Scenario) -> Floats:
    """Return the power of each device's sender, [N]."""
    watts: Floats = 10.0 ** (np.array([one.tx_dbm for one in scenario.devices]) / 10.0) / 1000.0
    return watts


def _geometric(accepted: float, most: int) -> float:
    """Return the mean number of tokens that a verification of ``most - 1`` candidates and one more gives at most."""
    return float(sum(accepted**i for i in range(most)))
