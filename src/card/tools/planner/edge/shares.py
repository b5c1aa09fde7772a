"""Shares of a server's bandwidth and compute for its devices: equal, by square roots, or the convex optimum."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from card.errors import PlanError
from card.machine.packages import install_command
from card.tools.planner.edge.scenario import Devices, Floats
from card.tools.planner.edge.terms import Terms

Rule = Literal["equal", "square-root", "convex"]
RULES: tuple[Rule, ...] = ("equal", "square-root", "convex")
_LEAST = 1e-6  # lower bound of a share
_MOST_STEPS = 200


def has_solver() -> bool:
    """Return whether the convex rule can be used: it needs scipy, from the extra `edge`."""
    return find_spec("scipy") is not None


def share_out(terms: Terms, server: int, devices: Devices, rule: Rule) -> tuple[Floats, Floats]:
    """Return the shares of bandwidth and of compute of each device of a server, [n] each; both sum to 1.

    Square roots are optimal if upload and verification do not overlap; else they are near the optimum.
    The convex rule is never worse. Raises: PlanError for the convex rule without scipy.
    """
    if rule not in RULES:
        raise PlanError(f"the rule of shares must be one of {', '.join(RULES)}, got {rule!r}")
    if rule == "equal" or not devices.size:
        equal = np.full(devices.size, 1.0 / max(1, devices.size))
        return equal, equal
    roots = _square_roots(terms, server, devices)
    return roots if rule == "square-root" else _convex(terms, server, devices, roots)


def _square_roots(terms: Terms, server: int, devices: Devices) -> tuple[Floats, Floats]:
    upload = np.sqrt(terms.peak * terms.upload[devices, server] + terms.rest_upload[devices, server])
    verify = np.full(devices.size, 1.0)  # each device gives the target the same work
    return upload / upload.sum(), verify / verify.sum()


def _convex(terms: Terms, server: int, devices: Devices, start: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Minimise the sum of seconds by sequential quadratic programming (Kraft 1988), its maximum as a bound t.

    Times are in units of the mean, as the solver's tolerance is absolute.
    """
    if not has_solver():
        raise PlanError(f"convex shares need scipy, which is not installed; run {install_command('edge')}")
    optimize: Any = import_module("scipy.optimize")
    size = devices.size
    unit = float(terms.seconds(devices, server, *start).mean())
    upload, verify = terms.upload[devices, server] / unit, np.full(size, terms.verify[server] / unit)
    rest_upload, rest_verify = terms.rest_upload[devices, server] / unit, terms.rest_verify[server] / unit
    draft, sums = terms.draft[devices] / unit, np.kron(np.eye(3)[:2], np.ones(size))
    eye, none = np.eye(size), np.zeros((size, size))

    def worth(x: Floats) -> float:
        return float(
            terms.peak * x[2 * size :].sum() + (rest_upload / x[:size]).sum() + (rest_verify / x[size:-size]).sum()
        )

    def slope(x: Floats) -> Floats:
        parts = (-rest_upload / x[:size] ** 2, -rest_verify / x[size:-size] ** 2, np.full(size, terms.peak))
        return np.concatenate(parts)

    def slack(x: Floats) -> Floats:
        return np.concatenate(
            (x[2 * size :] - upload / x[:size], x[2 * size :] - verify / x[size:-size], 1.0 - sums @ x)
        )

    def slack_slope(x: Floats) -> Floats:
        uploads = np.hstack((np.diag(upload / x[:size] ** 2), none, eye))
        return np.vstack((uploads, np.hstack((none, np.diag(verify / x[size:-size] ** 2), eye)), -sums))

    slowest = np.maximum(np.maximum(draft, upload / start[0]), verify / start[1])
    solution = optimize.minimize(
        worth,
        np.concatenate((*start, slowest)),
        jac=slope,
        bounds=[(_LEAST, 1.0)] * (2 * size) + [(one, None) for one in draft],
        constraints={"type": "ineq", "fun": slack, "jac": slack_slope},
        method="SLSQP",
        options={"maxiter": _MOST_STEPS, "ftol": 1e-7},
    )
    bandwidth, compute = (np.maximum(part, _LEAST) for part in (solution.x[:size], solution.x[size:-size]))
    best = bandwidth / bandwidth.sum(), compute / compute.sum()
    is_better = terms.seconds(devices, server, *best).sum() < terms.seconds(devices, server, *start).sum()
    return best if is_better else start
