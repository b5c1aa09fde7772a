"""What a writer without a model is: it proposes candidates beside the drafter's, and learns from every target pass.

Such writers live in the target's process and cost microseconds. Nothing that they propose can change the text: the
target's own choices decide (`card.verify.match`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from card.config import EngineSettings


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree of candidates below the last committed token, parents before children. All fields are equally long."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # index into this proposal, below the own one; -1 for the last committed token
    path_logprobs: tuple[float, ...]  # log of the chance that the whole path is accepted: at most 0 and the parent's
    num_probes: int = 0  # the first so many are run whatever they promise, for what their logits teach the writer

    @classmethod
    def none(cls) -> Proposal:
        """Return no candidates."""
        return cls((), (), ())

    @classmethod
    def chain(cls, tokens: Sequence[int], path_logprobs: Sequence[float]) -> Proposal:
        """Return a chain, first token first."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(path_logprobs))

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Observation:
    """What one target pass told about one request: n candidates of any writers were run below the last token."""

    new_ids: tuple[int, ...]  # tokens that were committed: the accepted candidates, then one of the target's own
    tokens: tuple[int, ...]  # [n] candidates
    parents: tuple[int, ...]  # [n] index of each candidate's parent, -1 for the last token that was committed before
    choices: tuple[int, ...]  # [1 + n] the target's token after that last token, and after each candidate
    accepted: tuple[int, ...]  # indices of the accepted candidates, from the top down
    top_ids: Sequence[Sequence[int]] = ()  # [1 + n][k] likeliest tokens there, best first; () unless asked for


class WriterSequence(Protocol):
    """What a writer knows of one request."""

    def propose(self, best_path: Sequence[int], budget: int) -> Proposal:
        """Return up to ``budget`` candidates for the next pass.

        Args:
            best_path: tokens of the best path that the drafter and the writers before this one propose; may be empty.
        """

    def observe(self, seen: Observation) -> None:
        """Take what a pass told. The pass that ends the prompt is told too; it has no candidates."""

    def close(self) -> None:
        """The request is over, finished or not. Called once."""


class LocalWriter(Protocol):
    """A writer of one engine. Made with (settings, vocab_size).

    A module of this package holds one of them and names the class WRITER; the module's name is the writer's name.
    """

    top_k: ClassVar[int]
    """How many likeliest tokens it wants to see at every token that the target runs; 0: none."""

    def __init__(self, settings: EngineSettings, vocab_size: int) -> None:
        """Make the writer. Raises: SettingsError for settings that it cannot follow."""

    def open(self, prompt_ids: Sequence[int]) -> WriterSequence:
        """Begin a request."""

    def close(self) -> None:
        """End the writer. May be called twice."""
