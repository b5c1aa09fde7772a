"""The slow reference of what shapes a target's logits, in plain Python, and a toy grammar; shared by several tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from card.config import SamplingParams, SamplingRule
from card.errors import TargetError
from card.tree.masks import GrammarState, Path
from card.tree.sampling import Sampler
from tests.toy import TableModel

TOY_VOCAB_SIZE = 12

shapings = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-0.7, 0.3, 2.0]),
        "repetition_penalty": st.sampled_from([0.6, 1.3, 3.0]),
        "logit_bias": st.dictionaries(st.integers(0, 11), st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=4),
        "min_tokens": st.integers(0, 12),
    },
)


def slowly_shaped(
    logits: Sequence[float], params: SamplingParams, prompt_ids: Sequence[int], new_ids: Sequence[int], ends: frozenset
) -> list[float]:
    """Return the shaped logits after a text, token by token."""
    params = params.resolved()
    shaped = list(logits)
    if len(new_ids) < params.min_tokens:
        for token in ends:
            shaped[token] = -math.inf
    for token, bias in params.logit_bias.items():
        shaped[token] += bias
    for token in {*prompt_ids, *new_ids}:
        factor = params.repetition_penalty
        shaped[token] = shaped[token] / factor if shaped[token] > 0 else shaped[token] * factor
    for token in set(new_ids):
        shaped[token] -= params.frequency_penalty * list(new_ids).count(token) + params.presence_penalty
    return shaped


def slow_decode(
    target: TableModel, params: SamplingParams, prompt_ids: Sequence[int], ends: frozenset = frozenset()
) -> list[int]:
    """Return the new tokens of plain decoding, one at a time, each from its text run afresh."""
    params = params.resolved()
    sampler = Sampler(SamplingRule.of(params), target.vocab_size)
    new_ids: list[int] = []
    limit = min(params.max_tokens, target.max_model_len - len(prompt_ids))
    while len(new_ids) < limit and not (new_ids and new_ids[-1] in ends):
        text = [*prompt_ids, *new_ids]
        row = target.logits_after(text)
        shaped = slowly_shaped(row.tolist(), params, prompt_ids, new_ids, ends)
        new_ids += sampler.choose(np.array([shaped], row.dtype), [len(text)])
    return new_ids


def permits(state: GrammarState, paths: Sequence[Path], ends: frozenset[int] = frozenset({0, 1})) -> list[bool]:
    """Return of each path whether the text may go on with it, a token at a time."""

    def may_follow(path: Path, idx: int) -> bool:
        row = state.allowed([path[:idx]])[0]
        return path[idx] < len(row) and bool(row[path[idx]]) and not ends & set(path[:idx])

    return [all(may_follow(path, idx) for idx in range(len(path))) for path in paths]


class ToyGrammar:
    """A grammar over the tokens 0 .. 11: neighbours differ by no multiple of 3, and 11 ends it after a few tokens."""

    END = 11

    def __init__(self, length: int) -> None:
        self._length = length
        self._text: tuple[int, ...] = ()

    def fork(self) -> ToyGrammar:
        return type(self)(self._length)

    def follows(self, text: Sequence[int]) -> list[bool]:
        """Return which tokens may follow a text that keeps to the grammar."""
        if len(text) >= self._length:
            return [token == self.END for token in range(TOY_VOCAB_SIZE)]
        return [token != self.END and (not text or (token - text[-1]) % 3 != 0) for token in range(TOY_VOCAB_SIZE)]

    def has(self, text: Sequence[int]) -> bool:
        """Return whether a text keeps to the grammar."""
        before = [text[:i] for i in range(len(text))]
        return all(self.END not in prefix and self.follows(prefix)[text[len(prefix)]] for prefix in before)

    def advance(self, token_ids: Sequence[int]) -> None:
        self._text += tuple(token_ids)

    def forced(self, path: Path) -> Sequence[int]:
        found: list[int] = []
        while (row := self.follows((*self._text, *path, *found))).count(True) == 1 and not row[self.END]:
            found.append(row.index(True))
        return found

    def allowed(self, paths: Sequence[Path]) -> np.ndarray:
        if not self.has(self._text):
            raise TargetError("not of the grammar")
        texts = [(*self._text, *path) for path in paths]
        lost = [True] * TOY_VOCAB_SIZE
        rows = [self.follows(text) if self.has(text) and self.END not in text else lost for text in texts]
        return np.array(rows, np.bool_)
