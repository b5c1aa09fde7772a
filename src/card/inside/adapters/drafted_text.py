"""A text of another engine, with its writers and the replica of its candidate cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from msgspec.structs import replace

from card.config import DraftSettings, SamplingParams
from card.drafting.local.protocol import LocalWriter, Observation
from card.drafting.messages import Close, Layer, Open, Resync, TargetMessage
from card.engine.metrics import RequestStats
from card.engine.offers import DRAFTER_BIT, Offers
from card.engine.replica import Replica
from card.engine.request import Verified
from card.inside.adapters.tracking import FollowedText, Tokens
from card.tree.nodes import NO_NODES, ROOT, Nodes

# Tokens by which a text may grow before the drafter gets more memory and restarts its tree. Evidence: with 64, answers
# of 128 tokens take 4 % more steps (benchmarks/LOG.md).
_FIRST_ROOM = 512
# Likeliest tokens by the draft model's own probabilities: the engine does not report temperatures and seeds.
_PARAMS = SamplingParams(temperature=0.0, seed=0).resolved()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingFacts:
    """Facts that texts need to open their drafting."""

    draft: DraftSettings
    max_model_len: int  # most tokens of a text
    vocab_size: int  # of the target
    _ids: Iterator[int] = field(default_factory=count)

    def next_id(self) -> int:
        """Return a new id of a text for the drafter: ids of closed texts are not reused."""
        return next(self._ids)

    def room_for(self, length: int) -> int:
        """Return the length for which a text of ``length`` tokens gets memory: a power of two, or the most."""
        return min(self.max_model_len, 1 << (length + _FIRST_ROOM - 1).bit_length())


class DraftedText(FollowedText):
    """A text that is decoded with drafts.

    It is open in the drafter while it is in a row of the engine, and in the writers until it is forgotten.
    """

    chain: Nodes
    """Candidates handed over for the next step."""
    writer_budget: int
    """Most candidates of each writer without a model."""
    drafter_id: int | None
    """Its id for the drafter; None while it is not open there."""

    def __init__(
        self, token_ids: Tokens, writers: Mapping[str, LocalWriter], *, vocab_size: int, writer_budget: int
    ) -> None:
        """Begin with a text of 1 token or more; tokens may lie outside of the target's vocabulary."""
        super().__init__(token_ids)
        self.writer_budget = writer_budget
        self.has_foreign_tokens = bool(token_ids.min() < 0 or token_ids.max() >= vocab_size)
        self.chain = NO_NODES
        self.drafter_id = None
        self._replica: Replica | None = None
        self._is_declined = False  # by the drafter; not tried again
        self._room = 0
        self._stats = RequestStats(num_prompt_tokens=len(token_ids))
        prompt_ids = tuple(self.token_ids)
        heard = (
            {} if self.has_foreign_tokens else {name: partial(one.open, prompt_ids) for name, one in writers.items()}
        )
        self._offers = Offers(heard, vocab_size=vocab_size)

    def open(self, drafting: DraftingFacts) -> list[TargetMessage]:
        """Open the present text in the drafter. Returns: messages to send, which also close a former opening."""
        messages = self.close_drafter()
        self._room = drafting.room_for(len(self))
        if self.has_foreign_tokens or self._is_declined or len(self) >= drafting.max_model_len:
            return messages
        self.drafter_id = drafting.next_id()
        self._replica = Replica(
            self.drafter_id,
            self.token_ids,
            drafting.draft,
            _PARAMS,
            max_len=self._room,
            vocab_size=drafting.vocab_size,
            stats=self._stats,
        )
        return [*messages, self._replica.open_message()]

    def reopen(self) -> list[Open]:
        """Return the messages that open the text in a new drafter."""
        if self._replica is None:
            return []
        self._replica.forget_drafter()
        return [self._replica.open_message()]

    def close_drafter(self) -> list[TargetMessage]:
        """Close the text in the drafter, if it is open. Returns: messages to send."""
        if self.drafter_id is None:
            return []
        closing = Close(self.drafter_id)
        self.drafter_id = self._replica = None
        return [closing]

    def decline(self) -> list[TargetMessage]:
        """Continue without the drafter, which refused this text. Returns: messages to send."""
        self._is_declined = True
        return self.close_drafter()

    def close(self) -> None:
        """Close the text in the writers."""
        self._offers.close()

    def receive(self, message: Layer | Resync) -> list[TargetMessage]:
        """Process a message of the drafter; return the replies. Raises: ProtocolError if it is malformed."""
        return [] if self._replica is None else self._replica.receive(message)

    def judge(self, new_ids: Sequence[int]) -> Verified:
        """Return which candidates were accepted, from the tokens that a step committed; before `commit`."""
        known, num_right = judged(self.chain, new_ids)
        compared = () if self._replica is None else self._replica.compare(new_ids)
        return Verified(id(self), known, tuple(range(num_right)), True, *compared)

    def commit(self, new_ids: Sequence[int], drafting: DraftingFacts | None) -> list[TargetMessage]:
        """Append the tokens that a step committed. Returns: messages for the drafter."""
        self.append(new_ids)
        stats = self._stats
        stats.target_passes += 1
        num_accepted = len(new_ids) - 1
        self._offers.observe(
            Observation(
                new_ids=tuple(new_ids),
                tokens=tuple(new_ids[:-1]),  # after a rejection, later choices are unknown
                parents=tuple(range(ROOT, num_accepted - 1)),
                choices=tuple(new_ids),
                accepted=tuple(range(num_accepted)),
            )
        )
        if self._replica is None or drafting is None:
            return []
        if len(self) >= self._room:
            return self.open(drafting)
        self._replica.advance()
        return [self._replica.correction()]

    def drafted(self, most: int) -> Nodes:
        """Return the draft model's best path of up to ``most`` tokens, without writers."""
        return NO_NODES if self._replica is None else self._replica.tree.query(most, "chain", most)

    def best_path(self, most: int) -> tuple[int, float]:
        """Return depth and path score of the end of that path; (0, 0.0) if it is empty."""
        path = self.drafted(most)
        return (path.depths[-1], path.path_logprobs[-1]) if path else (0, 0.0)

    def offer(self, most: int, *, has_time: bool = True) -> Nodes:
        """Return all writers' candidates as one tree of up to ``most`` layers; each candidate has its writers.

        Args:
            has_time: False leaves out the writers without a model.
        """
        drafted = self.drafted(most)
        offer = self._offers.merge(drafted, min(most, self.writer_budget), most) if has_time else drafted
        return offer if offer.writers else replace(offer, writers=(DRAFTER_BIT,) * len(offer))


def judged(chain: Nodes, new_ids: Sequence[int]) -> tuple[Nodes, int]:
    """Return the candidates that the committed tokens show to be right or wrong, and the number of right ones.

    An engine may verify only a part: the rest has no outcome, unless the text itself shows it.
    """
    pairs = enumerate(zip(chain.tokens, new_ids, strict=False))
    num_right = next((i for i, (token, new_id) in pairs if token != new_id), min(len(chain), len(new_ids)))
    num_known = num_right if num_right == len(new_ids) else len(chain)
    return chain.leading(num_known), num_right
