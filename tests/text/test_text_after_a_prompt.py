"""The text of a prompt and that of what follows make the text of all tokens, for every kind of tokenizer."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from card.api.text_stream import TextStream
from card.text.tokenizer import Tokenizer
from card.text.tokens import REPLACEMENT, Detokenizer, decode, decode_prompt
from tests.tokenizer_kinds import ALPHABET, BYTE_TOKENS, KINDS

every_kind = pytest.mark.parametrize("kind", KINDS)
texts = st.text(ALPHABET, max_size=24)


def whole_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return what transformers has of all tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def streamed(tokenizer: Tokenizer, ids: list[int], prompt_ids: list[int], cuts: set[int]) -> str:
    detokenizer = Detokenizer(tokenizer, after=prompt_ids)
    borders = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    pieces = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(borders)]
    return "".join(pieces) + detokenizer.flush()


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(token) for token in tokens]


@every_kind
@given(
    text=texts, starts=st.lists(st.sampled_from(["", "<s>", "[/INST]"]), max_size=2), cuts=st.sets(st.integers(1, 9))
)
def test_wherever_a_text_is_cut_both_parts_make_the_whole(
    kind: str, text: str, starts: list[str], cuts: set[int]
) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode("".join(starts) + text, add_special_tokens=False)
    wanted = whole_text(tokenizer, ids)
    for cut in range(len(ids) + 1):
        prompt_ids, new_ids = ids[:cut], ids[cut:]
        assert decode_prompt(tokenizer, prompt_ids) + decode(tokenizer, new_ids, after=prompt_ids) == wanted
        assert decode_prompt(tokenizer, prompt_ids) + streamed(tokenizer, new_ids, prompt_ids, cuts) == wanted


@every_kind
@given(data=st.data())
def test_pieces_after_any_tokens_make_what_all_tokens_say_beyond_the_prompt(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=40)
    prompt_ids, new_ids = data.draw(ids), data.draw(ids)
    new_text = decode(tokenizer, new_ids, after=prompt_ids)
    assert streamed(tokenizer, new_ids, prompt_ids, data.draw(st.sets(st.integers(1, 39), max_size=6))) == new_text
    before, wanted = whole_text(tokenizer, prompt_ids), whole_text(tokenizer, prompt_ids + new_ids)
    assume(not before.endswith(REPLACEMENT) and wanted.startswith(before))
    assert before + new_text == wanted


@pytest.mark.parametrize("kind", ["llama2", "metaspace always", "metaspace first", "gemma", "byte level"])
def test_the_first_token_keeps_its_blank_behind_a_prompt_and_a_stop_string_finds_it(kind: str) -> None:
    tokenizer = KINDS[kind]
    prompt_ids, all_ids = (tokenizer.encode(text, add_special_tokens=False) for text in ("ab", "ab a b"))
    new_ids = all_ids[len(prompt_ids) :]
    assert decode(tokenizer, new_ids, after=prompt_ids) == " a b"
    text = TextStream(tokenizer, (" a",), after=prompt_ids)
    assert text.feed(new_ids[0]) and text.take(new_ids[:1], is_end=True) == ""


@pytest.mark.parametrize("kind", ["llama2", "metaspace always"])
def test_special_tokens_are_passed_over_and_a_prompt_of_nothing_else_begins_the_text(kind: str) -> None:
    tokenizer = KINDS[kind]
    a, mark, start = (ids_of(tokenizer, token) for token in ("▁a", "[/INST]", "<s>"))
    assert decode(tokenizer, a, after=start + mark) == decode(tokenizer, a) == "a"
    assert decode(tokenizer, a, after=start + a + mark) == " a"


@pytest.mark.parametrize(("kind", "first", "rest"), [("llama2", "<0xC3>", "<0xA9>"), ("byte level", "Ã", "©")])
def test_a_character_that_a_prompt_begins_belongs_to_what_follows(kind: str, first: str, rest: str) -> None:
    tokenizer = KINDS[kind]
    prompt_ids, rest_ids = ids_of(tokenizer, "a", first), ids_of(tokenizer, rest)
    other_ids = ids_of(tokenizer, "b")
    assert decode_prompt(tokenizer, prompt_ids) == "a"
    assert decode(tokenizer, rest_ids, after=prompt_ids) == "é"
    assert decode(tokenizer, other_ids, after=prompt_ids) == REPLACEMENT + "b"


def test_a_prompt_that_ends_with_a_replacement_character_has_shown_it() -> None:
    for tokenizer in KINDS.values():
        ids = tokenizer.encode("a" + REPLACEMENT, add_special_tokens=False)
        more = tokenizer.encode("a" + REPLACEMENT + "b", add_special_tokens=False)
        assert decode_prompt(tokenizer, ids) == "a" + REPLACEMENT
        assert decode(tokenizer, more[len(ids) :], after=ids) == "b" or more[: len(ids)] != ids


@given(broken=st.sampled_from(BYTE_TOKENS[0x80:]))
def test_bytes_that_are_no_character_do_not_spoil_those_of_the_prompt(broken: str) -> None:
    tokenizer = KINDS["llama2"]
    prompt_ids = ids_of(tokenizer, "▁a", "<0xC3>", "<0xA9>")
    new_ids = ids_of(tokenizer, broken, "b")
    assert decode(tokenizer, new_ids, after=prompt_ids) == REPLACEMENT + "b"


def test_a_text_of_bytes_alone_can_be_a_prompt() -> None:
    for kind, names in (("llama2", ["<0xC3>", "<0xA9>"] * 40), ("byte level", ["Ã", "©"] * 40)):
        ids = ids_of(KINDS[kind], *names)
        for cut in range(1, len(ids)):
            parts = decode_prompt(KINDS[kind], ids[:cut]), decode(KINDS[kind], ids[cut:], after=ids[:cut])
            assert "".join(parts) == "é" * 40
