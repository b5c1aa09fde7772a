"""Self-speculation: the target drafts for itself, reading only the KV rows that mattered in the last verification.

A drafting pass reads the chosen rows of each layer and KV head and the newest rows. The verification drops the rows
written by drafting and runs the same tokens over all rows, so drafting leaves no trace in the KV cache. Its attention
scores choose the rows for the next drafts. A drafting pass may itself verify a tree of what followed the same tokens
earlier in the text, and so draft several tokens. Sources: SparseSpec, arXiv:2512.01278; Vegas, arXiv:2602.07223;
SpecPV, arXiv:2512.02337.
"""

from __future__ import annotations

from collections.abc import Sequence

from card.config.selection import ScoreKind, SelfDrafting
from card.drafting.local.protocol import Observation, WriterSequence
from card.drafting.local.suffix import SuffixAutomaton, best_first
from card.models.protocol import Extension
from card.models.rows.selection import ChosenRows, choose_blocks, choose_rows
from card.tree.logits import FloatArray, log_softmax
from card.tree.nodes import NO_NODES, ROOT, Nodes

SELF = "self"  # writer name of a self-drafting model
_LEAST_LOGPROB = -100.0  # floor for a drafted token


class SelfDraft(WriterSequence):
    """One request's own draft since its last verification."""

    def __init__(self, settings: SelfDrafting, length: int, prompt_ids: Sequence[int]) -> None:
        """Begin with an empty draft; at most ``length`` tokens are drafted between two verifications."""
        self._rule, self._length = settings.rule, length
        self._num_looked_up = settings.num_looked_up
        self._reads: ChosenRows | None = None  # None: no drafting before the next verification
        self._path_logprobs: list[float] = []
        self.token_ids: list[int] = []
        self._text = SuffixAutomaton()  # of what is committed; empty if no candidates are wanted
        self._extend(prompt_ids)

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
        self._extend(seen.new_ids)

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

    def candidates(self, deepest: int) -> Nodes:
        """Return candidates for the next drafting pass: what followed the longest earlier match of text and draft."""
        room = min(self._num_looked_up, min(self._length, deepest) - len(self.token_ids) - 1)
        if room < 1:
            return NO_NODES
        match = self._text.longest_repeated_suffix()
        for token in self.token_ids:
            match = self._text.after(match, token)
        return best_first(match, self._text.followers, room)

    def extension(self, slot: int, last_id: int, num_rows: int, candidates: Nodes) -> Extension:
        """Return the next drafting pass over a text of ``num_rows`` rows, whose last token has none yet."""
        root = num_rows + len(self.token_ids)
        token_ids = [self.token_ids[-1] if self.token_ids else last_id, *candidates.tokens]
        parents = [root - 1, *(root if parent == ROOT else root + 1 + parent for parent in candidates.parents)]
        return Extension(slot, token_ids, parents, reads=self._reads)

    def take(self, token_id: int, logits: FloatArray) -> None:
        """Add a token to the draft, chosen by ``logits`` [V]."""
        logprob = log_softmax(logits).item(token_id)
        above = self._path_logprobs[-1] if self._path_logprobs else 0.0
        self.token_ids.append(token_id)
        self._path_logprobs.append(above + min(0.0, max(logprob, _LEAST_LOGPROB)))

    def _extend(self, token_ids: Sequence[int]) -> None:
        if self._num_looked_up:
            for token in token_ids:
                self._text.extend(token)
