"""Propose chains to an engine that verifies them: follow its rows, ask all writers, return the best chain of each row.

Nothing here waits, except for a drafter in turns with the engine, if that pays. A lost, late or malicious drafter means
fewer candidates. Proposals never decide the text: the engine's verification does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from card.config import DraftSettings
from card.drafting.local.protocol import LocalWriter
from card.drafting.messages import Declined, Layer, Ready, Resync, TargetMessage
from card.engine.offers import DRAFTER, writer_label
from card.errors import ProtocolError
from card.inside.adapters.chains import ChainPolicy, next_budget
from card.inside.adapters.drafted_text import DraftedText, DraftingFacts
from card.inside.adapters.figures import Figures
from card.inside.adapters.tracking import Followed, RowTracker, Tokens
from card.links.link import DrafterLink, NoDrafter
from card.tree.nodes import NO_NODES

# Seconds of a step after which no more writers without a model are asked. Asking those of one text takes about 0.1 ms,
# and those of 16 texts may take 2 ms. Evidence: 1.4 ms took as many steps, each 0.15 ms longer (benchmarks/LOG.md).
_LOCAL_WRITERS_S = 0.001
# Remembered texts without a row, including finished ones. Evidence: with as many as rows, all preempted texts are found
# again; with half as many, about two thirds (benchmarks/LOG.md).
PARKED_TEXTS = 64


class ChainProposer:
    """Proposes one chain for each row of an engine's batch."""

    figures: Figures
    """Counters so far."""
    link: DrafterLink
    """The link to the drafter."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        num_speculative_tokens: int,
        draft: DraftSettings,
        writers: Mapping[str, LocalWriter],
        link: DrafterLink | None,
        clock: Callable[[], float],
        row_cost: float | None = None,
        local_writers_s: float = _LOCAL_WRITERS_S,
        max_parked: int = PARKED_TEXTS,
    ) -> None:
        """Make a proposer without texts.

        Args:
            vocab_size: of the target; other tokens are never proposed.
            max_model_len: most tokens of a text.
            num_speculative_tokens: most tokens of a chain.
            writers: local ones, without a model, in the order in which they are asked.
            link: open, to the drafter; None without one. Only its `draft` may take time, in turns.
            clock: seconds, to learn the cost of rows.
            row_cost: tokens that a candidate must gain; None: as measured.
            local_writers_s: seconds of a step after which no local writer is asked.
            max_parked: most remembered texts without a row.
        """
        self.figures = Figures()
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._most = num_speculative_tokens
        self._drafting = (
            DraftingFacts(draft=draft, max_model_len=max_model_len, vocab_size=vocab_size) if link else None
        )
        self._writers = writers
        names = (DRAFTER, *writers)
        self._label = cache(lambda bits: writer_label(bits, names))
        self.link = NoDrafter() if link is None else link
        self._clock = clock
        self._tracker = RowTracker(self.begin, max_parked=max_parked)
        self._by_drafter_id: dict[int, DraftedText] = {}
        self._policy = ChainPolicy(row_cost)
        self._local_writers_s = local_writers_s
        self._handed_over: tuple[float, int, int] | None = None  # time, number of requests, number of rows

    def propose(self, new_ids: Sequence[Sequence[int]], lengths: Sequence[int], tokens: Tokens) -> list[list[int]]:
        """Return for each row the tokens to verify next; empty if no candidate is worth it.

        Args:
            new_ids: [B] tokens that the last step committed in each row; empty while a prompt is read.
            lengths: [B or more] tokens of each row, the new ones included.
            tokens: [B or more, S] int32; the rows. Nothing beyond ``lengths`` is read.
        """
        began = self._clock()
        before = [int(lengths[row]) - len(ids) for row, ids in enumerate(new_ids)]
        return self._propose(self._tracker.follow(before, tokens), new_ids, began)

    def propose_for(self, step: Followed[DraftedText], new_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Do the same for an engine that identifies its texts.

        Args:
            step: the text of each row, with new and finished ones; new texts are made by `begin`.
            new_ids: [B] tokens that the last step committed in each row.
        """
        return self._propose(step, new_ids, self._clock())

    def begin(self, token_ids: Tokens) -> DraftedText:
        """Return a new text of these tokens, [S], 1 or more."""
        return DraftedText(token_ids, self._writers, vocab_size=self._vocab_size, writer_budget=self._most)

    def _propose(self, step: Followed[DraftedText], new_ids: Sequence[Sequence[int]], began: float) -> list[list[int]]:
        began_to_ask, messages = began, self._listen()
        for text in step.left:
            messages += self._close_drafter(text)
        for text in step.forgotten:
            text.close()
        for text in (*step.begun, *step.resumed):
            messages += self._open(text)
        rows = [(text, ids) for text, ids in zip(step.texts, new_ids, strict=True) if text is not None and ids]
        self._observe(step, rows, began, is_steady=all(new_ids))
        for text, ids in rows:
            messages += self._commit(text, ids)
        self._send(messages)  # before the candidates are chosen, so that the drafter works meanwhile
        if not self.link.runs_by_itself:
            self._draft([text for text, _ in rows])
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
        for text in self._tracker.forget_all():
            text.close()
        self._by_drafter_id.clear()
        for writer in self._writers.values():
            writer.close()
        self.link.close()

    def _labels(self, writers: Sequence[int]) -> list[str]:
        return [self._label(bits) for bits in writers]

    def _observe(
        self,
        step: Followed[DraftedText],
        rows: Sequence[tuple[DraftedText, Sequence[int]]],
        now: float,
        *,
        is_steady: bool,
    ) -> None:
        """Learn the cost of the step, if it is comparable, and the outcome of its candidates."""
        if self._handed_over is not None and is_steady and not (step.begun or step.resumed or step.left):
            handed_at, num_requests, num_rows = self._handed_over
            num_tokens = sum(len(ids) for _, ids in rows)
            self._policy.observe_step(num_requests, num_rows, num_tokens, now - handed_at)
        verified = [text.judge(ids) for text, ids in rows]
        for one in verified:
            self.figures.accepted_by_writer.update(self._labels(one.offer.writers[: len(one.accepted)]))
        self._policy.observe([id(text) for text, _ in rows], verified)

    def _open(self, text: DraftedText) -> list[TargetMessage]:
        messages = [] if self._drafting is None else text.open(self._drafting)
        if text.drafter_id is not None:
            self._by_drafter_id[text.drafter_id] = text
        return messages

    def _close_drafter(self, text: DraftedText) -> list[TargetMessage]:
        """Close a text without a row in the drafter, as it may never return."""
        text.chain = NO_NODES
        if text.drafter_id is not None:
            del self._by_drafter_id[text.drafter_id]
        return text.close_drafter()

    def _send(self, messages: Sequence[TargetMessage]) -> None:
        for message in messages:
            self.link.send(message)

    def _listen(self) -> list[TargetMessage]:
        """Process the drafter's messages. Returns: the replies."""
        replies: list[TargetMessage] = []
        for message in self.link.receive():
            if isinstance(message, Ready):  # a new drafter without requests
                for one in self._by_drafter_id.values():
                    replies += one.reopen()
            elif isinstance(message, Layer | Resync | Declined):
                text = self._by_drafter_id.get(message.request_id)
                if text is None:
                    self.figures.misses += 1
                    continue
                if isinstance(message, Declined):
                    self.figures.declined += 1
                    del self._by_drafter_id[message.request_id]
                    replies += text.decline()
                    continue
                try:
                    replies += text.receive(message)
                except ProtocolError as error:
                    self.figures.rejections += 1
                    self.link.reject(str(error))
        return replies

    def _draft(self, texts: Sequence[DraftedText]) -> None:
        """Let the drafter make passes while they gain more tokens than the engine would write in their time."""
        drafting = [text for text in texts if text.drafter_id is not None]
        for _ in range(self._most if drafting else 0):
            if self.link.status.state != "up":
                break  # it has failed for good: there is no process to restart
            best_paths = [text.best_path(self._most) for text in drafting]
            if not self._policy.is_worth_a_pass(best_paths, len(texts), self._most, self.link.layers_per_pass):
                break
            began = self._clock()
            self.link.draft(1)
            self._send(self._listen())
            self._policy.observe_pass(len(drafting), self._clock() - began)

    def _commit(self, text: DraftedText, new_ids: Sequence[int]) -> list[TargetMessage]:
        old_id = text.drafter_id
        messages = text.commit(new_ids, self._drafting)
        if text.drafter_id != old_id:  # it outgrew its memory and was opened again
            if old_id is not None:
                del self._by_drafter_id[old_id]
            if text.drafter_id is not None:
                self._by_drafter_id[text.drafter_id] = text
        return messages

    def _choose(
        self, texts: Sequence[DraftedText | None], new_ids: Sequence[Sequence[int]], deadline: float
    ) -> list[list[int]]:
        """Return the chain of each row; after the deadline, from the drafter's candidates only.

        Each step starts with another row, whose writers are always asked, so that every row gets a turn.
        """
        chains: list[list[int]] = [[] for _ in texts]
        first = self.figures.steps % max(1, len(texts))
        for row_idx in (*range(first, len(texts)), *range(first)):
            text = texts[row_idx]
            if text is not None and new_ids[row_idx]:
                has_time = row_idx == first or self._clock() < deadline
                chains[row_idx] = self._chain(text, len(texts), has_time)
        return chains

    def _chain(self, text: DraftedText, num_requests: int, has_time: bool) -> list[int]:
        """Return the best chain of a text, and store it there."""
        most = min(self._most, self._max_model_len - len(text) - 1)
        offer = text.offer(most, has_time=has_time) if most > 0 else NO_NODES
        text.chain = chain = self._policy.choose(offer, num_requests, most)
        text.writer_budget = next_budget(len(chain), text.writer_budget)
        if not chain:
            self.figures.empty_rows += 1
        self.figures.proposed_by_writer.update(self._labels(chain.writers))
        return list(chain.tokens)

    def _count(self, begun: Sequence[DraftedText], resumed: Sequence[DraftedText], seconds: float) -> None:
        figures = self.figures
        figures.steps += 1
        figures.propose_s += seconds
        figures.slowest_propose_s = max(figures.slowest_propose_s, seconds)
        figures.requests_begun += len(begun)
        figures.requests_resumed += len(resumed)
