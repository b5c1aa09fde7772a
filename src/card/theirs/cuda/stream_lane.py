"""A worker's own stream on a shared device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from card.machine.lane import Lane


class StreamLane(Lane):
    """A stream of one CUDA device for a worker that runs beside others on the device.

    The allocator knows the memory of what is done inside `entered` as this stream's.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let the calling thread compute there; what came before in its own stream is done first, and the reverse."""
        with torch.cuda.device(self._device):
            outside = torch.cuda.current_stream()
            self._stream.wait_stream(outside)
            with torch.cuda.stream(self._stream):
                yield
            outside.wait_stream(self._stream)
