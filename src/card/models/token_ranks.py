"""Tokens in the order of how often texts use them, as the bytes that they stand for: one list for all tokenizers.

`scripts/count_tokens.py` makes the list, and names its texts. What a tokenizer has besides follows in the order of its
ids: byte-level ones are numbered about by frequency.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

FILE = Path(__file__).with_name("token_ranks.bin")
_BLANK = "\u2581"  # SentencePiece's


def write_ranks(pieces: Sequence[bytes]) -> None:
    """Write the list, the most frequent first."""
    FILE.write_bytes(zlib.compress(msgspec.msgpack.encode(list(pieces)), 9))


def read_ranks() -> list[bytes]:
    """Return the list."""
    return msgspec.msgpack.decode(zlib.decompress(FILE.read_bytes()), type=list[bytes])


def used_ids(vocabulary: Mapping[str, int]) -> list[int]:
    """Return the ids of the tokens of a vocabulary that texts use, the most frequent first."""
    if is_byte_level(vocabulary):
        table = {byte: char for char, byte in _byte_of().items()}
        names = [piece.decode("latin-1").translate(table) for piece in read_ranks()]
    else:
        names = [piece.decode(errors="replace").replace(" ", _BLANK) for piece in read_ranks()]
    return [vocabulary[name] for name in names if name in vocabulary]


def is_byte_level(vocabulary: Mapping[str, int]) -> bool:
    """Return whether tokens are named by characters that stand for bytes, as GPT-2's are."""
    return "\u0120" in vocabulary


def piece_of(token: str, *, in_bytes: bool) -> bytes:
    """Return the bytes that a token stands for."""
    if not in_bytes:
        return token.replace(_BLANK, " ").encode()
    byte_of = _byte_of()
    try:
        return bytes([byte_of[char] for char in token])
    except KeyError:  # an added token
        return token.encode()


@functools.cache
def _byte_of() -> Mapping[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Source: GPT-2's tokenizer: bytes that can be printed stand for themselves, the others for characters from 256 on.
    """
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printed)]
    return {**{chr(byte): byte for byte in printed}, **{chr(256 + n): byte for n, byte in enumerate(others)}}
