"""The config of a decoder: what config.json states, and what follows from it, under transformers' names."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Self

from card.kernels.number_types import dtype_name

_KINDS_WITH_CONTEXT = ("llama3", "yarn", "longrope")  # of angles, whose settings name the context of the first training
_TABLE = Path(__file__).with_name("config_defaults.json")  # made by scripts/make_config_defaults.py
_THETA, _PART = "rope_theta", "partial_rotary_factor"
_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "dict": dict, "list": list, "None": NoneType}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRule:
    """The rule by which the configs of an architecture are read: what no table of defaults can say."""

    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that the table lacks
    filled: Mapping[str, Any] = field(default_factory=dict)  # what fields have in the place of null
    older_names: Mapping[str, str] = field(default_factory=dict)  # other names of fields in published files
    width: str = "intermediate_size"  # the field with the width of the MLPs, which must be stated
    window_period: int = 0  # all but every such layer have a window, unless kinds are stated; 0: no rule
    period_name: str | None = None  # an older field that states another period
    window_switch: str | None = None  # the field without which a stated window counts for nothing
    turned_part: float | None = None  # share of a head that turns if none is stated
    turned_by: str | None = None  # an older field with how many channels of a head turn
    bases: Mapping[str, str] = field(default_factory=dict)  # older fields with bases of angles, by kind of layer
    angles: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = None  # in place of `DecoderConfig.state_angles`
    complete: Callable[[Any, dict[str, Any]], object] = lambda config, others: None
    """Fills in fields before all else, by what is stated besides."""


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The fields of the configs of a ``model_type``."""

    defaults: Mapping[str, Any]  # what each has where config.json states none
    types: Mapping[str, str]  # as annotations state them
    theta: Any  # the base of the angles; by "global" and "local" where those of windows have another one


