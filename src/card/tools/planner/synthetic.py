"""A synthetic recording, for plans without a pair, from one number: how often the drafter's first choice is right."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from card.config.registry import methods
from card.errors import PlanError
from card.tools.planner.own_drafts import has_own_drafter
from card.tools.planner.recording import RecordedText, Recording, Rows, pack_text

_OWN_DRAFTERS = tuple(name for name, one in methods().items() if has_own_drafter(one) and not one.needs_head)
_VOCAB_SIZE = 2048
_NUM_CANDIDATES, _NUM_TARGET_IDS = 16, 8
_PROMPT_TOKENS = 64
_SPREAD = 1.5  # of the drafter's confidence over places: the sum of the parameters of a beta distribution
_NEXT_SHARE = 0.55  # of the remaining probability, taken by each further candidate
_LEAST_FIRST, _SUREST = 0.08, 1.0 - 1e-6  # probability of a first choice


def make_synthetic(agreement: float, *, num_texts: int = 8, num_tokens: int = 128, seed: int = 0) -> Recording:
    """Return a recording whose drafter is right with its first choice in a share ``agreement`` of all places.

    The drafter's confidence varies from place to place, and is calibrated: a candidate of probability p is right in a
    share p of its places. A drafter of one method's own is right as often; candidates of a head are not made up.
    Tokens are drawn uniformly and hardly repeat, so that writers without a model find nothing in such texts.

    Raises: PlanError for an agreement outside [0, 1], or for no texts or tokens.
    """
    if not 0.0 <= agreement <= 1.0:
        raise PlanError(f"the agreement of a synthetic recording must be from 0 to 1, got {agreement}")
    if num_texts < 1 or num_tokens < 2:
        raise PlanError(f"a synthetic recording needs 1 text and 2 tokens or more, got {num_texts} and {num_tokens}")
    rng, own_rng = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    return Recording(
        target="synthetic",
        draft="synthetic",
        source=f"made up: agreement {agreement:g}, seed {seed}",
        vocab_size=_VOCAB_SIZE,
        seed=seed,
        max_tokens=num_tokens,
        num_candidates=_NUM_CANDIDATES,
        num_target_ids=_NUM_TARGET_IDS,
        texts=tuple(
            msgspec.structs.replace(
                _text(rng, agreement, num_tokens),
                drafted={name: (own_rng.random(num_tokens) < agreement).tobytes() for name in _OWN_DRAFTERS},
            )
            for _ in range(num_texts)
        ),
    )


def _text(rng: np.random.Generator, agreement: float, num_tokens: int) -> RecordedText:
    firsts = _first_probs(rng, agreement, num_tokens)
    weights = _NEXT_SHARE * (1.0 - _NEXT_SHARE) ** np.arange(_NUM_CANDIDATES - 1)
    ids = np.empty((num_tokens, _NUM_CANDIDATES + _NUM_TARGET_IDS), np.int64)
    ranks: list[int] = []
    for place, first in enumerate(firsts):
        ids[place] = rng.choice(_VOCAB_SIZE, ids.shape[1], replace=False)
        is_first = rng.random() < (first if _LEAST_FIRST < agreement < 1.0 else agreement)
        ranks.append(0 if is_first else 1 + int(rng.choice(len(weights), p=weights / weights.sum())))
    prompt_ids = rng.choice(_VOCAB_SIZE, _PROMPT_TOKENS, replace=False).tolist()
    return make_text(prompt_ids, ids, ranks, firsts, weights)


def make_text(
    prompt_ids: Sequence[int],
    ids: npt.NDArray[np.int64],
    ranks: Sequence[int],
    firsts: npt.NDArray[np.float64],
    weights: npt.NDArray[np.floating],
) -> RecordedText:
    """Return a made-up text of n tokens whose drafter has K candidates at each place.

    Args:
        ids: [n, K + T] different tokens of each place: the drafter's candidates, then others that the target likes.
        ranks: [n] which of the candidates is the text's own token.
        firsts: [n] probability of each first candidate.
        weights: [K - 1] shares of the remaining probability, for the other candidates.
    """
    num_candidates = len(weights) + 1
    truths = ids[np.arange(len(ids)), ranks]
    others = np.minimum((1.0 - firsts)[:, None] * weights, 0.999 * firsts[:, None])
    logprobs = np.log(np.maximum(np.column_stack([firsts, others]), 1e-12))
    target_ids = np.column_stack([truths, ids[:, num_candidates:-1]])
    return pack_text(prompt_ids, truths.tolist(), "length", Rows(ids[:, :num_candidates], logprobs, target_ids))


def _first_probs(rng: np.random.Generator, agreement: float, count: int) -> npt.NDArray[np.float64]:
    """Return [count] probabilities of the first choice, of which ``agreement`` is the mean unless it is very low."""
    if agreement <= _LEAST_FIRST or agreement == 1.0:
        return np.full(count, min(max(agreement, _LEAST_FIRST), _SUREST))
    mean = (agreement - _LEAST_FIRST) / (1.0 - _LEAST_FIRST)
    drawn = rng.beta(mean * _SPREAD, (1.0 - mean) * _SPREAD, count)
    return np.minimum(_LEAST_FIRST + (1.0 - _LEAST_FIRST) * drawn, _SUREST)
