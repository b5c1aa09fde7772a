"""A drafter in its own process on this host, over ZeroMQ, watched and replaced when it fails."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from card.drafting.messages import Shutdown
from card.links.child import DrafterChild
from card.links.link import LinkStatus
from card.links.zmq_link import Watch, ZmqLink

logger = logging.getLogger(__name__)
FOLDER_PREFIX = "card-"  # of the folder with the socket
_EXIT_TIMEOUT_S = 2.0
_LAST_WORDS_S = 0.05  # time for a failed child's last frame, which has the reason
_FAULT_STATUS = 1  # exit status of such a child
_LOOK_AT_STATE_S = 0.25  # between checks whether the child is stopped; each check reads a file
MEASURING_S = 0.4  # for measuring the passes of a draft model
_SERVED_TREE_ROWS = 512  # per request, for any lead and width of its client
_SERVED_WARM_UP_TOKENS = 16  # most tokens of a usual pass, as expected before any client comes


class DraftModel(msgspec.Struct, frozen=True, kw_only=True):
    """The draft model and its limits."""

    name: str  # a folder, a GGUF file, a hub name, or demo-draft
    dtype: str
    device: str
    max_model_len: int  # the model's own limit counts if it is lower
    max_tree_rows: int
    warm_up_tokens: int  # most tokens of a usual pass
    kv_cache_bytes: int | None = None  # memory for KV rows; None: a few sequences of full length
    measuring_s: float = MEASURING_S  # for measuring the cost of passes for the targets; 0: not measured
    cache_dir: str | None = None  # for converted weights, as in `load_model`
    drafted_ids: tuple[int, ...] | None = None  # the tokens that are proposed; None: all
    target_bytes: int | None = None  # that its pass reads, if fewer tokens must gain something; None: in any case
    has_unknown_target: bool = False  # the target must be sent the tokenizer's fingerprint

    @classmethod
    def to_serve(cls, name: str, **model: Any) -> DraftModel:
        """Return a model for unknown targets; ``model`` are other fields."""
        return cls(
            name=name,
            max_tree_rows=_SERVED_TREE_ROWS,
            warm_up_tokens=_SERVED_WARM_UP_TOKENS,
            has_unknown_target=True,
            **model,
        )


class LikelyModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Draft model that a child can load before its settings are known; fields as in `DraftModel`."""

    name: str
    dtype: str
    device: str
    cache_dir: str | None = None

    def is_that_of(self, model: DraftModel) -> bool:
        """Return whether the settings need this model."""
        return (self.name, self.dtype, self.device, self.cache_dir) == (
            *(model.name, model.dtype, model.device, model.cache_dir),
        )


class DrafterConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Configuration of a child process; the link fills in the first three fields."""

    address: str = ""
    incarnation: int = 0
    parent_pid: int = 0
    threads: int
    cores: tuple[int, ...]  # cores that the parent assigned to the process; empty: any
    model: DraftModel


class ProcessLink(ZmqLink):
    """Starts the drafter's process, talks to it, and replaces it when it dies, hangs or sends invalid messages.

    ``template`` holds the child's settings; the link adds address, incarnation and parent.
    """

    def __init__(
        self,
        template: DrafterConfig,
        *,
        start_timeout_s: float,
        silence_timeout_s: float,
        spare: DrafterChild | None = None,
    ) -> None:
        """Make a link without a child. The first child is ``spare``, if that has as many threads."""
        super().__init__(Watch(start_timeout_s=start_timeout_s, silence_timeout_s=silence_timeout_s))
        self._template = template
        self._spare = spare
        self._silence_timeout_s = silence_timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))  # readable by this user only
        self._child: subprocess.Popen[bytes] | None = None
        self._looked_at = 0.0
        self._stopped_since: float | None = None

    @property
    def status(self) -> LinkStatus:
        """State of the current child, why it is not up, and the number of replacements; a stopped child is down."""
        status = self._watch.status
        if status.state == "down" or not self._is_stopped(time.monotonic()):
            return status
        return LinkStatus("down", "its process is stopped", status.num_restarts)

    @property
    def pid(self) -> int | None:
        """Process id of the current child."""
        return self._child.pid if self._child else None

    def _not_started(self, reason: str) -> str:
        return f"drafter could not be started: {reason}"

    def _lost(self, reason: str, *, is_first: bool) -> str:
        if is_first:
            return f"the drafter could not be started: {reason}; it is tried again while decoding goes on"
        return f"drafter {self._watch.incarnation} is replaced: {reason}"

    def _farewell(self) -> None:
        """End the child, first with a message, and remove the socket's folder."""
        if self._child and self._child.poll() is None and self._watch.is_listening:
            self.send(Shutdown())
            try:
                self._child.wait(_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                logger.info("drafter did not end within %g s and is killed", _EXIT_TIMEOUT_S)
        self._drop()
        if self._spare is not None:
            self._spare.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_lost(self, now: float) -> bool:
        """Notice a child that died, or is stopped for too long."""
        if self._has_ended():
            return True
        if self._is_stopped(now) and now - self._idle_since() > self._silence_timeout_s:
            self._fail(f"its process was stopped for {self._silence_timeout_s:g} s")
            return True
        return False

    def _idle_since(self) -> float:
        """Return since when the child is known to be stopped; a message in between proves that it ran."""
        return max(self._stopped_since or 0.0, self._watch.heard_at)

    def _has_ended(self) -> bool:
        """Notice a child that ended; its last message says more than its exit status."""
        if self._child is None or self._child.poll() is None:
            return False
        status = self._child.returncode
        if status == _FAULT_STATUS and self._socket is not None and self._socket.poll(round(_LAST_WORDS_S * 1e3)):
            self._read()
        if self._watch.state != "down":
            self._fail(f"it ended with exit status {status}")
        return True

    def _open(self) -> None:
        self._watch.begin(time.monotonic())
        address = f"ipc://{self._folder}/{self._watch.incarnation}"
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(address)
            self._child = self._popen(address)
        except zmq.ZMQError as error:
            self._fail(f"no socket at {address} (errno {error.errno}); set TMPDIR to a short path that can be written")
        except OSError as error:
            self._fail(f"no process: {error.strerror}")

    def _popen(self, address: str) -> subprocess.Popen[bytes]:
        config = msgspec.structs.replace(
            self._template, address=address, incarnation=self._watch.incarnation, parent_pid=os.getpid()
        )
        spare, self._spare = self._spare, None
        child = spare.take(config.threads) if spare is not None else None
        if child is None:
            child = DrafterChild(config.threads).take(config.threads)
        if child is None:
            raise OSError(0, "it ended at once")
        with contextlib.suppress(OSError):  # at once, so that loading takes no time from the target's core
            if config.cores:
                os.sched_setaffinity(child.pid, config.cores)
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin:  # a child that has ended is noticed later
            child.stdin.write(msgspec.json.encode(config))
        return child

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None
        self._stopped_since = None

    def _is_stopped(self, now: float) -> bool:
        """Return whether the child is stopped (SIGSTOP, a debugger), as of the last check."""
        if now - self._looked_at >= _LOOK_AT_STATE_S:
            self._looked_at = now
            is_stopped = self._child is not None and _process_state(self._child.pid) in ("T", "t")
            self._stopped_since = (self._stopped_since or now) if is_stopped else None
        return self._stopped_since is not None


def _process_state(pid: int) -> str:
    """Return the letter of a process's state as in `ps`; empty where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
