"""Where two answers part, and how nearly the two tokens there tied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from card.verify_server.answers import Answer

_BEFORE, _AFTER = 24, 24  # characters shown around a difference
NEAR_TIE = 0.05  # log-probabilities no further apart may swap when a 16-bit pass rounds differently


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place at which an answer is not what it should be."""

    what: str  # text, token ids, finish reason, log-probabilities
    prompt_idx: int
    expected: str
    got: str
    before: str = ""  # what both have just before
    char_idx: int | None = None
    token_idx: int | None = None
    gap: float | None = None  # between the log-probabilities of the two tokens; None: not known
    note: str = ""

    @property
    def tie(self) -> str:
        """How nearly the two tokens tied, in words; empty if it is not known."""
        if self.gap is None:
            return ""
        name = "a near tie" if abs(self.gap) <= NEAR_TIE else "no near tie"
        return f"{name}: the two tokens are {abs(self.gap):.2g} apart in log-probability"


def compare(expected: Answer, got: Answer, prompt_idx: int, *, by_text: bool = False) -> Difference | None:
    """Return where the answers part; token ids count where both have them, unless texts alone are to be compared."""
    token_idx = None
    if not by_text and expected.token_ids is not None and got.token_ids is not None:
        token_idx = _first(expected.token_ids, got.token_ids)
    if expected.text != got.text:
        char_idx = _num_shared(expected.text, got.text)
        return Difference(
            what="text",
            prompt_idx=prompt_idx,
            before=expected.text[max(0, char_idx - _BEFORE) : char_idx],
            expected=expected.text[char_idx : char_idx + _AFTER],
            got=got.text[char_idx : char_idx + _AFTER],
            char_idx=char_idx,
            token_idx=token_idx,
        )
    if token_idx is not None:
        sides = [f"{ids[token_idx : token_idx + 4]}" for ids in (expected.token_ids, got.token_ids) if ids is not None]
        return Difference(what="token ids", prompt_idx=prompt_idx, expected=sides[0], got=sides[1], token_idx=token_idx)
    if expected.finish_reason != got.finish_reason:
        return Difference(
            what="finish reason",
            prompt_idx=prompt_idx,
            expected=str(expected.finish_reason),
            got=str(got.finish_reason),
        )
    return None


def gap_at(difference: Difference, plain: Answer, got: Answer) -> float | None:
    """Return how much likelier the plain answer's token is than the other one, at the place where they part.

    Args:
        plain: the plain answer, asked again with log-probabilities.
        got: the answer that differs.
    """
    if plain.scores is None or difference.char_idx is None:
        return None
    place = len(got.text[: difference.char_idx].encode())
    begin = 0
    for score in plain.scores:
        if begin + len(score.raw) > place:
            rest = got.text.encode()[begin:]
            others = [
                (len(text), logprob)
                for text, logprob in score.top
                if text != score.text and text and rest.startswith(text.encode())
            ]
            return score.logprob - max(others)[1] if others else None
        begin += len(score.raw)
    return None


def compare_scores(expected: Answer, got: Answer, prompt_idx: int, tolerance: float) -> Difference | None:
    """Return where tokens or log-probabilities of two answers with one text part."""
    pairs = zip(expected.scores or (), got.scores or (), strict=False)
    for idx, (one, other) in enumerate(pairs):
        if one.text != other.text or abs(one.logprob - other.logprob) > tolerance:
            return Difference(
                what="log-probabilities",
                prompt_idx=prompt_idx,
                expected=f"{one.text!r} {one.logprob:.4f}",
                got=f"{other.text!r} {other.logprob:.4f}",
                token_idx=idx,
            )
    sizes = [len(answer.scores or ()) for answer in (expected, got)]
    if sizes[0] != sizes[1]:
        return Difference(
            what="log-probabilities",
            prompt_idx=prompt_idx,
            expected=f"{sizes[0]} tokens",
            got=f"{sizes[1]} tokens",
            token_idx=min(sizes),
        )
    return None


def largest_gap(expected: Answer, got: Answer) -> float:
    """Return how far the log-probabilities of two answers are apart at most."""
    pairs = zip(expected.scores or (), got.scores or (), strict=False)
    return max((abs(one.logprob - other.logprob) for one, other in pairs), default=0.0)


def misspelt(answer: Answer, prompt_idx: int) -> Difference | None:
    """Return where the tokens of the log-probabilities do not spell the text; a special token may follow at its end."""
    scores = answer.scores or ()
    whole, last = b"".join(score.raw for score in scores), scores[-1].raw if scores else b""
    text = answer.text.encode()
    spelt = [whole, whole.removesuffix(last)]
    spelt += [one.lstrip() for one in spelt]  # a tokenizer's leading blank that the text leaves out
    if text in spelt or text.lstrip() in spelt or "\N{REPLACEMENT CHARACTER}" in answer.text:
        return None
    found = whole.decode("utf-8", "replace")
    char_idx = _num_shared(answer.text, found)
    return Difference(
        what="tokens of the log-probabilities",
        prompt_idx=prompt_idx,
        before=answer.text[max(0, char_idx - _BEFORE) : char_idx],
        expected=answer.text[char_idx : char_idx + _AFTER],
        got=found[char_idx : char_idx + _AFTER],
        char_idx=char_idx,
        note="the tokens do not spell the text",
    )


def unlikely(answer: Answer, prompt_idx: int) -> Difference | None:
    """Return where a greedy answer has a token although another one is likelier by its own log-probabilities."""
    for idx, score in enumerate(answer.scores or ()):
        best = max(score.top, key=lambda entry: entry[1], default=None)
        if best is not None and best[1] > score.logprob:
            return Difference(
                what="greedy choice",
                prompt_idx=prompt_idx,
                expected=f"{best[0]!r} {best[1]:.4f}",
                got=f"{score.text!r} {score.logprob:.4f}",
                token_idx=idx,
                gap=best[1] - score.logprob,
            )
    return None


def _first(one: Sequence[object], other: Sequence[object]) -> int | None:
    for idx, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return idx
    return None if len(one) == len(other) else min(len(one), len(other))


def _num_shared(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    place = _first(one, other)
    return len(one) if place is None else place
