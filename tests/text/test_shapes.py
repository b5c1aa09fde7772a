"""A chat template that refuses a conversation gets one that says the same; any other gets it as it is."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.errors import PromptError
from card.text.chat_template import render_chat
from card.text.shapes import shapes
from tests.tokenizer_kinds import llama2

ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('Only user and assistant') }}{% endif %}"
)
WRITING = "<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + ALTERNATING
    + WRITING
)  # as Gemma 2 and the first Mistral have it
SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
    + ALTERNATING
    + WRITING
)
ANYTHING = "{% for m in messages %}" + WRITING


def told(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def written(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = llama2()
    tokenizer.chat_template = template
    return render_chat(tokenizer, messages, **options)


TALK = [told("system", "Be brief."), told("user", "hi"), told("assistant", "yes?"), told("user", "add")]


def test_arguments_of_calls_are_a_text_where_the_template_takes_only_texts() -> None:
    template = ANYTHING.replace(
        "{% endfor %}", "{% for c in m.tool_calls %}{{ ' ' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk = [told("user", "hi"), told("assistant", "", tool_calls=[call])]
    assert written(template, talk) == '<user>hi<assistant> {"a": 1}'
    assert written(ANYTHING + "{{ messages[1].tool_calls[0].function.arguments.a }}", talk).endswith("1"), "an object"


def test_a_system_message_joins_the_first_turn_where_the_template_refuses_it() -> None:
    assert written(NO_SYSTEM, TALK) == "<user>Be brief.\n\nhi<assistant>yes?<user>add"
    assert written(NO_SYSTEM, TALK[:1]) == "<user>Be brief."
    assert written(NO_SYSTEM, [TALK[0], *TALK[2:]]) == "<user>Be brief.<assistant>yes?<user>add"


def test_a_template_that_takes_a_system_message_gets_it_and_later_ones_join_the_turns() -> None:
    assert written(SYSTEM_FIRST, TALK) == "<system>Be brief.<user>hi<assistant>yes?<user>add"
    late = [*TALK, told("system", "Now.")]
    assert written(SYSTEM_FIRST, late) == "<system>Be brief.<user>hi<assistant>yes?<user>add\n\nNow."
    assert written(ANYTHING, late) == "<system>Be brief.<user>hi<assistant>yes?<user>add<system>Now."


def test_turns_of_one_role_become_one_where_roles_must_alternate() -> None:
    several = [told("user", "a"), told("user", ""), told("user", "b"), told("assistant", "c"), told("assistant", "d")]
    assert written(NO_SYSTEM, several) == "<user>a\n\nb<assistant>c\n\nd"
    assert written(ANYTHING, several) == "<user>a<user><user>b<assistant>c<assistant>d"


def test_a_user_who_speaks_before_a_result_is_answered_gets_a_turn_where_roles_must_alternate() -> None:
    """Mistral's templates with tools count the turns of the user and of the assistant, calls left out."""
    counting = (
        "{% for m in messages | rejectattr('role', 'equalto', 'tool') | selectattr('tool_calls', 'undefined') %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}{% endfor %}"
    )
    talk = [*calling({}), told("user", "so?")]
    assert written(counting + ANYTHING, talk) == "<user>add<assistant><tool>bad<assistant><user>so?"
    assert written(ANYTHING, talk) == "<user>add<assistant><tool>bad<user>so?"


def test_parts_with_images_stay_in_their_order() -> None:
    image = {"type": "image"}
    (*_, last) = shapes([told("system", "a"), told("user", [image, {"type": "text", "text": "b"}])])
    assert last == [told("user", [{"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}])]


def test_what_no_shape_mends_is_refused_for_its_own_reason() -> None:
    with pytest.raises(PromptError, match="roles must alternate"):
        written(NO_SYSTEM, [told("assistant", "a"), told("user", "b")])
    with pytest.raises(PromptError, match="System role not supported"):
        written(NO_SYSTEM, [told("system", "s"), told("tool", "b")])


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text("ab", min_size=1)), min_size=1))
def test_every_shape_says_everything_in_its_order_and_the_last_one_alternates(turns: list[tuple[str, str]]) -> None:
    messages = [told(role, text) for role, text in turns]
    found = list(shapes(messages))
    assert found[0] == messages
    for shape in found:
        assert "\n\n".join(one["content"] for one in shape) == "\n\n".join(text for _, text in turns)
        assert all(shape.count(one) <= len(messages) for one in shape)
    roles = [one["role"] for one in found[-1]]
    assert "system" not in roles or len(found) == 1
    if len(found) > 1:
        assert all(one != other for one, other in itertools.pairwise(roles))


# ---- arguments that are no JSON -------------------------------------------------------------------------------------

CUT_OFF = '{"a": "12'


def calling(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [told("user", "add"), told("assistant", "", tool_calls=[call]), told("tool", "bad")]


def test_arguments_that_are_text_are_told_as_text_or_as_none_where_the_template_wants_an_object() -> None:
    each = "{% for m in messages if m.tool_calls %}{% set given = m.tool_calls[0].function.arguments %}"
    as_json, as_names = (
        each + "{{ given | tojson }}{% endfor %}",
        each + "<{{ given.items() | list | length }}>{% endfor %}",
    )
    assert written(as_json, calling(CUT_OFF)) == json.dumps(CUT_OFF)
    assert written(as_names, calling(CUT_OFF)) == "<0>"
    assert written(as_names, calling({"a": 1})) == "<1>"
