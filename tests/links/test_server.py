"""The draft server: one pass for all clients, each in a world of its own, whatever the others do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from card.config import SamplingParams
from card.drafting.beam import BeamWriter
from card.drafting.messages import (
    MAX_REQUEST_BYTES,
    PROTOCOL_VERSION,
    Close,
    Correction,
    Declined,
    DrafterMessage,
    Fault,
    Hello,
    Layer,
    Open,
    Ping,
    Pong,
    Ready,
    Resync,
    Shutdown,
    TargetMessage,
    encode,
)
from card.errors import SettingsError, WorkerError
from card.links import framing, front, zmq_link
from card.links import server as server_module
from card.links.keys import load_client_keys, load_server_keys, make_keys
from card.links.server import DraftServer, ServerLimits
from tests.decoding import GREEDY, toy_draft, toy_target
from tests.drafts import draft_spec
from tests.links.hostile import GREETING, MORE, connect, frame, is_ended, shake_hands
from tests.links.serving import (
    Clock,
    RawClient,
    connected,
    correction,
    decode_until_accepted,
    make_server,
    running,
)
from tests.toy import TableModel
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

TARGET = toy_target()
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=40)


def draft() -> TableModel:
    return toy_draft(TARGET, 0.9)


def sessions(server: DraftServer) -> list[Any]:
    return [session for _, session in server._serving()]


def spin(server: DraftServer, num_clients: int) -> None:
    """Let the server take what its clients have said until all of them have a session, and give it a little longer."""
    until(lambda: [server.serve_once(20), server.num_sessions == num_clients][1])
    server.serve_once(50)


# ---- several clients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_clients_with_the_same_ids_each_get_the_text_of_plain_decoding(params: SamplingParams) -> None:
    failures: list[BaseException] = []

    def client(address: str) -> None:
        try:
            with connected(address) as link:
                decode_until_accepted(TARGET, link, params=params)
        except BaseException as error:
            failures.append(error)

    with running(make_server(draft())) as server:
        threads = [threading.Thread(target=client, args=(server.address,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_one_pass_serves_all_clients() -> None:
    model = draft()
    server = make_server(model)
    with RawClient(server.address) as one, RawClient(server.address) as other:
        one.say(Hello())
        other.say(Hello())
        spin(server, 2)
        one.say(*(Open(i, (i, 1, 2), draft_spec()) for i in (1, 2)))
        other.say(Open(1, (5, 6), draft_spec()))
        while sum(len(session.worker.drafting) for session in sessions(server)) < 3:
            server._poller.poll(20)
            server._read()
        server._draft()
        assert model.num_forward_passes == 1
        assert model.num_forward_tokens == 3 + 3 + 2
        until(lambda: one.hear(Layer).nodes.ids)
        until(lambda: other.hear(Layer).nodes.ids)
    server.close()


def test_a_client_with_thirty_requests_does_not_starve_one_with_a_single_one() -> None:
    server = make_server(draft(), max_tokens_per_pass=8)  # and memory for 16 texts
    with running(server), RawClient(server.address) as greedy:
        greedy.begin(*range(30), spec=draft_spec(lead=200, max_nodes=4000))
        greedy.hear(Layer)
        with connected(server.address) as link:
            decode_until_accepted(TARGET, link)


def test_requests_beyond_the_limit_get_no_candidates_and_the_others_do() -> None:
    server = make_server(draft(), max_requests=2)
    with running(server), RawClient(server.address) as client:
        client.begin(1, 2, 3)
        client.say(Ping(5))
        until(lambda: client.hear(Pong).nonce == 5)  # one that nobody asked for may come before
        (session,) = sessions(server)
        assert len(session.worker.drafting) == 2


# ---- who breaks the rules -------------------------------------------------------------------------------------------


def broken(kind: str) -> bytes:
    good = encode(Hello(), 1)
    return {"malformed": b"\xc1 no message", "truncated": good[:-1], "other version": b"\x93\x63" + good[2:]}[kind]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("malformed", "is not a message"),
        ("truncated", "is not a message"),
        ("other version", f"protocol version 99, this side speaks {PROTOCOL_VERSION}"),
    ],
)
@pytest.mark.parametrize("has_session", [True, False])
def test_a_broken_frame_is_answered_with_a_fault_and_nobody_else_notices(
    kind: str, reason: str, has_session: bool
) -> None:
    with running(make_server(draft())) as server, connected(server.address) as link:
        with RawClient(server.address) as client:
            if has_session:
                client.begin(1)
                client.hear(Layer)
            client.send(broken(kind))
            assert reason in client.hear(Fault).reason
            assert server.num_sessions == 1
            decode_until_accepted(TARGET, link)
        assert link.status.num_restarts == 0


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Open(2, (1, 2), draft_spec(beam_width=10_000)), "beam_width of a draft spec must be from 1 to 256"),
        (Open(2, (1, 2), draft_spec(temperature=float("nan"))), "temperature of a draft spec"),
        (correction(1, 3, *[1] * 100), "at most"),
        (correction(1, -1, 1), "start of a correction"),
        (Pong(1), "a drafter accepts"),
    ],
    ids=["width", "temperature", "too long", "start", "kind"],
)
def test_a_message_out_of_bounds_costs_its_client_the_session_and_frees_its_rows(
    message: TargetMessage, reason: str
) -> None:
    model = draft()
    with running(make_server(model)) as server, connected(server.address) as link, RawClient(server.address) as client:
        client.begin(1, spec=draft_spec(max_len=50))
        client.hear(Layer)
        client.say(message)
        assert reason in client.hear(Fault).reason
        assert server.num_sessions == 1
        decode_until_accepted(TARGET, link)
        client.say(Ping(3))
        assert "begin a new one" in client.hear(Fault).reason
        client.begin(1)
        client.hear(Ready)
        until(lambda: client.hear(Layer).nodes.ids)


def test_an_oversized_frame_ends_the_connection_and_not_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_REQUEST_BYTES", 4096)
    with running(make_server(draft())) as server, connected(server.address) as link:
        with RawClient(server.address) as client:
            client.begin(1)
            client.hear(Layer)
            client.send(bytes(4097))

            def is_told() -> bool:
                client.say(Ping(1))  # sooner or later over a new connection, which has no session
                return any(isinstance(m, Fault) and "begin a new one" in m.reason for m in client.heard())

            until(is_told)
        decode_until_accepted(TARGET, link)
        assert link.status.num_restarts == 0


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (frame(b"some", MORE), "a message must be one frame, and this one announces more"),
        (bytes([0x08, 1, 0]), "a frame has the flags 0x8"),
        (bytes([2]) + (MAX_REQUEST_BYTES + 65).to_bytes(8, "big"), "at most 4194304 are allowed"),
        (bytes([6]) + (1 << 20).to_bytes(8, "big"), "a command has 1048576 bytes"),
    ],
    ids=["more", "flags", "size", "command"],
)
def test_frames_that_no_target_sends_end_the_connection_at_once_and_nobody_else_notices(
    said: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running(make_server(draft())) as server, connected(server.address) as link:
        with connect(server.address) as hostile:
            shake_hands(hostile)
            hostile.sendall(frame(encode(Hello(), 1)))
            until(lambda: server.num_sessions == 2)
            hostile.sendall(said)
            assert is_ended(hostile)
        assert reason in caplog.text
        until(lambda: server.num_sessions == 1)
        decode_until_accepted(TARGET, link)
        assert link.status.num_restarts == 0


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x01\x00", b"\x01\x00"])
def test_who_speaks_another_protocol_is_sent_away(said: bytes) -> None:
    with running(make_server(draft())) as server, connect(server.address) as stranger:
        stranger.sendall(said)
        assert is_ended(stranger)


def test_with_a_key_a_message_of_many_frames_waits_outside_and_nobody_else_notices(tmp_path: Path) -> None:
    make_keys(tmp_path, ["ann", "mallory"])
    keys = load_client_keys(tmp_path / "mallory")
    server = make_server(draft(), keys=load_server_keys(tmp_path / "server"))
    options = {
        int(zmq.CURVE_PUBLICKEY): keys.public,
        int(zmq.CURVE_SECRETKEY): keys.secret,
        int(zmq.CURVE_SERVERKEY): keys.server,
    }
    with (
        running(server),
        connected(server.address, keys=tmp_path / "ann") as link,
        RawClient(server.address, options=options) as mallory,
    ):
        mallory.say(Hello())
        mallory.hear(Ready)
        mallory.send(*[bytes(1 << 20)] * 40)
        connection = server._clients[-1].connection
        until(lambda: connection.is_waiting)
        decode_until_accepted(TARGET, link)
        assert connection.is_waiting
        assert connection.framing._waiting_bytes < 10 << 20
        assert link.status.num_restarts == 0


def test_what_a_client_may_say_ahead_is_bounded_in_bytes_and_in_frames() -> None:
    small, large = framing.Framing(), framing.Framing()
    for one in (small, large):
        assert one.feed(GREETING) == ""
    for _ in range(128):
        assert not small.is_full(0, is_stranger=False)
        assert small.feed(frame(b"")) == ""
    assert small.is_full(0, is_stranger=False)
    assert not small.is_full(1, is_stranger=False)
    assert large.feed(frame(bytes(MAX_REQUEST_BYTES))[:-1]) == ""
    assert large.is_full(0, is_stranger=True), "who has only to say hello"
    assert not large.is_full(0, is_stranger=False), "a frame that is allowed comes in whole"
    assert large.feed(b"\0" + frame(bytes(MAX_REQUEST_BYTES))[:10]) == ""
    assert large.is_full(0, is_stranger=False)
    assert not large.is_full(1, is_stranger=False)


def test_strangers_in_any_number_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "_MOST_STRANGERS", 3)
    with running(make_server(draft())) as server, contextlib.ExitStack() as stack:
        link = stack.enter_context(connected(server.address))
        strangers = [stack.enter_context(connect(server.address)) for _ in range(12)]
        assert is_ended(strangers[0])
        other = stack.enter_context(connected(server.address))
        decode_until_accepted(TARGET, other)
        decode_until_accepted(TARGET, link)
        until(lambda: len(server._clients) <= 3 + 2)


def test_a_stranger_that_says_nothing_is_sent_away_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(server_module, "time", clock)
    with running(make_server(draft(), silence_timeout_s=1.0)) as server, connect(server.address) as stranger:
        until(lambda: len(server._clients) == 1)
        clock.now += 2.0
        assert is_ended(stranger)
        until(lambda: not server._clients)


def test_a_client_takes_no_more_sessions_than_its_part_and_is_told_which_limit() -> None:
    server = make_server(draft(), max_sessions=3, max_sessions_per_client=1)
    with running(server), RawClient(server.address) as first, RawClient(server.address) as second:
        first.begin(1)
        first.hear(Ready)
        second.begin(1)
        reason = second.hear(Fault).reason
        assert "at most 1 clients from the same address (--max-sessions-per-client)" in reason
        first.say(Shutdown())
        until(lambda: server.num_sessions == 0)
        second.begin(1)
        second.hear(Ready)


def test_one_key_leaves_places_to_the_others(tmp_path: Path) -> None:
    make_keys(tmp_path, ["ann", "bob"])
    server = make_server(draft(), max_sessions=2, keys=load_server_keys(tmp_path / "server"))
    with running(server), connected(server.address, keys=tmp_path / "ann"):
        with (
            pytest.raises(WorkerError, match=r"accepts at most 1 clients with the same key"),
            connected(server.address, keys=tmp_path / "ann"),
        ):
            pass
        with connected(server.address, keys=tmp_path / "bob") as bob:
            decode_until_accepted(TARGET, bob)


@pytest.mark.parametrize(("num_keys", "most"), [(0, 16), (1, 16), (2, 8)])
def test_a_client_alone_in_having_a_key_or_without_one_may_take_all_places(num_keys: int, most: int) -> None:
    assert ServerLimits().sessions_per_client(num_keys) == most


def test_a_long_prompt_of_one_client_holds_up_another_for_one_pass_only() -> None:
    model = draft()
    server = make_server(model, max_tokens_per_pass=8)
    with RawClient(server.address) as slow, RawClient(server.address) as quick:
        slow.say(Hello())
        quick.say(Hello())
        spin(server, 2)
        slow.say(*(Open(i, tuple([i, *[1] * 100]), draft_spec()) for i in range(4)))
        quick.say(Open(1, (5, 6), draft_spec()))
        until(lambda: [server._read(), sum(len(one.worker.drafting) for one in sessions(server)) == 5][1])
        before = model.num_forward_tokens
        for _ in range(3):
            server._draft()
            quick.hear(Layer)
        assert model.num_forward_tokens - before <= 3 * 8
    server.close()


def test_whatever_a_request_leads_to_costs_it_alone_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = BeamWriter.open

    def fail(self: BeamWriter, token_ids: Any, spec: Any, *, epoch: int) -> Any:
        if token_ids[0] == 9:
            raise KeyError("nobody thought of\nthis")
        return whole(self, token_ids, spec, epoch=epoch)

    monkeypatch.setattr(BeamWriter, "open", fail)
    with running(make_server(draft())) as server, RawClient(server.address) as client:
        client.begin(9, 1)
        assert "it cannot be started: KeyError" in client.hear(Declined).reason
        until(lambda: client.hear(Layer).request_id == 1)
        assert server.num_sessions == 1


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Open(2, (1, 12), draft_spec()), "the draft model has no token 12"),
        (Open(2, (1, 2**64 - 1), draft_spec()), "the draft model has no token 18446744073709551615"),
        (Open(2, (-(2**63), 1), draft_spec()), "the draft model has no token -9223372036854775808"),
        (correction(2, 3, 99), "the draft model has no token 99"),
        (Open(2, (1,) * 128, draft_spec(max_len=500)), "the text has 128 tokens, and the draft model's context"),
        (Open(2, (1, 2), draft_spec(temperature=1e-320)), "must be numbers"),  # logits become infinite
    ],
    ids=["token", "huge", "negative", "later", "long", "no numbers"],
)
def test_a_text_that_the_draft_model_cannot_follow_costs_its_request_the_drafter_and_nobody_else(
    message: TargetMessage, reason: str
) -> None:
    with (
        running(make_server(draft())) as server,
        connected(server.address) as link,
        RawClient(server.address) as client,
    ):
        client.begin(1, *([2] if isinstance(message, Correction) else []))
        client.hear(Layer)
        client.say(message)
        declined = client.hear(Declined)
        assert declined.request_id == 2
        assert reason in declined.reason
        client.say(correction(1, 3, 5))
        until(lambda: client.hear(Layer).request_id == 1)
        decode_until_accepted(TARGET, link)
        assert (server.num_sessions, link.status.num_restarts) == (2, 0)


def test_a_model_that_fails_at_everything_ends_all_sessions_and_the_server_goes_on() -> None:
    model = draft()
    whole, failures = model.forward, iter(range(2))  # at the pass, and at the trial whether it runs other text
    with running(make_server(model)) as server, connected(server.address) as link:

        def fail(_: object) -> list[object]:
            if next(failures) == 1:
                model.forward = whole  # type: ignore[method-assign]
            raise RuntimeError("CUDA out of memory\nand a long story")

        model.forward = fail  # type: ignore[method-assign]
        decode_until_accepted(TARGET, link, max_wait_s=0.5)
        assert link.status.num_restarts == 1


# ---- sessions -------------------------------------------------------------------------------------------------------


def test_a_full_server_says_so_and_takes_the_next_client_when_one_has_gone() -> None:
    with running(make_server(draft(), max_sessions=1)) as server, RawClient(server.address) as second:
        with RawClient(server.address) as first:
            first.begin(1)
            first.hear(Ready)
            second.begin(1)
            assert "the server is full: it accepts 1 clients" in second.hear(Fault).reason
            first.say(Shutdown())
            until(lambda: server.num_sessions == 0)
        second.begin(1)
        second.hear(Ready)


def test_a_silent_client_is_dropped_and_one_that_pings_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(server_module, "time", clock)
    monkeypatch.setattr(zmq_link, "PING_AFTER_S", 0.1)
    server = make_server(draft(), silence_timeout_s=1.0)
    with running(server), RawClient(server.address) as mute, connected(server.address) as link:
        mute.begin(1)
        mute.hear(Layer)
        clock.now += 0.6

        def has_pinged() -> bool:
            link.receive()
            return any(client.heard_at == clock.now and client.session for client in list(server._clients))

        until(has_pinged)
        clock.now += 0.6
        assert "no message for 1 s" in mute.hear(Fault).reason
        assert server.num_sessions == 1
        decode_until_accepted(TARGET, link)
        assert link.status.num_restarts == 0


def test_a_new_incarnation_on_the_same_connection_knows_of_no_request() -> None:
    with running(make_server(draft())) as server, RawClient(server.address) as client:
        client.begin(1)
        client.hear(Layer)
        client.say(Hello())  # repeated
        client.hear(Ready)
        client.incarnation = 2
        client.say(correction(1, 3, 1))
        assert "begin a new one" in client.hear(Fault).reason
        client.say(Hello())
        client.hear(Ready)
        client.say(correction(1, 3, 1))
        assert client.hear(Resync) == Resync(1, None)


def test_the_rows_of_a_client_that_went_without_a_word_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(server_module, "time", clock)
    with running(make_server(draft(), silence_timeout_s=0.3)) as server:
        with RawClient(server.address) as client:
            client.begin(1, 2)
            client.hear(Layer)
            (session,) = sessions(server)
            worker = session.worker
        clock.now += 0.4
        until(lambda: server.num_sessions == 0)
        assert not worker.drafting


_CLIENT = """
import sys, time
from card.drafting.messages import Open
from card.links.remote import RemoteLink
from tests.drafts import draft_spec
link = RemoteLink(sys.argv[1], vocab_size=12, start_timeout_s=60.0, silence_timeout_s=60.0)
link.start()
for request_id in map(int, sys.argv[2:]):
    link.send(Open(request_id, (1, 2, 3), draft_spec()))
