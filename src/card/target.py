"""The target side: a state machine that queries the cache, verifies in one pass and corrects.

No thread, socket, sleep or clock in here: `receive` takes a drafter's message, `step` runs one round (one target pass)
for the requests given and returns the new tokens and what is to be sent to the drafter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from card.candidates import CandidateCache, Candidates, NewNodes
from card.config import DraftSettings, SamplingParams, VerifyShape
from card.errors import ProtocolError, TargetError
from card.messages import Close, Correction, DrafterMessage, DraftSpec, Layer, Open, Resync, TargetMessage
from card.metrics import RequestStats
from card.models.pool import SequencePool
from card.models.protocol import NO_PARENT, Extension, LanguageModel
from card.sampling import Sampler, SamplingRule
from card.verify import ROOT, match

FinishReason = Literal["stop", "length", "abort", "error"]
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


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
    uses_drafter: bool = True
    logits_processor: LogitsProcessor | None = None  # (ids [1, S] int64 before it, logits [1, V]) -> [1, V]


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


def draft_spec(draft: DraftSettings, params: SamplingParams, max_len: int) -> DraftSpec:
    """Return what the drafter is told about a request whose seed is fixed.

    Args:
        max_len: most tokens that its text can get.
    """
    return DraftSpec(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed or 0,
        coupled_noise=draft.coupled_noise,
        beam_width=draft.beam_width,
        branch=draft.branch,
        lead=draft.lead,
        max_nodes=draft.max_nodes,
        min_path_logprob=draft.min_path_logprob,
        max_len=max_len,
    )


class _Generation:
    """State of one running request: the text, its KV rows, and the target's replica of the candidate tree."""

    def __init__(self, request: TargetRequest, slot: int, num_reused: int, max_len: int, vocab_size: int) -> None:
        self.request = request
        self.slot = slot
        self.max_len = max_len
        self.token_ids = list(request.prompt_ids)
        self.num_rows = num_reused  # KV rows of committed tokens; the last one never has a row between rounds
        self.sampler = Sampler(SamplingRule.of(request.params), vocab_size)
        self.replica = self.empty_replica()
        self.stats = RequestStats(
            num_prompt_tokens=len(request.prompt_ids),
            seed=request.params.seed or 0,
            reused_prompt_tokens=num_reused,
        )
        self.round_idx = 0
        self.beam_width, self.lead = 0, 0  # 0: as the request's settings say
        self.drafter_len = 0  # committed tokens that the drafter is known to hold
        self.next_seq = 0
        self.lost_a_layer = False
        self.epochs_seen = 0
        self.passes_before = 0  # drafter passes of earlier incarnations
        self.busy_before_s = 0.0

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def is_prefilling(self) -> bool:
        return self.num_new_tokens == 0

    def empty_replica(self) -> CandidateCache:
        draft = self.request.draft
        return CandidateCache(max_nodes=draft.max_nodes, lead=draft.lead + draft.budget)

    def open_message(self) -> Open:
        draft = self.request.draft
        draft = draft.replace(beam_width=self.beam_width or draft.beam_width, lead=self.lead or draft.lead)
        spec = draft_spec(draft, self.request.params, self.max_len)
        return Open(self.request.request_id, tuple(self.token_ids), spec)

    def correction(self) -> Correction:
        start = min(self.drafter_len, len(self.token_ids))
        return Correction(
            request_id=self.request.request_id,
            round_idx=self.round_idx,
            start=start,
            token_ids=tuple(self.token_ids[start:]),
            wants_snapshot=self.lost_a_layer,
            beam_width=self.beam_width,
            lead=self.lead,
        )

    def forget_drafter(self) -> None:
        """Start over with a new incarnation of the drafter: nothing of the old one counts."""
        self.passes_before, self.busy_before_s = self.stats.drafter_passes, self.stats.drafter_busy_s
        self.drafter_len, self.next_seq, self.lost_a_layer, self.epochs_seen = 0, 0, False, 0
        self.replica.restart(0)


