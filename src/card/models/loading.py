"""Load causal language models and tokenizers: from a folder, a GGUF file, the hub or the package.

Errors are one clear line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from card.config import INT8
from card.config.registry import records
from card.errors import MissingError, ModelError, VocabularyError, named
from card.machine.folders import weights_folder
from card.machine.importing import load_place, needs_torch
from card.models.by_transformers import has_transformers, torch_module
from card.models.decoder_config import DecoderConfig
from card.models.dtypes import AUTO, CPU, dtype_for, has_own_pass, parse_device, parse_dtype, runs_as_blocks
from card.models.facts import check_facts, vocab_size
from card.models.files.eagle_folder import is_eagle_folder
from card.models.files.generation_config import read_generation_config
from card.models.files.places import local_model
from card.models.files.sources import Source, explained, files_of, find_source, quiet
from card.models.files.weight_files import check_folder, weight_files
from card.models.images import Tower
from card.models.layer_kinds import keeps_state
from card.models.loaded_model import LoadedModel
from card.models.names import model_name
from card.models.own.decoder_model import DecoderModel, read_decoder
from card.models.own.exact_layers import check_tables
from card.models.own.fused_head import is_fused_folder
from card.models.own.plain_config import config_of, least_state_bytes, read_config
from card.models.parallel_draft import is_parallel_draft, names_mask, parallel_draft_of, read_parallel_draft
from card.text.fit import check_tokenizers_fit
from card.text.prompts import turn_end_id
from card.text.tokenizer import Tokenizer
from card.text.tokenizer_files import FILE_NAMES, read_tokenizer

_SAMPLE = "A text."  # which every tokenizer must take


class ReadTokenizer(Protocol):
    """Reads tokenizers that no tokenizer.json describes."""

    def __call__(self, path: str, *, is_local: bool) -> Tokenizer:
        """Return the tokenizer of a folder or of a model on the hub; of the latter what is here, if ``is_local``."""


def load_decoder(
    name_or_path: str | Path, *, dtype: object = "auto", device: object = "cpu", cache_dir: str | None = None
) -> LoadedModel:
    """Load a causal language model to be run.

    Args:
        name_or_path: a folder, a GGUF file, a name on the hub, that of a GGUF file there (org/repo/model.gguf), or
            "demo-target" or "demo-draft". For what is here no network is used.
        dtype: "auto" as stored, or "float32", "bfloat16", "float16", "float64"; "int8" as stored, run in integers.
            A quantised GGUF file runs with its own blocks by "auto".
        device: "cpu", "cuda", "cuda:1", "mps".
        cache_dir: where the converted weights of a GGUF file are kept for the next start. None means the system's cache
            folder, an empty text nowhere.
    Returns: a `DecoderModel` where our own pass runs it, else a model of transformers.
    Raises: ModelError, one line, if it cannot be found, read or placed, or is no causal language model.
    """
    wanted_dtype, wanted_device = parse_dtype(dtype), parse_device(device)
    decoder: DecoderModel | None = None
    with quiet():
        source = find_source(str(name_or_path), cache_dir)
        if source.gguf is not None:
            with explained(source, "the weights of {} cannot be read"):
                if runs_as_blocks(source.gguf, dtype, wanted_device):
                    dtype, decoder = INT8, source.gguf.block_decoder()
                elif has_own_pass(wanted_dtype, wanted_device):
                    dtype = dtype_for(source, dtype, wanted_device)
                    decoder = source.gguf.decoder(wanted_dtype)
        _refuse_head(source)
        if source.is_folder and has_own_pass(wanted_dtype, wanted_device):
            with explained(source, "the weights of {} cannot be read"):
                check_folder(Path(source.path))
            with explained(source, "the generation_config.json of {} cannot be used"):
                read_generation_config(Path(source.path))
            decoder = read_decoder(Path(source.path), dtype=wanted_dtype, cache=weights_folder(cache_dir))
    if decoder is None:
        loaded: LoadedModel = _transformers("loading", source).load_to_run(
            source, dtype=dtype, device=wanted_device, cache=weights_folder(cache_dir)
        )
        return loaded
    if source.is_folder:  # what is made of a GGUF file has been checked
        check_tables(decoder, weight_files(Path(source.path)), weights_folder(cache_dir))
    check_facts(source.name, decoder)
    read_parallel_draft(Path(source.path) if source.is_folder else None, decoder)
    decoder.computes_int8 = dtype == INT8 or decoder.has_blocks
    return decoder


def _transformers(module: str, source: Source) -> Any:
    """Return a module for what our own pass does not run.

    Raises: ModelError if the model is nowhere, which comes first; MissingError if PyTorch is not installed.
    """
    if not source.is_folder and not has_transformers():
        with explained(source, "the config of {} cannot be used"):
            files_of(source, ["config.json"])
    return torch_module(f"transformers.{module}", f"{source.name} is a model that")


def products_in_file(name_or_path: str, *, dtype: object, device: object, cache_dir: str | None) -> list[str]:
    """Return the formats of the blocks of a GGUF file here that are multiplied as they are; of other models none.

    Arguments as of `load_decoder`. Raises: ModelError, one line, if the file cannot be used.
    """
    place = local_model(name_or_path)
    if place is None or not place.is_file() or (dtype, device) != (AUTO, CPU):
        return []
    source = find_source(name_or_path, cache_dir)
    assert source.gguf is not None
    with explained(source, "the config of {} cannot be used"):
        return source.gguf.products


def load_vision_tower(
    name_or_path: str | Path, *, dtype: object, device: object, cache_dir: str | None = None
) -> Tower:
    """Load the parts of a multimodal checkpoint that see; arguments as of `load_decoder`.

    Raises: ModelError, one line, if there are none, they cannot be read, or the family is not known.
    """
    with quiet():
        source = find_source(str(name_or_path), cache_dir)
        if source.gguf is not None:
            raise ModelError(f"{source.name} is a GGUF file, which holds no vision tower; give a folder for images")
        read_tower = torch_module("vision.tower", f"the vision tower of {source.name}").read_tower
        with explained(source, "the vision tower of {} cannot be read"):
            tower: Tower = read_tower(
                source.path, dtype=parse_dtype(dtype), device=parse_device(device), options=source.options
            )
            return tower


def load_tokenizer(name_or_path: str | Path, *, cache_dir: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model; arguments as in `load_decoder`.

    Raises: ModelError, one line, if there is none or it cannot be read.
    """
    with quiet():
        source = find_source(str(name_or_path), cache_dir)
        if source.gguf is not None:
            with explained(source, "the tokenizer of {} cannot be read"):
                return _tried(source.gguf.tokenizer())
        _refuse_head(source)
        with explained(source, "the tokenizer of {} is missing or cannot be read"):
            return _tried(read_tokenizer(files_of(source, FILE_NAMES)) or _other_tokenizer(source))


