"""The checks. Each asks the same question in two ways that must give the same answer, and returns pairs of answers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from card.tools.verify_server.answers import ServerAnswer
from card.tools.verify_server.comparing import Difference, compare_scores, find_unlikely_choice, largest_gap, misspelt
from card.tools.verify_server.settings import VerifySettings
from card.tools.verify_server.sides import ServerQuestion, Side

T = TypeVar("T")
NUM_TOP = 5  # likeliest tokens requested; the most that APIs allow
_NUM_CHOICES = 2
_STOP_CHARS = 3
_LEAST_STOPPED_CHARS = 12  # a shorter answer is not cut
NO_SWITCH = "it was not asked without speculation"
SCHEMA: Mapping[str, Any] = MappingProxyType(
    {
        "type": "object",
        "properties": {
            "answer": {"type": "integer"},
            "unit": {"enum": ["pieces", "dollars", "hours", "other"]},
            "is_certain": {"type": "boolean"},
        },
        "required": ["answer", "unit", "is_certain"],
        "additionalProperties": False,
    }
)


class NotSupportedError(Exception):
    """The server lacks the feature of a check; the text says why."""


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Two answers that must be equal."""

    prompt_idx: int
    question: ServerQuestion  # as the first of them was asked
    expected: ServerAnswer
    got: ServerAnswer
    by_text: bool = False  # token ids may differ
    found: Difference | None = None  # found by the check itself


@dataclass(slots=True)
class Material:
    """Servers and prompts of the checks, and the answers to compare with, which are requested once."""

    fast: Side  # the server as it is
    plain: Side | None  # without speculation
    prompts: Sequence[str]
    settings: VerifySettings
    remarks: list[str] = field(default_factory=list)  # of the running check
    _greedy: list[ServerAnswer] | None = None
    _seeded: list[ServerAnswer] | None = None

    @property
    def base(self) -> Side:
        """The side whose answers are the reference: without speculation, or else the server itself."""
        return self.plain or self.fast

    def question(self, *turns: str) -> ServerQuestion:
        """Return a greedy question."""
        return ServerQuestion(turns, {"max_tokens": self.settings.max_tokens, "temperature": 0})

    @property
    def greedy_questions(self) -> list[ServerQuestion]:
        """The prompts, asked greedily."""
        return [self.question(prompt) for prompt in self.prompts]

    @property
    def seeded_questions(self) -> list[ServerQuestion]:
        """The prompts, each with a seed of its own."""
        sampled = {"temperature": self.settings.temperature, "top_p": 1}
        return [
            question.replace(seed=self.settings.seed + idx, **sampled)
            for idx, question in enumerate(self.greedy_questions)
        ]

    async def greedy(self) -> list[ServerAnswer]:
        """Return the greedy answers, asked one after the other."""
        if self._greedy is None:
            self._greedy = await self.base.ask_one_by_one(self.greedy_questions)
        return self._greedy

    async def seeded(self) -> list[ServerAnswer]:
        """Return the seeded answers, asked one after the other. Raises: NotSupportedError if seeds do not repeat."""
        if self._seeded is None:
            first, again = [await self.base.ask_one_by_one(self.seeded_questions) for _ in range(2)]
            others = sum(one.text != other.text for one, other in zip(first, again, strict=True))
            if others:
                raise NotSupportedError(
                    f"seeds do not repeat: {others} of {len(first)} plain answers differ when asked again"
                )
            self._seeded = first
        return self._seeded

    async def ask_at_once(self, side: Side, questions: Sequence[ServerQuestion], **options: Any) -> list[ServerAnswer]:
        """Ask several questions at once."""
        return await side.ask_at_once(questions, self.settings.concurrency, **options)


Run = Callable[[Material], Awaitable[list[AnswerPair]]]


def _pairs(
    questions: Sequence[ServerQuestion], expected: Sequence[ServerAnswer], got: Sequence[ServerAnswer]
) -> list[AnswerPair]:
    rows = zip(questions, expected, got, strict=True)
    return [AnswerPair(idx, question, one, other) for idx, (question, one, other) in enumerate(rows)]


# ---- alone, in batches, streamed -------------------------------------------------------------------------------------


