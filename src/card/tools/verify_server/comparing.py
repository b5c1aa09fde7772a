"""Find where two answers differ first, and how close the two tokens there were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from card.tools.verify_server.answers import ServerAnswer

_BEFORE, _AFTER = 24, 24  # characters shown around a difference
NEAR_TIE = 0.05  # log-probabilities no further apart may swap when a 16-bit pass rounds differently


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which an answer differs from the expected one."""

    what: str  # text, token ids, finish reason, log-probabilities
    expected: str
    got: str
    before: str = ""  # the common text just before
    char_idx: int | None = None
    token_idx: int | None = None
    gap: float | None = None  # between the log-probabilities of the two tokens; None: not known
    note: str = ""
    prompt_idx: int = 0

    @property
    def tie(self) -> str:
        """The distance of the two tokens, in words; empty if unknown."""
        if self.gap is None:
            return ""
        name = "a near tie" if abs(self.gap) <= NEAR_TIE else "no near tie"
        return f"{name}: the two tokens are {abs(self.gap):.2g} apart in log-probability"


def compare(expected: ServerAnswer, got: ServerAnswer, *, by_text: bool = False) -> Difference | None:
    """Return the first difference of two answers: in token ids if both have them and not ``by_text``, else in text."""
    token_idx = None
    if not by_text and expected.token_ids is not None and got.token_ids is not None:
        token_idx = _first(expected.token_ids, got.token_ids)
    if expected.text != got.text:
        return _first_difference_of("text", expected.text, got.text, token_idx=token_idx)
    if token_idx is not None:
        sides = [f"{ids[token_idx : token_idx + 4]}" for ids in (expected.token_ids, got.token_ids) if ids is not None]
        return Difference("token ids", sides[0], sides[1], token_idx=token_idx)
    if expected.finish_reason != got.finish_reason:
        return Difference("finish reason", str(expected.finish_reason), str(got.finish_reason))
    return None


def gap_at(difference: Difference, plain: ServerAnswer, got: ServerAnswer) -> float | None:
    """Return how much likelier the plain answer's token is than the other one, at the first difference.

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


def compare_scores(expected: ServerAnswer, got: ServerAnswer, tolerance: float) -> Difference | None:
    """Return the first difference in tokens or log-probabilities of two answers with one text."""
    pairs = zip(expected.scores or (), got.scores or (), strict=False)
    for idx, (one, other) in enumerate(pairs):
        if one.text != other.text or abs(one.logprob - other.logprob) > tolerance:
            sides = _scored(one.text, one.logprob), _scored(other.text, other.logprob)
            return Difference("log-probabilities", *sides, token_idx=idx)
    sizes = [len(answer.scores or ()) for answer in (expected, got)]
    if sizes[0] != sizes[1]:
        lengths = [f"{size} tokens" for size in sizes]
        return Difference("log-probabilities", lengths[0], lengths[1], token_idx=min(sizes))
    return None


def largest_gap(expected: ServerAnswer, got: ServerAnswer) -> float:
    """Return the largest difference between the log-probabilities of two answers."""
    pairs = zip(expected.scores or (), got.scores or (), strict=False)
    return max((abs(one.logprob - other.logprob) for one, other in pairs), default=0.0)


def misspelt(answer: ServerAnswer) -> Difference | None:
    """Return where the tokens of the log-probabilities do not spell the text; a special token may follow at the end."""
    scores = answer.scores or ()
    whole, last = b"".join(score.raw for score in scores), scores[-1].raw if scores else b""
    text = answer.text.encode()
    spelt = [whole, whole.removesuffix(last)]
    spelt += [one.lstrip() for one in spelt]  # a tokenizer's leading blank, which the text omits
    if text in spelt or text.lstrip() in spelt or "\N{REPLACEMENT CHARACTER}" in answer.text:
        return None
    spelled, note = whole.decode("utf-8", "replace"), "the tokens do not spell the text"
    return _first_difference_of("tokens of the log-probabilities", answer.text, spelled, note=note)


def find_unlikely_choice(answer: ServerAnswer) -> Difference | None:
    """Return where a greedy answer has a token although another one is likelier by its own log-probabilities."""
    for idx, score in enumerate(answer.scores or ()):
        text, logprob = max(score.top, key=lambda entry: entry[1], default=(score.text, score.logprob))
        if logprob > score.logprob:
            sides = _scored(text, logprob), _scored(score.text, score.logprob)
            return Difference("greedy choice", *sides, token_idx=idx, gap=logprob - score.logprob)
    return None


def _scored(text: str, logprob: float) -> str:
    return f"{text!r} {logprob:.4f}"


def _first_difference_of(what: str, expected: str, got: str, **details: Any) -> Difference:
    """Return the first difference of two texts."""
    place = _first(expected, got) or 0
    before, behind = slice(max(0, place - _BEFORE), place), slice(place, place + _AFTER)
    return Difference(what, expected[behind], got[behind], before=expected[before], char_idx=place, **details)


def _first(one: Sequence[object], other: Sequence[object]) -> int | None:
    for idx, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return idx
    return None if len(one) == len(other) else min(len(one), len(other))
