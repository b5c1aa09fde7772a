"""A worker's own stream on a shared device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from card.machine.lane import Lane


class StreamLane(Lane):
    """A stream of one CUDA device for a worker that shares the device.

    Memory that is allocated inside `entered` belongs to this stream.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let the calling thread compute there, after its earlier work; at the end it waits in the same way."""
        with torch.cuda.device(self._device):
            outside = torch.cuda.current_stream()
            self._stream.wait_stream(outside)
            with torch.cuda.stream(self._stream):
                yield
            outside.wait_stream(self._stream)
