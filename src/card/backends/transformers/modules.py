"""Convert decoders of our own pass to models of transformers, to save, export, or run them in other engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers

from card.backends.transformers.arrays import as_array, as_tensor, torch_dtype
from card.backends.transformers.walking import decoder_of, why_not_walked
from card.errors import ModelError
from card.kernels.number_types import Array, Floats
from card.models.loaded_model import LoadedModel
from card.models.names import model_name
from card.models.own.decoder_model import DecoderModel
from card.models.own.expert_weights import join_experts
from card.models.own.layers import BlockWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def modules_of(model: LoadedModel, device: str = "cpu") -> PreTrainedModel:
    """Return a model of transformers with the same weights, shared on the CPU.

    Raises: ModelError for block formats, which torch cannot multiply.
    """
    if not isinstance(model, DecoderModel):
        theirs: Any = model
        return theirs  # type: ignore[no-any-return]
    weights = dict(model.weights)
    if any(isinstance(weight, BlockWeight) for weight in weights.values()):
        raise ModelError(f"{model_name(model)} is made of a file's blocks; load it with a dtype, such as bfloat16")
    fields = {name: value for name, value in model.config.to_dict().items() if name not in ("model_type", "dtype")}
    config = transformers.AutoConfig.for_model(model.config.model_type, **fields)
    config.dtype = torch_dtype(model.dtype)
    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        made = kind(config)
    arrays = join_experts(cast(dict[str, Array], weights).items(), model.architecture)
    made.load_state_dict({name: as_tensor(weight) for name, weight in arrays.items()}, strict=False, assign=True)
    made.tie_weights()
    made.model.rotary_emb = type(made.model.rotary_emb)(config)  # its buffers are not in the state dict
    make: Any = transformers.GenerationConfig
    made.generation_config = make(**model.generation_config.to_diff_dict())
    placed: PreTrainedModel = made.to(device=device, dtype=torch_dtype(model.dtype)).requires_grad_(False).train(False)
    if model.computes_int8:
        setattr(placed, "computes_int8", True)  # noqa: B010 - a mark of ours
    return placed


def remade(model: PreTrainedModel, make: Callable[[DecoderModel], DecoderModel]) -> PreTrainedModel:
    """Return what is made of the weights of a model, on its device. Raises: ModelError if they cannot be walked."""
    if (reason := why_not_walked(model)) is not None:
        raise ModelError(f"another model cannot be made of {model_name(model)}: {reason}")
    return modules_of(make(decoder_of(model)), str(model.device))


def own_logits(model: PreTrainedModel, text_ids: Sequence[int]) -> Floats:
    """Return the logits [V] after a text by the model's own modules."""
    any_model: Any = model
    with torch.inference_mode():
        logits = any_model(input_ids=torch.tensor([list(text_ids)], device=model.device)).logits
    last_logits: Floats = as_array(logits[0, -1])
    return last_logits
