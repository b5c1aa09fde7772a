"""A text ends at the token that completes a stop string, of whatever tokens and pieces the text is made."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.api.text_stream import TextStream
from card.text.tokenizer import Tokenizer
from card.text.tokens import REPLACEMENT
from tests.tokenizer_kinds import ALPHABET, BYTE_TOKENS, KINDS, SPECIALS

every_kind = pytest.mark.parametrize("kind", KINDS)
fallback_kind = pytest.mark.parametrize("kind", ["llama2", "gemma", "metaspace first"])

LETTERS = ALPHABET.replace(REPLACEMENT, "") + "\n"
stop_strings = st.lists(st.text(LETTERS, min_size=1, max_size=3), min_size=1, max_size=3).map(tuple)


def ids_of(kind: str, *tokens: str) -> list[int]:
    ids = [KINDS[kind].convert_tokens_to_ids(token) for token in tokens]
    assert None not in ids
    return ids


def whole_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def complete_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the text without a character that its last bytes only begin."""
    if BYTE_TOKENS[0] not in tokenizer.get_vocab():  # a token may hold a whole character and the beginning of one
        return whole_text(tokenizer, ids).removesuffix(REPLACEMENT)
    for num_open in range(min(4, len(ids) + 1)):
        text = whole_text(tokenizer, ids[: len(ids) - num_open])
        if not text.endswith(REPLACEMENT):
            return text
    return whole_text(tokenizer, ids)


def plain_end(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...], min_tokens: int) -> tuple[int | None, str]:
    """Return after how many tokens the text ends, and what is shown of it: all tokens are decoded after each."""
    num_passed = len(complete_text(tokenizer, ids[:min_tokens]))
    for count in range(min_tokens + 1, len(ids) + 1):
        text = whole_text(tokenizer, ids[:count])
        for end in range(num_passed + 1, len(text) + 1):
            if found := [stop for stop in stops if text[:end].endswith(stop)]:
                return count, text[: end - max(map(len, found))]
    return None, whole_text(tokenizer, ids)


def streamed_end(
    tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...], min_tokens: int, step: int = 1
) -> tuple[int | None, str]:
    """Return the same of a text that grows by so many tokens in a round."""
    text, shown = TextStream(tokenizer, stops, min_tokens), ""
    for first in range(0, len(ids), step):
        for count, token_id in enumerate(ids[first : first + step], first + 1):
            if text.feed(token_id):
                return count, shown + text.take(ids[first:count], is_end=True)
        shown += text.take(ids[first : first + step], is_end=False)
    return None, shown + text.take([], is_end=True)


@st.composite
def written(draw: st.DrawFn, kind: str) -> list[int]:
    """Tokens of texts, with special tokens and broken bytes now and then, and bytes where tokens would do."""
    tokenizer, ids = KINDS[kind], list[int]()
    for part in draw(st.lists(st.text(LETTERS, max_size=5) | st.sampled_from(["bytes", *SPECIALS]), max_size=7)):
        if part in SPECIALS:
            ids += ids_of(kind, part)
        elif BYTE_TOKENS[0] in tokenizer.get_vocab() and draw(st.booleans()):
            data = draw(st.binary(max_size=2)) if part == "bytes" else part.encode()
            ids += ids_of(kind, *(BYTE_TOKENS[byte] for byte in data))
        else:
            ids += tokenizer.encode(part, add_special_tokens=False)
    return ids


@every_kind
@given(data=st.data())
def test_a_text_ends_where_decoding_all_after_each_token_finds_a_stop_string(kind: str, data: st.DataObject) -> None:
    ids, stops = data.draw(written(kind)), data.draw(stop_strings)
    wanted = plain_end(KINDS[kind], ids, stops, 0)
    assert streamed_end(KINDS[kind], ids, stops, 0, data.draw(st.integers(1, 5))) == wanted


@every_kind
@given(data=st.data(), text=st.text(LETTERS, max_size=12), min_tokens=st.integers(1, 8))
def test_stop_strings_that_are_complete_within_the_least_length_pass_and_later_ones_end_the_text(
    kind: str, data: st.DataObject, text: str, min_tokens: int
) -> None:
    stops = data.draw(stop_strings)
    ids = KINDS[kind].encode(text, add_special_tokens=False)
    wanted = plain_end(KINDS[kind], ids, stops, min(min_tokens, len(ids)))
    assert streamed_end(KINDS[kind], ids, stops, min_tokens) == wanted


