"""One pair of models, loaded, with its engine; and requests made from prompts.

`LLM` and `AsyncLLM` wrap a `Host`; they differ in what drives the engine. `card.api.start` starts it.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from card.api.answer_stream import AnswerStream
from card.api.arguments import LLMArguments
from card.api.outputs import AnswerText
from card.api.prompts import Prompt
from card.api.start import build_engine, load, measure
from card.api.text_stream import TextStream
from card.assembly.plan import DEFAULT_MODEL_LEN
from card.config import ResolvedParams, SamplingParams
from card.config.fields import require
from card.engine.live import LiveRequest
from card.engine.request import Request, Update
from card.engine.scoring import Scorer
from card.errors import SettingsError, TargetError, in_words, named
from card.machine.home import Home
from card.models.images import ImagePrompt
from card.models.shortage import telling_shortage
from card.text.parts.view import AnswerView, ModelAnswers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Written:
    """Result of a request in one round, with its text."""

    text: AnswerText
    update: Update
    is_failure: bool = False  # the text cannot be decoded: the request must end


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request for the engine, and the stream of its text."""

    checked: LiveRequest
    text: TextStream | AnswerStream

    @property
    def request(self) -> Request:
        """The request."""
        return self.checked.request

    def written(self, update: Update) -> Written:
        """Return the text that an update made certain. If it cannot be decoded, only this request ends."""
        try:
            text = self.text.take(update.token_ids, is_end=update.finish_reason is not None)
            stop = self.text.stop_met(update.token_ids) if update.finish_reason == "stop" else ""
        except Exception as error:
            logger.error("the text of a request cannot be written: %s", in_words(error), exc_info=error)
            failure = TargetError(f"the text of this request cannot be written: {in_words(error)}")
            return Written(AnswerText(), Update(update.request_id, (), "error", update.stats, failure), is_failure=True)
        answer = AnswerText(text) if isinstance(text, str) else text
        return Written(replace(answer, stop=stop) if stop else answer, update)


class Host:
    """The models, the drafter and the engine of one `LLM`; makes requests, runs none."""

    def __init__(self, asked: LLMArguments) -> None:
        """Load the models and start the drafter. Raises: SettingsError, ModelError, VocabularyError, WorkerError."""
        longest = asked.settings.get("max_model_len") or DEFAULT_MODEL_LEN
        with telling_shortage(asked.target, asked.draft, max_model_len=longest), ExitStack() as unfinished:
            loaded = load(asked)
            unfinished.callback(loaded.grammars.close)
            unfinished.callback(loaded.lanes.close)
            measured = measure(loaded)
            parts = build_engine(loaded, measured)
            unfinished.pop_all()  # they stay open until `close`
        self.plan, self.engine, self.policy, self.link = parts.plan, parts.engine, parts.policy, parts.link
        self.method, self.settings, self.draft_settings = parts.plan.method, parts.plan.settings, parts.plan.draft
        self.max_model_len, self.max_kv_bytes = parts.plan.max_model_len, parts.plan.max_kv_bytes or 0
        self.runner, self.tokenizer, self.grammars = loaded.runner, loaded.tokenizer, loaded.grammars
        self.end_ids, self.sampling_defaults = loaded.end_ids, loaded.sampling_defaults
        self.target_cost, self.could_run_int8 = loaded.target_cost, loaded.could_run_int8
        self.latencies, self.draft_note = measured.latencies, loaded.choice.note
        chunk = self.settings.prefill_chunk
        self.scorer = Scorer(self.runner, parts.worker.pool, lambda: self.policy.cores, chunk=chunk)
        self._prompts, self._lanes, self._parts = loaded.prompts, loaded.lanes, parts
        self.home = Home()
        self.is_exact = parts.plan.verifier.is_exact and (loaded.has_same_bits or not parts.plan.has_candidates)
        if self.link is not None:
            self._finalizer = weakref.finalize(self, self.home.closing(self.link.close))

    def close(self) -> None:
        """End the drafter and the processes that test grammars. May be called twice; a forked child ends nothing."""
        if not self.home.is_here:
            return
        self.grammars.close()
        self.latencies.remember_agreement(self.policy.agreement)
        if self.link is not None:
            self.latencies.remember_drafter()
            self._finalizer()
        self._parts.close()
        self._lanes.close()

    @functools.cached_property
    def answers(self) -> ModelAnswers:
        """The format of the model's answers; to find it takes a look at all tokens."""
        return ModelAnswers(self.tokenizer, self.settings.answer_format)

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: int,
        view: AnswerView | None = None,
        prediction: Sequence[int] = (),
    ) -> PreparedRequest:
        """Return the request for a prompt: text, token ids, or a conversation for the model's chat template.

        Raises: PromptError for a prompt that is empty or does not fit; SettingsError for parameters that this model
        cannot follow; WorkerError in a forked child.
        """
        self.home.check()
        if not isinstance(params, SamplingParams):
            raise SettingsError(f"the parameters of a prompt must be card.SamplingParams, got {params!r:.80}")
        require(params.n == 1, "n", "1 for a stream, which has one answer; make several of them", params.n)
        unknown = max(params.logit_bias, default=0)
        if unknown >= self.runner.vocab_size:
            raise SettingsError(
                f"{named('logit_bias')} has token {unknown}, but the target has tokens 0 to "
                f"{self.runner.vocab_size - 1}; use ids of its tokenizer"
            )
        is_known = all(type(one) is int and 0 <= one < self.runner.vocab_size for one in prediction)
        require(is_known, "prediction", f"token ids from 0 to {self.runner.vocab_size - 1}", prediction)
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_ids)
        prompt_ids = self.encode(prompt)
        request = Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            images=prompt_ids.images if isinstance(prompt_ids, ImagePrompt) else None,
            prediction_ids=tuple(prediction),
            params=self.resolved(params, len(prompt_ids)),
            is_bounded=self.bound_of(params) is not None,
            draft=self.draft_settings,
            end_ids=end_ids,
            uses_drafter=self.link is not None,
            grammar=self.grammars.compile(params.grammar) if params.grammar is not None else None,
        )
        checked = self.engine.check(request)
        stops = (params.stop, params.min_tokens)
        text = (
            TextStream(self.tokenizer, *stops, after=prompt_ids)
            if view is None
            else AnswerStream(self.tokenizer, view, *stops, after=prompt_ids)
        )
        watched = replace(request, stop_check=text, end_ids=end_ids | text.end_ids) if params.stop else request
        return PreparedRequest(replace(checked, request=watched), text)

    def resolved(self, params: SamplingParams, num_prompt_tokens: int) -> ResolvedParams:
        """Return the complete parameters of a request: its own values, else the model's, else greedy.

        Without a bound of the request or the model, an answer may fill the context.
        """
        return params.resolved(self.sampling_defaults, room=max(1, self.max_model_len - num_prompt_tokens))

    def bound_of(self, params: SamplingParams) -> int | None:
        """Return the most new tokens by the request or the model's generation config; None: the context's."""
        return params.max_tokens or self.sampling_defaults.get("max_tokens")

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt. Raises: PromptError for anything else; WorkerError in a forked child."""
        self.home.check()
        return self._prompts.encode(prompt)
