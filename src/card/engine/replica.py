"""The target's replica of one request's candidate tree, and the known state of the drafter that owns the tree.

Each drafter has its own replica: a request with two drafters has two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from card.config import DraftSettings, ResolvedParams, SamplingRule, ShapingRule, TreeShape
from card.drafting.messages import MAX_COUNT, MAX_LEN, Correction, DraftSpec, Layer, Open, Resync, TargetMessage
from card.engine.metrics import RequestStats
from card.errors import ProtocolError
from card.tree.candidates import CandidateCache

_MAX_SECONDS = 1e12  # of clocks and sums of times; more is a forgery, and its sums may be infinite


def draft_spec(
    draft: DraftSettings,
    params: ResolvedParams,
    max_len: int,
    shaping: ShapingRule | None = None,
    vocab_size: int | None = None,
    num_hidden: int = 0,
) -> DraftSpec:
    """Return the drafter's specification of a request.

    Args:
        max_len: most tokens that its text can get; a drafter follows at most `MAX_LEN` of them.
        shaping: of the parameters; None if they have none.
        vocab_size: of the target; None: of the draft model.
        num_hidden: prompt tokens that the drafter does not see.
    """
    return DraftSpec(
        sampling=SamplingRule.of(params),
        shape=TreeShape.of(draft),
        max_len=min(max_len, MAX_LEN),
        shaping=shaping,
        vocab_size=vocab_size,
        num_hidden=num_hidden,
    )


class Replica:
    """The target's copy of a drafter's tree for one request."""

    tree: CandidateCache
    """The candidates that have arrived."""
    is_after_miss: bool
    """True if the last committed token was in no tree and nothing was committed since."""

    def __init__(
        self,
        request_id: int,
        token_ids: Sequence[int],
        draft: DraftSettings,
        params: ResolvedParams,
        *,
        max_len: int,
        vocab_size: int,
        stats: RequestStats,
        shaping: ShapingRule | None = None,
        num_hidden: int = 0,
    ) -> None:
        """Begin with an empty tree.

        Args:
            token_ids: the request's text as the drafter sees it; the caller goes on appending to it.
            max_len: most tokens that the text can get.
            vocab_size: of the target.
            stats: takes the counts of the drafter and of its hits and misses.
            shaping: of ``params``; None if they have none.
            num_hidden: tokens of the prompt that are not in ``token_ids``.
        """
        self._num_hidden = num_hidden
        self._request_id = request_id
        self._token_ids = token_ids
        self._draft = draft
        self._params = params
        self._max_len = max_len
        self._vocab_size = vocab_size
        self._stats = stats
        self._shaping = shaping
        self.tree = self._empty_tree()
        self._tree_len = len(token_ids)  # tokens of the text up to the tree's root
        self._missed: list[int] = []  # lengths of the text after the verifications whose tokens the tree still lacks
        self.is_after_miss = False
        self._known_len = 0  # committed tokens that the drafter is known to hold
        self._next_seq = 0
        self._lost_a_layer = False
        self._epochs_seen = 0
        self._passes_before = 0  # drafter passes of earlier incarnations
        self._busy_before_s = 0.0
        self._dropped_before = self._rolled_back_before = 0
        self._tuned: dict[str, Any] = {}

    def tune(self, **shape: Any) -> None:
        """Set the shape of the drafter's tree from the next message on.

        Args:
            shape: by the names of `Correction`; None keeps the settings.
        """
        self._tuned |= shape

    def open_message(self) -> Open:
        """Return the message that tells a drafter everything about the request."""
        draft = self._draft.replace(**{name: value for name, value in self._tuned.items() if value is not None})
        spec = draft_spec(draft, self._params, self._max_len, self._shaping, self._vocab_size, self._num_hidden)
        return Open(self._request_id, tuple(self._token_ids), spec)

    def correction(self) -> Correction:
        """Return a message with the text after the part that the drafter is known to have."""
        start = min(self._known_len, len(self._token_ids))
        return Correction(
            request_id=self._request_id,
            round_idx=1 + self._stats.target_passes,  # the prefill counts as one
            start=start,
            token_ids=tuple(self._token_ids[start:]),
            wants_snapshot=self._lost_a_layer,
            **self._tuned,
        )

    def forget_drafter(self) -> None:
        """Start over with a new incarnation of the drafter, without any state of the old one."""
        stats = self._stats
        self._missed.clear()
        self._passes_before, self._busy_before_s = stats.drafter_passes, stats.drafter_busy_s
        self._dropped_before = stats.drafter_dropped_nodes
        self._rolled_back_before = stats.rolled_back_tokens
        self._known_len, self._next_seq, self._lost_a_layer, self._epochs_seen = 0, 0, False, 0
        self.tree.restart(0)
        self._tree_len = len(self._token_ids)

    def is_short(self, settings: DraftSettings, deepest: int) -> bool:
        """Return whether the best path is shorter than ``settings`` want before the target verifies.

        Args:
            deepest: layers below the last token that the text still has room for; no more are awaited.
        """
        wanted = min(settings.min_depth, deepest)
        if deepest < 1 or (self.is_after_miss and not settings.waits_after_miss):
            return False
        if self.tree.pending:
            return True
        if settings.verify != "trunk":
            return self.tree.depth < wanted
        trunk = self.tree.query(settings.budget, "trunk")
        return self.tree.depth == len(trunk) < wanted  # it neither branches yet nor is it long enough

    def compare(self, new_ids: Sequence[int]) -> tuple[int, tuple[float, ...]]:
        """Compare the best path with committed tokens, up to the first that differs.

        Returns: how many agree, and the drafter's probability of each that was compared.
        """
        best = self.tree.query(len(new_ids), "chain", len(new_ids))
        num_agreed = next(
            (idx for idx, (token, new_id) in enumerate(zip(best.tokens, new_ids, strict=False)) if token != new_id),
            len(best),
        )
        scores = (0.0, *best.path_logprobs[: num_agreed + 1])
        return num_agreed, tuple(math.exp(score - above) for above, score in pairwise(scores))

    def advance(self, *, is_verified: bool = False) -> None:
        """Move the root along the tokens committed since the last call.

        Args:
            is_verified: a verification committed them, which is a hit if all were in the tree.
        """
        self.is_after_miss = False
        new_ids, self._tree_len = self._token_ids[self._tree_len :], len(self._token_ids)
        if is_verified:
            self._stats.count_drafts(self.tree.num_nodes, self.tree.depth)
        was_hit = self.tree.advance(new_ids) == len(new_ids)
        if is_verified and was_hit:
            self._stats.hits += 1
        elif is_verified:
            self._missed.append(len(self._token_ids))

    def receive(self, message: Layer | Resync) -> list[TargetMessage]:
        """Take a drafter's message about this request and return the replies.

        Raises: ProtocolError if it is malformed; the tree is unchanged then.
        """
        if isinstance(message, Resync):
            self._known_len = max(0, min(message.known_len or 0, len(self._token_ids)))
            return [self.open_message() if message.known_len is None else self.correction()]
        if message.seq < self._next_seq:
            return []  # repeated, or older than a snapshot
        if message.seq > self._next_seq and not message.is_reset:
            self._lost_a_layer = True
            return []
        self._check(message)
        if message.is_reset:
            self._restart(message)
        else:
            self._extend(message)
        self._next_seq = message.seq + 1
        self._known_len = max(self._known_len, message.known_len)
        stats = self._stats
        # A drafter that comes back reuses rows of the answer, too.
        stats.drafter_reused_tokens = min(message.num_reused, stats.num_prompt_tokens)
        stats.drafter_passes = self._passes_before + message.num_passes
        stats.drafter_busy_s = self._busy_before_s + message.busy_s
        stats.drafter_dropped_nodes = self._dropped_before + message.num_dropped
        stats.rolled_back_tokens = self._rolled_back_before + message.num_rolled_back
        return []

    def _restart(self, layer: Layer) -> None:
        fresh = self._empty_tree()  # a malformed layer raises here and keeps the old tree
        fresh.restart(layer.epoch, layer.root_id, self._token_ids[layer.root_position + 1 :])
        fresh.extend(layer.epoch, layer.nodes)
        self.tree, self._tree_len = fresh, len(self._token_ids)
        self._missed.clear()  # what a reset brings was never waited for
        self._stats.drafter_layers += fresh.depth
        self._lost_a_layer = False
        has_begun = len(self._token_ids) > self._num_prompt_tokens
        if layer.epoch != self._epochs_seen and has_begun:
            self._stats.misses += 1
            self.is_after_miss = True
        self._epochs_seen = layer.epoch

    def _extend(self, layer: Layer) -> None:
        tree, stats = self.tree, self._stats
        num_layers = tree.depth - len(tree.pending)
        tree.extend(layer.epoch, layer.nodes)
        stats.drafter_layers += max(1, tree.depth - len(tree.pending) - num_layers)
        settled = len(self._token_ids) - len(tree.pending)
        stats.late_hits += sum(length <= settled for length in self._missed)
        self._missed = [length for length in self._missed if length > settled]

    def _check(self, layer: Layer) -> None:
        """Raise ProtocolError unless this layer is possible for a drafter."""
        text_len = len(self._token_ids)
        if not 0 <= layer.root_position < layer.known_len <= text_len:
            raise ProtocolError(
                f"layer of request {layer.request_id} has root position {layer.root_position} and {layer.known_len} "
                f"known tokens, but the text has {text_len}"
            )
        if max(layer.nodes.tokens, default=0) >= self._vocab_size:
            raise ProtocolError(
                f"layer of request {layer.request_id} has token {max(layer.nodes.tokens)}; the target has tokens 0 to "
                f"{self._vocab_size - 1}"
            )
        began_s, ended_s = layer.pass_span_s or (0.0, 0.0)
        if not -_MAX_SECONDS <= began_s <= ended_s <= _MAX_SECONDS:
            raise ProtocolError(
                f"layer of request {layer.request_id} comes from a pass from {began_s} to {ended_s} s; both must be "
                "numbers in this order"
            )
        counts = (layer.seq, layer.epoch, layer.num_passes, layer.num_dropped, layer.num_rolled_back)
        if (
            not all(0 <= count < MAX_COUNT for count in counts)
            or not 0 <= layer.busy_s <= _MAX_SECONDS
            or not 0 <= layer.num_reused <= text_len
        ):
            raise ProtocolError(
                f"layer of request {layer.request_id} reports {layer.num_passes} passes in {layer.busy_s} s, "
                f"{layer.num_dropped} dropped nodes, {layer.num_rolled_back} of them rolled back, and "
                f"{layer.num_reused} reused tokens; none may be negative or without end"
            )

    @property
    def _num_prompt_tokens(self) -> int:
        return self._stats.num_prompt_tokens - self._num_hidden

    def _empty_tree(self) -> CandidateCache:
        return CandidateCache(max_nodes=self._draft.max_nodes)
