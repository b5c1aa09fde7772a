"""Facts of a loaded model that its configs state: sizes, the longest text, the ids that end one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from card.config import NEUTRAL
from card.errors import ModelError
from card.kernels.number_types import Array, Floats, dtype_name
from card.models.layer_shape import head_dim, of_layer
from card.models.loaded_model import LoadedModel
from card.models.own.decoder_model import DecoderModel, is_int8
from card.models.own.layers import BlockWeight, embedded
from card.text.parts.families import kept_ends
from card.text.prompts import turn_end_id
from card.text.tokenizer import Tokenizer

_NO_CONTEXT_LIMIT = 1 << 30


def parameter_count(model: LoadedModel) -> int:
    """Return the number of parameters; an array used twice (tied embeddings) counts once."""
    if isinstance(model, DecoderModel):
        return model.num_parameters
    theirs: Any = model
    return sum(int(one.numel()) for one in theirs.parameters())


def num_bytes(model: LoadedModel) -> int:
    """Return the bytes of the weights as they are stored."""
    if isinstance(model, DecoderModel):
        return model.num_bytes
    theirs: Any = model
    return sum(int(one.numel() * one.element_size()) for one in theirs.parameters())


def embeddings_of(model: LoadedModel, token_ids: Sequence[int]) -> Floats:
    """Return the rows of tokens in the input embeddings as they are stored, [n, D]."""
    if isinstance(model, DecoderModel):
        return embedded(model.embeddings, token_ids)
    theirs: Any = model
    rows: Floats = theirs.get_input_embeddings().weight.detach()[list(token_ids)].float().cpu().numpy()
    return rows


def weight_samples(model: LoadedModel, num_values: int) -> Iterator[tuple[str, Sequence[int], str, Array]]:
    """Yield name, shape, dtype and first values of each weight; blocks are looked at as they are stored."""
    if not isinstance(model, DecoderModel):
        theirs: Any = model
        for name, tensor in theirs.state_dict().items():
            values = tensor.detach().flatten()[:num_values].double().cpu().numpy()
            yield name, tensor.shape, dtype_name(tensor.dtype), values
        return
    for name, weight in model.weights:
        stored = weight.data if isinstance(weight, BlockWeight) else weight
        yield name, weight.shape, stored.dtype.name, stored.reshape(-1)[:num_values]


def vocab_size(model: LoadedModel) -> int:
    """Return V, the number of token ids that the model has logits for; padding rows included."""
    return int(model.config.get_text_config().vocab_size)


def context_limit(model: LoadedModel) -> int:
    """Return the most positions that the model was made for; a large number if its config sets no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else _NO_CONTEXT_LIMIT


def about_row_bytes(model: LoadedModel) -> int:
    """Return about what a KV row takes, before a runner knows: as if each layer with keys of its own were attention."""
    itemsize = 2 if is_int8(model) else int(model.dtype.itemsize)
    if isinstance(model, DecoderModel):
        shapes = [layer.shape for layer in model.layers if layer.shape.kv_source is None]
        return sum(2 * shape.num_kv_heads * shape.head_size * itemsize for shape in shapes)
    config = model.config.get_text_config()
    stated = getattr(config, "num_key_value_heads", None)
    return sum(
        2 * (of_layer(stated, layer) or config.num_attention_heads) * head_dim(config, layer) * itemsize
        for layer in range(config.num_hidden_layers)
    )


def end_token_ids(model: LoadedModel, tokenizer: Tokenizer | None = None) -> frozenset[int]:
    """Return the ids that end a text.

    They are those of the generation config alone, as in transformers' ``generate``; if it states none, those of the
    config; if there are none either, that of the tokenizer. The token that closes an answer in the tokenizer's chat
    template is one of them too: some makers forget it, and their chats would not end. One that only closes a part of an
    answer does not.
    """
    stated = [
        getattr(model.generation_config, "eos_token_id", None),
        model.config.get_text_config().eos_token_id,
        getattr(tokenizer, "eos_token_id", None),
    ]
    of_text = next((_ids(one) for one in stated if _ids(one)), [])
    of_turn = None if tokenizer is None else turn_end_id(tokenizer)
    if tokenizer is not None and of_turn is not None:
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        if tokenizer.convert_ids_to_tokens(of_turn) in kept_ends(added):
            of_turn = None
    ids = {*of_text, *_ids(of_turn)}
    return frozenset(one for one in ids if 0 <= one < vocab_size(model))


def _ids(stated: int | Sequence[int] | None) -> list[int]:
    if stated is None:
        return []
    return [stated] if isinstance(stated, int) else list(stated)


def sampling_defaults(model: LoadedModel) -> dict[str, Any]:
    """Return what the generation config of a model says of sampling, as `SamplingParams.resolved` takes it.

    As in transformers ``do_sample`` decides: false takes the most likely token, true without a temperature means 1.
    """
    config = model.generation_config
    stated = {} if config is None else config.to_diff_dict()
    sampling = {name: stated[name] for name in NEUTRAL if stated.get(name) is not None}
    if stated.get("do_sample") is not None:
        sampling["temperature"] = sampling.get("temperature", 1.0) if stated["do_sample"] else 0.0
    if "top_k" in sampling:
        sampling["top_k"] = max(0, sampling["top_k"])
    if stated.get("max_new_tokens") is not None:
        sampling["max_tokens"] = stated["max_new_tokens"]
    return sampling


def check_facts(name: str, model: LoadedModel) -> None:
    """Check what is read from the configs later on. Raises: ModelError that names the file and the field."""
    config, generation = model.config.get_text_config(), model.generation_config
    for file, source, field, is_allowed, allowed in (
        ("config.json", config, "vocab_size", _is_count, "a number above 0"),
        ("config.json", config, "max_position_embeddings", _is_count, "a number above 0"),
        ("config.json", config, "eos_token_id", _is_ids, "a token id or a list of token ids"),
        ("generation_config.json", generation, "eos_token_id", _is_ids, "a token id or a list of token ids"),
        ("generation_config.json", generation, "max_new_tokens", _is_count, "a number above 0"),
        *(("generation_config.json", generation, one, _is_number, "a number") for one in NEUTRAL),
    ):
        value = getattr(source, field, None)
        if value is not None and not is_allowed(value):
            raise ModelError(
                f"{file} of {name} cannot be used: its {field} is {str(value)[:40]}, it must be {allowed}; "
                "copy or download it again"
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_ids(value: Any) -> bool:
    ids = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(one, int) and not isinstance(one, bool) for one in ids)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
