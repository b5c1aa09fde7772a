"""Acceptance by a coin, so that schedules and policies can be measured without good drafts.

Other engines have the same (vLLM's synthetic acceptance). No model would write these texts, so no row of such a run is
exact, and only the bench offers it.
"""

from __future__ import annotations

import random

import numpy as np

from card.config.fields import require
from card.tree.logits import as_array
from card.tree.nodes import ROOT
from card.tree.verify import Verdict, Verification


class ForcedAcceptance:
    """Accept the likeliest child of each node with a set probability, whatever the target would choose."""

    is_exact = False

    def __init__(self, rate: float, seed: int) -> None:
        """Take the probability, from 0 to 1, and the seed of the coins. Raises: SettingsError if it is out of range."""
        require(0.0 <= rate <= 1.0, "force_acceptance", "from 0 to 1", rate)
        self._rate, self._seed = rate, seed

    def decide(self, seen: Verification) -> Verdict:
        """Walk down while the coins say so, then take the target's own token; the likeliest other one if that is the
        candidate that the coin refused, or the policy would learn that it was right.
        """
        offer = seen.offer
        best: dict[int, int] = {}  # the likeliest child of each node
        for idx, parent in enumerate(offer.parents):
            if parent not in best or offer.path_logprobs[idx] > offer.path_logprobs[best[parent]]:
                best[parent] = idx
        node, accepted = ROOT, list[int]()
        while (child := best.get(node)) is not None and self._says_yes(seen.first_place + len(accepted)):
            accepted.append(child)
            node = child
        next_id = seen.choices[node + 1]
        if child is not None and seen.offer.tokens[child] == next_id:
            next_id = _likeliest_other(seen, node + 1)
        return Verdict(tuple(accepted), next_id)

    def _says_yes(self, place: int) -> bool:
        """Toss the coin of a place in a text. It is the same in every row: else rows differ by their luck."""
        return random.Random(f"{self._seed}/{place}").random() < self._rate


def _likeliest_other(seen: Verification, row: int) -> int:
    """Return the likeliest token of a row but for the target's choice; that one if all others are ruled out."""
    logits = np.array(as_array(seen.logits[row : row + 1])[0])
    logits[seen.choices[row]] = -np.inf
    found = int(logits.argmax())
    return found if np.isfinite(logits[found]) else seen.choices[row]