@fallback_kind
def test_a_newline_that_is_a_byte_ends_the_text_at_once(kind: str) -> None:
    ids = ids_of(kind, "a", "<0x0A>", "b")
    assert streamed_end(KINDS[kind], ids, ("\n",), 0) == (2, "a")
    assert streamed_end(KINDS[kind], ids, ("a\n",), 0) == (2, "")
    assert streamed_end(KINDS[kind], ids, ("\nb",), 0) == (3, "a")


@fallback_kind
def test_a_character_of_several_bytes_ends_the_text_with_its_last_one(kind: str) -> None:
    for stop, names in (("é", ["<0xC3>", "<0xA9>"]), ("😀", ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"])):
        ids = ids_of(kind, "a", "<0x0A>", *names, *names, "b")
        assert streamed_end(KINDS[kind], ids, (stop,), 0) == (2 + len(names), "a\n")
        assert streamed_end(KINDS[kind], ids, (stop * 2,), 0) == (2 + 2 * len(names), "a\n")


@fallback_kind
def test_bytes_behind_a_broken_one_are_no_stop_string(kind: str) -> None:
    ids = ids_of(kind, "a", "<0xC3>", "<0x0A>", "<0x0A>", "b", "<0x0A>")
    assert streamed_end(KINDS[kind], ids, ("\n",), 0) == (6, f"a{REPLACEMENT * 3}b")


def test_a_run_of_bytes_costs_no_more_for_each_token_the_longer_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of("llama2", "a", *["<0x0A>"] * 2000)
    tokenizer, num_decoded = KINDS["llama2"], 0
    decode = tokenizer.decode

    def counting(token_ids: list[int], **options: Any) -> Any:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode(token_ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counting)
    assert streamed_end(tokenizer, ids, ("b\n", "\n\nb"), 0, step=len(ids))[0] is None
    assert num_decoded < 40 * len(ids)


# ---- special tokens -------------------------------------------------------------------------------------------------


@every_kind
def test_a_special_token_is_a_stop_string_and_ends_the_text_by_its_id(kind: str) -> None:
    text = TextStream(KINDS[kind], ("[/INST]", "ab"))
    assert text.end_ids == frozenset(ids_of(kind, "[/INST]"))
    assert TextStream(KINDS[kind], ("[/INST]\n", "[/INS")).end_ids == frozenset()


@every_kind
@given(data=st.data(), step=st.integers(1, 5))
def test_special_tokens_count_within_a_stop_string_and_are_not_shown(kind: str, data: st.DataObject, step: int) -> None:
    tokenizer = KINDS[kind]
    before, after = (data.draw(st.text("a\né", max_size=3)) for _ in range(2))
    first, last = (tokenizer.encode(text, add_special_tokens=False) for text in (before, after))
    ids = [*ids_of(kind, "<s>"), *first, *ids_of(kind, "[/INST]"), *last, *ids_of(kind, "</s>")]
    shown = whole_text(tokenizer, first)
    rest = whole_text(tokenizer, [*first, *last]).removeprefix(shown)
    assert streamed_end(tokenizer, ids, ("[/INST]",), 0, step) == (len(first) + 2, shown)
    for num_before, num_after in itertools.product(range(len(shown) + 1), range(len(rest) + 1)):
        stop = shown[len(shown) - num_before :] + "[/INST]" + rest[:num_after]
        count, text = streamed_end(tokenizer, ids, ("zz", stop), 0, step)
        assert text == shown[: len(shown) - num_before]
        assert count is not None and count <= len(ids) - 1
        assert streamed_end(tokenizer, ids, ("z" + stop,), 0, step) == (None, shown + rest)


@fallback_kind
def test_a_special_token_that_is_spelled_out_is_a_stop_string_too(kind: str) -> None:
    ids = ids_of(kind, "a", *(BYTE_TOKENS[byte] for byte in b"</s>"), "b")
    assert streamed_end(KINDS[kind], ids, ("</s>",), 0) == (5, "a")
    assert streamed_end(KINDS[kind], ids, ("s></s>",), 0) == (None, "a</s>b")
