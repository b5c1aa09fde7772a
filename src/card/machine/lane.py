"""A worker's own stream on a shared device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Lane:
    """A stream of one device for a worker that runs beside others on the device.

    All that the worker does on the device is done inside `entered`: loading its model, warming up, every pass. So the
    allocator knows its memory as this stream's. Without CUDA there is nothing to enter.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let the calling thread compute there; what came before in its own stream is done first, and the reverse."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device):
            outside = torch.cuda.current_stream()
            self._stream.wait_stream(outside)
            with torch.cuda.stream(self._stream):
                yield
            outside.wait_stream(self._stream)
