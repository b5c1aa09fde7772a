"""The output of a response: its items, and the events that tell how they grow."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from card.server.tools.parser import CallArguments, CallBegun, Content, Piece
from card.server.tools.support import ToolPlan

Events = list[dict[str, Any]]


class OutputItems:
    """Puts the pieces of an answer together to items: messages of the assistant, and calls of functions."""

    def __init__(self, plan: ToolPlan) -> None:
        self._plan = plan
        self._parser = plan.parser()
        self.items: list[dict[str, Any]] = []
        self._is_open = False  # the last one may still grow

    def push(self, text: str) -> Events:
        """Add text and return the events that tell of it."""
        if self._parser is None:
            return self._take([Content(text)] if text else [])
        return self._take(self._parser.push(text))

    def finish(self, *, is_complete: bool) -> Events:
        """End the last item and return the events that tell of it. An answer without any text is an empty message."""
        events = self._take(self._parser.flush()) if self._parser is not None else []
        if not self.items:
            events += self._begin_message()
        return events + self._end("completed" if is_complete else "incomplete")

    def _take(self, pieces: Iterable[Piece]) -> Events:
        events: Events = []
        for piece in pieces:
            match piece:
                case Content(text):
                    if not self._is_open or self.items[-1]["type"] != "message":
                        events += self._end("completed") + self._begin_message()
                    part = self.items[-1]["content"][0]
                    part["text"] += text
                    events.append({**self._told("response.output_text.delta"), "delta": text, "logprobs": []})
                case CallBegun(_, name):
                    events += self._end("completed") + self._begin_call(name)
                case CallArguments(_, text):
                    self.items[-1]["arguments"] += text
                    events.append({**self._told("response.function_call_arguments.delta"), "delta": text})
        return events

    def _begin_message(self) -> Events:
        item: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        added = self._begin(item)
        item["content"].append({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        return [added, {**self._told("response.content_part.added"), "part": dict(item["content"][0])}]

    def _begin_call(self, name: str) -> Events:
        item = {
            "id": f"fc_{secrets.token_hex(12)}",
            "type": "function_call",
            "call_id": self._plan.new_call_id(),
            "name": name,
            "arguments": "",
            "status": "in_progress",
        }
        return [self._begin(item)]

    def _begin(self, item: dict[str, Any]) -> dict[str, Any]:
        self.items.append(item)
        self._is_open = True
        return self._told_of_item("response.output_item.added")

    def _end(self, status: str) -> Events:
        """End the item that is open, if there is one."""
        if not self._is_open:
            return []
        item, self._is_open = self.items[-1], False
        item["status"] = status
        events: Events = []
        if item["type"] == "message":
            part = item["content"][0]
            events.append({**self._told("response.output_text.done"), "text": part["text"], "logprobs": []})
            events.append({**self._told("response.content_part.done"), "part": dict(part)})
        else:
            told = {"name": item["name"], "arguments": item["arguments"]}
            events.append({**self._told("response.function_call_arguments.done"), **told})
        return [*events, self._told_of_item("response.output_item.done")]

    def _told(self, kind: str) -> dict[str, Any]:
        item = self.items[-1]
        told = {"type": kind, "item_id": item["id"], "output_index": len(self.items) - 1}
        return {**told, "content_index": 0} if item["type"] == "message" else told

    def _told_of_item(self, kind: str) -> dict[str, Any]:
        item = dict(self.items[-1])
        if "content" in item:
            item["content"] = [dict(part) for part in item["content"]]
        return {"type": kind, "output_index": len(self.items) - 1, "item": item}
