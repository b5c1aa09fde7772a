"""Bodies of `POST /infill`, llama-server's path for gaps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, WithJsonSchema

from card.server.schemas import SamplingFields
from card.server.strict import Strict

_MAX_FILES = 1024
_MAX_FIELDS = 64


def _or_unbounded(value: object) -> object:
    """Read -1 and -2, which are llama-server's, as no bound."""
    return None if type(value) is int and value in (-1, -2) else value


class ExtraFile(Strict):
    """Another file of the project."""

    filename: str = ""
    text: str


class InfillRequest(SamplingFields):
    """Body of `POST /infill`."""

    spelling: ClassVar[Mapping[str, str]] = {"max_tokens": "n_predict", "prompt": "input_prefix"}

    input_prefix: str = Field("", description="the text before the gap")
    input_suffix: str = Field("", description="the text behind it")
    input_extra: list[ExtraFile] = Field(default_factory=list, max_length=_MAX_FILES, fail_fast=True)
    prompt: str = Field("", description="more of the text before the gap: the line up to the cursor")
    n_predict: Annotated[
        Annotated[int, Field(ge=0, lt=2**31)] | None,
        BeforeValidator(_or_unbounded),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31},
                    {"enum": [-1, -2]},
                    {"type": "null"},
                ]
            }
        ),
    ] = Field(None, description="0 reads the prompt, so that a later request finds it read, and writes nothing")
    response_fields: list[str] = Field(
        default_factory=list, max_length=_MAX_FIELDS, fail_fast=True, description="such as timings/prompt_ms"
    )
