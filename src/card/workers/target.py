"""The target side: a state machine that queries the cache, verifies in one pass and corrects.

No thread, socket, sleep or clock in here: `receive` takes a drafter's message, `step` runs one round (one target pass)
for the requests given and returns the new tokens and what is to be sent to the drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from card.config import DraftSettings, SamplingParams, ShapingRule, VerifyShape
from card.errors import SettingsError, TargetError
from card.models.pool import SequencePool
from card.models.protocol import NO_PARENT, Extension, LanguageModel
from card.tree.messages import Close, DrafterMessage, Layer, Resync, TargetMessage
from card.tree.nodes import Candidates
from card.tree.sampling import Sampler, SamplingRule, TokenLogprobs, token_logprobs
from card.tree.shaping import GrammarState, Shaping
from card.tree.verify import ROOT, Verdict, match
from card.workers.details import TokenDetails, alternatives_to, origins_of
from card.workers.metrics import RequestStats
from card.workers.offers import Offers, kept
from card.workers.replica import Replica
from card.writers.local.protocol import Observation, WriterSequence

FinishReason = Literal["stop", "length", "abort", "error"]
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
Foresight = Callable[[int, int, int], float]
"""(index of the extension in the pass, index of the logits that gave the new token, that token) -> branch_below."""


class StopCheck(Protocol):
    """Looks at the text as it grows; the one text-level question the target asks."""

    def feed(self, token_id: int) -> bool:
        """Take the next token; return True if a stop string is complete now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequest:
    """One request as the target needs it."""

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams  # with the seed fixed
    draft: DraftSettings
    end_ids: frozenset[int]  # tokens that end the text, several allowed
    stop_check: StopCheck | None = None
    uses_drafter: bool = True  # never, if the parameters want no speculation
    logits_processor: LogitsProcessor | None = None  # (ids [1, S] int64 before it, logits [1, V]) -> [1, V]
    grammar: GrammarState | None = None  # that of the parameters, at its beginning

    def __post_init__(self) -> None:
        if not self.params.speculates:
            object.__setattr__(self, "uses_drafter", False)
        if (self.grammar is None) != (self.params.grammar is None):
            raise SettingsError("a request's grammar and that of its parameters go together; give both or neither")


OpenWriter = Callable[[TargetRequest], WriterSequence]
"""Begins a writer's part of a request."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one request does in the next pass: a part of its prompt, or a verification."""

    request_id: int
    num_prompt_tokens: int = 0  # most tokens of the prompt to run; 0 once all of them were
    offer: Candidates = field(default_factory=Candidates.none)


@dataclass(frozen=True, slots=True)
class Progress:
    """What one round gave a request."""

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    details: TokenDetails = field(default_factory=TokenDetails, compare=False)  # of these tokens


@dataclass(frozen=True, slots=True)
class Verified:
    """The outcome of one verification."""

    request_id: int
    offer: Candidates
    accepted: tuple[int, ...]  # indices into the offer, from the root down
    is_greedy: bool  # the request takes the likeliest token
    num_compared: int  # candidates of the best path, verified or not, that the target's tokens can be compared with
    num_agreed: int  # of these, how many were the target's tokens


@dataclass(slots=True)
class StepResult:
    """What one round gave all its requests, and the messages for the drafter.

    A request that ran only a part of its prompt made no progress yet.
    """

    progress: list[Progress] = field(default_factory=list)
    verified: list[Verified] = field(default_factory=list)
    messages: list[TargetMessage] = field(default_factory=list)
    num_tokens: int = 0  # rows of the pass
    busy_s: float = 0.0  # seconds of the pass and of choosing the tokens

    def add(self, other: StepResult) -> None:
        """Take in what another part of the same round gave."""
        self.progress += other.progress
        self.verified += other.verified
        self.messages += other.messages
        self.num_tokens += other.num_tokens
        self.busy_s += other.busy_s