def _refuse_head(source: Source) -> None:
    """Refuse the folder of a head, which is no model. Raises: ModelError."""
    folder = Path(source.path)
    if source.is_folder and (is_eagle_folder(folder) or is_fused_folder(folder)):
        kind = "an EAGLE-3 head" if is_eagle_folder(folder) else "a drafter for one target"
        raise ModelError(
            f"{source.name} is {kind}, and no model: give it as {named('draft')} of its target, in whose "
            "process it drafts"
        )


def _other_tokenizer(source: Source) -> Tokenizer:
    """Return a tokenizer that no tokenizer.json describes. Raises: ModelError if no part that is installed reads it."""
    for place in (entry.record.tokenizer for entry in records() if entry.record.tokenizer):
        try:
            read: ReadTokenizer = load_place(place)
        except ImportError:  # its package is not installed
            continue
        return read(source.path, is_local=source.is_local)
    raise MissingError(needs_torch("it has no tokenizer.json, and another tokenizer"))


def _tried(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that has been used once: some settings are only read then. Raises: almost anything."""
    tokenizer.decode(tokenizer.encode(_SAMPLE), skip_special_tokens=True)
    turn_end_id(tokenizer)
    return tokenizer


def check_pair(
    tokenizer: Tokenizer,
    target: str | Path | LoadedModel,
    draft: str | Path | LoadedModel,
    *,
    cache_dir: str | None = None,
    is_own: bool = False,
    may_lack: bool = False,
) -> None:
    """Check that a draft fits the target: those given by name without loading their weights, a loaded one by its size.

    Args:
        is_own: the tokenizer is the one that the target comes with, so that a draft with the same need not be read.
        may_lack: the draft may lack tokens of the target, such as those that stand for images.
    Raises: ModelError if one cannot be found; VocabularyError that names the first difference.
    """
    if not isinstance(draft, str | Path):
        if vocab_size(draft) < len(tokenizer):
            raise VocabularyError(
                f"the draft model has {vocab_size(draft)} embedding rows, the target's tokenizer {len(tokenizer)} "
                "tokens; use two models that share one tokenizer"
            )
        return
    if is_own and _share_tokenizer(target, draft, cache_dir):
        return  # each file has been found to have a row for each token
    draft_tokenizer = load_tokenizer(draft, cache_dir=cache_dir)
    sizes = _vocab_size_of(target, cache_dir), _vocab_size_of(draft, cache_dir)
    try:
        check_tokenizers_fit(tokenizer, draft_tokenizer, *sizes, may_lack=may_lack)
    except VocabularyError as error:
        raise VocabularyError(f"draft {draft} does not fit the target: {error}") from error


def require_parallel_draft(draft: str | LoadedModel, asked_by: str, *, cache_dir: str | None = None) -> None:
    """Check that a draft model drafts several tokens in one pass, without loading its weights.

    Raises: ModelError that says how to make one.
    """
    if not isinstance(draft, str):
        name, has_it = model_name(draft), parallel_draft_of(draft) is not None
    elif (folder := local_model(draft)) is not None:
        name, has_it = draft, is_parallel_draft(folder)
    else:
        config = _named_config(draft, cache_dir)
        name, has_it = draft, names_mask(config if isinstance(config, dict) else config.to_dict())
    if not has_it:
        raise ModelError(
            f"{asked_by} needs a draft model that drafts several tokens in one pass, and {name} names no mask token "
            "(it has no pard.json, and no pard_token in its config.json): make one with card train pard, or use method "
            "sps"
        )


def _share_tokenizer(target: str | Path | LoadedModel, draft: str | Path, cache_dir: str | None) -> bool:
    """Return whether two models are known to have one tokenizer before either is built: it takes half a second."""
    if not isinstance(target, str | Path):
        return False
    one, other = (find_source(str(name), cache_dir) for name in (target, draft))
    if one.gguf is None or other.gguf is None:
        return False
    with explained(other, "the tokenizer of {} cannot be read"):
        return one.gguf.shares_tokenizer(other.gguf)


def _vocab_size_of(model: str | Path | LoadedModel, cache_dir: str | None) -> int:
    """Return the vocabulary size of a model; that of a named one as its config states it."""
    if not isinstance(model, str | Path):
        return vocab_size(model)
    config = _named_config(model, cache_dir)
    size: Any = config["vocab_size"] if isinstance(config, dict) else _text_field(config, "vocab_size")
    if not isinstance(size, int):
        raise ModelError(f"the config of {model} cannot be used: its vocab_size is {str(size)[:40]}; download it again")
    return size


def _text_field(config: Any, name: str) -> Any:
    """Return a field of a config's text model; None if there is none."""
    return getattr(config.get_text_config(), name, None)


def _named_config(name: str | Path, cache_dir: str | None) -> Any:
    """Return the config of a model without its weights: a dictionary if they are a GGUF file."""
    with quiet():
        source = find_source(str(name), cache_dir)
        if source.gguf is not None:
            with explained(source, "the config of {} cannot be used"):
                return source.gguf.config
        plain = read_config(Path(source.path)) if source.is_folder else None
        if plain is not None:
            return plain
        return _transformers("opening", source).read_transformers_config(source)


def state_bytes_of(name: str | Path, *, cache_dir: str | None = None) -> int:
    """Return the least memory that the states of one sequence take, by the config of a model alone; 0 if it has none.

    Raises: ModelError if the model cannot be found or its config not be used.
    """
    config = _named_config(name, cache_dir)
    read = config_of(config) if isinstance(config, dict) else config
    if isinstance(read, DecoderConfig):
        return least_state_bytes(read)
    if isinstance(config, dict) or _text_field(config, "vocab_size") is None:
        return 0  # or no config of a text model, which is told when it is loaded
    if not keeps_state(config.get_text_config()):
        return 0
    least: int = torch_module("transformers.states", f"{name} is a model that").state_bytes_by_config(config)
    return least
