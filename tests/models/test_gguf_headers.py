"""What a GGUF header may take is bounded, and what nobody reads of it takes nothing."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from card.models.files.gguf.header import GgufError, Header, TensorPlace, read_header
from card.models.files.gguf.model import open_gguf
from card.models.files.gguf.tokenizer import check_tokenizer
from tests.hostile_headers import HEADERS, LLAMA, array, hostile, write

_MOST_TIME_S = 60


@pytest.mark.timeout(_MOST_TIME_S)
@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_asks_for_the_memory_is_refused_in_one_line_and_little_of_it(name: str, tmp_path: Path) -> None:
    file = hostile(tmp_path / "one.gguf", name)
    tracemalloc.start()
    try:
        with pytest.raises(GgufError) as refused:
            open_gguf(file)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    assert len(str(refused.value).splitlines()) == 1


def test_a_long_array_that_nobody_reads_is_passed_over(tmp_path: Path) -> None:
    after = array("after", 0, 2, bytes((1, 2)))
    for of, values in ((0, bytes(5000)), (8, (b"\1" + bytes(7) + b"a") * 5000)):
        file = write(tmp_path / "one.gguf", entries=[LLAMA, array("long", of, 5000, values), after], tensors=[])
        metadata = read_header(file).metadata
        assert str(metadata["long"]) == "an array of 5000 values" and metadata["after"] == [1, 2]


def header_of(tokens: list[str]) -> Header:
    metadata: Mapping[str, Any] = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens}
    rows = TensorPlace("token_embd.weight", (len(tokens), 8), 0, 0, Path())
    return Header(metadata, {rows.name: rows}, 1)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["a", "b" * 400_000], "has a token of 400000 characters, and at most 4096 are possible"),
        ([f"{idx:04d}" * 1024 for idx in range(20)], "too many of the 20 tokens of its tokenizer have hundreds of"),
    ],
)
def test_tokens_too_long_to_be_cut_in_every_way_are_refused(tokens: list[str], said: str) -> None:
    with pytest.raises(GgufError, match=said):
        check_tokenizer(header_of(tokens))


def test_a_vocabulary_as_large_as_any_is_within_the_bounds() -> None:
    check_tokenizer(header_of([f"{idx:016d}" for idx in range(500_000)] + ["x" * 4096]))
