"""Arbitrage: the draft model writes an answer step by step, and the target rewrites the steps that a router selects.

Steps end with a line, or with a delimiter. Inside the target's steps its own method speculates token by token.
Source: Arbitrage, arXiv:2512.05033. The text differs from plain decoding's, unless the router's knob is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from card.api.llm import LLM
from card.api.outputs import CompletionOutput
from card.config import ResolvedParams, SamplingParams
from card.config.fields import require
from card.config.sampling import MAX_LOGPROBS
from card.errors import SettingsError, VocabularyError, named
from card.labs.steps.record import STEPWISE
from card.labs.steps.routers import Router, Step, Writer
from card.labs.steps.trained import TrainedRouter
from card.text.tokens import decode

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class WrittenStep:
    """One step of an answer."""

    writer: Writer
    text: str  # its delimiter included
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SteppedOutput:
    """An answer, and its cost."""

    text: str
    token_ids: tuple[int, ...]
    steps: tuple[WrittenStep, ...]
    finish_reason: FinishReason  # length: it was cut off
    exact: bool  # True: the text is that of plain decoding
    target_tokens: int  # written by the target, kept or not
    target_passes: int  # for these; passes that only read are not counted
    draft_tokens: int  # written by the draft model, kept or not


@dataclass(slots=True)
class _UnfinishedAnswer:
    """The state of an unfinished answer."""

    question: str
    prompt_ids: tuple[int, ...]
    params: ResolvedParams
    steps: list[WrittenStep] = field(default_factory=list)
    target_tokens: int = 0
    target_passes: int = 0
    draft_tokens: int = 0
    finish_reason: FinishReason | None = None  # None: not finished

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.steps)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple([token_id for step in self.steps for token_id in step.token_ids])


_Written = tuple[Step, WrittenStep, FinishReason | None]
"""A step for the router, the same step for the answer, and the finish reason if it ends the answer."""
OnStep = Callable[[int, WrittenStep], None]


class Arbitrage:
    """A target and a draft model that share an answer step by step.

    with LLM("demo-target", "demo-draft") as target, LLM("demo-draft") as draft:
        print(Arbitrage(target, draft, EntropyRouter(0.5)).answer([question])[0].text)
    """

    def __init__(self, target: LLM, draft: LLM, router: Router, *, delimiter: str = "\n", max_steps: int = 100) -> None:
        """Use both models, loaded; the caller closes them.

        Args:
            delimiter: ends a step; it belongs to it.
            max_steps: most steps of an answer before it is cut off.
        Raises: VocabularyError if the models' tokenizers differ; SettingsError for a delimiter that is empty, or fewer
            than one step; ModelError for a router that was trained for another pair.
        """
        if target.host.tokenizer.get_vocab() != draft.host.tokenizer.get_vocab():
            raise VocabularyError("target and draft model have different tokens; use two models of one tokenizer")
        require(bool(delimiter), "delimiter of steps", "a string that is not empty", delimiter)
        require(max_steps >= 1, "max_steps", "1 or more", max_steps)
        self._target, self._draft, self._router = target, draft, router
        self._delimiter, self._max_steps = delimiter, max_steps
        if isinstance(router, TrainedRouter):
            router.check_pair(target.host.runner, draft.host.runner)

    @property
    def is_exact(self) -> bool:
        """True if each text is that of plain decoding: the target writes every step, by an exact method."""
        return self._router.knob == 0.0 and self._target.is_exact

    def answer(
        self, questions: Sequence[str], params: SamplingParams | None = None, on_step: OnStep = lambda *_: None
    ) -> list[SteppedOutput]:
        """Answer questions through the chat template, all at once, step by step.

        Args:
            params: ``max_tokens`` is that of a whole answer, the seed that of all its steps.
            on_step: called with the index of the question and each step, as soon as it is decided.
        Raises: PromptError for a question that does not fit; SettingsError for parameters that depend on the whole
            answer so far, which a step does not see.
        """
        params, host = params or SamplingParams(), self._target.host
        check_params(params)
        params = params.replace(repetition_penalty=1.0)  # overrides the model's generation config
        answers = []
        for question in questions:
            prompt_ids = host.encode([{"role": "user", "content": question}])
            answers.append(_UnfinishedAnswer(question, prompt_ids, host.resolved(params, len(prompt_ids))))
        for _ in range(self._max_steps):
            running = [one for one in answers if one.finish_reason is None]
            if not running:
                break
            self._advance(running)
            for idx, one in enumerate(answers):
                if one in running:
                    on_step(idx, one.steps[-1])
        return [self._output(one) for one in answers]

    def _advance(self, running: Sequence[_UnfinishedAnswer]) -> None:
        """Add a step to each answer."""
        drafted: list[_Written | None] = [None] * len(running)
        if self._router.knob > 0.0:
            drafted = list(self._write(self._draft, "draft", running))
        asks = [one for one, step in zip(running, drafted, strict=True) if step is None or self._router.needs_target]
        offered = dict(zip(map(id, asks), self._write(self._target, "target", asks), strict=True))
        rewritten: list[_UnfinishedAnswer] = []
        for one, step in zip(running, drafted, strict=True):
            theirs = offered.get(id(one))
            if step is not None and self._router.keeps(step[0], None if theirs is None else theirs[0]):
                _take(one, step)
            elif theirs is not None:
                _take(one, theirs)
            else:
                rewritten.append(one)
        for one, theirs in zip(rewritten, self._write(self._target, "target", rewritten), strict=True):
            _take(one, theirs)

    def _write(self, llm: LLM, writer: Writer, answers: Sequence[_UnfinishedAnswer]) -> list[_Written]:
        """Let a model write the next step of each answer."""
        if not answers:
            return []
        prompts = [[*one.prompt_ids, *one.token_ids] for one in answers]
        every = [
            one.params.replace(
                max_tokens=one.params.max_tokens - len(one.token_ids),
                stop=(*one.params.stop, self._delimiter),
                logprobs=MAX_LOGPROBS if writer == "draft" else one.params.logprobs,
            )
            for one in answers
        ]
        found = []
        for one, output in zip(answers, llm.generate(prompts, every), strict=True):
            if output.error is not None:
                raise output.error
            completion = output.outputs[0]
            if writer == "draft":
                one.draft_tokens += len(completion.token_ids)
            else:
                one.target_tokens += len(completion.token_ids)
                one.target_passes += output.stats.target_passes + 1  # the reading pass gives a token, too
            found.append(self._written(one, writer, completion))
        return found

    def _written(self, answer: _UnfinishedAnswer, writer: Writer, completion: CompletionOutput) -> _Written:
        host, ids = self._target.host, completion.token_ids
        is_full = len(answer.token_ids) + len(ids) >= answer.params.max_tokens or completion.finish_reason != "stop"
        end: FinishReason | None = "stop" if ids[-1] in host.end_ids else "length" if is_full else None
        before = answer.text
        text = decode(host.tokenizer, [*answer.token_ids, *ids], after=answer.prompt_ids)[len(before) :]
        entropies = tuple(_entropy(logprobs.top) for logprobs in completion.logprobs or ())
        writers = tuple(step.writer for step in answer.steps)
        step = Step(answer.question, before, text, next(iter(entropies), 0.0), entropies, writers)
        return step, WrittenStep(writer, text, ids), end

    def _output(self, answer: _UnfinishedAnswer) -> SteppedOutput:
        return SteppedOutput(
            text=answer.text,
            token_ids=answer.token_ids,
            steps=tuple(answer.steps),
            finish_reason=answer.finish_reason or "length",
            exact=self.is_exact,
            target_tokens=answer.target_tokens,
            target_passes=answer.target_passes,
            draft_tokens=answer.draft_tokens,
        )


def _take(answer: _UnfinishedAnswer, written: _Written) -> None:
    _, step, answer.finish_reason = written
    answer.steps.append(step)


def _entropy(top: Sequence[tuple[int, float]]) -> float:
    """Return the entropy in nats of tokens with these log-probabilities; all others count as one."""
    chances = [math.exp(logprob) for _, logprob in top]
    chances.append(max(0.0, 1.0 - sum(chances)))
    return -sum(chance * math.log(chance) for chance in chances if chance > 0.0)


def check_params(params: SamplingParams) -> None:
    """Refuse parameters whose effect depends on where an answer begins. Raises: SettingsError."""
    plain = SamplingParams().resolved()
    names = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "grammar", "stop")
    for name in names:
        if getattr(params, name) not in (None, getattr(plain, name)):
            raise SettingsError(
                f"{named(name)} looks back to where an answer begins, and steps of {STEPWISE} begin anew; leave it out"
            )
