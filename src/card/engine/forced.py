"""The grammar as a writer: what it forces after a text, or after the drafter's best path, is a chain of candidates.

A schema forces the names of its properties, a tool's signature the head of a call. Such tokens need no draft model, and
a mask leaves the target no other choice there, at any temperature. The chain is split as the tokenizer splits text. A
model may split it otherwise where the mask permits: that costs acceptance, and the text stays plain decoding's.
"""

from __future__ import annotations

from collections.abc import Sequence

from card.drafting.local.protocol import Observation, WriterSequence
from card.text.following import Following
from card.tree.nodes import PATH_END, ROOT, Nodes

# Most seconds to wait for what a grammar forces, which begins to be computed as soon as a round has committed its text.
# Evidence: 0.03 to 0.2 ms for calls and schemas (Zen 4).
FORCED_WAIT_S = 1e-3


class ForcedText(WriterSequence):
    """The grammar of one request as a writer."""

    def __init__(self, masks: Following, vocab_size: int) -> None:
        """Propose what these masks foresee, up to the first token that the target does not have."""
        self._masks, self._vocab_size = masks, vocab_size

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        """Return the forced tokens as a chain that is certain; empty where the grammar leaves a choice.

        The chain goes on from the best path's end where this path keeps to what is forced.
        """
        forced = tuple(self._masks.forced((), FORCED_WAIT_S))
        goes_on = len(best_path) > len(forced) and tuple(best_path[: len(forced)]) == forced
        top = ROOT
        if goes_on and (further := self._masks.forced(best_path, FORCED_WAIT_S)):
            forced, top = tuple(further), PATH_END
        num = next((idx for idx, token_id in enumerate(forced) if token_id >= self._vocab_size), len(forced))
        num = min(num, budget)
        return Nodes(forced[:num], (top, *range(num - 1))[:num], (0.0,) * num)

    def observe(self, seen: Observation) -> None:
        """Do nothing: the masks take the text themselves."""