class _Generation:
    """State of one running request: the text, its KV rows, and what is proposed to go on with."""

    def __init__(
        self, request: TargetRequest, slot: int, num_reused: int, max_len: int, vocab_size: int, offers: Offers
    ) -> None:
        self.request = request
        self.slot = slot
        self.offers = offers
        self.token_ids = list(request.prompt_ids)
        self.num_rows = num_reused  # KV rows of committed tokens; the last one never has a row between rounds
        self.sampler = Sampler(SamplingRule.of(request.params), vocab_size)
        rule = ShapingRule.of(request.params, num_prompt_tokens=len(request.prompt_ids), end_ids=request.end_ids)
        grammar = request.grammar.fork() if request.grammar is not None else None
        self.shaping = None if rule is None else Shaping(rule, request.prompt_ids, vocab_size, grammar)
        self.stats = RequestStats(
            num_prompt_tokens=len(request.prompt_ids),
            seed=request.params.seed or 0,
            reused_prompt_tokens=num_reused,
        )
        self.replica = Replica(
            request.request_id,
            self.token_ids,
            request.draft,
            request.params,
            max_len=max_len,
            vocab_size=vocab_size,
            stats=self.stats,
            shaping=rule,
        )

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def is_prefilling(self) -> bool:
        return self.num_new_tokens == 0


