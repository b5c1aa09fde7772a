"""`GET /v1/models`, `POST /tokenize` and `POST /detokenize`; and that there are no embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from card.models.text import decode
from card.server.answers import DetokenizeAnswer, ModelAnswer, ModelsAnswer, TokenizeAnswer, json_response
from card.server.errors import ApiError, bad_request
from card.server.limits import read_body
from card.server.schemas import DetokenizeRequest, TokenizeRequest
from card.server.service import Service

_LONG_CHARS = 16_384  # of a text, or token ids: more of them hold up none that has less


async def list_models(request: Request) -> Response:
    """List the names under which the model is served."""
    service: Service = request.app.state.service
    return json_response(ModelsAnswer(data=[_model(service, name) for name in service.settings.served_model_names]))


async def show_model(request: Request) -> Response:
    """Describe one model."""
    service: Service = request.app.state.service
    return json_response(_model(service, service.check_model(request.path_params["model_name"])))


async def tokenize(request: Request) -> Response:
    """Give the token ids of a prompt, or of a conversation in the model's chat template."""
    service: Service = request.app.state.service
    fields = await read_body(request, TokenizeRequest, service.settings.max_request_bytes)
    service.check_model(fields.model)
    is_long = len(fields.prompt or "") >= _LONG_CHARS
    if fields.messages is not None:
        token_ids = list(await service.encode(service.tools.conversation(fields.messages), must_fit=False))
    elif fields.add_special_tokens and fields.prompt:
        token_ids = list(await service.encode(fields.prompt, must_fit=False))
    else:
        encode = service.tokenizer.encode
        token_ids = await service.aside.run(
            is_long, encode, fields.prompt or "", add_special_tokens=fields.add_special_tokens
        )
    names: Any = None
    if fields.return_token_strs:
        names = await service.aside.run(is_long, service.tokenizer.convert_ids_to_tokens, token_ids)
    answer = TokenizeAnswer(
        count=len(token_ids),
        max_model_len=service.llm.max_model_len,
        tokens=token_ids,
        token_strs=names,
    )
    return json_response(answer)


async def detokenize(request: Request) -> Response:
    """Give the text of token ids."""
    service: Service = request.app.state.service
    fields = await read_body(request, DetokenizeRequest, service.settings.max_request_bytes)
    service.check_model(fields.model)
    text = await service.aside.run(len(fields.tokens) >= _LONG_CHARS, _text_of, service, fields.tokens)
    return json_response(DetokenizeAnswer(prompt=text))


def _text_of(service: Service, token_ids: Sequence[int]) -> str:
    for token_id in token_ids:
        if not 0 <= token_id < service.vocab_size:
            raise bad_request(f"token ids must be from 0 to {service.vocab_size - 1}, got {token_id}", "tokens")
    return decode(service.tokenizer, token_ids)


async def embeddings(request: Request) -> Response:
    """Say that there are none. Raises: ApiError 404."""
    service: Service = request.app.state.service
    names = ", ".join(service.settings.served_model_names)
    raise ApiError(
        404,
        f"this server writes text with {names} and makes no embeddings; send them to a server of an embedding model",
        code="no_such_path",
    )


def _model(service: Service, name: str) -> ModelAnswer:
    root, length = service.llm.host.settings.target, service.llm.max_model_len
    return ModelAnswer(id=name, created=service.started_at, root=root, max_model_len=length)
