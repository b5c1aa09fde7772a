"""A target that drafts for itself: which requests do so, which rows their drafts read, and the cost in KV reads."""

from __future__ import annotations

from collections.abc import Iterable

from card.config.selection import SelfDrafting
from card.engine.request import Request
from card.engine.self_draft import SelfDraft
from card.engine.target_pass import DraftPass, Pass
from card.errors import SettingsError
from card.models.protocol import LanguageModel, Recurrent, Selective


class SelfDrafter:
    """Manages the drafts of all requests of a target."""

    def __init__(self, model: LanguageModel, settings: SelfDrafting) -> None:
        """Take the target's model. Raises: SettingsError if its passes cannot read chosen KV rows."""
        if not isinstance(model, Selective) or isinstance(model, Recurrent):
            state = "it keeps a recurrent state, and " if isinstance(model, Recurrent) else ""
            raise SettingsError(
                f"this target cannot draft for itself: {state}its passes cannot read chosen KV rows; use another method"
            )
        self._model, self._settings = model, settings

    def open(self, request: Request) -> SelfDraft | None:
        """Return the draft of a new request; None if it wants no speculation."""
        if not request.params.speculates:
            return None
        return SelfDraft(self._settings, request.draft.num_speculative_tokens, request.prompt_ids)

    def count_reads(self, passes: Iterable[Pass | DraftPass]) -> None:
        """Count the bytes of KV read by decoding passes; call it before their results are committed."""
        for one in passes:
            sequence, stats = one.sequence, one.sequence.stats
            if sequence.is_prefilling:
                continue
            num_bytes = self._model.bytes_read(self._model.num_rows(sequence.slot), one.extension.reads)
            if isinstance(one, DraftPass):
                stats.self_draft_passes += 1
                stats.draft_kv_bytes += num_bytes
            else:
                stats.verify_kv_bytes += num_bytes

    def choose_rows(self, one: Pass) -> None:
        """Choose the rows for a text's next drafts, after a verification that kept scores."""
        sequence = one.sequence
        if one.extension.scores is None or sequence.is_prefilling:
            return
        assert sequence.self_draft is not None
        sequence.self_draft.choose(self._model.attention_scores.of(sequence.slot), len(sequence.token_ids))
