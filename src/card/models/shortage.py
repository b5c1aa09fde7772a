"""Too little memory for a model: what the model needs, what is free, and what helps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from card.errors import ModelError, ShortageError, named
from card.machine.memory import in_gigabytes, is_shortage, memory_in_words
from card.models.files.gguf.parts import part_files
from card.models.files.places import local_model
from card.models.files.weight_files import raw_config

_ADVICE = (
    f"take a smaller model, a quantised GGUF file or {named('dtype')} int8, lower {named('max_model_len')}, "
    "or allow more memory"
)


@contextlib.contextmanager
def telling_shortage(*models: object, max_model_len: int | None = None) -> Iterator[None]:
    """Turn any error of too little memory in the block into a ShortageError.

    Args:
        models: the models that are being loaded; names without a model on this machine are left out.
        max_model_len: tokens of KV that the first of them is to have.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ShortageError) or not is_shortage(error):
            raise
        raise ShortageError(shortage_in_words(*models, max_model_len=max_model_len)) from error


def shortage_in_words(*models: object, max_model_len: int | None = None) -> str:
    """Return the line for users, its settings named; arguments as of `telling_shortage`."""
    names = [model for model in models if isinstance(model, str)]
    needs = [f"{name} has {in_gigabytes(num_bytes)} of weights" for name in names if (num_bytes := _stored_bytes(name))]
    if names and max_model_len and (num_bytes := _kv_bytes(names[0], max_model_len)):
        needs.append(f"KV of one text takes up to {in_gigabytes(num_bytes)}")
    return f"there is not enough memory: {', '.join([*needs, memory_in_words()])}; {_ADVICE}"


def _stored_bytes(name: str) -> int:
    """Return what the files of a model hold; 0 if they are not on this machine."""
    with contextlib.suppress(ModelError, OSError):
        place = local_model(name)
        if place is not None:
            files = part_files(place) if place.is_file() else [*place.glob("*.safetensors"), *place.glob("*.bin")]
            return sum(file.stat().st_size for file in files)
    return 0


def _kv_bytes(name: str, max_model_len: int) -> int:
    """Return about what the KV of the longest text takes, in 16 bits; 0 if no config.json tells."""
    with contextlib.suppress(ModelError, OSError, KeyError, ValueError, TypeError, AttributeError):
        place = local_model(name)
        config: Any = raw_config(place) if place is not None and place.is_dir() else None
        heads = config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // heads
        row_bytes = config["num_hidden_layers"] * 2 * (config.get("num_key_value_heads") or heads) * size * 2
        return int(row_bytes * min(max_model_len, config.get("max_position_embeddings") or max_model_len))
    return 0
