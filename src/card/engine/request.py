"""A request as the caller made it, and its result in each round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from card.config import DraftSettings, ResolvedParams
from card.drafting.messages import TargetMessage
from card.engine.failures import Failures
from card.engine.metrics import RequestStats
from card.engine.offers import DRAFTER, writer_label
from card.errors import CardError, SettingsError
from card.models.images import PlacedImages
from card.tree.logits import FloatArray
from card.tree.masks import GrammarState
from card.tree.nodes import ROOT, Nodes
from card.tree.sampling import TokenLogprobs
from card.tree.verify import Verdict

CORRECTED = ""  # origin of a token that the target chose itself where candidates were wrong or ran out
PLAIN = "plain"  # origin of a token of a round without candidates

Alternative = tuple[int, float, str]
"""(token, path log-probability, writer) of a candidate."""


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """Details of a run of tokens, one entry for each; empty where the request did not ask for them."""

    origins: tuple[str, ...] = ()  # the writers that proposed it, joined by "+", or CORRECTED or PLAIN
    logprobs: tuple[TokenLogprobs, ...] = ()
    alternatives: tuple[tuple[Alternative, ...], ...] = ()  # candidates that were verified in its place, best first

    @classmethod
    def joined(cls, parts: Iterable[TokenDetails]) -> TokenDetails:
        """Return the details of runs that follow each other."""
        listed = list(parts)
        if len(listed) == 1:
            return listed[0]
        return cls(
            tuple([origin for part in listed for origin in part.origins]),
            tuple([logprob for part in listed for logprob in part.logprobs]),
            tuple([beside for part in listed for beside in part.alternatives]),
        )

    def leading(self, count: int) -> TokenDetails:
        """Return those of the first ``count`` tokens."""
        return TokenDetails(self.origins[:count], self.logprobs[:count], self.alternatives[:count])


def origins_of(offer: Nodes, verdict: Verdict, names: Sequence[str]) -> tuple[str, ...]:
    """Return the origin of each token of a verdict; ``names`` as in `Offers`."""
    last = CORRECTED if offer else PLAIN
    return (*(_writer(offer, idx, names) for idx in verdict.accepted), last)


def alternatives_to(offer: Nodes, verdict: Verdict, names: Sequence[str]) -> tuple[tuple[Alternative, ...], ...]:
    """Return the rejected candidates beside each token of a verdict."""
    beside: dict[int, list[int]] = {}
    for idx, parent in enumerate(offer.parents):
        beside.setdefault(parent, []).append(idx)
    places = zip((ROOT, *verdict.accepted), (*verdict.accepted, None), strict=True)
    alternatives = []
    for parent, chosen in places:
        others = [idx for idx in beside.get(parent, ()) if idx != chosen]
        others.sort(key=lambda idx: -offer.path_logprobs[idx])
        alternatives.append(
            tuple([(offer.tokens[i], offer.path_logprobs[i], _writer(offer, i, names)) for i in others])
        )
    return tuple(alternatives)


def _writer(offer: Nodes, idx: int, names: Sequence[str]) -> str:
    return writer_label(offer.writers[idx], names) if offer.writers else DRAFTER


FinishReason = Literal["stop", "length", "abort", "error"]
LogitsProcessor = Callable[[npt.NDArray[np.int64], FloatArray], Any]


class StopCheck(Protocol):
    """Reads the text as it grows and decides about stop strings, the only check on text that the target makes."""

    def feed(self, token_id: int) -> bool:
        """Take the next token; return True if a stop string is complete now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as the target needs it, unchanged while it runs."""

    request_id: int
    prompt_ids: tuple[int, ...]
    params: ResolvedParams
    draft: DraftSettings
    end_ids: frozenset[int]  # tokens that end the text, several allowed
    is_bounded: bool = True  # max_tokens was set; if not, it is the rest of the context
    stop_check: StopCheck | None = None
    uses_drafter: bool = True  # False if the parameters turn speculation off
    logits_processor: LogitsProcessor | None = None  # (ids [1, S] int64 before it, logits [1, V]) -> [1, V]
    grammar: GrammarState | None = None  # grammar of the parameters, in its initial state
    images: PlacedImages | None = None  # of the prompt
    prediction_ids: Sequence[int] = ()  # a text that the answer may repeat; it changes how fast, not what is written

    @property
    def hidden(self) -> PlacedImages | None:
        """The images whose positions drafters do not see; None if drafters see the whole prompt."""
        return self.images if self.draft.hide_images else None

    @property
    def drafted_prompt_ids(self) -> Sequence[int]:
        """The prompt as drafters see it."""
        return self.prompt_ids if self.hidden is None else self.hidden.left_out_of(self.prompt_ids)

    def pool_key(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return a beginning of the text as a key of KV memory, in which different images differ."""
        return token_ids if self.images is None else self.images.keyed(token_ids).tolist()

    def new_stats(self) -> RequestStats:
        """Return the counters of a request before any work."""
        num_hidden = self.hidden.num_tokens if self.hidden is not None else 0
        return RequestStats(
            num_prompt_tokens=len(self.prompt_ids), hidden_prompt_tokens=num_hidden, seed=self.params.seed
        )

    def __post_init__(self) -> None:
        if not self.params.speculates:
            object.__setattr__(self, "uses_drafter", False)
        if (self.grammar is None) != (self.params.grammar is None):
            raise SettingsError("a request's grammar and that of its parameters go together; give both or neither")


@dataclass(frozen=True, slots=True)
class Update:
    """Result of one request in one round, from the pass to the reader of the text."""

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stats: RequestStats = field(compare=False)  # live counters, which go on changing until the request is finished
    error: CardError | None = None  # with finish_reason "error"
    details: TokenDetails = field(default_factory=TokenDetails, compare=False)  # of these tokens


@dataclass(frozen=True, slots=True)
class Verified:
    """The outcome of one verification."""

    request_id: int
    offer: Nodes
    accepted: tuple[int, ...]  # indices into the offer, from the root down
    is_greedy: bool  # the request always takes the likeliest token
    num_agreed: int = 0  # candidates of the best path, verified or not, that are the target's tokens
    claims: tuple[float, ...] = ()  # the draft model's probability of each that was compared, one that differs included
    grammar_bit: int = 0  # of the request's grammar in `Nodes.writers`; 0: it is no writer

    @property
    def num_compared(self) -> int:
        """Candidates of the best path that were compared with the target's tokens."""
        return len(self.claims)


@dataclass(slots=True)
class StepResult:
    """Results of all requests in one round, and the messages for the drafter.

    A request that ran only a part of its prompt has no result yet.
    """

    updates: list[Update] = field(default_factory=list)
    verified: list[Verified] = field(default_factory=list)
    messages: list[TargetMessage] = field(default_factory=list)
    failures: Failures = field(default_factory=Failures)  # of single requests: the pass itself succeeded
    num_tokens: int = 0  # rows of the pass
    busy_s: float = 0.0  # seconds of the pass and of choosing the tokens
    num_experts: int = 0  # distinct experts that the pass read, summed over the layers; 0: none were counted

    def add(self, other: StepResult) -> None:
        """Add the results of another part of the same round."""
        self.updates += other.updates
        self.verified += other.verified
        self.messages += other.messages
        self.failures.take_in(other.failures)
        self.num_tokens += other.num_tokens
        self.busy_s += other.busy_s
        self.num_experts += other.num_experts
