"""The base of all that clients may send."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)


class Strict(BaseModel):
    """Refuses fields that it does not know, unless they are null, and values that must be converted first."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Count a field that is null as left out: clients send back what they were sent."""
        if isinstance(value, dict):
            return {name: one for name, one in value.items() if one is not None}
        return value


def takes(words: str) -> WrapValidator:
    """Say in these words what a field takes, whichever part of a value is not as it must be."""

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"must be {words}") from None

    return WrapValidator(validate)


def _refuse_true(value: bool) -> bool:
    if value:
        raise ValueError("is not done; leave it out, or set it to false")
    return value


NotDone = Annotated[bool, AfterValidator(_refuse_true), WithJsonSchema({"type": "boolean", "const": False})]
"""A switch that may be there as long as it is off. (`Literal[False]` would take 0 as well.)"""
