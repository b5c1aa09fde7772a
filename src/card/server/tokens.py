"""Single tokens in answers: their text, their bytes, and lists of log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from card.api.outputs import StreamChunk
from card.text.tokenizer import Tokenizer
from card.text.tokens import REPLACEMENT, piece_bytes
from card.tree.sampling import TokenLogprobs

_LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


class TokenNames:
    """Names the tokens of one tokenizer; remembers them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """Return the text that one token adds, special ones included; broken UTF-8 gives replacement characters."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._decoded(token_id)
            # Decoded after a copy of itself: at the beginning of a text decoders drop a blank, or show a mark.
            if not self._is_broken(token_id, text):
                text = self._decoded(token_id, token_id).removeprefix(text)
            self._texts[token_id] = text
        return text

    def raw_bytes(self, token_id: int) -> list[int]:
        """Return the bytes of one token, even if they are only part of a character."""
        text = self.text(token_id)
        is_broken = self._is_broken(token_id, text)
        return list(piece_bytes(self._piece(token_id)) if is_broken else text.encode("utf-8", errors="replace"))

    def _is_broken(self, token_id: int, text: str) -> bool:
        """Return whether a token's bytes are not valid text by themselves."""
        return REPLACEMENT in text and REPLACEMENT not in self._piece(token_id)

    def _piece(self, token_id: int) -> str:
        piece: Any = self._tokenizer.convert_ids_to_tokens(token_id)
        return piece or ""

    def _decoded(self, *token_ids: int) -> str:
        return str(self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    # ---- lists in OpenAI's shapes -----------------------------------------------------------------------------------

    def chat_logprobs(self, tokens: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Return the `logprobs` of a choice of a chat completion."""
        content = []
        for token in tokens:
            top = [self._entry(token_id, logprob) for token_id, logprob in token.top]
            content.append({**self._entry(token.token_id, token.logprob), "top_logprobs": top})
        return {"content": content}

    def completion_logprobs(
        self, tokens: Sequence[TokenLogprobs | int], offsets: Sequence[int]
    ) -> dict[str, list[Any]]:
        """Return the `logprobs` of a choice of a completion.

        Args:
            tokens: a bare id has no log-probability: the first token of an echoed prompt.
            offsets: where each token begins in the text.
        """
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        for token in tokens:
            columns["tokens"].append(self.text(_id_of(token)))
            if isinstance(token, int):
                columns["token_logprobs"].append(None)
                columns["top_logprobs"].append(None)
                continue
            columns["token_logprobs"].append(_finite(token.logprob))
            top: dict[str, float] = {}
            for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
                top.setdefault(self.text(token_id), _finite(logprob))  # of tokens with equal text the likeliest counts
            columns["top_logprobs"].append(top)
        return {**columns, "text_offset": list(offsets)}

    def provenance(self, chunks: Iterable[StreamChunk]) -> list[dict[str, Any]]:
        """Return the origin of each token and the candidates beside it (`shows_tree`)."""
        rows = []
        for chunk in chunks:
            parts = (chunk.token_ids, chunk.origins, chunk.alternatives, chunk.thinks)
            for token_id, origin, beside, thinks in zip_longest(*parts):
                alternatives = [
                    {"token_id": other, "text": self.text(other), "path_logprob": logprob, "writer": writer}
                    for other, logprob, writer in beside or ()
                ]
                facts = {"token_id": token_id, "text": self.text(token_id), "origin": origin or ""}
                rows.append({**facts, "alternatives": alternatives, **({"thinks": True} if thinks else {})})
        return rows

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token_id), "logprob": _finite(logprob), "bytes": self.raw_bytes(token_id)}


def _id_of(token: TokenLogprobs | int) -> int:
    return token if isinstance(token, int) else token.token_id


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
