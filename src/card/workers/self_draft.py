"""Self-speculation: the target drafts for itself, reading only the KV rows that mattered in the last verification.

A drafting pass reads the chosen rows of each layer and KV head and the newest rows. The verification drops the rows
that drafting wrote and runs the same tokens over all rows, so nothing of a draft stays. Its attention says which rows
the next drafts read. Sources: SparseSpec, arXiv:2512.01278; Vegas, arXiv:2602.07223.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from card.config.selection import ScoreKind, SelectionRule
from card.models.protocol import Extension
from card.models.selection import ChosenRows, choose_rows
from card.tree.nodes import Nodes
from card.writers.local.protocol import Observation, WriterSequence

SELF = "self"  # the name of a model that drafts for itself among the writers
_LEAST_LOGPROB = -100.0  # of a drafted token, however unlikely its own pass found it


class SelfDraft(WriterSequence):
    """The draft that one request has made for itself since its last verification."""

    def __init__(self, rule: SelectionRule, length: int) -> None:
        """Begin with nothing drafted; ``length`` tokens are drafted between two verifications at most."""
        self._rule, self._length = rule, length
        self._reads: ChosenRows | None = None  # None: nothing is drafted before the next verification
        self._path_logprobs: list[float] = []
        self.token_ids: list[int] = []

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        """Return what was drafted."""
        return Nodes.chain(self.token_ids[:budget], self._path_logprobs[:budget])

    def observe(self, seen: Observation) -> None:
        """Forget the draft: it was verified, or its text has changed."""
        self.forget()

    def close(self) -> None:
        """Do nothing: the rows belong to the request's sequence."""

    def forget(self) -> None:
        """Draft nothing until rows have been chosen again."""
        self._reads = None
        self.token_ids, self._path_logprobs = [], []

    def has_room(self, deepest: int) -> bool:
        """Return whether one more token can be drafted; ``deepest``: most candidates that can become text."""
        return self._reads is not None and len(self.token_ids) < min(self._length, deepest)

    def scores_for(self, num_rows: int) -> ScoreKind | None:
        """Return the scores that a verification keeps of a text of so many rows; None if drafts would read them all."""
        return self._rule.scores if self._rule.num_read(num_rows) < num_rows else None

    def choose(self, scores: Tensor, num_rows: int) -> None:
        """Choose what the next drafts read: the best of the rows that were scored, and all rows since.

        Args:
            scores: [L, Hkv, S] of the S rows that the verification found.
            num_rows: of the text, after it.
        """
        since = scores.shape[2]
        num_newest = num_rows - since + self._length  # at the end of the draft
        count = max(0, self._rule.num_read(num_rows) - num_newest)
        self._reads = ChosenRows(choose_rows(scores, count), since)

    def extension(self, slot: int, last_id: int, num_rows: int) -> Extension:
        """Return the next drafting pass over a text of ``num_rows`` rows, whose last token has none yet."""
        token_id = self.token_ids[-1] if self.token_ids else last_id
        return Extension(slot, [token_id], [num_rows + len(self.token_ids) - 1], reads=self._reads)

    def take(self, token_id: int, logits: Tensor) -> None:
        """Add a token to the draft, chosen by ``logits`` [V]."""
        logprob = float(logits[token_id] - torch.logsumexp(logits.float(), -1))
        above = self._path_logprobs[-1] if self._path_logprobs else 0.0
        self.token_ids.append(token_id)
        self._path_logprobs.append(above + min(0.0, max(logprob, _LEAST_LOGPROB)))