class TargetWorker:
    """Runs the target model for its requests; owns the truth about each text."""

    def __init__(self, model: LanguageModel, *, clock: Callable[[], float], max_kv_bytes: int | None = None) -> None:
        """Take over ``model``.

        Args:
            clock: seconds; only to report how long passes took.
            max_kv_bytes: most memory of all sequences, those kept for reuse included; None for no limit.
        """
        self.model = model
        self.pool = SequencePool(model, max_kv_bytes if max_kv_bytes is not None else 1 << 62)
        self._clock = clock
        self._running: dict[int, _Generation] = {}
        self._beam = (0, 0)  # width and lead; zeros: as each request's settings say

    def rows_needed(self, request: TargetRequest) -> int:
        """Return the KV rows that the request may come to need: its longest text and the largest tree."""
        tree = request.draft.budget if request.uses_drafter else 0
        return min(self._max_len(request) + tree, self.model.max_rows)

    def add(self, request: TargetRequest) -> list[TargetMessage]:
        """Take a request; steps run its prompt first. Returns: what the drafter must hear.

        Raises: CapacityError if `pool` has no room for it now.
        """
        opened = self.pool.open(request.prompt_ids, self.rows_needed(request))
        generation = _Generation(request, opened.slot, opened.num_reused, self._max_len(request), self.model.vocab_size)
        generation.beam_width, generation.lead = self._beam
        self._running[request.request_id] = generation
        return [generation.open_message()] if request.uses_drafter else []

    def remove(self, request_id: int) -> list[TargetMessage]:
        """Drop a request, finished or not; its rows stay for texts that begin alike. Unknown ids are ignored."""
        generation = self._running.pop(request_id, None)
        if generation is None:
            return []
        self.model.keep(generation.slot, generation.num_rows)
        self.pool.close(generation.slot, generation.token_ids[: generation.num_rows])
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
            generation.beam_width, generation.lead = self._beam

    def reopen(self) -> list[TargetMessage]:
        """Tell a new incarnation of the drafter about every running request."""
        messages: list[TargetMessage] = []
        for generation in self._running.values():
            if generation.request.uses_drafter:
                generation.forget_drafter()
                messages.append(generation.open_message())
        return messages

    def catch_up(self) -> list[TargetMessage]:
        """Return a correction for every running request: what a drafter missed that was not spoken to for a while."""
        drafted = [g for g in self._running.values() if g.request.uses_drafter and not g.is_prefilling]
        return [generation.correction() for generation in drafted]

    def receive(self, message: DrafterMessage) -> list[TargetMessage]:
        """Take a drafter's message and return the replies.

        Raises: ProtocolError if it is malformed; the request's candidates are as before then.
        """
        match message:
            case Layer():
                generation = self._running.get(message.request_id)
                if generation and generation.request.uses_drafter:
                    self._receive_layer(generation, message)
            case Resync(request_id=request_id, known_len=known_len):
                generation = self._running.get(request_id)
                if generation and generation.request.uses_drafter:
                    generation.drafter_len = max(0, min(known_len, len(generation.token_ids)))
                    return [generation.correction()] if generation.drafter_len else [generation.open_message()]
        return []

    def is_short_of_candidates(self, request_id: int) -> bool:
        """True if the best path in the replica is shorter than the request wants before it verifies."""
        generation = self._running[request_id]
        if not generation.request.uses_drafter:
            return False
        return generation.replica.depth < generation.request.draft.min_depth or bool(generation.replica.pending)

    def best_path(self, request_id: int) -> tuple[int, float]:
        """Return the depth and the path score of the end of the best path in the replica; (0, 0.0) if it is empty."""
        path = self._running[request_id].replica.query(self.model.max_model_len, "chain", self.model.max_model_len)
        return (path.depths[-1], path.path_logprobs[-1]) if path else (0, 0.0)

    def query(self, request_id: int, budget: int, shape: VerifyShape) -> Candidates:
        """Return up to ``budget`` candidates to verify, no deeper than the request may still grow."""
        generation = self._running[request_id]
        request = generation.request
        tokens_left = request.params.max_tokens - generation.num_new_tokens
        positions_left = self.model.max_model_len - len(generation.token_ids)
        rows_left = self.model.capacity(generation.slot) - len(generation.token_ids)
        budget = min(budget, rows_left)
        if not request.uses_drafter or generation.is_prefilling or tokens_left < 2 or budget < 1:
            return Candidates.none()
        return generation.replica.query(budget, shape, min(tokens_left - 1, positions_left))

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
        except BaseException:
            for generation in generations:
                self.model.keep(generation.slot, generation.num_rows)
            raise
        result = StepResult(num_tokens=sum(len(e.token_ids) for e in extensions), busy_s=self._clock() - started)
        for generation, one, extension, chosen in zip(generations, work, extensions, choices, strict=True):
            was_prefilling = generation.is_prefilling
            if chosen:
                if not was_prefilling:
                    generation.stats.target_busy_s += result.busy_s
                self._commit(generation, one.offer, chosen, result)
            else:
                generation.num_rows += len(extension.token_ids)
            if was_prefilling:
                self.pool.note(generation.slot, generation.token_ids[: generation.num_rows])
        return result

    def _max_len(self, request: TargetRequest) -> int:
        return min(len(request.prompt_ids) + request.params.max_tokens, self.model.max_model_len)

    def _commit(self, generation: _Generation, offer: Candidates, choices: list[int], result: StepResult) -> None:
        """Accept, cut at the end of the text, roll the KV back, and tell the drafter."""
        verdict = match(offer.tokens, offer.parents, choices)
        root_rows = len(generation.token_ids)
        was_prefilling = generation.is_prefilling
        new_ids = [offer.tokens[i] for i in verdict.accepted] + [verdict.next_id]
        kept_ids, reason = self._cut(generation, new_ids)
        kept_rows = [root_rows + i for i in verdict.accepted[: len(kept_ids)]]
        self.model.keep(generation.slot, root_rows, kept_rows)
        generation.num_rows = root_rows + len(kept_rows)
        generation.token_ids += kept_ids
        generation.round_idx += 1
        stats, request_id = generation.stats, generation.request.request_id
        stats.num_new_tokens = generation.num_new_tokens
        if not was_prefilling:
            stats.count_verification(max(offer.depths, default=0), len(offer.tokens), len(kept_rows))
            is_greedy = generation.sampler.rule.is_greedy
            compared, agreed = _compare(generation.replica, new_ids)
            result.verified.append(Verified(request_id, offer, tuple(verdict.accepted), is_greedy, compared, agreed))
        result.progress.append(Progress(request_id, tuple(kept_ids), reason))
        if reason is None and generation.request.uses_drafter:
            matched = generation.replica.advance(new_ids)
            if matched == len(new_ids) and not was_prefilling:
                stats.hits += 1
            result.messages.append(generation.correction())

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

    def _receive_layer(self, generation: _Generation, layer: Layer) -> None:
        if layer.seq < generation.next_seq:
            return  # repeated, or overtaken by a snapshot
        if layer.seq > generation.next_seq and not layer.is_reset:
            generation.lost_a_layer = True
            return
        text_len = len(generation.token_ids)
        if not 0 <= layer.root_position < layer.known_len <= text_len:
            raise ProtocolError(
                f"layer of request {layer.request_id} has root position {layer.root_position} and {layer.known_len} "
                f"known tokens, but the text has {text_len}"
            )
        if max(layer.token_ids, default=0) >= self.model.vocab_size:
            raise ProtocolError(
                f"layer of request {layer.request_id} has token {max(layer.token_ids)}; the target has tokens 0 to "
                f"{self.model.vocab_size - 1}"
            )
        if not (0 <= layer.num_passes < 1 << 40 and 0 <= layer.busy_s < math.inf and 0 <= layer.num_reused <= text_len):
            raise ProtocolError(
                f"layer of request {layer.request_id} reports {layer.num_passes} passes in {layer.busy_s} s and "
                f"{layer.num_reused} reused tokens; none may be negative or without end"
            )
        nodes = NewNodes(layer.ids, layer.parents, layer.token_ids, layer.logprobs)
        stats = generation.stats
        if layer.is_reset:
            fresh = generation.empty_replica()  # a malformed layer raises here and leaves the old one alone
            fresh.restart(layer.epoch, layer.root_id, generation.token_ids[layer.root_position + 1 :])
            fresh.extend(layer.epoch, nodes)
            generation.replica = fresh
            generation.lost_a_layer = False
            if layer.epoch != generation.epochs_seen and generation.num_rows:
                stats.misses += 1
            generation.epochs_seen = layer.epoch
        else:
            replica = generation.replica
            late_before, first_awaited = replica.num_late_hits, text_len - len(replica.pending)
            replica.extend(layer.epoch, nodes)
            num_settled = replica.num_late_hits - late_before
            is_of_prefill = first_awaited == stats.num_prompt_tokens  # the prefill's token: it is no verification
            stats.late_hits += num_settled - (num_settled > 0 and is_of_prefill)
        generation.next_seq = layer.seq + 1
        stats.drafter_reused_tokens = layer.num_reused
        generation.drafter_len = max(generation.drafter_len, layer.known_len)
        stats.drafter_passes = generation.passes_before + layer.num_passes
        stats.drafter_busy_s = generation.busy_before_s + layer.busy_s


def _compare(replica: CandidateCache, new_ids: Sequence[int]) -> tuple[int, int]:
    """Return with how many tokens of the best path the committed ones can be compared, and how many of them agree."""
    best = replica.query(len(new_ids), "chain", len(new_ids)).tokens
    num_agreed = next((i for i, pair in enumerate(zip(best, new_ids, strict=False)) if pair[0] != pair[1]), None)
    return (len(best), len(best)) if num_agreed is None else (num_agreed + 1, num_agreed)


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
    processor = generation.request.logits_processor
    if processor is not None:
        paths: list[list[int]] = []
        for token, parent in zip(offer.tokens, offer.parents, strict=True):
            paths.append([*(generation.token_ids if parent == ROOT else paths[parent]), token])
        rows = zip([generation.token_ids, *paths], torch.split(logits, 1), strict=True)
        try:
            processed = [processor(torch.tensor([ids], device=logits.device), row.clone()) for ids, row in rows]
        except Exception as error:  # it is the caller's code
            raise TargetError(f"the logits processor failed with {type(error).__name__}: {error}") from error
        logits = torch.cat(processed)
    return generation.sampler.choose(logits, positions)
