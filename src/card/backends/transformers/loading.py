"""Load models of transformers, for training or if our own pass cannot run them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from card.backends.transformers.arrays import as_array
from card.backends.transformers.devices import computes_bfloat16
from card.backends.transformers.opening import read_model
from card.backends.transformers.stray_tensors import check_taken
from card.backends.transformers.walking import walked, why_not_exact
from card.config import INT8
from card.errors import ModelError
from card.kernels.number_types import has_nan
from card.models.dtypes import parse_device, parse_dtype
from card.models.facts import check_facts
from card.models.files.sources import Source, explained, find_source, quiet
from card.models.files.weight_files import weight_files
from card.models.loaded_model import LoadedModel
from card.models.own.exact_layers import check_once, nan_in
from card.models.parallel_draft import read_parallel_draft
from card.models.warn_once import warn_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NO_BFLOAT16 = "this processor has no bfloat16 instructions"


def load_model(
    name_or_path: str | Path, *, dtype: object = "auto", device: object = "cpu", cache_dir: str | None = None
) -> PreTrainedModel:
    """Load a causal language model of transformers; arguments and errors as of `load_decoder`."""
    with quiet():
        source = find_source(str(name_or_path), cache_dir)
    return load_source(source, dtype=dtype, device=device)


def load_source(source: Source, *, dtype: object, device: object, cache: Path | None = None) -> PreTrainedModel:
    """Load a model from its source. On a CPU without bfloat16 instructions, "auto" widens 16-bit weights.

    Args:
        cache: the folder for what is kept between starts; None keeps nothing.
    """
    wanted_dtype, wanted_device = parse_dtype(dtype), parse_device(device)
    with quiet():
        model, report = read_model(source, wanted_dtype)
        missing = sorted(report["missing_keys"])
        if missing:
            raise ModelError(
                f"the weights of {source.name} are incomplete: {len(missing)} tensors are missing, the first is "
                f"{missing[0]}; copy or download the model again"
            )
        check_taken(source, model, report["unexpected_keys"])
        if source.gguf is None:  # whose numbers are looked at as they are converted
            files = weight_files(Path(source.path)) if source.is_folder else []
            check_once("-modules", files, cache if files else None, lambda: _check_numbers(source, model))
        with explained(source, "{} cannot be moved to " + wanted_device):
            model.to(wanted_device)
    loaded: PreTrainedModel = model.requires_grad_(False).train(False)
    check_facts(source.name, loaded)
    read_parallel_draft(Path(source.path) if source.is_folder else None, loaded)
    if dtype == INT8:
        setattr(loaded, "computes_int8", True)  # noqa: B010 - a mark of ours
    elif dtype == "auto" and loaded.dtype in (torch.bfloat16, torch.float16) and not computes_bfloat16(wanted_device):
        _widen(loaded)
    return loaded


def _check_numbers(source: Source, model: PreTrainedModel) -> None:
    """Look at each stored number, as fast as memory is read. Raises: ModelError that names a weight with NaN.

    By NumPy: the threads of torch wait for one another by turning, which costs ten times as much processor time.
    """
    stored = model.state_dict().keys()
    for name, weight in (*model.named_parameters(), *model.named_buffers()):  # each once, also if it has two names
        if name not in stored or not weight.is_floating_point():
            continue
        if has_nan(as_array(weight, keeps_bits=weight.element_size() > 1)):  # float8, which NumPy lacks, is widened
            raise ModelError(nan_in(source.name, name))


def _widen(model: PreTrainedModel) -> None:
    """Make float32 of the weights of a model, unless our own pass runs it."""
    if why_not_exact(model) is not None:
        warn_once(
            f"{_NO_BFLOAT16}: weights of 16 bits are widened to float32 (--dtype bfloat16 keeps them, --dtype int8 is "
            "faster)"
        )
        any_model: Any = model
        any_model.float()


def load_to_run(source: Source, *, dtype: object, device: str, cache: Path | None) -> LoadedModel:
    """Load a model for `card.models.runners`, as a decoder of our own pass if that can run it; as `load_source`."""
    model = load_source(source, dtype=dtype, device=device, cache=cache)
    return walked(model) or model
