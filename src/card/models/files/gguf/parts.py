"""Models in several GGUF files, as `llama-gguf-split` writes them: their names, and what shows that they fit.

The metadata stand in the first one; each has a list of its own tensors, and an alignment.
Source: https://github.com/ggml-org/llama.cpp/tree/master/tools/gguf-split
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from card.models.files.gguf.header import DamagedError, GgufError, Header, read_header

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_MOST_PARTS = 4096  # the largest models have some dozen
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_AGAIN = "; copy or download all parts again"


def part_names(name: str) -> Sequence[str]:
    """Return the names of all parts by that of the first one; any other name stands for itself alone."""
    match = _NAME.fullmatch(name)
    if match is None or int(match[2]) != 1 or not 1 <= int(match[3]) <= _MOST_PARTS:
        return [name]
    return [f"{match[1]}-{number + 1:05d}-of-{match[3]}.gguf" for number in range(int(match[3]))]


def first_part(name: str) -> str:
    """Return the name of the first part by that of any part; a name that is not of a part as it is."""
    match = _NAME.fullmatch(name)
    return name if match is None else f"{match[1]}-00001-of-{match[3]}.gguf"


def part_files(path: Path) -> Sequence[Path]:
    """Return a file, and the other parts beside it that are there."""
    others = (path.with_name(name) for name in part_names(path.name)[1:])
    return [path, *(other for other in others if other.exists())]


def check_is_first(path: Path, header: Header) -> None:
    """Raise GgufError that names the first part if a file is a later one, which tells nothing of the model."""
    count = _stated(header, _COUNT, 0)
    if count > 1 and (number := _stated(header, _NUMBER)):
        raise GgufError(f"is part {number + 1} of {count}; name the first one, {first_part(path.name)}")


def read_parts(path: Path, first: Header) -> Mapping[Path, Header]:
    """Return the headers of all files of a model, by file; ``first`` is that of ``path``.

    Raises: GgufError if one is missing, no file of this model, cut off or damaged; OSError if one cannot be read.
    """
    count = _stated(first, _COUNT, 0)
    if count <= 1:
        return {path: first}
    num_tensors, names = _stated(first, _TENSORS), part_names(path.name)
    if len(names) != count:
        raise GgufError(
            f"is part 1 of {count}, and its name does not say where the others are; give the parts names that end in "
            f"-00001-of-{count:05d}.gguf and so on"
        )
    files = [path.with_name(name) for name in names]
    if missing := [file.name for file in files if not file.is_file()]:
        raise GgufError(
            f"lacks {len(missing)} of its {count} parts, the first is {missing[0]}; copy or download all parts to one "
            "folder"
        )
    headers = {path: first}
    for number, file in enumerate(files[1:], 1):
        with named(file, path):
            headers[file] = read_header(file)
            _check_fits(headers[file], number, first)
    num_found = sum(len(header.tensors) for header in headers.values())
    if num_found != num_tensors:
        raise GgufError(f"has {num_found} tensors in its parts, its {_TENSORS} is {num_tensors}{_AGAIN}")
    return headers


def joined(headers: Mapping[Path, Header]) -> Header:
    """Return the header of the whole model. Raises: GgufError if two files have one tensor."""
    first = next(iter(headers.values()))
    tensors = dict(first.tensors)
    for header in list(headers.values())[1:]:
        for name, place in header.tensors.items():
            if name in tensors:
                raise GgufError(
                    f"has {name[:100]} in two parts, {tensors[name].file.name} and {place.file.name}{_AGAIN}"
                )
            tensors[name] = place
    return Header(first.metadata, tensors, sum(header.num_bytes for header in headers.values()))


@contextlib.contextmanager
def named(file: Path, first: Path) -> Iterator[None]:
    """Say in errors which part is meant, where it is not the first one."""
    try:
        yield
    except GgufError as error:
        if file == first:
            raise
        raise GgufError(f"has a part {file.name} that {error}") from error


def _check_fits(part: Header, number: int, first: Header) -> None:
    """Check that a part is the one that is asked for. Raises: GgufError."""
    for key in (_COUNT, _TENSORS):
        if _stated(part, key) != _stated(first, key):
            raise GgufError(
                f"is of another model: its {key} is {_stated(part, key)}, not {_stated(first, key)}{_AGAIN}"
            )
    if part.architecture not in ("", first.architecture):
        raise GgufError(f"is of another model: its architecture is {part.architecture[:40]}{_AGAIN}")
    if _stated(part, _NUMBER) != number:
        raise GgufError(f"is part {_stated(part, _NUMBER) + 1} by what it says, not {number + 1}{_AGAIN}")


def _stated(header: Header, key: str, default: int | None = None) -> int:
    """Return a whole number of the metadata, 0 or more. Raises: DamagedError for anything else."""
    value = header.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DamagedError(f"damaged: its {key} is {'missing' if value is None else str(value)[:40]}")
    return value
