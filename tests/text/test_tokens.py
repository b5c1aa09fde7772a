"""Streamed text is the decoded text, stop strings are found at any border, and tokenizers that differ are refused."""

from __future__ import annotations

import itertools
import time

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from card.errors import PromptError, VocabularyError
from card.text.fit import check_tokenizers_fit
from card.text.prompts import encode_chat, encode_prompt
from card.text.stops import StopStrings
from card.text.tokenizer import Tokenizer
from card.text.tokens import Detokenizer, decode
from tests.reaching_in import num_pending_tokens

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIALS = ["<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'judge' %}{{ raise_exception('no judges here') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level(
    merges: tuple[tuple[str, str], ...] = (),
    added: tuple[str, ...] = (),
    chat_template: str | None = None,
    **special: str,
) -> Tokenizer:
    """Return a tokenizer with one token per byte, then the merged ones; three special tokens come first."""
    tokens = [*SPECIALS, *ALPHABET, *(a + b for a, b in merges)]
    core = tokenizers.Tokenizer(models.BPE(vocab={token: idx for idx, token in enumerate(tokens)}, merges=list(merges)))
    core.add_special_tokens(SPECIALS)
    core.add_tokens([AddedToken(token, normalized=False) for token in added])
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    named = {"eos_token": "<|end|>", **special}
    return Tokenizer(core, special_tokens=named, extra_special_tokens=SPECIALS[1:], chat_template=chat_template)


