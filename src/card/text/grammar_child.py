"""The child process in which a grammar is tried before the process that serves compiles it.

Its stack and memory are smaller than that process's, so a grammar that passes here passes there.
Light on imports: llguidance and the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import struct
import sys
import threading
import time
from typing import Any

from card.text.compiling import as_lark, compile_grammar, wrap_tokens

try:
    import resource
except ImportError:  # there are no such limits
    resource = None  # type: ignore[assignment]

LENGTH = struct.Struct("<Q")  # before each part of a message
_MOST_QUOTED_CHARS = 10_000
_SPENT_BYTES = 64 << 20  # a child that keeps more than this of what it has tried makes way for a new one
_PR_SET_PDEATHSIG = 1
_WATCH = """while size=$(ps -o rss= -p "$1"); do
    if [ "$size" -gt "$2" ]; then kill -ABRT "$1"; exit; fi
    sleep 0.05
done"""
_RESIDENT, _SHARED, _DATA = 1, 2, 5  # fields of /proc/self/statm, see proc(5)


def main() -> None:
    """Try the grammars that come on standard input until it ends; answer on what was standard output."""
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # prints of the library must not mix with answers
    _die_with_parent()
    head, core = _read(), _read()
    if head is None or core is None:
        return
    settings = json.loads(head)
    try:
        tokens = wrap_tokens(core.decode(), settings["num_ids"], settings["end_ids"])
    except Exception as error:  # the parent meets the same error, and reports it
        _answer(answers, {"fault": str(error)[:_MOST_QUOTED_CHARS]})
        return
    del core
    gc.enable()  # it was off during imports, which leave no garbage
    threading.stack_size(settings["stack_bytes"])
    base_bytes = _bound_memory(settings["memory_bytes"])
    most_bytes = base_bytes + int(settings["memory_bytes"])
    _answer(answers, {"ready": True})
    while (asked := _read()) is not None and (source := _read()) is not None:
        # In a thread of its own, for the stack; this one goes on to read, so that the end of the parent is the end.
        work = (answers, tokens, json.loads(asked), source.decode("utf-8", "surrogatepass"), base_bytes, most_bytes)
        threading.Thread(target=_try, args=work, daemon=True).start()


def _try(answers: int, tokens: Any, asked: dict[str, Any], source: str, base_bytes: int, most_bytes: int) -> None:
    answer: dict[str, Any]
    try:
        _bound_time(asked["seconds"])
        if asked["kind"] == "gbnf":
            source = as_lark(source)
            answer = {"lark": source, **_tried(tokens, "lark", source)}
        else:
            answer = _tried(tokens, asked["kind"], source)
        if not _statm(_DATA) and _peak_bytes() > most_bytes:  # sooner than anybody looked
            raise MemoryError
    except MemoryError:
        os.kill(os.getpid(), signal.SIGABRT)  # as the library does
        return
    except ValueError as error:
        answer = {"refused": str(error)[:_MOST_QUOTED_CHARS]}
    except BaseException as error:  # a panic of the library's is no Exception
        answer = {"refused": f"panic: {error}"[:_MOST_QUOTED_CHARS]}
    answer["is_spent"] = _data_bytes() > base_bytes + _SPENT_BYTES
    _answer(answers, answer)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # so that the next grammar's memory can be told from what this one leaves behind
        trim(0)


def _tried(tokens: Any, kind: str, source: str) -> dict[str, Any]:
    """Compile and follow a grammar as the serving process will, and drop it.

    Raises: ValueError with the library's message.
    """
    before = _touched_bytes()
    matcher = compile_grammar(tokens, kind, source)
    follower = matcher.deep_copy()
    mask = follower.compute_bitmask()
    token_id = next((8 * idx + (byte & -byte).bit_length() - 1 for idx, byte in enumerate(mask) if byte), None)
    if token_id is not None:
        follower.compute_ff_bytes()
        follower.compute_ff_tokens()
        if follower.try_consume_tokens([token_id]):
            follower.compute_bitmask()
            follower.rollback(1)
    return {"num_bytes": max(0, _touched_bytes() - before)}


def _read() -> bytes | None:
    """Return the next part of a message; None at the end."""
    stream = sys.stdin.buffer
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (num_bytes,) = LENGTH.unpack(head)
    part = stream.read(num_bytes)
    return part if len(part) == num_bytes else None


def _answer(file: int, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    rest = memoryview(LENGTH.pack(len(data)) + data)
    with contextlib.suppress(OSError):  # the parent has gone
        while rest:
            rest = rest[os.write(file, rest) :]


# ---- bounds ----------------------------------------------------------------------------------------------------------


def _die_with_parent() -> None:
    """End when the thread that began this process ends, also in the midst of a grammar; and leave no image behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if resource is not None:
        with contextlib.suppress(OSError, ValueError):  # 1: an image is handed to no program either, see core(5)
            resource.setrlimit(resource.RLIMIT_CORE, (1, 1))


def _bound_memory(num_bytes: int) -> int:
    """Let this process have so much more memory; return what it has.

    The limit is that on data, which is what the process has written or may write. That on addresses would count what an
    allocator only sets aside, 64 MB for each thread, and the files of the library.
    """
    base_bytes = _data_bytes()
    if not _statm(_DATA):  # not Linux: no limit on data holds there
        _watch_memory(base_bytes + num_bytes)
    elif resource is not None:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (base_bytes + num_bytes,) * 2)
    return base_bytes


def _watch_memory(most_bytes: int) -> None:
    """Have this process ended, as the library does it, once it has more memory than it may.

    The library holds Python's lock, so that no thread of this process could look.
    """
    with contextlib.suppress(OSError):
        os.posix_spawnp("sh", ["sh", "-c", _WATCH, "sh", str(os.getpid()), str(most_bytes >> 10)], {"PATH": os.defpath})


def _peak_bytes() -> int:
    """Return the most memory that this process has had; 0 where the system does not say."""
    if resource is None:
        return 0
    most: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def _bound_time(seconds: float) -> None:
    """Let this process compute for so long from now on, in case no parent is left to end it."""
    if resource is not None:
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 2, hard))


def _touched_bytes() -> int:
    """Return the memory that this process has to itself, or the most that it has had."""
    return _statm(_RESIDENT) - _statm(_SHARED) or _peak_bytes()


def _data_bytes() -> int:
    """Return what this process has written or may write to, or the most memory that it has had."""
    return _statm(_DATA) or _peak_bytes()


def _statm(field: int) -> int:
    """Return one of the sizes of this process, in bytes; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            num_pages = int(file.read().split()[field])
    except (OSError, ValueError, IndexError):
        return 0
    return num_pages * os.sysconf("SC_PAGE_SIZE")
