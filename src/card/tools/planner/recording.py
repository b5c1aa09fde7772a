"""Recording of a pair on some prompts: the target's texts, and the likely tokens of both models at each position.

With a recording the engine runs without a model (`card.tools.planner.replay`). Scores of the draft model are those that
its drafter reports: under the sampling rule, with coupled noise if it was on, sharpened. So it replays one seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from card.drafting.local.protocol import check_proposal
from card.errors import CardError, PlanError
from card.tools.planner.files import read_file, write_bytes
from card.tree.nodes import Nodes

KIND, VERSION = "recording", 1


class HeadRows(msgspec.Struct, frozen=True, kw_only=True):
    """Candidates of a trained head after each token of a text, C at most. Arrays as of `RecordedText`."""

    token_ids: bytes  # int32 [n, C]; -1 where there are no more
    parents: bytes  # int32 [n, C] index of each candidate's parent; -1 for the text's token
    logprobs: bytes  # float32 [n, C] of the path to each


class RecordedText(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and the target's answer of n tokens. Arrays are little-endian bytes, row by row."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # [n]
    finish_reason: Literal["stop", "length"]
    draft_ids: bytes  # int32 [n, K]: the drafter's candidates for each position, best first
    draft_logprobs: bytes  # float32 [n, K]
    target_ids: bytes  # int32 [n, T]: the target's likeliest tokens, best first
    deeper_ids: bytes = b""  # int32 [L, n, K]: candidates in deeper layers of a chain; none unless it reads own states
    deeper_logprobs: bytes = b""  # float32 [L, n, K]
    drafted: dict[str, bytes] = {}  # by method with a drafter of its own, bool [n]: the token was drafted
    head: HeadRows | None = None  # None: no head was recorded


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """A pair's behaviour on a set of prompts."""

    kind: str = KIND
    version: int = VERSION
    target: str
    draft: str
    source: str  # command, or how it was made up
    tokenizer: str = ""  # fingerprint of the one that target and draft share; empty if made up
    vocab_size: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int
    coupled_noise: bool = True  # the draft's scores include the target's noise; irrelevant without temperature
    max_tokens: int
    num_candidates: int  # K
    num_target_ids: int  # T
    dtype: str = ""
    date: str = ""
    versions: dict[str, str] = {}
    texts: tuple[RecordedText, ...]

    @property
    def num_tokens(self) -> int:
        """New tokens of all texts."""
        return sum(len(text.token_ids) for text in self.texts)

    def agreement(self) -> float:
        """Return the share of positions, in [0, 1], whose token is the drafter's first choice."""
        firsts = (rows_of(self, text).draft_ids[:, 0] == text.token_ids for text in self.texts)
        return sum(int(are_right.sum()) for are_right in firsts) / max(self.num_tokens, 1)


@dataclass(frozen=True, slots=True)
class TargetText:
    """Text of the target after a prompt."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]


def _none() -> npt.NDArray[Any]:
    return np.zeros((0, 1, 1), np.float32)


@dataclass(frozen=True, slots=True)
class Rows:
    """The arrays of one text."""

    draft_ids: npt.NDArray[np.integer]  # [n, K]
    draft_logprobs: npt.NDArray[np.floating]  # [n, K]
    target_ids: npt.NDArray[np.integer]  # [n, T]
    deeper_ids: npt.NDArray[np.integer] = field(default_factory=_none)  # [L, n, K]
    deeper_logprobs: npt.NDArray[np.floating] = field(default_factory=_none)  # [L, n, K]


def rows_of(recording: Recording, text: RecordedText) -> Rows:
    """Return the arrays of one text of a recording. Raises: PlanError if their sizes are not what it says."""
    n, k, t = len(text.token_ids), recording.num_candidates, recording.num_target_ids
    try:
        return Rows(
            np.frombuffer(text.draft_ids, "<i4").reshape(n, k),
            np.frombuffer(text.draft_logprobs, "<f4").reshape(n, k),
            np.frombuffer(text.target_ids, "<i4").reshape(n, t),
            np.frombuffer(text.deeper_ids, "<i4").reshape(-1, n, k),
            np.frombuffer(text.deeper_logprobs, "<f4").reshape(-1, n, k),
        )
    except ValueError as error:
        raise PlanError(f"a text of {n} tokens has arrays of other sizes ({error}); record it again") from error


def drafted_by(text: RecordedText, method: str) -> npt.NDArray[np.bool_] | None:
    """Return which tokens were drafted by a method's own drafter, bool [n]; None if that was not recorded."""
    flags = text.drafted.get(method)
    return None if flags is None else np.frombuffer(flags, np.bool_)


