"""The real thing under fire: a tiny pair behind a `Host`, its drafter in a process or on a server."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from card.api.arguments import LLMArguments
from card.api.host import Host
from card.backends.transformers.loading import load_model
from card.drafting.beam import BeamWriter
from card.drafting.messages import Fault, Layer, Resync, encode
from card.links.process import ProcessLink
from card.links.remote import RemoteLink
from card.links.server import DraftServer
from card.links.switch import SwitchLink
from card.models.runners import plain_runner
from tests.chaos.forgery import LIES, OFFENCES, Forger, TappedSocket, forged_order, noise
from tests.chaos.soak import MAX_NUM_SEQS, PATIENCE_S
from tests.links.serving import LOOPBACK, RawClient, make_server
from tests.pair import Pair
from tests.reaching_in import workers_of
from tests.waiting import until

MAX_MODEL_LEN = 128
SPARE_TENSORS = 100  # the KV that is kept for reuse varies
_NUM_LONGEST = 6  # requests of full length that fit into the KV memory: it is full before the batch is
_KV_BYTES = _NUM_LONGEST * 256 * 512  # rows of a longest request, bytes of a row
DTYPE = "float64"  # among so many tokens, float32 would meet logits that differ by no more than the order of additions
END_IDS = frozenset({0, 1})
FIRST_TOKEN = 2  # of prompts
_PAUSE_GROWTH, _LONGEST_PAUSE_S = 1.25, 5.0  # from one round without the drafter to the next


def host_settings(**settings: Any) -> dict[str, Any]:
    """Return the settings that all hosts here share, with some more."""
    common = {
        "dtype": DTYPE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "kv_cache_memory": str(_KV_BYTES),
        "prefill_chunk": 32,
        "drafter_timeout_s": 5.0,  # on a busy machine a healthy drafter may say nothing for seconds
        "budget": 8,
    }
    return common | settings


class RealWorld:
    """An engine behind a `Host`, and a tap on what its drafter says."""

    pace_s: float
    """Pause before the first round without the drafter. It grows, so that few requests end until the drafter is back,
    however long that takes."""

    def __init__(self, host: Host, rng: random.Random) -> None:
        self.host, self.engine, self.rng = host, host.engine, rng
        self.end_ids, self.vocab_size = host.end_ids, host.runner.vocab_size
        self.max_kv_bytes = _KV_BYTES
        self.troubles: Counter[str] = Counter()
        self._forger = Forger(rng, host.engine._worker)
        self.is_calm = True
        self._pause_s = self.pace_s
        self.spare_trees, self.spare_tensors = 0, SPARE_TENSORS

    @property
    def link(self) -> ProcessLink | RemoteLink:
        """The link to the drafter outside this process."""
        link = self.host.link
        if isinstance(link, SwitchLink):
            link = link._links["beside"]
        assert isinstance(link, ProcessLink | RemoteLink)
        return link

    @property
    def is_up(self) -> bool:
        """Whether the drafter can be spoken to."""
        return self.link.status.state == "up"

    def trouble(self, progress: float) -> None:
        """Do harm before a round, or not."""
        is_away = self.attend()
        if is_away or not self.is_up:
            time.sleep(self._pause_s)
            self._pause_s = min(self._pause_s * _PAUSE_GROWTH, _LONGEST_PAUSE_S)
            return
        self._pause_s = self.pace_s
        if not self.is_calm:
            if self.rng.random() < 0.3:
                self.tell(self.rng.choice(LIES))
            self.harm(progress)

    def attend(self) -> bool:
        """Go on with what was begun in an earlier round; say whether the drafter is still kept from answering."""
        raise NotImplementedError

    def harm(self, progress: float) -> None:
        """Do something worse than to lie."""
        raise NotImplementedError

    def settle(self) -> None:
        """Let everything arrive that is on its way."""

    def close(self) -> None:
        """End everything."""
        self.host.close()

    def strike(self, kind: str) -> None:
        """Do harm of this kind now."""
        self.troubles[kind] += 1
        match kind:
            case "noise from the drafter":
                self._slip_in([noise(self.rng, self.link._watch.incarnation)])
            case "noise to the drafter":
                self._send(noise(self.rng, self.link._watch.incarnation))
            case "order that cannot be followed":
                self._send(encode(forged_order(self.rng), self.link._watch.incarnation))
            case "frame of another incarnation":
                self._slip_in([encode(Fault("of a ghost"), self.link._watch.incarnation - 1)])
            case _:
                self.tell(self.rng.choice(OFFENCES))

    def tell(self, kind: str) -> None:
        """Say something in the drafter's name."""
        forged = self._forger.forge(kind)
        if forged is None:
            return
        self.troubles[kind] += 1
        switch = self.host.link
        if isinstance(switch, SwitchLink) and isinstance(forged, Layer | Resync) and 0 <= forged.request_id < 2**40:
            forged = msgspec.structs.replace(forged, request_id=switch._known_as(forged.request_id))
        self._slip_in([encode(forged, self.link._watch.incarnation)])

    def _slip_in(self, frames: Sequence[bytes]) -> None:
        link: Any = self.link
        if link._socket is not None:
            link._socket = TappedSocket(link._socket, frames)

    def _send(self, frame: bytes) -> None:
        if self.link._socket is not None:
            with contextlib.suppress(zmq.Again):
                self.link._socket.send(frame, zmq.NOBLOCK)


