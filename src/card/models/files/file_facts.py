"""Facts that a model's files state, for clients that list models."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from card.models.files.gguf.header import read_header
from card.models.files.gguf.parts import part_files
from card.models.files.places import hub_file, local_model
from card.models.files.weight_files import raw_config, weight_files

_END_BYTES = 1 << 20  # of each end of a file that its digest reads
# By number, what llama.cpp calls a mixture of types.
# Source: `llama_ftype` in https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h
_MIXTURES: Mapping[int, str] = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(enumerate(("Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S"), 7)),
    **dict(enumerate(("Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS", "Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL"), 17)),
    **dict(enumerate(("IQ3_S", "IQ3_M", "IQ2_S", "IQ2_M", "IQ4_XS", "IQ1_M", "BF16"), 26)),
    **dict(enumerate(("TQ1_0", "TQ2_0", "MXFP4_MOE"), 36)),
}
_DTYPES: Mapping[object, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Facts of the files of a model."""

    form: str  # gguf or safetensors
    family: str  # llama.cpp's name of the architecture; of a folder its model_type
    quantization: str  # such as Q4_K_M or BF16
    num_bytes: int  # of the files with weights, and a folder's config.json
    digest: str  # SHA-256 of their sizes and ends: whole files take long to read
    modified_at: float  # seconds since 1970, of the file that changed last


@functools.lru_cache(maxsize=1)  # the files of a running server are those that it has loaded
def file_facts(name: str) -> FileFacts | None:
    """Return the facts of a model by its name; None if its files are not on this machine.

    Raises: ModelError, ValueError, OSError if they cannot be read.
    """
    place = local_model(name) or _fetched(name)
    if place is None:
        return None
    if place.is_file():
        header = read_header(place)
        kind = header.metadata.get("general.file_type")
        mixture = _MIXTURES.get(kind, _UNKNOWN) if isinstance(kind, int) else _UNKNOWN
        return _facts(part_files(place), "gguf", header.architecture, mixture)
    config = raw_config(place) or {}
    family = str(config.get("model_type", _UNKNOWN))
    return _facts([place / "config.json", *weight_files(place)], "safetensors", family, _stored(config))


def _fetched(name: str) -> Path | None:
    """Return where a model of the hub was put when it was fetched."""
    import huggingface_hub

    repository, file = hub_file(name) or (name, "config.json")
    path = huggingface_hub.try_to_load_from_cache(repository, file)
    if not isinstance(path, str):
        return None
    return Path(path) if hub_file(name) else Path(path).parent


def _stored(config: Mapping[str, Any]) -> str:
    """Return the kind of numbers that the weights of a folder are."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    inner = config.get("text_config") or {}
    dtypes = [one.get(key) for one in (config, inner) for key in ("dtype", "torch_dtype")]
    return str(method).upper() if method else _DTYPES.get(next(filter(None, dtypes), None), _UNKNOWN)


def _facts(files: Sequence[Path], form: str, family: str, quantization: str) -> FileFacts:
    states, sums = [file.stat() for file in files], hashlib.sha256()
    for file, state in zip(files, states, strict=True):
        sums.update(state.st_size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            sums.update(stream.read(_END_BYTES))
            stream.seek(max(0, state.st_size - _END_BYTES))
            sums.update(stream.read())
    num_bytes = sum(state.st_size for state in states)
    return FileFacts(form, family, quantization, num_bytes, sums.hexdigest(), max(one.st_mtime for one in states))
