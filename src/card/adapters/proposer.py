"""Chains for an engine that verifies: follow its rows, ask all writers, hand over the best chain of each row.

Nothing in here waits, but for a drafter that takes turns with the engine, as far as that pays. A drafter that is lost,
late or lying means fewer candidates. What is proposed never decides what the text is: the engine's verification does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from card.adapters.chains import Chances, RowCosts, best_chain
from card.adapters.figures import Figures
from card.adapters.line import DrafterLine
from card.adapters.requests import Drafting, Request
from card.adapters.tracking import Followed, RowTracker, Tokens
from card.adapters.turns import Turns
from card.config import DraftSettings
from card.errors import ProtocolError
from card.tree.messages import Declined, Layer, Ready, Resync, TargetMessage
from card.tree.nodes import NO_NODES
from card.workers.offers import DRAFTER, writer_label
from card.writers.local.protocol import LocalWriter

_LEAST_LOCAL_WRITERS_S = 0.0003  # however late it is: some rows of a large batch have their turn in each step
# Of 2 ms that a step of 16 requests may take; to ask one request's writers takes about 0.1 ms. Evidence: 1.4 ms took as
# many steps, each 0.15 ms longer (benchmarks/LOG.md).
_LOCAL_WRITERS_S = 0.001


class ChainProposer:
    """Proposes one chain for each row of an engine's batch."""

    figures: Figures
    """What was done so far."""
    line: DrafterLine | None
    """The way to the drafter, if there is one."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        num_speculative_tokens: int,
        draft: DraftSettings,
        writers: Mapping[str, LocalWriter],
        line: DrafterLine | None,
        clock: Callable[[], float],
        row_cost: float | None = None,
        local_writers_s: float = _LOCAL_WRITERS_S,
        max_parked: int = 64,
    ) -> None:
        """Make a proposer without requests.

        Args:
            vocab_size: of the target; no other token is ever proposed.
            max_model_len: most tokens of a text.
            num_speculative_tokens: most tokens of a chain.
            writers: those without a model, in the order in which they are asked.
            line: to the drafter, which is open; None without one.
            clock: seconds, to learn what rows cost.
            row_cost: tokens that a candidate must be worth; None: as measured.
            local_writers_s: seconds of a step after which no writer without a model is asked.
            max_parked: most texts remembered that have no row.
        """
        self.figures = Figures()
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._most = num_speculative_tokens
        self._drafting = Drafting(draft=draft, max_model_len=max_model_len, vocab_size=vocab_size) if line else None
        self._writers = writers
        names = (DRAFTER, *writers)
        self._label = cache(lambda bits: writer_label(bits, names))
        self.line = line
        self._clock = clock
        self._tracker = RowTracker(self.begin, max_parked=max_parked)
        self._by_drafter_id: dict[int, Request] = {}
        self._chances = Chances()
        self._costs = RowCosts(row_cost)
        self._turns = Turns()
        self._local_writers_s = local_writers_s
        self._handed_over: tuple[float, int, int] | None = None  # when, to how many requests, and how many rows

    def propose(self, new_ids: Sequence[Sequence[int]], lengths: Sequence[int], tokens: Tokens) -> list[list[int]]:
        """Return for each row the tokens to verify next, none where nothing is worth it.

        Args:
            new_ids: [B] tokens that the last step committed in each row; empty while a prompt is being read.
            lengths: [B or more] tokens of each row, the new ones included.
            tokens: [B or more, S] int32; the rows. Nothing beyond ``lengths`` is read.
        """
        began = self._clock()
        before = [int(lengths[row]) - len(ids) for row, ids in enumerate(new_ids)]
        return self._propose(self._tracker.follow(before, tokens), new_ids, began)

    def propose_for(self, step: Followed[Request], new_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Do the same for an engine that says itself which request is which.

        Args:
            step: the request of each row, and which ones have come and gone; new ones are made by `begin`.
            new_ids: [B] tokens that the last step committed in each row.
        """
        return self._propose(step, new_ids, self._clock())

    def begin(self, token_ids: Tokens) -> Request:
        """Return a request that begins with these tokens, [S], 1 or more."""
        return Request(token_ids, self._writers, self._vocab_size)

    def _propose(self, step: Followed[Request], new_ids: Sequence[Sequence[int]], began: float) -> list[list[int]]:
        began_to_ask, messages = began, self._listen()
        num_tokens = sum(map(len, new_ids))
        for request in step.left:
            messages += self._close_drafter(request)
        for request in step.forgotten:
            request.close()
        for request in (*step.begun, *step.resumed):
            messages += self._open(request)
        is_steady = not (step.begun or step.resumed or step.left) and all(new_ids)
        if self._handed_over is not None and is_steady:
            handed_at, num_requests, num_rows = self._handed_over
            self._costs.observe(num_requests, num_rows, num_tokens, began - handed_at)
        for row, ids in zip(step.texts, new_ids, strict=True):
            if row is not None and ids:
                messages += self._commit(row, ids)
        if self.line is not None:
            self.line.post(messages)  # before the candidates are chosen: the drafter goes on meanwhile
            if self.line.takes_turns:
                self._draft(self.line, [row for row, ids in zip(step.texts, new_ids, strict=True) if row and ids])
                began_to_ask = self._clock()
        chains = self._choose(step.texts, new_ids, began_to_ask + self._local_writers_s)
        ended = self._clock()
        is_plain = bool(new_ids) and all(new_ids)
        num_rows = len(chains) + sum(map(len, chains))
        self._handed_over = (ended, len(chains), num_rows) if is_plain else None
        self._count(step.begun, step.resumed, ended - began)
        return chains

    def close(self) -> None:
        """End all requests, the writers and the drafter."""
        for request in self._tracker.forget_all():
            request.close()
        self._by_drafter_id.clear()
        for writer in self._writers.values():
            writer.close()
        if self.line is not None:
            self.line.close()

    def _labels(self, writers: Sequence[int]) -> list[str]:
        return [self._label(bits) for bits in writers]

    def _open(self, request: Request) -> list[TargetMessage]:
        if self._drafting is None:
            return []
        messages = request.open(self._drafting)
        if request.drafter_id is not None:
            self._by_drafter_id[request.drafter_id] = request
        return messages

    def _close_drafter(self, request: Request) -> list[TargetMessage]:
        """End the drafter's part of a request without a row, which may never come back."""
        request.chain = NO_NODES
        if request.drafter_id is not None:
            del self._by_drafter_id[request.drafter_id]
        return request.close_drafter()

    def _listen(self) -> list[TargetMessage]:
        """Take what the drafter said. Returns: the replies."""
        replies: list[TargetMessage] = []
        if self.line is None:
            return replies
        for message in self.line.take():
            if isinstance(message, Ready):  # a new one, which knows of no request
                for one in self._by_drafter_id.values():
                    replies += one.reopen()
            elif isinstance(message, Layer | Resync | Declined):
                found = self._by_drafter_id.get(message.request_id)
                if found is None:
                    self.figures.misses += 1
                    continue
                if isinstance(message, Declined):
                    self.figures.declined += 1
                    del self._by_drafter_id[message.request_id]
                    replies += found.decline()
                    continue
                try:
                    replies += found.receive(message)
                except ProtocolError as error:
                    self.figures.rejections += 1
                    self.line.reject(str(error))
        return replies

    def _draft(self, line: DrafterLine, requests: Sequence[Request]) -> None:
        """Have the drafter make passes while these bring more than the engine would in their time."""
        drafting = [one for one in requests if one.drafter_id is not None]
        row_cost, rate = self._costs.cost(max(1, len(requests))), self._costs.rate(len(requests))
        self._turns.begin_step()
        for _ in range(self._most if drafting else 0):
            if line.status.state != "up":
                break  # it has failed, for good: there is no other process to start anew
            reached = [self._chances.reached(one.drafted(self._most)) for one in drafting]
            if not self._turns.is_worth_a_pass(reached, self._most, row_cost=row_cost, rate=rate):
                break
            began = self._clock()
            line.draft()
            line.post(self._listen())
            self._turns.observe_pass(len(drafting), self._clock() - began)

    def _commit(self, request: Request, new_ids: Sequence[int]) -> list[TargetMessage]:
        if request.chain:
            known, num_right = request.judge(new_ids)
            self._chances.observe(known, num_right)
            self._turns.observe(known, num_right)
            self.figures.accepted_by_writer.update(self._labels(known.writers[:num_right]))
        old_id = request.drafter_id
        messages = request.commit(new_ids, self._drafting)
        if request.drafter_id != old_id:  # it has outgrown its room and was opened anew
            if old_id is not None:
                del self._by_drafter_id[old_id]
            if request.drafter_id is not None:
                self._by_drafter_id[request.drafter_id] = request
        return messages

    def _choose(
        self, requests: Sequence[Request | None], new_ids: Sequence[Sequence[int]], deadline: float
    ) -> list[list[int]]:
        """Return the chain of each row; after the deadline of the drafter's candidates only.

        Each step begins with another row, so that all get their turn.
        """
        deadline = max(deadline, self._clock() + _LEAST_LOCAL_WRITERS_S)
        row_cost = self._costs.cost(max(1, len(requests)))
        chains: list[list[int]] = [[] for _ in requests]
        first = self.figures.steps % max(1, len(requests))
        for row_idx in (*range(first, len(requests)), *range(first)):
            request = requests[row_idx]
            if request is not None and new_ids[row_idx]:
                chains[row_idx] = self._chain(request, row_cost, self._clock() < deadline)
        return chains

    def _chain(self, request: Request, row_cost: float, has_time: bool) -> list[int]:
        """Return the best chain of a request, which remembers it."""
        most = min(self._most, self._max_model_len - len(request) - 1)
        offer = request.offer(most, has_time=has_time) if most > 0 else NO_NODES
        chain = offer.take(best_chain(offer, self._chances.of(offer), row_cost, most))
        request.chain = chain
        if not chain:
            self.figures.empty_rows += 1
        self.figures.proposed_by_writer.update(self._labels(chain.writers))
        return list(chain.tokens)

    def _count(self, begun: Sequence[Request], resumed: Sequence[Request], seconds: float) -> None:
        figures = self.figures
        figures.steps += 1
        figures.propose_s += seconds
        figures.slowest_propose_s = max(figures.slowest_propose_s, seconds)
        figures.requests_begun += len(begun)
        figures.requests_resumed += len(resumed)
