"""The target side: a state machine that queries the cache, verifies in one pass and corrects.

No thread, socket, sleep or clock in here: `receive` takes a drafter's message, `step` runs one round (one target pass)
for the requests given and returns the new tokens and what is to be sent to the drafter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from card.candidates import CandidateCache, Candidates, NewNodes
from card.config import DraftSettings, SamplingParams
from card.errors import ProtocolError
from card.messages import Close, Correction, DrafterMessage, DraftSpec, Layer, Open, Resync, TargetMessage
from card.metrics import RequestStats
from card.models.protocol import NO_PARENT, Extension, LanguageModel
from card.sampling import Sampler, SamplingRule
from card.verify import ROOT, match

FinishReason = Literal["stop", "length"]


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


@dataclass(frozen=True, slots=True)
class Progress:
    """What one round gave a request."""

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(slots=True)
class StepResult:
    """What one round gave all its requests, and the messages for the drafter."""

    progress: list[Progress] = field(default_factory=list)
    messages: list[TargetMessage] = field(default_factory=list)


def draft_spec(draft: DraftSettings, params: SamplingParams) -> DraftSpec:
    """Return what the drafter is told about a request whose seed is fixed."""
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
    )


class _Generation:
    """State of one running request: the text, its KV rows, and the target's replica of the candidate tree."""

    def __init__(self, request: TargetRequest, slot: int, vocab_size: int) -> None:
        self.request = request
        self.slot = slot
        self.token_ids = list(request.prompt_ids)
        self.num_rows = 0  # KV rows of committed tokens; the last committed token never has one between rounds
        self.sampler = Sampler(SamplingRule.of(request.params), vocab_size)
        self.replica = self.empty_replica()
        least = request.draft.min_verify_prob
        self.min_verify_logprob = math.log(least) if least > 0 else -math.inf
        self.stats = RequestStats(num_prompt_tokens=len(request.prompt_ids), seed=request.params.seed or 0)
        self.round_idx = 0
        self.drafter_len = 0  # committed tokens that the drafter is known to hold
        self.next_seq = 0
        self.lost_a_layer = False
        self.epochs_seen = 0
        self.passes_before = 0  # drafter passes of earlier incarnations
        self.busy_before_s = 0.0

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    def empty_replica(self) -> CandidateCache:
        draft = self.request.draft
        return CandidateCache(max_nodes=draft.max_nodes, lead=draft.lead + draft.budget)

    def open_message(self) -> Open:
        return Open(self.request.request_id, tuple(self.token_ids), draft_spec(self.request.draft, self.request.params))

    def correction(self) -> Correction:
        start = min(self.drafter_len, len(self.token_ids))
        return Correction(
            self.request.request_id, self.round_idx, start, tuple(self.token_ids[start:]), self.lost_a_layer
        )

    def forget_drafter(self) -> None:
        """Start over with a new incarnation of the drafter: nothing of the old one counts."""
        self.passes_before, self.busy_before_s = self.stats.drafter_passes, self.stats.drafter_busy_s
        self.drafter_len, self.next_seq, self.lost_a_layer, self.epochs_seen = 0, 0, False, 0
        self.replica.restart(0)


