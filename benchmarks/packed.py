"""Result files that are packed: `runs.jsonl.gz` is read like `runs.jsonl`."""

from __future__ import annotations

import contextlib
import gzip
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Yield the path of a file with the same lines, which is the file itself unless it is packed. Raises: OSError."""
    if path.suffix != ".gz":
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / path.stem
        place.write_bytes(gzip.decompress(path.read_bytes()))
        yield place
