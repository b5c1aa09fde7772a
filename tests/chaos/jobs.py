"""Random short requests for the chaos tests, and the text that each of them has when it is alone."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from card.config import DraftSettings, SamplingParams
from card.engine.engine import Engine
from card.engine.request import Request
from card.engine.target import TargetWorker
from card.errors import CardError
from card.models.protocol import LanguageModel

LONGEST_PROMPT = 80
LONGEST_ANSWER = 24
_STEMS = (8, 20, 45)  # lengths of the beginnings that prompts share


@dataclass(frozen=True, slots=True)
class Job:
    """One request, and after how many rounds its caller loses interest, if ever."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    draft: DraftSettings
    abort_after: int | None

    def request(self, request_id: int, end_ids: frozenset[int], *, uses_drafter: bool = True) -> Request:
        """Return it as the engine takes it."""
        return Request(
            request_id=request_id,
            prompt_ids=self.prompt_ids,
            params=self.params.resolved(),
            draft=self.draft,
            end_ids=end_ids,
            uses_drafter=uses_drafter,
        )


@dataclass(slots=True)
class Outcome:
    """What came of a job."""

    job: Job
    token_ids: list[int] = field(default_factory=list)
    reason: str | None = None
    error: CardError | None = None
    accepted_tokens: int = 0
    age: int = 0  # rounds since it was added


class Jobs:
    """Draws jobs: new prompts, some with a common beginning, questions after an earlier answer, and repetitions."""

    def __init__(self, rng: random.Random, vocab_size: int, *, first_token: int = 0) -> None:
        """Draw from ``rng``; prompts hold tokens from ``first_token`` on."""
        self._rng, self._tokens = rng, range(first_token, vocab_size)
        self._stems = [self._text(length) for length in _STEMS]
        self._conversations: list[tuple[int, ...]] = []
        self._earlier: list[Job] = []

    def draw(self) -> Job:
        """Return the next job."""
        rng = self._rng
        abort_after = rng.randint(0, 12) if rng.random() < 0.2 else None
        if self._earlier and rng.random() < 0.25:
            again = rng.choice(self._earlier)
            return Job(again.prompt_ids, again.params, again.draft, abort_after)
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(1000), max_tokens=rng.randint(1, LONGEST_ANSWER)
        )
        draft = DraftSettings(
            verify=rng.choice(["chain", "tree"]),
            budget=rng.choice([3, 8]),
            lead=rng.choice([4, 10]),
            beam_width=4,
            branch=4,
            min_verify_prob=rng.choice([0.0, 0.2]),
            max_wait_s=0.003,
        )
        self._earlier.append(Job(self._prompt(), params, draft, abort_after))
        return self._earlier[-1]

    def remember(self, outcome: Outcome) -> None:
        """Note a finished answer: later prompts may go on from there."""
        text = (*outcome.job.prompt_ids, *outcome.token_ids)
        if len(text) < LONGEST_PROMPT - 4:
            self._conversations = [*self._conversations[-20:], text]

    def _prompt(self) -> tuple[int, ...]:
        rng = self._rng
        draw = rng.random()
        if draw < 0.3 and self._conversations:
            return rng.choice(self._conversations) + self._text(rng.randint(1, 4))
        if draw < 0.6:
            return rng.choice(self._stems) + self._text(rng.randint(0, 10))
        return self._text(rng.randint(1, 40))

    def _text(self, length: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(self._tokens, k=length))


class Alone:
    """Answers one request at a time with the target and nothing else: the text that every other way must give."""

    def __init__(self, target: LanguageModel, end_ids: frozenset[int]) -> None:
        self.vocab_size = target.vocab_size
        self._engine = Engine(TargetWorker(target, clock=time.perf_counter), None)
        self._end_ids = end_ids
        self._known: dict[tuple[tuple[int, ...], SamplingParams], tuple[list[int], str]] = {}

    def answer(self, job: Job) -> tuple[list[int], str]:
        """Return tokens and finish reason."""
        key = (job.prompt_ids, job.params)
        if key not in self._known:
            self._known[key] = self._run(job)
        return self._known[key]

    def judge(self, outcomes: Sequence[Outcome]) -> None:
        """Check every text: all of it where the request finished, its beginning where it did not."""
        for request_id, outcome in enumerate(outcomes):
            expected, reason = self.answer(outcome.job)
            if outcome.reason in ("abort", "error"):
                expected, reason = expected[: len(outcome.token_ids)], outcome.reason
            assert (outcome.token_ids, outcome.reason) == (expected, reason), f"request {request_id}: {outcome.job}"

    def _run(self, job: Job) -> tuple[list[int], str]:
        self._engine.forget_prefixes()
        self._engine.add(self._engine.check(job.request(0, self._end_ids, uses_drafter=False)))
        token_ids: list[int] = []
        while True:
            for update in self._engine.step():
                assert update.error is None
                token_ids += update.token_ids
                if update.finish_reason is not None:
                    return token_ids, update.finish_reason
