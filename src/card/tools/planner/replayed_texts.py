"""The texts of a recording, and the recorded position that stands for any path of tokens.

Along a recorded text that is the position itself. Off it, below a wrong candidate, the models' answers are unknown.
There both models repeat an answer from elsewhere in the same text: after the same token if it came before, else at a
place chosen by a hash. Such candidates are never accepted, but compete for a place in a beam with realistic scores.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from card.drafting.window import num_skipped, read_part
from card.errors import PlanError
from card.tools.planner.recording import Recording, drafted_by, head_nodes, rows_of
from card.tree.logits import FloatArray
from card.tree.nodes import Nodes

ROOT = 0  # the state of no tokens
_GOLDEN = 0x9E3779B97F4A7C15  # spreads consecutive numbers over 64 bits
_MASK = (1 << 64) - 1


class ReplayedTexts:
    """The texts of a recording with their tokens renumbered, and the position of each path of tokens in them.

    Tokens that occur in no prompt, text or list of candidates are left out, which makes passes cheap. A *state* is a
    path of tokens from the beginning of a prompt; a *row* is a recorded position.
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
            has_head: replay the candidates of a head.
        Raises: PlanError if more candidates are wanted than were recorded, if the drafts of a drafter are missing, or
            if two texts continue differently after the same tokens.
        """
        if not 1 <= num_candidates <= recording.num_candidates:
            raise PlanError(
                f"the recording holds {recording.num_candidates} candidates of each position, {num_candidates} are "
                "wanted; lower the setting branch, or record more"
            )
        arrays = [rows_of(recording, text) for text in recording.texts]
        # [L + 1, rows, C]: a recording without deeper candidates has the first ones in every layer.
        num_deeper = max(len(one.deeper_ids) for one in arrays)
        ids, logprobs = (
            np.concatenate(
                [_layers(getattr(a, f"draft_{kind}"), getattr(a, f"deeper_{kind}"), num_deeper) for a in arrays], 1
            )
            for kind in ("ids", "logprobs")
        )
        drafted = ids[..., :num_candidates]
        texts = [np.array(text.prompt_ids + text.token_ids) for text in recording.texts]
        behind = [nodes for text in recording.texts for nodes in head_nodes(text)] if has_head else []
        texts += [np.array(nodes.tokens, np.int64) for nodes in behind]
        used = np.unique(np.concatenate([*texts, drafted.ravel(), *(a.target_ids.ravel() for a in arrays)]))
        self.vocab_size = max(len(used), 2)
        self.original_ids = used
        self.prompts = [tuple(np.searchsorted(used, text.prompt_ids).tolist()) for text in recording.texts]
        self.answers = [tuple(np.searchsorted(used, text.token_ids).tolist()) for text in recording.texts]
        self.draft_ids = np.searchsorted(used, drafted)  # [L + 1, rows, C], by layer of a chain
        self.draft_logprobs = logprobs[..., :num_candidates]
        self.target_ids = np.searchsorted(used, np.concatenate([one.target_ids for one in arrays]))
        self.truths = np.concatenate([np.array(answer) for answer in self.answers])
        self.mask_id = self.vocab_size  # stands for an unknown token in a drafter of several tokens a pass
        self.is_drafted = None if drafted_by_method is None else _drafted(recording, drafted_by_method)
        self.head_nodes = [
            Nodes(tuple(np.searchsorted(used, nodes.tokens).tolist()), nodes.parents, nodes.path_logprobs)
            for nodes in behind
        ]  # after each recorded token
        self._next: dict[tuple[int, int], int] = {}
        self._hash: list[int] = [0]  # of each state: of its tokens, so that it does not matter which came first
        self._row: list[int] = [0]  # of each state: the row that predicts its next token
        self._cursor: list[int] = [0]  # of each state: the row where the true path would be
        self._answered: set[int] = set()  # states that a recorded token follows
        self._ranges: list[tuple[int, int]] = []  # per text: its first row, and the one after its last
        self._range_of = np.zeros(len(self.truths), np.int64)
        self._places: list[dict[int, list[int]]] = []  # per text: rows after each token
        for text_idx, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True)):
            self._add(text_idx, prompt, answer)

    def child(self, state: int, token: int) -> int:
        """Return the state after one more token."""
        text = self._next.get((state, token))
        if text is None:
            cursor = self._cursor[state] + 1
            row = min(cursor, len(self.truths) - 1) if token == self.mask_id else self._stray_row(state, token, cursor)
            text = self._make(state, token, row, cursor)
        return text

    def follow(self, state: int, token_ids: Sequence[int]) -> int:
        """Return the state after more tokens."""
        for token in token_ids:
            state = self.child(state, token)
        return state

    def row_of(self, state: int) -> int:
        """Return the row that predicts the next token of the state."""
        return self._row[state]

    def _add(self, text_idx: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        first_row = sum(len(done) for done in self.answers[:text_idx])
        self._ranges.append((first_row, first_row + len(answer)))
        self._range_of[first_row : first_row + len(answer)] = text_idx
        places: dict[int, list[int]] = {}
        for row, last in enumerate((prompt[-1], *answer[:-1]), first_row):
            places.setdefault(last, []).append(row)
        self._places.append(places)
        # A draft model reads the beginning and the end of a long text, which depends on when it begins.
        for skipped in sorted({num_skipped(len(prompt) + num_written) for num_written in range(len(answer))} | {0}):
            self._add_path(text_idx, read_part(prompt, skipped), answer, first_row)

    def _add_path(self, text_idx: int, prompt: Sequence[int], answer: Sequence[int], first_row: int) -> None:
        state = ROOT
        for token in prompt:
            state = self._next.get((state, token)) or self._make(state, token, first_row, first_row)
        for row, token in enumerate(answer, first_row):
            if state in self._answered and self.truths[self._row[state]] != token:
                raise PlanError(f"text {text_idx} continues differently after the same tokens as another one; drop it")
            self._answered.add(state)
            self._row[state] = self._cursor[state] = row
            state = self._next.get((state, token)) or self._make(state, token, row, row)

    def _make(self, state: int, token: int, row: int, cursor: int) -> int:
        made = self._next[state, token] = len(self._row)
        self._hash.append(self._hash_of(state, token))
        self._row.append(row)
        self._cursor.append(min(cursor, len(self.truths) - 1))
        return made

    def _stray_row(self, state: int, token: int, cursor: int) -> int:
        """Return the recorded position that stands for a path off the text."""
        text_idx = int(self._range_of[min(self._cursor[state], len(self.truths) - 1)])
        first, end = self._ranges[text_idx]
        behind = self._places[text_idx].get(token, [])
        num_before = bisect_left(behind, min(cursor, end))
        if num_before:
            return behind[num_before - 1]
        return first + (self._hash_of(state, token) >> 20) % (end - first)

    def _hash_of(self, state: int, token: int) -> int:
        """Return a hash of a state's tokens and one more, in 64 bits."""
        mixed = ((self._hash[state] + 1) * _GOLDEN ^ (token + 1) * 0xBF58476D1CE4E5B9) & _MASK
        return ((mixed ^ (mixed >> 31)) * 0x94D049BB133111EB) & _MASK


class TextEnd:
    """Ends a text where the recorded one ended."""

    def __init__(self, num_tokens: int) -> None:
        self._left = num_tokens

    def feed(self, token_id: int) -> bool:
        """Return True at the last token."""
        self._left -= 1
        return self._left == 0


def _layers(first: FloatArray, deeper: FloatArray, num_deeper: int) -> FloatArray:
    """Return candidates by layer, [L + 1, n, K]: behind those that were recorded, the last ones again."""
    known = np.concatenate([first[None], deeper])
    return known[np.minimum(np.arange(num_deeper + 1), len(known) - 1)]


def _drafted(recording: Recording, method: str) -> npt.NDArray[np.bool_]:
    flags = [drafted_by(text, method) for text in recording.texts]
    known = [one for one in flags if one is not None]
    if len(known) < len(flags):
        raise PlanError(f"the recording does not say what {method} drafts; make it with card record --methods {method}")
    return np.concatenate(known)
