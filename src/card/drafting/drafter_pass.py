"""One pass of a draft model for the requests of several drafter workers, shared fairly."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from card.drafting.drafted import Drafting
from card.drafting.messages import DrafterMessage
from card.drafting.protocol import DraftWriter
from card.errors import CardError, ModelError, in_words
from card.tree.nodes import NewNodes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Acceptance chance by a draft model's own probability p: level * p^slope for each candidate of a path."""

    level: float = 1.0
    slope: float = 1.0  # from 0, where they say nothing, to 1, where they say what they seem to

    def chance(self, depth: int, path_logprob: float) -> float:
        """Return the chance in [0, 1] that a path of this score and length is accepted to its end."""
        return min(1.0, math.exp(self.slope * min(path_logprob, 0.0)) * self.level**depth)


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """End of a turn of a drafter, by the chances in [0, 1] of the best paths of its requests."""

    floors: tuple[float, ...] = (0.0,)  # by depth: least chance at which a request is drafted further; the last
    # one holds for all that is deeper
    layer: float = 0.0  # least sum, over all requests, of chance minus floor for which a layer is made
    calibration: Calibration = Calibration()
    resting: frozenset[int] = frozenset()  # numbers of requests that get no drafts
    max_tokens: int | None = None  # of a pass, so that no turn reads a long text at once; None: as the worker has it

    def spare(self, depth: int, path_logprob: float) -> float:
        """Return the chance of a path minus its floor; below 0 it is not drafted further."""
        return self.calibration.chance(depth, path_logprob) - self.floors[min(depth, len(self.floors) - 1)]


NO_END = TurnEnd()


class PassWorker(Protocol):
    """The worker of a drafter, as a pass sees it."""

    writer: DraftWriter
    clock: Callable[[], float]
    served_at: tuple[float, int]  # start of its last pass, and its place in it

    def tasks(self, said: list[DrafterMessage]) -> list[Task]:
        """Return what can run in the next pass; add messages about requests that cannot to ``said``."""

    def decline(self, request_id: int, reason: str, *, has_failed: bool = False) -> list[DrafterMessage]:
        """Stop drafting for a request, and tell its target."""


@dataclass(slots=True)
class Task:
    """The part of a request that can run in the next pass."""

    worker: PassWorker
    request_id: int
    drafting: Drafting
    num_tokens: int


def step_together(workers: Sequence[PassWorker], *, max_tokens: int | None = None) -> list[list[DrafterMessage]]:
    """Make one drafter pass for all workers, which share one writer; each gets a fair share of its tokens.

    A worker that needs less than its share leaves the rest to the others. Within a worker the requests that have waited
    longest come first. If there are more workers than tokens, the same holds among workers.

    Args:
        max_tokens: most tokens of the pass, 1 or more; None sets no limit.
    Returns: the messages of each worker.
    Raises: any error of the draft model if it cannot run any text.
    """
    clock = workers[0].clock
    started = clock()
    results: dict[int, list[DrafterMessage]] = {id(worker): [] for worker in workers}
    wanted = [worker.tasks(results[id(worker)]) for worker in workers]
    active = sorted((tasks for tasks in wanted if tasks), key=lambda tasks: tasks[0].worker.served_at)
    chosen = [task for tasks in active for task in tasks] if max_tokens is None else _fair_part(active, max_tokens)
    if chosen:
        grown = _grown(workers[0].writer, chosen)
        if all(isinstance(nodes, _ModelFailure) for nodes in grown):
            raise next(nodes.error for nodes in grown if isinstance(nodes, _ModelFailure))
        ended = clock()
        busy_s = (ended - started) / len(chosen)
        for i, (task, nodes) in enumerate(zip(chosen, grown, strict=True)):
            task.worker.served_at = task.drafting.served_at = (started, i)
            task.drafting.counters.num_passes += 1
            task.drafting.counters.busy_s += busy_s
            said = results[id(task.worker)]
            if isinstance(nodes, CardError | _ModelFailure):
                error = nodes.error if isinstance(nodes, _ModelFailure) else nodes
                reason = f"the draft model failed at it: {in_words(error)}"
                said += task.worker.decline(task.request_id, reason, has_failed=True)
            elif nodes.ids:
                layer = task.drafting.layer
                said.append(layer(task.request_id, nodes, is_reset=False, span_s=(started, ended)))
    return [results[id(worker)] for worker in workers]


@dataclass(frozen=True, slots=True)
class _ModelFailure:
    """A request whose pass failed while every other text failed too."""

    error: Exception


def _grown(writer: DraftWriter, tasks: Sequence[Task]) -> list[NewNodes | CardError | _ModelFailure]:
    """Make a pass; if it fails, find the requests that cause the failure and run the others without them.

    Returns: the new nodes of each task; an error for a task that fails on its own.
    """
    try:
        return list(writer.step([(task.drafting.sequence, task.num_tokens) for task in tasks]))
    except Exception as error:  # no request of one target may affect the other targets
        if len(tasks) == 1:
            try:
                writer.check()
            except Exception as failure:
                return [_ModelFailure(failure)]
            logger.warning("a drafter pass failed for one request, which continues without drafts: %s", in_words(error))
            return [error if isinstance(error, CardError) else ModelError(in_words(error))]
        logger.info("a drafter pass for %d requests failed: %s", len(tasks), in_words(error))
    middle = len(tasks) // 2
    return [*_grown(writer, tasks[:middle]), *_grown(writer, tasks[middle:])]


def _fair_part(wanted: Sequence[list[Task]], max_tokens: int) -> list[Task]:
    """Return the tasks that fit into each worker's share of ``max_tokens``, the last one cut to fit."""
    taking_part = sorted(wanted[:max_tokens], key=lambda tasks: sum(task.num_tokens for task in tasks))
    left = max_tokens
    chosen: list[Task] = []
    for i, tasks in enumerate(taking_part):
        part = left // (len(taking_part) - i)
        for task in tasks:
            task.num_tokens = min(task.num_tokens, part)
            if task.num_tokens:
                chosen.append(task)
            part -= task.num_tokens
            left -= task.num_tokens
    return chosen
