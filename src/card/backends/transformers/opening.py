"""Open models of transformers; configs are checked before memory is allocated for the weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers  # its models are imported where they are used, as that takes a quarter of a second or more
from transformers import PreTrainedConfig
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

from card.backends.transformers.arrays import as_tensor, torch_dtype
from card.backends.transformers.built_sizes import check_sizes
from card.backends.transformers.inner_text import text_config
from card.errors import ModelError
from card.kernels.number_types import BFLOAT16, FLOAT64, STORED_DTYPES, dtype_name
from card.models.files.generation_config import GENERATION_NAME
from card.models.files.gguf.source import GgufSource
from card.models.files.scaled_weights import QUANTIZED, ScaledWeights, find_scaled, say_scaled
from card.models.files.sources import Source, explained
from card.models.files.weight_files import Shapes, raw_config
from card.models.files.weight_files import check_folder as check_files
from card.models.inner_text import WEIGHT_NAMES, inner_name
from card.models.layer_kinds import check_kinds
from card.models.names import OTHER_FAMILY


def read_model(source: Source, dtype: str) -> tuple[Any, dict[str, Any]]:
    """Return a model of transformers, and its report of missing tensors."""
    if source.gguf is not None:
        with explained(source, "the weights of {} cannot be read"):
            return _read_gguf(source.gguf, dtype)
    shapes = check_folder(source) if source.is_folder else None
    if source.is_folder and (Path(source.path) / GENERATION_NAME).is_file():  # read with the weights
        with explained(source, "the generation_config.json of {} cannot be used"):
            transformers.GenerationConfig.from_pretrained(source.path, local_files_only=True)
    scaled = _find_scaled(source)
    config, names = read_transformers_config(source, is_scaled=scaled is not None), None
    with explained(source, "the config of {} cannot be used"):
        inner = text_config(config)
    if shapes is not None and scaled is not None:
        shapes = scaled.shapes(shapes)
    if inner is not None:
        config, names = inner, dict(WEIGHT_NAMES)
        if shapes is not None:
            shapes = {name: shape for full, shape in shapes.items() if (name := inner_name(full)) is not None}
    check_kinds(config.get_text_config())  # before the weights, which may take minutes to read
    if shapes is not None:
        _check_sizes(source, config, shapes)
    with explained(source, "the weights of {} cannot be read"):
        if scaled is not None:
            return _read_scaled(Path(source.path), scaled, config, dtype, names)
        loader: Any = transformers.AutoModelForCausalLM
        read: tuple[Any, dict[str, Any]] = loader.from_pretrained(
            source.path,
            config=config,
            dtype=_for_loader(dtype),
            key_mapping=names,
            output_loading_info=True,
            **source.options,
        )
    return read


def _find_scaled(source: Source) -> ScaledWeights | None:
    if not source.is_folder:
        return None
    with explained(source, "the weights of {} cannot be read"):
        return find_scaled(Path(source.path))


def _read_scaled(
    folder: Path, scaled: ScaledWeights, config: Any, dtype: str, names: dict[str, str] | None
) -> tuple[Any, dict[str, Any]]:
    """Read a model with weights in 8-bit floats, which are multiplied by their scales; as `read_model`."""
    stated = dtype_name(config.get_text_config().dtype)
    wanted = STORED_DTYPES.get(stated if dtype == "auto" else dtype, BFLOAT16 if dtype == "auto" else FLOAT64)
    say_scaled(folder, scaled, wanted)
    loader: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, report = loader.from_pretrained(
        None,
        config=config,
        state_dict={name: as_tensor(array) for name, array in scaled.read(wanted).items()},
        dtype=torch_dtype(wanted),
        key_mapping=names,
        output_loading_info=True,
        local_files_only=True,
    )
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model, report


def _read_gguf(gguf: GgufSource, dtype: str) -> tuple[Any, dict[str, Any]]:
    """Read a GGUF file, through its converted folder if that can be stored; as `read_model`."""
    folder = gguf.folder(dtype)
    config = transformers.AutoConfig.for_model(**gguf.config)
    loader: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    wanted = gguf.stored_dtype(dtype) if dtype == "auto" else dtype
    arrays = gguf.weights(dtype) if folder is None else None
    read: tuple[Any, dict[str, Any]] = loader.from_pretrained(
        folder,
        config=config,
        state_dict=None if arrays is None else {name: as_tensor(array) for name, array in arrays.items()},
        dtype=torch_dtype(wanted),
        output_loading_info=True,
        local_files_only=True,
    )
    return read


def read_transformers_config(source: Source, *, is_scaled: bool = False) -> PreTrainedConfig:
    """Return the config. Raises: ModelError if it cannot be read or is not of a causal language model.

    Args:
        is_scaled: the weights are 8-bit floats, which are converted to ordinary ones when they are read.
    """
    if source.is_folder:
        _check_kind_names(source)
    with explained(source, "the config of {} cannot be used"):
        config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(source.path, **source.options)
        for one in (config, config.get_text_config()) if is_scaled else ():
            for name in QUANTIZED:
                one.__dict__.pop(name, None)
        architectures = [str(one) for one in config.architectures or []]
        known = set(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        inner: Any = config.get_text_config()
        if not isinstance(inner, PreTrainedConfig):  # a stray text_config in the config of a plain model
            raise ValueError(f"its text_config is {str(inner)[:40]}, which this family does not have")
        if text_config(config) is not None:
            return config
        is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(
            config, "is_encoder_decoder", False
        )
    if not is_causal or (architectures and not known.intersection(architectures)):
        raise ModelError(
            f"{source.name} is no causal language model but {', '.join(architectures) or config.model_type}; "
            "give a model that continues text"
        )
    return config


def _for_loader(dtype: str) -> str | torch.dtype:
    return dtype if dtype == "auto" else torch_dtype(dtype)


def check_folder(source: Source) -> Shapes | None:
    """Read and compare the small files; return the shapes of the weights, None if unknown."""
    folder = Path(source.path)
    with explained(source, "the weights of {} cannot be read"):
        shapes = check_files(folder)
    if (folder / "generation_config.json").is_file():
        with explained(source, "the generation_config.json of {} cannot be used"):
            transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return shapes


def _check_kind_names(source: Source) -> None:
    """Raise ModelError for kinds of layers in a folder's config.json that transformers does not know either.

    A family may have older names of kinds, so the config is first converted by transformers.
    """
    unknown = _unknown_kinds(raw_config(Path(source.path)))
    if not unknown:
        return
    try:
        transformers.AutoConfig.from_pretrained(source.path, **source.options)
    except Exception as error:
        raise ModelError(
            f"the config of {source.name} has layers of type {', '.join(unknown)[:200]}, which neither CARD nor "
            f"transformers {transformers.__version__} knows; {OTHER_FAMILY}"
        ) from error


def _unknown_kinds(raw: Any) -> list[str]:
    """Return the kinds in a parsed config.json that no model of transformers has."""
    whole = raw if isinstance(raw, dict) else {}
    inner = whole.get("text_config")
    stated = [one.get("layer_types") for one in (whole, inner) if isinstance(one, dict)]
    kinds = [kind for one in stated if isinstance(one, list) for kind in one if isinstance(kind, str)]
    return sorted(set(kinds) - set(ALLOWED_LAYER_TYPES))


def _check_sizes(source: Source, config: PreTrainedConfig, shapes: Shapes) -> None:
    """Check that a model of this config is about as large as its weights, before memory is allocated for it."""
    loader: Any = transformers.AutoModelForCausalLM
    try:
        with torch.device("meta"):
            empty = loader.from_config(copy.deepcopy(config))
    except Exception:  # transformers will fail in the same way, with its own message
        return
    with explained(source, "the weights of {} do not fit its config"):
        check_sizes(empty, shapes)
