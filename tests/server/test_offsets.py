"""Where tokens begin in their text, and what single tokens are called, for every kind of tokenizer."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.server.offsets import TokenOffsets, offsets_in
from card.server.tokens import TokenNames
from card.text.tokenizer import Tokenizer
from card.text.tokens import REPLACEMENT, decode, decode_prompt
from tests.tokenizer_kinds import ALPHABET, BYTE_TOKENS, KINDS, SPECIALS

every_kind = pytest.mark.parametrize("kind", KINDS)
NAMING = [kind for kind in KINDS if kind != "word ends"]  # there the blank before a word is its neighbour's doing
texts = st.text(ALPHABET, max_size=20)


def offsets_after(tokenizer: Tokenizer, prompt_ids: list[int], pieces: list[list[int]]) -> list[int]:
    places = TokenOffsets(tokenizer, after=prompt_ids)
    return [offset for piece in pieces for offset in places.push(piece)] + places.flush()


@every_kind
@given(text=texts, num_prompt=st.integers(0, 6), cut=st.integers(0, 20))
def test_a_token_begins_behind_all_characters_that_are_whole_before_it(
    kind: str, text: str, num_prompt: int, cut: int
) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt_ids, new_ids = ids[:num_prompt], ids[num_prompt:]
    before = [decode_prompt(tokenizer, ids[: num_prompt + count]) for count in range(len(new_ids))]
    wanted = [len(one) - len(decode_prompt(tokenizer, prompt_ids)) for one in before]
    new_text = decode(tokenizer, new_ids, after=prompt_ids)
    offsets = offsets_after(tokenizer, prompt_ids, [new_ids[:cut], new_ids[cut:]])
    if REPLACEMENT not in text:  # of one that is real and in parts, no part says that it is
        assert offsets == wanted
    names = TokenNames(tokenizer)
    for token_id, offset, following in zip(new_ids, offsets, [*offsets[1:], len(new_text)], strict=False):
        name = names.text(token_id)
        is_first = not (prompt_ids or offset)
        if REPLACEMENT not in name and not is_first and kind in NAMING:
            assert new_text[offset:following] == name


@every_kind
@given(data=st.data())
def test_offsets_grow_within_the_text_whatever_the_tokens_are(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    ids = st.lists(st.integers(0, len(tokenizer) + 2), max_size=30)
    prompt_ids, new_ids = data.draw(ids), data.draw(ids)
    offsets = offsets_after(tokenizer, prompt_ids, [new_ids])
    text = decode(tokenizer, new_ids, after=prompt_ids)
    assert len(offsets) == len(new_ids)
    assert offsets == sorted(offsets) and all(0 <= offset <= len(text) for offset in offsets)
    assert offsets_after(tokenizer, prompt_ids, [[one] for one in new_ids]) == offsets


@pytest.mark.parametrize(
    ("kind", "tokens", "wanted"),
    [
        ("byte level", ["Ã", "©", "Ġa", "b"], [0, 0, 1, 3]),
        ("byte level", ["â", "Ĥ", "¬", "Ã", "©", "a"], [0, 0, 0, 1, 1, 2]),
        ("byte level", ["Ã", "a", "</s>"], [0, 1, 2]),
        ("byte level", ["a", "[/INST]", "b", "</s>"], [0, 1, 1, 2]),
        ("llama2", ["<0xC3>", "<0xA9>", "<0xC3>", "<0xA9>", "▁a", "</s>"], [0, 0, 1, 1, 2, 4]),
        ("llama2", ["▁a", "<0xC3>", "b", "</s>"], [0, 1, 2, 3]),
    ],
)
def test_parts_of_a_character_begin_together_and_special_tokens_count_nothing(
    kind: str, tokens: list[str], wanted: list[int]
) -> None:
    ids = [KINDS[kind].convert_tokens_to_ids(token) for token in tokens]
    assert offsets_in(KINDS[kind], ids, "x" * 9) == wanted
    assert offsets_in(KINDS[kind], ids, "x") == [min(offset, 1) for offset in wanted]


@pytest.mark.parametrize("kind", NAMING)
@given(text=texts)
def test_what_tokens_are_called_and_their_bytes_make_the_text_that_they_make_behind_another(
    kind: str, text: str
) -> None:
    tokenizer, names = KINDS[kind], TokenNames(KINDS[kind])
    prompt_ids, ids = (tokenizer.encode(one, add_special_tokens=False) for one in ("b a", "b a " + text))
    new_ids = ids[len(prompt_ids) :]
    new_text = decode(tokenizer, new_ids, after=prompt_ids)
    raw = bytes(itertools.chain.from_iterable(names.raw_bytes(token_id) for token_id in new_ids))
    assert raw.decode() == new_text
    if not any(REPLACEMENT in names.text(token_id) for token_id in new_ids):
        assert "".join(map(names.text, new_ids)) == new_text


def test_special_tokens_and_bytes_are_called_what_they_are() -> None:
    for tokenizer in KINDS.values():
        names = TokenNames(tokenizer)
        assert [names.text(one).strip() for one in map(tokenizer.convert_tokens_to_ids, SPECIALS)] == SPECIALS
    names = TokenNames(KINDS["llama2"])
    for value, token in enumerate(BYTE_TOKENS):
        assert names.raw_bytes(KINDS["llama2"].convert_tokens_to_ids(token)) == [value]
