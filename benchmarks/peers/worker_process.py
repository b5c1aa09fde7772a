"""The parent's side of a worker: a process that is asked one thing at a time, and a set of them that fits memory."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from catalog import RowKey

_CLOSE_S = 20.0
_WARM_UP_TOKENS = 16
_SPARE_BYTES = 2 << 30  # left free for everybody else

Option = dict[str, Any]


class PeerError(Exception):
    """Why a peer could not do what it was asked for, in one line."""


class Worker(Protocol):
    """What the parent asks."""

    def ask(self, do: str, **question: Any) -> dict[str, Any]:
        """Return the answer. Raises: PeerError."""

    def close(self) -> None:
        """End it."""


class WorkerProcess:
    """A worker in a process of its own, with all that it starts."""

    def __init__(self, command: Sequence[str | Path], env: Mapping[str, str], log: Path, timeout_s: float) -> None:
        """Start it.

        Args:
            log: gets what it prints.
            timeout_s: longest time for one answer, loading a model included.
        """
        self._timeout_s, self._log = timeout_s, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **env},
                start_new_session=True,  # so that what it starts can be ended with it
            )

    def ask(self, do: str, **question: Any) -> dict[str, Any]:
        """Return the answer; that of decoding with the most memory that the worker and what it started have had so far.

        Raises: PeerError if it is an error, late, or never comes; the worker is ended then.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **question}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            self.kill()
            raise PeerError(f"the worker has ended, see {self._log}") from error
        ready, _, _ = select.select([self._process.stdout], [], [], self._timeout_s)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self.kill()
            what = "the worker has ended" if ready else f"no answer within {self._timeout_s:.0f} s"
            raise PeerError(f"{do}: {what}, see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{do}: {' '.join(str(answer['error']).split())[:300]}")
        if do in ("generate", "generate_many"):
            answer["peak_bytes"] = peak_bytes(self._process.pid)
        return answer

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Let it end by itself, then by force."""
        with contextlib.suppress(subprocess.TimeoutExpired, OSError, ValueError):
            self._process.communicate(b'{"do": "close"}\n', timeout=_CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """End it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Workers:
    """Workers by what they hold. They start when needed; for want of memory, the one unused for longest is ended."""

    def __init__(
        self,
        start: Callable[[RowKey, Mapping[str, Option]], Worker],
        needed_bytes: Callable[[RowKey], int],
        free_bytes: Callable[[], int],
        warm_up: Sequence[Sequence[int]],
    ) -> None:
        """Take what starts a worker with its model.

        Args:
            start: gets a row and the settings by method that the same worker had before it was ended.
            needed_bytes: an estimate of what a row's worker will take.
            warm_up: prompts, of which the first one is decoded before anything counts.
        """
        self._start, self._needed_bytes, self._free_bytes, self._warm_up = start, needed_bytes, free_bytes, warm_up
        self._workers: dict[str, Worker] = {}  # the one used last stands last
        self._prepared: dict[str, dict[str, Option]] = {}  # settings by row and option, by worker
        self._settings: dict[RowKey, Option] = {}

    def prepare(self, row: RowKey, option: Option) -> Option:
        """Return the settings of a row that is brought up and warm. Raises: PeerError."""
        name = _worker_name(row, option)
        if name not in self._workers:
            self._make_room(self._needed_bytes(row))
            known = {one.method: had for one, had in self._settings.items() if _worker_name(one, option) == name}
            self._workers[name], self._prepared[name] = self._start(row, known), {}
        worker = self._workers[name] = self._workers.pop(name)
        of_worker, key = self._prepared[name], _option_name(row, option)
        try:
            if key not in of_worker:
                prompts = list(map(list, self._warm_up))
                of_worker[key] = worker.ask("prepare", method=row.method, option=option, prompts=prompts)
                question = {"method": row.method, "option": option}
                if "at_once" not in option:
                    worker.ask("generate", **question, prompt_ids=prompts[0], max_tokens=_WARM_UP_TOKENS)
                else:
                    few = prompts[: option["at_once"]]
                    worker.ask("generate_many", **question, prompts=few, max_tokens=_WARM_UP_TOKENS, at_once=len(few))
        except PeerError:
            self._end(name)
            raise
        self._settings[row] = of_worker[key]
        return of_worker[key]

    def ask(self, do: str, row: RowKey, option: Option, **question: Any) -> dict[str, Any]:
        """Return the answer of a row, brought up if it is not. Raises: PeerError; its worker is ended then."""
        self.prepare(row, option)
        name = _worker_name(row, option)
        try:
            return self._workers[name].ask(do, method=row.method, option=option, **question)
        except PeerError:
            self._end(name)
            raise

    def release(self, row: RowKey, option: Option) -> None:
        """Let go of an option that is not wanted any more."""
        name = _worker_name(row, option)
        if self._prepared.get(name, {}).pop(_option_name(row, option), None) is None:
            return
        if row.spec.shares_worker(row.method):
            self._workers[name].ask("release", method=row.method, option=option)
        else:
            self._end(name)

    def close(self) -> None:
        """End all workers."""
        for name in list(self._workers):
            self._end(name)

    def _make_room(self, num_bytes: int) -> None:
        while self._workers and self._free_bytes() < num_bytes + _SPARE_BYTES:
            self._end(next(iter(self._workers)))

    def _end(self, name: str) -> None:
        self._prepared.pop(name, None)
        self._workers.pop(name).close()


def peak_bytes(session: int) -> int:
    """Return the most memory that the processes of a session have had, each at its own time, mapped files with it."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it may have ended
            if os.getsid(int(folder.name)) == session:
                total += _peak_of(folder)
    return total


def _peak_of(folder: Path) -> int:
    for line in (folder / "status").read_text("utf-8", errors="replace").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0  # it is ending


def free_memory_bytes() -> int:
    """Return how much memory the system can still give."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/meminfo does not tell MemAvailable")


def _worker_name(row: RowKey, option: Option) -> str:
    shared = f"{row.peer}:{row.quantisation}"
    return shared if row.spec.shares_worker(row.method) else f"{shared}:{_option_name(row, option)}"


def _option_name(row: RowKey, option: Option) -> str:
    return f"{row.method}:{json.dumps(option, sort_keys=True)}"