class ProcessWorld(RealWorld):
    """A drafter in a process of its own; troubles come one after the other, spread over the requests."""

    pace_s = 0.2

    def __init__(self, pair: Pair, rng: random.Random, troubles: Sequence[str], **settings: Any) -> None:
        super().__init__(
            Host(LLMArguments(pair.target, pair.draft, method="card", settings=host_settings(**settings))), rng
        )
        self.planned = list(troubles)
        self._num_planned = len(self.planned)
        self._stopped: int | None = None  # pid
        self._rounds_to_go = 0  # until it goes on; negative: never

    def attend(self) -> bool:
        """Let a stopped drafter go on when it is time, unless it is never; it is given up then."""
        if self._stopped is None:
            return False
        if self._stopped != self.link.pid:
            self._stopped = None
        elif self._rounds_to_go == 0 or self.is_calm:
            os.kill(self._stopped, signal.SIGCONT)
            self._stopped = None
        self._rounds_to_go -= 1
        return self._stopped is not None and self._rounds_to_go < 0

    def harm(self, progress: float) -> None:
        """Do the next thing when it is due."""
        is_due = progress * (self._num_planned + 1) > self._num_planned - len(self.planned) + 1
        if self.planned and is_due and self._stopped is None and self.engine.has_work:
            self.strike(self.planned.pop(0))

    def strike(self, kind: str) -> None:
        """Do harm of this kind now."""
        pid = self.link.pid
        if kind not in ("kill", "pause", "freeze"):
            super().strike(kind)
        elif pid is not None:
            self.troubles[kind] += 1
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            if kind != "kill":
                self._stopped = pid
                self._rounds_to_go = self.rng.randint(2, 10) if kind == "pause" else -1


class ServerThread:
    """A draft server that can be killed, begun anew at the same address, and stopped for a moment."""

    def __init__(self, pair: Pair) -> None:
        self._model = load_model(pair.draft, dtype=DTYPE, device="cpu")
        self._server: DraftServer | None = None
        self._thread: threading.Thread | None = None
        self._is_ending = threading.Event()
        self.is_paused = False
        self.address = LOOPBACK
        self.restore()

    def restore(self) -> None:
        """Let it go on; if it was killed, listen at the address of before with a model that knows of nothing."""
        self.is_paused = False
        if self._server is not None:
            return
        runner = plain_runner(self._model, max_model_len=MAX_MODEL_LEN, max_tree_rows=128)
        self._writer = BeamWriter(runner)
        self._server = make_server(runner, address=self.address, writer=self._writer)
        self.address = self._server.address
        self._is_ending.clear()
        self._thread = threading.Thread(target=self._run, args=(self._server,), name="draft-server", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """End it without a word to its clients. Fails if it has fallen over before."""
        if self._thread is None:
            return
        assert self._thread.is_alive(), "the server has fallen over"
        self._is_ending.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._thread = self._server = None

    @property
    def num_requests(self) -> int:
        """The requests and the open sequences of all clients."""
        assert self._server is not None
        held = sum(len(worker.drafting) for worker in workers_of(self._server))
        return held + self._writer.pool.stats.num_open

    def _run(self, server: DraftServer) -> None:
        while not self._is_ending.is_set():
            if self.is_paused:
                time.sleep(0.002)
            else:
                server.serve_once(5)
        server.close()


class ServerWorld(RealWorld):
    """A drafter on a server across TCP; everything there is quick to come back, so troubles come at any round."""

    pace_s = 0.01
    _KINDS = (
        "noise from the drafter",
        "noise to the drafter",
        "order that cannot be followed",
        "frame of another incarnation",
        "offence",
        "noise of a stranger",
        "server killed",
        "server stopped",
    )

    def __init__(self, pair: Pair, rng: random.Random, **settings: Any) -> None:
        self.server = ServerThread(pair)
        address = {"draft_address": self.server.address}
        host = Host(LLMArguments(pair.target, None, method="card", settings=host_settings(**address, **settings)))
        super().__init__(host, rng)
        self._rounds_to_go = 0

    def attend(self) -> bool:
        """Bring the server back when it is time."""
        self._rounds_to_go -= 1
        if self._rounds_to_go <= 0 or self.is_calm:
            self.server.restore()
        return False

    def harm(self, progress: float) -> None:
        """Do any harm now and then."""
        if self.rng.random() < 0.12 and self._rounds_to_go <= 0:
            self.strike(self.rng.choice(self._KINDS))

    def strike(self, kind: str) -> None:
        """Do harm of this kind now."""
        match kind:
            case "server killed":
                self.server.kill()
                self._rounds_to_go = self.rng.randint(1, 10)
            case "server stopped":
                self.server.is_paused = True
                self._rounds_to_go = self.rng.randint(1, 10)
            case "noise of a stranger":
                with RawClient(self.server.address) as stranger:
                    stranger.send(noise(self.rng, 1))
            case _:
                super().strike(kind)
                return
        self.troubles[kind] += 1

    def settle(self) -> None:
        """Wait until the server holds no request any more."""
        until(lambda: self.server.num_requests == 0)

    def close(self) -> None:
        """End everything."""
        super().close()
        self.server.kill()
