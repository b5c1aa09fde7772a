"""Errors as OpenAI's clients expect them: a status, and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType

from card.config import SamplingParams
from card.errors import (
    CapacityError,
    CardError,
    ClosedError,
    GrammarError,
    PromptError,
    SettingsError,
    TargetError,
    WorkerError,
    named,
    spelled,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_PARAMS = frozenset(field.name for field in dataclasses.fields(SamplingParams))


class ApiError(CardError):
    """An error that is sent as an answer; its text is for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        is_worth_retrying: bool | None = None,
    ) -> None:
        """Make an error.

        Args:
            param: the request's wrong field.
            code: the kind of error, for programs.
            retry_after_s: seconds after which the same request may succeed.
            is_worth_retrying: a hint to OpenAI's clients; None leaves it to their own rules.
        """
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.is_worth_retrying = is_worth_retrying

    @property
    def kind(self) -> str:
        """The type of the error, by OpenAI's names."""
        return _TYPES.get(self.status, _TYPES[400] if self.status < 500 else _TYPES[500])

    def headers(self) -> dict[str, str]:
        """Return the headers that belong to the answer."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.is_worth_retrying is not None:
            headers["x-should-retry"] = str(self.is_worth_retrying).lower()
        if self.status == 408:
            headers["Connection"] = "close"  # the rest of the body may come later
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error of a request that can never succeed."""
    return ApiError(400, message, param=param, code=code)


def too_long(most: int, num_prompt: int, num_new: int = 1) -> ApiError:
    """Return the error of a prompt that does not fit, in OpenAI's words, by which gateways recognise it.

    Args:
        most: tokens that the context holds.
            num_prompt: tokens of the prompt, or its least possible number.
            num_new: new tokens requested.
    """
    name = named("prompt")
    return bad_request(
        f"This model's maximum context length is {most} tokens. However, you requested {num_prompt + num_new} tokens "
        f"({num_prompt} in the {name}, {num_new} in the completion). Please reduce the length of the {name} or "
        "completion.",
        name,
        "context_length_exceeded",
    )


def shutting_down() -> ApiError:
    """Return the error of a request that a server refuses or ends as it shuts down."""
    return ApiError(503, "the server is shutting down; ask again soon", code="shutting_down", retry_after_s=5)


def as_api_error(error: Exception, spelling: Mapping[str, str] = MappingProxyType({})) -> ApiError:
    """Return ``error`` for the client; an internal error without its details.

    Args:
        spelling: the request's fields by the names that errors know them under, where these differ.
    """
    fields = {"grammar": "response_format", **spelling}
    if isinstance(error, ApiError):
        error.args = (error.spelled(lambda name: fields.get(name, name)),)
        error.param = error.param and spelled(error.param, lambda name: fields.get(name, name))
        return error
    if isinstance(error, PromptError):
        return as_api_error(bad_request(error.args[0], param=named("prompt")), spelling)
    if isinstance(error, SettingsError):
        words = (*error.settings, *re.findall(r"\w+", str(error)))
        param = next((name for name in words if name in _PARAMS), None)
        return as_api_error(bad_request(error.args[0], param=param and named(param)), spelling)
    if isinstance(error, ClosedError):
        return shutting_down()
    if isinstance(error, WorkerError):
        return ApiError(503, str(error), code="engine_down", retry_after_s=10)
    if isinstance(error, CapacityError):
        return ApiError(503, str(error), code="no_memory", retry_after_s=5)
    if isinstance(error, GrammarError):
        return as_api_error(bad_request(error.args[0], param=named("grammar"), code="grammar_failed"), spelling)
    if isinstance(error, TargetError):
        return ApiError(500, str(error), code="model_failed")
    return ApiError(500, "the server has failed; its log has the details under this request's id", code="internal")
