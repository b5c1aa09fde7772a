"""The config of a decoder: what config.json states, and what follows from it, under transformers' names."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from card.kernels.number_types import dtype_name

_KINDS_WITH_CONTEXT = ("llama3", "yarn", "longrope")  # of angles, whose settings name the context of the first training


class DecoderConfig:
    """The fields that all configs have, with Llama's values where an architecture states no others.

    A test compares these with transformers' own classes, field by field. What is stated besides becomes an attribute
    too. Raises: TypeError if a value is of another type than the field; almost anything, if one makes no sense.
    """

    model_type: ClassVar[str] = ""
    default_theta: ClassVar[Any] = 10_000.0
    older_names: ClassVar[Mapping[str, str]] = {}  # of fields that published files state under them

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

    def __init__(self, **stated: Any) -> None:
        """Take what config.json states, but for its ``model_type``."""
        if "torch_dtype" in stated:
            stated.setdefault("dtype", stated.pop("torch_dtype"))
        for name, default in self.defaults().items():
            setattr(self, name, stated.pop(name, default))
        self.__post_init__(**stated)
        for name, hint in _hints_of(type(self)).items():
            if not _is_of(getattr(self, name), hint):
                raise TypeError(f"its {name} is {str(getattr(self, name))[:40]}, it must be of type {hint}")

    def __post_init__(self, **others: Any) -> None:
        """Fill in what follows from other fields, and read the older names of the angles' settings."""
        if self.head_dim is None:
            heads = self.num_attention_heads
            width = self.hidden_size
            self.head_dim = width // heads if isinstance(heads, int) else [width // one for one in heads]
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.dtype is not None:
            self.dtype = dtype_name(self.dtype)
        for name, value in self.convert_rope_params_to_dict(**others).items():
            setattr(self, name, value)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return all fields, each with its value where config.json states none."""
        return {name: copy.deepcopy(getattr(cls, name)) for name in _hints_of(cls)}

    def get_text_config(self) -> Self:
        """Return the config of the text model, which this is."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, as config.json has them."""
        fields = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return copy.deepcopy({"model_type": self.model_type, **fields})

    def convert_rope_params_to_dict(self, **others: Any) -> dict[str, Any]:
        """State the angles under their own field; returns what is left of the older fields."""
        self.rope_parameters = others.pop("rope_scaling", None) or self.rope_parameters or {}
        stated = {"rope_theta": others.pop("rope_theta", self.default_theta)}
        if (part := others.pop("partial_rotary_factor", None)) is not None:
            stated["partial_rotary_factor"] = part
        for one in self._rotations():
            for name, value in stated.items():
                one.setdefault(name, value)
        self.standardize_rope_params()
        return others

    def standardize_rope_params(self) -> None:
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
        if self.layer_types is None:
            layers = range(1, self.num_hidden_layers + 1)
            self.layer_types = ["sliding_attention" if layer % period else "full_attention" for layer in layers]

    def nest_rotations(self, others: dict[str, Any], bases: Mapping[str, tuple[str, float]]) -> dict[str, Any]:
        """State the angles of each kind of layer; only layers without a window have them scaled.

        Args:
            others: older fields, those of the angles among them.
            bases: by kind, the older field with the base, and its default.
        Returns: what is left of the older fields.
        """
        scaling, stated = others.pop("rope_scaling", None), self.rope_parameters
        nested = {kind: dict((stated or {}).get(kind) or {"rope_type": "default"}) for kind in bases}
        if scaling is not None:
            nested["full_attention"].update(scaling)
        for kind, (older, default) in bases.items():
            nested[kind].setdefault("rope_theta", others.pop(older, default))
        self.rope_parameters = nested
        self.standardize_rope_params()
        return others


class RoutedConfig(DecoderConfig):
    """A config of a model with experts, with the fields that most of these have and no pass reads."""

    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001


def _hints_of(kind: type[DecoderConfig]) -> dict[str, Any]:
    """Return the fields of a config and their types; those of a parent class come first."""
    return {name: hint for name, hint in get_type_hints(kind).items() if get_origin(hint) is not ClassVar}


def _is_of(value: object, hint: Any) -> bool:
    """Return whether a value is of the type of a field; a truth is no number."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_is_of(value, one) for one in get_args(hint))
    if origin is list:
        return isinstance(value, list) and all(_is_of(one, get_args(hint)[0]) for one in value)
    if hint in (None, NoneType, Any):
        return hint is Any or value is None
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, origin or hint)
