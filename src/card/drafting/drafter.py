"""The drafting side: a state machine that turns the target's messages into layers of candidates.

It has no thread, socket, sleep or clock. `receive` takes a message, `step` makes one drafter pass; both return the
messages to send. The caller decides when to call them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from card.drafting.drafted import NEVER, DraftedRequests, Drafting
from card.drafting.drafter_pass import NO_END, Task, TurnEnd, step_together
from card.drafting.messages import (
    MAX_LEN,
    Close,
    Correction,
    Declined,
    DrafterMessage,
    Open,
    Ping,
    Pong,
    Resync,
    Shutdown,
    TargetMessage,
    TargetStates,
    check_correction,
    check_spec,
)
from card.drafting.protocol import DraftWriter
from card.errors import ProtocolError, in_words
from card.tree.nodes import NewNodes

MAX_REQUESTS = 64  # open at once, of one target
MAX_TOKENS_PER_PASS = 256  # longer texts take several passes, so that other requests and pings need not wait
_MIN_REPEATED_TOKENS = 64  # reply to so long a correction: the target does not know what arrived


class DrafterWorker:
    """Drafts for any number of requests of one target, and keeps the authoritative tree of each.

    A request that finds no room is turned away, and requested again when there is room (`DraftedRequests`).

    A text that the draft model cannot follow is declined: the model lacks one of its tokens, it is too long for the
    model or the memory, or a pass over it fails. The target continues that request without the drafter.
    """

    def __init__(
        self,
        writer: DraftWriter,
        *,
        clock: Callable[[], float],
        max_requests: int = MAX_REQUESTS,
        max_tokens_per_pass: int = MAX_TOKENS_PER_PASS,
        peers: Callable[[], Iterable[DrafterWorker]] = tuple,
    ) -> None:
        """Make a worker without requests.

        Args:
            clock: seconds; used only to report the time of passes and to order requests fairly.
            max_requests: most requests open at once.
            max_tokens_per_pass: a longer text is run in several passes.
            peers: returns the workers that share the writer's memory.
        """
        self.is_shut_down = False
        self.is_idle = True  # a step would do nothing: each tree has its full lead, or cannot grow
        self.writer = writer
        self.clock = clock
        self.served_at = NEVER  # start of this worker's last pass, and its place in it
        self._max_tokens_per_pass = max_tokens_per_pass
        self._requests = DraftedRequests(writer, max_requests, lambda: [peer._requests for peer in peers()])
        self._turn_end = NO_END

    @property
    def layers_per_pass(self) -> int:
        """Most layers that a step adds to a tree."""
        return self.writer.layers_per_pass

    @property
    def drafting(self) -> Mapping[int, Drafting]:
        """The open requests by number, the least recently corrected first."""
        return self._requests.open

    def receive(self, message: TargetMessage | TargetStates) -> list[DrafterMessage]:
        """Take one message of the target and return the replies.

        Raises: ProtocolError if no target sends such a message, or its spec cannot be followed.
        """
        self.is_idle = False
        match message:
            case Open():
                return self._receive_open(message)
            case Correction():
                return self._receive_correction(message)
            case TargetStates():
                if (drafting := self.drafting.get(message.request_id)) is not None:
                    drafting.sequence.read(message.first, message.states)
                return []
            case Close(request_id=request_id):
                self._requests.close(request_id)
                return []
            case Ping(nonce=nonce):
                return [Pong(nonce)]
            case Shutdown():
                for request_id in list(self.drafting):
                    self._requests.close(request_id)
                self.is_shut_down = True
                return []
        raise ProtocolError("a drafter accepts only messages of a target, and this is not one")

    def begin_turn(self, end: TurnEnd) -> None:
        """Let the next steps draft up to this end, and check every request again."""
        self._turn_end = end
        self.is_idle = False

    def step(self) -> list[DrafterMessage]:
        """Make one drafter pass for the open requests that have something to expand.

        Raises: any error of the draft model if it cannot run any text.
        """
        most = min(self._max_tokens_per_pass, self._turn_end.max_tokens or self._max_tokens_per_pass)
        (messages,) = step_together([self], max_tokens=most)
        return messages

    def tasks(self, said: list[DrafterMessage]) -> list[Task]:
        """Return the tasks of the next pass, least recently served first.

        Args:
            said: receives the messages about requests whose candidates cannot be found.
        """
        tasks, end, spare = list[Task](), self._turn_end, 0.0
        for request_id, drafting in list(self.drafting.items()):
            if request_id in end.resting:
                continue
            try:
                num_tokens = drafting.sequence.num_tokens_to_run()
                own_spare = end.spare(*drafting.sequence.best_end)
            except Exception as error:  # affects only this request
                said += self.decline(request_id, f"its candidates cannot be found: {in_words(error)}", has_failed=True)
                continue
            if num_tokens and own_spare >= 0.0:
                spare += own_spare
                tasks.append(Task(self, request_id, drafting, num_tokens))
        if spare < end.layer:
            tasks.clear()
        self.is_idle = not tasks
        return sorted(tasks, key=lambda task: task.drafting.served_at)

    def _receive_open(self, message: Open) -> list[DrafterMessage]:
        check_spec(message.spec)
        request_id, known = message.request_id, self.drafting.get(message.request_id)
        if self._requests.is_closed(request_id) or (known and len(known.sequence.token_ids) >= len(message.token_ids)):
            return []  # a repeated or late message
        if not message.token_ids or len(message.token_ids) >= message.spec.max_len:
            self._requests.close(request_id)  # nothing to draft from, or the text is complete
            return []
        reason = self._requests.why_declined(request_id) or self._fault(message.token_ids, len(message.token_ids))
        if not reason and not self.writer.can_ever_hold(message.spec):
            num_rows = self.writer.rows_of(message.spec)
            reason = f"the text may take {num_rows} KV rows, more than the drafter's memory holds"
        if reason:
            return self.decline(request_id, reason)
        try:
            drafting = self._requests.begin(message)
        except Exception as error:  # affects only this request: its grammar or growth rule
            return self.decline(request_id, f"it cannot be started: {in_words(error)}", has_failed=True)
        return [] if drafting is None else [drafting.layer(request_id, NewNodes.none(), is_reset=True)]

    def _receive_correction(self, message: Correction) -> list[DrafterMessage]:
        check_correction(message)
        request_id, known = message.request_id, self._requests.hear_of(message.request_id)
        if known is None:
            return self._ask_for(request_id)
        known_len = len(known.sequence.token_ids)
        if message.start > known_len:
            return [Resync(request_id, known_len)]
        new_ids = message.token_ids[known_len - message.start :]
        reason = self._fault(new_ids, known_len + len(new_ids))
        if reason:
            return self.decline(request_id, reason)
        if message.start + len(message.token_ids) >= known_len:  # the newest correction: its shape holds
            known.sequence.reshape(beam_width=message.beam_width, branch_below=message.branch_below)
        if known_len + len(new_ids) > known.sequence.spec.max_len:
            raise ProtocolError(
                f"the text of request {request_id} has {known_len + len(new_ids)} tokens; its draft spec said that it "
                f"gets {known.sequence.spec.max_len} at most"
            )
        try:
            return self._replies(message, known, new_ids)
        except Exception as error:  # affects only this request
            return self.decline(request_id, f"its text cannot be followed: {in_words(error)}", has_failed=True)

    def _replies(self, message: Correction, known: Drafting, new_ids: Sequence[int]) -> list[DrafterMessage]:
        """Append the new part of a text and return the messages about it."""
        request_id = message.request_id
        replies: list[DrafterMessage] = []
        if new_ids:
            from_secondary = known.sequence.commit(new_ids)
            if from_secondary is None:
                replies.append(known.layer(request_id, NewNodes.none(), is_reset=True))
            elif from_secondary.ids:
                replies.append(known.layer(request_id, from_secondary, is_reset=False))
        if message.wants_snapshot:
            replies.append(known.layer(request_id, known.sequence.cache.snapshot(), is_reset=True))
        if not replies and len(message.token_ids) >= _MIN_REPEATED_TOKENS:
            replies.append(known.layer(request_id, NewNodes.none(), is_reset=False))
        return replies

    def _ask_for(self, request_id: int) -> list[DrafterMessage]:
        """Ask for a request that is not open, unless it was closed or there is still no room for it."""
        if (reason := self._requests.why_declined(request_id)) is not None:
            return [Declined(request_id, reason)]
        is_hopeless = self._requests.is_closed(request_id) or not self._requests.may_find_room(request_id)
        return [] if is_hopeless else [Resync(request_id, None)]

    def _fault(self, new_ids: Sequence[int], length: int) -> str:
        """Return why the draft model cannot follow a text; empty if it can.

        Args:
            new_ids: tokens of it that were not checked yet.
            length: tokens of the whole text.
        """
        vocab_size, longest = self.writer.vocab_size, min(self.writer.max_model_len, MAX_LEN)
        foreign = next((token_id for token_id in new_ids if not 0 <= token_id < vocab_size), None)
        if foreign is not None:
            return f"the draft model has no token {foreign}: its tokens are 0 to {vocab_size - 1}"
        if length >= longest:
            return f"the text has {length} tokens, and the draft model's context holds {longest}"
        return ""

    def decline(self, request_id: int, reason: str, *, has_failed: bool = False) -> list[DrafterMessage]:
        """Stop drafting for a request, and tell its target. ``has_failed``: its rows may be wrong."""
        self._requests.decline(request_id, reason, has_failed=has_failed)
        return [Declined(request_id, reason)]
