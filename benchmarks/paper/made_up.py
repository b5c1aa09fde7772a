"""A made-up pair that behaves like a published one: how often, and how badly, its drafter is wrong is fitted.

Only tokens per pass and misses of the published pair are known. At each place of a made-up text the drafter's first
choice has a probability of its own, drawn from a beta distribution, and is right so often; where it is wrong, the right
token is the j-th of the others with a probability that falls as j to the power of minus ``tail``. Candidates have the
probabilities that they say.

`fit` looks for the constants below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from card.tools.planner.recording import Recording
from card.tools.planner.synthetic import make_text

_VOCAB_SIZE = 4096
_NUM_CANDIDATES = 64
_NUM_TARGET_IDS = 4
_PROMPT_TOKENS = 32
_LEAST, _SUREST = 0.05, 1.0 - 1e-6


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What is fitted."""

    agreement: float  # share of places at which the drafter's first choice is right
    spread: float  # of its sureness: the parameters of the beta distribution sum to this; small: sure or lost
    tail: float  # how fast further candidates become unlikely


FITTED: Mapping[str, Behaviour] = {  # to card's published counts for Llama-3.2-1B -> Llama-3.1-70B
    "gsm8k": Behaviour(0.91, 1.5, 1.4),
    "mt-bench": Behaviour(0.73, 1.5, 1.3),
}


def make_recording(behaviour: Behaviour, *, num_texts: int = 8, num_tokens: int = 160, seed: int = 0) -> Recording:
    """Return a recording of a pair that behaves so."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(num_texts):
        weights = np.arange(1, _NUM_CANDIDATES, dtype=float) ** -behaviour.tail
        weights /= weights.sum()
        mean = (behaviour.agreement - _LEAST) / (1.0 - _LEAST)
        drawn = rng.beta(mean * behaviour.spread, (1.0 - mean) * behaviour.spread, num_tokens)
        firsts = np.minimum(_LEAST + (1.0 - _LEAST) * drawn, _SUREST)
        is_right = rng.random(num_tokens) < firsts
        ranks = np.where(is_right, 0, 1 + rng.choice(_NUM_CANDIDATES - 1, num_tokens, p=weights))
        num_ids = _NUM_CANDIDATES + _NUM_TARGET_IDS
        ids = np.stack([rng.choice(_VOCAB_SIZE, num_ids, replace=False) for _ in range(num_tokens)])
        prompt_ids = rng.choice(_VOCAB_SIZE, _PROMPT_TOKENS, replace=False).tolist()
        texts.append(make_text(prompt_ids, ids, ranks.tolist(), firsts, weights))
    return Recording(
        target="made up",
        draft="made up",
        seed=seed,
        source=f"made up: {behaviour}",
        vocab_size=_VOCAB_SIZE,
        max_tokens=num_tokens,
        num_candidates=_NUM_CANDIDATES,
        num_target_ids=_NUM_TARGET_IDS,
        texts=tuple(texts),
    )
