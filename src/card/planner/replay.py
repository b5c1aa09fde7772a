"""Models that say what a recording holds: the engine's own workers run on them, in virtual time.

On the way of a recorded text the target chooses the recorded token, and the draft model gives the recorded candidates
their scores. Off it, below a candidate that was wrong, nobody knows what the models would have said. There both say
what they said elsewhere in the same text: behind the same token if it came before, else at a place drawn by a hash.
Such candidates are never accepted, but compete for their place in a beam with scores of the right kind.

A method with a drafter of its own drafts a token where it did when the text was recorded, and a wrong one elsewhere: a
target that reads few KV rows, or a draft model behind masks. A head proposes what it proposed there.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from card.config import EngineSettings
from card.errors import CapacityError, ModelError, PlanError
from card.models.protocol import NO_PARENT, Extension
from card.models.selection import AttentionScores, ChosenRows
from card.planner.recording import Recording, drafted_by, head_nodes, rows_of
from card.tree.nodes import NO_NODES, Nodes
from card.tree.sampling import CHOICE_SHARPNESS
from card.writers.local.protocol import LocalWriter, Observation, WriterSequence

Role = Literal["target", "draft"]
_ROOT = 0
_GOLDEN = 0x9E3779B97F4A7C15  # spreads consecutive numbers over 64 bits
_MASK = (1 << 64) - 1
_UNLIKELY = -50.0  # logit of a token that the target is not known to have considered
_MOST_ROWS_KEPT = 4096  # of logits


@dataclass(frozen=True, slots=True)
class PassSize:
    """Everything that the time of a pass depends on."""

    num_tokens: int
    num_sequences: int
    num_context_rows: int
    num_logits: int  # rows that logits were asked for
    num_chosen_rows: int = 0  # of the context rows: those that were read because they were chosen
    num_scored_rows: int = 0  # of the context rows: those whose scores were kept


class ReplayedTexts:
    """The texts of a recording with their tokens renumbered, and where each path of tokens stands in them.

    Tokens that occur in no prompt, text or list of candidates are left out: passes are cheap then. A *state* is a path
    of tokens from the beginning of a prompt on; a *row* is a recorded position.
    """

    def __init__(
        self,
        recording: Recording,
        num_candidates: int = 8,
        *,
        drafted_by_method: str | None = None,
        has_head: bool = False,
    ) -> None:
        """Take the best ``num_candidates`` of each position.

        Args:
            drafted_by_method: the method whose own drafter is replayed.
            has_head: take the candidates of a head.
        Raises: PlanError if more candidates are wanted than were recorded, what a drafter did was not recorded, or two
            texts go on differently behind the same tokens.
        """
        if not 1 <= num_candidates <= recording.num_candidates:
            raise PlanError(
                f"the recording holds {recording.num_candidates} candidates of each position, {num_candidates} are "
                "wanted; lower the setting branch, or record more"
            )
        arrays = [rows_of(recording, text) for text in recording.texts]
        drafted = [one.draft_ids[:, :num_candidates] for one in arrays]
        told = [np.array(text.prompt_ids + text.token_ids) for text in recording.texts]
        behind = [nodes for text in recording.texts for nodes in head_nodes(text)] if has_head else []
        told += [np.array(nodes.tokens, np.int64) for nodes in behind]
        used = np.unique(np.concatenate([*told, *(one.ravel() for one in (*drafted, *(a.target_ids for a in arrays)))]))
        self.vocab_size = max(len(used), 2)
        self.original_ids = used
        self.prompts = [tuple(np.searchsorted(used, text.prompt_ids).tolist()) for text in recording.texts]
        self.answers = [tuple(np.searchsorted(used, text.token_ids).tolist()) for text in recording.texts]
        self.draft_ids = np.searchsorted(used, np.concatenate(drafted))  # [rows, C]
        self.draft_logprobs = np.concatenate([one.draft_logprobs[:, :num_candidates] for one in arrays])
        self.target_ids = np.searchsorted(used, np.concatenate([one.target_ids for one in arrays]))
        self.truths = np.concatenate([np.array(answer) for answer in self.answers])
        self.mask_id = self.vocab_size  # a drafter of several tokens a pass puts it in the place of an unknown one
        self.is_drafted = None if drafted_by_method is None else _drafted(recording, drafted_by_method)
        self.head_nodes = [
            Nodes(tuple(np.searchsorted(used, nodes.tokens).tolist()), nodes.parents, nodes.path_logprobs)
            for nodes in behind
        ]  # behind each recorded token
        self._next: dict[tuple[int, int], int] = {}
        self._row: list[int] = [0]  # of each state: the row that says what follows it
        self._cursor: list[int] = [0]  # the row where the true path would stand
        self._answered: set[int] = set()  # states that a recorded token follows
        self._ranges: list[tuple[int, int]] = []  # per text: its first row, and the one behind its last
        self._range_of = np.zeros(len(self.truths), np.int64)
        self._places: list[dict[int, list[int]]] = []  # per text: rows behind each token
        for text_idx, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True)):
            self._add(text_idx, prompt, answer)

    def child(self, state: int, token: int) -> int:
        """Return the state behind one more token."""
        found = self._next.get((state, token))
        if found is None:
            cursor = self._cursor[state] + 1
            row = min(cursor, len(self.truths) - 1) if token == self.mask_id else self._stray_row(state, token, cursor)
            found = self._make(state, token, row, cursor)
        return found

    def follow(self, state: int, token_ids: Sequence[int]) -> int:
        """Return the state behind more tokens."""
        for token in token_ids:
            state = self.child(state, token)
        return state

    def row_of(self, state: int) -> int:
        """Return the row that says what follows the state."""
        return self._row[state]

    def _add(self, text_idx: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        first_row = sum(len(done) for done in self.answers[:text_idx])
        self._ranges.append((first_row, first_row + len(answer)))
        self._range_of[first_row : first_row + len(answer)] = text_idx
        places: dict[int, list[int]] = {}
        state = _ROOT
        for token in prompt:
            state = self._next.get((state, token)) or self._make(state, token, first_row, first_row)
        for row, token in enumerate(answer, first_row):
            if state in self._answered and self.truths[self._row[state]] != token:
                raise PlanError(f"text {text_idx} goes on differently behind the same tokens as another one; drop it")
            self._answered.add(state)
            self._row[state] = self._cursor[state] = row
            last = answer[row - first_row - 1] if row > first_row else prompt[-1]
            places.setdefault(last, []).append(row)
            state = self._next.get((state, token)) or self._make(state, token, row, row)
        self._places.append(places)

    def _make(self, state: int, token: int, row: int, cursor: int) -> int:
        made = self._next[state, token] = len(self._row)
        self._row.append(row)
        self._cursor.append(min(cursor, len(self.truths) - 1))
        return made

    def _stray_row(self, state: int, token: int, cursor: int) -> int:
        """Return which recorded position speaks for a path that left the text."""
        text_idx = int(self._range_of[min(self._cursor[state], len(self.truths) - 1)])
        first, end = self._ranges[text_idx]
        behind = self._places[text_idx].get(token, [])
        num_before = bisect_left(behind, min(cursor, end))
        if num_before:
            return behind[num_before - 1]
        mixed = ((state + 1) * _GOLDEN ^ (token + 1) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 31)) * 0x94D049BB133111EB) & _MASK
        return first + (mixed >> 20) % (end - first)


def _drafted(recording: Recording, method: str) -> npt.NDArray[np.bool_]:
    told = [drafted_by(text, method) for text in recording.texts]
    known = [one for one in told if one is not None]
    if len(known) < len(told):
        raise PlanError(f"the recording does not say what {method} drafts; make it with card record --methods {method}")
    return np.concatenate(known)


class ReplayedModel:
    """A `LanguageModel` of a recording. Each pass tells ``on_pass`` what it would have cost, each keep ``on_keep``."""

    def __init__(
        self,
        texts: ReplayedTexts,
        role: Role,
        *,
        max_model_len: int,
        num_tree_rows: int,
        on_pass: Callable[[PassSize], None],
        on_keep: Callable[[], None],
        row_bytes: int = 1,
    ) -> None:
        """Make the model.

        Args:
            max_model_len: most positions of a sequence; num_tree_rows: rows beyond them.
            row_bytes: memory of a KV row.
            on_pass: called in each pass, before its rows are there.
            on_keep: called when rows are kept or dropped.
        """
        self._texts = texts
        self._role = role
        self.vocab_size = texts.vocab_size  # token ids that occur
        self.max_model_len, self.max_rows = max_model_len, max_model_len + num_tree_rows  # of one sequence
        self.row_bytes = row_bytes
        self.mask_id = texts.mask_id
        self.attention_scores = AttentionScores()
        self._on_pass, self._on_keep = on_pass, on_keep
        self._states: dict[int, list[int]] = {}  # of each row of each sequence
        self._capacity: dict[int, int] = {}
        self._num_opened = 0
        self._known: dict[tuple[int, bool], Tensor] = {}  # logits by row, and by whether it drafts

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

    def forward(self, extensions: Sequence[Extension]) -> list[Tensor]:
        """Append rows and return [T - first_logits_idx, V] float32 logits for each extension.

        Raises: CapacityError if a sequence has no room; nothing has changed then.
        """
        num_held = [len(self._states[extension.slot]) for extension in extensions]
        num_new = [len(extension.token_ids) for extension in extensions]
        for extension, held, new in zip(extensions, num_held, num_new, strict=True):
            if held + new > self._capacity[extension.slot]:
                raise CapacityError(f"{held} rows and {new} new ones are more than {self._capacity[extension.slot]}")
        self._on_pass(_size(extensions, num_held))
        self.attention_scores.leave(
            {
                extension.slot: torch.zeros(1, 1, held)  # all alike: how many rows are chosen counts, not which
                for extension, held in zip(extensions, num_held, strict=True)
                if extension.scores is not None
            }
        )
        return [self._append(extension) for extension in extensions]

    def bytes_read(self, num_rows: int, reads: ChosenRows | None) -> int:
        """Return the bytes of KV that a pass reads of a sequence with so many rows, the new ones included."""
        return (num_rows if reads is None else reads.num_read(num_rows)) * self.row_bytes

    def keep(self, slot: int, num_prefix_rows: int, rows: Sequence[int] = ()) -> None:
        """Keep a prefix and then ``rows``; drop the rest."""
        states = self._states[slot]
        self._states[slot] = states[:num_prefix_rows] + [states[row] for row in rows]
        self._on_keep()

    def _append(self, extension: Extension) -> Tensor:
        states, child = self._states[extension.slot], self._texts.child
        first = len(states) + extension.first_logits_idx
        for token, parent in zip(extension.token_ids, extension.parents, strict=True):
            states.append(child(_ROOT if parent == NO_PARENT else states[parent], token))
        drafts = self._texts.is_drafted is not None and (self._role == "draft" or extension.reads is not None)
        logits = [self._logits(self._texts.row_of(state), drafts=drafts) for state in states[first:]]
        return torch.stack(logits) if logits else torch.empty(0, self.vocab_size)

    def _logits(self, row: int, *, drafts: bool) -> Tensor:
        """Return [V] behind a recorded position: those of a drafter of one method's own, if it drafts."""
        found = self._known.get((row, drafts))
        if found is None:
            if len(self._known) >= _MOST_ROWS_KEPT:
                self._known.clear()
            usual = self._target_logits if self._role == "target" else self._draft_logits
            made = self._own_logits(row) if drafts else usual(row)
            found = self._known[row, drafts] = torch.from_numpy(made.astype(np.float32))
        return found

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

    def _draft_logits(self, row: int) -> np.ndarray:
        """Return [V] whose sharpened softmax gives the candidates their recorded log-probabilities.

        What is left of the probability is shared out over all other tokens, each below the last candidate.
        """
        ids, logprobs = self._texts.draft_ids[row], self._texts.draft_logprobs[row].astype(np.float64)
        left = max(1.0 - float(np.exp(logprobs).sum()), 1e-12)
        num_others = max(self.vocab_size - len(ids), 1)
        others = min(math.log(left / num_others), float(logprobs.min()) - 0.1)
        logits = np.full(self.vocab_size, others)
        logits[ids] = logprobs
        return logits / CHOICE_SHARPNESS  # requests are replayed as greedy ones, whose scores are sharpened


