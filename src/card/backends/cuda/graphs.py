"""Recorded steps of fixed shape, and asynchronous copies.

A step is a function without arguments that reads and writes tensors of fixed shape at fixed addresses and returns
nothing. On CUDA it is captured once (`torch.cuda.CUDAGraph`) and replayed, which costs one launch instead of hundreds.
Elsewhere the same function is called, so that all logic runs, and is tested, without a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NUM_WARM_UPS = 3  # before a capture: libraries choose kernels and allocate workspace in their first calls
NUM_WARM_UPS_ON_CPU = 0  # not needed there; tests set it to check that warming up is harmless

_ONE_CAPTURE = threading.Lock()  # torch allows one capture at a time in a process

Step = Callable[[], None]


def bucket_of(count: int, buckets: Sequence[int]) -> int | None:
    """Return the smallest of the ascending ``buckets`` of at least ``count``; None if there is none."""
    return next((bucket for bucket in buckets if bucket >= count), None)


class Recorder:
    """Records steps for one device. They share memory: replay them on one stream at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            # One stream for all captures, so that they share the pool's memory.
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Step) -> Step:
        """Return a recorded form of ``run``.

        ``run`` may be called a few times here, so its inputs must be valid already, and its outputs are garbage after.
        """
        if not self._is_cuda:
            for _ in range(NUM_WARM_UPS_ON_CPU):
                run()
            return run
        return _Replay(run, self._capture(run))

    def wait(self) -> None:
        """Wait until the device is idle, before recorded steps are dropped."""
        if self._is_cuda:
            torch.cuda.synchronize(self.device)

    def _capture(self, run: Step) -> torch.cuda.CUDAGraph:
        with _ONE_CAPTURE, torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(NUM_WARM_UPS):
                    run()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Another thread may be computing; its operations are no errors of this capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        return graph


class _Replay:
    """A captured step, with references that keep its tensors alive: a graph has only addresses."""

    def __init__(self, run: Step, graph: torch.cuda.CUDAGraph) -> None:
        self._run = run
        self._graph = graph

    def __call__(self) -> None:
        self._graph.replay()


class StagedTensor:
    """A tensor at a fixed address that the host fills without waiting for the device, through pinned memory on CUDA."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Make it, all zeros."""
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._host: Tensor | None = None
        if device.type == "cuda":
            self._host = torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=True)
            self._is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fill(self, values: npt.NDArray[Any]) -> None:
        """Copy ``values``, of the tensor's shape, before the next operations of the current stream."""
        source = torch.from_numpy(values)
        if self._host is None:
            self.tensor.copy_(source)
            return
        self._is_copied.synchronize()  # the previous copy still reads the pinned memory
        self._host.copy_(source)
        self.tensor.copy_(self._host, non_blocking=True)
        self._is_copied.record(torch.cuda.current_stream(self.tensor.device))


class FetchedTensor:
    """A snapshot on the host of a tensor on the device, made without waiting for it."""

    def __init__(self, like: Tensor) -> None:
        """Make room for a tensor of the shape and dtype of ``like``."""
        is_cuda = like.device.type == "cuda"
        self._host = torch.zeros(like.shape, dtype=like.dtype, device="cpu", pin_memory=is_cuda)
        self._is_copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def begin(self, source: Tensor) -> None:
        """Copy ``source`` after the present operations of the current stream."""
        self._host.copy_(source, non_blocking=True)
        if self._is_copied is not None:
            self._is_copied.record(torch.cuda.current_stream(source.device))

    def read(self) -> npt.NDArray[Any]:
        """Wait for the copy and return it."""
        if self._is_copied is not None:
            self._is_copied.synchronize()
        return np.array(self._host.numpy())
