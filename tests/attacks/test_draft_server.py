"""Attacks on a draft server, which runs in a process of its own, while an honest target writes on with its help."""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from card.api.llm import LLM
from card.config import Grammar, SamplingParams, ShapingRule
from card.drafting.messages import Correction, DrafterMessage, Fault, Hello, Open, Ping, Ready, TargetMessage, encode
from card.links.keys import load_client_keys, make_keys
from tests.attacks.conftest import Book
from tests.drafts import draft_spec
from tests.links.hostile import MORE, connect, frame, shake_hands
from tests.links.serving import RawClient, correction
from tests.waiting import until

pytestmark = [pytest.mark.attacks, pytest.mark.timeout(300)]

_MOST_GROWTH_BYTES = 64 << 20
_GIVE_UP_BYTES = 500 << 20  # of growth: then the attack has succeeded
_PROMPT = [[{"role": "user", "content": "How many legs have 3 cats?"}]]
_GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


@dataclass
class Serving:
    """A draft server and how to reach it."""

    process: subprocess.Popen[str]
    address: str
    keys: Path | None

    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]


@contextlib.contextmanager
def serving(keys: Path | None = None) -> Iterator[Serving]:
    options = ["--keys", str(keys / "server")] if keys else []
    command = [sys.executable, "-m", "card", "draft-server", "--listen", "tcp://127.0.0.1:0", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ}
    )
    try:
        assert process.stdout is not None
        address = re.search(r"tcp://\S+", process.stdout.readline())
        assert address is not None
        yield Serving(process, address[0], keys / "ann" if keys else None)
        assert process.poll() is None, "the server has fallen over"
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    with LLM("demo-target", method="vanilla") as llm:
        return tuple(llm.generate(_PROMPT, _GREEDY)[0].outputs[0].token_ids)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, ["ann", "mallory"])
    return folder


def attacked(server: Serving, attack: Callable[[], None], expected: tuple[int, ...]) -> tuple[int, int]:
    """Attack the server while a target writes. Returns: texts written meanwhile, and bytes that the server grew by.

    The policy is fixed: a tuned one leaves a drafter aside that a busy machine makes late.
    """
    draft_keys = str(server.keys) if server.keys else None
    with LLM("demo-target", draft_address=server.address, draft_keys=draft_keys, policy="fixed") as llm:
        llm.generate(_PROMPT, _GREEDY)
        before, most, num_texts = server.rss_bytes(), 0, 0
        thread = threading.Thread(target=attack)
        thread.start()
        while thread.is_alive() or num_texts < 3:
            output = llm.generate(_PROMPT, _GREEDY)[0]
            assert tuple(output.outputs[0].token_ids) == expected
            num_texts += 1
            most = max(most, server.rss_bytes() - before)
        thread.join()
        until(lambda: llm.generate(_PROMPT, _GREEDY)[0].stats.accepted_tokens)
        stats = llm.generate(_PROMPT, _GREEDY)[0].stats
        assert stats.drafter_state == "up" and not stats.drafter_restarts
    return num_texts, most


