"""Tiny tokenizers of every kind that models come with, made here; each can write any text over ``ALPHABET``."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from card.text.tokenizer import Tokenizer

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIALS = ["<s>", "</s>", "[/INST]"]
ALPHABET = "ab éü€😀\ufffd"
_PIECES = ["▁", "a", "b", "▁a", "ab", "▁▁", "▁b", "bb", "▁ab"]
_MERGES = [("▁", "a"), ("a", "b"), ("▁", "▁"), ("▁", "b"), ("b", "b"), ("▁", "ab")]


def _wrapped(core: tokenizers.Tokenizer) -> Tokenizer:
    core.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIALS])
    return Tokenizer(core, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def _sentencepiece(
    *,
    normalizer: normalizers.Normalizer | None = None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
    decoder: Sequence[decoders.Decoder],
) -> Tokenizer:
    pieces = ["<unk>", *SPECIALS, *BYTE_TOKENS, *_PIECES]
    vocabulary = {piece: idx for idx, piece in enumerate(pieces)}
    core = tokenizers.Tokenizer(models.BPE(vocabulary, _MERGES, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if normalizer is not None:
        core.normalizer = normalizer
    if pre_tokenizer is not None:
        core.pre_tokenizer = pre_tokenizer
    core.decoder = decoders.Sequence(list(decoder))
    return _wrapped(core)


def llama2() -> Tokenizer:
    """Return one whose text begins with a blank that the decoder strips: Llama 2, TinyLlama, Mistral."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _sentencepiece(normalizer=normalizer, decoder=decoder)


def gemma() -> Tokenizer:
    """Return one that marks blanks and puts none in front."""
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _sentencepiece(normalizer=normalizers.Replace(" ", "▁"), decoder=decoder)


def metaspace(prepend_scheme: str) -> Tokenizer:
    """Return one whose pre-tokenizer marks blanks: newer conversions of Llama and Mistral, and T5's kind."""
    decoder = [decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme)]
    pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme, split=False)
    return _sentencepiece(pre_tokenizer=pre_tokenizer, decoder=decoder)


def byte_level() -> Tokenizer:
    """Return one of bytes and a few merges, some of which end within a character: GPT-2, Qwen, Llama 3."""
    merges = [("Ġ", "a"), ("a", "b"), ("â", "Ĥ"), ("a", "Ã"), ("Ġ", "Ã"), ("¬", "b")]
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(one + other for one, other in merges)]
    core = tokenizers.Tokenizer(models.BPE({token: idx for idx, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return _wrapped(core)


def wordpiece() -> Tokenizer:
    """Return one whose tokens go on with a word by their mark and begin one without: BERT."""
    pieces = ["[UNK]", *SPECIALS, *(mark + char for char in ALPHABET.replace(" ", "") for mark in ("", "##")), "##ab"]
    core = tokenizers.Tokenizer(models.WordPiece({piece: idx for idx, piece in enumerate(pieces)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return _wrapped(core)


def word_ends() -> Tokenizer:
    """Return one whose tokens say where a word ends: the first GPT, XLM."""
    chars = ALPHABET.replace(" ", "")
    pieces = ["<unk>", *SPECIALS, *(char + mark for char in chars for mark in ("", "</w>")), "ab</w>"]
    core = tokenizers.Tokenizer(
        models.BPE(
            {piece: idx for idx, piece in enumerate(pieces)},
            [("a", "b</w>")],
            unk_token="<unk>",
            end_of_word_suffix="</w>",
        )
    )
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.BPEDecoder("</w>")
    return _wrapped(core)


KINDS: dict[str, Tokenizer] = {
    "llama2": llama2(),
    "gemma": gemma(),
    "metaspace always": metaspace("always"),
    "metaspace first": metaspace("first"),
    "metaspace never": metaspace("never"),
    "byte level": byte_level(),
    "word pieces": wordpiece(),
    "word ends": word_ends(),
}
