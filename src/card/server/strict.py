"""The base of all bodies that clients may send: which fields it knows, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Tag,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError


class Ignored:
    """Names of the fields of one body that nothing reads."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def note(self, name: str) -> None:
        """Take the name of a field that is left aside."""
        if len(self.names) < _MOST_NAMES and name not in self.names:
            self.names.append(name)


_MOST_NAMES = 16  # that an answer lists


def _is_among(value: object, allowed: Iterable[object]) -> bool:
    """Return whether a value is one of these; false is no 0."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


class Strict(BaseModel):
    """Refuses values of another type, and unknown fields, unless they are null or the context ignores them."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    changing: ClassVar[Mapping[str, tuple[object, ...]]] = {}  # unknown fields that matter, and values that do not
    _known: ClassVar[frozenset[str]] = frozenset()  # names of the fields as clients write them
    spelling: ClassVar[Mapping[str, str]] = {}  # fields by the names that errors know them under, where these differ

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls._known = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any, info: ValidationInfo) -> Any:
        """Treat a field that is null as absent: clients send back fields of answers.

        Unknown fields are left out if the context says so, an `Ignored`. Else the first one stays and is refused; more
        of them would only add errors.
        """
        if not isinstance(value, dict):
            return value
        given = {name: one for name, one in value.items() if one is not None}
        if given.keys() <= cls._known:
            return given
        refused = [name for name in given if name not in cls._known]
        if isinstance(info.context, Ignored):
            changing = [
                name for name in refused if name in cls.changing and not _is_among(given[name], cls.changing[name])
            ]
            for name in refused:
                if name not in changing:
                    info.context.note(name)
            refused = changing
        return {name: one for name, one in given.items() if name in cls._known or name in refused[:1]}


def takes(words: str) -> WrapValidator:
    """Report every error in a field's value with one sentence that says what is allowed."""

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"must be {words}") from None

    return WrapValidator(validate)


_WRONG_TYPE = PydanticCustomError("type", "must be function or custom")


def by_type(usual: type[Strict], custom: type[Strict]) -> WrapValidator:
    """Read an object as what its type says, so that errors are those of that body alone."""

    def validate(value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
        if isinstance(value, Strict):
            return handler(value)
        kind = value.get("type") if isinstance(value, dict) else None
        if kind is not None and kind not in ("function", "custom"):
            fault = InitErrorDetails(type=_WRONG_TYPE, loc=("type",), input=kind)
            raise ValidationError.from_exception_data("type", [fault])
        return (custom if kind == "custom" else usual).model_validate(value, context=info.context)

    return WrapValidator(validate)


_KIND = "kind "  # marks what an error's place holds for a member of a union, which no client wrote


def member(kind: str) -> Tag:
    """Return the tag of a union's member, for `by_kind`."""
    return Tag(_KIND + kind)


def by_kind(kind_of: Callable[[Any], str], name: str, expected: str) -> Discriminator:
    """Read a value as the `member` of a union that ``kind_of`` names; others get the error ``name``: ``expected``."""
    return Discriminator(lambda value: _KIND + kind_of(value), custom_error_type=name, custom_error_message=expected)


def place_of(error: Iterable[int | str]) -> str:
    """Return where in a body an error is, from the ``loc`` of pydantic, as the client wrote it: ``input.0.content``."""
    return ".".join(str(part) for part in error if not str(part).startswith(_KIND))


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
