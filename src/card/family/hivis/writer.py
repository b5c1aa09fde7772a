"""HiViS: a trained drafter reads the text, and the target's hidden states at its places (`card.family.hivis`)."""

from __future__ import annotations

from collections.abc import Sequence

from card.config import EngineSettings
from card.drafting.local.protocol import LocalWriter, Observation, WriterSequence
from card.errors import SettingsError, named
from card.family.hivis.drafting import MOST_LAYERS, TextMemory, draft
from card.family.hivis.fused import Fused
from card.family.hivis.record import HivisSettings
from card.family.learning.array_head import scaled_rows
from card.models.runner import RowRunner
from card.tree.logits import FloatArray
from card.tree.nodes import NO_NODES, Nodes


class HivisSequence(WriterSequence):
    """One text in the drafter's memory, and its drafts after it."""

    def __init__(self, writer: HivisWriter, prompt_ids: Sequence[int]) -> None:
        self._writer = writer
        self._token_ids = list(prompt_ids)
        self.memory = TextMemory(writer.head)
        self.drafted: Nodes | None = None  # after the newest token; None: not drafted yet

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        """Return the drafter's likeliest candidates below the newest token."""
        if self.drafted is None and self in self._writer.waiting:
            self._writer.run(min(budget, MOST_LAYERS))
        return NO_NODES if self.drafted is None else self.drafted.leading(budget)

    def read(self, first: int, features: FloatArray) -> None:
        """Read the target's states of the prompt, each with its next token."""
        behind = first + 1
        self._extend(first, features, self._token_ids[behind : behind + len(features)])

    def observe(self, seen: Observation) -> None:
        """Read the target's states of the rows that became text; they replace the predicted ones."""
        assert seen.features is not None, "the target's features were requested"
        first = len(self._token_ids) - 1
        self._token_ids += seen.new_ids
        self._extend(first, seen.features[[0, *(1 + idx for idx in seen.accepted)]], seen.new_ids)
        self.drafted = None
        self._writer.waiting[self] = None

    def _extend(self, first: int, features: FloatArray, token_ids: Sequence[int]) -> None:
        self.memory.extend(first, scaled_rows(features), scaled_rows(self._writer.embeddings(token_ids)))

    def close(self) -> None:
        """Drop out of the next draft."""
        self._writer.waiting.pop(self, None)


class HivisWriter(LocalWriter):
    """Drafts once a round for all requests that have new tokens."""

    wanted_features = "all"
    copies = False

    def __init__(self, settings: EngineSettings, vocab_size: int, tokenizer: str = "") -> None:
        """Load the drafter of the settings. Raises: SettingsError if they name none; ModelError as of the file."""
        super().__init__(settings, vocab_size, tokenizer)
        file = settings.of(HivisSettings).hivis
        if file is None:
            raise SettingsError(
                f"the writer hivis needs a drafter: give {named('hivis')} a file made with card train hivis"
            )
        self.name = file
        self.head = Fused.load(self.name)
        self.waiting: dict[HivisSequence, None] = {}  # with newest tokens that have no drafts yet

    def attach(self, target: RowRunner) -> None:
        """Use the target's embeddings. Raises: ModelError if the drafter was trained for another target."""
        self.head.attach(target, self.name)
        self.embeddings = target.embeddings

    def open(self, prompt_ids: Sequence[int]) -> HivisSequence:
        """Begin a request."""
        return HivisSequence(self, prompt_ids)

    def run(self, num_layers: int) -> None:
        """Draft for all waiting sequences together."""
        waiting = list(self.waiting)
        drafted = draft(self.head, [sequence.memory for sequence in waiting], num_layers)
        for sequence, own in zip(waiting, drafted, strict=True):
            sequence.drafted = own
        self.waiting.clear()
