"""A way to ask: server, model, path, and the fields that switch speculation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from card.tools.verify_server.answers import ServerAnswer, read_answers
from card.tools.verify_server.client import BrokenAnswerError, Client, LostServerError, RefusedError, ServerError
from card.tools.verify_server.settings import Address, VerifySettings

Path = Literal["chat", "completions"]
_ID_FIELDS: tuple[Mapping[str, Any], ...] = ({"return_token_ids": True}, {"shows_tree": True})  # vLLM's; card serve's
_OWN_SWITCH: Mapping[str, Any] = {"speculation": "off"}
_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"  # card serve shows it too
_SHOWN_MODELS = 8


@dataclass(frozen=True, slots=True)
class ServerQuestion:
    """A question for any server."""

    turns: tuple[str, ...]  # of user and assistant in turn, the user's first and last
    fields: Mapping[str, Any] = field(default_factory=dict)

    def replace(self, **fields: Any) -> ServerQuestion:
        """Return the question with further fields."""
        return ServerQuestion(self.turns, {**self.fields, **fields})


@dataclass(slots=True)
class Side:
    """Asks one server in one way."""

    client: Client
    model: str
    path: Path
    owner: str = ""  # maker of the server, from its list of models
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of every request
    tells_ids: bool = False
    num_drafted: int | None = None  # from the answers

    async def ask(
        self, question: ServerQuestion, *, streams: bool = False, num_top: int | None = None
    ) -> list[ServerAnswer]:
        """Return the choices of the answer. Raises: ServerError.

        Args:
            num_top: ask for log-probabilities, with this many of the likeliest tokens at each place.
        """
        body: dict[str, Any] = {"model": self.model, **question.fields, **self.extra}
        if self.path == "chat":
            roles = ("user", "assistant")
            body["messages"] = [{"role": roles[idx % 2], "content": turn} for idx, turn in enumerate(question.turns)]
            if num_top is not None:
                body |= {"logprobs": True, "top_logprobs": num_top}
        else:
            body["prompt"] = "\n".join(question.turns)
            if num_top is not None:
                body["logprobs"] = num_top
        path = "/chat/completions" if self.path == "chat" else "/completions"
        if streams:
            events = await self.client.stream(path, {**body, "stream": True})
        else:
            events = [await self.client.ask(path, body)]
        try:
            answers = read_answers(events)
        except BrokenAnswerError as error:
            raise BrokenAnswerError(f"{self.client.url}{path}: {error}") from None
        if answers[0].num_drafted is not None:
            self.num_drafted = (self.num_drafted or 0) + answers[0].num_drafted
        return answers

    async def ask_one_by_one(self, questions: Sequence[ServerQuestion], **options: Any) -> list[ServerAnswer]:
        """Return the first choice of each answer, with one question in flight. Raises: ServerError."""
        return [(await self.ask(question, **options))[0] for question in questions]

    async def ask_at_once(self, questions: Sequence[ServerQuestion], most: int, **options: Any) -> list[ServerAnswer]:
        """Return the same, with up to ``most`` questions in flight. Raises: ServerError, the first one."""
        free = asyncio.Semaphore(most)

        async def ask(question: ServerQuestion) -> ServerAnswer:
            async with free:
                return (await self.ask(question, **options))[0]

        tasks = [asyncio.create_task(ask(question)) for question in questions]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # after a first error, do not wait for the others
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def num_drafted_so_far(self) -> int | None:
        """Return how many tokens the server has drafted, by its metrics or its answers; None if they do not say."""
        count = (await self.client.counters()).get(_DRAFTED)
        return self.num_drafted if count is None else int(count)


async def open_side(client: Client, address: Address, settings: VerifySettings, probe: ServerQuestion) -> Side:
    """Find out which model a server has and how it may be asked. Raises: ServerError if it cannot be used."""
    model, owner = await _model(client, address.model)
    paths: tuple[Path, ...] = ("chat", "completions") if settings.api == "auto" else (settings.api,)
    refusal: RefusedError | None = None
    for path in paths:
        side = Side(client, model, path, owner)
        try:
            await side.ask(probe)
        except RefusedError as error:
            refusal = refusal or error
            continue
        await _ask_for_ids(side, probe)
        return side
    assert refusal is not None
    raise refusal


async def switched_off(side: Side, settings: VerifySettings, probe: ServerQuestion) -> Side | None:
    """Return the same server without speculation, if it has a switch. Raises: ServerError if it refuses the user's.

    A server may ignore fields that it does not know, so without a switch of the user's only known servers are tried.
    """
    switch: Mapping[str, Any] | None = settings.plain_fields
    if switch is None:
        if side.owner != "card":
            return None
        switch = _OWN_SWITCH
    plain = Side(side.client, side.model, side.path, side.owner, {**side.extra, **switch}, side.tells_ids)
    await plain.ask(probe)
    return plain


async def _model(client: Client, wanted: str | None) -> tuple[str, str]:
    try:
        listed = (await client.ask("/models")).get("data")
    except RefusedError as error:
        if wanted is None:
            raise LostServerError(f"{error}; is this the address of OpenAI's API? If so, name the model") from None
        return wanted, ""
    entries = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    owners = {str(one["id"]): str(one.get("owned_by", "")) for one in entries if isinstance(one.get("id"), str)}
    if wanted is None:
        if not owners:
            raise LostServerError(f"{client.url}/models lists no models; name the model")
        return next(iter(owners.items()))
    if owners and wanted not in owners:
        names = ", ".join(list(owners)[:_SHOWN_MODELS])
        raise LostServerError(f"{client.url} has no model {wanted!r}; it has: {names}")
    return wanted, owners.get(wanted, "")


async def _ask_for_ids(side: Side, probe: ServerQuestion) -> None:
    """Request token ids with every answer, if the server has them."""
    before = side.extra
    for fields in _ID_FIELDS:
        side.extra = {**before, **fields}
        try:
            (answer, *_) = await side.ask(probe)
        except LostServerError:
            raise
        except ServerError:
            continue
        if answer.token_ids:
            side.tells_ids = True
            return
    side.extra = before