def frames_without_end(server: Serving, size: int, total_bytes: int) -> Callable[[], None]:
    """Send frames that announce more, as bytes over a plain connection, until the server ends it."""

    def attack() -> None:
        before = server.rss_bytes()
        many = frame(bytes(size), MORE) * max(1, (1 << 20) // (size + 2))
        with connect(server.address) as connection, contextlib.suppress(OSError):
            connection.settimeout(5.0)
            shake_hands(connection)
            connection.sendall(frame(encode(Hello(), 1)))
            for _ in range(total_bytes // len(many)):
                connection.sendall(many)
                if server.rss_bytes() - before > _GIVE_UP_BYTES:
                    return

    return attack


@pytest.mark.parametrize("size", [0, 1000, 1 << 20])
def test_a_message_of_frames_without_end(expected: tuple[int, ...], book: Book, size: int) -> None:
    with serving() as server:
        num_texts, grown = attacked(server, frames_without_end(server, size, 2 << 30), expected)
    assert grown < _MOST_GROWTH_BYTES
    book(f"a message of endless frames of {size} bytes", 1, f"+{grown >> 20} MiB; {num_texts} texts of another")


_WITH_A_KEY = """
import sys, time, zmq
from pathlib import Path
from card.links.keys import load_client_keys
from card.drafting.messages import Hello, encode
keys = load_client_keys(Path(sys.argv[2]))
context = zmq.Context()
with context.socket(zmq.DEALER) as dealer:
    dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = keys.public, keys.secret, keys.server
    dealer.linger = 0
    dealer.connect(sys.argv[1])
    dealer.send(encode(Hello(), 1))
    dealer.recv()
    size, number = int(sys.argv[3]), int(sys.argv[4])
    body = bytes(size)
    for _ in range(number - 1):
        dealer.send(body, zmq.SNDMORE)
    dealer.send(body)  # ZeroMQ lets a message go only when it is whole
    time.sleep(8)
"""


@pytest.mark.parametrize(("size", "number"), [(0, 4_000_000), (4_000_000, 150)])
def test_a_message_of_many_frames_from_someone_with_a_key(
    expected: tuple[int, ...], keys: Path, book: Book, size: int, number: int
) -> None:
    with serving(keys) as server:

        def attack() -> None:
            arguments = [server.address, str(keys / "mallory"), str(size), str(number)]
            subprocess.run([sys.executable, "-c", _WITH_A_KEY, *arguments], timeout=60, check=True)

        num_texts, grown = attacked(server, attack, expected)
    assert grown < _MOST_GROWTH_BYTES
    book(
        f"with a key, a message of {number:,} frames of {size:,} bytes",
        1,
        f"+{grown >> 20} MiB; {num_texts} texts of another",
    )


def heavy_messages(server: Serving) -> Callable[[], None]:
    """Say much that is allowed and much that is not, under one name after the other."""
    rule = ShapingRule(num_prompt_tokens=1, logit_bias=tuple((i, math.nan) for i in range(100_000)))
    wide = draft_spec(beam_width=256, branch=256, lead=4096, max_nodes=1 << 16, max_len=1000)
    floods: list[list[TargetMessage]] = [
        [Open(1, tuple(range(500_000)), draft_spec(max_len=1 << 20))],
        [Open(i, (1, 2, 3), draft_spec()) for i in range(3000)],
        [Open(1, (1, 2, 3), wide), *[Correction(1, 0, 3, (), wants_snapshot=True)] * 500],
        [Open(1, (1, 2, 3), draft_spec()), *[correction(1, 3, 10**9)] * 500],
        [Open(1, (1, 2, 3), draft_spec(shaping=rule))],
        [Open(1, (1, 2, 3), draft_spec(shaping=ShapingRule(num_prompt_tokens=1, grammar=Grammar("regex", "(a"))))],
        [Ping(i) for i in range(20_000)],
    ]

    def attack() -> None:
        for flood in floods:
            with RawClient(server.address, options={int(zmq.SNDTIMEO): 2000}) as client:
                client.say(Hello())
                client.hear(Ready)
                with contextlib.suppress(zmq.Again):
                    client.say(*flood)
                time.sleep(1.0)

    return attack


def test_messages_that_cost_much_or_make_no_sense(expected: tuple[int, ...], book: Book) -> None:
    with serving() as server:
        num_texts, grown = attacked(server, heavy_messages(server), expected)
    assert grown < 4 * _MOST_GROWTH_BYTES
    book("floods of pings, snapshots, long texts, nonsense", 7, f"+{grown >> 20} MiB; {num_texts} texts of another")


def test_connections_that_say_nothing(expected: tuple[int, ...], book: Book) -> None:
    count = 600

    def attack() -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(connect(server.address))

    with serving() as server:
        num_texts, grown = attacked(server, attack, expected)
    assert grown < _MOST_GROWTH_BYTES
    book("connections that say nothing", count, f"+{grown >> 20} MiB; {num_texts} texts of another")


def test_one_key_asks_for_all_places(expected: tuple[int, ...], keys: Path, book: Book) -> None:
    own = load_client_keys(keys / "mallory")
    options = {
        int(zmq.CURVE_PUBLICKEY): own.public,
        int(zmq.CURVE_SECRETKEY): own.secret,
        int(zmq.CURVE_SERVERKEY): own.server,
    }
    with serving(keys) as server, contextlib.ExitStack() as stack:
        greedy = [stack.enter_context(RawClient(server.address, options=options)) for _ in range(20)]
        answers: list[DrafterMessage] = []
        for client in greedy:
            client.say(Hello())
            until(lambda client=client: answers.extend(heard := client.heard()) or heard)
        refused = [one for one in answers if isinstance(one, Fault)]
        assert len(refused) == 12
        assert all("--max-sessions-per-client" in one.reason for one in refused)
        attacked(server, lambda: None, expected)
    book("sessions under one key", 20, "8 begun, 12 refused in one line; another has its place")
