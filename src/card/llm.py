"""The Python API, in vLLM's shape: `LLM`, `generate`, `chat`, `stream`."""

from __future__ import annotations

import itertools
import secrets
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, Self

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from card.config import DraftSettings, EngineSettings, SamplingParams
from card.drafter import DrafterWorker
from card.engine.cores import pinned, plan_cores
from card.engine.engine import Engine
from card.errors import PromptError, SettingsError
from card.methods import Method, find_method
from card.metrics import RequestStats
from card.models.inflation import inflate, inflated_from, parse_parameter_count
from card.models.loading import check_pair, context_limit, end_token_ids, load_model, load_tokenizer, parameter_count
from card.models.text import Detokenizer, StopStrings, encode_chat, encode_prompt
from card.models.torch_runner import TorchRunner
from card.target import FinishReason, TargetRequest, TargetWorker
from card.transport.drafter_process import DrafterConfig
from card.transport.inline import InlineLink
from card.transport.link import DrafterLink
from card.transport.process import ProcessLink
from card.transport.thread import ThreadLink
from card.writers.beam import BeamWriter

_DEFAULT_MAX_MODEL_LEN = 4096
_SPARE_ROWS = 64


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]  # the end token included
    finish_reason: FinishReason  # stop: an end token or stop string; length: max_tokens or the context is full


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Everything about one finished request."""

    request_id: int
    prompt: str | None  # None if token ids were given
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    method: str
    exact: bool  # True: the text is that of plain decoding
    target_cost: str | None  # set if the target was inflated: what it costs and what it is
    stats: RequestStats


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What one round added to a streamed request."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None  # None while the request runs
    stats: RequestStats  # live counters


class _TextStream:
    """The text of one request as it grows; tells the target when a stop string is complete."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop)
        self._piece = ""

    def feed(self, token_id: int) -> bool:
        self._piece += self._stops.push(self._detokenizer.push([token_id]))
        return self._stops.found is not None

    def push(self, token_ids: Sequence[int]) -> None:
        self._piece += self._detokenizer.push(token_ids)

    def take(self, *, is_end: bool) -> str:
        if is_end:
            self._piece += self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        piece, self._piece = self._piece, ""
        return piece


