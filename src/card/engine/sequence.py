"""One running request: its text, its KV rows, its candidates, and the result of a pass."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from card.config import SamplingRule, ShapingRule
from card.drafting.messages import TargetMessage
from card.engine.offers import Offers
from card.engine.replica import Replica
from card.engine.request import FinishReason, Request
from card.engine.self_draft import SelfDraft
from card.engine.visible import VisibleText
from card.text.following import Following
from card.tree.nodes import NO_NODES, ROOT, Nodes
from card.tree.sampling import Sampler
from card.tree.shaping import Shaping

_MOST_REASON_CHARS = 300  # of a drafter's reason; the drafter may be someone else's


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
        masks: Following | None,
        self_draft: SelfDraft | None = None,
    ) -> None:
        """Begin with the prompt, of which ``num_reused`` tokens have KV rows already.

        Args:
            switch_len: of the slot's pool.
            masks: of its grammar; None: it has none.
            self_draft: the request's own draft, if the target drafts for itself.
        """
        self.request = request
        self.slot = slot
        self.offers = offers
        self.self_draft = self_draft
        self.token_ids = list(request.prompt_ids)
        self.num_rows = num_reused  # KV rows of committed tokens; the last one never has a row between rounds
        self.sampler = Sampler(SamplingRule.of(request.params), vocab_size)
        rule = ShapingRule.of(request.params, num_prompt_tokens=len(request.prompt_ids), end_ids=request.end_ids)
        self.masks = masks
        self.shaping = None if rule is None else Shaping(rule, request.prompt_ids, vocab_size, self.masks)
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
        """True if tokens of the prompt, or of a text whose rows are computed anew, are still to be run."""
        return self.num_new_tokens == 0 or self.num_rows < len(self.token_ids) - 1

    @property
    def prompt_tokens_left(self) -> int:
        """Number of tokens still to be run of the prompt, or of a text that is read again."""
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
    def candidates_depth(self) -> int:
        """Depth of the drafter's deepest candidate; 0 without one."""
        return self.replica.tree.depth

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
        if self.masks is not None and not self.masks.takes_candidates:
            return False
        return not (draft.token_ids and draft.token_ids[-1] in self.request.end_ids)

    def opening(self) -> list[TargetMessage]:
        """Return the messages for a drafter that does not know the request."""
        return [self.replica.open_message()] if self.request.uses_drafter else []

    def decline(self, reason: str) -> None:
        """Go on without the drafter, which has declined this text."""
        self.request = replace(self.request, uses_drafter=False)
        self.replica.forget_drafter()
        self.stats.declined = " ".join(reason.split())[:_MOST_REASON_CHARS] or "the drafter gave no reason"

    @property
    def is_held_up(self) -> bool:
        """True if passes must leave it out, as its grammar is still computing what may follow."""
        return self.masks is not None and self.masks.is_held_up

    def permitted(self, offer: Nodes) -> Nodes:
        """Return the candidates without those that the grammar surely forbids: these cannot be accepted."""
        if self.masks is None or not offer:
            return offer
        if not self.masks.takes_candidates:
            return NO_NODES
        paths, is_allowed = paths_of(offer), list[bool]()
        for token, parent in zip(offer.tokens, offer.parents, strict=True):
            row = self.masks.row(() if parent == ROOT else paths[parent])
            is_permitted = row is None or (token < len(row) and bool(row[token]))
            is_allowed.append(is_permitted and (parent == ROOT or is_allowed[parent]))
        return offer.kept(is_allowed)

    def cut(self, new_ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """Return the new tokens up to the one that ends the text, and the reason, if it ends."""
        request = self.request
        most_new = longest_text(request, self._max_model_len) - len(request.prompt_ids)
        for i, token_id in enumerate(new_ids):
            completes_stop = request.stop_check is not None and request.stop_check.feed(token_id)
            if token_id in request.end_ids or completes_stop:  # the stop check sees end tokens too
                return new_ids[: i + 1], "stop"
            if self.num_new_tokens + i + 1 >= most_new:
                return new_ids[: i + 1], "length"
        return new_ids, None


def longest_text(request: Request, max_model_len: int) -> int:
    """Return the most tokens that prompt and answer can get."""
    return min(len(request.prompt_ids) + request.params.max_tokens, max_model_len)


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one request in the next pass: a part of its prompt, a verification, or a drafting step."""

    sequence: Sequence
    num_prompt_tokens: int = 0  # most tokens of the prompt to run; 0 once all of them were
    offer: Nodes = NO_NODES
    drafts: bool = False  # draft one token instead, reading chosen rows

    @property
    def request_id(self) -> int:
        """Number of the request."""
        return self.sequence.request.request_id


def paths_of(offer: Nodes) -> list[tuple[int, ...]]:
    """Return the tokens of each candidate's path, including itself."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(offer.tokens, offer.parents, strict=True):
        paths.append((token,) if parent == ROOT else (*paths[parent], token))
    return paths
