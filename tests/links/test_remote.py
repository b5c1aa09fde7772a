"""The link to a draft server: it says why it cannot begin, comes back when it is lost, and never holds up the text."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from benchmarks.draft_server.delay_proxy import DelayProxy
from card.api.llm import LLM
from card.config import SamplingParams
from card.drafting.messages import Declined, DrafterMessage, Open, PassSeconds, Pong, Ready, Resync, encode
from card.errors import SettingsError, WorkerError
from card.links import remote, zmq_link
from card.links.keys import load_server_keys, make_keys
from card.links.remote import RemoteLink
from tests.decoding import decode, plain, toy_draft, toy_target
from tests.drafts import draft_spec
from tests.links.serving import PATIENCE_S, connected, decode_until_accepted, make_server, running
from tests.pair import Pair
from tests.toy import TableModel
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

TARGET = toy_target()


def draft() -> TableModel:
    return toy_draft(TARGET, 0.9)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Keys of a server and its clients ann and bob, and of a server and a client of elsewhere."""
    make_keys(tmp_path, ["ann", "bob"])
    make_keys(tmp_path / "elsewhere")
    return tmp_path


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_link, "FIRST_BACKOFF_S", 0.02)


# ---- the start ------------------------------------------------------------------------------------------------------


def test_what_the_server_says_of_itself_is_known_after_the_start() -> None:
    with running(make_server(draft(), tokenizer="abc")) as server, connected(server.address, tokenizer="abc") as link:
        assert link.ready == Ready(12, 128, 7, PassSeconds(((1, 0.001),), 0.0, 0.0), "abc")
        assert str(link.status) == "up"
        assert link.receive() == []


@pytest.mark.parametrize(
    ("server_has", "target_has", "reason"),
    [
        (("abc", 12), ("xyz", 12), "another tokenizer"),
        (("", 12), ("xyz", 13), "has 12 tokens, the target has 13"),
        (("abc", 12), ("abc", 16), None),  # rows that only pad an embedding
        (("", 12), ("xyz", 12), None),
    ],
)
def test_a_draft_model_of_another_vocabulary_is_refused(
    server_has: tuple[str, int], target_has: tuple[str, int], reason: str | None
) -> None:
    model = TableModel(0, vocab_size=server_has[1])
    with (
        running(make_server(model, tokenizer=server_has[0])) as server,
        connected(server.address, tokenizer=target_has[0], vocab_size=target_has[1], start=False) as link,
    ):
        if reason is None:
            link.start()
            return
        with pytest.raises(WorkerError, match=reason):
            link.start()
        assert link.status.state == "down"


@pytest.mark.parametrize(("layers_per_pass", "is_refused"), [(1, True), (8, False)])
def test_a_model_of_one_token_a_pass_is_refused_where_the_method_needs_several(
    layers_per_pass: int, is_refused: bool
) -> None:
    server = make_server(TableModel(0, vocab_size=12), layers_per_pass=layers_per_pass)
    with running(server), connected(server.address, least_layers=2, start=False) as link:
        if is_refused:
            with pytest.raises(WorkerError, match="guesses one token a pass, and this method needs several"):
                link.start()
        else:
            link.start()


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address where nobody listens, kept so that nobody else begins to."""
    with contextlib.closing(socket.socket()) as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{reserved.getsockname()[1]}"


def plain_ids(pair: Pair, params: SamplingParams) -> Sequence[int]:
    """Return what the target writes alone."""
    with LLM(pair.target, method="vanilla") as alone:
        return alone.generate("the cat", params)[0].outputs[0].token_ids


def test_an_address_where_nobody_listens_is_a_worker_error(nowhere: str) -> None:
    with (
        connected(nowhere, start=False, start_timeout_s=0.3) as link,
        pytest.raises(WorkerError, match=r"no server answers there \(waited 0.3 s\)"),
    ):
        link.start()


def test_a_text_goes_on_plainly_without_an_optional_draft_server(
    pair: Pair, nowhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    expected = plain_ids(pair, params)
    with LLM(pair.target, draft_address=nowhere, draft_optional=True, start_timeout_s=0.3) as llm:
        while "no server answers there (waited 0.3 s)" not in caplog.text:
            first = llm.generate("the cat", params)[0]
            assert (first.outputs[0].token_ids, first.stats.drafter_passes) == (expected, 0)
        assert [one.levelname for one in caplog.records if "no server answers" in one.message] == ["ERROR"]


def test_a_draft_model_here_takes_turns_where_no_draft_server_answers(pair: Pair, nowhere: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    expected = plain_ids(pair, params)
    with LLM(pair.target, pair.draft, draft_address=nowhere, draft_optional=True, start_timeout_s=0.3) as llm:
        assert llm.generate("the cat", params)[0].outputs[0].token_ids == expected
        assert "in turns" in llm.stats().schedule_reason


def test_something_that_listens_but_is_no_server_is_a_worker_error() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as mute:
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        with (
            connected(address, start=False, start_timeout_s=0.3) as link,
            pytest.raises(WorkerError, match="does not answer like a draft server"),
        ):
            reach(link)
            link.start()


def reach(link: RemoteLink) -> None:
    """Let the link connect, however long that takes."""
    link.begin()
    until(lambda: [link._look_at_connection(), link._has_connected][1])


@contextlib.contextmanager
def answering(*frames: bytes) -> Iterator[str]:
    """Answer every message with the same frames; yields the address."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            if router.poll(20):
                client, *_ = router.recv_multipart()
                for frame in frames:
                    router.send_multipart([client, frame])
        router.close()

    thread = threading.Thread(target=run)
    thread.start()
    yield f"tcp://127.0.0.1:{port}"
    is_over.set()
    thread.join()
    context.term()


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"\x93\x63\x01\x81\xa4type\xa3New", "protocol version 99, this side speaks"),
        (b"hello", "is not a message"),
        (encode(Ready(12, 128, 0), 7), "does not answer like"),  # to another incarnation
    ],
    ids=["version", "noise", "incarnation"],
)
def test_a_server_that_talks_otherwise_is_a_worker_error(frame: bytes, reason: str) -> None:
    patience_s = 0.5 if "does not answer" in reason else PATIENCE_S
    with answering(frame) as address, connected(address, start=False, start_timeout_s=patience_s) as link:
        reach(link)
        with pytest.raises(WorkerError, match=f"cannot be used: .*{reason}"):
            link.start()
        link.close()


