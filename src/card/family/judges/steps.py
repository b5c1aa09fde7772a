"""Steps: a draft model's step stays whole if a learned reward finds it as good as the target's own.

A step ends with a line, or with the answer. Where the draft model departs from the target's choice, the judge looks
ahead to the end of the drafted step. The target has read it in the same pass, and a logistic regression on its last
hidden state there predicts whether the step loses the right answer. If not, the step stays; else the target writes a
token of its own, and what the draft model makes of the rest of the line is judged again.
Source: Arbitrage, arXiv:2512.05033, whose router is a language model of 1.5 B parameters that sees the text alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import numpy as np

from card.family.judges.auto import AutoJudge, PairFacts
from card.family.judges.judge import Mismatch
from card.kernels.number_types import Array, Floats
from card.models.files.trained_file import TrainedFile
from card.tree.nodes import Nodes

STEP_END = "\n"  # a token with it ends a step


def step_ends(text_of: Callable[[int], str], vocab_size: int, end_ids: frozenset[int]) -> frozenset[int]:
    """Return the tokens that end a step: those whose text has a line's end, and those that end an answer."""
    return end_ids | {token_id for token_id in range(vocab_size) if STEP_END in text_of(token_id)}


def last_of_step(offer: Nodes, node: int, ends: frozenset[int]) -> int | None:
    """Return the candidate that ends the step which ``node`` is in, along likeliest children; None if there is none."""
    child_of = dict(zip(reversed(offer.parents), reversed(range(len(offer.parents))), strict=True))  # the first of each
    last: int | None = node
    while last is not None and offer.tokens[last] not in ends:
        last = child_of.get(last)
    return last


class StepReward(AutoJudge):
    """Tolerate mismatches in a step that loses the right answer with a probability below the knob; with 0 none."""

    FILE: ClassVar = TrainedFile("reward", "card-reward-1", "card train reward")

    def __init__(
        self,
        weights: Floats,
        bias: float,
        *,
        usual: float,
        pair: PairFacts,
        knob: float | None,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        """Make the reward from its regression.

        Args:
            ends: tokens that end a step, as of `step_ends`; others as of `AutoJudge`.
        """
        super().__init__(weights, bias, usual=usual, pair=pair, knob=knob)
        self.ends = ends

    @classmethod
    def _of(cls, facts: Mapping[str, str], arrays: dict[str, Array], knob: float | None) -> Self:
        made = super()._of(facts, arrays, knob)
        made.ends = frozenset(arrays["ends"].astype(np.int64).tolist())
        return made

    def _arrays(self) -> dict[str, Array]:
        return {**super()._arrays(), "ends": np.array(sorted(self.ends), dtype=np.int64)}

    def tolerates(self, mismatch: Mismatch) -> bool:
        """Return whether the candidate's step stays; one that the candidates do not end does not."""
        last = last_of_step(mismatch.seen.offer, mismatch.candidate, self.ends)
        if last is None:
            return False
        assert mismatch.seen.features is not None, "the reward's features were requested"
        return self.importance(mismatch.seen.features[last + 1]) < self.knob