class TargetWorker:
    """Runs the target model for its requests; owns the truth about each text."""

    def __init__(self, model: LanguageModel, *, clock: Callable[[], float]) -> None:
        self.model = model
        self._clock = clock  # seconds; only to report how long passes took
        self._running: dict[int, _Generation] = {}

    def add(self, request: TargetRequest) -> list[TargetMessage]:
        """Take a request; its first `step` runs the prompt. Returns: what the drafter must hear."""
        generation = _Generation(request, self.model.open(), self.model.vocab_size)
        self._running[request.request_id] = generation
        return [generation.open_message()] if request.uses_drafter else []

    def remove(self, request_id: int) -> list[TargetMessage]:
        """Drop a request, finished or not, and free its rows. Unknown ids are ignored."""
        generation = self._running.pop(request_id, None)
        if generation is None:
            return []
        self.model.close(generation.slot)
        return [Close(request_id)] if generation.request.uses_drafter else []

    def stats(self, request_id: int) -> RequestStats:
        """Return the live counters of a running request."""
        return self._running[request_id].stats

    def reopen(self) -> list[TargetMessage]:
        """Tell a new incarnation of the drafter about every running request."""
        messages: list[TargetMessage] = []
        for generation in self._running.values():
            if generation.request.uses_drafter:
                generation.forget_drafter()
                messages.append(generation.open_message())
        return messages

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
        return generation.replica.depth < generation.request.draft.min_depth or bool(generation.replica.pending)

    def step(self, request_ids: Sequence[int]) -> StepResult:
        """Run one round for these requests in one target pass."""
        generations = [self._running[i] for i in request_ids]
        offers = [self._query(generation) for generation in generations]
        extensions = [_extension(g, offer) for g, offer in zip(generations, offers, strict=True)]
        started = self._clock()
        all_logits = self.model.forward(extensions)
        choices = [
            generation.sampler.choose(logits, _positions(generation, offer))
            for generation, offer, logits in zip(generations, offers, all_logits, strict=True)
        ]
        busy_s = self._clock() - started
        result = StepResult()
        for generation, offer, chosen in zip(generations, offers, choices, strict=True):
            if generation.num_rows:
                generation.stats.target_busy_s += busy_s
            self._commit(generation, offer, chosen, result)
        return result

    def _query(self, generation: _Generation) -> Candidates:
        """Return the candidates to verify, no deeper than the request may still grow."""
        request = generation.request
        is_prefill = generation.num_rows == 0
        tokens_left = request.params.max_tokens - generation.num_new_tokens
        positions_left = self.model.max_model_len - len(generation.token_ids)
        rows_left = self.model.max_rows - len(generation.token_ids)
        if not request.uses_drafter or is_prefill or tokens_left < 2:
            return Candidates.none()
        budget = min(request.draft.budget, rows_left)
        offer = generation.replica.query(budget, request.draft.verify, min(tokens_left - 1, positions_left))
        return _likely(offer, generation.min_verify_logprob)

    def _commit(self, generation: _Generation, offer: Candidates, choices: list[int], result: StepResult) -> None:
        """Accept, cut at the end of the text, roll the KV back, and tell the drafter."""
        verdict = match(offer.tokens, offer.parents, choices)
        root_rows = len(generation.token_ids)
        is_prefill = generation.num_rows == 0
        new_ids = [offer.tokens[i] for i in verdict.accepted] + [verdict.next_id]
        kept_ids, reason = self._cut(generation, new_ids)
        generation.token_ids += kept_ids
        generation.round_idx += 1
        stats = generation.stats
        stats.num_new_tokens = generation.num_new_tokens
        if not is_prefill:
            depth = max(offer.depths, default=0)
            num_accepted = min(len(verdict.accepted), len(kept_ids))  # those beyond the end of the text earn nothing
            stats.count_verification(depth, len(offer.tokens), num_accepted)
        result.progress.append(Progress(generation.request.request_id, tuple(kept_ids), reason))
        if reason is not None:
            return
        self.model.keep(generation.slot, root_rows, [root_rows + i for i in verdict.accepted])
        generation.num_rows = len(generation.token_ids) - 1
        if generation.request.uses_drafter:
            matched = generation.replica.advance(new_ids)
            if matched == len(new_ids) and not is_prefill:
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
        generation.drafter_len = max(generation.drafter_len, layer.known_len)
        stats.drafter_passes = generation.passes_before + layer.num_passes
        stats.drafter_busy_s = generation.busy_before_s + layer.busy_s


def _likely(offer: Candidates, min_path_logprob: float) -> Candidates:
    """Return the leading candidates with at least this path score; scores do not increase within an answer."""
    scores = offer.path_logprobs
    end = next((i for i, score in enumerate(scores) if score < min_path_logprob), len(scores))
    if end == len(scores):
        return offer
    return Candidates(offer.ids[:end], offer.tokens[:end], offer.parents[:end], scores[:end], offer.depths[:end])


def _extension(generation: _Generation, offer: Candidates) -> Extension:
    """Return the committed tokens that have no KV row yet, and below the last of them the candidates."""
    chain = generation.token_ids[generation.num_rows :]
    first, root_row = generation.num_rows, len(generation.token_ids) - 1
    parents = [first + i - 1 if first + i else NO_PARENT for i in range(len(chain))]
    parents += [root_row if parent == ROOT else root_row + 1 + parent for parent in offer.parents]
    return Extension(generation.slot, [*chain, *offer.tokens], parents, len(chain) - 1)


def _positions(generation: _Generation, offer: Candidates) -> list[int]:
    """Return the position of the token that each logits row predicts: after the root, then after each candidate."""
    after_root = len(generation.token_ids)
    return [after_root, *(after_root + depth for depth in offer.depths)]
