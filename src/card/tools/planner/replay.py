"""Models that replay a recording: the engine's own workers run on them, in virtual time.

Along a recorded text the target chooses the recorded token, and the draft model gives the recorded candidates their
scores; off the text, `ReplayedTexts` chooses a recorded position instead.

A drafter of one method's own (a target that reads few KV rows, a draft model behind masks) drafts the right token where
it did when the text was recorded, and a wrong one elsewhere. A head proposes the recorded candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from card.config import EngineSettings
from card.drafting.local.protocol import LocalWriter, Observation, WriterSequence
from card.errors import CapacityError, ModelError
from card.kernels.number_types import Floats
from card.machine.expert_cost import ExpertCounts, ExpertUse
from card.models.features import FINAL, Features, FeatureWish
from card.models.protocol import NO_PARENT, Extension
from card.models.rows.extension_rows import logits_rows_of
from card.models.rows.selection import AttentionScores, ChosenRows
from card.tools.planner.replayed_texts import ROOT, ReplayedTexts
from card.tree.logits import Logits
from card.tree.nodes import NO_NODES, Nodes
from card.tree.sampling import CHOICE_SHARPNESS

Role = Literal["target", "draft"]
BLANK_STATES = FeatureWish((FINAL,), "all")  # of a target, that a block or a head reads
_UNLIKELY = -50.0  # logit of a token that was not recorded
_MOST_ROWS_KEPT = 4096  # of logits


@dataclass(frozen=True, slots=True)
class PassSize:
    """The sizes that the time of a pass depends on."""

    num_tokens: int
    num_sequences: int
    num_context_rows: int
    num_logits: int  # rows whose logits are needed
    num_chosen_rows: int = 0  # context rows that were chosen to be read
    num_scored_rows: int = 0  # context rows whose scores were kept
    num_verifying: int = 0  # sequences with candidates


class ReplayedModel:
    """A `LanguageModel` of a recording. It reports each pass to ``on_pass``, and each keep to ``on_keep``."""

    def __init__(
        self,
        texts: ReplayedTexts,
        role: Role,
        *,
        max_model_len: int,
        num_tree_rows: int,
        on_pass: Callable[[PassSize], None],
        on_keep: Callable[[int], None],
        row_bytes: int = 1,
        experts: ExpertCounts | None = None,
    ) -> None:
        """Make the model.

        Args:
            max_model_len: most positions of a sequence; num_tree_rows: rows beyond them.
            row_bytes: memory of a KV row.
            experts: that its passes read.
            on_pass: called in each pass, before its rows are there.
            on_keep: called when rows are kept or dropped, but for masks, with the number of those behind the prefix.
        """
        self._texts = texts
        self._role = role
        self.vocab_size = texts.vocab_size  # of token ids that occur
        self.max_model_len, self.max_rows = max_model_len, max_model_len + num_tree_rows  # of one sequence
        self.row_bytes = row_bytes
        self.mask_id = texts.mask_id
        self.attention_scores = AttentionScores()
        self.features = Features(num_layers=1, width=1)
        self.experts, self.experts_read = None, 0  # nobody measures it; distinct experts that the last pass read
        self._use = None if experts is None else ExpertUse(experts)
        self._on_pass, self._on_keep = on_pass, on_keep
        self._states: dict[int, list[int]] = {}  # by slot, of each row
        self._capacity: dict[int, int] = {}
        self._num_opened = 0
        self._known: dict[tuple[int, bool, int], Floats] = {}  # logits by row, whether it drafts, and layer
        self._with_masks: set[int] = set()  # slots that still hold masks

    def open(self, max_rows: int | None = None) -> int:
        """Start an empty sequence. Raises: CapacityError for more rows than there are."""
        capacity = self.max_rows if max_rows is None else max_rows
        if capacity > self.max_rows:
            raise CapacityError(f"a sequence has room for {self.max_rows} rows, got {capacity}")
        self._num_opened += 1
        self._states[self._num_opened] = []
        self._capacity[self._num_opened] = capacity
        return self._num_opened

    def close(self, slot: int) -> None:
        """Drop a sequence."""
        del self._states[slot], self._capacity[slot]
        self._with_masks.discard(slot)

    def num_rows(self, slot: int) -> int:
        """Return how many rows the sequence holds."""
        return len(self._states[slot])

    def capacity(self, slot: int) -> int:
        """Return how many rows the sequence has room for."""
        return self._capacity[slot]

    def copy_rows(self, source: int, slot: int, num_rows: int) -> None:
        """Make the first rows of ``source`` those of the empty sequence ``slot``. Raises: ModelError if it is not."""
        if self._states[slot]:
            raise ModelError(f"slot {slot} holds rows; rows are copied into an empty one only")
        self._states[slot] = self._states[source][:num_rows]

    def forward(self, extensions: Sequence[Extension]) -> list[Logits]:
        """Append rows and return [T - first_logits_idx, V] float32 logits for each extension.

        Raises: CapacityError if a sequence has no room; nothing has changed then.
        """
        num_held = [len(self._states[extension.slot]) for extension in extensions]
        num_new = [len(extension.token_ids) for extension in extensions]
        for extension, held, new in zip(extensions, num_held, num_new, strict=True):
            if held + new > self._capacity[extension.slot]:
                raise CapacityError(f"{held} rows and {new} new ones are more than {self._capacity[extension.slot]}")
        self._on_pass(_size(extensions, num_held))
        self.experts_read = 0 if self._use is None else round(self._use.expected(sum(num_new)))
        self.attention_scores.leave(
            {
                extension.slot: np.zeros((1, 1, held), np.float32)  # only the number of chosen rows matters
                for extension, held in zip(extensions, num_held, strict=True)
                if extension.scores is not None
            }
        )
        states = self.features.begin(logits_rows_of(extensions))
        if states is not None:
            layers = np.concatenate([_layers_of(one) for one in extensions])
            states.take_final(layers + (self._role == "draft"), lambda same: same)
            self.features.leave(states, extensions)
        return [self._append(extension) for extension in extensions]

    def bytes_read(self, num_rows: int, reads: ChosenRows | None) -> int:
        """Return the bytes of KV that a pass reads of a sequence with ``num_rows`` rows, the new ones included."""
        return (num_rows if reads is None else reads.num_read(num_rows)) * self.row_bytes

    def keep(self, slot: int, num_prefix_rows: int, rows: Sequence[int] = ()) -> None:
        """Keep a prefix and then ``rows``; drop the rest."""
        states = self._states[slot]
        num_behind = len(states) - num_prefix_rows
        self._states[slot] = states[:num_prefix_rows] + [states[row] for row in rows]
        if slot in self._with_masks:
            self._with_masks.remove(slot)  # dropping masks is part of their pass, and no correction
        else:
            self._on_keep(num_behind)

    def _append(self, extension: Extension) -> Floats:
        states, child = self._states[extension.slot], self._texts.child
        first = len(states) + extension.first_logits_idx
        if self.mask_id in extension.token_ids:
            self._with_masks.add(extension.slot)
        for token, parent in zip(extension.token_ids, extension.parents, strict=True):
            states.append(child(ROOT if parent == NO_PARENT else states[parent], token))
        drafts = self._texts.is_drafted is not None and (self._role == "draft" or extension.reads is not None)
        layers = _layers_of(extension)[extension.first_logits_idx :, 0].astype(int).tolist()
        rows = zip(states[first:], layers, strict=True)
        logits = [self._logits(self._texts.row_of(state), layer, drafts=drafts) for state, layer in rows]
        return np.stack(logits) if logits else np.empty((0, self.vocab_size), np.float32)

    def _logits(self, row: int, layer: int, *, drafts: bool) -> Floats:
        """Return [V] after a recorded position; while drafting, those of a method's own drafter if it has one."""
        row_scores = self._known.get((row, drafts, layer))
        if row_scores is None:
            if len(self._known) >= _MOST_ROWS_KEPT:
                self._known.clear()
            if drafts:
                made = self._own_logits(row)
            else:
                made = self._target_logits(row) if self._role == "target" else self._draft_logits(row, layer)
            row_scores = self._known[row, drafts, layer] = made.astype(np.float32)
        return row_scores

    def _own_logits(self, row: int) -> np.ndarray:
        """Return [V]: the recorded token if it was drafted, else the likeliest other one, and no second choice."""
        assert self._texts.is_drafted is not None
        truth = int(self._texts.truths[row])
        others = [int(token) for token in self._texts.target_ids[row] if token != truth]
        logits = np.full(self.vocab_size, _UNLIKELY)
        logits[truth if self._texts.is_drafted[row] else (others or [(truth + 1) % self.vocab_size])[0]] = 0.0
        return logits

    def _target_logits(self, row: int) -> np.ndarray:
        """Return [V]: the recorded token first, then the target's likeliest in their order."""
        logits = np.full(self.vocab_size, _UNLIKELY)
        top = self._texts.target_ids[row]
        logits[top] = -1.0 - np.arange(len(top))
        logits[self._texts.truths[row]] = 0.0
        return logits

    def _draft_logits(self, row: int, layer: int) -> np.ndarray:
        """Return [V] whose sharpened softmax gives the candidates their recorded log-probabilities.

        Args:
            layer: of a chain; 0 is behind the text.
        The remaining probability is spread over all other tokens, each below the last candidate.
        """
        layer = min(layer, len(self._texts.draft_ids) - 1)
        ids, logprobs = (by_layer[layer, row] for by_layer in (self._texts.draft_ids, self._texts.draft_logprobs))
        logprobs = logprobs.astype(np.float64)
        left = max(1.0 - float(np.exp(logprobs).sum()), 1e-12)
        num_others = max(self.vocab_size - len(ids), 1)
        others = min(math.log(left / num_others), float(logprobs.min()) - 0.1)
        logits = np.full(self.vocab_size, others)
        logits[ids] = logprobs
        return logits / CHOICE_SHARPNESS  # requests are replayed greedily, and greedy scores are sharpened


