"""What users bring, damaged on purpose: good files with a few changes, and a look at what comes of them.

Each case must load and decode, or end in one line, without a look at files elsewhere. With FUZZ_CASES set to so many
cases each of them runs in a process of its own that has 10 s of computing time and 2 GB of memory.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import resource
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from card.errors import CardError

QUICK_CASES = 100  # of all kinds together, in `make test`
NUM_CASES = int(os.environ.get("FUZZ_CASES", "0"))
CPU_LIMIT_S = 10
MEMORY_LIMIT_BYTES = 2 << 30  # beyond what the process has mapped before
_WALL_LIMIT_S = 120.0  # for a child that waits instead of computing, on a machine with other work
_MOST_PLACES = 400  # in one document where something is changed: vocabularies are long and all alike

# ---- what is changed ------------------------------------------------------------------------------------------------

_deep: Any = []
for _ in range(500):
    _deep = [_deep]

JUNK: Sequence[Any] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    7,
    4096,
    100_000,
    2**31,
    2**63,
    2**70,
    -(2**40),
    0.0,
    -0.5,
    1e-30,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "silu",
    "gelu",
    "llama",
    "x" * 3000,
    "../outside",
    "/etc/hostname",
    "https://localhost:1/model",
    "\ud800",
    "<|end|>",
    [],
    [1],
    ["full_attention"],
    ["sliding_attention"] * 3,
    {},
    {"a": 1},
    {"rope_type": "llama3"},
    {"rope_type": "yarn", "factor": 0},
    {"quant_method": "gptq"},
    _deep,
)


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Return container and key of what is in a document, the outermost first."""
    found: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting and len(found) < _MOST_PLACES:
        one = waiting.pop(0)
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in list(keys)[:_MOST_PLACES]:
            found.append((one, key))
            waiting.append(one[key])
    return found


@st.composite
def changed_documents(draw: st.DrawFn, good: Any) -> Any:
    """Return a document with one to three changes: a value replaced, dropped, doubled or turned round."""
    document = copy.deepcopy(good)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        places = _places(document)
        if not places:
            return document
        container, key = places[draw(st.integers(0, len(places) - 1))]
        how = draw(st.sampled_from(("replace", "replace", "replace", "number", "drop", "wrap", "swap")))
        value = container[key]
        if how == "drop":
            del container[key]
        elif how == "wrap":
            container[key] = draw(st.sampled_from(([value], {"value": value}, str(value))))
        elif how == "swap":
            other, other_key = places[draw(st.integers(0, len(places) - 1))]
            container[key] = copy.deepcopy(other.get(other_key) if isinstance(other, dict) else value)
        elif how == "number" and isinstance(value, int | float) and not isinstance(value, bool):
            container[key] = draw(st.sampled_from((value + 1, value - 1, -value, 2 * value, float(value), value / 2)))
        else:
            container[key] = copy.deepcopy(draw(st.sampled_from(JUNK)))
    return document


@st.composite
def changed_bytes(draw: st.DrawFn, good: bytes, first: int = 4096) -> bytes:
    """Return bytes with some changed or put in, most of them at the beginning, or with the end cut off."""
    content = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        if not content:
            break
        end = draw(st.sampled_from((64, first, len(content))))
        place = draw(st.integers(0, min(end, len(content)) - 1))
        match draw(st.sampled_from(("flip", "set", "insert", "cut", "long"))):
            case "flip":
                content[place] ^= 1 << draw(st.integers(0, 7))
            case "set":
                content[place] = draw(st.integers(0, 255))
            case "insert":
                content[place:place] = draw(st.binary(min_size=1, max_size=4))
            case "cut":
                del content[place:]
            case "long":
                content[place : place + 8] = draw(st.sampled_from((2**31, 2**40, 2**63, 2**64 - 1))).to_bytes(
                    8, "little"
                )
    return bytes(content)


def as_json(document: Any) -> bytes:
    """Return a document as bytes, lone surrogates and NaN included: other programs write them too."""
    return json.dumps(document).encode()


def share(percent: int) -> settings:
    """Return how many cases of one kind are tried."""
    number = max(1, (NUM_CASES or QUICK_CASES) * percent // 100)
    phases = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(max_examples=number, deadline=None, phases=phases, suppress_health_check=checks)


# ---- how a case runs ------------------------------------------------------------------------------------------------


def ends_well(case: Callable[[], object], folder: Path) -> None:
    """Run a case that may read ``folder`` only. Raises: AssertionError if it fails otherwise than in one line."""
    fault = _in_child(lambda: _fault(case, folder)) if NUM_CASES else _fault(case, folder)
    assert not fault, fault


def _fault(case: Callable[[], object], folder: Path) -> str:
    """Return what is wrong with how a case ends; empty if nothing is."""
    with _watched(folder) as read:
        try:
            case()
        except CardError as error:
            if len(str(error).splitlines()) != 1:
                return f"not one line: {error}"
            if _wanted_memory(error):
                return f"it took more memory than there is: {error}"
        except Exception:
            return traceback.format_exc()
    return f"it read {read}" if read else ""


def _wanted_memory(error: BaseException | None) -> bool:
    """Return whether an error comes of an allocation that failed: on a larger machine it would not."""
    while error is not None:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _in_child(tell: Callable[[], str]) -> str:
    """Return what is told by a process of its own, or how that ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _tell_and_exit(tell, writing)
    os.close(writing)
    told = b""
    with open(reading, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], _WALL_LIMIT_S)[0]:
            part = pipe.read(65536)
            if not part:
                break
            told += part
        else:
            os.kill(child, signal.SIGKILL)
            told = b"it hangs"
    _, status = os.waitpid(child, 0)
    return told.decode("utf-8", "replace") or ("" if status == 0 else f"the process ended with status {status}")


def _tell_and_exit(tell: Callable[[], str], pipe: int) -> NoReturn:
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_LIMIT_BYTES,) * 2)
        used_s = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        resource.setrlimit(resource.RLIMIT_CPU, (used_s + CPU_LIMIT_S,) * 2)
        with open(pipe, "wb", buffering=0) as out:
            out.write(tell().encode("utf-8", "replace"))
        os._exit(0)
    finally:
        os._exit(1)


# ---- which files are read -------------------------------------------------------------------------------------------

_allowed: list[str] = []
_seen: list[str] = []
_is_watching = [False]
# The interpreter's and libraries' own files, what the system says of itself, and what starts keep.
_ANYBODYS = (
    sys.prefix,
    sys.base_prefix,
    str(Path(torch.__file__).parents[1]),
    str(Path(__file__).parents[1]),
    "/usr/",
    "/proc/",
    "/sys/",
    "/dev/",
    os.environ["XDG_CACHE_HOME"],
)


def _note_open(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _is_watching[0] and isinstance(args[0], str):
        path = os.path.realpath(args[0])
        if not path.startswith(tuple(_allowed)):
            _seen.append(path)


sys.addaudithook(_note_open)


@contextlib.contextmanager
def _watched(folder: Path) -> Iterator[list[str]]:
    """Note which files are opened outside the folder that do not belong to the installation."""
    _allowed[:] = [os.path.realpath(one) for one in (folder, *_ANYBODYS)]
    _seen.clear()
    _is_watching[0] = True
    try:
        yield _seen
    finally:
        _is_watching[0] = False


@contextlib.contextmanager
def altered(good: Path, name: str, content: bytes) -> Iterator[Path]:
    """Give a folder that is like a good one but for one file."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as made:
        for file in good.iterdir():
            if file.name != name:
                os.link(file, Path(made, file.name))
        Path(made, name).write_bytes(content)
        yield Path(made)
