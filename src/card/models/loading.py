"""Load causal language models and tokenizers: from a folder, a GGUF file, the hub or the package.

Errors are one clear line.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import torch
import transformers  # what lies below its models is imported where a name of it is used: a quarter of a second or more
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from card.config import INT8
from card.errors import ModelError, VocabularyError, in_few_words
from card.kernels.int8_linear import why_not_int8
from card.machine.folders import weights_folder
from card.machine.processor import computes_bfloat16
from card.models.block_layers import weight_count
from card.models.decoder_model import mark_int8, read_config, read_decoder
from card.models.gguf.header import GgufError
from card.models.gguf.source import GgufSource
from card.models.inner_text import WEIGHT_NAMES, inner_name, text_config
from card.models.layer_kinds import check_kinds, keeps_state, unheard_of_kinds
from card.models.names import OTHER_FAMILY
from card.models.parallel_draft import read_parallel_draft
from card.models.places import hub_file, local_model
from card.models.states import least_state_bytes
from card.models.weight_files import Shapes, check_counts, check_sizes, raw_config, tensor_shapes
from card.text.tokens import check_tokenizers_fit, turn_end_id

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from card.models.decoder_model import LoadedModel

logger = logging.getLogger(__name__)

_HUB_TIMEOUT_S = 10.0
_NO_CONTEXT_LIMIT = 1 << 30
_SAMPLE = "A text."  # which every tokenizer must take
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # which servers take from the model
_HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]  # of the HTTP client that the hub's client is built on
_NO_BFLOAT16 = "this processor has no bfloat16 instructions"
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class _Source:
    """Source that a model is read from."""

    name: str  # as the user wrote it
    path: str  # a folder, or a name on the hub
    is_local: bool  # read from disk only: a folder, or a hub model that only the local cache can give
    hub_problem: str = ""  # why the hub cannot be asked
    is_folder: bool = False
    gguf: GgufSource | None = None  # what it is instead of a folder

    @property
    def options(self) -> dict[str, bool]:
        return {"local_files_only": self.is_local, "trust_remote_code": False}


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    cache_dir: str | None = None,
) -> PreTrainedModel:
    """Load a causal language model, ready for inference.

    Args:
        name_or_path: a folder, a GGUF file, a name on the hub, that of a GGUF file there (org/repo/model.gguf), or
            "demo-target" or "demo-draft". For what is here no network is used.
        dtype: "auto" as stored, or "float32", "bfloat16", "float16", "float64"; "int8" as stored, run in integers.
            On a CPU without bfloat16 instructions "auto" widens 16 bits to float32, and runs a quantised GGUF file in
            integers.
        device: "cpu", "cuda", "cuda:1", "mps".
        cache_dir: where the converted weights of a GGUF file are kept for the next start; None: by the system's custom,
            empty: nowhere.
    Raises: ModelError, one line, if it cannot be found, read or placed, or is no causal language model.
    """
    wanted_dtype, wanted_device = _parse_dtype(dtype), _parse_device(device)
    with quiet():
        source = _find(str(name_or_path), cache_dir)
        dtype = _dtype_for(source, dtype, wanted_device)
        model, report = _read_model(source, wanted_dtype)
        missing = sorted(report["missing_keys"])
        if missing:
            raise ModelError(
                f"the weights of {source.name} are incomplete: {len(missing)} tensors are missing, the first is "
                f"{missing[0]}; copy or download the model again"
            )
        with _explained(source, "{} cannot be moved to " + str(wanted_device)):
            model.to(wanted_device)
    loaded: PreTrainedModel = model.requires_grad_(False).train(False)
    _check_facts(str(name_or_path), loaded)
    _mark(loaded, source)
    _fit_to_processor(loaded, dtype)
    return loaded


def load_decoder(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    cache_dir: str | None = None,
) -> LoadedModel:
    """Load a model to be run by a `TorchRunner`, without transformers' modelling code where that is not needed.

    Arguments and errors as of `load_model`.
    """
    wanted_dtype, wanted_device = _parse_dtype(dtype), _parse_device(device)
    decoder: LoadedModel | None = None
    with quiet():
        source = _find(str(name_or_path), cache_dir)
        if source.gguf is not None:
            with _explained(source, "the weights of {} cannot be read"):
                if _runs_as_blocks(source.gguf, dtype, wanted_device):
                    dtype, decoder = INT8, source.gguf.block_decoder()
                else:
                    dtype = _dtype_for(source, dtype, wanted_device)
                    decoder = source.gguf.decoder(wanted_dtype, wanted_device)
        elif source.is_folder:
            _check_folder(source)
            decoder = read_decoder(Path(source.path), dtype=wanted_dtype, device=wanted_device)
    if decoder is None:
        return load_model(name_or_path, dtype=dtype, device=device)
    _check_facts(str(name_or_path), decoder)
    _mark(decoder, source)
    _fit_to_processor(decoder, dtype)
    return decoder


def load_tokenizer(name_or_path: str | Path, *, cache_dir: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; arguments as in `load_model`.

    Raises: ModelError, one line, if there is none or it cannot be read.
    """
    with quiet():
        source = _find(str(name_or_path), cache_dir)
        if source.gguf is not None:
            with _explained(source, "the tokenizer of {} cannot be read"):
                return _tried(source.gguf.tokenizer())
        config = read_config(Path(source.path)) if source.is_folder else None  # None: transformers reads it
        with _explained(source, "the tokenizer of {} is missing or cannot be read"):
            return _tried(transformers.AutoTokenizer.from_pretrained(source.path, config=config, **source.options))


