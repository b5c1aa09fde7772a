"""Contents of a folder's weight files, read from their headers before a model of its config.json is built.

A config can ask for two thousand million layers, or for a matrix of the size of the disk. transformers would build them
before it compares them with the weights.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from card.models.files.headers import HeaderError, StoredTensor, read_header

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER_WHOLE, _OTHER_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"  # whose headers are not read
# Fields of configs, of all families, that say how often a reader repeats something.
_LAYER_COUNTS = frozenset({"num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers"})
_LISTS = ("labels", "experts")  # endings of other such fields
_EXPERT_COUNTS = ("num_experts", "num_local_experts")  # fields that count the experts of a layer
_CHOSEN_EXPERTS = ("num_experts_per_tok", "top_k_experts")  # and those that a token takes
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..+)")  # names of weights that one expert has
_MOST_PARTS = 4096  # of either, whatever the files hold; no published model has half of it
_MOST_NESTED = 100  # objects and lists inside each other in config.json; Python copies no more than some hundreds
_NO_OBJECT = f"its config.json is no JSON object of at most {_MOST_NESTED} levels; download it again"

# What layers that draft are called, which no pass here runs; others are numbered behind the last layer.
_DRAFTERS = re.compile(r"(^|\.)(mtp|nextn|eagle|medusa)\w*\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.")

Shapes = Mapping[str, tuple[int, ...]]


class FolderError(ValueError):
    """A fault that makes the weights in a folder useless, in words that follow their name."""


def raw_config(folder: Path) -> Any:
    """Return what config.json has; None if it cannot be read."""
    try:
        return json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder; empty if its weights are stored in another way.

    Raises: FolderError if the index names a file that is not in the folder; OSError, ValueError if it cannot be read.
    """
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    return _indexed(folder, _INDEX)


def pickled_files(folder: Path) -> list[Path]:
    """Return the pickles of a folder, as torch writes them; empty if there are none. Raises: as `weight_files`."""
    if (folder / _OTHER_WHOLE).is_file():
        return [folder / _OTHER_WHOLE]
    return _indexed(folder, _OTHER_INDEX)


def tensor_shapes(folder: Path) -> Shapes | None:
    """Return the shapes of all tensors by name; None if the weights are stored in another way than safetensors.

    Raises: FolderError, OSError if a file is missing, cut off or damaged.
    """
    files = weight_files(folder)
    if not files:
        _indexed(folder, _OTHER_INDEX)
        return None
    return {name: stored.shape for file in files for name, stored in stored_tensors(file).items()}


def stored_tensors(file: Path) -> Mapping[str, StoredTensor]:
    """Return what a file of a folder holds, by name. Raises: FolderError, OSError if it is cut off or damaged."""
    with file.open("rb") as stream:
        try:
            return read_header(stream)[1]
        except HeaderError as error:
            raise FolderError(f"{file.name} is {error.state}: {error}; download it again") from None


def check_counts(config: Any, shapes: Shapes | None = None) -> None:
    """Check that config.json, as it was read, counts no more layers and the like than there can be.

    Args:
        shapes: of the weights, if they are known: there is a tensor of each layer.
    Raises: FolderError that names the field, or tells that it is no object or nested too deeply.
    """
    if not isinstance(config, dict):
        raise FolderError(_NO_OBJECT)
    inner = config.get("text_config")
    if inner is not None and not isinstance(inner, dict):
        raise FolderError(f"its text_config is {str(inner)[:40]}, it must be an object; download it again")
    for one in (config, inner):
        num_layers = one.get("num_hidden_layers") if isinstance(one, dict) else None
        if isinstance(num_layers, int | float) and num_layers < 1:
            raise FolderError(f"its num_hidden_layers is {num_layers}, it must be a number above 0; download it again")
        if isinstance(one, dict):
            _check_experts(one)
    for name, value in _numbers(config):
        if (name in _LAYER_COUNTS or name.endswith(_LISTS)) and value > _MOST_PARTS:
            raise FolderError(f"its {name} is {value}, and at most {_MOST_PARTS} are possible; download it again")
        if name in _LAYER_COUNTS and shapes is not None and value > len(shapes):
            raise FolderError(f"its {name} is {value}, but the weights are {len(shapes)} tensors; download it again")