class DecoderConfig:
    """The fields that all configs have, with Llama's values where an architecture states no others.

    A test compares these with transformers' own classes, field by field. What is stated besides becomes an attribute
    too. Raises: TypeError if a value is of another type than the field; almost anything, if one makes no sense.
    """

    model_type: str

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int | list[int] = 11008  # of all layers, or of each of them, as the next ones
    num_hidden_layers: int = 32
    num_attention_heads: int | list[int] = 32
    num_key_value_heads: int | list[int] | None = None
    max_position_embeddings: int = 2048
    head_dim: int | list[int] | None = None
    hidden_act: str = "silu"
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_dropout: int | float | None = 0.0
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    architectures: list[str] | None = None
    dtype: str | None = None  # of the weights as they are stored

    def __init__(self, model_type: str, rule: ConfigRule, /, **stated: Any) -> None:
        """Take what config.json states, but for its ``model_type``."""
        fields = fields_of(model_type, rule.defaults)
        self.model_type, self._theta = model_type, fields.theta
        if "torch_dtype" in stated:
            stated.setdefault("dtype", stated.pop("torch_dtype"))
        for name, older in rule.older_names.items():
            if older in stated:
                stated[name] = stated.pop(older)
        for name, default in fields.defaults.items():
            setattr(self, name, stated.pop(name, copy.deepcopy(default)))
        for name, default in rule.filled.items():
            if getattr(self, name) is None:
                setattr(self, name, copy.deepcopy(default))
        for name, older in rule.older_names.items():
            setattr(self, older, getattr(self, name))
        self._complete(rule, stated)
        for name, types in fields.types.items():
            if not _is_of(getattr(self, name), types):
                raise TypeError(f"its {name} is {str(getattr(self, name))[:40]}, it must be of type {types}")

    def _complete(self, rule: ConfigRule, others: dict[str, Any]) -> None:
        """Fill in what follows from other fields, and read the older names of the angles' settings."""
        rule.complete(self, others)
        if rule.window_switch is not None and not getattr(self, rule.window_switch):
            self.sliding_window = None
        if rule.window_period:
            self.give_windows(others.get(rule.period_name or "", rule.window_period))
        if self.head_dim is None:
            heads = self.num_attention_heads
            width = self.hidden_size
            self.head_dim = width // heads if isinstance(heads, int) else [width // one for one in heads]
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.dtype is not None:
            self.dtype = dtype_name(self.dtype)
        if rule.turned_by is not None and (turned := others.get(rule.turned_by)) is not None:
            others.setdefault(_PART, turned / self.head_dim)
        if rule.turned_part is not None:
            others.setdefault(_PART, rule.turned_part)
        if rule.bases:
            left = self._nest_angles(others, rule.bases)
        else:
            left = self.state_angles(others) if rule.angles is None else rule.angles(self, others)
        for name, value in left.items():
            setattr(self, name, value)

    def get_text_config(self) -> Self:
        """Return the config of the text model, which this is."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, as config.json has them."""
        return copy.deepcopy({name: value for name, value in vars(self).items() if not name.startswith("_")})

    def state_angles(self, others: dict[str, Any]) -> dict[str, Any]:
        """State the angles under their own field; returns what is left of the older fields."""
        self.rope_parameters = others.pop("rope_scaling", None) or self.rope_parameters or {}
        stated = {_THETA: others.pop(_THETA, self._theta)}
        if (part := others.pop(_PART, None)) is not None:
            stated[_PART] = part
        for one in self._rotations():
            for name, value in stated.items():
                one.setdefault(name, value)
        self.complete_angles()
        return others

    def complete_angles(self) -> None:
        """Name the type of the angles, and the length that they are scaled from."""
        for one in self._rotations():
            one.setdefault("rope_type", one.get("type", "default"))
            if one["rope_type"] in _KINDS_WITH_CONTEXT:
                length = getattr(self, "original_max_position_embeddings", None)
                if length is not None:
                    one["original_max_position_embeddings"] = length
                one.setdefault("original_max_position_embeddings", self.max_position_embeddings)

    def _rotations(self) -> list[dict[str, Any]]:
        """Return the settings of the angles: one for all layers, or one for each kind of them."""
        stated = {} if self.rope_parameters is None else self.rope_parameters
        nested = [stated[kind] for kind in stated if kind in (self.layer_types or ())]
        return [one for one in nested if one is not None] or [stated]

    def give_windows(self, period: int) -> None:
        """Give a window to all layers but each ``period``-th one, unless the kinds of the layers are stated."""
        self.give_kinds("sliding_attention", period)

    def give_kinds(self, kind: str, period: int) -> None:
        """Make all layers but each ``period``-th one of this kind, unless their kinds are stated."""
        if self.layer_types is None:
            layers = range(1, self.num_hidden_layers + 1)
            self.layer_types = [kind if layer % period else "full_attention" for layer in layers]

    def _nest_angles(self, others: dict[str, Any], bases: Mapping[str, str]) -> dict[str, Any]:
        """State the angles of each kind of layer; only layers without a window have them scaled.

        Args:
            others: older fields, those of the angles among them.
            bases: by kind, the older field with the base.
        Returns: what is left of the older fields.
        """
        scaling, stated = others.pop("rope_scaling", None), self.rope_parameters
        nested = {kind: dict((stated or {}).get(kind) or {"rope_type": "default"}) for kind in bases}
        if scaling is not None:
            nested["full_attention"].update(scaling)
        for kind, older in bases.items():
            nested[kind].setdefault(_THETA, others.pop(older, self._base_of(kind)))
        self.rope_parameters = nested
        self.complete_angles()
        return others

    def _base_of(self, kind: str) -> Any:
        """Return the base of the angles of a kind of layer if none is stated."""
        if not isinstance(self._theta, Mapping):
            return self._theta
        return self._theta["global" if kind == "full_attention" else "local"]


_COMMON = {name: types for name, types in DecoderConfig.__annotations__.items() if hasattr(DecoderConfig, name)}


def fields_of(model_type: str, stated: Mapping[str, Any]) -> ConfigFields:
    """Return the fields of the configs of a ``model_type``.

    Args:
        stated: values of fields in place of those of the table; what has none there may have any type.
    """
    entry = _table().get(model_type, {})
    own_fields: Mapping[str, Mapping[str, Any]] = entry.get("own", {})  # by type
    defaults = {name: getattr(DecoderConfig, name) for name in _COMMON} | entry.get("common", {})
    types = {**_COMMON, **{name: kind for kind, names in own_fields.items() for name in names}}
    defaults |= {name: value for names in own_fields.values() for name, value in names.items()} | {**stated}
    theta = defaults.pop(_THETA, 10_000.0)
    return ConfigFields(defaults, types, theta)


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(_TABLE.read_text("utf-8"))
    return table


def _is_of(value: object, types: str) -> bool:
    """Return whether a value is of one of these types, as an annotation states them; a truth is no number."""
    return any(_is_of_one(value, name) for name in types.split(" | "))


def _is_of_one(value: object, name: str) -> bool:
    kind, _, inner = name.removesuffix("]").partition("[")
    if isinstance(value, list) and inner:
        return kind == "list" and all(_is_of_one(one, inner) for one in value)
    return isinstance(value, _TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))
