"""Check the inputs that transformers prepared for one call of `generate`, and make requests of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import logits_process
from transformers.generation.configuration_utils import GenerationMode

from card.backends.transformers.arrays import as_array, as_tensor
from card.backends.transformers.states import CACHE_NAMES
from card.config import DraftSettings, SamplingParams
from card.engine.request import Request
from card.errors import ModelError, PromptError, SettingsError
from card.models.names import model_name
from card.tree.logits import FloatArray

_MANAGED = frozenset(  # model arguments of transformers that do not affect the text
    (*CACHE_NAMES, "attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position")
)
# Processors of transformers that treat each row of a batch alike and separately; others are called with as many rows as
# the batch has.
_ROW_WISE = frozenset(
    {"MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "NoRepeatNGramLogitsProcessor"}
    | {"SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor", "ForcedBOSTokenLogitsProcessor"}
    | {"ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "ExponentialDecayLengthPenalty"}
    | {"SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor", "TemperatureLogitsWarper"}
    | {"TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper"}
    | {"EpsilonLogitsWarper", "EtaLogitsWarper", "LogitNormalization"}
)
_PARAMETERS: dict[str, type[LogitsProcessor]] = {  # parameters that a processor may represent, in our order
    "temperature": logits_process.TemperatureLogitsWarper,
    "top_k": logits_process.TopKLogitsWarper,
    "top_p": logits_process.TopPLogitsWarper,
    "min_p": logits_process.MinPLogitsWarper,
}
_STATEFUL = (logits_process.SynthIDTextWatermarkLogitsProcessor,)


def arguments_of_generate() -> dict[str, Any]:
    """Return the arguments of the calling ``model.generate`` that it does not pass on to a callable.

    As of transformers 5.24 a callable ``custom_generate`` gets neither the assistant model nor the streamer.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    names = ("assistant_model", "streamer", "synced_gpus")
    return {} if frame is None else {name: frame.f_locals.get(name) for name in names}


def refuse(
    model: PreTrainedModel,
    config: GenerationConfig,
    processors: LogitsProcessorList,
    model_kwargs: Mapping[str, Any],
    synced_gpus: bool | None,
) -> None:
    """Raise SettingsError or ModelError, with their names, for unsupported arguments."""
    if model.config.is_encoder_decoder:
        raise ModelError(f"{model_name(model)} is an encoder-decoder model; CARD runs decoder-only models")
    mode = config.get_generation_mode()
    faults = []
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        faults.append(f"generation mode {mode.value.replace('_', ' ')}")
    if config.guidance_scale not in (None, 1, 1.0):
        faults.append(f"guidance_scale={config.guidance_scale}")
    if config.return_dict_in_generate:
        names = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        faults += [name for name in names if getattr(config, name)]
    if any(getattr(model_kwargs.get(name), "_is_user_defined", False) for name in CACHE_NAMES):
        faults.append("a cache of one's own")
    faults += [name for name, value in model_kwargs.items() if value is not None and name not in _MANAGED]
    faults += [type(one).__name__ for one in processors if isinstance(one, _STATEFUL)]
    if synced_gpus:
        faults.append("synced_gpus")
    if faults:
        raise SettingsError(
            f"card.hf.generate cannot do {', '.join(faults)}; leave it out, or leave custom_generate out"
        )


