"""Consumers of the target's features: each sees the rows that a pass added to a text.

Consumers are optional: one that fails is not called again, and decoding goes on. A verifier may need features too,
those of all rows with logits, before anything is decided.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from card.config.fields import require
from card.engine.target_pass import Pass
from card.errors import in_words
from card.models.features import FINAL, FeatureConsumer, Features, FeatureWish, SeenRows
from card.tree.logits import FloatArray

logger = logging.getLogger(__name__)


class Watchers:
    """All consumers of one model's features."""

    def __init__(
        self,
        features: Features,
        consumers: Sequence[FeatureConsumer],
        verifier_wish: FeatureWish | None = None,
        *,
        for_writers: bool = False,
    ) -> None:
        """Tell the model which features to keep. Raises: ModelError if it lacks a layer.

        Args:
            verifier_wish: for rows with logits; None: the verifier needs no features.
            for_writers: a local writer needs the last hidden states of rows with logits.
        """
        self._writers_wish = FeatureWish((FINAL,), "logits") if for_writers else None
        wishes = [*(one.wish for one in consumers), verifier_wish, self._writers_wish]
        features.wish([wish for wish in wishes if wish is not None])
        self._features, self._verifier_wish = features, verifier_wish
        self._heard = list(consumers)

    def for_verifier(self, extension_idx: int) -> FloatArray | None:
        """Return the verifier's features of the last pass: [rows with logits, F]; None if it needs none."""
        return None if self._verifier_wish is None else self._features.of(extension_idx, self._verifier_wish)

    def for_writers(self, extension_idx: int) -> FloatArray | None:
        """Return the local writers' features of the last pass: [rows with logits, D]; None if they need none."""
        return None if self._writers_wish is None else self._features.of(extension_idx, self._writers_wish)

    def show(self, extension_idx: int, one: Pass, first: int) -> float | None:
        """Show the rows that a pass added to a text; ``first`` is the position of the first new row.

        Returns: as `FeatureConsumer.observe`; the last consumer that returns a value decides.
        """
        branch_below: float | None = None
        for consumer in list(self._heard):
            try:
                seen = self._seen(consumer, extension_idx, one, first)
                hint = None if seen is None else consumer.observe(seen)
                if hint is not None:
                    require(0.0 <= hint <= 1.0, "branch_below", "from 0 to 1", hint)
                    branch_below = hint
            except Exception as error:
                self._heard.remove(consumer)
                what = in_words(error)
                logger.warning("a consumer of features failed and is not called again: %s", what, exc_info=error)
        return branch_below

    def _seen(self, consumer: FeatureConsumer, extension_idx: int, one: Pass, first: int) -> SeenRows | None:
        """Return the new rows that a consumer wants; None if it wants none of them."""
        sequence, wish = one.sequence, consumer.wish
        num_chain = one.num_chain
        rows = list(range(num_chain))
        if one.verdict is not None:
            rows += [num_chain + idx for idx in one.verdict.accepted[: one.num_kept]]
        end = first + len(rows)
        if wish.rows != "all":  # these features begin at the first row with logits
            num_left_out = one.extension.first_logits_idx
            rows = [row - num_left_out for row in rows[num_left_out:]]
        if wish.rows == "last":
            rows = rows[-1:]
        if not rows:
            return None
        return SeenRows(
            request_id=sequence.request.request_id,
            token_ids=sequence.token_ids,
            first=end - len(rows),
            features=self._features.of(extension_idx, wish)[rows],
            has_drafter=sequence.request.uses_drafter,
            hidden=sequence.request.hidden,
        )
