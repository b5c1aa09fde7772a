"""What surrounds the engine on a machine: files that run out, kept files that are damaged or open to others, limits."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from card.kernels.int8_linear import why_not_int8
from tests.attacks.conftest import Book
from tests.gguf_files import demo_tokenizer, save_model, write_gguf
from tests.server.running import Command, command

pytestmark = [pytest.mark.attacks, pytest.mark.timeout(300)]

_IDLE = 1100  # connections that say nothing
_OPEN_FILES = 1024
_HELD_S = 8.0  # longer than the server's idle looks and what it measures then


def completion(url: str, timeout_s: float = 60.0) -> str:
    """Return the text of a completion."""
    body = {"model": "demo-target", "prompt": "Tom has 3 apples and", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return str(json.load(answer)["choices"][0]["text"])


@contextlib.contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Command]:
    """Run `card serve` on the demo pair with a fresh cache folder."""
    cache = {"XDG_CACHE_HOME": str(folder / "cache")}
    with command(folder, "demo-target", "--draft", "demo-draft", *arguments, env=cache) as server:
        yield server


def test_idle_connections_that_take_all_files_end_no_engine(tmp_path: Path, book: Book) -> None:
    with serving(tmp_path) as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
        expected, address = completion(server.url), urlsplit(server.url)
        held = []
        until = time.monotonic() + _HELD_S
        try:
            for _ in range(_IDLE):
                one = socket.socket()
                one.settimeout(1.0)
                with contextlib.suppress(OSError):
                    one.connect((str(address.hostname), int(address.port or 0)))
                held.append(one)
            time.sleep(max(0.0, until - time.monotonic()))
        finally:
            for one in held:
                one.close()
        assert server.process.poll() is None
        assert completion(server.url) == expected
        ended = [line for line in server.logged() if "thread ends" in line["event"]]
        assert ended == []
    book(
        f"idle connections for {_HELD_S:.0f} s, {_OPEN_FILES:,} files allowed, first idle moments",
        _IDLE,
        "then answered as before",
    )


# ---- kept files -----------------------------------------------------------------------------------------------------

# Damages every kept file in turn, in a process that ends itself if code that is no code should end it.
_DAMAGING = """
import os, random, sys
from pathlib import Path
import numpy as np, torch
from card.assembly.latency.store import LatencyKey, LatencyStore
from card.machine.threads import CoreSet
from card.models.loading import load_decoder, load_tokenizer
from card.models.protocol import Extension
from card.models.runners import make_runner
from card.machine.pass_cost import PassCost

model, cache, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
COST = PassCost(((1, 0.001), (8, 0.002)), 0.0, 0.0)

def results():
    runner = make_runner(load_decoder(model, cache_dir=cache), max_model_len=64)
    logits = runner.forward([Extension(runner.open(), list(range(3, 12)), range(-1, 8))])[0]
    key = LatencyKey.of("pass", model, dtype="float32", device="cpu", core_set=CoreSet())
    store = LatencyStore(Path(cache))
    found = store.cost(key)
    assert found in (None, COST), found
    store.keep_cost(key, COST)
    return logits.sum().item(), abs(logits).max().item(), len(load_tokenizer(model, cache_dir=cache))