print("up", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def client_process(server: DraftServer, *request_ids: int) -> Iterator[subprocess.Popen[str]]:
    """Run a client with these requests in a process of its own, and kill it at the end."""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, server.address, *map(str, request_ids)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("request_ids", [(), (1, 2)], ids=["idle", "at work"])
def test_the_place_of_a_client_that_was_killed_is_free_at_once(
    request_ids: tuple[int, ...],
) -> None:
    with running(make_server(draft(), max_sessions=1, silence_timeout_s=3600.0)) as server:
        with client_process(server, *request_ids) as process:
            (session,) = sessions(server)
            until(lambda: len(session.worker.drafting) == len(request_ids))
            with pytest.raises(WorkerError, match="the server is full"), connected(server.address):
                pass
            process.kill()
            process.wait()
            with connected(server.address) as link:  # is refused for good if there is no place
                assert link.status.state == "up"
        assert not session.worker.drafting


def test_what_a_killed_client_held_is_freed_though_nobody_else_comes() -> None:
    with running(make_server(draft(), silence_timeout_s=3600.0)) as server:
        with client_process(server):
            assert server.num_sessions == 1
        until(lambda: server.num_sessions == 0)


def test_a_client_that_does_not_read_loses_messages_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_QUEUED_FRAMES", 64)
    num_snapshots = 1000  # of 8 kB each: more than the two ends of such a connection hold
    spec = draft_spec(lead=20, max_nodes=500, beam_width=30, branch=12)
    # Below the size of a segment, 64 KiB on the loopback, a window that was closed may stay so for minutes.
    options = {int(zmq.RCVHWM): 1, int(zmq.RCVBUF): 1 << 17}
    with running(make_server(draft())) as server, RawClient(server.address, options=options) as deaf:
        deaf.begin(1, spec=spec)
        until(lambda: server.num_sessions == 1)
        (session,) = sessions(server)
        until(lambda: len(session.worker.drafting) == 1 and session.worker.is_idle)
        for _ in range(num_snapshots):
            deaf.say(Correction(1, 0, 3, (), wants_snapshot=True))
        deaf.say(Close(1))
        with connected(server.address) as link:
            decode_until_accepted(TARGET, link)
            assert link.status.num_restarts == 0
        until(lambda: not session.worker.drafting)
        heard: list[DrafterMessage] = []

        def is_answered() -> bool:
            deaf.say(Ping(1))
            heard.extend(deaf.heard())
            return any(isinstance(message, Pong) and message.nonce == 1 for message in heard)

        until(is_answered)
        assert sum(isinstance(message, Layer) for message in heard) < num_snapshots


# ---- who may connect ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://192.0.2.1:5555", "tcp://some.host:5555"])
def test_without_keys_it_listens_on_loopback_only(address: str) -> None:
    with pytest.raises(SettingsError, match=r"so the server needs keys: make them with `card keys DIR`"):
        make_server(draft(), address=address)


def test_with_keys_it_listens_anywhere(tmp_path: Path) -> None:
    make_keys(tmp_path)
    server = make_server(draft(), address="tcp://0.0.0.0:0", keys=load_server_keys(tmp_path / "server"))
    assert server.address.startswith("tcp://0.0.0.0:")
    server.close()
    server.close()


def test_its_address_is_free_again_though_clients_came_that_it_has_not_looked_at() -> None:
    server = make_server(draft())
    address = server.address
    for _ in range(2):
        with connect(address) as left_at_once:
            shake_hands(left_at_once)
    with connect(address) as client:
        shake_hands(client)
        server.close()
        assert is_ended(client)
    make_server(draft(), address=address).close()


def test_an_address_in_use_is_an_error_of_one_line() -> None:
    server = make_server(draft())
    with pytest.raises(SettingsError, match=r"cannot listen on .*Address already in use"):
        make_server(draft(), address=server.address)
    server.close()


@pytest.mark.parametrize("address", ["", "127.0.0.1:5555", "ipc:///tmp/x", "tcp://127.0.0.1", "tcp://127.0.0.1:70000"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(SettingsError, match=r"address of a draft server must|a port is at most"):
        make_server(draft(), address=address)


@pytest.mark.parametrize("name", ["max_sessions", "max_requests", "max_tokens_per_pass", "silence_timeout_s"])
def test_limits_below_one_are_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} must be .*got 0"):
        ServerLimits(**{name: 0})