class TargetWorker:
    """Runs the target model for its requests; owns the truth about each text."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        clock: Callable[[], float],
        max_kv_bytes: int | None = None,
        writers: Mapping[str, OpenWriter] | None = None,
        top_k: int = 0,
        foresee: Foresight | None = None,
    ) -> None:
        """Take over ``model``.

        Args:
            clock: seconds; only to report how long passes took.
            max_kv_bytes: most memory of all sequences, those kept for reuse included; None for no limit.
            writers: by name, in the order in which they are asked for candidates; called when a request begins.
            top_k: likeliest tokens that the writers are shown at every token that is run.
            foresee: says after each pass where the drafter's trunk is to branch; None leaves it at the settings.
        """
        self.model = model
        self._foresee = foresee
        self._writers = dict(writers or {})
        self._top_k = top_k
        self.pool = SequencePool(model, max_kv_bytes if max_kv_bytes is not None else 1 << 62)
        self._clock = clock
        self._running: dict[int, _Generation] = {}
        self._beam = (0, 0)  # width and lead; zeros: as each request's settings say

    @property
    def has_writers(self) -> bool:
        """Whether others than the first drafter propose candidates."""
        return bool(self._writers)

    def rows_needed(self, request: TargetRequest) -> int:
        """Return the KV rows that the request may come to need: its longest text and the largest tree."""
        has_writers = bool(self._writers) and request.params.speculates
        tree = request.draft.budget if request.uses_drafter or has_writers else 0
        return min(self._max_len(request) + tree, self.model.max_rows)

    def add(self, request: TargetRequest) -> list[TargetMessage]:
        """Take a request; steps run its prompt first. Returns: what the drafter must hear.

        Raises: CapacityError if `pool` has no room for it now.
        """
        opened = self.pool.open(request.prompt_ids, self.rows_needed(request))
        max_len, vocab_size = self._max_len(request), self.model.vocab_size
        writers = self._writers if request.params.speculates else {}
        openers = {name: partial(begin, request) for name, begin in writers.items()}
        offers = Offers(openers, vocab_size=vocab_size)
        generation = _Generation(request, opened.slot, opened.num_reused, max_len, vocab_size, offers)
        generation.replica.tune(*self._beam)
        self._running[request.request_id] = generation
        return [generation.replica.open_message()] if request.uses_drafter else []

    def remove(self, request_id: int) -> list[TargetMessage]:
        """Drop a request, finished or not; its rows stay for texts that begin alike. Unknown ids are ignored."""
        generation = self._running.pop(request_id, None)
        if generation is None:
            return []
        self.model.keep(generation.slot, generation.num_rows)
        self.pool.close(generation.slot, generation.token_ids[: generation.num_rows])
        generation.offers.close()
        return [Close(request_id)] if generation.request.uses_drafter else []

    def stats(self, request_id: int) -> RequestStats:
        """Return the live counters of a running request."""
        return self._running[request_id].stats

    def prompt_tokens_left(self, request_id: int) -> int:
        """Return how many tokens of the prompt are still to be run."""
        generation = self._running[request_id]
        return len(generation.token_ids) - generation.num_rows if generation.is_prefilling else 0

    def num_context_rows(self, request_id: int) -> int:
        """Return how many KV rows the request's text holds."""
        return self._running[request_id].num_rows

    def tune(self, beam_width: int, lead: int) -> None:
        """Let the drafter make so wide and so many layers for all requests; running ones hear it with a correction."""
        self._beam = (beam_width, lead)
        for generation in self._running.values():
            generation.replica.tune(*self._beam)

    def reopen(self) -> list[TargetMessage]:
        """Tell a new incarnation of the drafter about every running request."""
        messages: list[TargetMessage] = []
        for generation in self._running.values():
            if generation.request.uses_drafter:
                generation.replica.forget_drafter()
                messages.append(generation.replica.open_message())
        return messages

    def catch_up(self) -> list[TargetMessage]:
        """Return a correction for every running request: what a drafter missed that was not spoken to for a while."""
        drafted = [g for g in self._running.values() if g.request.uses_drafter and not g.is_prefilling]
        return [generation.replica.correction() for generation in drafted]

    def receive(self, message: DrafterMessage) -> list[TargetMessage]:
        """Take a drafter's message and return the replies.

        Raises: ProtocolError if it is malformed; the request's candidates are as before then.
        """
        generation = self._running.get(message.request_id) if isinstance(message, Layer | Resync) else None
        if generation is None or not generation.request.uses_drafter:
            return []
        assert isinstance(message, Layer | Resync)
        return generation.replica.receive(message)

    def is_short_of_candidates(self, request_id: int) -> bool:
        """True if the best path in the replica is shorter than the request wants before it verifies."""
        generation = self._running[request_id]
        draft, deepest = generation.request.draft, self._deepest(generation)
        return generation.request.uses_drafter and generation.replica.is_short(draft, deepest)

    def best_path(self, request_id: int) -> tuple[int, float]:
        """Return the depth and the path score of the end of the best path in the replica; (0, 0.0) if it is empty."""
        tree = self._running[request_id].replica.tree
        if not tree.num_nodes:
            return 0, 0.0
        path = tree.query(self.model.max_model_len, "chain", self.model.max_model_len)
        return (path.depths[-1], path.path_logprobs[-1]) if path else (0, 0.0)

    def num_candidates(self, request_id: int) -> int:
        """Return how many candidates of the drafter's the replica holds."""
        return self._running[request_id].replica.tree.num_nodes

    def query(self, request_id: int, budget: int, shape: VerifyShape, *, asks_drafter: bool = True) -> Candidates:
        """Return candidates to verify, no deeper than the request may still grow, up to ``budget`` of each writer.

        Args:
            asks_drafter: False leaves the drafter's candidates out.
        """
        generation = self._running[request_id]
        request = generation.request
        max_depth = self._deepest(generation)
        budget = min(budget, self.rows_left(request_id))
        if generation.is_prefilling or max_depth < 1 or budget < 1:
            return Candidates.none()
        uses_drafter = asks_drafter and request.uses_drafter
        drafted = generation.replica.tree.query(budget, shape, max_depth) if uses_drafter else Candidates.none()
        offer = generation.offers.merge(drafted, budget, max_depth)
        return offer if generation.shaping is None else _permitted(generation.shaping, offer)

    def _deepest(self, generation: _Generation) -> int:
        """Return how many layers of candidates can become text: the last token of all is the target's own."""
        tokens_left = generation.request.params.max_tokens - generation.num_new_tokens
        return min(tokens_left - 1, self.model.max_model_len - len(generation.token_ids))

    def rows_left(self, request_id: int) -> int:
        """Return how many candidates of the request one pass has KV rows for."""
        generation = self._running[request_id]
        return self.model.capacity(generation.slot) - len(generation.token_ids)

    def step(self, work: Sequence[Work]) -> StepResult:
        """Run one round for these requests in one target pass. Nothing has changed if it raises."""
        generations = [self._running[one.request_id] for one in work]
        extensions = [_extension(generation, one) for generation, one in zip(generations, work, strict=True)]
        started = self._clock()
        all_logits = self.model.forward(extensions)
        try:
            choices = [
                _choose(generation, one.offer, logits)
                for generation, one, logits in zip(generations, work, all_logits, strict=True)
            ]
            top_ids = [logits.topk(self._top_k).indices.tolist() if self._top_k else [] for logits in all_logits]
            verdicts = [
                match(one.offer.tokens, one.offer.parents, chosen) if chosen else None
                for one, chosen in zip(work, choices, strict=True)
            ]
            branches = [self._foreseen(idx, *pair) for idx, pair in enumerate(zip(generations, verdicts, strict=True))]
            outcomes = zip(generations, work, verdicts, all_logits, strict=True)
            details = [_details(g.request.params, one.offer, verdict, logits) for g, one, verdict, logits in outcomes]
        except BaseException:
            for generation in generations:
                self.model.keep(generation.slot, generation.num_rows)
            raise
        result = StepResult(num_tokens=sum(len(e.token_ids) for e in extensions), busy_s=self._clock() - started)
        rows = zip(generations, work, extensions, choices, top_ids, verdicts, branches, details, strict=True)
        for generation, one, extension, chosen, top, verdict, branch_below, told in rows:
            was_prefilling = generation.is_prefilling
            if verdict is not None:
                if not was_prefilling:
                    generation.stats.target_busy_s += result.busy_s
                if branch_below is not None:
                    generation.replica.branch_below(branch_below)
                self._tell_writers(generation, one.offer, chosen, top, verdict)
                self._commit(generation, one.offer, verdict, told, result)
            else:
                generation.num_rows += len(extension.token_ids)
            if was_prefilling:
                self.pool.note(generation.slot, generation.token_ids[: generation.num_rows])
        return result

    def _foreseen(self, extension_idx: int, generation: _Generation, verdict: Verdict | None) -> float | None:
        """Return where the drafter's trunk is to branch after this pass; None: where it was told last."""
        if self._foresee is None or verdict is None or not generation.request.uses_drafter:
            return None
        logits_idx = 1 + verdict.accepted[-1] if verdict.accepted else 0
        return self._foresee(extension_idx, logits_idx, verdict.next_id)

    def _max_len(self, request: TargetRequest) -> int:
        return min(len(request.prompt_ids) + request.params.max_tokens, self.model.max_model_len)

    @staticmethod
    def _tell_writers(
        generation: _Generation, offer: Candidates, choices: list[int], top_ids: list[list[int]], verdict: Verdict
    ) -> None:
        new_ids = (*(offer.tokens[i] for i in verdict.accepted), verdict.next_id)
        seen = (new_ids, offer.tokens, offer.parents, tuple(choices), verdict.accepted, top_ids)
        generation.offers.observe(Observation(*seen))

    def _commit(
        self, generation: _Generation, offer: Candidates, verdict: Verdict, details: TokenDetails, result: StepResult
    ) -> None:
        """Accept, cut at the end of the text, roll the KV back, and tell the drafter."""
        root_rows = len(generation.token_ids)
        was_prefilling = generation.is_prefilling
        new_ids = [offer.tokens[i] for i in verdict.accepted] + [verdict.next_id]
        kept_ids, reason = self._cut(generation, new_ids)
        kept_rows = [root_rows + i for i in verdict.accepted[: len(kept_ids)]]
        self.model.keep(generation.slot, root_rows, kept_rows)
        generation.num_rows = root_rows + len(kept_rows)
        generation.token_ids += kept_ids
        if generation.shaping is not None:
            generation.shaping.commit(kept_ids)
        stats, request_id = generation.stats, generation.request.request_id
        stats.num_new_tokens = generation.num_new_tokens
        if not was_prefilling:
            stats.count_verification(offer, verdict.accepted[: len(kept_rows)])
            is_greedy = generation.sampler.rule.is_greedy
            compared, agreed = generation.replica.compare(new_ids)
            result.verified.append(Verified(request_id, offer, tuple(verdict.accepted), is_greedy, compared, agreed))
        result.progress.append(Progress(request_id, tuple(kept_ids), reason, details.leading(len(kept_ids))))
        if reason is None and generation.request.uses_drafter:
            was_hit = generation.replica.advance(new_ids)
            stats.hits += was_hit and not was_prefilling
            result.messages.append(generation.replica.correction())

    def _cut(self, generation: _Generation, new_ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """Return the new tokens up to the one that ends the text, and why it ends, if it does."""
        request = generation.request
        for i, token_id in enumerate(new_ids):
            completes_stop = request.stop_check is not None and request.stop_check.feed(
                token_id
            )  # end tokens count too
            if token_id in request.end_ids or completes_stop:
                return new_ids[: i + 1], "stop"
            num_new = generation.num_new_tokens + i + 1
            if num_new >= request.params.max_tokens or len(request.prompt_ids) + num_new >= self.model.max_model_len:
                return new_ids[: i + 1], "length"
        return new_ids, None


def _extension(generation: _Generation, work: Work) -> Extension:
    """Return the committed tokens to run that have no KV row yet, and below the last of them the candidates."""
    first, root_row = generation.num_rows, len(generation.token_ids) - 1
    chain = generation.token_ids[first:]
    if generation.is_prefilling:
        chain = chain[: work.num_prompt_tokens]
    parents = [first + i - 1 if first + i else NO_PARENT for i in range(len(chain))]
    is_complete = first + len(chain) > root_row
    offer = work.offer
    parents += [root_row if parent == ROOT else root_row + 1 + parent for parent in offer.parents]
    first_logits_idx = len(chain) - 1 if is_complete else len(chain)
    return Extension(generation.slot, [*chain, *offer.tokens], parents, first_logits_idx)


def _choose(generation: _Generation, offer: Candidates, logits: Tensor) -> list[int]:
    """Return the target's token after the root and after each candidate; none if the prompt goes on.

    Args:
        logits: [1 + candidates, V], or [0, V].
    """
    if not len(logits):
        return []
    after_root = len(generation.token_ids)
    positions = [after_root, *(after_root + depth for depth in offer.depths)]  # of the token that each row predicts
    processor, shaping = generation.request.logits_processor, generation.shaping
    paths = [(), *_paths(offer)] if processor is not None or shaping is not None else []
    if shaping is not None:
        logits = shaping.apply(logits, paths)
    if processor is not None:
        texts = [torch.tensor([[*generation.token_ids, *path]], device=logits.device) for path in paths]
        try:
            processed = [processor(ids, row.clone()) for ids, row in zip(texts, torch.split(logits, 1), strict=True)]
        except Exception as error:  # it is the caller's code
            raise TargetError(f"the logits processor failed with {type(error).__name__}: {error}") from error
        logits = torch.cat(processed)
    return generation.sampler.choose(logits, positions)


def _paths(offer: Candidates) -> list[tuple[int, ...]]:
    """Return the tokens of each candidate's path, its own included."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(offer.tokens, offer.parents, strict=True):
        paths.append((token,) if parent == ROOT else (*paths[parent], token))
    return paths


def _permitted(shaping: Shaping, offer: Candidates) -> Candidates:
    """Return the candidates that the grammar permits, if there is one: no other can be accepted."""
    permitted = shaping.permitted(_paths(offer)) if offer else None
    return offer if permitted is None else kept(offer, permitted)


def _details(params: SamplingParams, offer: Candidates, verdict: Verdict | None, logits: Tensor) -> TokenDetails:
    """Return what is told of the tokens of a verdict. ``logits`` are the model's own, [1 + candidates, V]."""
    if verdict is None:
        return TokenDetails()
    logprobs: tuple[TokenLogprobs, ...] = ()
    if params.logprobs is not None:
        rows = [0, *(1 + idx for idx in verdict.accepted)]
        new_ids = [*(offer.tokens[idx] for idx in verdict.accepted), verdict.next_id]
        logprobs = token_logprobs(logits[rows], new_ids, params.logprobs)
    alternatives = alternatives_to(offer, verdict) if params.shows_tree else ()
    return TokenDetails(origins_of(offer, verdict), logprobs, alternatives)