def test_a_server_that_says_nonsense_of_itself_is_down_and_the_target_starts(caplog: pytest.LogCaptureFixture) -> None:
    times = tuple((i, float("nan")) for i in range(1, 3001))
    with (
        answering(encode(Ready(12, 128, 0, PassSeconds(times, 0.0, 0.0)), 1)) as address,
        connected(address, start=False) as link,
    ):
        link.start()
        assert link.status.state == "down"
        assert link.status.reason == "the times of passes of a drafter must be 256 at most, got '3000 of them'"
        assert [one.levelname for one in caplog.records] == ["WARNING"]
        assert link.ready is None
        assert decode(TARGET, link)[:2] == plain(TARGET)


@pytest.mark.parametrize("message", [Pong(1), Declined(5, "no"), Resync(5, None)], ids=["pong", "declined", "resync"])
def test_a_server_that_never_stops_talking_is_left(message: DrafterMessage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_link, "_FRAMES_PER_READ", 100)
    monkeypatch.setattr(zmq_link, "FIRST_BACKOFF_S", 1000.0)
    with answering(encode(Ready(12, 128, 0), 1), *[encode(message, 1)] * 2000) as address, connected(address) as link:
        reads: list[int] = []
        until(lambda: [reads.append(len(link.receive())), link.status.state == "down"][1])
        assert link.status.reason == "it sends more than can be read"
        assert max(reads) <= (1 if isinstance(message, Resync) else 100)
        assert decode(TARGET, link)[:2] == plain(TARGET)


@pytest.mark.parametrize("address", ["somewhere", "tcp://*:5555", "tcp://127.0.0.1:0", "tcp://0.0.0.0:5555"])
def test_an_address_that_cannot_be_connected_to_is_refused(address: str) -> None:
    with pytest.raises(SettingsError, match="address of a draft server must look like"):
        RemoteLink(address, vocab_size=12, start_timeout_s=1, silence_timeout_s=1)


# ---- keys -----------------------------------------------------------------------------------------------------------


def test_clients_with_keys_are_let_in(keys: Path) -> None:
    with (
        running(make_server(draft(), keys=load_server_keys(keys / "server"))) as server,
        connected(server.address, keys=keys / "ann") as ann,
        connected(server.address, keys=keys / "bob") as bob,
    ):
        decode_until_accepted(TARGET, ann)
        decode_until_accepted(TARGET, bob)


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("bob", "does not have this client's key"),
        ("elsewhere/client", "its key differs from the one that this client has"),
        (None, "requires keys"),
    ],
)
def test_a_client_without_the_right_key_is_refused_and_the_others_are_served(
    keys: Path, folder: str | None, reason: str
) -> None:
    (keys / "server" / "clients" / "bob.key").unlink()
    with (
        running(make_server(draft(), keys=load_server_keys(keys / "server"))) as server,
        connected(server.address, keys=keys / "ann") as ann,
    ):
        stranger_keys = None if folder is None else keys / folder
        with connected(server.address, keys=stranger_keys, start=False) as stranger:
            with pytest.raises(WorkerError, match=reason):
                stranger.start()
            assert server.num_sessions == 1
        decode_until_accepted(TARGET, ann)
        assert ann.status.num_restarts == 0


def test_keys_for_a_server_without_are_a_worker_error(keys: Path) -> None:
    with (
        running(make_server(draft())) as server,
        connected(server.address, keys=keys / "ann", start=False) as link,
        pytest.raises(WorkerError, match="uses no keys"),
    ):
        link.start()


def test_a_folder_without_a_clients_keys_is_refused(keys: Path) -> None:
    with pytest.raises(SettingsError, match="give the folder that `card keys` made for a client"):
        RemoteLink("tcp://127.0.0.1:1", vocab_size=12, keys=keys / "server", start_timeout_s=1, silence_timeout_s=1)


