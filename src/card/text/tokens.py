"""Text of token ids, whole or as they come."""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Iterable, Sequence

from card.text.tokenizer import Tokenizer

CHARS_PER_TOKEN = 8  # twice those of ordinary tokens: a text with more for each token of a room is too long for it
REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no valid UTF-8
_MOST_WINDOW_TOKENS = 32  # a longer window is cut
_KEPT_WINDOW_TOKENS = 12  # to this many; 4 bytes already fix the decoder's state
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # how SentencePiece vocabularies name a single byte
# The alphabet of byte-level vocabularies: bytes that are printed in Latin-1 are themselves, others follow from 256 on.
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(sorted(set(range(256)).difference(_PRINTED)))
_BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {chr(256 + idx): byte for idx, byte in enumerate(_OTHERS)}
_MOST_CHAR_BYTES = 4  # of one character in UTF-8


def decode(tokenizer: Tokenizer, token_ids: Iterable[int], *, after: Sequence[int] = ()) -> str:
    """Return the text of ``token_ids`` without special tokens: what `Detokenizer` gives piece by piece.

    Args:
        after: tokens that stand before them; their text is not in the result, see `Detokenizer`.
    """
    if not after:
        return _decoded(tokenizer, token_ids, is_whole=True)
    detokenizer = Detokenizer(tokenizer, after=after)
    return detokenizer.push(token_ids) + detokenizer.flush()