def _check_experts(config: Mapping[str, Any]) -> None:
    """Check that no token takes more experts than there are. Raises: FolderError that names the fields."""
    for field, name in itertools.product(_CHOSEN_EXPERTS, _EXPERT_COUNTS):
        chosen, count = config.get(field), config.get(name)
        if isinstance(chosen, int) and isinstance(count, int) and 0 < count < chosen:
            raise FolderError(f"its {field} is {chosen}, and it has {count} experts ({name}); download it again")


def _check_each_expert(config: Mapping[str, Any], shapes: Shapes) -> None:
    """Check that the weights of all experts are there, if each has its own. Raises: FolderError that names one."""
    stated = next((config[name] for name in _EXPERT_COUNTS if isinstance(config.get(name), int)), 0)
    held: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(_EXPERT.fullmatch, shapes)):
        held.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (begin, end), experts in held.items():
        count = max(stated, *(max(one) + 1 for (block, _), one in held.items() if block == begin))
        if missing := sorted(set(range(count)) - experts):
            raise FolderError(f"{begin}{missing[0]}{end} is missing, and there are {count} experts; download it again")


def check_folder(folder: Path) -> Shapes | None:
    """Read what is small in a folder, and compare it; return the shapes of the weights, None if they are not known.

    Raises: FolderError, OSError.
    """
    config, shapes = raw_config(folder), tensor_shapes(folder)
    check_counts(config, shapes)
    if isinstance(config, dict) and shapes is not None:
        _check_each_expert(config, shapes)
    return shapes


def is_of_drafter(name: str, num_layers: object) -> bool:
    """Return whether a tensor is of a layer that drafts tokens, in a model of so many others."""
    layer = _LAYER.search(name)
    is_behind = layer is not None and isinstance(num_layers, int) and int(layer[1]) >= num_layers
    return is_behind or _DRAFTERS.search(name) is not None


def _indexed(folder: Path, index: str) -> list[Path]:
    """Return the files that an index names; empty if there is none."""
    if not (folder / index).is_file():
        return []
    stated = json.loads((folder / index).read_text("utf-8"))
    names = stated.get("weight_map") if isinstance(stated, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise FolderError(f"{index} has no weight_map that tells the file of each tensor; download it again")
    for name in names.values():
        if not name or _leads_outside(name):
            raise FolderError(f"{index} names {name!r}, which is not in the folder; use files of the folder only")
    files = sorted(set(names.values()))
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise FolderError(
            f"{len(missing)} of the {len(files)} files that {index} names are missing, the first is {missing[0]}; "
            "download the model again"
        )
    return [folder / name for name in files]


def _leads_outside(name: str) -> bool:
    return any(path.is_absolute() or path.drive or ".." in path.parts for path in _paths(name))


def _paths(name: str) -> tuple[PurePosixPath, PureWindowsPath]:
    return PurePosixPath(name), PureWindowsPath(name)


def _numbers(config: Any) -> Iterator[tuple[str, float]]:
    """Yield every number that has a name, at any depth. Raises: FolderError if it is nested too deeply."""
    level = [config]
    for _ in range(_MOST_NESTED):
        objects = [one for one in level if isinstance(one, dict)]
        for one in objects:
            yield from ((name, value) for name, value in one.items() if isinstance(value, int | float))
        level = [inner for one in level if isinstance(one, list) for inner in one]
        level += [inner for one in objects for inner in one.values()]
    if any(isinstance(one, dict | list) for one in level):
        raise FolderError(_NO_OBJECT)
