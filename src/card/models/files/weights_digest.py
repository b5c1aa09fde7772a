"""A digest of what a model's files hold, whatever they are called and wherever they lie."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from card.machine.container import num_usable_cores
from card.machine.folders import read_kept, write_kept
from card.models.files.gguf.parts import part_files
from card.models.files.sources import Source
from card.models.files.weight_files import weight_files

logger = logging.getLogger(__name__)

_PART_BYTES = 64 << 20  # read at once, by one thread
_MOST_NOTES = 64  # of files; the oldest go first


class _Note(msgspec.Struct, frozen=True):
    """A file as it was when it was read."""

    state: tuple[int, int, int]  # bytes, and times of the last change of content and of anything
    digest: str


def weights_digest(source: Source, notes: Path) -> str:
    """Return the digest of the weights and the config of a model that is on this machine.

    Args:
        notes: a file with digests of files read earlier, so that files that have not changed are not read again.
    Raises: OSError if a file cannot be read.
    """
    known, sums = dict(_read_notes(notes)), hashlib.blake2b(digest_size=32)
    was = dict(known)
    for file in _files_of(source):
        name, state = str(file.resolve()), _state_of(file)
        note = known.pop(name, None)
        if note is None or note.state != state:
            note = _Note(state, _digest(file))
        known[name] = note  # the newest last
        sums.update(bytes.fromhex(note.digest))
    if known != was:
        _write_notes(notes, dict(list(known.items())[-_MOST_NOTES:]))
    return sums.hexdigest()


def _files_of(source: Source) -> Sequence[Path]:
    path = Path(source.path)
    return part_files(path) if source.gguf is not None else [path / "config.json", *weight_files(path)]


def _digest(file: Path) -> str:
    """Read a file, parts of it on each core."""

    def part(first: int) -> bytes:
        with file.open("rb") as stream:
            stream.seek(first)
            return hashlib.blake2b(stream.read(_PART_BYTES), digest_size=32).digest()

    with ThreadPoolExecutor(num_usable_cores()) as threads:
        parts = b"".join(threads.map(part, range(0, file.stat().st_size, _PART_BYTES)))
    return hashlib.blake2b(parts, digest_size=32).hexdigest()


def _state_of(file: Path) -> tuple[int, int, int]:
    facts = file.stat()
    return facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _read_notes(notes: Path) -> Mapping[str, _Note]:
    try:
        return msgspec.json.decode(read_kept(notes), type=dict[str, _Note])
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError):  # there are none, or they are damaged
        return {}


def _write_notes(notes: Path, known: Mapping[str, _Note]) -> None:
    try:
        write_kept(notes, msgspec.json.encode(known))
    except OSError as error:
        logger.warning("the next start reads the weights again: %s", error.strerror or error)