def decode_prompt(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str:
    """Return the text of a prompt that goes on: without a character that its last tokens only begin.

    Together with ``decode(tokenizer, ids, after=prompt_ids)`` it is the text of all tokens.
    """
    return _closed_text(tokenizer, prompt_ids, is_whole=True)


class Detokenizer:
    """Turns token ids into text as they arrive; the pieces together are `decode` of all ids.

    The text is that of a part of a longer text: behind a prompt, a first token keeps the blank that decoders drop at
    the beginning of a text. So the text of a prompt and that of the tokens after it make the text of all tokens. Where
    a prompt ends within a character, the whole character belongs to what follows.

    Only text that no later token can change is given out: an incomplete UTF-8 sequence waits for its end, and so does a
    run of SentencePiece byte tokens, of which one broken byte spoils all. Each call decodes a short window of the
    newest tokens. The window may be cut anywhere as long as its text after the cut stays the same: UTF-8 is
    self-synchronising, so a decoder's state depends on the last four bytes only.
    """

    def __init__(self, tokenizer: Tokenizer, *, after: Sequence[int] = ()) -> None:
        """Begin.

        Args:
            after: tokens of the prompt, whose text is not given out.
        """
        self._tokenizer = tokenizer
        self.silent_tokens = tokenizer.skipped_tokens  # tokens without text in the output, by id
        self._window = self._context(after)
        # Characters of the window's text given out already, by the prompt or by us.
        self._num_emitted = len(_closed_text(tokenizer, self._window)) if self._window else 0
        self._cut_at = _MOST_WINDOW_TOKENS
        self._run = _ByteRun()  # that the window ends with
        for token_id in self._window:
            self._run = self._run.followed_by(_name(tokenizer, token_id))

    @property
    def held_back(self) -> str:
        """The text that waits, as it would be if nothing followed."""
        return _decoded(self._tokenizer, self._window)[self._num_emitted :]

    @property
    def has_new_character(self) -> bool:
        """True if the newest token with a text has completed a character that waits."""
        return self._run.has_new_character

    def waiting(self, num_chars: int | None = None) -> str:
        """Return the text of byte tokens that waits, as far as its characters are complete and no byte spoils it.

        Args:
            num_chars: so many characters at its end are enough; the time does not grow with what is before them.
        """
        if not self._run.length or not self._run.is_valid:
            return ""
        ids = self._window[: len(self._window) - self._run.num_open]
        if num_chars is None or self._run.length <= (most := _MOST_CHAR_BYTES * (num_chars + 1)):
            return _decoded(self._tokenizer, ids)[self._num_emitted :]
        return _decoded(self._tokenizer, self._from_a_character(ids[-most:]))[-num_chars:]

    def _from_a_character(self, byte_ids: list[int]) -> list[int]:
        """Return byte tokens without those at the beginning that only end a character."""
        bytes_of = (piece_bytes(_name(self._tokenizer, token_id))[0] for token_id in byte_ids)
        return byte_ids[next(idx for idx, byte in enumerate(bytes_of) if byte & 0xC0 != 0x80) :]

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens and return the text that is certain now; may be empty."""
        token = ""
        for token_id in token_ids:
            if known := self._visible(token_id):
                token = known
                self._window.append(token_id)
                self._run = self._run.followed_by(token)
        if not token or _BYTE_TOKEN.fullmatch(token):
            return ""
        text = _decoded(self._tokenizer, self._window)
        return self._emit(text, len(text) - text.endswith(REPLACEMENT))

    def flush(self) -> str:
        """Return the text that was held back; call it once, after the last token."""
        text = _decoded(self._tokenizer, self._window)
        return self._emit(text, len(text))

    def _emit(self, text: str, num_certain: int) -> str:
        num_certain = max(num_certain, self._num_emitted)
        piece = text[self._num_emitted : num_certain]
        self._num_emitted = num_certain
        if len(self._window) > self._cut_at:
            self._cut(held_back=text[num_certain:])
        return piece

    def _cut(self, held_back: str) -> None:
        window = self._window[-_KEPT_WINDOW_TOKENS:]
        text = _decoded(self._tokenizer, window)
        if text.endswith(held_back) and len(text) > len(held_back):  # a first token may lose its leading space
            self._window, self._num_emitted = window, len(text) - len(held_back)
            self._cut_at = _MOST_WINDOW_TOKENS
        else:
            self._cut_at = 2 * len(self._window)

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the tokens at a prompt's end that what follows depends on.

        A run of byte tokens counts as far as it is an unfinished character: bytes that follow it must not spoil those
        that were shown. It stays whole where nothing stands before it.
        """
        before: list[int] = []  # the newest first, like the run
        run: list[int] = []
        for token_id in reversed(prompt_ids):
            token = self._visible(token_id)
            if token and not before and _BYTE_TOKEN.fullmatch(token):
                run.append(token_id)
            elif token:
                before.append(token_id)
            if len(before) == _KEPT_WINDOW_TOKENS:
                break
        num_open = _num_open_bytes(self._tokenizer, run[::-1])
        return (run[:num_open] + before)[::-1] if before else run[::-1]

    def _visible(self, token_id: int) -> str:
        """Return a token's name; empty if it has no text: a silent one, or a row that only pads the embedding."""
        return "" if token_id in self.silent_tokens else _name(self._tokenizer, token_id)


class _ByteRun:
    """The byte tokens in a row that a text ends with, of which one that is no UTF-8 spoils all."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.is_valid = True
        self.has_new_character = False
        self.length = 0

    def followed_by(self, token: str) -> _ByteRun:
        """Return the run that a text ends with once a token is added, by its name."""
        if _BYTE_TOKEN.fullmatch(token):
            self._add(piece_bytes(token))
            return self
        return _ByteRun() if self.length else self

    def _add(self, byte: bytes) -> None:
        self.length += 1
        self.has_new_character = False
        if self.is_valid:
            try:
                self.has_new_character = bool(self._decoder.decode(byte))
            except UnicodeDecodeError:
                self.is_valid = False

    @property
    def num_open(self) -> int:
        """Number of bytes at the end that have only begun a character."""
        return len(self._decoder.getstate()[0])


def _decoded(tokenizer: Tokenizer, token_ids: Iterable[int], *, is_whole: bool = False) -> str:
    """Return the text of tokens.

    Args:
        is_whole: the silent tokens are still among them.
    """
    return tokenizer.decode(token_ids, skip_special_tokens=is_whole, clean_up_tokenization_spaces=False)


def _closed_text(tokenizer: Tokenizer, token_ids: Sequence[int], *, is_whole: bool = False) -> str:
    """Return the text of tokens without the character that the last of them only begin."""
    text = _decoded(tokenizer, token_ids, is_whole=is_whole)
    if not text.endswith(REPLACEMENT):
        return text
    silent = tokenizer.skipped_tokens if is_whole else {}
    visible = [token_id for token_id in token_ids if token_id not in silent]
    run = list(itertools.takewhile(lambda token_id: _BYTE_TOKEN.fullmatch(_name(tokenizer, token_id)), visible[::-1]))
    num_open = _num_open_bytes(tokenizer, run[::-1] or visible)
    if run and num_open:  # each byte is a token of its own
        return _decoded(tokenizer, visible[:-num_open])
    return text.removesuffix(REPLACEMENT) if num_open else text


def _num_open_bytes(tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
    """Return how many bytes at the end of tokens are the beginning of a character that goes on."""
    data = b"".join(piece_bytes(_name(tokenizer, token_id)) for token_id in token_ids[-_MOST_CHAR_BYTES:])
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])


def piece_bytes(token: str) -> bytes:
    """Return the bytes that a vocabulary's name of a token stands for, also where they are only part of a character.

    Byte-level vocabularies name bytes by characters of an alphabet, SentencePiece ones have tokens such as <0xE2>.
    """
    if _BYTE_TOKEN.fullmatch(token):
        return bytes((int(token[3:-1], 16),))
    if all(char in _BYTE_OF for char in token):
        return bytes(_BYTE_OF[char] for char in token)
    return token.encode("utf-8", errors="replace")


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.convert_ids_to_tokens(token_id) or ""