def _asked_again(
    *,
    seeded: bool = False,
    plainly: bool = False,
    needs_switch: bool = False,
    batch: bool = False,
    streams: bool = False,
    is_known: bool = False,
) -> Run:
    """Return a check that asks all prompts again.

    Args:
        seeded: draw the answers with a seed each; otherwise they are greedy.
        plainly: ask without speculation.
        needs_switch: skip a server that cannot be asked without speculation.
        batch: ask several at once; otherwise one after the other.
        streams: request streams.
        is_known: make sure that the server has been asked before.
    """

    async def run(about: Material) -> list[AnswerPair]:
        if about.plain is None and (plainly or needs_switch):
            raise NotSupportedError(NO_SWITCH)
        questions = about.seeded_questions if seeded else about.greedy_questions
        expected = await (about.seeded() if seeded else about.greedy())
        side = about.base if plainly else about.fast
        if is_known:
            await side.ask(questions[0])
        got = await (about.ask_at_once if batch else Side.ask_one_by_one)(side, questions, streams=streams)
        return _pairs(questions, expected, got)

    return run


# ---- reuse of prefixes -----------------------------------------------------------------------------------------------


async def _extended(about: Material) -> list[AnswerPair]:
    """Conversations of two turns; the first one is new to the server, and the second one goes on from it."""
    pairs = []
    for idx, prompt in enumerate(about.prompts):
        opening = f"Please answer in a sentence or two. {prompt}"
        answer = (await about.fast.ask(about.question(opening)))[0].text
        following = about.prompts[(idx + 1) % len(about.prompts)]
        longer = about.question(opening, answer or "I do not know.", following)
        (got, *_), (expected, *_) = await about.fast.ask(longer), await about.base.ask(longer)
        pairs.append(AnswerPair(idx, longer, expected, got))
    return pairs


# ---- forms of answers ------------------------------------------------------------------------------------------------


async def _schema(about: Material, *, beside_others: bool = False) -> list[AnswerPair]:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": dict(SCHEMA)}}
    questions = [question.replace(response_format=form) for question in about.greedy_questions]
    expected = await about.base.ask_one_by_one(questions)
    _check_forms(expected)
    if not beside_others:
        return _pairs(questions, expected, await about.fast.ask_one_by_one(questions))
    mixed = _interleaved(questions, about.greedy_questions)
    return _pairs(mixed, _interleaved(expected, await about.greedy()), await about.ask_at_once(about.fast, mixed))


def _interleaved(ones: Sequence[T], others: Sequence[T]) -> list[T]:
    return [item for both in zip(ones, others, strict=True) for item in both]


def _check_forms(answers: Sequence[ServerAnswer]) -> None:
    """Raise NotSupportedError unless every complete answer has the form."""
    wanted = set(SCHEMA["properties"])
    for answer in answers:
        if answer.finish_reason != "stop":
            if not answer.text.lstrip().startswith("{"):
                raise NotSupportedError(f"response_format is not heeded: an answer begins with {answer.text[:20]!r}")
            continue
        try:
            content = json.loads(answer.text)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict) or set(content) != wanted:
            raise NotSupportedError(f"response_format is not heeded: an answer is {answer.text[:40]!r}")


async def _stop(about: Material, **options: Any) -> list[AnswerPair]:
    pairs, num_ignored = [], 0
    answers = await about.greedy()
    for idx, (question, answer) in enumerate(zip(about.greedy_questions, answers, strict=True)):
        mark = _stop_string(answer.text)
        if mark is None:
            continue
        stopped = question.replace(stop=[mark])
        expected = (await about.base.ask(stopped))[0]
        num_ignored += expected.text == answer.text
        pairs.append(AnswerPair(idx, stopped, expected, (await about.fast.ask(stopped, **options))[0], by_text=True))
    if not pairs:
        raise NotSupportedError("the answers are too short to be stopped; raise --max-tokens")
    if num_ignored == len(pairs):
        raise NotSupportedError("stop strings are not heeded")
    return pairs