def _tried(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer that has been used once: some settings are only read then. Raises: almost anything."""
    ids = tokenizer(_SAMPLE, verbose=False)["input_ids"]
    tokenizer.decode(ids, skip_special_tokens=True)
    turn_end_id(tokenizer)
    return tokenizer


def parameter_count(model: torch.nn.Module) -> int:
    """Return the number of parameters; a tensor used twice (tied embeddings) counts once."""
    return weight_count(model)


def vocab_size(model: LoadedModel) -> int:
    """Return V, the number of token ids that the model has logits for; padding rows included."""
    return int(model.config.get_text_config().vocab_size)


def context_limit(model: LoadedModel) -> int:
    """Return the most positions that the model was made for; a large number if its config sets no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else _NO_CONTEXT_LIMIT


def check_pair(
    tokenizer: PreTrainedTokenizerBase,
    target: str | Path | LoadedModel,
    draft: str | Path | LoadedModel,
    *,
    cache_dir: str | None = None,
) -> None:
    """Check that a draft fits the target: those given by name without loading their weights, a loaded one by its size.

    Raises: ModelError if one cannot be found; VocabularyError that names the first difference.
    """
    if not isinstance(draft, str | Path):
        if vocab_size(draft) < len(tokenizer):
            raise VocabularyError(
                f"the draft model has {vocab_size(draft)} embedding rows, the target's tokenizer {len(tokenizer)} "
                "tokens; use two models that share one tokenizer"
            )
        return
    draft_tokenizer = load_tokenizer(draft, cache_dir=cache_dir)
    sizes = _vocab_size_of(target, cache_dir), _vocab_size_of(draft, cache_dir)
    try:
        check_tokenizers_fit(tokenizer, draft_tokenizer, *sizes)
    except VocabularyError as error:
        raise VocabularyError(f"draft {draft} does not fit the target: {error}") from error


def end_token_ids(model: LoadedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> frozenset[int]:
    """Return the ids that end a text.

    They are those of the generation config alone, as in transformers' ``generate``; if it states none, those of the
    config; if there are none either, that of the tokenizer. The token that closes an answer in the tokenizer's chat
    template is always one of them: some makers forget it, and their chats would not end.
    """
    stated = [
        getattr(model.generation_config, "eos_token_id", None),
        model.config.get_text_config().eos_token_id,
        getattr(tokenizer, "eos_token_id", None),
    ]
    of_text = next((_ids(one) for one in stated if _ids(one)), [])
    of_turn = None if tokenizer is None else turn_end_id(tokenizer)
    ids = {*of_text, *_ids(of_turn)}
    return frozenset(one for one in ids if 0 <= one < vocab_size(model))


def _ids(stated: int | Sequence[int] | None) -> list[int]:
    if stated is None:
        return []
    return [stated] if isinstance(stated, int) else list(stated)


def _check_facts(name: str, model: LoadedModel) -> None:
    """Check what is read from the configs later on. Raises: ModelError that names the file and the field."""
    config, generation = model.config.get_text_config(), model.generation_config
    for file, of, field, is_allowed, allowed in (
        ("config.json", config, "vocab_size", _is_count, "a number above 0"),
        ("config.json", config, "max_position_embeddings", _is_count, "a number above 0"),
        ("config.json", config, "eos_token_id", _is_ids, "a token id or a list of token ids"),
        ("generation_config.json", generation, "eos_token_id", _is_ids, "a token id or a list of token ids"),
        ("generation_config.json", generation, "max_new_tokens", _is_count, "a number above 0"),
        *(("generation_config.json", generation, one, _is_number, "a number") for one in _SAMPLING),
    ):
        value = getattr(of, field, None)
        if value is not None and not is_allowed(value):
            raise ModelError(
                f"{file} of {name} cannot be used: its {field} is {str(value)[:40]}, it must be {allowed}; "
                "copy or download it again"
            )


def _mark(model: LoadedModel, source: _Source) -> None:
    if source.is_folder:
        read_parallel_draft(Path(source.path), model)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_ids(value: Any) -> bool:
    ids = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(one, int) and not isinstance(one, bool) for one in ids)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _vocab_size_of(model: str | Path | LoadedModel, cache_dir: str | None) -> int:
    """Return the vocabulary size of a model; that of a named one as its config states it."""
    if not isinstance(model, str | Path):
        return vocab_size(model)
    config = _named_config(model, cache_dir)
    return int(config["vocab_size"] if isinstance(config, dict) else config.get_text_config().vocab_size)


def _named_config(name: str | Path, cache_dir: str | None) -> Any:
    """Return the config of a model without its weights: a dictionary if they are a GGUF file."""
    with quiet():
        source = _find(str(name), cache_dir)
        if source.gguf is not None:
            with _explained(source, "the config of {} cannot be used"):
                return source.gguf.config
        return (read_config(Path(source.path)) if source.is_folder else None) or _read_config(source)


def state_bytes_of(name: str | Path, *, cache_dir: str | None = None) -> int:
    """Return the least memory that the states of one sequence take, by the config of a model alone; 0 if it has none.

    Raises: ModelError if the model cannot be found or its config not be used.
    """
    config = _named_config(name, cache_dir)
    if isinstance(config, dict) or not keeps_state(config.get_text_config()):
        return 0
    loader: Any = transformers.AutoModelForCausalLM
    try:
        with quiet(), torch.device("meta"), torch.inference_mode():
            empty = loader.from_config(copy.deepcopy(config.get_text_config()), dtype=torch.bfloat16)
            return least_state_bytes(empty)
    except Exception:  # what cannot be built is told when it is loaded
        return 0


def _find(name: str, cache_dir: str | None) -> _Source:
    """Return where ``name`` leads. Raises: ModelError if it is a path that is no model."""
    place, in_hub = local_model(name), hub_file(name)
    if place is None and in_hub is not None:
        place = _fetched(name, *in_hub)
    if place is not None and place.is_file():
        try:
            gguf = GgufSource(place, weights_folder(cache_dir))
        except OSError as error:
            raise ModelError(f"{name} cannot be read: {error.strerror}") from error
        return _Source(name, str(place), is_local=True, gguf=gguf)
    if place is not None:
        source = _Source(name, str(place), is_local=True, is_folder=True)
        with _explained(source, "the config of {} cannot be used"):
            check_counts(raw_config(place))
        _check_kind_names(source)
        return source
    problem = _hub_problem(name)
    return _Source(name, name, is_local=bool(problem), hub_problem=problem)


def _check_kind_names(source: _Source) -> None:
    """Raise ModelError that names kinds of layers in a folder's config.json which transformers does not know either.

    A family may have older names for its kinds, so the config is read as transformers reads it before it is blamed.
    """
    unheard_of = unheard_of_kinds(raw_config(Path(source.path)))
    if not unheard_of:
        return
    try:
        transformers.AutoConfig.from_pretrained(source.path, **source.options)
    except Exception as error:
        raise ModelError(
            f"the config of {source.name} has layers of type {', '.join(unheard_of)[:200]}, which neither CARD nor "
            f"transformers {transformers.__version__} knows; {OTHER_FAMILY}"
        ) from error


def _check_folder(source: _Source) -> Shapes | None:
    """Read what is small, and compare it; return the shapes of the weights, None if they are not known."""
    folder = Path(source.path)
    with _explained(source, "the weights of {} cannot be read"):
        shapes = tensor_shapes(folder)
    with _explained(source, "the config of {} cannot be used"):
        check_counts(raw_config(folder), shapes)
    if (folder / "generation_config.json").is_file():
        with _explained(source, "the generation_config.json of {} cannot be used"):
            transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return shapes


def _fetched(name: str, repository: str, file: str) -> Path:
    """Return a file of the hub, from the local cache if it is there. Raises: ModelError."""
    source = _Source(name, name, is_local=True, hub_problem=_hub_problem(repository))
    with _explained(source, "{} cannot be fetched"):
        return Path(huggingface_hub.hf_hub_download(repository, file, local_files_only=bool(source.hub_problem)))


def _hub_problem(name: str) -> str:
    """Return in a few words why the hub cannot give ``name``; empty if it can. Asks once, without retries."""
    try:
        huggingface_hub.HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except GatedRepoError:
        return "it is gated: accept its licence there and log in with `hf auth login`"
    except RepositoryNotFoundError:
        return "there is no such public model; a private one needs `hf auth login`"
    except HFValidationError:
        return "this is not a valid name there"
    except (OSError, _HTTP_ERROR) as error:
        return in_few_words(error)
    return ""


def _read_model(source: _Source, dtype: str | torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Return a model of transformers, and its report on what was missing."""
    if source.gguf is not None:
        with _explained(source, "the weights of {} cannot be read"):
            return _read_gguf(source.gguf, dtype)
    shapes = _check_folder(source) if source.is_folder else None
    config, names = _read_config(source), None
    with _explained(source, "the config of {} cannot be used"):
        inner = text_config(config)
    if inner is not None:
        config, names = inner, dict(WEIGHT_NAMES)
        if shapes is not None:
            shapes = {name: shape for full, shape in shapes.items() if (name := inner_name(full)) is not None}
    check_kinds(config.get_text_config())  # before the weights, which may take minutes to read
    if shapes is not None:
        _check_sizes(source, config, shapes)
    with _explained(source, "the weights of {} cannot be read"):
        loader: Any = transformers.AutoModelForCausalLM
        read: tuple[Any, dict[str, Any]] = loader.from_pretrained(
            source.path, config=config, dtype=dtype, key_mapping=names, output_loading_info=True, **source.options
        )
    return read


def _runs_as_blocks(gguf: GgufSource, dtype: str | torch.dtype, device: torch.device) -> bool:
    """Return whether a file runs with its own numbers, by products of integers."""
    return dtype == "auto" and device.type == "cpu" and why_not_int8() is None and gguf.can_run_blocks


def _dtype_for(source: _Source, dtype: str | torch.dtype, device: torch.device) -> str | torch.dtype:
    """Return what a model is to compute in: in integers where a quantised file would be unpacked to slow numbers."""
    if dtype != "auto" or computes_bfloat16(device) or source.gguf is None:
        return dtype
    with _explained(source, "the weights of {} cannot be read"):
        is_quantized = source.gguf.is_quantized
    if not is_quantized or why_not_int8() is not None:
        return dtype
    say_once(f"{_NO_BFLOAT16}: quantised files run in 8-bit integers (--dtype bfloat16 or float32 for others)")
    return INT8


def _fit_to_processor(model: LoadedModel, dtype: str | torch.dtype) -> None:
    """Let a loaded model compute in integers if it is to, and "auto" in float32 where 16 bits are slow."""
    if dtype == INT8:
        mark_int8(model)
    elif dtype == "auto" and model.dtype in (torch.bfloat16, torch.float16) and not computes_bfloat16(model.device):
        say_once(
            f"{_NO_BFLOAT16}: weights of 16 bits are widened to float32 (--dtype bfloat16 keeps them, --dtype int8 is "
            "faster)"
        )
        model.float()


@functools.cache
def say_once(words: str) -> None:
    """Log a warning the first time only."""
    logger.warning(words)


def _check_sizes(source: _Source, config: PreTrainedConfig, shapes: Shapes) -> None:
    """Check that a model of this config is about as large as its weights, before any memory is taken for it."""
    loader: Any = transformers.AutoModelForCausalLM
    try:
        with torch.device("meta"):
            empty = loader.from_config(copy.deepcopy(config))
    except Exception:  # transformers will build it in the same way, and tell what is wrong
        return
    with _explained(source, "the weights of {} do not fit its config"):
        check_sizes(empty, shapes)


def _read_gguf(gguf: GgufSource, dtype: str | torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Do the same for a GGUF file, by way of the folder that is kept of it, if one can be kept."""
    kept = gguf.folder(dtype)
    config = transformers.AutoConfig.for_model(**gguf.config)
    loader: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    wanted = gguf.stored_dtype(dtype) if isinstance(dtype, str) else dtype
    read: tuple[Any, dict[str, Any]] = loader.from_pretrained(
        kept,
        config=config,
        state_dict=gguf.weights(dtype) if kept is None else None,
        dtype=wanted,
        output_loading_info=True,
        local_files_only=True,
    )
    return read


def _read_config(source: _Source) -> PreTrainedConfig:
    """Return the config. Raises: ModelError if it cannot be read or is not that of a causal language model."""
    with _explained(source, "the config of {} cannot be used"):
        config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(source.path, **source.options)
        architectures = [str(one) for one in config.architectures or []]
        known = set(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
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


@contextlib.contextmanager
def _explained(source: _Source, what: str) -> Iterator[None]:
    """Turn whatever a loader raises into a ModelError; ``what`` has a place for the model's name."""
    try:
        yield
    except (
        Exception
    ) as error:  # transformers, safetensors, tokenizers and pickle raise almost anything, Exception itself too
        if isinstance(error, GgufError):
            raise ModelError(f"{source.name} {in_few_words(error)}") from error
        if source.hub_problem:
            raise ModelError(
                f"{source.name} is neither a folder here nor in the local cache, and the hub cannot be used: "
                f"{source.hub_problem}; give a model folder, or check the name and the connection"
            ) from error
        raise ModelError(f"{what.format(source.name)}: {in_few_words(error)}") from error


def _parse_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if dtype == "auto" or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    if dtype == INT8:
        return "auto"  # runners make integers of the weights as they are stored
    if dtype not in _DTYPES:
        raise ModelError(f"unknown dtype {str(dtype)!r}; allowed: auto, {INT8}, {', '.join(_DTYPES)}")
    return _DTYPES[str(dtype)]


def _parse_device(device: str | torch.device) -> torch.device:
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    allowed = ["cpu", *(f"cuda:{idx}" for idx in range(num_cuda))] + ["mps"] * torch.backends.mps.is_available()
    try:
        parsed = torch.device(device)
    except RuntimeError:
        parsed = None
    is_there = parsed is not None and (
        (parsed.type == "cuda" and (parsed.index or 0) < num_cuda) or (parsed.type in allowed and not parsed.index)
    )
    if parsed is None or not is_there:
        raise ModelError(f"device {str(device)!r} is not available here; allowed: {', '.join(allowed)}")
    return parsed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the loaders' logging and progress bars, which are settings of the whole process, and restore them."""
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    had_bars = transformers_logging.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if had_bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