def _layers_of(extension: Extension) -> Floats:
    """Return the layer of a chain that each row is in, [T, 1]: what `BlankInputs` has made of its state."""
    return np.zeros((len(extension.token_ids), 1), np.float32) if extension.inputs is None else extension.inputs


def _size(extensions: Sequence[Extension], num_held: Sequence[int]) -> PassSize:
    num_read = num_chosen = num_scored = 0
    for extension, held in zip(extensions, num_held, strict=True):
        num_read += held if extension.reads is None else extension.reads.num_read(held)
        num_chosen += 0 if extension.reads is None else int(extension.reads.rows.shape[-1])
        num_scored += 0 if extension.scores is None else held
    num_new = sum(len(extension.token_ids) for extension in extensions)
    num_logits = num_new - sum(extension.first_logits_idx for extension in extensions)
    num_verifying = sum(len(extension.token_ids) - extension.first_logits_idx > 1 for extension in extensions)
    return PassSize(num_new, len(extensions), num_read, num_logits, num_chosen, num_scored, num_verifying)


class BlankInputs:
    """In the place of what makes a row's input of a token and a state: a replayed state is the row's layer.

    Those of the target are 0. The drafter hands on one more than it read, as what it says there was recorded apart.
    """

    width = target_width = 1
    target_layers = (FINAL,)
    own_state = FINAL
    first_place = num_bytes = 0

    def fused(self, states: Floats) -> Floats:
        """Return the states."""
        return states

    def handed_on(self, states: Floats, depths: Sequence[int]) -> Floats:
        """Return the states as they are."""
        return states

    def rows(self, token_ids: Sequence[int], states: Floats) -> Floats:
        """Return the states."""
        return states


class _ReplayedHeadSequence(WriterSequence):
    """The place of one request in its recorded text."""

    def __init__(self, texts: ReplayedTexts, prompt_ids: Sequence[int]) -> None:
        self._texts, self._state = texts, texts.follow(ROOT, prompt_ids)
        self._has_begun = False

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        """Return the head's recorded candidates after the text so far."""
        row = self._texts.row_of(self._state) - 1  # of the last token: its candidates follow it
        return self._texts.head_nodes[row].leading(budget) if self._has_begun else NO_NODES

    def observe(self, seen: Observation) -> None:
        """Advance by the new tokens."""
        self._state, self._has_begun = self._texts.follow(self._state, seen.new_ids), True

    def close(self) -> None:
        """Do nothing."""


class ReplayedHead(LocalWriter):
    """The writer of a trained head, which proposes the recorded candidates."""

    def __init__(self, texts: ReplayedTexts) -> None:
        super().__init__(EngineSettings(), texts.vocab_size)
        self._texts = texts

    def open(self, prompt_ids: Sequence[int]) -> WriterSequence:
        """Begin a request."""
        return _ReplayedHeadSequence(self._texts, prompt_ids)
