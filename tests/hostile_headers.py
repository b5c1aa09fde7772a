"""GGUF headers that a stranger may write: each is refused quickly, in little memory, or is harmless."""

from __future__ import annotations

import struct
from pathlib import Path

U8, U32, STRING, ARRAY = 0, 4, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(name: str, kind: int, value: bytes) -> bytes:
    return text(name.encode()) + struct.pack("<I", kind) + value


def array(name: str, of: int, count: int, values: bytes = b"") -> bytes:
    return entry(name, ARRAY, struct.pack("<IQ", of, count) + values)


def tensor(name: str, shape: tuple[int, ...], offset: int = 0, kind: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name.encode()) + sizes + struct.pack("<IQ", kind, offset)


def write(path: Path, *, entries: list[bytes], tensors: list[bytes], counts: tuple[int, int] | None = None) -> Path:
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_entries)
    path.write_bytes(head + b"".join(entries) + b"".join(tensors))
    return path


LLAMA = entry("general.architecture", STRING, text(b"llama"))
_MANY = 2**63 - 1


def hostile(path: Path, name: str) -> Path:
    """Write the file of this name to a path."""
    entries, tensors = HEADERS[name]
    counts = COUNTS.get(name)
    write(path, entries=[LLAMA, *entries], tensors=tensors, counts=counts)
    if name in SPARSE:
        with path.open("r+b") as stream:
            stream.truncate(SPARSE[name])  # zeros that take no room on the disk
    return path


HEADERS: dict[str, tuple[list[bytes], list[bytes]]] = {
    "a long array of bytes": ([array("x", U8, 1_500_000_000)], []),
    "a long array of bytes for tokens": ([array("tokenizer.ggml.tokens", U8, 1_500_000_000)], []),
    "a long array of texts": ([array("x", STRING, 150_000_000)], []),
    "a long array of tokens": ([array("tokenizer.ggml.tokens", STRING, 150_000_000)], []),
    "a long text": ([entry("x", STRING, struct.pack("<Q", 1_400_000_000))], []),
    "a text of any length": ([entry("x", STRING, struct.pack("<Q", 2**64 - 1))], []),
    "an array of any length": ([array("x", U32, _MANY)], []),
    "an array of arrays": ([array("x", ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 1000)], []),
    "an array of an unknown kind": ([array("x", 77, _MANY)], []),
    "any number of entries": ([], []),
    "any number of tensors": ([], []),
    "many short arrays": ([array(f"x{i}", U8, 4096, bytes(4096)) for i in range(3000)], []),
    "an entry twice": ([LLAMA], []),
    "sizes that overflow": ([], [tensor("token_embd.weight", (2**32, 2**32, 2**32, 2**32))]),
    "a place that overflows": ([], [tensor("token_embd.weight", (4, 4), 2**64 - 1)]),
    "tensors in one place": ([], [tensor("token_embd.weight", (32, 32)), tensor("output.weight", (32, 32))]),
    "a tensor without values": ([], [tensor("token_embd.weight", (0, 32))]),
    "any number of layers": (
        [entry("llama.block_count", U32, struct.pack("<I", 2**32 - 1))]
        + [entry(f"llama.{one}", U32, struct.pack("<I", 32)) for one in ("embedding_length", "attention.head_count")],
        [tensor("token_embd.weight", (32, 32))],
    ),
}
COUNTS = {"any number of entries": (0, _MANY), "any number of tensors": (_MANY, 1)}
SPARSE = {
    **dict.fromkeys(("a long array of bytes", "a long array of bytes for tokens", "a long text"), 1_600_000_000),
    **dict.fromkeys(("a long array of texts", "a long array of tokens", "any number of entries"), 1_600_000_000),
    **dict.fromkeys(("any number of tensors", "tensors in one place", "any number of layers"), 1 << 20),
}
