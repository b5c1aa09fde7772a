"""What a worker of a peer speaks: one JSON object a line, a question on standard input, its answer on standard output.

This side runs inside the peer's own environment, so it needs nothing but the standard library. Whatever the peer's
library prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """One prompt decoded once."""

    token_ids: list[int]  # up to and with the end token, if there was one
    prefill_s: float  # to the first token
    decode_s: float  # from the first token to the last
    decode_tokens: int  # tokens that came in that time
    accepted: int | None = None  # of them, proposed by a draft and kept; None where the engine does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Several prompts decoded at once."""

    token_ids: list[list[int]]  # in the order of the prompts
    wall_s: float  # from the first submission to the last token


class Peer(Protocol):
    """An engine behind the protocol."""

    def load(self, job: dict[str, Any]) -> dict[str, Any]:
        """Take what is to be run and return facts, the version among them. See `catalog.Job`."""

    def prepare(self, method: str, option: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
        """Bring up a method with an option and return its settings."""

    def generate(self, method: str, option: dict[str, Any], prompt_ids: list[int], max_tokens: int) -> Decoded:
        """Decode one prompt greedily."""

    def generate_many(
        self, method: str, option: dict[str, Any], prompts: list[list[int]], max_tokens: int, at_once: int
    ) -> Batch:
        """Decode several prompts greedily, so many of them at once."""

    def release(self, method: str, option: dict[str, Any]) -> None:
        """Let go of what `prepare` brought up."""

    def close(self) -> None:
        """End whatever was started."""


def up_to_end(token_ids: Sequence[int], end_ids: Sequence[int]) -> list[int]:
    """Return the tokens up to and with the first end token."""
    length = next((i + 1 for i, token_id in enumerate(token_ids) if token_id in end_ids), len(token_ids))
    return list(token_ids[:length])


def serve(peer: Peer) -> None:
    """Answer questions until standard input ends or `close` is asked for. An error is an answer, too."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # native code prints as well
    sys.stdout = sys.stderr
    try:
        for line in sys.stdin:
            question = json.loads(line)
            operation = question.pop("do")
            if operation == "close":
                break
            try:
                answer = _answer(peer, operation, question)
            except Exception as error:  # any failure of a peer's library belongs to the parent, which reports it
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        peer.close()


def _answer(peer: Peer, operation: str, question: dict[str, Any]) -> dict[str, Any]:
    if operation == "load":
        return peer.load(question)
    if operation == "prepare":
        return peer.prepare(**question)
    if operation == "generate":
        return asdict(peer.generate(**question))
    if operation == "generate_many":
        return asdict(peer.generate_many(**question))
    if operation == "release":
        peer.release(**question)
        return {}
    raise ValueError(f"unknown operation {operation!r}")
