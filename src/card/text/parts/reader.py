"""An answer's parts, read from its text while it is written, however it is split into pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from card.text.parts.answer_format import AnswerFormat, Part
from card.text.parts.calls import Calls, JsonCalls, read_objects
from card.text.parts.pieces import CallArguments, Content, Piece, Thoughts, Tools, joined
from card.text.parts.source import NoCallError, Reading, Source

_MOST_AT_ONCE = 2048  # characters: what is read is cut off what has come, so that must stay short
_FENCES = ("```json", "```")
_SURROGATE = re.compile("[\ud800-\udfff]")


class AnswerReader:
    """Turns the text of one answer into thoughts, content and calls.

    The result does not depend on how the text is split. No piece holds a part of a mark. White space around parts is
    dropped. Text that begins like a call, but names no offered function, is content. A call without marks counts
    only at the beginning of the content, or behind another one.
    """

    def __init__(
        self,
        form: AnswerFormat,
        tools: Tools | None = None,
        *,
        starts_in: Part | None = None,
        takes_bare: bool = True,
        has_content: bool = True,
        most_calls: int | None = None,
        shown: Callable[[str], str] = str,
    ) -> None:
        """Begin.

        Args:
            tools: functions that may be called; None or none at all: there are no calls.
            starts_in: the part that the prompt has begun; None: as the format says.
            takes_bare: a call may lack its marks, as some models leave them out.
            has_content: False if a grammar allows only calls; the beginning of one is not content then.
            most_calls: what follows so many calls is left out.
            shown: returns the text of marks that turn out to be content, or part of an argument.
        """
        self._form, self._shown, self._most_calls = form, shown, most_calls
        self._takes_bare, self._has_content = takes_bare, has_content
        self._source = Source()
        self._pieces: list[Piece] = []
        self._space = ""  # at the end of a part so far
        self._may_be_bare = True  # the content may begin with a call that lacks its marks
        self._is_fresh = True  # the part has no text yet
        self._has_turned = False  # a mark has begun a part, which may have had no text
        self._given: set[type] = set()  # kinds of parts that have text
        self.part: Part = starts_in or form.starts_in
        self._begins_anew = starts_in is None  # thoughts may come first
        self._calls = Calls(tools or {}, self._give)
        self._marks: dict[str, Part] = dict(form.turns)
        self._reading = self._read()
        next(self._reading)

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._calls.num_calls

    @property
    def is_thinking(self) -> bool:
        """True within thoughts, and where they may have begun."""
        return self.part == "thoughts" or self._may_begin_thoughts()

    @property
    def is_outside(self) -> bool:
        """True within thoughts and between the parts."""
        return self.part in ("header", "between") or self.is_thinking

    def push(self, text: str) -> list[Piece]:
        """Add text and return the pieces that are certain now."""
        for start in range(0, len(text), _MOST_AT_ONCE):
            self._source.text += text[start : start + _MOST_AT_ONCE]
            self._go_on()
        pieces, self._pieces = self._pieces, []
        return joined(pieces)

    def flush(self) -> list[Piece]:
        """Return the rest, after the last text."""
        self._source.is_over = True
        self._go_on()
        return self.push("")

    def _go_on(self) -> None:
        try:
            next(self._reading)
        except StopIteration:
            self._source.text = ""

    def _may_begin_thoughts(self) -> bool:
        text, thoughts = self._source.text.lstrip(), self._form.thoughts
        return bool(text and thoughts and self._begins_anew and thoughts[0].startswith(text))

    # ---- the parts, each read to its end ----------------------------------------------------------------------------

    def _read(self) -> Reading[None]:
        yield  # until there is text
        source = self._source
        if self._form.begun and not (yield from self._read_begun()):
            return
        if self._begins_anew and self._form.thoughts is not None:
            yield from self._read_beginning(self._form.thoughts)
        self._begins_anew = False
        while source.text or (yield from source.more()):
            if self.part == "thoughts":
                yield from self._read_thoughts()
            elif self.part == "content":
                if not (yield from self._read_content()):
                    return
            elif self.part == "header":
                yield from self._read_header()
            else:
                self._turn((yield from source.until([*self._marks], lambda _: None)))
        if self.part == "content":
            self._add(self._space, is_last=True)

    def _read_begun(self) -> Reading[bool]:
        """Read what follows a mark that the prompt ends with. Returns: False if the rest does not count."""
        source, begun, syntax = self._source, self._form.begun, self._form.calls
        rests = {mark.removeprefix(begun): part for mark, part in self._form.turns if mark.startswith(begun)}
        if (reached := (yield from source.takes(*rests))) is not None:
            self._turn_to(rests[reached])
        elif syntax is not None and syntax.marker == begun and self._calls.tools:
            yield from self._try("", syntax.read(source, self._calls))
        return self.num_calls == 0 or self.num_calls != self._most_calls

    def _read_beginning(self, thoughts: tuple[str, str]) -> Reading[None]:
        """Read white space, and the mark before thoughts if it is there."""
        source = self._source
        space = yield from source.skip_space()
        if (yield from source.takes(thoughts[0])):
            self._turn_to("thoughts")
        elif self._form.may_skip and (yield from source.takes(thoughts[1])):
            self._turn_to("content")
        else:
            source.text = space + source.text

    def _read_thoughts(self) -> Reading[None]:
        closing = [self._form.thoughts[1]] if self._form.thoughts else []
        ends = self._form.calls_end_thoughts and self._calls.tools and self._form.calls
        calls = [ends.marker] if ends else []
        mark = yield from self._source.until([*closing, *calls, *self._marks], self._add)
        if mark is not None and mark in calls:
            self._source.text = mark + self._source.text
            self._turn_to("content")
        elif mark is not None and mark in closing:
            self._turn_to("content")
            if self._form.wrapper is not None:
                yield from self._source.skip_space()
                yield from self._source.takes(self._form.wrapper[0])
        else:
            self._turn(mark)

    def _read_content(self) -> Reading[bool]:
        """Read content up to a mark, and the calls behind it. Returns: False if the rest does not count."""
        source = self._source
        syntax = self._form.calls if self._calls.tools and self._form.header_end is None else None
        may_be_bare, self._may_be_bare = self._may_be_bare, False
        is_json = isinstance(syntax, JsonCalls) and (self._takes_bare or syntax.is_bare)
        if may_be_bare and is_json and (yield from self._read_bare(syntax)):
            self._may_be_bare = True  # another one may follow
            return self.num_calls != self._most_calls
        wrapped = self._form.wrapper is not None and Thoughts in self._given
        ends = [self._form.wrapper[1]] if self._form.wrapper and wrapped else []
        calls = [syntax.marker] if syntax is not None else []
        mark = yield from source.until([*calls, *ends, *self._marks], self._add)
        if mark is None:
            return True
        if mark in ends:
            self._space = ""
            return True
        if syntax is None or mark != syntax.marker:
            self._turn(mark)
            return True
        if (yield from self._try(mark, syntax.read(source, self._calls))):
            if self.num_calls == self._most_calls:
                return False
            self._space = ""
            yield from source.skip_space()
        return True

    def _read_bare(self, syntax: Any) -> Reading[bool]:
        """Read calls without their marks at the beginning. Returns: whether there are any."""
        source = self._source
        before = yield from source.skip_space()
        fence = (yield from source.takes(*_FENCES)) if self._takes_bare else None
        gap = (yield from source.skip_space()) if fence else ""
        before += (fence or "") + gap
        if not (yield from source.sees("{")) or (fence and "\n" not in gap):
            source.text = before + source.text
            return False
        closing, joint = "```" if fence else syntax.closing.strip(), (syntax.joint or "").strip()
        was_read = yield from self._try(before, read_objects(source, self._calls, closing, joint, is_sure=False))
        if was_read:
            yield from source.skip_space()
        return was_read

    def _try(self, before: str, reading: Reading[None]) -> Reading[bool]:
        """Read calls; other text is content, from ``before`` on. Returns: whether there was a call."""
        source, num_calls = self._source, self.num_calls
        source.tried = before
        try:
            yield from reading
        except NoCallError:
            self._add(source.tried)
            return self.num_calls > num_calls
        return True

    def _read_header(self) -> Reading[None]:
        """Read the header of a part, which names its channel and perhaps a function; then the part begins."""
        source, end = self._source, self._form.header_end
        assert end is not None
        words: list[str] = []
        raw = ""
        while True:
            parts: list[str] = []
            mark = yield from source.until([end, *self._marks], parts.append)
            text = "".join(parts)
            raw += text + (mark or "")
            if mark is None:
                if raw == text and not self._given and not self.num_calls:  # the model does not keep to its format
                    self._turn_to("content")
                    self._add(text, is_last=True)
                return
            words += text.split()
            if mark == end:
                break
        channels = self._form.channels
        assert channels is not None
        before = channels.recipient
        name = next((word.removeprefix(before) for word in words if word.startswith(before)), "")
        if name in self._calls.tools:
            yield from self._read_message(name)
        else:
            self._turn_to("thoughts" if channels.thoughts_word in words else "content")

    def _read_message(self, name: str) -> Reading[None]:
        """Read a message to a function: a call of it as the format writes calls, or else its arguments."""
        source, syntax = self._source, self._form.calls
        if syntax is not None and self.num_calls != self._most_calls:
            self._turn_to("content")
            before = yield from source.skip_space()
            if not (yield from source.takes(syntax.marker)):
                source.text = before + source.text
                return
            if not (yield from self._try(before + syntax.marker, syntax.read(source, self._calls))):
                return
        elif self.num_calls != self._most_calls:
            self._turn_to("content")  # arguments are no thoughts
            self._calls.begin(name)
            yield from self._source.skip_space()
            if (yield from self._source.value(self._calls.add)) or self._source.text:
                self._calls.end()
        self._turn((yield from self._source.until([*self._marks], lambda _: None)))

    def _turn(self, mark: str | None) -> None:
        if mark is not None:
            self._turn_to(self._marks[mark])

    def _turn_to(self, part: Part) -> None:
        self.part, self._space, self._is_fresh, self._has_turned = part, "", True, True

    # ---- pieces -----------------------------------------------------------------------------------------------------

    def _add(self, text: str, *, is_last: bool = False) -> None:
        """Add text of the present part, but for white space at its end, which may be dropped."""
        kind = Thoughts if self.part == "thoughts" else Content
        if not is_last:
            text = self._space + text
            self._space = ""
        if self._is_fresh and (kind is Thoughts or self._drops_leading_space):
            text = text.lstrip()
        content = text if is_last else text.rstrip()
        self._space = "" if is_last else text[len(content) :]
        if not content:
            return
        if self._is_fresh and kind in self._given:
            content = "\n" + content  # a further part of the same kind
        self._is_fresh = False
        self._given.add(kind)
        if kind is Thoughts or self._has_content:
            self._pieces.append(kind(self._shown(content)))

    @property
    def _drops_leading_space(self) -> bool:
        return self._has_turned or bool(self._marks) or self.num_calls > 0

    def _give(self, piece: Piece) -> None:
        self._source.tried = ""
        if isinstance(piece, CallArguments):  # what stands for a token, or comes of half an escape, cannot be encoded
            text = _SURROGATE.sub(lambda found: json.dumps(self._shown(found[0]))[1:-1], piece.text)
            piece = CallArguments(piece.call_idx, text)
        self._pieces.append(piece)
