"""The thread that drives the engine of an `AsyncLLM`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from card.api.host import Host, PreparedRequest
from card.api.mailbox import Mailbox, post
from card.api.outputs import AnswerText
from card.engine.metrics import EngineStats
from card.engine.request import Request, Update
from card.engine.scoring import ScoringJob
from card.errors import ClosedError, SettingsError, WorkerError, in_words

logger = logging.getLogger(__name__)
IDLE_LOOK_S = 1.0  # seconds between two looks for heartbeats of an idle engine, so that neither side seems dead
JOIN_TIMEOUT_S = 60.0  # most seconds for the engine's thread to finish its round and end the drafter


@dataclass(slots=True)
class _StreamedRequest:
    """A request in the engine or in the queue, and the reader of its stream."""

    name: str
    prepared: PreparedRequest
    mailbox: Mailbox


@dataclass(frozen=True, slots=True)
class _Abort:
    number: int
    done: Future[bool] | None = None  # gets whether the request was running


Command = _StreamedRequest | _Abort | ScoringJob


class Driver:
    """The engine's thread: carries out commands between rounds, runs rounds while there is work, fills mailboxes."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._changed = threading.Condition()  # reentrant: a stream may be collected while its own thread holds it
        self._inbox: list[Command] = []
        self._num_unseen = 0  # requests that the published figures do not count yet
        self._num_seen = 0  # those that the engine has taken since the figures were last published
        self._obeyed: list[tuple[Future[bool], bool]] = []  # resolved once the statistics include it
        self._number_of: dict[str, int] = {}  # names in use
        self._is_closing = False
        self._death: WorkerError | None = None
        self.ended: Future[WorkerError] = Future()  # gets the reason
        self.ended.set_running_or_notify_cancel()  # a waiter must not cancel it for the others
        self._latest = host.engine.stats()
        self.last_progress = time.monotonic()
        self._live: dict[int, _StreamedRequest] = {}  # the engine's thread only
        self._thread = threading.Thread(target=self._run, name="card-engine", daemon=True)
        self._thread.start()

    # ---- called from any thread -------------------------------------------------------------------------------------

    def add(self, name: str, prepared: PreparedRequest, mailbox: Mailbox) -> None:
        """Queue a request. Raises: SettingsError for a name in use; WorkerError."""
        with self._running():
            if name in self._number_of:
                raise SettingsError(f"request_id {name!r} is in use by a running request; choose another one")
            self._number_of[name] = prepared.request.request_id
            self._num_unseen += 1
            self._post(_StreamedRequest(name, prepared, mailbox))

    def abort(self, name: str) -> Future[bool] | None:
        """Queue an abort; None if there is no such request. Raises: WorkerError."""
        with self._running():
            if name not in self._number_of:
                return None
            done: Future[bool] = Future()
            self._post(_Abort(self._number_of[name], done))
            return done

    def score(self, job: ScoringJob) -> None:
        """Queue a text to be scored. Raises: WorkerError."""
        with self._running():
            self._post(job)

    def forget(self, number: int) -> None:
        """Drop a request whose stream is no longer read."""
        if not self._host.home.is_here:
            return
        with self._changed:
            if self._death is None:
                self._post(_Abort(number))

    def stats(self) -> EngineStats:
        """Return the engine's figures, including requests that it has not seen yet. Raises: WorkerError."""
        with self._running():
            stats = self._latest.copy()
            stats.num_waiting += self._num_unseen
            return stats

    def close(self) -> bool:
        """End the thread, engine and drafter. Returns: whether they have ended; a forked child has none of them."""
        if not self._host.home.is_here:
            return True
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)
        return not self._thread.is_alive()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Keep the thread from changes. Raises: WorkerError if it has ended, or was left behind by a fork."""
        self._host.home.check()
        with self._changed:
            self.check_alive()
            yield

    def check_alive(self) -> None:
        """Raise WorkerError if the thread has ended."""
        if self._death is not None:
            raise _copy_of(self._death)

    def _post(self, command: Command) -> None:
        self._inbox.append(command)
        self._changed.notify_all()

    # ---- the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        death: WorkerError = ClosedError("the engine was shut down; make a new AsyncLLM")
        try:
            while (commands := self._next_commands()) is not None:
                for command in commands:
                    self._obey(command)
                self._publish()
                if self._host.scorer.has_work:
                    self._host.scorer.step(is_alone=not self._host.engine.has_work)
                    self.last_progress = time.monotonic()
                self._deliver(self._host.engine.step())
        except BaseException as error:  # after any error, no caller may wait for ever
            logger.exception("the engine's thread ends")
            death = WorkerError(f"the engine's thread has died: {in_words(error)}")
            death.__cause__ = error
        finally:
            self._die(death)
            self._host.close()

    def _next_commands(self) -> list[Command] | None:
        """Wait for work or for the next check of the drafter; return the commands, None to end."""
        with self._changed:
            if not (self._inbox or self._is_closing or self._host.engine.has_work or self._host.scorer.has_work):
                self._changed.wait(IDLE_LOOK_S)
            if self._is_closing:
                return None
            commands, self._inbox = self._inbox, []  # garbage collection of a stream may append at any allocation
            return commands

    def _publish(self) -> None:
        """Publish the engine's figures, then resolve the commands carried out before."""
        with self._changed:
            target_tokens, self._latest = self._latest.target_tokens, self._host.engine.stats()
            if self._latest.target_tokens != target_tokens or not self._host.engine.has_work:
                self.last_progress = time.monotonic()
            self._num_unseen -= self._num_seen
            self._num_seen = 0
        obeyed, self._obeyed = self._obeyed, []
        for done, was_running in obeyed:
            if done.set_running_or_notify_cancel():
                done.set_result(was_running)

    def _obey(self, command: Command) -> None:
        engine = self._host.engine
        if isinstance(command, ScoringJob):
            self._host.scorer.add(command)
            return
        if isinstance(command, _StreamedRequest):
            self._num_seen += 1
            self._live[command.prepared.request.request_id] = command
            engine.add(command.prepared.checked)
            return
        last = engine.abort(command.number)
        if command.done is not None:
            self._obeyed.append((command.done, last is not None))
        if last is not None:
            self._deliver([last])

    def _deliver(self, updates: list[Update]) -> None:
        """Put each update into its mailbox and wake the readers; the statistics they see include it."""
        receivers = [(self._live[update.request_id], update) for update in updates]
        for live, update in receivers:
            if update.finish_reason is not None:
                del self._live[update.request_id]
                with self._changed:
                    self._number_of.pop(live.name, None)
        self._publish()
        letters: list[tuple[Mailbox, AnswerText, Update]] = []
        for live, update in receivers:
            written = live.prepared.written(update)
            if written.is_failure:
                self._forget(live)
            letters.append((live.mailbox, written.text, written.update))
        post(letters)

    def _forget(self, live: _StreamedRequest) -> None:
        """End a request whose text cannot be decoded."""
        number = live.prepared.request.request_id
        if self._live.pop(number, None) is not None:
            with self._changed:
                self._number_of.pop(live.name, None)
            self._host.engine.abort(number)

    def _die(self, death: WorkerError) -> None:
        """Raise this error in all waiting and all later calls."""
        with self._changed:
            self._death = death
            commands, self._inbox = self._inbox, []
            self._number_of.clear()
        unread = [*self._live.values(), *(command for command in commands if isinstance(command, _StreamedRequest))]
        self._live.clear()
        for command in commands:
            if isinstance(command, ScoringJob):
                self._host.scorer.add(command)
        self._host.scorer.fail(death)
        post([(one.mailbox, AnswerText(), _last_update(one.prepared.request, death)) for one in unread])
        unanswered = [done for done, _ in self._obeyed]
        unanswered += [command.done for command in commands if isinstance(command, _Abort) and command.done]
        for done in unanswered:
            if done.set_running_or_notify_cancel():
                done.set_exception(_copy_of(death))
        self.ended.set_result(death)


def _last_update(request: Request, death: WorkerError) -> Update:
    return Update(request.request_id, (), "error", request.new_stats(), _copy_of(death))


def _copy_of(error: WorkerError) -> WorkerError:
    """Return a copy to raise: an exception raised in several places collects all their tracebacks."""
    copy = type(error)(str(error))
    copy.__cause__ = error.__cause__
    return copy
