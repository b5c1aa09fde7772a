"""Requests that only put out a text, for the store; in a module without torch, so that processes start fast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path

from card.config import EngineSettings
from card.drafting.local.protocol import Observation
from card.family.copying.store import StoreWriter
from tests.reaching_in import flush

VOCAB_SIZE = 1000


@contextmanager
def opened(
    path: Path,
    *,
    key: str = "default",
    most: int = 1_000_000,
    vocab_size: int = VOCAB_SIZE,
    tokenizer: str = "",
    timeout_s: float = 5.0,
) -> Iterator[StoreWriter]:
    settings = EngineSettings(own={"suffix_store": str(path), "suffix_store_key": key, "suffix_store_tokens": most})
    writer = StoreWriter(settings, vocab_size, tokenizer, busy_timeout_s=timeout_s)
    try:
        yield writer
    finally:
        writer.close()


def put_out(writer: StoreWriter, text: Sequence[int], *, prompt_ids: Sequence[int] = (999,)) -> None:
    """Play a request that puts out ``text``."""
    sequence = writer.open(prompt_ids)
    for token in text:
        sequence.observe(Observation((token,), (), (), (token,), ()))
    sequence.close()


def store_texts(path: Path, first: int, num_texts: int, barrier: Barrier) -> None:
    """Store texts that begin with first, first + 1, ..., as one process of several."""
    barrier.wait(60)
    with opened(path, vocab_size=10**6, timeout_s=60.0) as writer:
        for start in range(first, first + num_texts):
            put_out(writer, [start, 1, 2, start])
            if start % 10 == 0:
                flush(writer)


def store_texts_forever(path: Path) -> None:
    """Store texts until killed."""
    with opened(path) as writer:
        while True:
            for start in range(900):
                put_out(writer, range(start, start + 40))
            flush(writer)
