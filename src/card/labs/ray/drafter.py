"""A drafter of the pool: one replica with one draft server, which reports to the desk."""

from __future__ import annotations

import logging
import secrets
import threading
from functools import partial
from typing import Any

import ray
from ray.serve.handle import DeploymentHandle

from card.assembly.drafters import load_drafter, make_worker
from card.assembly.plan import DEFAULT_MODEL_LEN
from card.config import parse_size
from card.errors import WorkerError
from card.labs.ray.allocation import LOAD, DrafterReport
from card.labs.ray.desk import DeskLine, as_text
from card.labs.ray.settings import AppSettings, check_folder
from card.links.keys import load_server_keys
from card.links.process import DraftModel
from card.links.server import DraftServer, ServerLimits
from card.server.logs import set_up

logger = logging.getLogger(__name__)
_REPORT_S = 1.0  # between two reports
_ENDING_S = 5.0  # for the running pass


class DrafterReplica:
    """Runs a draft server in a thread, on a port of its own; its messages do not pass through Ray."""

    def __init__(self, args: dict[str, Any], desk: DeploymentHandle[Any]) -> None:
        """Load the model and listen.

        Raises: SettingsError, ModelError.
        """
        settings = AppSettings.of(args)
        set_up(str(settings.server.get("log_level", "info")))
        self._line = DeskLine(desk)
        self._server, report = _make_server(settings)
        self._report = as_text(report)
        self._incarnation = report.incarnation
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="card-draft-server", daemon=True)
        self._thread.start()
        self._reporter = threading.Thread(target=self._tell_the_desk, name="card-report", daemon=True)
        self._reporter.start()
        logger.info("a drafter is ready")

    def check_health(self) -> None:
        """Raise WorkerError if the server has ended: Ray then replaces this replica."""
        if not self._thread.is_alive():
            raise WorkerError("the draft server has ended")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report to Ray how many targets are served here."""
        return {LOAD: float(self._server.num_sessions)}

    def __del__(self) -> None:
        """Leave the pool; the targets continue without this drafter."""
        if hasattr(self, "_reporter") and not self._has_ended.is_set():
            self._has_ended.set()
            self._reporter.join(_ENDING_S)  # a report after the retirement would bring it back
            self._line.call("retire", self._incarnation)
            self._server.stop()
            self._thread.join(_ENDING_S)
            self._line.close()

    def _run(self) -> None:
        try:
            self._server.run()
        finally:
            self._server.close()

    def _tell_the_desk(self) -> None:
        while self._thread.is_alive() and not self._has_ended.is_set():
            self._line.call("report", self._report).exception()  # if the desk does not answer, the next report follows
            self._has_ended.wait(_REPORT_S)


def _make_server(settings: AppSettings) -> tuple[DraftServer, DrafterReport]:
    """Return the server, and its report for the desk. Raises: SettingsError, ModelError."""
    engine, pool = settings.drafting, settings.pool
    keys_folder = check_folder(pool.pool_keys, "pool_keys")
    keys = load_server_keys(keys_folder) if keys_folder is not None else None
    address = ray.util.get_node_ip_address()
    host = f"[{address}]" if ":" in address else address
    writer, ready = load_drafter(
        DraftModel.to_serve(
            settings.draft,
            dtype=engine.dtype_of_draft,
            device=engine.draft_device or engine.device,
            max_model_len=engine.max_model_len or DEFAULT_MODEL_LEN,
            kv_cache_bytes=parse_size(pool.drafter_kv_cache_memory, "drafter_kv_cache_memory")
            if pool.drafter_kv_cache_memory
            else None,
            cache_dir=engine.weights_dir,
        ),
        threads=engine.draft_threads,
    )
    assert ready.tokenizer is not None  # set for a model to serve
    most = pool.max_targets_per_drafter
    limits = ServerLimits(max_sessions=most, max_sessions_per_client=most)  # the desk limits the targets
    server = DraftServer(
        f"tcp://{host if keys else '127.0.0.1'}:0", partial(make_worker, writer), ready, keys=keys, limits=limits
    )
    report = DrafterReport(
        address=server.address,
        incarnation=1 + secrets.randbelow(2**53),
        tokenizer=ready.tokenizer,
        host=address if keys is None else "",
        max_targets=pool.max_targets_per_drafter,
    )
    return server, report
