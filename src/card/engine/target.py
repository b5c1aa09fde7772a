"""The target side: a state machine that queries the candidates, verifies them in one pass and corrects the drafter.

It has no thread, socket, sleep or clock. `receive` takes a drafter's message. `step` runs one round (one target pass)
for the given requests; it returns the new tokens and the messages for the drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from card.config.selection import SelfDrafting
from card.drafting.local.protocol import WriterSequence
from card.drafting.messages import Close, Declined, DrafterMessage, Layer, Resync, TargetMessage
from card.engine.forced import ForcedText
from card.engine.live import LiveRequest
from card.engine.offers import GRAMMAR, Offers
from card.engine.request import FinishReason, Request, StepResult, Update, Verified
from card.engine.row_moves import RowMoves
from card.engine.self_draft import SELF, SelfDraft
from card.engine.self_drafter import SelfDrafter
from card.engine.sequence import Sequence, Work, longest_text
from card.engine.target_pass import MASK_WAIT_S, DraftPass, Pass
from card.engine.watchers import Watchers
from card.errors import PromptError, named
from card.models.images import Seeing
from card.models.protocol import NO_PARENT, Extension, LanguageModel, Recurrent, Routed
from card.models.rows.pool import SequencePool
from card.models.rows.prefix_cache import PrefixCache
from card.models.rows.row_store import RowStore
from card.text.following import AtOnce, Following, Lanes
from card.tree.nodes import NO_NODES, Nodes
from card.tree.verify import MATCH, Verdict, Verifier

OpenWriter = Callable[[Request], WriterSequence]
"""Begins a writer's part of a request."""


