"""Changes of the target's logits before a token is chosen: grammar, biases and penalties.

What comes out is a pure function of the logits, of the rule and of the text before the position: the prompt, the new
tokens, and the candidates on the path to it. So a candidate's logits are shaped exactly as they will be if it becomes
text, and no token depends on what was proposed. A drafter that knows the rule shapes its own logits in the same way.

Order: masks (grammar, then end tokens that come too early), biases, penalties. Temperature and cuts follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from card.config import ShapingRule
from card.tree.logits import FloatArray, Logits, as_array
from card.tree.masks import Masks, Path

_NEGATIVE_INFINITY = float("-inf")


class Shaping:
    """Changes the logits of one request, whose text it follows."""

    def __init__(
        self, rule: ShapingRule, token_ids: Sequence[int], vocab_size: int, masks: Masks | None = None
    ) -> None:
        """Begin with a text.

        Args:
            token_ids: prompt, and new tokens if there are some already.
            masks: of the grammar, at its beginning; None leaves the grammar of the rule out.
        """
        self.rule = rule
        self._masks = masks
        self._num_new = 0
        self._vocab_size = vocab_size
        self._end_ids = [token_id for token_id in rule.end_ids if token_id < vocab_size]
        known = [(token_id, value) for token_id, value in rule.logit_bias if token_id < vocab_size]
        self._biased_ids = np.array([token_id for token_id, _ in known], np.int64)
        self._biases = np.array([value for _, value in known], np.float64)
        prompt_ids = token_ids[: rule.num_prompt_tokens]
        self._tally = _Tally(prompt_ids if rule.repetition_penalty != 1.0 else ()) if rule.has_penalties else None
        self.commit(token_ids[rule.num_prompt_tokens :])

    def commit(self, new_ids: Sequence[int]) -> None:
        """Take committed tokens."""
        if self._masks is not None:
            self._masks.advance(new_ids)
        self._num_new += len(new_ids)
        if self._tally is not None:
            self._tally.commit(new_ids)

    def apply(self, logits: Logits, paths: Sequence[Path]) -> Logits:
        """Return the shaped logits.

        Args:
            logits: [N, V], unchanged on return; row i follows the text and paths[i].
        Returns: [N, V]; float32, or float64 if the logits are; -inf where a token is ruled out.
        Raises: TargetError if the grammar is too costly to follow, or the text does not keep to it.
        """
        is_early = np.array([self._num_new + len(path) < self.rule.min_tokens for path in paths], np.bool_)
        if self._masks is None and self._tally is None and not len(self._biases) and not is_early.any():
            return logits
        shaped = np.array(as_array(logits))
        if self._masks is not None:
            allowed = _fitted(self._masks.rows(paths), self._vocab_size)
            shaped[~allowed] = _NEGATIVE_INFINITY
            if is_early.any():  # where the grammar lets nothing follow but the end, the text ends early
                allowed[:, self._end_ids] = False
                is_early &= allowed.any(-1)
        if is_early.any() and self._end_ids:
            shaped[np.flatnonzero(is_early)[:, None], self._end_ids] = _NEGATIVE_INFINITY
        if len(self._biases):
            shaped[:, self._biased_ids] += self._biases.astype(shaped.dtype)
        if self._tally is not None:
            self._penalise(shaped, self._tally.rows(paths))
        return shaped

    def _penalise(self, shaped: FloatArray, tally: TallyRows) -> None:
        """Take the penalties off the logits of all tokens that occur, in place.

        Source: repetition: Keskar et al. 2019, arXiv:1909.05858, section 4.1, for logits below 0 as in transformers;
        presence and frequency: OpenAI's API reference.
        """
        rule, kind = self.rule, shaped.dtype.type
        scores = shaped[:, tally.ids]
        if rule.repetition_penalty != 1.0:
            factor = kind(rule.repetition_penalty)
            penalised = np.where(scores > 0, scores / factor, scores * factor)
            scores = np.where(tally.is_in_text, penalised, scores)
        if rule.frequency_penalty != 0.0 or rule.presence_penalty != 0.0:
            loss = rule.frequency_penalty * tally.counts + rule.presence_penalty * (tally.counts > 0)
            scores = scores - loss.astype(shaped.dtype)
        shaped[:, tally.ids] = scores


@dataclass(frozen=True, slots=True)
class TallyRows:
    """Counts of tokens before each of N positions; U of them, those that occur at all included."""

    ids: npt.NDArray[np.int64]  # [U]
    counts: npt.NDArray[np.int64]  # [N, U] among the new tokens and on the path
    is_in_text: npt.NDArray[np.bool_]  # [N, U] there, or in the prompt


class _Tally:
    """Counts the tokens of a text. Costs what the text has of different tokens, not the vocabulary."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        """Begin with a prompt whose tokens count as present; empty where the prompt does not matter."""
        prompt = dict.fromkeys(prompt_ids)
        self._column_of = {token_id: column for column, token_id in enumerate(prompt)}
        self._ids = np.array(list(prompt), np.int64)
        self._counts = np.zeros(len(prompt), np.int64)
        self._num_of_prompt = len(prompt)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Count new tokens."""
        for column in self._columns(token_ids):
            self._counts[column] += 1

    def rows(self, paths: Sequence[Path]) -> TallyRows:
        """Return the counts behind the text and each path."""
        columns = [self._columns(path) for path in paths]
        counts = np.repeat(self._counts[None], len(paths), axis=0)
        for row, of_row in enumerate(columns):
            for column in of_row:
                counts[row, column] += 1
        is_in_text = counts > 0
        is_in_text[:, : self._num_of_prompt] = True
        return TallyRows(self._ids, counts, is_in_text)

    def _columns(self, token_ids: Sequence[int]) -> list[int]:
        """Return the columns of tokens; a token that was on a path keeps its column, with a count of 0."""
        columns = [self._column_of.setdefault(token_id, len(self._column_of)) for token_id in token_ids]
        if len(self._column_of) > len(self._ids):
            self._ids = np.array(list(self._column_of), np.int64)
            self._counts = np.concatenate((self._counts, np.zeros(len(self._ids) - len(self._counts), np.int64)))
        return columns


def _fitted(allowed: npt.NDArray[np.bool_], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return the columns of ``vocab_size`` tokens; those that the grammar does not know are not allowed."""
    if allowed.shape[1] >= vocab_size:
        return allowed[:, :vocab_size]
    return np.pad(allowed, ((0, 0), (0, vocab_size - allowed.shape[1])))