def head_nodes(text: RecordedText) -> list[Nodes]:
    """Return the candidates of a head after each token of a text. Raises: PlanError if no head was recorded."""
    if text.head is None:
        raise PlanError("the recording has no candidates of a head; make it with card record --methods ctc --ctc FILE")
    dtypes = (("token_ids", "<i4"), ("parents", "<i4"), ("logprobs", "<f4"))
    arrays = [np.frombuffer(getattr(text.head, name), dtype).reshape(len(text.token_ids), -1) for name, dtype in dtypes]
    trees = []
    for ids, parents, logprobs in zip(*arrays, strict=True):
        num = int((ids >= 0).sum())
        tokens, above, scores = (tuple(array[:num].tolist()) for array in (ids, parents, logprobs))
        trees.append(Nodes(tokens, above, scores))
    return trees


def pack_head(behind: Sequence[Nodes]) -> HeadRows:
    """Return the candidates after each token of a text in the recording's format."""
    width = max([1, *map(len, behind)])
    ids, parents = (np.full((len(behind), width), -1, "<i4") for _ in range(2))
    logprobs = np.zeros((len(behind), width), "<f4")
    for row, nodes in enumerate(behind):
        for array, values in ((ids, nodes.tokens), (parents, nodes.parents), (logprobs, nodes.path_logprobs)):
            array[row, : len(nodes)] = values
    return HeadRows(token_ids=ids.tobytes(), parents=parents.tobytes(), logprobs=logprobs.tobytes())


def pack_text(
    prompt_ids: Sequence[int], token_ids: Sequence[int], finish_reason: Literal["stop", "length"], rows: Rows
) -> RecordedText:
    """Return one text in the recording's format; arguments as of the fields."""
    return RecordedText(
        prompt_ids=tuple(prompt_ids),
        token_ids=tuple(token_ids),
        finish_reason=finish_reason,
        draft_ids=rows.draft_ids.astype("<i4").tobytes(),
        draft_logprobs=rows.draft_logprobs.astype("<f4").tobytes(),
        target_ids=rows.target_ids.astype("<i4").tobytes(),
        deeper_ids=rows.deeper_ids.astype("<i4").tobytes(),
        deeper_logprobs=rows.deeper_logprobs.astype("<f4").tobytes(),
    )


def load_recording(path: Path) -> Recording:
    """Read a recording. Raises: PlanError if it is unreadable, no recording, of another version, or contradictory."""
    return read_file(path, Recording, KIND, VERSION, msgspec.msgpack.decode, check_recording)


def save_recording(recording: Recording, path: Path) -> None:
    """Write a recording. Raises: PlanError."""
    check_recording(recording)
    write_bytes(path, msgspec.msgpack.encode(recording))


def check_recording(recording: Recording) -> None:
    """Raise PlanError if the recording contradicts itself."""
    if not recording.texts:
        raise PlanError("it has no texts")
    if recording.num_candidates < 1 or recording.num_target_ids < 1 or recording.vocab_size < 2:
        raise PlanError("it has no candidates, or fewer than two tokens")
    seen: set[tuple[int, ...]] = set()
    for idx, text in enumerate(recording.texts):
        if not text.prompt_ids or not text.token_ids:
            raise PlanError(f"text {idx} has no prompt or no tokens")
        if text.prompt_ids in seen:
            raise PlanError(f"text {idx} has the prompt of an earlier one; record each prompt once")
        seen.add(text.prompt_ids)
        rows = rows_of(recording, text)
        arrays = (np.array(text.prompt_ids + text.token_ids), rows.draft_ids, rows.target_ids, rows.deeper_ids)
        ids = np.concatenate([array.ravel() for array in arrays])
        if ids.min() < 0 or ids.max() >= recording.vocab_size:
            raise PlanError(f"text {idx} has tokens that are not from 0 to {recording.vocab_size - 1}")
        if len(rows.deeper_ids) != len(rows.deeper_logprobs):
            raise PlanError(f"text {idx} has deeper candidates without log-probabilities, or the other way round")
        logprobs = np.concatenate([rows.draft_logprobs.ravel(), rows.deeper_logprobs.ravel()])
        if not np.isfinite(logprobs).all() or logprobs.max() > 1e-3:
            raise PlanError(f"text {idx} has log-probabilities that are no numbers or above 0")
        _check_own_drafts(idx, text, recording.vocab_size)


def _check_own_drafts(idx: int, text: RecordedText, vocab_size: int) -> None:
    """Raise PlanError if the drafts of single methods do not fit the text."""
    if any(len(flags) != len(text.token_ids) for flags in text.drafted.values()):
        raise PlanError(f"text {idx} marks drafted tokens for another number of tokens than it has")
    if text.head is not None:
        try:
            behind = head_nodes(text)
            for nodes in behind:
                check_proposal(nodes, vocab_size)
        except (ValueError, CardError) as error:
            raise PlanError(
                f"text {idx} has candidates of a head that make no tree ({error}); record it again"
            ) from None
