"""A worker's own place on a device that others use too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Lane:
    """The place where a worker computes; on the CPU there is nothing to enter.

    All that the worker does on its device is done inside `entered`: loading its model, warming up, every pass.
    """

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let the calling thread compute there."""
        yield
