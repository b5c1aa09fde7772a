"""Prints a digest of what integer passes of the demo target compute, with the kernels that this process makes."""

from __future__ import annotations

import hashlib

import torch

from card.kernels.int8_linear import multiply_rows, quantize_linear
from card.machine.processor import kernel_kind
from card.machine.threads import use_threads
from card.models.loading import load_decoder
from card.models.protocol import Extension
from card.models.torch_runner import TorchRunner

PROMPT = [3 + 7 * i * i % 500 for i in range(45)]


def digest() -> str:
    """Return a digest of products, and of the logits of a text at once, of a tree behind it, and of two texts."""
    sums = hashlib.sha256()

    def add(values: torch.Tensor) -> None:
        sums.update(values.contiguous().numpy().tobytes())

    rows = torch.sin(torch.arange(33 * 200).float()).view(33, 200) * torch.arange(1, 34)[:, None]
    linear = quantize_linear(torch.cos(torch.arange(150 * 200).float()).view(150, 200), None)
    for num_rows in (1, 2, 5, 6, 7, 13, 16, 17, 33):
        add(multiply_rows(rows[:num_rows], linear, num_parts=2))
    runner = TorchRunner(load_decoder("demo-target", dtype="int8"), max_model_len=128, max_tree_rows=32)
    for num_threads in (1, 2):
        use_threads(num_threads, in_integers=True)
        first, second = runner.open(), runner.open()
        chain = range(-1, len(PROMPT) - 1)
        for logits in runner.forward([Extension(first, PROMPT, chain), Extension(second, PROMPT[:9], chain[:9])]):
            add(logits)
        last = len(PROMPT) - 1
        tree = Extension(first, [5, 6, 7, 8, 9], [last, last, last + 1, last + 2, last + 2])
        for logits in runner.forward([tree, Extension(second, [11], [8])]):
            add(logits)
        runner.close(first)
        runner.close(second)
    return sums.hexdigest()


if __name__ == "__main__":
    print(kernel_kind(), digest())
