"""The contract of a writer without a model: it proposes candidates beside the drafter's and learns from every pass.

Such writers live in the target's process and cost microseconds. So the engine calls them before each pass, with the
best path of the other writers and the remaining budget. A `DraftWriter` cannot be called like this: it drafts ahead in
another place and keeps its tree over many passes, while messages may be lost. Hence the two contracts.

No proposal of a writer can change the text: the target's own choices decide (`card.tree.verify.match`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from card.config import EngineSettings
from card.errors import ProtocolError
from card.tree.nodes import PATH_END, Nodes

if TYPE_CHECKING:
    from card.models.runner import RowRunner
    from card.tree.logits import FloatArray


def check_proposal(proposal: Nodes, vocab_size: int) -> None:
    """Raise ProtocolError unless the proposal consists of trees of tokens below the root and the best path's end."""
    counts = [len(proposal.tokens), len(proposal.parents), len(proposal.path_logprobs)]
    if len(set(counts)) > 1:
        raise ProtocolError(f"tokens, parents and path_logprobs of a proposal must be equally many, got {counts}")
    num_probes = proposal.num_probes
    if not 0 <= num_probes <= len(proposal) or PATH_END in proposal.parents[:num_probes]:
        raise ProtocolError(
            f"a proposal of {len(proposal)} candidates has {num_probes} probes; they must be some of the candidates "
            "and below no path"
        )
    scores = proposal.path_logprobs
    for idx, (token, parent, score) in enumerate(zip(proposal.tokens, proposal.parents, scores, strict=True)):
        is_whole = type(token) is int and type(parent) is int  # 2.0 would pass every comparison and fail the pass
        is_placed = 0 <= token < vocab_size and PATH_END <= parent < idx
        if not (is_whole and is_placed and -math.inf < score <= (scores[parent] if parent >= 0 else 0.0)):
            raise ProtocolError(
                f"candidate {idx} of a proposal has token {token}, parent {parent}, score {score}; tokens must be ints "
                f"from 0 to {vocab_size - 1}, parents be ints from {PATH_END} to below the own index, scores finite, "
                "at most 0 and the parent's"
            )


@dataclass(frozen=True, slots=True)
class Observation:
    """Results of one target pass for one request: n candidates of all writers were run below the last token."""

    new_ids: tuple[int, ...]  # committed tokens: the accepted candidates, then one of the target's own
    tokens: tuple[int, ...]  # [n] candidates
    parents: tuple[int, ...]  # [n] index of each candidate's parent, -1 for the last token that was committed before
    choices: tuple[int, ...]  # [1 + n] the target's token after that last token, and after each candidate
    accepted: tuple[int, ...]  # indices of the accepted candidates, from the top down
    top_ids: Sequence[Sequence[int]] = ()  # [1 + n][k] likeliest tokens there, best first; () unless asked for
    features: FloatArray | None = None  # [1 + n, D] the target's last hidden states there; None unless asked for


class WriterSequence:
    """A writer's state of one request. If it raises, it is not called again for this request."""

    def expect(self, token_ids: Sequence[int]) -> None:
        """Take a text that the answer may repeat, which is no part of the request's text; most writers read none.

        Called at most once, before anything else.
        """

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        """Return up to ``budget`` candidates for the next pass. Not called if other writers have filled the budget.

        Args:
            best_path: tokens of the best path that the drafter and the earlier writers propose; may be empty.
            budget: the request's budget less the likely candidates of other writers, 1 or more.
        """
        raise NotImplementedError

    def observe(self, seen: Observation) -> None:
        """Learn from a pass. The pass that ends the prompt counts too; it has no candidates."""
        raise NotImplementedError

    def close(self) -> None:
        """End the request, finished or not. Called once."""


class LocalWriter:
    """A writer of one engine; this base class has what most writers share.

    A module of this package holds a writer and names its class WRITER; the module's name is the writer's name.
    """

    top_k: ClassVar[int] = 0
    """Number of likeliest tokens that it needs for every row that the target runs; 0: none."""
    reads_states: ClassVar[bool] = False
    """True if it needs the hidden states, after the final norm, of the rows with logits."""
    outlives_engine: ClassVar[bool] = False
    """True if it keeps texts for later engines, and so needs the tokenizer's fingerprint."""
    copies: ClassVar[bool] = True
    """False if it drafts with a trained part instead of repeating tokens that it has seen; figures tell them apart."""
    sequence: ClassVar[Callable[..., WriterSequence]]
    """Class of its sequences, made from a prompt, unless `open` is overridden."""

    def __init__(self, settings: EngineSettings, vocab_size: int, tokenizer: str = "") -> None:
        """Make the writer.

        Args:
            tokenizer: fingerprint of the target's tokenizer if the writer keeps texts for later engines.
        Raises: SettingsError for settings that it does not support.
        """
        self._vocab_size = vocab_size

    def attach(self, target: RowRunner) -> None:
        """Connect to the target, before the first request. Raises: ModelError if the writer does not support it."""

    def open(self, prompt_ids: Sequence[int]) -> WriterSequence:
        """Begin a request."""
        return self.sequence(prompt_ids)

    def close(self) -> None:
        """End the writer. May be called twice."""
