"""Grammars that begin behind an answer's thoughts: what may stand before the part that a grammar is for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from card.config import Grammar
from card.text.compiling import ANSWER_RULE, GBNF_BEHIND, JSON_OPTIONS, as_answer, with_options
from card.text.parts.answer_format import AnswerFormat, Part

_TEXT_RULES = (r"HELD_TEXT: /(.|\n)*/", r"HELD_SPACE: /\s*/")


class Lead:
    """The text that may stand before the part that a grammar holds, in Lark's notation."""

    def __init__(
        self, form: AnswerFormat, mark_ids: Mapping[str, int], part: Part | None, budget: int | None = None
    ) -> None:
        """Take a format.

        Args:
            mark_ids: ids of the format's marks that are tokens; a grammar accepts no other text for them.
            part: that the prompt has begun; None: the format's first.
            budget: most tokens of thoughts; None: any number.
        """
        self._form, self._mark_ids, self._part, self._budget = form, mark_ids, part, budget
        self.rules: list[str] = []
        self.is_channelled = form.channels is not None

    @property
    def is_empty(self) -> bool:
        """True if nothing may stand before the part."""
        return not self.has_thoughts and not self.is_begun

    @property
    def has_thoughts(self) -> bool:
        """True if thoughts may stand before the part."""
        return self.is_channelled or (self._form.thoughts is not None and self._part != "content")

    @property
    def is_begun(self) -> bool:
        """True if the prompt ends with the mark that begins calls or content."""
        return bool(self._form.begun)

    def literal(self, text: str) -> str:
        """Return a text as the terms of a grammar; marks that are tokens count as those alone."""
        pieces = re.split("|".join(map(re.escape, self._mark_ids)), text) if self._mark_ids else [text]
        marks = re.findall("|".join(map(re.escape, self._mark_ids)), text) if self._mark_ids else []
        terms = [json.dumps(pieces[0])] if pieces[0] else []
        for mark, rest in zip(marks, pieces[1:], strict=True):
            terms += [f"<[{self._mark_ids[mark]}]>", *([json.dumps(rest)] if rest else [])]
        return " ".join(terms)

    def before_content(self) -> str:
        """Return the terms before the content."""
        if self._form.channels is not None:
            return f"{self._write_lead()} {self.literal(self._form.channels.content)}"
        opening = next((mark for mark, part in self._form.turns if part == "content"), "")
        if self.is_begun:
            return self.literal(opening.removeprefix(self._form.begun))
        if self._form.thoughts is None:
            return ""
        opening = opening or (self._form.wrapper or ("",))[0]
        return f"{self._write_lead()} ({self.literal(opening)})?" if opening else self._write_lead()

    def marks_in_content(self) -> list[str]:
        """Return the terms of tokens that may stand within content, or between it and calls."""
        terms = (self.literal(mark) for mark, _ in self._form.turns)
        return [term for term in terms if "<[" in term]

    def before_calls(self) -> str:
        """Return the terms before calls."""
        if self._form.channels is not None:
            return f"{self._write_lead()} {self.literal(self._form.channels.calls)}"
        if self._form.empty_content is not None:
            opening, closing = map(self.literal, self._form.empty_content)
            return f"{self._write_lead()} ({f'({opening})? ' if opening else ''}{closing})?"
        return self._write_lead()

    def _write_lead(self) -> str:
        """Return the terms of thoughts."""
        if not self.has_thoughts:
            return ""
        self.rules = list(_TEXT_RULES)
        if self._form.channels is not None:
            begin, end = self._form.channels.thoughts
            self.rules.append(f"held_lead: {self.literal(begin)} {self._text_until(end)}")
            return "held_lead*" if self._budget is None else "held_lead?"
        assert self._form.thoughts is not None
        opening, closing = self._form.thoughts
        self.rules.append(f"held_lead: {self._text_until(closing)} HELD_SPACE")
        if self._part == "thoughts":
            return "held_lead"
        skipped = f" | {self.literal(closing)} HELD_SPACE" if self._form.may_skip else ""
        return f"(HELD_SPACE {self.literal(opening)} held_lead{skipped})?"

    def _text_until(self, end: str) -> str:
        """Return the terms of thoughts and what ends them, which is a token or found as text."""
        terms = self.literal(end)
        if not terms.startswith("<["):
            self.rules.append(f"held_lazy[lazy]: HELD_TEXT {terms}")
            return "held_lazy"
        if self._budget == 0:
            return terms
        limit = "" if self._budget is None else f"[max_tokens={self._budget}]"
        self.rules.append(f"held_text{limit}: HELD_TEXT")
        return f"held_text {terms}"

    def any_text(self) -> list[str]:
        """Return the rule of the answer for any content and calls, but no thoughts, which would not be limited."""
        opening, closing = self._form.thoughts or ("", "")
        begun = re.escape(opening.strip()).replace("/", r"\/")
        rules = [rf"HELD_ANSWER: /(.|\n)*/ & ~/\s*{begun}(.|\n)*/" if begun else r"HELD_ANSWER: /(.|\n)*/"]
        around = opening + closing
        ids = sorted(token_id for mark, token_id in self._mark_ids.items() if mark not in around)
        marks = " | ".join(f"<[{token_id}]>" for token_id in ids)
        return [
            f"{ANSWER_RULE}: HELD_ANSWER (({marks}) HELD_TEXT)*" if marks else f"{ANSWER_RULE}: HELD_ANSWER",
            *rules,
        ]

    @property
    def can_be_limited(self) -> bool:
        """True if thoughts can have a budget: a token ends them."""
        return self.is_channelled or bool(
            self._form.thoughts and self.literal(self._form.thoughts[1].strip()).startswith("<[")
        )


def put_behind(lead: Lead, grammar: Grammar | None) -> Grammar | None:
    """Return a grammar that begins behind a lead; unchanged if there is none.

    Args:
        grammar: of the content; None: any text, with the marks of the format in it.
    """
    if lead.is_empty:
        return grammar
    start = f"start: {lead.before_content()} {ANSWER_RULE}"
    if grammar is not None and grammar.kind == "gbnf":
        return Grammar("gbnf", "\n".join((start, *lead.rules)) + GBNF_BEHIND + grammar.source)
    return Grammar("lark", "\n".join((start, *lead.rules, *_answer_rules(lead, grammar))))


def _answer_rules(lead: Lead, grammar: Grammar | None) -> list[str]:
    """Return the rule of the answer, and those that it needs."""
    if grammar is None:
        return lead.any_text()
    if grammar.kind == "regex":
        escaped = re.sub(r"\\.|/", lambda found: found[0] if found[0] != "/" else r"\/", grammar.source)
        return [f"{ANSWER_RULE}: /{escaped}/"]
    if grammar.kind == "lark":
        return [as_answer(grammar.source)]
    schema = with_options(json.loads(grammar.source or '{"type": "object"}'), JSON_OPTIONS)
    return [f"{ANSWER_RULE}: %json {json.dumps(schema)}"]
