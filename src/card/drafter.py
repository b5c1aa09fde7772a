"""The drafting side: a state machine that turns the target's messages into layers of candidates.

No thread, socket, sleep or clock in here: `receive` takes a message, `step` makes one drafter pass; both return what
is to be sent. Whoever drives it decides when.
"""

from __future__ import annotations

from collections.abc import Callable

from card.candidates import NewNodes
from card.errors import ProtocolError
from card.messages import Close, Correction, DrafterMessage, Layer, Open, Ping, Pong, Resync, Shutdown, TargetMessage
from card.writers.beam import BeamSequence, BeamWriter

_CLOSED_REMEMBERED = 1024  # a late Open of a request closed this recently does not revive it


class _Drafting:
    """One open request: its beam and what has been said about it."""

    def __init__(self, beam: BeamSequence) -> None:
        self.beam = beam
        self.num_passes = 0
        self.busy_s = 0.0
        self._next_seq = 0

    def layer(self, request_id: int, nodes: NewNodes, *, is_reset: bool) -> Layer:
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        return Layer(
            request_id=request_id,
            seq=seq,
            epoch=self.beam.cache.epoch,
            is_reset=is_reset,
            root_id=self.beam.cache.root_id,
            root_position=self.beam.root_position,
            known_len=len(self.beam.token_ids),
            ids=nodes.ids,
            parents=nodes.parents,
            token_ids=nodes.tokens,
            logprobs=nodes.logprobs,
            num_passes=self.num_passes,
            busy_s=self.busy_s,
        )


class DrafterWorker:
    """Drafts for any number of requests; owns the truth about each candidate tree."""

    def __init__(self, writer: BeamWriter, *, clock: Callable[[], float], max_requests: int = 64) -> None:
        self.is_shut_down = False
        self.is_idle = True  # a step would do nothing: every beam is as deep as its lead, or cannot grow
        self._writer = writer
        self._clock = clock  # seconds; only to report how long passes took
        self._max_requests = max_requests
        self._open: dict[int, _Drafting] = {}  # least recently corrected first
        self._closed: dict[int, None] = {}

    @property
    def num_requests(self) -> int:
        """Requests that are open."""
        return len(self._open)

    def receive(self, message: TargetMessage) -> list[DrafterMessage]:
        """Take one message of the target and return the replies.

        Raises: ProtocolError if the message is none that a target sends, or holds tokens that the model does not have.
        """
        self.is_idle = False
        match message:
            case Open():
                return self._receive_open(message)
            case Correction():
                return self._receive_correction(message)
            case Close(request_id=request_id):
                self._close(request_id)
                return []
            case Ping(nonce=nonce):
                return [Pong(nonce)]
            case Shutdown():
                for request_id in list(self._open):
                    self._close(request_id)
                self.is_shut_down = True
                return []
        raise ProtocolError(f"a drafter takes Open, Correction, Close, Ping and Shutdown, got {type(message).__name__}")

    def step(self) -> list[DrafterMessage]:
        """Make one drafter pass for every open request that has something to expand."""
        started = self._clock()
        frontiers = [(i, drafting, drafting.beam.frontier()) for i, drafting in self._open.items()]
        active = [entry for entry in frontiers if entry[2]]
        self.is_idle = not active
        if self.is_idle:
            return []
        layers = self._writer.step([(drafting.beam, frontier) for _, drafting, frontier in active])
        busy_s = (self._clock() - started) / len(active)
        messages: list[DrafterMessage] = []
        for (request_id, drafting, _), nodes in zip(active, layers, strict=True):
            drafting.num_passes += 1
            drafting.busy_s += busy_s
            if nodes.ids:
                messages.append(drafting.layer(request_id, nodes, is_reset=False))
        return messages

    def _receive_open(self, message: Open) -> list[DrafterMessage]:
        self._check_tokens(message.token_ids)
        request_id, known = message.request_id, self._open.get(message.request_id)
        if request_id in self._closed or (known and len(known.beam.token_ids) >= len(message.token_ids)):
            return []  # a repeated or late message
        if not message.token_ids or len(message.token_ids) >= self._writer.model.max_model_len:
            return []  # nothing to draft from, or no position left: the target goes on alone
        if known:
            known.beam.close()
            known.beam = self._writer.open(message.token_ids, message.spec, epoch=known.beam.cache.epoch + 1)
        else:
            while len(self._open) >= self._max_requests:
                self._close(next(iter(self._open)))
            self._open[request_id] = known = _Drafting(self._writer.open(message.token_ids, message.spec, epoch=0))
        return [known.layer(request_id, NewNodes.none(), is_reset=True)]

    def _receive_correction(self, message: Correction) -> list[DrafterMessage]:
        self._check_tokens(message.token_ids)
        request_id, known = message.request_id, self._open.get(message.request_id)
        if known is None:
            return [] if request_id in self._closed else [Resync(request_id, 0)]
        known_len = len(known.beam.token_ids)
        if message.start > known_len:
            return [Resync(request_id, known_len)]
        self._open[request_id] = self._open.pop(request_id)
        new_ids = message.token_ids[known_len - message.start :]
        replies: list[DrafterMessage] = []
        if new_ids:
            from_secondary = known.beam.commit(new_ids)
            if from_secondary is None:
                replies.append(known.layer(request_id, NewNodes.none(), is_reset=True))
            elif from_secondary.ids:
                replies.append(known.layer(request_id, from_secondary, is_reset=False))
        if message.wants_snapshot:
            replies.append(known.layer(request_id, known.beam.cache.snapshot(), is_reset=True))
        return replies

    def _close(self, request_id: int) -> None:
        drafting = self._open.pop(request_id, None)
        if drafting:
            drafting.beam.close()
        self._closed[request_id] = None
        if len(self._closed) > _CLOSED_REMEMBERED:
            self._closed.pop(next(iter(self._closed)))

    def _check_tokens(self, token_ids: tuple[int, ...]) -> None:
        vocab_size = self._writer.model.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise ProtocolError(
                f"token ids must be from 0 to {vocab_size - 1}, got {min(token_ids)} to {max(token_ids)}"
            )
