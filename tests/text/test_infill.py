"""Prompts of gaps: which marks, in which order, and texts that stay texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from card.errors import PromptError
from card.text.infill import Infill, OtherFile, find_infill
from card.text.tokenizer import Tokenizer

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
FAMILIES = {
    "Qwen2.5-Coder": (QWEN, "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>"),
    "CodeGemma": (
        ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>"],
        "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>",
    ),
    "StarCoder": (
        ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>"],
        "<fim_prefix>ab<fim_suffix>cd<fim_middle>",
    ),
    "DeepSeek-Coder": (
        ["<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"],
        "<\uff5cfim▁begin\uff5c>ab<\uff5cfim▁hole\uff5c>cd<\uff5cfim▁end\uff5c>",
    ),
    "CodeLlama": (["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"], "▁<PRE>ab▁<SUF>cd▁<MID>"),
    "Codestral": (["[PREFIX]", "[SUFFIX]", "[MIDDLE]"], "[SUFFIX]cd[PREFIX]ab"),
    "Seed-Coder": (
        ["<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"],
        "<[fim-suffix]>cd<[fim-prefix]>ab<[fim-middle]>",
    ),
}


def with_marks(
    marks: Sequence[str], *, special: bool = False, stated: Mapping[str, str] | None = None, bos: str | None = None
) -> Tokenizer:
    """Return a tokenizer of bytes with these added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE({token: idx for idx, token in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    names = [*marks, *([] if bos is None else [bos])]
    core.add_tokens([AddedToken(one, special=special, normalized=False) for one in names])
    if bos is not None:
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    return Tokenizer(core, special_tokens={} if bos is None else {"bos_token": bos}, fill_marks=stated)


def found(tokenizer: Tokenizer) -> Infill:
    """Return the maker of prompts of a tokenizer that has marks."""
    maker = find_infill(tokenizer)
    assert maker is not None
    return maker


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_its_marks_in_its_order(family: str) -> None:
    marks, wanted = FAMILIES[family]
    tokenizer = with_marks(marks, bos="<s>")
    ids = found(tokenizer).prompt("ab", "cd").token_ids
    assert tokenizer.decode(ids) == f"<s>{wanted}"
    assert len(ids) == 1 + 4 + sum(wanted.count(mark) for mark in marks)


def test_a_tokenizer_without_all_of_the_marks_has_none() -> None:
    assert find_infill(with_marks([])) is None
    assert find_infill(with_marks(["<|fim_prefix|>", "<|fim_suffix|>"])) is None
    assert find_infill(with_marks(["<a>"], stated={"prefix": "<a>", "suffix": "<a>"})) is None


def test_marks_that_a_file_names_come_first_and_a_known_name_keeps_its_order() -> None:
    own = with_marks([*QWEN, "<a>", "<b>", "<c>"], stated={"prefix": "<a>", "suffix": "<b>", "middle": "<c>"})
    assert own.decode(found(own).prompt("x", "y").token_ids) == "<a>x<b>y<c>"
    stated = {"prefix": "[PREFIX]", "suffix": "[SUFFIX]", "middle": "[MIDDLE]"}
    mistral = with_marks(["[PREFIX]", "[SUFFIX]", "[MIDDLE]"], stated=stated)
    assert mistral.decode(found(mistral).prompt("x", "y").token_ids) == "[SUFFIX]y[PREFIX]x"


@pytest.mark.parametrize("special", [True, False])
def test_names_of_marks_in_a_file_stay_text(special: bool) -> None:
    tokenizer = with_marks([*QWEN, "<|im_end|>"], special=special)
    text = "x = '<|fim_middle|><|fim_suffix|>' # <|fim_<|fim_pad|>"
    ids = found(tokenizer).prompt(text, text).token_ids
    marks = [tokenizer.convert_tokens_to_ids(name) for name in QWEN]
    assert [one for one in ids if one in marks] == marks[:3]
    assert tokenizer.decode(ids) == f"<|fim_prefix|>{text}<|fim_suffix|>{text}<|fim_middle|>"


def test_answers_end_at_marks_and_those_that_decoding_shows_are_named() -> None:
    for special in (True, False):
        tokenizer = with_marks([*QWEN, "<|endoftext|>", "<|im_start|>"], special=special)
        maker = found(tokenizer)
        ends = {tokenizer.convert_tokens_to_ids(name) for name in (*QWEN, "<|endoftext|>")}
        assert maker.end_ids == ends
        assert set(maker.end_texts) == (set() if special else {*QWEN, "<|endoftext|>"})


def test_other_files_stand_before_and_the_first_ones_go_if_there_is_no_room() -> None:
    tokenizer = with_marks(QWEN)
    others = [OtherFile("a.py", "a = 1\n"), OtherFile("b.py", "b = 2\n")]
    whole = found(tokenizer).prompt("x", "y", others, room=200)
    gap = "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"
    head = "<|repo_name|>repository\n"
    assert tokenizer.decode(whole.token_ids) == (
        f"{head}<|file_sep|>a.py\na = 1\n<|file_sep|>b.py\nb = 2\n<|file_sep|>file\n{gap}"
    )
    assert whole.num_left_out == 0
    less = found(tokenizer).prompt("x", "y", others, room=len(whole.token_ids) - 1)
    assert tokenizer.decode(less.token_ids) == f"{head}<|file_sep|>b.py\nb = 2\n<|file_sep|>file\n{gap}"
    assert less.num_left_out == 1
    none = found(tokenizer).prompt("x", "y", others, room=8)
    assert (tokenizer.decode(none.token_ids), none.num_left_out) == (gap, 2)
    assert found(tokenizer).prompt("x", "y", others, room=len(whole.token_ids)) == whole


def test_a_tokenizer_without_a_mark_of_files_has_them_as_text() -> None:
    tokenizer = with_marks(FAMILIES["Codestral"][0])
    told = found(tokenizer).prompt("x", "y", [OtherFile("a.py", "a = 1")], room=99)
    assert tokenizer.decode(told.token_ids) == "[SUFFIX]y[PREFIX]a.py\na = 1\n\nx"


def test_only_the_beginning_of_a_text_gets_the_blank_of_sentencepiece() -> None:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b"]
    core = tokenizers.Tokenizer(
        models.BPE(
            {piece: idx for idx, piece in enumerate(pieces)},
            [("▁", "a"), ("▁", "b")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.add_tokens([AddedToken(one, normalized=False) for one in FAMILIES["CodeLlama"][0]])
    tokenizer = Tokenizer(core)
    names = [tokenizer.convert_ids_to_tokens(one) for one in found(tokenizer).prompt("a", "b").token_ids]
    assert names == ["▁<PRE>", "▁a", "▁<SUF>", "b", "▁<MID>"]


def test_a_text_that_is_none_is_refused() -> None:
    with pytest.raises(PromptError, match="surrogate"):
        found(with_marks(QWEN)).prompt("a", "\ud800")
