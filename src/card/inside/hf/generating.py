"""CARD inside transformers: ``model.generate(**inputs, custom_generate=card.hf.generate, assistant_model=draft)``.

transformers prepares the inputs, the logits processors and the stopping criteria as for its own decoding; CARD decodes.
Greedy output is that of transformers' own `generate`, in content, shape and padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from card.config import DraftSettings
from card.engine.metrics import RequestStats
from card.errors import VocabularyError
from card.inside.hf.batch import GenerateBatch
from card.inside.hf.inputs import arguments_of_generate, prompts_of, refuse, requests_of, sampling_of
from card.inside.hf.session import borrowed_session, evaluating
from card.models.facts import context_limit, vocab_size


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """Result of `generate` with ``return_dict_in_generate``: ``sequences`` [B, S] int64, and the counters."""

    stats: tuple[RequestStats, ...] | None = None  # one per row of the batch


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_model: PreTrainedModel | None = None,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool | None = None,
    draft_settings: DraftSettings | None = None,
    **model_kwargs: Any,
) -> GenerateOutput | Tensor:
    """Decode with CARD. Give it to ``model.generate`` as ``custom_generate``; transformers calls it.

    Without an assistant model this is plain decoding. The engine and the KV of recent texts are kept for the next call
    with the same models, see `release`. Sampling draws its seeds from torch's global generator.

    Args:
        input_ids: [B, L] int64, padded on the left as ``attention_mask`` says.
        logits_processor: functions of a text and its logits; also called for candidates, in any order.
        assistant_model: the draft model, as given to ``model.generate``.
        draft_settings: how candidates are drafted; may be given to ``model.generate``.
        model_kwargs: prepared by transformers for the model.
    Returns: [B, S] int64 with the prompts, or a `GenerateOutput` with ``return_dict_in_generate``.
    Raises: SettingsError for features of transformers' own decoding only; PromptError; ModelError; VocabularyError.
    """
    lost = arguments_of_generate()
    draft = assistant_model if assistant_model is not None else lost.get("assistant_model")
    streamer = streamer if streamer is not None else lost.get("streamer")
    refuse(model, generation_config, logits_processor, model_kwargs, synced_gpus or lost.get("synced_gpus"))
    if draft is not None and vocab_size(draft) != vocab_size(model):
        raise VocabularyError(
            f"assistant_model has {vocab_size(draft)} tokens, the model {vocab_size(model)}; use two models that share "
            "one tokenizer, or card.LLM, which compares tokenizers whose models differ in padding only"
        )
    prompts = prompts_of(input_ids, model_kwargs)
    params, processors = sampling_of(generation_config, logits_processor)
    settings = draft_settings or DraftSettings()
    requests = requests_of(
        input_ids,
        prompts,
        params,
        processors,
        stopping_criteria,
        context_limit(model),
        draft=settings,
        uses_drafter=draft is not None,
    )
    batch = GenerateBatch(input_ids, generation_config, stopping_criteria, streamer)
    with evaluating(model, draft), borrowed_session(model, draft, settings, requests) as session:
        stats = session.run(requests, batch)
    if streamer is not None:
        streamer.end()
    if generation_config.return_dict_in_generate:
        return GenerateOutput(sequences=cast(torch.LongTensor, batch.ids), stats=tuple(stats))
    return batch.ids
