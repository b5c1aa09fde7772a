"""Most text that one token can stand for, so that a text far too long is recognised without tokenizing it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from card.text.tokenizer import Tokenizer

_NUM_BYTE_VALUES = 256
_MOST_COMPOSED = 3  # bytes that Unicode's NFC makes one of at most: three Hangul letters become one syllable
_NOT_SHRINKING = frozenset({"Prepend", "ByteLevel"})  # normalizers that never make a text shorter
_KEEPING = frozenset(
    {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts"}
)  # all but "Removed"


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The most bytes of UTF-8 that one token of a tokenizer stands for."""

    most: int | None  # None: nothing is known, so any text may fit
    skips_blanks: bool = False  # a token may stand for any number of further blanks

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that ``text`` has at least."""
        if self.most is None:
            return 0
        counted = "".join(text.split()) if self.skips_blanks else text
        return -(-len(counted.encode("utf-8", "surrogatepass")) // self.most)


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Return the bound of a tokenizer: its longest token, if each byte of a text is in just one token.

    That holds if every byte has a token, and no earlier step drops a part of the text. Other tokenizers, such as those
    that lower the case, split at blanks or have one token for everything unknown, have no bound.
    """
    backend = tokenizer.backend_tokenizer
    if backend is None:
        return TokenBytes(None)
    parts: dict[str, Any] = json.loads(backend.to_str())
    model, added = parts["model"], parts.get("added_tokens") or []
    tokens = list(_tokens(model))
    steps = [*_steps(parts.get("pre_tokenizer"), "pretokenizers")]
    normalizers = _steps(parts.get("normalizer"), "normalizers")
    is_byte_level = any(step.get("type") == "ByteLevel" for step in (*steps, *normalizers))
    factor = _shrinking(parts.get("normalizer"))
    keeps_all = all(step.get("type") in _KEEPING and step.get("behavior") != "Removed" for step in steps)
    if factor is None or not keeps_all or not _has_all_bytes(tokens, is_byte_level=is_byte_level, model=model):
        return TokenBytes(None)
    longest = max(len(one) if is_byte_level else len(one.encode()) for one in tokens)  # there a character is a byte
    longest = max(longest * factor, *(len(one["content"].encode()) * factor for one in added), 1)
    return TokenBytes(longest, any(one.get("lstrip") or one.get("rstrip") for one in added))


def _tokens(model: Mapping[str, Any]) -> Iterator[str]:
    vocabulary = model.get("vocab") or ()
    for one in vocabulary:
        yield one if isinstance(one, str) else one[0]  # Unigram lists pairs of token and score


def _steps(step: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a pipeline, which may be one of several."""
    if step is None:
        return
    if step.get("type") == "Sequence":
        for one in step[name]:
            yield from _steps(one, name)
    else:
        yield step


def _shrinking(normalizer: Mapping[str, Any] | None) -> int | None:
    """Return how many times shorter a normalizer may make a text; None if there is no telling."""
    factor = 1
    for step in _steps(normalizer, "normalizers"):
        kind = step.get("type")
        if kind == "NFC":
            factor = _MOST_COMPOSED
        elif kind == "Replace":
            replaced = step["pattern"].get("String")
            if replaced is None or len(replaced.encode()) > len(step["content"].encode()):
                return None
        elif kind not in _NOT_SHRINKING:
            return None
    return factor


def _has_all_bytes(tokens: list[str], *, is_byte_level: bool, model: Mapping[str, Any]) -> bool:
    """Return whether there is a token for each byte, so that none is unknown."""
    known = set(tokens)
    if is_byte_level:
        return model.get("type") == "BPE" and known.issuperset(ByteLevel.alphabet())
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in known for byte in range(_NUM_BYTE_VALUES))