def _stop_string(text: str) -> str | None:
    """Return a piece from the middle of a text, so that it ends within tokens that were accepted at once."""
    middle = text[len(text) // 2 :].lstrip()[:_STOP_CHARS].rstrip()
    return middle if len(text) >= _LEAST_STOPPED_CHARS and middle and text.index(middle) > 0 else None


async def _logprobs(about: Material) -> list[AnswerPair]:
    """Log-probabilities do not change the text, their tokens spell it, and their values are the plain answer's."""
    questions = about.greedy_questions
    expected = await about.base.ask_one_by_one(questions, num_top=NUM_TOP)
    got = expected if about.plain is None else await about.fast.ask_one_by_one(questions, num_top=NUM_TOP)
    if not all(answer.scores for answer in (*expected, *got)):
        raise NotSupportedError("answers come without log-probabilities")
    plain = await about.greedy()
    rows = zip(questions, plain, expected, got, strict=True)
    tolerance = about.settings.logprob_tolerance
    pairs = []
    for idx, (question, bare, one, other) in enumerate(rows):
        difference = misspelt(other)
        if difference is None and one.text == other.text:
            difference = compare_scores(one, other, tolerance)
        pairs.append(AnswerPair(idx, question, bare, other, found=difference))
    gaps = [largest_gap(one, other) for one, other in zip(expected, got, strict=True) if one.text == other.text]
    if about.plain is not None and gaps:
        about.remarks.append(f"at most {max(gaps):.1g} apart")
    return pairs


async def _likeliest(about: Material) -> list[AnswerPair]:
    """Each token of a greedy answer is the likeliest one by the answer's own log-probabilities."""
    questions = about.greedy_questions
    got = await about.fast.ask_one_by_one(questions, num_top=NUM_TOP)
    if not all(answer.scores and any(score.top for score in answer.scores) for answer in got):
        raise NotSupportedError("answers come without the likeliest tokens beside each token")
    unlikely = [find_unlikely_choice(answer) for answer in got]
    if any(unlikely) and about.plain is not None:
        plain = await about.plain.ask_one_by_one(questions, num_top=NUM_TOP)
        if any(map(find_unlikely_choice, plain)):
            raise NotSupportedError("plain answers have unlikely tokens too: penalties are on, or figures are rounded")
    rows = zip(questions, got, unlikely, strict=True)
    return [AnswerPair(idx, question, answer, answer, found=one) for idx, (question, answer, one) in enumerate(rows)]


async def _choices(about: Material) -> list[AnswerPair]:
    pairs = []
    for idx, (question, expected) in enumerate(zip(about.greedy_questions, await about.greedy(), strict=True)):
        answers = await _several(about.fast, question)
        pairs += [AnswerPair(idx, question, expected, answer) for answer in answers]
    return pairs


async def _seeded_choices(about: Material) -> list[AnswerPair]:
    if about.plain is None:
        raise NotSupportedError(NO_SWITCH)
    await about.seeded()
    pairs = []
    for idx, question in enumerate(about.seeded_questions):
        expected, again = [await _several(about.plain, question) for _ in range(2)]
        if [one.text for one in expected] != [one.text for one in again]:
            raise NotSupportedError("seeds do not repeat with n above 1")
        got = await _several(about.fast, question)
        pairs += [AnswerPair(idx, question, *both) for both in zip(expected, got, strict=True)]
    return pairs


async def _several(side: Side, question: ServerQuestion) -> list[ServerAnswer]:
    answers = await side.ask(question.replace(n=_NUM_CHOICES))
    if len(answers) != _NUM_CHOICES:
        raise NotSupportedError(f"n is not heeded: {_NUM_CHOICES} choices were asked for, {len(answers)} came")
    return answers


# ---- all of them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerCheck:
    """A check by its name."""

    name: str
    title: str
    run: Run


CHECKS: Mapping[str, ServerCheck] = MappingProxyType(
    {
        check.name: check
        for check in (
            ServerCheck("plain-again", "plain, asked again", _asked_again(plainly=True)),
            ServerCheck("plain-batch", "plain, several at once", _asked_again(plainly=True, batch=True)),
            ServerCheck("greedy", "greedy, alone", _asked_again(needs_switch=True)),
            ServerCheck("greedy-batch", "greedy, several at once", _asked_again(batch=True)),
            ServerCheck("seeded", "seeded, alone", _asked_again(seeded=True, needs_switch=True)),
            ServerCheck("seeded-batch", "seeded, several at once", _asked_again(seeded=True, batch=True)),
            ServerCheck("again", "the same prompt again", _asked_again(is_known=True)),
            ServerCheck("extended", "a conversation that goes on", _extended),
            ServerCheck("schema", "JSON schema, alone", _schema),
            ServerCheck("schema-batch", "JSON schema beside others", partial(_schema, beside_others=True)),
            ServerCheck("stop", "stop strings", _stop),
            ServerCheck("stop-stream", "stop strings, streamed", partial(_stop, streams=True)),
            ServerCheck("logprobs", "log-probabilities", _logprobs),
            ServerCheck("likeliest", "greedy tokens are the likeliest", _likeliest),
            ServerCheck("stream", "streamed, alone", _asked_again(streams=True)),
            ServerCheck("stream-batch", "streamed, several at once", _asked_again(batch=True, streams=True)),
            ServerCheck("seeded-stream", "seeded, streamed", _asked_again(seeded=True, streams=True)),
            ServerCheck("choices", "n = 2, greedy", _choices),
            ServerCheck("seeded-choices", "n = 2, seeded", _seeded_choices),
        )
    }
)
