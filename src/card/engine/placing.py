"""What follows from a method and the settings before anything is loaded: who writes, where the drafter goes and when.

The planner asks the same questions of hardware that it only has figures of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from card.config import DraftSettings, EngineSettings
from card.engine.links import Where
from card.errors import SettingsError
from card.methods import Method
from card.policy.cores import CoreSet
from card.policy.cost import PassCost, ScheduleCost
from card.policy.rounds import FixedPolicy, Policy, Schedule
from card.policy.tuned import TunedPolicy
from card.workers.offers import DRAFTER
from card.writers.local import find_writer

_TYPICAL_TOKENS = 4  # of a verification, for the ratio of target and drafter passes
_LONGEST_ROUND = 16  # drafter passes beside one of the target's, at most


def share_out(method: Method, names: Sequence[str] | None) -> tuple[bool, tuple[str, ...]]:
    """Return whether the draft model writes, and which local writers do.

    Args:
        names: those that were asked for; None: by the method.
    Raises: SettingsError for writers that do not go with the method, or do not exist.
    """
    if names is None:
        return method.needs_draft, method.writers
    if DRAFTER in names and not method.needs_draft:
        raise SettingsError(f"method {method.name} has no draft model: leave {DRAFTER} out of the writers")
    if DRAFTER not in names and method.needs_draft and not method.is_tuned:
        raise SettingsError(
            f"method {method.name} is defined by its draft model: add {DRAFTER} to the writers, or use method card"
        )
    local = [*method.writers, *(name for name in names if name != DRAFTER)]
    for name in local:
        find_writer(name)
    return DRAFTER in names, tuple(dict.fromkeys(local))


def choose_where(method: Method, settings: EngineSettings, *, is_loaded: bool, has_cores: bool) -> Where:
    """Return where the drafter goes: as set, else by the method, and for a tuned one where it can choose.

    Args:
        is_loaded: the draft model is an object in this process.
        has_cores: a drafter's process can have cores of its own.
    """
    if settings.draft_address is not None:
        return "remote"
    if settings.placement is not None or not method.is_tuned:
        return settings.placement or method.placement
    devices = {settings.device, settings.draft_device or settings.device}
    if settings.schedule == "turns":
        return "inline"
    if devices != {"cpu"}:
        return "thread"
    if is_loaded:
        return "thread" if settings.schedule == "beside" else "inline"
    if settings.schedule == "beside" or settings.policy == "fixed":
        return "process"
    return "switch" if has_cores else "inline"


def schedules_of(
    where: Where | None, settings: EngineSettings, *, alone: ScheduleCost, beside: ScheduleCost
) -> dict[Schedule, ScheduleCost]:
    """Return the schedules that a tuned method may choose from.

    Args:
        where: None: there is no drafter.
        alone: the target with all its cores, and the draft model where it takes turns with it.
        beside: the target and the draft model where they run at the same time.
    """
    resting = replace(alone, drafter=None)
    if where is None:
        return {"off": resting}
    schedules: dict[Schedule, ScheduleCost] = {}
    if where != "inline":
        schedules["beside"] = beside
    if where in ("inline", "switch"):
        schedules["turns"] = alone
    if settings.schedule == "auto":
        schedules["off"] = resting
    return schedules


def make_policy(
    method: Method,
    settings: EngineSettings,
    draft: DraftSettings,
    costs: Callable[[], tuple[ScheduleCost, ScheduleCost]],
    *,
    where: Where | None,
    pinned: frozenset[str],
    has_writers: bool,
    cores: CoreSet = CoreSet(),  # noqa: B008
) -> Policy:
    """Return the policy of an engine: what was set, and for a tuned method the rest by measurement.

    Args:
        draft: as the method shapes it.
        costs: returns those of the target alone and beside a drafter; asked for by a tuned method only.
        where: of the drafter; None: there is none.
        pinned: names of the settings of ``draft`` that were set.
        has_writers: others than a draft model propose candidates.
        cores: of the target, under a policy that changes nothing.
    """
    drafts = where is not None
    if not (method.is_tuned and (drafts or has_writers)) or settings.policy == "fixed":
        return FixedPolicy(method, cores, takes_turns=where == "inline", has_drafter=drafts)
    alone, beside = costs()
    return TunedPolicy(schedules_of(where, settings, alone=alone, beside=beside), draft, pinned=pinned)


def round_length(method: Method, draft: DraftSettings, *, target: PassCost, drafter: PassCost, most: int) -> int:
    """Return the longest draft whose drafter passes fit into one of the target's: 2 to ``most``, and 16 at most.

    Args:
        method: one that says what its passes are.
        draft: settings before the method shapes them; they say how wide its passes are.
    """
    assert method.passes_of_round is not None
    target_s = target.seconds(_TYPICAL_TOKENS)
    for length in range(2, min(_LONGEST_ROUND, most)):
        longer = method.shape(draft.replace(num_speculative_tokens=length + 1))
        if sum(drafter.seconds(num_tokens) for num_tokens in method.passes_of_round(longer)) > target_s:
            return length
    return min(_LONGEST_ROUND, most)