def prompts_of(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return the prompt of each row without its padding. Raises: PromptError, SettingsError."""
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    if mask.shape != input_ids.shape:
        raise PromptError(f"attention_mask must be {list(input_ids.shape)} as input_ids is, got {list(mask.shape)}")
    is_text = (mask != 0).cpu()
    if input_ids.shape[1] == 0 or not is_text.any(1).all():
        raise PromptError("a prompt is empty; give at least one token in each row")
    if (is_text[:, :-1] & ~is_text[:, 1:]).any():
        raise PromptError("attention_mask has zeros behind ones; pad on the left: tokenizer.padding_side = 'left'")
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        expected = is_text.long().cumsum(1) - 1
        if positions.shape != expected.shape or not ((positions.cpu() == expected) | ~is_text).all():
            raise SettingsError("position_ids must count the tokens of each row from 0; leave them out")
    rows = zip(input_ids.tolist(), is_text.sum(1).tolist(), strict=True)
    return [tuple(ids[len(ids) - length :]) for ids, length in rows]


def sampling_of(
    config: GenerationConfig, processors: LogitsProcessorList
) -> tuple[SamplingParams, list[LogitsProcessor]]:
    """Return the sampling parameters, and the processors before them.

    Temperature, top-k, top-p and min-p at the end of the list become parameters, which the drafter also gets.
    """
    remaining = list(processors)
    if not config.do_sample:
        return SamplingParams(temperature=0.0), remaining
    while remaining and type(remaining[-1]) is logits_process.LogitNormalization:
        remaining.pop()  # it changes no choice
    params: dict[str, Any] = {"temperature": 1.0}  # for which transformers has no processor
    for name, kind in reversed(_PARAMETERS.items()):
        value = getattr(remaining[-1], name) if remaining and isinstance(remaining[-1], kind) else None
        is_ours = value is not None and (name != "top_p" or value > 0) and (name != "min_p" or value < 1)
        if is_ours and getattr(remaining[-1], "min_tokens_to_keep", 1) <= 1:
            params[name] = value
            remaining.pop()
    return SamplingParams(**params), remaining


def requests_of(
    input_ids: Tensor,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    processors: Sequence[LogitsProcessor],
    criteria: StoppingCriteriaList,
    limit: int,
    *,
    draft: DraftSettings,
    uses_drafter: bool,
) -> list[Request]:
    """Return a request for each row, numbered from 0.

    Args:
        limit: most tokens of a text.
        draft: settings of drafting.
        uses_drafter: there is a draft model.
    Raises: PromptError.
    """
    end_ids = {i for one in criteria if isinstance(one, EosTokenCriteria) for i in one.eos_token_id.tolist()}
    most = limit if criteria.max_length is None else max(1, criteria.max_length - input_ids.shape[1])
    requests = []
    for row, prompt in enumerate(prompts):
        if len(prompt) >= limit:
            raise PromptError(f"a prompt has {len(prompt)} tokens, but the model's context holds {limit}; shorten it")
        seed = int(torch.randint(2**62, ()).item()) if params.temperature else 0
        request = Request(
            request_id=row,
            prompt_ids=prompt,
            params=params.replace(seed=seed, max_tokens=min(most, limit - len(prompt))).resolved(),
            draft=draft,
            end_ids=frozenset(end_ids),
            uses_drafter=uses_drafter,
            logits_processor=_RowProcessor(processors, row, input_ids, len(prompt)) if processors else None,
        )
        requests.append(request)
    return requests


class _RowProcessor:
    """Applies transformers' processors to one position of one row, in the form that they get in transformers."""

    def __init__(self, processors: Sequence[LogitsProcessor], row: int, input_ids: Tensor, prompt_len: int) -> None:
        self._row, self._num_rows = row, len(input_ids)
        self._padding = input_ids[row : row + 1, : input_ids.shape[1] - prompt_len]
        self._steps = [self._step(one) for one in processors]

    def __call__(self, prefix_ids: npt.NDArray[np.int64], logits: FloatArray) -> FloatArray:
        """Return the processed logits [1, V] of the position after ``prefix_ids`` [1, S], padding not included."""
        prefix = as_tensor(prefix_ids, self._padding.device)
        ids = cast(torch.LongTensor, torch.cat([self._padding, prefix], 1))
        scores = as_tensor(logits, ids.device).float()
        for step, is_row_wise in self._steps:
            if is_row_wise:
                scores = step(ids, scores)
            else:
                shown = cast(torch.LongTensor, ids.repeat(self._num_rows, 1))
                scores = step(shown, scores.repeat(self._num_rows, 1))[self._row : self._row + 1]
        processed: FloatArray = as_array(scores)
        return processed

    def _step(self, one: LogitsProcessor) -> tuple[LogitsProcessorList, bool]:
        """Return a processor as a callable, and whether it needs only one row."""
        if type(one) is logits_process.RepetitionPenaltyLogitsProcessor:
            ignored = one.prompt_ignore_length
            if isinstance(ignored, Tensor):  # one length for each row of the batch
                one = logits_process.RepetitionPenaltyLogitsProcessor(one.penalty, int(ignored[self._row]))
            return LogitsProcessorList([one]), True
        is_row_wise = type(one).__name__ in _ROW_WISE and type(one).__module__ == logits_process.__name__
        return LogitsProcessorList([one]), is_row_wise or self._num_rows == 1
