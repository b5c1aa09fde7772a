"""CARD's figures as Prometheus metrics of the process that proposes.

`prometheus_client` puts them into the process's registry or, if PROMETHEUS_MULTIPROC_DIR is set, into that folder, from
which vLLM's server shows them beside its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING

from card.inside.adapters.figures import Figures

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge

logger = logging.getLogger(__name__)
# vLLM unregisters every metric with "vllm" in its name, so these have another prefix.
_PREFIX = "card_plugin"
_HOST = "127.0.0.1"


class PluginMetrics:
    """Updates the metrics after each step."""

    def __init__(self, port: int | None) -> None:
        """Register the metrics.

        Args:
            port: also serve them to this machine on this port; None: do not.
        Raises: OSError if the port is taken.
        """
        from prometheus_client import Counter, Gauge, start_http_server

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{_PREFIX}_{name}", text, labels)

        self._steps = counter("steps", "Steps of the engine in which candidates were asked for.")
        self._seconds = counter("propose_seconds", "Time inside propose.")
        self._requests = counter("requests", "Requests seen for the first time, or again after a preemption.", "event")
        self._proposed = counter("proposed_tokens", "Tokens handed over for verification.", "writer")
        self._accepted = counter("accepted_tokens", "Tokens of these that the engine kept.", "writer")
        self._empty = counter("empty_rows", "Rows for which no candidate was worth its cost, or there was none.")
        self._declined = counter("declined_requests", "Requests whose text the draft model cannot follow.")
        self._rejections = counter("rejected_messages", "Messages that no honest drafter sends.")
        self._is_up: Gauge = Gauge(f"{_PREFIX}_drafter_up", "1 while the drafter is up.", multiprocess_mode="livesum")
        self._restarts: Gauge = Gauge(
            f"{_PREFIX}_drafter_restarts", "Drafters that were replaced.", multiprocess_mode="livesum"
        )
        self._shown = Figures()
        if port is not None:
            start_http_server(port, addr=_HOST)

    def update(self, figures: Figures, *, is_up: bool, num_restarts: int) -> None:
        """Add the changes since the last update."""
        shown = self._shown
        self._steps.inc(figures.steps - shown.steps)
        self._seconds.inc(figures.propose_s - shown.propose_s)
        self._empty.inc(figures.empty_rows - shown.empty_rows)
        self._declined.inc(figures.declined - shown.declined)
        self._rejections.inc(figures.rejections - shown.rejections)
        if figures.requests_begun != shown.requests_begun:
            self._requests.labels("begun").inc(figures.requests_begun - shown.requests_begun)
        if figures.requests_resumed != shown.requests_resumed:
            self._requests.labels("resumed").inc(figures.requests_resumed - shown.requests_resumed)
        for metric, new, old in (
            (self._proposed, figures.proposed_by_writer, shown.proposed_by_writer),
            (self._accepted, figures.accepted_by_writer, shown.accepted_by_writer),
        ):
            for writer, num_tokens in new.items():
                if num_tokens != old[writer]:
                    metric.labels(writer).inc(num_tokens - old[writer])
        self._is_up.set(is_up)
        self._restarts.set(num_restarts)
        self._shown = deepcopy(figures)


def make_metrics(port: int | None) -> Callable[..., None] | None:
    """Return a function that updates the metrics; None if another proposer of this process has them already.

    Raises: OSError if the port is taken.
    """
    try:
        return PluginMetrics(port).update
    except ValueError:  # prometheus_client's error for duplicates
        logger.warning("another proposer of this process has the metrics %s_* already: this one has none", _PREFIX)
        return None
