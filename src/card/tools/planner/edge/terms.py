"""Latency and energy of a device at a server as functions of its shares of bandwidth and compute.

Devices upload while they draft, and servers verify meanwhile. Seconds a token are
    peak * max(draft, upload / y, verify / z) + rest + rest_upload / y + rest_verify / z
for shares y of the bandwidth and z of the compute, which is convex in both. Simulated rounds agree with it within 8 %
for PEARL and 3 % for CARD with a scenario's average times. Over the devices of a server they agree within 5 and 10 %,
if CARD drafts faster than the target decodes plainly. Tests check this.

PEARL (arXiv:2408.11850): windows of G tokens. A window that is accepted whole overlaps with its neighbours and takes as
long as the slowest of the three; any other empties the pipeline. CARD (arXiv:2508.04462): layers of a tree. A token
that is not its layer's first candidate costs layers, all of them if the tree lacks it, and passes that verify less than
they could. The number of these passes comes from a simulation of one device with average times. The target never waits,
so no token takes longer than plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from card.tools.planner.edge.costs import EdgeCosts, sender_watts
from card.tools.planner.edge.rounds import run_device
from card.tools.planner.edge.scenario import Devices, Floats

_PROBE_TOKENS = 3000  # decoded by the simulated device


@dataclass(frozen=True, slots=True)
class Terms:
    """Coefficients of the cost of a token in seconds, energy included; N devices, M servers."""

    peak: float
    draft: Floats  # [N]
    upload: Floats  # [N, M]
    verify: Floats  # [M]
    rest: Floats  # [N]
    energy: Floats  # [N] the part of rest that is the energy of computing
    rest_upload: Floats  # [N, M]
    rest_verify: Floats  # [M]
    plain: Floats  # [M] bound of a token's seconds, times the share of compute; inf for none
    wrong_passes: float  # passes of the target lost by a wrong first candidate; 0 for PEARL, whose windows include it

    def seconds(self, devices: Devices, server: int, bandwidth: Floats, compute: Floats) -> Floats:
        """Return the cost of a token for some devices of one server, by their shares, each above 0."""
        upload, verify = self.upload[devices, server] / bandwidth, self.verify[server] / compute
        slowest = np.maximum(np.maximum(self.draft[devices], upload), verify)
        rest = self.rest[devices] + self.rest_upload[devices, server] / bandwidth + self.rest_verify[server] / compute
        bound = self.plain[server] / compute + self.energy[devices]
        total: Floats = np.minimum(self.peak * slowest + rest, bound)
        return total


def terms_of(costs: EdgeCosts) -> Terms:
    """Return the coefficients of a token's seconds and energy; the scenario converts energy into seconds."""
    place = costs.scenario
    accepted, window = place.acceptance, place.num_speculative_tokens
    if costs.overlap == "pearl":
        whole, tokens = accepted**window, _geometric(accepted, window)
        shares = (whole / tokens * window, (1.0 - whole) / tokens)
        drafted = window * (2.0 - whole) / tokens
        rest, per_window = shares[1] * (window * costs.draft_s + 2.0 * place.one_way_s), float(window)
        verify, rest_verify = costs.verify_s / window, shares[1] * costs.verify_s
        plain, wrong_passes = np.full_like(costs.verify_s, np.inf), 0.0
    else:
        missed = (1.0 - accepted) * (1.0 - place.hit_rate * place.kept_share)
        shares = (1.0, missed)
        drafted = 1.0 + (1.0 - accepted) * place.lead / 2.0
        rest, per_window = missed * (costs.draft_s + 2.0 * place.one_way_s), 1.0
        tokens = _geometric(accepted, place.budget + 1)
        verify = costs.verify_s / tokens
        wrong_passes = _wrong_passes(costs, missed, tokens)
        rest_verify, plain = (1.0 - accepted) * wrong_passes * costs.verify_s, costs.verify_s
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
        wrong_passes=wrong_passes,
    )


def _wrong_passes(costs: EdgeCosts, missed: float, tokens: float) -> float:
    """Return how many passes of the target a wrong first candidate costs, beyond the time of device and link.

    It is the remainder of a simulation of one device with the scenario's average times and equal shares. ``tokens`` is
    the number of tokens of a pass that verifies as much as it may.
    """
    place, accepted = costs.scenario, costs.scenario.acceptance
    if accepted == 1.0:
        return 0.0
    sharing = max(1.0, len(place.devices) / len(place.servers))
    draft_s, verify_s = float(costs.draft_s.mean()), sharing * float(costs.verify_s.mean())
    upload_s = sharing * float(np.median(costs.upload_s[costs.reach > 0.0]))
    average = replace(
        costs, draft_s=np.full(1, draft_s), upload_s=np.full((1, 1), upload_s), verify_s=np.full(1, verify_s)
    )
    run = run_device(average, 0, 0, (1.0, 1.0), _PROBE_TOKENS)
    told_s = max(draft_s, upload_s, verify_s / tokens) + missed * (draft_s + upload_s + 2.0 * place.one_way_s)
    return max(0.0, run.seconds_per_token - told_s) / ((1.0 - accepted) * verify_s)


def _geometric(accepted: float, most: int) -> float:
    """Return the mean number of tokens from verifying ``most - 1`` candidates, the bonus token included."""
    return float(sum(accepted**i for i in range(most)))
