"""Tokenizers of GGUF files as they are kept: built from lists, which takes less time than reading a tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken
from tokenizers.models import BPE

_NAME = "tokenizer.json"
_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


@dataclass(frozen=True, slots=True)
class Pairs:
    """A vocabulary, and which pairs of its tokens become one."""

    tokens: Sequence[str]  # by id; of those that are there twice the last one counts
    merges: list[tuple[str, str]]  # the first ones first
    options: Mapping[str, Any]  # of `BPE`

    def model(self) -> BPE:
        """Return what makes tokens of words. Raises: Exception, if halves of a pair are no tokens."""
        return BPE(vocab=self.ids, merges=self.merges, **self.options)

    @property
    def ids(self) -> dict[str, int]:
        """The ids of all tokens."""
        return dict(zip(self.tokens, range(len(self.tokens)), strict=True))


@dataclass(frozen=True, slots=True)
class Parts:
    """A tokenizer in parts."""

    core: tokenizers.Tokenizer
    pairs: Pairs  # of the core
    frame: Mapping[str, Any]  # what the tokenizer around it is told besides


class _Kept(msgspec.Struct):
    tokens: list[str]
    halves: list[int]  # ids of both halves of each pair
    options: dict[str, Any]
    rest: str  # the core without vocabulary
    added: list[dict[str, Any]]
    frame: dict[str, Any]


def write_parts(folder: Path, parts: Parts) -> None:
    """Write a tokenizer to a folder. Raises: OSError."""
    core, pairs, rest = parts.core, parts.pairs, tokenizers.Tokenizer(BPE())
    for step in _STEPS:
        if (part := getattr(core, step)) is not None:
            setattr(rest, step, part)
    ids = pairs.ids
    added = [token for _, token in sorted(core.get_added_tokens_decoder().items())]
    stored = _Kept(
        tokens=list(pairs.tokens),
        halves=[ids[half] for pair in pairs.merges for half in pair],
        options=dict(pairs.options),
        rest=rest.to_str(),
        added=[{field: getattr(token, field) for field in _FIELDS} for token in added],
        frame=dict(parts.frame),
    )
    (folder / _NAME).write_bytes(msgspec.json.encode(stored))


def read_parts(folder: Path) -> Parts:
    """Return the tokenizer that was written to a folder."""
    stored = msgspec.json.decode((folder / _NAME).read_bytes(), type=_Kept)
    halves = iter(map(stored.tokens.__getitem__, stored.halves))
    pairs = Pairs(stored.tokens, list(zip(halves, halves, strict=True)), stored.options)
    core = tokenizers.Tokenizer.from_str(stored.rest)
    core.model = pairs.model()
    core.add_tokens([AddedToken(**token) for token in stored.added])
    return Parts(core, pairs, stored.frame)
