"""A child process that tries grammars, seen from its parent: a grammar that crashes the compiler ends it alone."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from card.errors import CapacityError, CardError, SettingsError
from card.machine.children import import_paths
from card.text.grammar_child import LENGTH

try:
    import resource
except ImportError:  # there are no such limits
    resource = None  # type: ignore[assignment]

# Neither opens a file, of which there may be none left, nor is bound by how many are open.
_Selector = getattr(selectors, "PollSelector", selectors.DefaultSelector)
# Without the environment, the working directory and what site adds (-I -S): it starts in a third of the time.
_PROGRAM = """import gc, sys
gc.disable()
sys.path += sys.argv[1:]
from card.text.grammar_child import main
main()
"""
_COMMAND = (sys.executable, "-I", "-S", "-c", _PROGRAM)
# Variables that find shared libraries, and those that Windows needs; keys and settings stay here.
_KEPT_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "SYSTEMROOT")

# Real schemas of 200 KB take up to 40 MiB. A grammar takes as much again in this process.
MEMORY_BYTES = 256 << 20
_MOST_STACK_BYTES = 4 << 20  # a chain of 500 objects in one another
_UNLIMITED_STACK_BYTES = 2 << 20  # what glibc gives a thread where nothing limits stacks
_START_S = 60.0  # for the child to import and to take a tokenizer
_END_S = 5.0  # for a killed process to be gone


class TooSlowError(SettingsError):
    """A grammar is not compiled in its time."""


class GivenUpError(SettingsError):
    """The grammar was given up: no request waits for it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSetup:
    """Settings that a child needs before its first grammar."""

    core: bytes  # of the tokenizer, as llguidance reads it
    num_ids: int
    end_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Facts of a grammar that a child has compiled and followed."""

    lark: str | None  # the same in Lark's notation, if it came as GBNF
    num_bytes: int  # that it takes


class Refused(Exception):
    """The library does not take a grammar; the text is its own."""


class GrammarSandbox:
    """One child. Its calls are those of one thread, but for `kill`."""

    def __init__(self) -> None:
        """Start the child, without waiting for it. Raises: CapacityError if it cannot be started."""
        self._is_ready = self._is_killed = self._is_spent = False
        self._begun_at = time.monotonic()
        environment = {name: os.environ[name] for name in _KEPT_NAMES if name in os.environ}
        try:
            self._process = subprocess.Popen(
                (*_COMMAND, *import_paths(sys.path)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # its crashes are expected
                bufsize=0,
                process_group=0,  # Ctrl-C reaches the parent only
                env=environment,
            )
        except OSError as error:
            raise CapacityError(
                f"no process can be started to try the grammar in: {error.strerror}; ask again soon"
            ) from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._asks, self._answers = self._process.stdin, self._process.stdout
        for pipe in (self._asks, self._answers):
            os.set_blocking(pipe.fileno(), False)
        if hasattr(os, "waitid"):  # elsewhere a child that has ended stays a zombie until the next grammar
            with contextlib.suppress(RuntimeError):  # no thread can be started
                threading.Thread(target=_reap, args=(self._process,), name="card-grammar-end", daemon=True).start()

    @property
    def is_usable(self) -> bool:
        """True if it can take one more grammar."""
        return not self._is_spent and not self._is_killed and self._process.poll() is None

    def begin(self, setup: SandboxSetup) -> None:
        """Hand over the tokenizer. Raises: CapacityError if the child has ended."""
        head = {
            "num_ids": setup.num_ids,
            "end_ids": setup.end_ids,
            "stack_bytes": child_stack_bytes(),
            "memory_bytes": MEMORY_BYTES,
        }
        with self._says_why_it_cannot_start():
            self._send(self._begun_at + _START_S, json.dumps(head).encode(), setup.core)

    def wait(self) -> None:
        """Wait until the child can try a grammar. Raises: CapacityError if it has ended; GivenUpError if killed."""
        if self._is_ready:
            return
        with self._says_why_it_cannot_start():
            answer = self._receive(self._begun_at + _START_S)
        if "fault" in answer:
            raise CapacityError(f"the process that tries grammars cannot start: {answer['fault']}")
        self._is_ready = True

    def try_out(self, kind: str, source: str, seconds: float) -> Passed:
        """Have a grammar compiled and followed by a token.

        Raises: Refused; SettingsError if it is more than the child can take; TooSlowError; GivenUpError if the child
            was killed.
        """
        asked = json.dumps({"kind": kind, "seconds": seconds}).encode()
        deadline = time.monotonic() + seconds
        try:
            self._send(deadline, asked, source.encode("utf-8", "surrogatepass"))
            answer = self._receive(deadline)
        except TimeoutError:
            self.kill()
            raise TooSlowError(f"it takes more than {seconds:g} s to compile; use a simpler one") from None
        except EOFError:
            raise self._reason_of_its_end(seconds) from None
        except BaseException:  # an answer that comes late would be taken for that to the next grammar
            self.kill()
            raise
        self._is_spent = bool(answer["is_spent"])
        if "refused" in answer:
            raise Refused(answer["refused"])
        return Passed(lark=answer.get("lark"), num_bytes=int(answer["num_bytes"]))

    def kill(self) -> None:
        """End the child, whatever it does. Any thread may call it; a waiting thread notices the end of the pipe."""
        self._is_killed = True
        self._process.kill()

    def close(self) -> None:
        """End the child and wait until it is gone."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        for pipe in (self._asks, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()

    def _reason_of_its_end(self, seconds: float) -> CardError:
        if self._is_killed:
            return GivenUpError("no request waits for it any more")
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # its pipe has ended and it has not: it is of no use
            code = 0
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"status {code}"
        if name == "SIGXCPU":
            return TooSlowError(f"it takes more than {seconds:g} s to compile; use a simpler one")
        if name == "SIGKILL":  # it was not this process: perhaps the machine has no memory left
            return CapacityError("the process that tried the grammar was ended from outside; ask again soon")
        # The library aborts when it gets no memory.
        what = f"needs more than {MEMORY_BYTES >> 20} MiB" if name == "SIGABRT" else f"ended by {name}"
        return SettingsError(f"it is more than the compiler takes ({what}); use a simpler one")

    @contextlib.contextmanager
    def _says_why_it_cannot_start(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, TimeoutError):
            if self._is_killed:
                raise GivenUpError("no request waits for it any more") from None
            self.kill()
            raise CapacityError("the process that tries grammars does not start; ask again soon") from None

    def _send(self, deadline: float, *parts: bytes) -> None:
        """Send a message. Raises: TimeoutError; EOFError if the child has ended."""
        for part in parts:
            rest = memoryview(LENGTH.pack(len(part)) + part)
            while rest:
                _wait_for(self._asks, selectors.EVENT_WRITE, deadline)
                try:
                    rest = rest[os.write(self._asks.fileno(), rest) :]
                except BlockingIOError:
                    continue
                except OSError:
                    raise EOFError from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        """Return the next answer. Raises: TimeoutError; EOFError if the child has ended."""
        (num_bytes,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        answer: dict[str, Any] = json.loads(self._read(num_bytes, deadline))
        return answer

    def _read(self, num_bytes: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            _wait_for(self._answers, selectors.EVENT_READ, deadline)
            part = self._answers.read(num_bytes - len(data))
            if part == b"":
                raise EOFError
            data += part or b""
        return bytes(data)


class SandboxHolder:
    """The place where one thread tries grammars: its child, replaced once it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # so that no other thread kills a child that is being replaced
        self._sandbox: GrammarSandbox | None = None
        self._is_closed = False

    def prepare(self, make_setup: Callable[[], SandboxSetup]) -> GrammarSandbox:
        """Return a child that can be used, or will be soon.

        Args:
            make_setup: is called while a new child starts.
        Raises: CapacityError; what ``make_setup`` raises.
        """
        self.tidy()
        with self._lock:
            if self._is_closed:
                raise CapacityError("the model is being closed and takes no more grammars")
            if self._sandbox is not None:
                return self._sandbox
            self._sandbox = sandbox = GrammarSandbox()
        try:
            sandbox.begin(make_setup())
        except BaseException:
            sandbox.kill()
            raise
        return sandbox

    def tidy(self) -> None:
        """Clear up after a child that has ended."""
        with self._lock:
            sandbox = self._sandbox
            if sandbox is None or sandbox.is_usable:
                return
            self._sandbox = None
        sandbox.close()

    def kill(self) -> None:
        """End what the child does, and the child with it."""
        with self._lock:
            if self._sandbox is not None:
                self._sandbox.kill()

    def close(self) -> None:
        """End the child; there is none after it."""
        with self._lock:
            self._is_closed = True
            if self._sandbox is not None:
                self._sandbox.close()


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait until a child has ended, and ask for its status, without holding up others that ask."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    process.poll()


def child_stack_bytes() -> int:
    """Return the stack size on which a child tries grammars: half of that of a thread here that copies or follows them.

    A stack overflow ends the process and cannot be caught.
    """
    size = threading.stack_size()
    if not size and resource is not None:
        soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
        size = 0 if soft == resource.RLIM_INFINITY else soft
    return max(1 << 18, min(_MOST_STACK_BYTES, (size or _UNLIMITED_STACK_BYTES) // 2))


def _wait_for(pipe: IO[bytes], event: int, deadline: float) -> None:
    """Wait until a pipe can be read or written. Raises: TimeoutError."""
    with _Selector() as selector:
        selector.register(pipe, event)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
