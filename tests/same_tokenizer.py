"""Tokenizers of ours compared with those of transformers: everything that a text goes through."""

from __future__ import annotations

from typing import Any

from card.errors import PromptError
from card.text.chat_template import render_chat
from card.text.tokenizer import Tokenizer
from card.text.tokens import Detokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds é & <b>.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
USER, ANSWER = {"role": "user", "content": "Wie geht's? 你好"}, {"role": "assistant", "content": " Gut.\n"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [USER],
    [{"role": "system", "content": "Be brief."}, USER, ANSWER, USER],
    [{"role": "system", "content": ""}, {"role": "user", "content": ""}, {"role": "assistant", "content": ""}, USER],
    [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}],
    [USER, {**ANSWER, "reasoning_content": "hm"}, USER],
)


def check_facts(own: Tokenizer, theirs: Any) -> None:
    """Check that two tokenizers have the same tokens, with the same parts and flags."""
    assert len(own) == len(theirs)
    assert own.get_vocab() == theirs.get_vocab()
    assert own.special_tokens_map == theirs.special_tokens_map
    assert list(own.extra_special_tokens) == theirs.extra_special_tokens
    assert own.all_special_ids == theirs.all_special_ids
    added = (own.added_tokens_decoder, theirs.added_tokens_decoder)
    assert {i: repr(one) for i, one in added[0].items()} == {i: repr(one) for i, one in added[1].items()}
    assert own.chat_template == theirs.chat_template


def check_text(own: Tokenizer, theirs: Any, text: str) -> None:
    """Check that a text becomes the same ids with the same places, and these the same text, whole and streamed."""
    backend = own.backend_tokenizer
    assert backend is not None
    for adds in (True, False):
        wanted = theirs(text, add_special_tokens=adds, return_offsets_mapping=True)
        ids = wanted["input_ids"]
        assert own.encode(text, add_special_tokens=adds) == ids
        assert backend.encode(text, add_special_tokens=adds).offsets == wanted["offset_mapping"]
        check_ids(own, theirs, ids)


def check_ids(own: Tokenizer, theirs: Any, ids: list[int]) -> None:
    """Check that ids become the same text, whole and streamed."""
    for skips in (True, False):
        for cleans in (None, True, False):
            options = {"skip_special_tokens": skips, "clean_up_tokenization_spaces": cleans}
            assert own.decode(ids, **options) == theirs.decode(ids, **options)
    detokenizer = Detokenizer(own)
    streamed = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()
    assert streamed == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def check_chats(own: Tokenizer, theirs: Any) -> int:
    """Check that templates write the same wherever transformers' does not refuse; return in how many cases."""
    num_written = 0
    for messages in CONVERSATIONS:
        for tools in (None, [TOOL]):
            for asks in (True, False):
                options: dict[str, Any] = {"tools": tools, "add_generation_prompt": asks}
                try:
                    wanted = theirs.apply_chat_template(messages, tokenize=False, **options)
                except Exception as error:
                    refuse(own, messages, options, error)
                    continue
                assert render_chat(own, messages, **options) == wanted
                assert own.encode(wanted, add_special_tokens=False) == theirs.apply_chat_template(
                    messages, return_dict=False, **options
                )
                num_written += 1
    return num_written


def refuse(own: Tokenizer, messages: list[dict[str, Any]], options: dict[str, Any], error: Exception) -> None:
    """Check that we say the same where we refuse too: a conversation may be taken here in another shape."""
    try:
        render_chat(own, messages, **options)
    except PromptError as ours:
        assert " ".join(str(error).split())[:40] in str(ours)
