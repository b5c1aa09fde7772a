"""KV rows of paused sequences in files, for as long as memory is full.

Each sequence has a file of its own without a name: the system frees it when it is closed, or when the process ends in
any way. Source of the idea: SparseSpec, arXiv:2512.01278, its offloading of KV rows.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from typing import IO

import numpy as np

from card.errors import CapacityError, SettingsError, named
from card.kernels.number_types import Array, Dtype


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows in a file."""

    file: IO[bytes]
    shape: tuple[int, ...]
    dtype: Dtype
    num_bytes: int


class RowStore:
    """A folder's files of rows, within ``max_bytes``."""

    def __init__(self, folder: str, max_bytes: int) -> None:
        """Take a folder. Raises: SettingsError if no file can be made in it."""
        self.folder, self.max_bytes = folder, max_bytes
        self.used_bytes = 0
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise SettingsError(
                f"{named('kv_offload')} must name a folder to write to, and in {folder} no file can be made: "
                f"{error.strerror}"
            ) from None

    def put(self, rows: Array) -> StoredRows:
        """Write rows into a file.

        Raises: CapacityError if the store or the disk is full; nothing is left there then.
        """
        num_bytes = rows.nbytes
        if self.used_bytes + num_bytes > self.max_bytes:
            raise CapacityError(
                f"{num_bytes} bytes of KV rows do not fit into files: {self.used_bytes} of {self.max_bytes} are used"
            )
        with contextlib.ExitStack() as on_failure:
            try:
                file = on_failure.enter_context(tempfile.TemporaryFile(dir=self.folder))
                file.write(np.ascontiguousarray(rows).view(np.uint8).data)
                file.flush()
            except OSError as error:
                message = f"{num_bytes} bytes of KV rows cannot be written to {self.folder}: {error.strerror}"
                raise CapacityError(message) from error
            on_failure.pop_all()
        self.used_bytes += num_bytes
        return StoredRows(file, rows.shape, rows.dtype, num_bytes)

    def read(self, stored: StoredRows) -> Array:
        """Return the rows, bit for bit. Raises: CapacityError if the file cannot be read any more."""
        try:
            stored.file.seek(0)
            content = np.frombuffer(bytearray(stored.file.read()), np.uint8)
            if len(content) != stored.num_bytes:
                raise OSError(f"{len(content)} of {stored.num_bytes} bytes are there")
        except OSError as error:
            raise CapacityError(f"KV rows cannot be read back from {self.folder}: {error}") from error
        return content.view(stored.dtype).reshape(stored.shape)

    def drop(self, stored: StoredRows) -> None:
        """Free the file."""
        stored.file.close()
        self.used_bytes -= stored.num_bytes