class TargetWorker:
    """Runs the target model for its requests, and keeps the authoritative text of each."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        clock: Callable[[], float],
        max_kv_bytes: int | None = None,
        writers: Mapping[str, OpenWriter] | None = None,
        top_k: int = 0,
        verifier: Verifier = MATCH,
        watchers: Watchers | None = None,
        self_drafting: SelfDrafting | None = None,
        row_store: RowStore | None = None,
        may_grow: bool = False,
        prefixes: PrefixCache | None = None,
        lanes: Lanes = AtOnce(),  # noqa: B008
        foresees: bool = False,
    ) -> None:
        """Take over ``model``.

        Args:
            clock: seconds; used only to report the time of passes.
            max_kv_bytes: most memory of all sequences, including those kept for reuse; None: no limit.
            writers: by name, in the order in which they propose; each is called when a request begins.
            top_k: how many of the likeliest tokens the writers see for every token that is run.
            verifier: decides which candidates are accepted and which token follows.
            watchers: see hidden states after each pass; None: there are none.
            self_drafting: settings of self-drafting; None: the target does not draft for itself.
            row_store: takes the rows of paused requests.
            may_grow: requests may get less room than their maximum, and be paused; with ``row_store`` they always may.
            prefixes: keeps rows of long beginnings in files.
            lanes: where the masks of grammars are computed.
            foresees: the grammar of a request proposes what it forces.
        Raises: SettingsError if it is to draft for itself but its passes cannot read chosen rows, or if rows are to be
            stored but cannot be moved.
        """
        self.model = model
        self._self_drafter = None if self_drafting is None else SelfDrafter(model, self_drafting)
        self.runs_chains_only = isinstance(model, Recurrent)  # chains of candidates, no trees
        self._routed = model if isinstance(model, Routed) else None
        self._verifier = verifier
        self._watchers = watchers
        self._writers = dict(writers or {})
        self._top_k = top_k
        most_bytes = max_kv_bytes if max_kv_bytes is not None else 1 << 62
        self.pool = SequencePool(model, most_bytes, prefixes=prefixes)
        self.moves = RowMoves(model, self.pool, row_store) if may_grow or row_store is not None else None
        self._clock = clock
        self._lanes = lanes
        self._foresees = foresees
        self._running: dict[int, Sequence] = {}
        self._beam_width: int | None = None  # None: as each request's settings say

    @property
    def has_writers(self) -> bool:
        """True if every request has writers besides the drafter, including the target itself."""
        return bool(self._writers or self._self_drafter)

    def check(self, request: Request) -> LiveRequest:
        """Return the request in the form that `add` expects.

        Raises: PromptError if it can never run: empty prompt, unknown tokens, no room in context or memory.
        """
        prompt_ids, model = request.prompt_ids, self.model
        if not prompt_ids:
            raise PromptError("the prompt is empty; give at least one token")
        if len(prompt_ids) >= model.max_model_len:
            raise PromptError(
                f"the prompt has {len(prompt_ids)} tokens, but the context holds {model.max_model_len} and one must be "
                f"left for the answer; shorten the prompt, or raise {named('max_model_len')} if the model allows it"
            )
        for token_id in prompt_ids:
            if not 0 <= token_id < model.vocab_size:
                raise PromptError(f"token ids must be from 0 to {model.vocab_size - 1}, got {token_id}")
        has_writers = request.params.speculates and (self.has_writers or self._is_foreseen(request))
        tree = request.draft.budget if request.uses_drafter or has_writers else 0
        num_rows = min(longest_text(request, model.max_model_len) + tree, model.max_rows)
        if not self.pool.can_ever_hold(num_rows):
            raise PromptError(
                f"the request may need {num_rows} KV rows ({len(prompt_ids)} tokens of prompt, "
                f"{request.params.max_tokens} new ones), more than {named('kv_cache_memory')} holds; shorten it, lower "
                f"{named('max_tokens')} or raise {named('kv_cache_memory')}"
            )
        drafted = max(tree, request.draft.num_speculative_tokens) if tree else 0
        return LiveRequest(request, num_rows, num_spare_rows=drafted + 1)

    def add(self, one: LiveRequest, num_rows: int | None = None) -> Sequence:
        """Take a request; its prompt runs in later steps. Returns: its state; the drafter must be sent `opening`.

        Args:
            num_rows: KV rows at first; None: the most it may need.
        Raises: CapacityError if `pool` has no room for it now.
        """
        request = one.request
        opened = self.pool.open(request.pool_key(request.prompt_ids), num_rows or one.num_rows)
        try:
            sequence = self._begin(request, opened.slot, opened.num_reused)
        except BaseException:
            self.pool.close(opened.slot, ())
            raise
        self._running[request.request_id] = sequence
        return sequence

    def _begin(self, request: Request, slot: int, num_reused: int) -> Sequence:
        if isinstance(self.model, Seeing):
            self.model.show(slot, request.images)
        sizes = {"max_model_len": self.model.max_model_len, "vocab_size": self.model.vocab_size}
        writers = self._writers if request.params.speculates else {}
        openers: dict[str, Callable[[], WriterSequence]] = {}
        self_draft = None if self._self_drafter is None else self._self_drafter.open(request)
        if self_draft is not None:
            openers[SELF] = partial(_itself, self_draft)
        openers.update({name: partial(begin, request) for name, begin in writers.items()})
        is_foreseen = self._is_foreseen(request)
        masks = None
        if request.grammar is not None:
            masks = Following(request.grammar.fork(), self._lanes, foresees=is_foreseen)
        if masks is not None and is_foreseen:
            openers[GRAMMAR] = partial(ForcedText, masks, self.model.vocab_size)
        offers = Offers(openers, vocab_size=self.model.vocab_size)
        sequence = Sequence(
            request,
            slot,
            num_reused,
            offers=offers,
            switch_len=self.pool.switch_len,
            masks=masks,
            self_draft=self_draft,
            **sizes,
        )
        sequence.replica.tune(beam_width=self._beam_width)
        return sequence

    def _is_foreseen(self, request: Request) -> bool:
        return self._foresees and request.grammar is not None and request.params.speculates

    def remove(self, sequence: Sequence) -> list[TargetMessage]:
        """Drop a running request, finished or not; its rows stay for texts with the same beginning.

        Returns: messages for the drafter.
        """
        request_id = sequence.request.request_id
        del self._running[request_id]
        was_paused = self.moves is not None and self.moves.forget(sequence)
        if not was_paused:
            self.model.keep(sequence.slot, sequence.num_rows)
            if isinstance(self.model, Seeing):
                self.model.show(sequence.slot, None)
            self.pool.close(sequence.slot, sequence.request.pool_key(sequence.token_ids[: sequence.num_rows]))
        sequence.offers.close()
        if sequence.masks is not None:
            sequence.masks.close()
        return [Close(request_id)] if sequence.request.uses_drafter else []

    def find(self, request_id: int) -> Sequence | None:
        """Return the state of a running request; None for any other."""
        return self._running.get(request_id)

    def tune(self, beam_width: int | None) -> None:
        """Let the drafter make layers of this width for all requests; None: as each request's settings say.

        For running requests the next correction carries it.
        """
        self._beam_width = beam_width
        for sequence in self._running.values():
            sequence.replica.tune(beam_width=beam_width)

    def reopen(self) -> list[TargetMessage]:
        """Return the messages that tell a new incarnation of the drafter about every running request."""
        messages: list[TargetMessage] = []
        for sequence in self._running.values():
            if sequence.request.uses_drafter:
                sequence.replica.forget_drafter()
            messages += sequence.opening()
        return messages

    def catch_up(self) -> list[TargetMessage]:
        """Return a correction for every running request: what the drafter missed while it was not in use."""
        drafted = [g for g in self._running.values() if g.request.uses_drafter and not g.is_prefilling]
        for sequence in drafted:
            sequence.replica.advance()
        return [sequence.replica.correction() for sequence in drafted]

    def receive(self, message: DrafterMessage) -> list[TargetMessage]:
        """Take a drafter's message and return the replies.

        Raises: ProtocolError if it is malformed; the request's candidates are unchanged then.
        """
        if not isinstance(message, Layer | Resync | Declined):
            return []
        sequence = self._running.get(message.request_id)
        if sequence is None or not sequence.request.uses_drafter:
            return []
        if isinstance(message, Declined):
            sequence.decline(message.reason)
            return [Close(message.request_id)]
        return sequence.replica.receive(message)

    def query(self, sequence: Sequence, *, writer_budget: int | None = None, asks_drafter: bool = True) -> Nodes:
        """Return candidates to verify, in the shape that the request wants and no deeper than its text may grow.

        Args:
            writer_budget: most candidates of each local writer but the grammar, if below the request's budget; None:
                that budget.
            asks_drafter: False leaves the drafter's candidates out.
        """
        request, shape = sequence.request, sequence.request.draft.verify
        max_depth = sequence.deepest
        budget = min(request.draft.budget, self.rows_left(sequence))
        if sequence.is_prefilling or max_depth < 1 or budget < 1:
            return NO_NODES
        if self.runs_chains_only and shape == "tree":
            shape = "chain"
        uses_drafter = asks_drafter and request.uses_drafter
        drafted = sequence.replica.tree.query(budget, shape, max_depth) if uses_drafter else NO_NODES
        most = budget if writer_budget is None else min(budget, writer_budget)
        offer = sequence.offers.merge(drafted, most, max_depth, num_forced=budget)
        return sequence.permitted(offer.best_chain() if self.runs_chains_only else offer)

    def rows_left(self, sequence: Sequence) -> int:
        """Return how many candidates of the request one pass has KV rows for."""
        return self.model.capacity(sequence.slot) - len(sequence.token_ids)

    def step(self, work: Iterable[Work], *, is_heard: bool = True) -> StepResult:
        """Run one round for these requests in one target pass. Nothing has changed if it raises.

        If the drafter is not told, its trees stay as they are until `catch_up`.

        An error in one request's own part (grammar, logits processor, stop check and similar) is returned among the
        failures; other requests are not affected. Raises: any error of the model.
        """
        listed, result = list(work), StepResult()
        passes = [Pass.of(one) for one in listed if not one.drafts]
        drafting = [DraftPass.of(one) for one in listed if one.drafts]
        extensions = [*(one.extension for one in passes), *(one.extension for one in drafting)]
        for one in passes:
            one.begin_masks()
            if one.sequence.self_draft is not None:
                self.model.keep(one.sequence.slot, one.sequence.num_rows)  # drops the rows written by drafting
        started = self._clock()
        all_logits = self.model.forward(extensions)
        wait_s = MASK_WAIT_S
        for one in passes:
            wait_s = one.settle_masks(wait_s)
        try:
            for idx, (one, logits) in enumerate(zip(passes, all_logits, strict=False)):
                features = self._watchers.for_verifier(idx) if self._watchers else None
                one.try_to_decide(logits, self._top_k, self._verifier, features, result.failures)
            for draft, logits in zip(drafting, all_logits[len(passes) :], strict=True):
                with result.failures.of(draft.sequence.request.request_id):
                    draft.take(logits)
        except BaseException:
            for sequence in [*(one.sequence for one in passes), *(one.sequence for one in drafting)]:
                self._take_back(sequence)
            raise
        result.num_tokens = sum(len(one.token_ids) for one in extensions)
        result.busy_s = self._clock() - started
        result.num_experts = self._routed.experts_read if self._routed is not None else 0
        if self._self_drafter is not None:
            self._self_drafter.count_reads([*passes, *drafting])
        for idx, one in enumerate(passes):
            with result.failures.of(one.sequence.request.request_id):
                self._commit(idx, one, result, is_heard=is_heard)
                if self._self_drafter is not None and one.verdict is not None:
                    self._self_drafter.choose_rows(one)
        for draft in drafting:
            self.model.keep(draft.sequence.slot, *draft.kept_rows())
            draft.sequence.stats.target_busy_s += result.busy_s
        return result

    def run_one_token(self) -> None:
        """Run one token of no request, to test whether passes work. Raises: CapacityError; any error of the model."""
        opened = self.pool.open((), 1)
        try:
            self.model.forward([Extension(opened.slot, [0], [NO_PARENT])])
            self.model.keep(opened.slot, 0)
        finally:
            self.pool.close(opened.slot, ())

    def _take_back(self, sequence: Sequence) -> None:
        """Drop the rows that a pass wrote for a text."""
        self.model.keep(sequence.slot, sequence.num_rows)
        if sequence.self_draft is not None:
            sequence.self_draft.forget()

    def _commit(self, extension_idx: int, one: Pass, result: StepResult, *, is_heard: bool) -> None:
        """Commit the result of a pass, and tell drafter, writers and watchers."""
        sequence, was_prefilling, first = one.sequence, one.sequence.is_prefilling, one.sequence.num_rows
        if one.is_complete and one.verdict is None:  # deciding failed, or a mask is late
            self._take_back(sequence)
            return
        reason: FinishReason | None = None
        features = self._watchers.for_writers(extension_idx) if self._watchers else None
        if one.verdict is None:
            sequence.num_rows += len(one.extension.token_ids)
        else:
            if not was_prefilling:
                sequence.stats.target_busy_s += result.busy_s
            sequence.offers.observe(one.observation(one.verdict, features))
            reason = self._commit_tokens(one, one.verdict, result, is_heard=is_heard)
        branch_below = self._watchers.show(extension_idx, one, first) if self._watchers else None
        if branch_below is not None:
            sequence.replica.tune(branch_below=branch_below)
        if is_heard and one.verdict is not None and reason is None and sequence.request.uses_drafter:
            result.messages.append(sequence.replica.correction())
        if was_prefilling:
            self.pool.note(sequence.slot, sequence.request.pool_key(sequence.token_ids[: sequence.num_rows]))

    def _commit_tokens(self, one: Pass, verdict: Verdict, result: StepResult, *, is_heard: bool) -> FinishReason | None:
        """Accept, cut at the end of the text, and roll the KV back. Returns: why the text ended, if it did."""
        sequence, offer = one.sequence, one.offer
        root_rows, was_prefilling = len(sequence.token_ids), sequence.is_prefilling
        new_ids = [offer.tokens[i] for i in verdict.accepted] + [verdict.next_id]
        kept_ids, reason = sequence.cut(new_ids)
        kept_rows = [root_rows + i for i in verdict.accepted[: len(kept_ids)]]
        one.num_kept = len(kept_rows)
        self.model.keep(sequence.slot, root_rows, kept_rows)
        sequence.num_rows = root_rows + len(kept_rows)
        sequence.token_ids += kept_ids
        if reason is None and self.pool.drop_outgrown(sequence.slot, len(sequence.token_ids)):
            sequence.num_rows = 0  # the text now counts as long: it is read again
        if sequence.shaping is not None:
            sequence.shaping.commit(kept_ids)
        stats, request_id = sequence.stats, sequence.request.request_id
        stats.num_new_tokens = sequence.num_new_tokens
        stats.is_exact, stats.lenient_tokens = self._verifier.is_exact, stats.lenient_tokens + one.num_lenient
        if not was_prefilling:
            stats.count_verification(offer, verdict.accepted[: len(kept_rows)], sequence.offers.names)
            is_greedy = sequence.sampler.rule.is_greedy
            num_agreed, claims = sequence.replica.compare(new_ids) if is_heard else (0, ())
            grammar_bit = sequence.offers.grammar_bit
            result.verified.append(
                Verified(request_id, offer, tuple(verdict.accepted), is_greedy, num_agreed, claims, grammar_bit)
            )
        details = one.details.leading(len(kept_ids))
        result.updates.append(Update(request_id, tuple(kept_ids), reason, stats, details=details))
        if is_heard and reason is None and sequence.request.uses_drafter:
            sequence.replica.advance(is_verified=not was_prefilling)
        return reason


def _itself(draft: SelfDraft) -> WriterSequence:
    return draft
