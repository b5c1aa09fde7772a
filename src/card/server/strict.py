"""The base of all bodies that clients may send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)


class Strict(BaseModel):
    """Refuses unknown fields, unless they are null, and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    _known: ClassVar[frozenset[str]] = frozenset()  # names of the fields as clients write them
    spelling: ClassVar[Mapping[str, str]] = {}  # fields by the names that errors know them under, where these differ

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls._known = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Treat a field that is null as absent: clients send back fields of answers.

        The first unknown field stays and is refused; more of them would only add errors.
        """
        if not isinstance(value, dict):
            return value
        given = {name: one for name, one in value.items() if one is not None}
        if given.keys() <= cls._known:
            return given
        first = next(name for name in given if name not in cls._known)
        return {name: one for name, one in given.items() if name in cls._known or name == first}


def takes(words: str) -> WrapValidator:
    """Report every error in a field's value with one sentence that says what is allowed."""

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"must be {words}") from None

    return WrapValidator(validate)


def at_most(count: int) -> BeforeValidator:
    """Refuse an object with more than ``count`` names before its values are read."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"may have at most {count} names, got {len(value)}")
        return value

    return BeforeValidator(check)


def _refuse_true(value: bool) -> bool:
    if value:
        raise ValueError("is not supported; leave it out, or set it to false")
    return value


NotDone = Annotated[bool, AfterValidator(_refuse_true), WithJsonSchema({"type": "boolean", "const": False})]
"""A switch that may only be off. (`Literal[False]` would accept 0 as well.)"""
