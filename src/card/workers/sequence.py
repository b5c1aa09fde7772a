"""One running request: its text, its KV rows, what is proposed to go on with, and what one pass makes of it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from card.config import SamplingRule, ShapingRule
from card.errors import TargetError
from card.models.protocol import NO_PARENT, Extension
from card.protocol.messages import TargetMessage
from card.tree.nodes import NO_NODES, ROOT, Nodes
from card.tree.sampling import Sampler, TokenLogprobs, token_logprobs
from card.tree.shaping import Shaping
from card.tree.verify import Verdict, Verification, Verifier
from card.workers.offers import Offers
from card.workers.replica import Replica
from card.workers.request import FinishReason, Request, TokenDetails, alternatives_to, origins_of
from card.workers.self_draft import SelfDraft
from card.workers.visible import VisibleText
from card.writers.local.protocol import Observation

_MOST_REASON_CHARS = 300  # of what a drafter, perhaps another's, says


class Sequence:
    """The state of one running request."""

    def __init__(
        self,
        request: Request,
        slot: int,
        num_reused: int,
        *,
        max_model_len: int,
        vocab_size: int,
        switch_len: int | None,
        offers: Offers,
        self_draft: SelfDraft | None = None,
    ) -> None:
        """Begin with the prompt, of which ``num_reused`` tokens have KV rows already.

        Args:
            switch_len: of the pool that the slot is of.
            self_draft: what the target drafts for itself, if it does.
        """
        self.request = request
        self.slot = slot
        self.offers = offers
        self.self_draft = self_draft
        self.token_ids = list(request.prompt_ids)
        self.num_rows = num_reused  # KV rows of committed tokens; the last one never has a row between rounds
        self.sampler = Sampler(SamplingRule.of(request.params), vocab_size)
        rule = ShapingRule.of(request.params, num_prompt_tokens=len(request.prompt_ids), end_ids=request.end_ids)
        grammar = request.grammar.fork() if request.grammar is not None else None
        self.shaping = None if rule is None else Shaping(rule, request.prompt_ids, vocab_size, grammar)
        self._max_model_len = max_model_len
        self._switch_len = switch_len
        self.stats = request.new_stats()
        self.stats.reused_prompt_tokens = num_reused
        self.replica = self._new_replica(rule, vocab_size)

    def _new_replica(self, shaping: ShapingRule | None, vocab_size: int) -> Replica:
        request, num_hidden = self.request, self.stats.hidden_prompt_tokens
        num_prompt = len(request.prompt_ids)
        text: SequenceOf[int] = self.token_ids
        if request.hidden is not None:
            text = VisibleText(self.token_ids, num_prompt, request.hidden)
            shaping = None if shaping is None else replace(shaping, num_prompt_tokens=num_prompt - num_hidden)
        return Replica(
            request.request_id,
            text,
            request.draft,
            request.params,
            max_len=longest_text(request, self._max_model_len) - num_hidden,
            vocab_size=vocab_size,
            stats=self.stats,
            shaping=shaping,
            num_hidden=num_hidden,
        )

    @property
    def num_new_tokens(self) -> int:
        """Number of tokens of the answer."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def is_prefilling(self) -> bool:
        """True if a part of the prompt is still to be run, or of a text whose rows are computed anew."""
        return self.num_new_tokens == 0 or self.num_rows < len(self.token_ids) - 1

    @property
    def prompt_tokens_left(self) -> int:
        """Number of tokens still to be run of the prompt, or of a text that is read once more."""
        return len(self.token_ids) - self.num_rows if self.is_prefilling else 0

    @property
    def deepest(self) -> int:
        """Number of layers of candidates that can become text: the last token of all is the target's own."""
        tokens_left, length = self.request.params.max_tokens - self.num_new_tokens, len(self.token_ids)
        most = self._max_model_len
        if self._switch_len is not None and length <= self._switch_len:
            most = self._switch_len  # a longer text has other rows
        return min(tokens_left - 1, most - length)

    @property
    def num_candidates(self) -> int:
        """Number of the drafter's candidates."""
        return self.replica.tree.num_nodes

    @property
    def best_path(self) -> tuple[int, float]:
        """Depth and path score of the end of the drafter's best path; (0, 0.0) without one."""
        tree = self.replica.tree
        if not tree.num_nodes:
            return 0, 0.0
        path = tree.query(self._max_model_len, "chain", self._max_model_len)
        return (path.depths[-1], path.path_logprobs[-1]) if path else (0, 0.0)

    @property
    def is_short_of_candidates(self) -> bool:
        """True if the drafter's best path is shorter than the request wants before it verifies."""
        return self.request.uses_drafter and self.replica.is_short(self.request.draft, self.deepest)

    @property
    def can_draft_itself(self) -> bool:
        """True if the target can draft one more token for this text before it verifies."""
        draft = self.self_draft
        if draft is None or self.is_prefilling or not draft.has_room(self.deepest):
            return False
        return not (draft.token_ids and draft.token_ids[-1] in self.request.end_ids)

    def opening(self) -> list[TargetMessage]:
        """Return what a drafter must hear that knows nothing of the request."""
        return [self.replica.open_message()] if self.request.uses_drafter else []

    def decline(self, reason: str) -> None:
        """Go on without the drafter, which does not draft for this text."""
        self.request = replace(self.request, uses_drafter=False)
        self.replica.forget_drafter()
        self.stats.declined = " ".join(reason.split())[:_MOST_REASON_CHARS] or "the drafter does not say why"

    def permitted(self, offer: Nodes) -> Nodes:
        """Return the candidates that the grammar permits, if there is one: no other can be accepted."""
        if self.shaping is None or not offer:
            return offer
        permitted = self.shaping.permitted(_paths(offer))
        return offer if permitted is None else offer.kept(permitted)

    def cut(self, new_ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """Return the new tokens up to the one that ends the text, and why it ends, if it does."""
        request = self.request
        most_new = longest_text(request, self._max_model_len) - len(request.prompt_ids)
        for i, token_id in enumerate(new_ids):
            completes_stop = request.stop_check is not None and request.stop_check.feed(token_id)
            if token_id in request.end_ids or completes_stop:  # end tokens count for the stop check, too
                return new_ids[: i + 1], "stop"
            if self.num_new_tokens + i + 1 >= most_new:
                return new_ids[: i + 1], "length"
        return new_ids, None


def longest_text(request: Request, max_model_len: int) -> int:
    """Return the most tokens that prompt and answer can get."""
    return min(len(request.prompt_ids) + request.params.max_tokens, max_model_len)


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one request in the next pass: a part of its prompt, a verification, or a token that it drafts itself."""

    sequence: Sequence
    num_prompt_tokens: int = 0  # most tokens of the prompt to run; 0 once all of them were
    offer: Nodes = NO_NODES
    drafts: bool = False  # drafts one token instead, reading chosen rows

    @property
    def request_id(self) -> int:
        """Number of the request."""
        return self.sequence.request.request_id


@dataclass(slots=True)
class Pass:
    """Part of one sequence in one target pass, and what is decided from its logits; nothing of it is committed."""

    sequence: Sequence
    extension: Extension
    offer: Nodes
    chosen: list[int] = field(default_factory=list)  # the target's token after the root and after each candidate
    verdict: Verdict | None = None  # None: a part of the prompt was run, and more of it follows
    num_kept: int = 0  # accepted candidates that became text: its end may come before the last of them
    num_lenient: int = 0  # accepted candidates that are not the target's choice
    top_ids: list[list[int]] = field(default_factory=list)  # likeliest tokens of each row
    details: TokenDetails = field(default_factory=TokenDetails)

    @classmethod
    def of(cls, work: Work) -> Pass:
        """Run the committed tokens that have no KV row yet, and below the last of them the candidates."""
        sequence, offer = work.sequence, work.offer
        first, root_row = sequence.num_rows, len(sequence.token_ids) - 1
        chain = sequence.token_ids[first:]
        if sequence.is_prefilling:
            chain = chain[: work.num_prompt_tokens]
        parents = [first + i - 1 if first + i else NO_PARENT for i in range(len(chain))]
        is_complete = first + len(chain) > root_row
        parents += [root_row if parent == ROOT else root_row + 1 + parent for parent in offer.parents]
        first_logits_idx = len(chain) - 1 if is_complete else len(chain)
        draft, scores = sequence.self_draft, None
        if draft is not None and not sequence.is_prefilling:
            scores = draft.scores_for(len(sequence.token_ids))
        token_ids = [*chain, *offer.tokens]
        return cls(sequence, Extension(sequence.slot, token_ids, parents, first_logits_idx, scores=scores), offer)

    def decide(self, logits: Tensor, num_top: int, verifier: Verifier, features: Tensor | None = None) -> None:
        """Choose the target's tokens and let the verifier compare the candidates with them.

        Args:
            logits: [1 + candidates, V] of the model; [0, V] while more of the prompt follows.
            num_top: how many of the likeliest tokens of each row the writers are shown.
            features: [1 + candidates, F] of the same rows; None: the verifier wishes for none.
        Raises: TargetError if the caller's logits processor fails; ModelError for logits that are no numbers.
        """
        self.top_ids = logits.topk(num_top).indices.tolist() if num_top else []
        if len(logits):
            shaped = _shaped(self.sequence, [(), *_paths(self.offer)], logits)
            self.chosen = _choose(self.sequence, self.offer, shaped)
            seen = Verification(self.offer, shaped, self.chosen, features)
            self.verdict = verifier.decide(seen)
            if not verifier.is_exact:
                self.num_lenient = seen.leniently_accepted(self.verdict)
            self.details = _details(self.sequence, self.offer, self.verdict, logits)

    def observation(self, verdict: Verdict, features: Tensor | None = None) -> Observation:
        """Return what the writers are told of this pass; ``features`` [1 + candidates, D] as they wish for them."""
        new_ids = (*(self.offer.tokens[i] for i in verdict.accepted), verdict.next_id)
        chosen = tuple(self.chosen)
        tree = self.offer.tokens, self.offer.parents
        return Observation(new_ids, *tree, chosen, verdict.accepted, self.top_ids, features)


@dataclass(slots=True)
class DraftPass:
    """Part of one sequence in one target pass in which it drafts for itself: a token, and candidates before it."""

    sequence: Sequence
    draft: SelfDraft
    extension: Extension
    candidates: list[int]

    @classmethod
    def of(cls, work: Work) -> DraftPass:
        """Run the newest token, drafted or not, and what may follow it over the rows that were chosen."""
        sequence, draft = work.sequence, work.sequence.self_draft
        assert draft is not None, "of a request that drafts for itself"
        candidates = draft.candidates(sequence.token_ids, sequence.deepest)
        extension = draft.extension(sequence.slot, sequence.token_ids[-1], sequence.num_rows, candidates)
        return cls(sequence, draft, extension, candidates)

    def take(self, logits: Tensor) -> None:
        """Add the tokens that the target would choose by these logits [1 + candidates, V], up to the first miss.

        Raises: TargetError if the caller's logits processor fails; ModelError for logits that are no numbers.
        """
        sequence, drafted = self.sequence, self.draft.token_ids
        for row, candidate in zip(torch.split(logits, 1), [*self.candidates, None], strict=True):
            shaped = _shaped(sequence, [tuple(drafted)], row)
            (token_id,) = sequence.sampler.choose(shaped, [len(sequence.token_ids) + len(drafted)])
            self.draft.take(token_id, row[0])
            if token_id != candidate or token_id in sequence.request.end_ids:
                break

    @property
    def num_rows(self) -> int:
        """Number of rows that stay: those of the text and of what was drafted, but for the newest token."""
        return self.sequence.num_rows + len(self.draft.token_ids)


def _shaped(sequence: Sequence, paths: list[tuple[int, ...]], logits: Tensor) -> Tensor:
    """Return logits [P, V] after P paths as penalties, grammar and the caller's processor leave them."""
    processor, shaping = sequence.request.logits_processor, sequence.shaping
    if shaping is not None:
        logits = shaping.apply(logits, paths)
    if processor is not None:
        texts = [torch.tensor([[*sequence.token_ids, *path]], device=logits.device) for path in paths]
        try:
            processed = [processor(ids, row.clone()) for ids, row in zip(texts, torch.split(logits, 1), strict=True)]
        except Exception as error:  # it is the caller's code
            raise TargetError(f"the logits processor failed with {type(error).__name__}: {error}") from error
        logits = torch.cat(processed)
    return logits


def _choose(sequence: Sequence, offer: Nodes, logits: Tensor) -> list[int]:
    """Return the target's token after the root and after each candidate."""
    after_root = len(sequence.token_ids)
    positions = [after_root, *(after_root + depth for depth in offer.depths)]  # of the token that each row predicts
    return sequence.sampler.choose(logits, positions)


def _paths(offer: Nodes) -> list[tuple[int, ...]]:
    """Return the tokens of each candidate's path, its own included."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(offer.tokens, offer.parents, strict=True):
        paths.append((token,) if parent == ROOT else (*paths[parent], token))
    return paths


def _details(sequence: Sequence, offer: Nodes, verdict: Verdict, logits: Tensor) -> TokenDetails:
    """Return what is told of the tokens of a verdict. ``logits`` are the model's own, [1 + candidates, V]."""
    params, names = sequence.request.params, sequence.offers.names
    logprobs: tuple[TokenLogprobs, ...] = ()
    if params.logprobs is not None:
        rows = [0, *(1 + idx for idx in verdict.accepted)]
        new_ids = [*(offer.tokens[idx] for idx in verdict.accepted), verdict.next_id]
        logprobs = token_logprobs(logits[rows], new_ids, params.logprobs)
    alternatives = alternatives_to(offer, verdict, names) if params.shows_tree else ()
    return TokenDetails(origins_of(offer, verdict, names), logprobs, alternatives)