def _size(extensions: Sequence[Extension], num_held: Sequence[int]) -> PassSize:
    num_read = num_chosen = num_scored = 0
    for extension, held in zip(extensions, num_held, strict=True):
        num_read += held if extension.reads is None else extension.reads.num_read(held)
        num_chosen += 0 if extension.reads is None else int(extension.reads.rows.shape[-1])
        num_scored += 0 if extension.scores is None else held
    num_new = sum(len(extension.token_ids) for extension in extensions)
    num_logits = num_new - sum(extension.first_logits_idx for extension in extensions)
    return PassSize(num_new, len(extensions), num_read, num_logits, num_chosen, num_scored)


class _ReplayedHeadSequence(WriterSequence):
    """The place of one request in its recorded text."""

    def __init__(self, texts: ReplayedTexts, prompt_ids: Sequence[int]) -> None:
        self._texts, self._state = texts, texts.follow(_ROOT, prompt_ids)
        self._has_begun = False

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        """Return what the head proposed behind the text so far."""
        row = self._texts.row_of(self._state) - 1  # of the last token: this one says what follows
        return self._texts.head_nodes[row].leading(budget) if self._has_begun else NO_NODES

    def observe(self, seen: Observation) -> None:
        """Go on by the new tokens."""
        self._state, self._has_begun = self._texts.follow(self._state, seen.new_ids), True

    def close(self) -> None:
        """Do nothing."""


class ReplayedHead(LocalWriter):
    """The writer of a trained head, which proposes what was recorded."""

    def __init__(self, texts: ReplayedTexts) -> None:
        super().__init__(EngineSettings(), texts.vocab_size)
        self._texts = texts

    def open(self, prompt_ids: Sequence[int]) -> WriterSequence:
        """Begin a request."""
        return _ReplayedHeadSequence(self._texts, prompt_ids)