first, draw, tried = results(), random.Random(seed), 0
for file in sorted(one for one in Path(cache).rglob("*") if one.is_file() and one.suffix != ".lock"):
    for _ in range(int(sys.argv[4])):
        if not file.is_file():
            break
        whole = file.read_bytes()
        changed = bytearray(whole)
        kind = draw.randrange(4)
        if kind == 0:
            del changed[draw.randrange(len(whole)):]
        elif kind == 1:
            for _ in range(draw.randrange(1, 4)):
                changed[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        elif kind == 2:
            changed += os.urandom(50)
        else:
            place = draw.randrange(len(whole))
            changed[place : place + 4096] = bytes(len(changed[place : place + 4096]))
        file.write_bytes(changed)
        tried += 1
        assert results() == first, (file, kind)
print(tried)
"""

# Takes a function from files that were damaged, in a process of its own: code that is no code would end it.
_TAKING_CODE = """
import ctypes, os, random, sys
import numpy as np
from card.kernels.jit import object_code, vectors

def write(builder, place):
    vectors.write(builder, vectors.ir.Constant(vectors.ir.IntType(64), 7), place)

def stored():
    place = np.zeros(1, np.int64)
    code = object_code.ObjectCode("seven", write)
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(code.address)(place.ctypes.data)
    return int(place[0])

draw, damages = random.Random(int(sys.argv[1])), [
    lambda content: content[: draw.randrange(len(content))],
    lambda content: bytes(one ^ (draw.random() < 0.01) << draw.randrange(8) for one in content),
    lambda content: content + os.urandom(50),
    lambda content: content[: (place := draw.randrange(len(content)))] + bytes(len(content) - place),
]
assert stored() == 7
(file,) = object_code.kept_folder().glob("*.o")
whole, most = file.read_bytes(), int(sys.argv[2])
for tried in range(most):
    file.write_bytes(damages[tried % len(damages)](whole))
    assert stored() == 7
    assert file.read_bytes() == whole, "it was not made again"
print(most)
"""

# Runs a pass with machine code.
_RUNNING = """
import sys
from card.models.loading import load_decoder
from card.models.protocol import Extension
from card.models.runners import make_runner
runner = make_runner(load_decoder(sys.argv[1], dtype="int8"), max_model_len=64)
logits = runner.forward([Extension(runner.open(), list(range(3, 12)), range(-1, 8))])[0]
print(logits.sum().item(), abs(logits).max().item())
"""


def ran(code: str, *arguments: str, cache: Path) -> str:
    """Return what a process of Python says, which must end well and say nothing on standard error."""
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=False, env=env, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0 and not done.stderr, done.stderr or done.returncode
    return done.stdout


@pytest.mark.skipif(why_not_int8() is not None, reason=str(why_not_int8()))
def test_damaged_kept_files_are_made_again_and_change_no_logits(tmp_path: Path, book: Book) -> None:
    save_model(tmp_path / "folder", "qwen3", demo_tokenizer())
    model = write_gguf(tmp_path / "folder", tmp_path / "model.gguf")
    tried = int(ran(_DAMAGING, str(model), str(tmp_path / "kept"), "1", "25", cache=tmp_path / "cache"))
    assert tried > 150
    book(
        "packed weights, tokenizers and latencies cut off, with other bits, garbage or holes", tried, "the same logits"
    )


@pytest.mark.skipif(why_not_int8() is not None, reason=str(why_not_int8()))
def test_damaged_machine_code_never_runs(tmp_path: Path, book: Book) -> None:
    tried = int(ran(_TAKING_CODE, "2", "300", cache=tmp_path / "cache"))
    assert tried == 300
    book(
        "machine code cut off, with other bits, garbage or holes",
        tried,
        "compiled again",
    )


@pytest.mark.skipif(why_not_int8() is not None, reason=str(why_not_int8()))
def test_code_in_a_folder_that_all_can_write_to_is_not_run(tmp_path: Path, book: Book) -> None:
    cache = tmp_path / "cache"
    expected = ran(_RUNNING, "demo-draft", cache=cache)
    (cache / "card" / "code").chmod(0o777)
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    arguments = [sys.executable, "-c", _RUNNING, "demo-draft"]
    done = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == expected
    assert len(done.stderr.splitlines()) == 1 and "is not used for machine code: others can write to" in done.stderr
    book("machine code in a folder of mode 777", 1, "one line; not taken, not kept")


# ---- limits ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_group(controller: str, limits: dict[str, int]) -> Iterator[Path]:
    """Make a control group below that of this process; the test is skipped where that is not allowed."""
    lines = (line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines())
    path = next((path for _, names, path in lines if controller in names.split(",")), None)
    if path is None:
        pytest.skip(f"no group of version 1 for {controller}")
    folder = Path("/sys/fs/cgroup", controller, path.lstrip("/"), f"card-attack-{os.getpid()}")
    try:
        folder.mkdir()
        for name, value in limits.items():
            (folder / name).write_text(str(value))
    except OSError as error:
        pytest.skip(f"no group of its own: {error}")
    try:
        yield folder
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


_IN_GROUPS = """
import os, sys
for folder in sys.argv[1:]:
    with open(os.path.join(folder, "cgroup.procs"), "w") as file:
        file.write(str(os.getpid()))
from card import LLM
with LLM("demo-target", "demo-draft", max_model_len=1000, max_num_seqs=9000) as llm:
    cores = llm.host.plan.cores
    print(llm.host.plan.max_kv_bytes, cores.alone.threads, len(cores.draft), len(llm.generate("Tom has 3 apples")))
"""


def test_a_container_of_1024_mib_and_one_and_a_half_cores_is_planned_for(tmp_path: Path, book: Book) -> None:
    limit = 1024 << 20
    with (
        own_group("memory", {"memory.limit_in_bytes": limit}) as memory,
        own_group("cpu", {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": 150_000}) as cpu,
    ):
        said = ran(_IN_GROUPS, str(memory), str(cpu), cache=tmp_path / "cache").split()
        most = int((memory / "memory.max_usage_in_bytes").read_text())
    kv_bytes, threads, draft_cores, num_texts = map(int, said)
    assert kv_bytes <= limit / 4
    assert (threads, draft_cores, num_texts) == (1, 0, 1)
    assert most + kv_bytes < limit
    book("a real control group of 1,024 MiB and 1.5 cores", 1, f"KV {kv_bytes >> 20} MiB, 1 thread")


# ---- logs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("errors", ["/dev/full", "closed", "a pipe that nobody reads"])
def test_logs_that_cannot_be_written_end_nothing(tmp_path: Path, book: Book, errors: str) -> None:
    code = "import os, sys; from card.cli import main; sys.argv[0] = 'card'; main()"
    reading, writing = os.pipe()
    os.close(reading)
    stream = {"/dev/full": "/dev/full", "closed": "&-", "a pipe that nobody reads": "&2"}[errors]
    words = ["serve", "demo-target", "--draft", "demo-draft", "--port", "0", "--log-level", "debug"]
    shell = ["sh", "-c", f'exec "$@" 2>{stream}', "sh", sys.executable, "-c", code, *words]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    server = subprocess.Popen(shell, env=env, stdout=subprocess.PIPE, stderr=writing, text=True)
    os.close(writing)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().rpartition(" ")[2].strip()
        assert url.startswith("http")
        assert len({completion(url) for _ in range(5)}) == 1
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(f"{url}/nowhere", timeout=20)
        assert completion(url) and server.poll() is None
    finally:
        server.kill()
        server.communicate()
    book(f"standard error is {errors}", 6, "answered")
