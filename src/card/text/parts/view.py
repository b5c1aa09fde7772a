"""The format of one model's answers, with the tokens of its tokenizer in place of their names."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from card.errors import SettingsError, named
from card.text.parts.answer_format import AnswerFormat, Part
from card.text.parts.families import find_format, has_tools
from card.text.parts.formats import AUTO, FORMATS, NONE
from card.text.parts.pieces import Tools
from card.text.parts.reader import AnswerReader
from card.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_FIRST_MARK = 0xDC00  # surrogates: no decoder makes one, so that they can stand for tokens
_MOST_PROMPT_IDS = 32  # at the end of a prompt, in which it may begin a part
# How all marks look that are tokens; others may just be parts of a mark.
_MARK = re.compile(r"([<\[].*[>\]]|\]<\].*\[>\[|\uff5c.*\uff5c)\n*")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerView:
    """The way in which the text of one request is read. It changes no token."""

    form: AnswerFormat  # with characters in place of special tokens
    token_marks: Mapping[int, str]  # those characters, by token id
    names: Mapping[str, str]  # the tokens' texts, by character
    starts_in: Part | None = None  # the part that the prompt has begun; None: the format's first
    tools: Tools = dataclasses.field(default_factory=dict)
    takes_bare: bool = True  # the rest as of `AnswerReader`
    has_content: bool = True
    most_calls: int | None = None

    def reader(self) -> AnswerReader:
        """Return the reader of one answer."""
        return AnswerReader(
            self.form,
            self.tools,
            starts_in=self.starts_in,
            takes_bare=self.takes_bare,
            has_content=self.has_content,
            most_calls=self.most_calls,
            shown=self.shown,
        )

    def shown(self, text: str) -> str:
        """Return a text with the names of tokens in place of their characters."""
        return text.translate({ord(char): name for char, name in self.names.items()}) if self.names else text


def check_format_name(name: str) -> None:
    """Raise SettingsError for a name of no format."""
    if name != AUTO and name not in FORMATS:
        raise SettingsError(f"{named('answer_format')} must be {AUTO} or one of {', '.join(FORMATS)}, got {name!r}")


class ModelAnswers:
    """The format of one model's answers."""

    def __init__(self, tokenizer: Tokenizer, name: str = AUTO) -> None:
        """Take the format of this name, or find it from chat template and vocabulary.

        Raises: SettingsError for an unknown name.
        """
        check_format_name(name)
        self.template = ""
        with contextlib.suppress(ValueError):  # there is none
            # A model may have a separate template for tools; any list makes the tokenizer choose it.
            self.template = tokenizer.get_chat_template(tools=[{}])
        self.knows_tools = has_tools(self.template)
        form = find_format(self.template, tokenizer.get_vocab()) if name == AUTO else FORMATS[name]
        self.is_known = form is not None
        self.form = form or FORMATS[NONE]
        is_silent = self.form.thoughts is not None and self.form.thoughts[1].strip() not in self.template
        if name == AUTO and is_silent and not self.form.thinks_unsaid:
            self.form = dataclasses.replace(self.form, thoughts=None)  # the model does not think
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._added = {token.content: token_id for token_id, token in added if _MARK.fullmatch(token.content)}
        if not self.is_known:
            logger.warning(
                "the chat template is of no family that is known here: answers are given as one text, and requests "
                "with tools are refused; --answer-format names the format"
            )

    def view(self, prompt_ids: Sequence[int], tools: Tools | None = None, **how: Any) -> AnswerView:
        """Return how an answer behind a prompt is read.

        Args:
            tools: functions that may be called; without any, the marks of calls are nothing special.
            how: further fields of the view.
        """
        form = self.form if tools else dataclasses.replace(self.form, calls=None)
        text = " ".join(texts_of(form))
        names = [token for token in self._added if token in text]
        chars = {token: chr(_FIRST_MARK + idx) for idx, token in enumerate(sorted(names, key=len, reverse=True))}
        return AnswerView(
            form=_in_place(form, chars),
            token_marks={self._added[token]: char for token, char in chars.items()},
            names={char: token for token, char in chars.items()},
            starts_in=self.part_begun(prompt_ids),
            tools=tools or {},
            **how,
        )

    def has_parts(self, tools: Tools | None = None) -> bool:
        """Return whether an answer can be anything but content, if these functions may be called."""
        return bool(self.form.thoughts or self.form.turns or (tools and self.form.calls))

    def part_begun(self, prompt_ids: Sequence[int]) -> Part | None:
        """Return the part that a prompt begins for the answer; None if it leaves that to the answer."""
        if self.form.thoughts is None:
            return None
        opening, closing = (mark.strip() for mark in self.form.thoughts)
        end = self._tokenizer.decode(prompt_ids[-_MOST_PROMPT_IDS:]).rstrip()
        if end.endswith(opening):
            return "thoughts"
        begins_content = tuple(mark for mark, part in self.form.turns if part == "content")
        return "content" if end.endswith((closing, *begins_content)) else None

    @property
    def writes_calls(self) -> bool:
        """True if the model's calls can be read."""
        return self.form.writes_calls

    @property
    def mark_ids(self) -> Mapping[str, int]:
        """The added tokens that are marks of the format, by text."""
        text = " ".join(texts_of(self.form))
        return {token: token_id for token, token_id in self._added.items() if token in text}


def texts_of(value: Any) -> list[str]:
    """Return all texts in a format, its name and its marks among them."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, tuple):
        return [text for one in value for text in texts_of(one)]
    if dataclasses.is_dataclass(value):
        return [text for field in dataclasses.fields(value) for text in texts_of(getattr(value, field.name))]
    return []


def _in_place(value: T, chars: Mapping[str, str]) -> T:
    """Return a format whose texts have characters in place of tokens."""
    made: Any = value
    if isinstance(value, str):
        for token, char in chars.items():
            made = made.replace(token, char)
    elif isinstance(value, tuple):
        made = tuple(_in_place(one, chars) for one in value)
    elif dataclasses.is_dataclass(value):
        changes = {field.name: _in_place(getattr(value, field.name), chars) for field in dataclasses.fields(value)}
        made = dataclasses.replace(made, **changes)
    return made  # type: ignore[no-any-return]
