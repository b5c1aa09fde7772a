"""How single tokens are written in answers: their text, their bytes, and lists of log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from card.api.outputs import StreamChunk
from card.models.text import REPLACEMENT
from card.tree.sampling import TokenLogprobs

_LEAST_LOGPROB = -9999.0  # JSON has no minus infinity
# The alphabet of byte-level vocabularies.
_BYTE_OF = {char: byte for byte, char in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
_SPACE_MARK = "\u2581"  # a SentencePiece token that begins a word


class TokenNames:
    """Names the tokens of one tokenizer; remembers them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """Return the text of one token, special ones included; broken UTF-8 gives replacement characters."""
        text = self._texts.get(token_id)
        if text is None:
            text = str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
            if (self._piece(token_id) or "").startswith(_SPACE_MARK) and not text.startswith(" "):
                text = " " + text  # a decoder drops the blank that a text begins with
            self._texts[token_id] = text
        return text

    def raw_bytes(self, token_id: int) -> list[int]:
        """Return the bytes of one token, also where they are only a part of a character."""
        text = self.text(token_id)
        if REPLACEMENT not in text:
            return list(text.encode("utf-8", errors="replace"))
        piece = self._piece(token_id) or ""
        if piece.startswith("<0x") and piece.endswith(">"):
            return [int(piece[3:-1], 16)]
        if all(char in _BYTE_OF for char in piece):
            return [_BYTE_OF[char] for char in piece]
        return list(text.encode("utf-8", errors="replace"))

    def _piece(self, token_id: int) -> str | None:
        piece: Any = self._tokenizer.convert_ids_to_tokens(token_id)
        return piece if isinstance(piece, str) else None

    # ---- lists in OpenAI's shapes -----------------------------------------------------------------------------------

    def chat_logprobs(self, tokens: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Return the `logprobs` of a choice of a chat completion."""
        content = []
        for token in tokens:
            top = [self._entry(token_id, logprob) for token_id, logprob in token.top]
            content.append({**self._entry(token.token_id, token.logprob), "top_logprobs": top})
        return {"content": content}

    def completion_logprobs(self, tokens: Iterable[TokenLogprobs | int], first_offset: int) -> dict[str, list[Any]]:
        """Return the `logprobs` of a choice of a completion.

        Args:
            tokens: a bare id has no log-probability: the first token of an echoed prompt.
            first_offset: characters of the text before the first of these tokens.
        """
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            text = self.text(token if isinstance(token, int) else token.token_id)
            told["text_offset"].append(first_offset)
            told["tokens"].append(text)
            first_offset += len(text)
            if isinstance(token, int):
                told["token_logprobs"].append(None)
                told["top_logprobs"].append(None)
                continue
            told["token_logprobs"].append(_finite(token.logprob))
            top: dict[str, float] = {}
            for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
                top.setdefault(self.text(token_id), _finite(logprob))  # of tokens with one name the likeliest counts
            told["top_logprobs"].append(top)
        return told

    def provenance(self, chunks: Iterable[StreamChunk]) -> list[dict[str, Any]]:
        """Return where each token came from and which candidates lay beside it (`shows_tree`)."""
        found = []
        for chunk in chunks:
            for token_id, origin, beside in zip_longest(chunk.token_ids, chunk.origins, chunk.alternatives):
                alternatives = [
                    {"token_id": other, "text": self.text(other), "path_logprob": logprob, "writer": writer}
                    for other, logprob, writer in beside or ()
                ]
                own = {"token_id": token_id, "text": self.text(token_id), "origin": origin or ""}
                found.append({**own, "alternatives": alternatives})
        return found

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token_id), "logprob": _finite(logprob), "bytes": self.raw_bytes(token_id)}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
