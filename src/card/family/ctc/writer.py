"""CTC drafting: a trained head over the target's hidden states proposes a tree (`card.family.ctc`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from card.config import EngineSettings
from card.drafting.local.protocol import LocalWriter, Observation, WriterSequence
from card.errors import SettingsError, named
from card.family.ctc.candidates import candidates_of
from card.family.ctc.record import CtcSettings
from card.family.ctc.slots import Slots, inputs_of
from card.kernels.number_types import Floats
from card.models.runner import RowRunner
from card.tree.nodes import NO_NODES, Nodes


class CtcSequence(WriterSequence):
    """The last hidden states of one text, and the head's log-probabilities after them."""

    def __init__(self, writer: CtcWriter) -> None:
        self._writer = writer
        self.window: Floats = np.zeros(
            (0, 0), np.float32
        )  # [rows, 2 * D] input of the head, the newest row last; W at most
        self.logprobs: Floats | None = None  # [T, N + 1] of the slots after the last row; None: not run yet

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        """Return the head's likeliest candidates below the last token."""
        if self.logprobs is None and len(self.window):
            self._writer.run()
        return NO_NODES if self.logprobs is None else candidates_of(self._writer.head, self.logprobs, budget)

    def observe(self, seen: Observation) -> None:
        """Read the hidden states of the rows that became text, each with the token that followed."""
        assert seen.features is not None, "the target's features were requested"
        rows = seen.features[[0, *(1 + idx for idx in seen.accepted)]]
        new = inputs_of(rows, self._writer.embeddings(seen.new_ids))
        window = np.concatenate([self.window, new]) if len(self.window) else new
        self.window = window[-self._writer.head.facts.window :]
        self.logprobs = None
        self._writer.waiting[self] = None

    def close(self) -> None:
        """Drop out of the next pass of the head."""
        self._writer.waiting.pop(self, None)


class CtcWriter(LocalWriter):
    """Runs the head once a round for all requests that have new tokens."""

    reads_states = True
    copies = False

    def __init__(self, settings: EngineSettings, vocab_size: int, tokenizer: str = "") -> None:
        """Load the head that the settings name. Raises: SettingsError if they name none; ModelError as of the file."""
        super().__init__(settings, vocab_size, tokenizer)
        file = settings.of(CtcSettings).ctc
        if file is None:
            raise SettingsError(f"the writer ctc needs a head: give {named('ctc')} a file made with card train ctc")
        self.name = file
        self.head = Slots.load(self.name)
        self.waiting: dict[CtcSequence, None] = {}  # whose windows the head has not read yet

    def attach(self, target: RowRunner) -> None:
        """Use the target's embeddings. Raises: ModelError if the head was trained for another target."""
        self.head.attach(target, self.name)
        self.embeddings = target.embeddings

    def open(self, prompt_ids: Sequence[int]) -> CtcSequence:
        """Begin a request."""
        return CtcSequence(self)

    def run(self) -> None:
        """Run the head over the windows of all waiting sequences, in one pass."""
        size = self.head.facts.window
        waiting = list(self.waiting)
        inputs = np.zeros((len(waiting), size, 2 * self.head.facts.hidden_size), np.float32)
        is_there = np.zeros((len(waiting), size), np.bool_)
        for row, sequence in enumerate(waiting):
            inputs[row, size - len(sequence.window) :] = sequence.window
            is_there[row, size - len(sequence.window) :] = True
        for sequence, logprobs in zip(waiting, self.head.logprobs(inputs, is_there), strict=True):
            sequence.logprobs = logprobs
        self.waiting.clear()
