"""Self-speculation: the target drafts for itself, reading only the KV rows that mattered in the last verification.

A drafting pass reads the chosen rows of each layer and KV head and the newest rows. The verification drops the rows
written by drafting and runs the same tokens over all rows, so drafting leaves no trace in the KV cache. Its attention
scores choose the rows for the next drafts. A drafting pass may itself verify candidates found earlier in the text, and
so draft several tokens. Sources: SparseSpec, arXiv:2512.01278; Vegas, arXiv:2602.07223; SpecPV, arXiv:2512.02337.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from card.config.selection import ScoreKind, SelfDrafting
from card.drafting.local.protocol import Observation, WriterSequence
from card.models.protocol import Extension
from card.models.rows.selection import ChosenRows, choose_blocks, choose_rows
from card.tree.logits import FloatArray, log_softmax
from card.tree.nodes import Nodes

SELF = "self"  # writer name of a self-drafting model
_LEAST_LOGPROB = -100.0  # floor for a drafted token


class SelfDraft(WriterSequence):
    """One request's own draft since its last verification."""

    def __init__(self, settings: SelfDrafting, length: int) -> None:
        """Begin with an empty draft; at most ``length`` tokens are drafted between two verifications."""
        self._rule, self._length = settings.rule, length
        self._num_looked_up = settings.num_looked_up
        self._reads: ChosenRows | None = None  # None: no drafting before the next verification
        self._path_logprobs: list[float] = []
        self.token_ids: list[int] = []

    @property
    def has_phases(self) -> bool:
        """True if it verifies in rounds of its phase; False: as soon as its draft is full."""
        return not self._num_looked_up

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        """Return the draft."""
        return Nodes.chain(self.token_ids[:budget], self._path_logprobs[:budget])

    def observe(self, seen: Observation) -> None:
        """Drop the draft: it was verified, or its text has changed."""
        self.forget()

    def close(self) -> None:
        """Do nothing: the rows belong to the request's sequence."""

    def forget(self) -> None:
        """Draft nothing until rows are chosen again."""
        self._reads = None
        self.token_ids, self._path_logprobs = [], []

    def has_room(self, deepest: int) -> bool:
        """Return whether one more token can be drafted; ``deepest``: most candidates that can become text."""
        return self._reads is not None and len(self.token_ids) < min(self._length, deepest)

    def scores_for(self, num_rows: int) -> ScoreKind | None:
        """Return the scores that a verification keeps of a text of so many rows; None if drafts would read them all."""
        return self._rule.scores if self._rule.num_read(num_rows) < num_rows else None

    def choose(self, scores: FloatArray, num_rows: int) -> None:
        """Choose the rows for the next drafts: the best scored rows, and all rows since.

        Args:
            scores: [L, Hkv, S] of the S rows that the verification found.
            num_rows: of the text, after it.
        """
        since, rule, num_read = scores.shape[2], self._rule, self._rule.num_read(num_rows)
        if rule.scores == "bounds":
            ends = {"num_first": rule.num_first, "num_last": rule.num_last}
            rows = choose_blocks(scores, num_read - rule.num_first - rule.num_last, **ends)
        else:
            num_newest = num_rows - since + self._length  # including the draft
            rows = choose_rows(scores, max(0, num_read - num_newest))
        self._reads = ChosenRows(rows, since)

    def candidates(self, token_ids: Sequence[int], deepest: int) -> list[int]:
        """Return candidates for the next drafting pass: what followed the text's last tokens earlier in it."""
        room = min(self._num_looked_up, min(self._length, deepest) - len(self.token_ids) - 1)
        return looked_up([*token_ids, *self.token_ids], room) if room > 0 else []

    def extension(self, slot: int, last_id: int, num_rows: int, candidates: Sequence[int]) -> Extension:
        """Return the next drafting pass over a text of ``num_rows`` rows, whose last token has none yet."""
        new_ids = [self.token_ids[-1] if self.token_ids else last_id, *candidates]
        first = num_rows + len(self.token_ids)
        return Extension(slot, new_ids, range(first - 1, first - 1 + len(new_ids)), reads=self._reads)

    def take(self, token_id: int, logits: FloatArray) -> None:
        """Add a token to the draft, chosen by ``logits`` [V]."""
        logprob = log_softmax(logits).item(token_id)
        above = self._path_logprobs[-1] if self._path_logprobs else 0.0
        self.token_ids.append(token_id)
        self._path_logprobs.append(above + min(0.0, max(logprob, _LEAST_LOGPROB)))


def looked_up(token_ids: Sequence[int], most: int) -> list[int]:
    """Return up to ``most`` tokens that followed the latest earlier occurrence of the last 3 tokens, or else of 2."""
    text = np.asarray(token_ids)
    for size in (3, 2):
        if len(text) <= size:
            continue
        found = np.ones(len(text) - size, np.bool_)
        for i in range(size):
            found &= text[i : len(text) - size + i] == text[len(text) - size + i]
        places = found.nonzero()[0]
        if len(places):
            start = int(places[-1]) + size
            return [int(token) for token in text[start : start + most]]
    return []