# ---- losing the server ----------------------------------------------------------------------------------------------


def test_a_server_that_is_gone_leaves_plain_decoding_and_is_used_again_when_it_is_back() -> None:
    first = make_server(draft())
    address = first.address
    with contextlib.ExitStack() as stack:
        with running(first):
            link = stack.enter_context(connected(address))
            decode_until_accepted(TARGET, link)
        until(lambda: [link.receive(), link.status.state != "up"][1])
        for _ in range(3):
            token_ids, reason, stats = decode(TARGET, link)
            assert (token_ids, reason) == plain(TARGET)
            assert stats.accepted_tokens == 0
        stack.enter_context(running(make_server(draft(), address=address)))
        received: list[object] = []
        until(lambda: received.extend(link.receive()) or link.status.state == "up")
        assert [type(message) for message in received] == [Ready], "so that the running requests are opened again"
        decode_until_accepted(TARGET, link)
        assert link.status.num_restarts > 0


def test_a_server_that_dies_in_the_middle_of_a_text_changes_nothing_in_it() -> None:
    first = make_server(draft())
    with contextlib.ExitStack() as stack:
        inner = contextlib.ExitStack()
        inner.enter_context(running(first))
        link = stack.enter_context(connected(first.address))
        rounds: list[int] = []

        whole = link.receive

        def receive() -> list[object]:
            rounds.append(1)
            if len(rounds) == 10:
                inner.close()
            return whole()  # type: ignore[return-value]

        link.receive = receive  # type: ignore[method-assign, assignment]
        assert decode(TARGET, link)[:2] == plain(TARGET)
        assert len(rounds) > 10


def test_a_server_that_hangs_is_noticed_and_costs_no_time() -> None:
    server = make_server(draft())
    hang, release = threading.Event(), threading.Event()
    whole = server.serve_once

    def serve_once(wait_ms: int) -> None:
        if hang.is_set():
            release.wait()
        whole(wait_ms)

    server.serve_once = serve_once  # type: ignore[method-assign]
    with running(server), connected(server.address, silence_timeout_s=0.2) as link:
        link._watch._backoff_s = zmq_link.MAX_BACKOFF_S  # so that nobody overlooks that it is down
        link.receive()
        hang.set()
        try:

            def is_lost() -> bool:
                assert decode(TARGET, link)[:2] == plain(TARGET)
                return link.status.reason.startswith("silent for") and link.status.state == "down"

            until(is_lost)
        finally:
            hang.clear()
            release.set()
        link._watch.forgive()
        until(lambda: [link.receive(), link.status.num_restarts > 0 and link.status.state == "up"][1])


def test_a_server_that_is_rejected_is_tried_again() -> None:
    with running(make_server(draft())) as server, connected(server.address) as link:
        link.reject("it lies")
        assert str(link.status) == "down: it lies"
        until(lambda: [link.receive(), link.status.state == "up"][1])
        decode_until_accepted(TARGET, link)
        assert link.status.num_restarts == 1


def test_a_session_that_the_server_dropped_while_nobody_asked_begins_anew_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_link, "FIRST_BACKOFF_S", 1000.0)
    monkeypatch.setattr(zmq_link, "PING_AFTER_S", 0.1)
    monkeypatch.setattr(remote, "_RESTING_AFTER_S", 0.5)
    server = make_server(draft(), silence_timeout_s=1.0)
    with running(server), connected(server.address) as link:
        assert link._socket is not None
        until(lambda: server.num_sessions == 0)
        until(lambda: link._socket.poll(0))  # the server's last word, behind its signs of life
        until(lambda: [link.receive(), link.status.state == "up" and server.num_sessions == 1][1])
        decode_until_accepted(TARGET, link)


def test_closing_ends_the_session_and_may_be_done_twice() -> None:
    with running(make_server(draft())) as server:
        with connected(server.address) as link:
            link.send(Open(1, (1, 2), draft_spec()))
            link.close()
            link.close()
            assert str(link.status) == "down: closed"
            assert link.receive() == []
            link.send(Open(2, (1, 2), draft_spec()))
        until(lambda: server.num_sessions == 0)
        assert decode(TARGET, link)[:2] == plain(TARGET)


# ---- distance -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_way_s", [0.0, 0.005])
def test_a_distant_server_changes_no_text(one_way_s: float) -> None:
    with (
        running(make_server(draft())) as server,
        DelayProxy(port_of(server.address), one_way_s=one_way_s) as proxy,
        connected(proxy.address) as link,
    ):
        decode_until_accepted(TARGET, link)


def test_a_connection_that_the_way_breaks_is_made_again() -> None:
    with (
        running(make_server(draft())) as server,
        DelayProxy(port_of(server.address), one_way_s=0.001) as proxy,
        connected(proxy.address) as link,
    ):
        decode_until_accepted(TARGET, link)
        proxy.cut()
        until(lambda: [link.receive(), link.status.num_restarts > 0][1])
        until(lambda: [link.receive(), link.status.state == "up"][1])
        decode_until_accepted(TARGET, link)
