"""The bound of how much one token stands for: no text has fewer tokens than it says."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from card.models.demo import demo_folder
from card.models.loading import load_tokenizer
from card.text.token_bytes import TokenBytes, token_bytes
from card.text.tokenizer import Tokenizer
from tests.examples import settings

_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_BLANK = pre_tokenizers.ByteLevel().pre_tokenize_str(" ")[0][0][0]


def byte_level(*, strips: bool = False) -> Tokenizer:
    """A BPE over bytes, with one long token of blanks, as in GPT-2's family."""
    blanks = [_BLANK * (2**power) for power in range(1, 5)]
    merges = [(one[: len(one) // 2], one[: len(one) // 2]) for one in blanks]
    core = tokenizers.Tokenizer(models.BPE(vocab=_numbered([*_BYTES, *blanks]), merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.add_special_tokens([AddedToken("<|im_start|>", special=True, lstrip=strips, rstrip=strips)])
    return Tokenizer(core)


def composing() -> Tokenizer:
    """A BPE over bytes of composed text, as in Qwen's family, with one token for a Hangul syllable."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("\ud55c")[0][0]
    merges = [(pieces[0], pieces[1]), (pieces[:2], pieces[2])]
    core = tokenizers.Tokenizer(models.BPE(vocab=_numbered([*_BYTES, pieces[:2], pieces]), merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.normalizer = normalizers.NFC()
    return Tokenizer(core)


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: idx for idx, token in enumerate(tokens)}


def byte_fallback() -> Tokenizer:
    """A BPE over characters that falls back on bytes, as in Llama's and Gemma's families."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "<unk>", "\u2581", "a", "\u2581a", "\u2581\u2581"]
    model = models.BPE(
        vocab=_numbered(tokens),
        merges=[("\u2581", "a"), ("\u2581", "\u2581")],
        byte_fallback=True,
        unk_token="<unk>",
        fuse_unk=True,
    )
    core = tokenizers.Tokenizer(model)
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return Tokenizer(core)


BOUNDED = {
    "demo": load_tokenizer(str(demo_folder("target"))),
    "byte level": byte_level(),
    "composing": composing(),
    "stripping": byte_level(strips=True),
    "byte fallback": byte_fallback(),
}
TEXTS = st.lists(
    st.text(max_size=8)
    | st.sampled_from(
        ["the", " " * 16, " " * 300, "<|im_start|>", "\u1112\u1161\u11ab", "e\u0301", "\u2581", "\u212b"]
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=30)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_the_bound_says(name: str, text: str) -> None:
    tokenizer = BOUNDED[name]
    bound = token_bytes(tokenizer)
    assert bound.most is not None
    assert bound.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_a_text_of_the_longest_token_alone_comes_to_the_bound() -> None:
    assert token_bytes(BOUNDED["byte level"]) == TokenBytes(16)
    assert token_bytes(BOUNDED["stripping"]) == TokenBytes(16, skips_blanks=True)
    assert TokenBytes(16).least_tokens(" " * 1600) == 100 == len(BOUNDED["byte level"].encode(" " * 1600))
    assert token_bytes(BOUNDED["composing"]) == TokenBytes(9)  # three letters of three bytes are one syllable
    assert TokenBytes(9).least_tokens("\u1112\u1161\u11ab" * 60) == 60
    assert len(BOUNDED["composing"].encode("\u1112\u1161\u11ab" * 60)) == 60
    assert TokenBytes(16, skips_blanks=True).least_tokens("a" + " " * 1600) == 1


def test_where_a_part_of_a_text_may_vanish_there_is_no_bound() -> None:
    unknown = {"[UNK]": 0, "a": 1}
    words = tokenizers.Tokenizer(models.WordPiece(vocab=unknown, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fused = tokenizers.Tokenizer(models.BPE(vocab=unknown, merges=[], unk_token="[UNK]", fuse_unk=True))
    lowering, stripping = byte_level(), byte_level()
    lowering.backend_tokenizer.normalizer = normalizers.Lowercase()
    stripping.backend_tokenizer.normalizer = normalizers.Strip()
    removing = byte_level()
    removing.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    for tokenizer in (Tokenizer(words), Tokenizer(fused), lowering, stripping, removing):
        bound = token_bytes(tokenizer)
        assert bound.most is None
        assert bound.least_tokens("a" * 10**6) == 0
