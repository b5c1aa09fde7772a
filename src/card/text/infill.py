"""Prompts that ask for what belongs between two texts, for models that were trained on such gaps.

The marks around the parts are tokens. A GGUF file may name them, and they are known by name else. Sources: the model
cards of the families, and Bavarian et al. 2022, arXiv:2207.14255, for both orders of the parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from card.text.prompts import check_text
from card.text.tokenizer import Tokenizer
from card.text.tokens import CHARS_PER_TOKEN


@dataclass(frozen=True, slots=True)
class _Family:
    """The marks of a family of models, by name."""

    prefix: str
    suffix: str
    middle: str | None  # None: the answer follows the prefix without a mark
    is_suffix_first: bool = False


_FAMILIES = (
    _Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 3 and 4
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Family("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),  # DeepSeek
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    _Family("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", is_suffix_first=True),  # Seed-Coder
    _Family("[PREFIX]", "[SUFFIX]", None, is_suffix_first=True),  # Codestral, Devstral
)
_PADS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>")
_REPOS = ("<|repo_name|>", "<repo_name>", "<|reponame|>", "<reponame>")  # before the name of a repository
_FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<|filename|>", "<filename>")  # before each file
_ENDS = ("▁<EOT>", "<|endoftext|>", "<|end_of_text|>")
_REPO_NAME, _FILE_NAME = "repository", "file"  # where a request names none
_FOREIGN = "\u263a"  # a character that no tokenizer joins to what follows


@dataclass(frozen=True, slots=True)
class OtherFile:
    """Another file of the project, which a gap may refer to."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class FilledPrompt:
    """The token ids of a gap."""

    token_ids: tuple[int, ...]
    num_left_out: int = 0  # other files that had no room


