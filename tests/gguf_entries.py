"""A GGUF file taken apart into its entries and tensors, and put together again with others."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import gguf
from hypothesis import strategies as st

from tests.hostile_headers import ARRAY, STRING, U32, array, entry, text

_F32, _BOOL, _I64, _ALIGNMENT = 6, 7, 11, 32
_NUMBERS = (0, 1, 2, 3, 5, 7, 8, 64, 96, 4096, 2**31 - 1)
_REALS = (0.0, -1.0, 0.5, 1.0, 4.0, 1e-30, 1e30, float("nan"), float("inf"))
_TEXTS = ("yarn", "longrope", "linear", "none", "", "x" * 300, "llama", "qwen3moe", "gemma4", "kimi-k2", "\n")
# Entries that a file need not have, by what they are of.
_EXPERTS = "count used_count feed_forward_length shared_count shared_feed_forward_length weights_norm weights_scale"
_YARN = "attn_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow yarn_ext_factor yarn_log_multiplier"
OPTIONAL = (
    *(f"expert_{name}" for name in (*_EXPERTS.split(), "gating_func", "group_count", "group_used_count")),
    *(f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", *_YARN.split())),
    *("attention.sliding_window", "attention.sliding_window_pattern", "rope.dimension_count", "shortconv.l_cache"),
    *("leading_dense_block_count", "nextn_predict_layers", "interleave_moe_layer_step", "attention.temperature_scale"),
)
_OUTSIDE = ("split.no", "split.count", "split.tensors.count", "tokenizer.ggml.model", "tokenizer.ggml.pre")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a file is made of."""

    entries: Mapping[str, bytes]  # as they are stored, by name
    tensors: tuple[bytes, ...]  # names, shapes, types and places
    data: bytes

    @classmethod
    def of(cls, file: Path) -> Self:
        """Take a file apart."""
        content, reader = file.read_bytes(), gguf.GGUFReader(file)
        entries = {name: _raw(content, one) for name, one in reader.fields.items() if not name.startswith("GGUF.")}
        tensors = tuple(_raw(content, one.field) for one in reader.tensors)
        return cls(entries, tensors, content[reader.data_offset :])

    def content(self) -> bytes:
        """Return the file."""
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.entries))
        head += b"".join(self.entries.values()) + b"".join(self.tensors)
        return head + bytes(-len(head) % _ALIGNMENT) + self.data


def _raw(content: bytes, field: Any) -> bytes:
    return content[field.offset : field.offset + sum(part.nbytes for part in field.parts)]


@dataclass(frozen=True, slots=True)
class Changed:
    """A file, which reports of failures show by what was changed."""

    content: bytes
    what: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Changed({', '.join(self.what)})"


@st.composite
def changed_parts(draw: st.DrawFn, good: Parts, architecture: str) -> Changed:
    """Return a file with one to three entries replaced, put in or dropped, or with tensors of other types."""
    named = [name for name in good.entries if name.startswith(f"{architecture}.")]
    names = [*named, *named, *(f"{architecture}.{name}" for name in OPTIONAL), *_OUTSIDE]
    entries, tensors, what = dict(good.entries), list(good.tensors), list[str]()
    for _ in range(draw(st.sampled_from((1, 1, 2, 3)))):
        if draw(st.integers(0, 4)) == 0:
            place = draw(st.integers(0, len(tensors) - 1))
            kind = draw(st.sampled_from([int(one) for one in gguf.GGMLQuantizationType] + [99]))
            what.append(f"{tensors[place][8:40]!r} is of type {kind}")
            tensors[place] = tensors[place][:-12] + struct.pack("<I", kind) + tensors[place][-8:]
            continue
        name = draw(st.sampled_from(names))
        if draw(st.integers(0, 5)) == 0:
            entries.pop(name, None)
            what.append(f"{name} is gone")
        else:
            entries[name] = draw(_values(name))
            what.append(f"{name} is {entries[name][8 + len(name) :][:40]!r}")
    return Changed(replace(good, entries=entries, tensors=tuple(tensors)).content(), tuple(what))


def _values(name: str) -> st.SearchStrategy[bytes]:
    """Entries of this name with a value of any kind."""
    numbers, reals = st.sampled_from(_NUMBERS), st.sampled_from(_REALS)
    lists = st.lists(numbers, max_size=4) | st.integers(1, 3).map(lambda count: [2] * 2000 * count)
    return st.one_of(
        numbers.map(lambda one: entry(name, U32, struct.pack("<I", one))),
        numbers.map(lambda one: entry(name, _I64, struct.pack("<q", -one * 2**31))),
        reals.map(lambda one: entry(name, _F32, struct.pack("<f", one))),
        st.booleans().map(lambda one: entry(name, _BOOL, struct.pack("<B", one))),
        st.sampled_from(_TEXTS).map(lambda one: entry(name, STRING, text(one.encode()))),
        lists.map(lambda its: array(name, U32, len(its), struct.pack(f"<{len(its)}I", *its))),
        st.lists(st.booleans(), max_size=4).map(lambda its: array(name, _BOOL, len(its), bytes(its))),
        st.just(entry(name, ARRAY, struct.pack("<IQ", ARRAY, 1))),
    )