class LLM:
    """A target model, perhaps with a draft model, and the method that decodes with them.

        with LLM("demo-target", "demo-draft") as llm:
            print(llm.generate("Tom has 3 apples and buys 4 more. How many has he?")[0].outputs[0].text)

    Close it, or use it as a context manager: the drafter may live in a process of its own.
    """

    def __init__(
        self,
        target: str | PreTrainedModel = "demo-target",
        draft: str | PreTrainedModel | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        method: str | None = None,
        **settings: Any,
    ) -> None:
        """Load the models and bring the drafter up.

        Args:
            target: folder, hub name, "demo-target", or a loaded model (give its ``tokenizer`` then).
            draft: the same, or None; a loaded model cannot go into a process of its own.
            method: vanilla, sps or card; None takes card if there is a draft model and vanilla if not.
            settings: any field of `EngineSettings` and `DraftSettings`.
        Raises: SettingsError, ModelError, VocabularyError, WorkerError.
        """
        self.method: Method = find_method(method or ("card" if draft is not None else "vanilla"))
        engine_changes, draft_changes = _split_settings(settings)
        engine_changes.setdefault("placement", self.method.placement)
        self.settings = EngineSettings(
            target=_name(target),
            draft=None if draft is None else _name(draft),
            method=self.method.name,
            **engine_changes,
        )
        self.draft_settings = self.method.shape(DraftSettings(**draft_changes))
        if self.method.needs_draft and draft is None:
            raise SettingsError(f"method {self.method.name} needs a draft model; give one, or use method vanilla")
        if isinstance(draft, PreTrainedModel) and self.settings.placement == "process":
            raise SettingsError(
                "a loaded draft model cannot move into another process; give its folder, or placement thread"
            )
        self._tokenizer = tokenizer or load_tokenizer(self.settings.target)
        model = target
        if not isinstance(model, PreTrainedModel):
            model = load_model(model, dtype=self.settings.dtype, device=self.settings.device)
        if self.method.needs_draft and draft is not None:
            check_pair(self._tokenizer, model, draft)
        self.target_cost: str | None = None
        if self.settings.target_cost is not None:
            model = inflate(model, parse_parameter_count(self.settings.target_cost))
        original = inflated_from(model)
        if original is not None:
            self.target_cost = (
                f"{parameter_count(model) / 1e6:.0f}M (inflated from {original / 1e6:.1f}M, same outputs)"
            )
        limit = context_limit(model)
        self.max_model_len = self.settings.max_model_len or min(_DEFAULT_MAX_MODEL_LEN, limit)
        if self.max_model_len > limit:
            raise SettingsError(
                f"max_model_len must be at most {limit}, the target's own limit, got {self.max_model_len}"
            )
        self._end_ids = end_token_ids(model, self._tokenizer)
        self._runner = TorchRunner(
            model, max_model_len=self.max_model_len, max_tree_rows=self.draft_settings.budget + _SPARE_ROWS
        )
        self._runner.warm_up(1 + self.draft_settings.budget if self.method.needs_draft else 1)
        has_own_core = self.method.needs_draft and self.settings.placement == "process"
        self._cores = plan_cores(self.settings, own_drafter_core=has_own_core)
        self._link = self._make_link(draft) if self.method.needs_draft and draft is not None else None
        self._finalizer = weakref.finalize(self, self._link.close) if self._link else None
        self._engine = Engine(TargetWorker(self._runner, clock=time.perf_counter), self._link, self.method)
        self._request_ids = itertools.count()
        if self._link:
            self._link.start()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt (plain text, or token ids) and return the results in their order.

        Raises: PromptError for a prompt that is empty or does not fit, before anything runs.
        """
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        params = sampling_params or SamplingParams()
        encoded = [self._encode(prompt) for prompt in listed]
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        return [self._complete(ids, params, text) for ids, text in zip(encoded, texts, strict=True)]

    def chat(
        self, messages: Sequence[Mapping[str, str]], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Answer a conversation, put into the model's chat template. Raises: PromptError."""
        prompt_ids = self._checked(encode_chat(self._tokenizer, messages))
        return [self._complete(prompt_ids, sampling_params or SamplingParams(), None)]

    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
    ) -> Iterator[StreamChunk]:
        """Yield the continuation of a prompt, or the answer to a conversation, as it is decoded.

        Closing the iterator early drops the request. Raises: PromptError at once, not at the first chunk.
        """
        if isinstance(prompt, str) or not prompt or not isinstance(prompt[0], Mapping):
            prompt_ids = self._encode(prompt)
        else:
            prompt_ids = self._checked(encode_chat(self._tokenizer, prompt))  # type: ignore[arg-type]
        return self._stream(prompt_ids, sampling_params or SamplingParams(), next(self._request_ids))

    def close(self) -> None:
        """End the drafter. May be called twice."""
        if self._finalizer:
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self, prompt_ids: tuple[int, ...], params: SamplingParams, request_id: int) -> Iterator[StreamChunk]:
        if params.seed is None:
            params = params.replace(seed=secrets.randbelow(2**31))
        text = _TextStream(self._tokenizer, params.stop)
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_ids)
        request = TargetRequest(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            draft=self.draft_settings,
            end_ids=end_ids,
            stop_check=text if params.stop else None,
            uses_drafter=self._link is not None,
        )
        rounds = self._engine.run(request)
        try:
            while True:
                with pinned(self._cores.target, self.settings.threads):  # not while the caller uses what it got
                    step = next(rounds, None)
                if step is None:
                    return
                progress, stats = step
                if not params.stop:
                    text.push(progress.token_ids)
                piece = text.take(is_end=progress.finish_reason is not None)
                yield StreamChunk(piece, progress.token_ids, progress.finish_reason, stats)
        finally:
            rounds.close()

    def _complete(self, prompt_ids: tuple[int, ...], params: SamplingParams, prompt: str | None) -> RequestOutput:
        request_id = next(self._request_ids)
        chunks = list(self._stream(prompt_ids, params, request_id))
        reason = chunks[-1].finish_reason
        assert reason is not None
        token_ids = tuple(token_id for chunk in chunks for token_id in chunk.token_ids)
        output = CompletionOutput(0, "".join(chunk.text for chunk in chunks), token_ids, reason)
        return RequestOutput(
            request_id,
            prompt,
            prompt_ids,
            (output,),
            self.method.name,
            self.method.is_exact,
            self.target_cost,
            chunks[-1].stats,
        )

    def _encode(self, prompt: str | Sequence[object]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._checked(encode_prompt(self._tokenizer, prompt))
        given = prompt if isinstance(prompt, Sequence) else (None,)
        token_ids = [int(token_id) for token_id in given if isinstance(token_id, Integral)]  # NumPy's are Integral too
        if len(token_ids) < len(given):
            raise PromptError(
                f"a prompt must be a string or a list of token ids, got {type(prompt).__name__}; put several of them, "
                "or one that is token ids, into a list"
            )
        return self._checked(token_ids)

    def _checked(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        if not prompt_ids:
            raise PromptError("the prompt is empty; give at least one token")
        if len(prompt_ids) >= self.max_model_len:
            raise PromptError(
                f"the prompt has {len(prompt_ids)} tokens, but the context holds {self.max_model_len} and one must be "
                "left for the answer; shorten the prompt, or raise max_model_len if the model allows it"
            )
        for token_id in prompt_ids:
            if not 0 <= token_id < self._runner.vocab_size:
                raise PromptError(f"token ids must be from 0 to {self._runner.vocab_size - 1}, got {token_id}")
        return tuple(prompt_ids)

    def _make_link(self, draft: str | PreTrainedModel) -> DrafterLink:
        settings = self.settings
        device = settings.draft_device or settings.device
        max_tree_rows = min(
            2 * self.draft_settings.lead * self.draft_settings.beam_width, self.draft_settings.max_nodes
        )
        max_tree_rows += _SPARE_ROWS
        if settings.placement == "process":
            template = DrafterConfig(
                address="",
                incarnation=0,
                parent_pid=0,
                model=_name(draft),
                dtype=settings.dtype,
                device=device,
                threads=settings.draft_threads,
                cores=self._cores.draft,
                max_model_len=self.max_model_len,
                max_tree_rows=max_tree_rows,
                warm_up_tokens=self.draft_settings.beam_width,
            )
            return ProcessLink(
                template, start_timeout_s=settings.start_timeout_s, silence_timeout_s=settings.drafter_timeout_s
            )
        model = draft if isinstance(draft, PreTrainedModel) else load_model(draft, dtype=settings.dtype, device=device)
        runner = TorchRunner(
            model, max_model_len=min(self.max_model_len, context_limit(model)), max_tree_rows=max_tree_rows
        )
        runner.warm_up(self.draft_settings.beam_width)
        worker = DrafterWorker(BeamWriter(runner), clock=time.perf_counter)
        return ThreadLink(worker) if settings.placement == "thread" else InlineLink(worker)


def _name(model: str | PreTrainedModel) -> str:
    return model if isinstance(model, str) else str(model.config.name_or_path or type(model).__name__)


def _split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the engine and those of drafting. Raises: SettingsError for an unknown name."""
    engine_names, draft_names = ({f.name for f in fields(kind)} for kind in (EngineSettings, DraftSettings))
    for name in settings:
        if name not in engine_names | draft_names:
            raise SettingsError(f"unknown setting {name!r}; known: {', '.join(sorted(engine_names | draft_names))}")
    engine = {name: value for name, value in settings.items() if name in engine_names}
    return engine, {name: value for name, value in settings.items() if name in draft_names}
