"""A server's day: which requests come, in which order, and what the demo pair says to them.

Requests are those of the policy gate's recordings: chats, code, copies, sampled answers. An agent's turns are code
behind a prompt that grows from 5,000 to 11,000 tokens; most of a prompt is the turns before it. Before false copies
stand pieces of the answer, each followed by another token than in the answer: what is copied is wrong. The first and
the last requests of a day are the same copies, so that they tell what the day has done to the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from policy_texts import SAMPLED, recording_of

from card.tools.planner.recording import RecordedText, Recording

COPIES = "copy-edit"
KINDS = ("questions", "code", COPIES, "demo", SAMPLED)
AT_ONCE = (1, 4, 16)
AGENT, FALSE_COPIES = "agent", "false copies"
FIRST_TOKENS, TURN_TOKENS, NUM_TURNS = 4_900, 2_000, 4  # of an agent's first prompt, of what each turn adds, turns
PIECE_TOKENS, PIECE_STEP = 24, 3  # of a false copy, and from one to the next
NUM_COPIES = 4  # that begin a day, and end it
EPISODES = 3  # of each kind of text and each number of requests at once


@dataclass(frozen=True, slots=True)
class Episode:
    """Requests of one kind, of which so many run at once."""

    kind: str
    at_once: int
    texts: tuple[int, ...]  # indices in the recording, in their order

    @property
    def name(self) -> str:
        """The class that its requests belong to."""
        return f"{self.kind}, {self.at_once} at once"


@dataclass(frozen=True, slots=True)
class Day:
    """What one server answers, from its first request to its last."""

    recording: Recording
    episodes: tuple[Episode, ...]


def make_day(seed: int) -> Day:
    """Return the episodes of all classes in an order that the seed draws, between copies of the same texts."""
    rng, made = np.random.default_rng(seed), _Texts(seed)
    plans = [(kind, at_once) for kind in KINDS for at_once in AT_ONCE for _ in range(EPISODES)]
    plans += [(AGENT, 1), (FALSE_COPIES, 1)] * EPISODES
    episodes = []
    for place in rng.permutation(len(plans)):
        kind, at_once = plans[place]
        texts = made.of(kind, max(4, at_once))
        episodes.append(Episode(kind, at_once, tuple(texts)))
    first, last = (Episode(COPIES, 1, tuple(made.copies())) for _ in range(2))
    return Day(made.recording(), (first, *episodes, last))


class _Texts:
    """The requests of a day, each with a prompt of its own."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed + 1)
        self._sources = {kind: self._endless(recording_of(kind).texts) for kind in KINDS}
        self._first = recording_of(KINDS[0])
        self._texts: list[RecordedText] = []

    def of(self, kind: str, num_texts: int) -> list[int]:
        """Return the numbers of new requests of a kind."""
        if kind == AGENT:
            return self._turns()
        return [self._misled() if kind == FALSE_COPIES else self._short(kind) for _ in range(num_texts)]

    def copies(self) -> list[int]:
        """Return the numbers of new requests for the same copies each time, behind other tokens."""
        texts = recording_of(COPIES).texts[:NUM_COPIES]
        return [self._add(text, (*self._noise(4), *text.prompt_ids)) for text in texts]

    def _short(self, kind: str) -> int:
        text = next(self._sources[kind])
        return self._add(text, (*self._noise(4), *text.prompt_ids))

    def _misled(self) -> int:
        text = next(self._sources["code"])
        answer = text.token_ids
        ends = range(PIECE_STEP, len(answer), PIECE_STEP)
        pieces = [(*answer[max(0, end - PIECE_TOKENS) : end], *self._noise(1)) for end in ends]
        return self._add(text, (*(token for piece in pieces for token in piece), *text.prompt_ids))

    def _turns(self) -> list[int]:
        known, numbers = self._noise(FIRST_TOKENS), []
        for _ in range(NUM_TURNS):
            text = next(self._sources["code"])
            prompt = (*known, *text.prompt_ids)
            numbers.append(self._add(text, prompt))
            known = (*prompt, *text.token_ids, *self._noise(TURN_TOKENS))
        return numbers

    def recording(self) -> Recording:
        """Return all of them as one recording."""
        return msgspec.structs.replace(self._first, source="a day of the policy gate's texts", texts=tuple(self._texts))

    def _add(self, text: RecordedText, prompt_ids: tuple[int, ...]) -> int:
        self._texts.append(msgspec.structs.replace(text, prompt_ids=prompt_ids))
        return len(self._texts) - 1

    def _noise(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(0, self._first.vocab_size, num_tokens).tolist())

    @staticmethod
    def _endless(texts: Sequence[RecordedText]) -> Iterator[RecordedText]:
        while True:
            yield from texts
