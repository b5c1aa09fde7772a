"""Shape a draft as the request's text is shaped: by penalties, biases and a grammar."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from card.config import Grammar, ShapingRule
from card.errors import TargetError
from card.tree.logits import Logits, as_array
from card.tree.masks import GrammarState, MasksAtOnce, Path, TimeSpent
from card.tree.shaping import Shaping

logger = logging.getLogger(__name__)

_LIMIT_S, _STEP_LIMIT_S = 1.0, 0.1  # of all steps of a text's grammar, and of one step; a slower grammar is dropped

FindGrammar = Callable[[Grammar], GrammarState | None]
"""Returns the initial state of a grammar; None if there is none here, or not yet."""


class DraftShaping:
    """Follows one text. Shaping a draft is optional: a missing or failing grammar is ignored."""

    def __init__(self, rule: ShapingRule, token_ids: Sequence[int], vocab_size: int, find: FindGrammar | None) -> None:
        """Begin with a text.

        Args:
            find: returns the grammar once it is there, and is called until then; None: there is no grammar.
        """
        self._rule = rule
        self._vocab_size = vocab_size
        self._find = find if rule.grammar is not None else None
        self._shaping = Shaping(rule, token_ids, vocab_size)
        self._token_ids = list(token_ids)

    def commit(self, new_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        self._token_ids += new_ids
        self._shaping.commit(new_ids)

    def apply(self, logits: Logits, paths: Sequence[Path]) -> Logits:
        """Return the shaped logits, see `Shaping.apply`; a row that would lose all its tokens stays as it is."""
        self._look_for_the_grammar()
        try:
            shaped = self._shaping.apply(logits, paths)
        except TargetError as error:
            logger.warning("drafting goes on without the grammar of a request: %s", error)
            self._shaping = Shaping(self._rule, self._token_ids, self._vocab_size)
            shaped = self._shaping.apply(logits, paths)
        if shaped is logits:
            return logits
        array = as_array(shaped)
        is_empty = array.max(-1, keepdims=True) == -np.inf
        return np.where(is_empty, as_array(logits), array) if is_empty.any() else array

    def _look_for_the_grammar(self) -> None:
        if self._find is None or self._rule.grammar is None:
            return
        grammar = self._find(self._rule.grammar)
        if grammar is not None:
            self._find = None
            masks = MasksAtOnce(grammar, TimeSpent(_LIMIT_S, _STEP_LIMIT_S))
            self._shaping = Shaping(self._rule, self._token_ids, self._vocab_size, masks)