def sentencepiece_like() -> Tokenizer:
    """Return a tokenizer that marks spaces, falls back to byte tokens and drops the text's first space."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "ab", "▁▁", "c"]
    core = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    core.add_special_tokens(["<s>"])
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(core, special_tokens={"bos_token": "<s>"})


PLAIN = byte_level()
MERGED = byte_level(merges=(("Ġ", "a"), ("â", "Ĥ"), ("b", "c")), added=("<tool call>",))
FALLBACK = sentencepiece_like()

UTF8_PARTS = [0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9, 0xFF, 0xC0, 0xED, 0xA0, 0xF4, 0x90, 0x41, 0x20]


PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that byte-level tokenizers show as themselves
HIDDEN = [byte for byte in range(256) if byte not in PRINTABLE]  # and those shown as characters from 256 on
TOKEN_OF = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + idx) for idx, byte in enumerate(HIDDEN)}
ID_OF = {byte: PLAIN.convert_tokens_to_ids(token) for byte, token in TOKEN_OF.items()}


def byte_ids(data: bytes) -> list[int]:
    """Return the ids in PLAIN of single bytes."""
    return [ID_OF[byte] for byte in data]


def streamed(tokenizer: Tokenizer, pieces: list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.flush()]


def joined(pieces: list[list[int]]) -> list[int]:
    return [token_id for piece in pieces for token_id in piece]


def cut(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    borders = sorted(draw(st.sets(st.integers(0, len(ids)), max_size=12)))
    return [ids[a:b] for a, b in zip([0, *borders], [*borders, len(ids)], strict=True)]


@st.composite
def plain_streams(draw: st.DrawFn) -> list[list[int]]:
    """Pieces of ids of PLAIN: parts of UTF-8 sequences mostly, special tokens and ids without a token now and then."""
    parts = st.sampled_from(byte_ids(bytes(UTF8_PARTS)))
    ids = draw(st.lists(parts | parts | st.integers(0, len(PLAIN) + 2), max_size=90))
    return cut(draw, ids) if draw(st.booleans()) else [[i] for i in ids]


@st.composite
def streams(draw: st.DrawFn, tokenizer: Tokenizer) -> list[list[int]]:
    ids = draw(
        st.lists(st.integers(0, len(tokenizer) - 1) | st.integers(len(tokenizer) - 6, len(tokenizer) - 1), max_size=90)
    )
    return cut(draw, ids) if draw(st.booleans()) else [[i] for i in ids]


def test_the_helper_knows_the_id_of_every_byte() -> None:
    text = "".join(map(chr, range(256)))
    assert byte_ids(text.encode()) == PLAIN.encode(text)


@given(plain_streams())
def test_byte_level_pieces_join_to_the_whole_text(pieces: list[list[int]]) -> None:
    assert "".join(streamed(PLAIN, pieces)) == decode(PLAIN, joined(pieces))


@given(streams(MERGED))
def test_pieces_join_to_the_whole_text_with_merges_and_added_tokens(pieces: list[list[int]]) -> None:
    assert "".join(streamed(MERGED, pieces)) == decode(MERGED, joined(pieces))


@given(streams(FALLBACK))
def test_sentencepiece_pieces_join_to_the_whole_text(pieces: list[list[int]]) -> None:
    assert "".join(streamed(FALLBACK, pieces)) == decode(FALLBACK, joined(pieces))


@given(st.text(max_size=60))
def test_valid_text_streams_without_replacement_characters_and_one_token_late_at_most(text: str) -> None:
    detokenizer, shown = Detokenizer(PLAIN), ""
    data = text.encode()
    for count, token_id in enumerate(byte_ids(data), 1):
        shown += detokenizer.push([token_id])
        complete = data[:count].decode(errors="ignore")
        assert shown == complete or complete.endswith("\ufffd")
    assert shown + detokenizer.flush() == text


def test_an_incomplete_character_waits_and_is_flushed_as_broken_if_nothing_follows() -> None:
    euro = byte_ids("€".encode())
    assert streamed(PLAIN, [[i] for i in euro]) == ["", "", "€", ""]
    assert streamed(PLAIN, [[i] for i in euro[:2]]) == ["", "", "\ufffd"]
    assert streamed(PLAIN, [euro[:2], [0], euro[2:]]) == ["", "", "€", ""]  # a special token in between has no bytes
    assert streamed(PLAIN, []) == [""]


def test_streaming_costs_the_same_per_token_whatever_came_before() -> None:
    def seconds(ids: list[int]) -> float:
        detokenizer, started = Detokenizer(PLAIN), time.process_time()
        for token_id in ids:
            detokenizer.push([token_id])
        assert num_pending_tokens(detokenizer) <= 33
        return time.process_time() - started

    for endless in (byte_ids(b"abc "), byte_ids(b"\xff\xac"), byte_ids("😀".encode()), [0, 1], byte_ids(b"\x80\xe2")):
        assert (
            seconds(endless * 750) < 3.0
        )  # tens of ms; with the whole text decoded each time it would be many seconds


STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return the text before the stop string that a reader of single characters meets first, and that stop string."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(stops=STOPS, pieces=st.lists(st.text("abc", max_size=5), max_size=10))
def test_stop_strings_end_the_text_where_a_character_by_character_reader_would(stops, pieces) -> None:
    stopper = StopStrings(stops)
    shown = "".join([*(stopper.push(piece) for piece in pieces), stopper.flush()])
    assert (shown, stopper.found) == first_stop("".join(pieces), stops)


@given(stops=STOPS, text=st.text("abc", max_size=12))
def test_no_more_is_held_back_than_may_begin_a_stop_string(stops, text) -> None:
    stopper = StopStrings(stops)
    shown = "".join(stopper.push(character) for character in text)
    if stopper.found is None:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(text[i:]) for i in range(len(shown)) for stop in stops)


@given(
    text=st.text(alphabet="ab", max_size=14),
    cuts=st.lists(st.integers(0, 14), max_size=3),
    num_exempt=st.integers(0, 4),
)
def test_stop_strings_that_end_in_exempt_pieces_pass_and_others_count_also_across_the_border(
    text: str, cuts: list[int], num_exempt: int
) -> None:
    stops = ("ab", "babb", "aaa")
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(borders)]
    num_passed = len("".join(pieces[:num_exempt]))
    stopper = StopStrings(stops)
    shown = "".join(stopper.push(piece, may_end=idx >= num_exempt) for idx, piece in enumerate(pieces))
    found = [
        (end, -len(stop)) for end in range(num_passed + 1, len(text) + 1) for stop in stops if text[:end].endswith(stop)
    ]
    end, length = min(found, default=(len(text), 0))
    assert shown + stopper.flush() == text[: end + length]
    assert (stopper.found is not None) == bool(found)


def test_nothing_follows_a_stop_string() -> None:
    stopper = StopStrings(["\n\n"])
    assert [stopper.push(piece) for piece in ["one\n", "two\n", "\nthree", "four"]] == ["one", "\ntwo", "", ""]
    assert (stopper.found, stopper.flush()) == ("\n\n", "")


def test_prompts_become_ids() -> None:
    assert encode_prompt(PLAIN, "hé") == PLAIN.encode("hé")
    assert encode_prompt(PLAIN, " ") == PLAIN.encode(" ")


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "the prompt is empty"),
        ("ab\ud800c", r"lone surrogate '\\ud800' at character 2"),
        (None, "must be a string, got NoneType"),
        ([1, 2], "must be a string, got list"),
    ],
)
def test_a_prompt_that_is_no_text_raises(prompt: object, text: str) -> None:
    with pytest.raises(PromptError, match=text):
        encode_prompt(PLAIN, prompt)  # type: ignore[arg-type]


def test_a_conversation_becomes_ids_in_the_chat_template() -> None:
    tokenizer = byte_level(chat_template=TEMPLATE)
    ids = encode_chat(tokenizer, [{"role": "user", "content": "hé"}])
    assert tokenizer.decode(ids) == "<|user|>hé<|end|><|assistant|>"
    assert ids[:1] + ids[-2:] == [1, 0, 2]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "the conversation is empty"),
        ([{"role": "user"}], 'message 0 must have the keys "role" and "content"'),
        (["hi"], "message 0 must have the keys"),
        ([{"role": "assistant", "content": None}], "the content of message 0 must be a string, got NoneType"),
        ([{"role": "user", "content": "\udfff"}], "the content of message 0 is not valid text"),
        ([{"role": "user", "content": ["x"]}], "the content of message 0 must be a string, got list"),
        ([{"role": "judge", "content": "x"}], "chat template refuses the messages: no judges here"),
    ],
)
def test_a_conversation_that_cannot_be_used_raises(messages: list[dict[str, str]], text: str) -> None:
    with pytest.raises(PromptError, match=text):
        encode_chat(byte_level(chat_template=TEMPLATE), messages)


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_any_message_may_be_empty_the_last_one_too(role: str) -> None:
    tokenizer = byte_level(chat_template=TEMPLATE)
    ids = encode_chat(tokenizer, [{"role": "user", "content": ""}, {"role": role, "content": ""}])
    assert tokenizer.decode(ids) == f"<|user|><|end|><|{role}|><|end|><|assistant|>"


def test_a_message_that_only_has_calls_needs_no_content() -> None:
    tokenizer = byte_level(chat_template=TEMPLATE)
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    ids = encode_chat(tokenizer, [{"role": "assistant", "content": None, "tool_calls": calls}])
    assert tokenizer.decode(ids) == "<|assistant|><|end|><|assistant|>"


def test_a_conversation_without_a_chat_template_raises() -> None:
    with pytest.raises(PromptError, match="no chat template; give a plain prompt"):
        encode_chat(PLAIN, [{"role": "user", "content": "hi"}])


def test_the_same_tokenizer_fits_whatever_pads_the_embeddings() -> None:
    check_tokenizers_fit(PLAIN, byte_level(), 320, 512)
    check_tokenizers_fit(PLAIN, byte_level(), len(PLAIN), len(PLAIN))
    check_tokenizers_fit(PLAIN, byte_level(pad_token="<|user|>", chat_template=TEMPLATE), 320, 320)


AB, BC = (("a", "b"),), (("b", "c"),)


@pytest.mark.parametrize(
    ("target", "draft", "text"),
    [
        (byte_level(AB), byte_level(BC), "token 259 is 'ab' in the target's tokenizer and 'bc' in the draft's"),
        (
            byte_level(AB),
            byte_level(),
            r"target's tokenizer has 260 tokens, the draft's has 259: only the target's has token 259",
        ),
        (byte_level(), byte_level(added=("<t>",)), r"only the draft's has token 259 \('<t>'\)"),
        (
            byte_level(),
            byte_level(eos_token="<|user|>"),
            "the eos token is '<|end|>' in the target's tokenizer and '<|user|>'",
        ),
        (
            byte_level(),
            byte_level(bos_token="<|user|>"),
            "the bos token is None in the target's tokenizer and '<|user|>'",
        ),
    ],
)
def test_tokenizers_that_differ_are_refused_with_the_first_difference(target, draft, text: str) -> None:
    with pytest.raises(VocabularyError, match=text.replace("|", r"\|")):
        check_tokenizers_fit(target, draft, 320, 320)


def test_a_model_without_a_row_for_each_token_is_refused() -> None:
    with pytest.raises(
        VocabularyError, match="the draft model has 100 embedding rows, its tokenizer has ids up to 258"
    ):
        check_tokenizers_fit(PLAIN, PLAIN, 320, 100)