class Infill:
    """Makes prompts of gaps for one tokenizer.

    The texts are text and nothing else: names of special tokens in them become no such tokens.

    Attributes:
        end_ids: tokens that end an answer, besides those that end any text.
        end_texts: the names of those among them that decoding does not leave out.
    """

    def __init__(self, tokenizer: Tokenizer, family: _Family) -> None:
        """Take the marks of a family, all of which the tokenizer has."""
        self._tokenizer, self._family = tokenizer, family
        silent, stated = tokenizer.skipped_tokens, tokenizer.fill_marks
        self._repo_id = self._first_of([stated.get("repo"), *_REPOS])
        self._file_id = self._first_of([stated.get("file"), *_FILES])
        names = [stated.get("pad"), stated.get("repo"), stated.get("file"), *_PADS, *_REPOS, *_FILES, *_ENDS]
        ends = self._ids_of([family.prefix, family.suffix, family.middle, *names])
        self.end_ids = frozenset(ends.values())
        self.end_texts = tuple(name for name, token_id in ends.items() if token_id not in silent)
        self._begin_ids = _ids_before_a_text(tokenizer)
        special = {name for name in (*ends, *silent.values()) if len(name) > 1}
        first_chars = "".join(map(re.escape, sorted({name[0] for name in special})))
        self._names = re.compile(f"(?=[{first_chars}])(?={'|'.join(map(re.escape, sorted(special)))})")
        self._num_foreign = len(self._encode(_FOREIGN))
        inner = self._behind_foreign("a")
        self._adds_blank = bool(inner) and inner != self._encode("a")

    def prompt(
        self, prefix: str | Sequence[int], suffix: str, others: Sequence[OtherFile] = (), *, room: int = 0
    ) -> FilledPrompt:
        """Return the prompt of a gap.

        Args:
            prefix: what stands before it, as text or as token ids.
            suffix: what stands behind it.
            others: files that stand before both; the first ones are left out if they do not fit.
            room: tokens that the prompt may have with other files.
        Raises: PromptError for a text that is not valid.
        """
        family = self._family
        for text in (prefix, suffix, *(part for one in others for part in (one.name, one.text))):
            if isinstance(text, str):
                check_text(text, "a text around the gap")
        before = self._parts(prefix, self._encode) if isinstance(prefix, str) else list(prefix)
        behind = self._parts(suffix, self._encode_inside)
        num_fixed = len(self._begin_ids) + len(before) + len(behind) + len(self._head()) + 3
        fitting = self._fitting(others, room - num_fixed)
        files = [token_id for one in fitting for token_id in one]
        if self._file_id is None:
            head, before = [], [*files, *before]
        else:
            head = [*self._head(), *files, *self._file(_FILE_NAME, "")] if fitting else []
        prefix_ids, suffix_ids = [self._id(family.prefix), *before], [self._id(family.suffix), *behind]
        parts = [*suffix_ids, *prefix_ids] if family.is_suffix_first else [*prefix_ids, *suffix_ids]
        middle = [] if family.middle is None else [self._id(family.middle)]
        return FilledPrompt((*self._begin_ids, *head, *parts, *middle), len(others) - len(fitting))

    # ---- other files ------------------------------------------------------------------------------------------------

    def _fitting(self, others: Sequence[OtherFile], room: int) -> list[list[int]]:
        """Return the ids of the last files that fit, in their order."""
        told: list[list[int]] = []
        room -= len(self._file(_FILE_NAME, ""))
        for one in reversed(others):
            if len(one.name) + len(one.text) > CHARS_PER_TOKEN * max(0, room):
                break  # tokenizing it would take long
            ids = self._file(one.name, one.text)
            room -= len(ids)
            if room < 0:
                break
            told.insert(0, ids)
        return told

    def _head(self) -> list[int]:
        """Return what stands before the first of several files."""
        if self._repo_id is None:
            return []
        return [self._repo_id, *self._parts(f"{_REPO_NAME}\n", self._encode_inside)]

    def _file(self, name: str, text: str) -> list[int]:
        if self._file_id is None:
            return self._parts(f"{name}\n{text}\n\n", self._encode_inside)
        return [self._file_id, *self._parts(f"{name}\n{text}", self._encode_inside)]

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def _parts(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Return the ids of a text, cut where else a special token would be found in it.

        Args:
            encode: for the text up to the first cut.
        """
        ids: list[int] = []
        for piece in self._cut(text):
            ids += encode(piece)
            encode = self._encode_inside
        return ids

    def _cut(self, text: str) -> Iterator[str]:
        """Yield a text in pieces, so that no name of a special token is whole in any of them."""
        start = 0
        for match in self._names.finditer(text):
            yield text[start : match.start() + 1]
            start = match.start() + 1
        if start < len(text):
            yield text[start:]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _encode_inside(self, text: str) -> list[int]:
        """Return the ids of a text without the blank that some tokenizers put in front of every text."""
        return self._behind_foreign(text) if self._adds_blank else self._encode(text)

    def _behind_foreign(self, text: str) -> list[int]:
        return self._encode(_FOREIGN + text)[self._num_foreign :]

    def _id(self, name: str) -> int:
        token_id = self._tokenizer.convert_tokens_to_ids(name)
        assert token_id is not None, name
        return token_id

    def _ids_of(self, names: Iterable[str | None]) -> dict[str, int]:
        ids = {name: self._tokenizer.convert_tokens_to_ids(name) for name in names if name is not None}
        return {name: token_id for name, token_id in ids.items() if token_id is not None}

    def _first_of(self, names: Iterable[str | None]) -> int | None:
        return next(iter(self._ids_of(names).values()), None)


def find_infill(tokenizer: Tokenizer) -> Infill | None:
    """Return what makes prompts of gaps; None for a tokenizer without the marks."""
    family = _stated(tokenizer.fill_marks) or next((one for one in _FAMILIES if _has(tokenizer, one)), None)
    return None if family is None or not _has(tokenizer, family) else Infill(tokenizer, family)


def _stated(marks: Mapping[str, str]) -> _Family | None:
    """Return the family whose marks a file names; None if it does not name all of them."""
    if not {"prefix", "suffix", "middle"} <= marks.keys():
        return None
    known = next((one for one in _FAMILIES if one.prefix == marks["prefix"]), None)
    return known or _Family(marks["prefix"], marks["suffix"], marks["middle"])


def _has(tokenizer: Tokenizer, family: _Family) -> bool:
    names = (family.prefix, family.suffix, family.middle)
    return all(name is None or tokenizer.convert_tokens_to_ids(name) is not None for name in names)


def _ids_before_a_text(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that the tokenizer puts before each text."""
    framed, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    starts = range(len(framed) - len(bare) + 1)
    return framed[: next((start for start in starts if framed[start : start + len(bare)] == bare), 0)]
