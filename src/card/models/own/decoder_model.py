"""The weights of a decoder of a known architecture, read without transformers' modelling code.

That code takes a second or more to import, and a decoder with a pass of our own (`card.models.own.reasons`) uses none.
A model that is unusual in any way is left to transformers: `read_decoder` then returns None.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from card.models.architectures import Architecture, find_architecture
from card.models.architectures.architecture import (
    ACTIVATIONS,
    SPLITS,
    DecoderConfig,
    rotary_parameters,
    rotary_size,
    sizes_of,
)
from card.models.files.generation_config import GenerationConfig, read_generation_config
from card.models.files.mapped_weights import MappedWeights
from card.models.files.scaled_weights import find_scaled, say_scaled, unquantized
from card.models.files.weight_files import raw_config, weight_files
from card.models.layer_kinds import WITH_WINDOW
from card.models.own.block_layers import BlockEmbedding, BlockLinear, BlockWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROPE_TYPES = ("default", "linear", "llama3")
_STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_UNUSUAL = frozenset({"quantization_config", "auto_map", "text_config"})  # fields of what is not built here
_PARTIAL = "partial_rotary_factor"
_STATED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
_OLD_ANGLES = ".rotary_emb.inv_freq"  # which files of Llama 2 hold; they are computed


class DecoderModel(nn.Module):
    """A model of a known architecture under transformers' names: weights and config, without a forward pass."""

    def __init__(
        self,
        architecture: Architecture,
        config: PreTrainedConfig,
        generation_config: GenerationConfig,
        weights: Mapping[str, Tensor | BlockWeight],
    ) -> None:
        """Take over the weights, all of one dtype on one device; or those of blocks, and others beside them.

        Args:
            weights: by transformers' names. Blocks of embeddings are rows, and the head is a weight of its own then.
        Raises: KeyError, ValueError if they are not those that the architecture and the config ask for.
        """
        super().__init__()
        self.architecture = architecture
        self.config = config
        self.generation_config = generation_config
        self.pages: tuple[MappedWeights, ...] = ()  # the memory that they are mapped to
        sizes: Any = config
        source = _FileWeights(weights)
        table = source.take("model.embed_tokens.weight", sizes.vocab_size, sizes.hidden_size)
        layers = [source.layer(f"model.layers.{idx}.", architecture, config) for idx in range(sizes.num_hidden_layers)]
        self.model = nn.Module()
        self.model.embed_tokens = _embedding_of(table, is_tied=config.tie_word_embeddings)
        self.model.layers = nn.ModuleList(layers)
        self.model.norm = _Norm(source.take("model.norm.weight", sizes.hidden_size))
        self.model.rotary_emb = RotaryEmbedding(config)
        is_shared = config.tie_word_embeddings and not isinstance(table, BlockWeight)
        head = table if is_shared else source.take("lm_head.weight", *table.shape)
        self.lm_head = linear_of(head)
        source.check_empty()

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._norm_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights; of those that are no blocks."""
        return self._norm_weight.dtype

    @property
    def _norm_weight(self) -> Tensor:
        return cast(_Norm, self.model.norm).weight

    def get_input_embeddings(self) -> nn.Embedding | BlockEmbedding:
        """Return the embeddings of the tokens."""
        return cast(nn.Embedding, self.model.embed_tokens)


class _FileWeights:
    """The weights of a file, of which each is source once."""

    def __init__(self, weights: Mapping[str, Tensor | BlockWeight]) -> None:
        self._weights = dict(weights)

    def take(self, name: str, *shape: int) -> nn.Parameter | BlockWeight:
        weight = self._weights.pop(name)
        if tuple(weight.shape) != shape:
            raise ValueError(f"{name} has shape {list(weight.shape)}, the config asks for {list(shape)}")
        return weight if isinstance(weight, BlockWeight) else nn.Parameter(weight, requires_grad=False)

    def layer(self, prefix: str, architecture: Architecture, config: PreTrainedConfig) -> nn.Module:
        """Return the parts of a layer under their names, each in its block."""
        layer, sizes = nn.Module(), sizes_of(config)
        layer.self_attn, layer.mlp = nn.Module(), nn.Module()
        for part in architecture.parts:
            name, shape = prefix + part.name, [sizes[size] for size in part.shape]
            weight = self.take(f"{name}.weight", *shape)
            has_bias = architecture.has_bias(part, config)
            bias = cast(nn.Parameter, self.take(f"{name}.bias", shape[0])) if has_bias else None
            block, _, last = part.name.rpartition(".")
            module = linear_of(weight, bias) if len(shape) > 1 else _Norm(weight)
            layer.get_submodule(block).add_module(last, module)
        return layer

    def check_empty(self) -> None:
        if self._weights:
            raise ValueError(f"the config asks for no {next(iter(self._weights))}")


class _Norm(nn.Module):
    def __init__(self, weight: nn.Parameter | BlockWeight) -> None:
        super().__init__()
        self.weight = cast(nn.Parameter, weight)  # no file has norms in blocks


def _embedding_of(weight: nn.Parameter | BlockWeight, *, is_tied: bool) -> nn.Module:
    """Return embeddings with these weights; ``is_tied`` if the head is made of them too."""
    if isinstance(weight, BlockWeight):
        return BlockEmbedding(weight, is_tied=is_tied)
    embedding = nn.Embedding(1, 1)
    embedding.num_embeddings, embedding.embedding_dim = weight.shape
    embedding.weight = weight
    return embedding


def linear_of(weight: nn.Parameter | BlockWeight, bias: nn.Parameter | None = None) -> nn.Linear | BlockLinear:
    """Return a layer with these weights [out, in]; one made at full size would first be filled at random."""
    if isinstance(weight, BlockWeight):
        return BlockLinear(weight, bias)
    layer = nn.Linear(1, 1, bias=bias is not None)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = weight
    if bias is not None:
        layer.bias = bias
    return layer


class Linears(NamedTuple):
    """The linear layers of a decoder layer."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear


def linears_of(layer: nn.Module, architecture: Architecture, config: Any) -> Linears:
    """Return the linear layers of a layer; those that are stored as one are views of it, or copies if it is blocks."""
    found: list[nn.Linear] = []
    sizes = sizes_of(config)
    for part in architecture.linears:
        whole: Any = layer.get_submodule(part.name)
        if part.shape[0] not in SPLITS:
            found.append(whole)
            continue
        rows = [sizes[size] for size in SPLITS[part.shape[0]]]
        if isinstance(whole, BlockLinear):
            found += [
                cast(nn.Linear, whole.select(channels)) for channels in torch.split(torch.arange(sum(rows)), rows)
            ]
            continue
        biases = [None] * len(rows) if whole.bias is None else whole.bias.detach().split(rows)
        for weight, bias in zip(whole.weight.detach().split(rows), biases, strict=True):
            parameters = [None if one is None else nn.Parameter(one, requires_grad=False) for one in (weight, bias)]
            found.append(cast(nn.Linear, linear_of(cast(nn.Parameter, parameters[0]), parameters[1])))
    return Linears(*found)


class RotaryEmbedding(nn.Module):
    """Angles of the positions; computed as transformers' models do, so that the bits are theirs."""

    def __init__(self, config: Any) -> None:
        """Take the settings of a config."""
        super().__init__()
        self._scaling: dict[str, float] = {}
        for kind, rope in rotary_parameters(config).items():
            if rope["rope_type"] == "default":
                size = rotary_size(config, kind)
                steps = torch.arange(0, size, 2, dtype=torch.float) / size
                inv_freq, self._scaling[kind] = 1.0 / (rope["rope_theta"] ** steps), 1.0
            else:
                of_kind = {"layer_type": kind} if kind else {}
                make = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
                inv_freq, self._scaling[kind] = make(config, torch.device("cpu"), **of_kind)
            self.register_buffer(f"inv_freq{kind}", inv_freq, persistent=False)

    def forward(self, like: Tensor, positions: Tensor, kind: str = "") -> tuple[Tensor, Tensor]:
        """Return cos and sin [..., T, D] of positions [..., T], in the dtype and on the device of ``like``."""
        inv_freq = self.get_buffer(f"inv_freq{kind}")
        angles = positions[..., None].float() * inv_freq.to(device=like.device, dtype=torch.float)
        both = torch.cat((angles, angles), dim=-1)
        cos, sin = both.cos() * self._scaling[kind], both.sin() * self._scaling[kind]
        return cos.to(like.dtype), sin.to(like.dtype)


if TYPE_CHECKING:
    LoadedModel = DecoderModel | PreTrainedModel

_INT8_MARK = "computes_int8"


def mark_int8(model: LoadedModel) -> None:
    """Let runners of this model compute in 8-bit integers; its weights stay as they are."""
    setattr(model, _INT8_MARK, True)


def is_int8(model: LoadedModel) -> bool:
    """Return whether runners of this model are to compute in 8-bit integers."""
    return getattr(model, _INT8_MARK, False)


def architecture_of(model: LoadedModel) -> Architecture | None:
    """Return what a model is made of; None if no entry of the table says it."""
    if isinstance(model, DecoderModel):
        return model.architecture
    kind, entry = type(model), find_architecture(model.config.model_type)
    is_it = entry is not None and kind.__name__ == entry.model_class
    return entry if is_it and kind.__module__.startswith("transformers.models.") else None


def pages_of(model: LoadedModel) -> tuple[MappedWeights, ...]:
    """Return the memory that weights of a model are mapped to."""
    return model.pages if isinstance(model, DecoderModel) else ()


def release_pages(model: LoadedModel) -> None:
    """Give back the memory of weights that are mapped from a file: what has been packed is rarely read again."""
    for pages in pages_of(model):
        pages.release()


def read_config(folder: Path, *, is_scaled: bool = False) -> PreTrainedConfig | None:
    """Return the config of a plain decoder; None if it cannot be read or is unusual, which transformers knows about.

    Args:
        is_scaled: its weights are made of 8-bit floats when they are read, so that they are as any others then.
    """
    raw = raw_config(folder)
    if is_scaled and isinstance(raw, dict):
        raw = unquantized(raw)
    return config_of({**raw, "_name_or_path": str(folder)}) if isinstance(raw, dict) else None


def config_of(raw: Mapping[str, Any]) -> PreTrainedConfig | None:
    """Return the config of a plain decoder from what config.json has; None if it is unusual."""
    architecture = find_architecture(raw.get("model_type"))
    if architecture is None or raw.get("architectures") != [architecture.model_class] or _UNUSUAL & raw.keys():
        return None
    if _PARTIAL in raw and not architecture.turns_parts:
        return None
    if not all(isinstance(raw.get(size), int) for size in _STATED):
        return None
    fields = copy.deepcopy(dict(raw))  # transformers writes into the settings of the rotary embedding
    del fields["model_type"]
    try:
        config = architecture.config_class(**fields)
        return config if _is_plain(config, architecture) else None
    except Exception:  # a wrong value may raise anything; transformers tells what is wrong
        return None


def read_decoder(folder: Path, *, dtype: str | torch.dtype, device: torch.device) -> DecoderModel | None:
    """Return the model in a folder; None if it is unusual: transformers then loads it, or says what is wrong.

    Args:
        dtype: a string takes what the config names.
    """
    try:
        scaled = find_scaled(folder)
    except Exception:  # as below
        return None
    config = read_config(folder, is_scaled=scaled is not None)
    architecture = None if config is None else find_architecture(config.model_type)
    if config is None or architecture is None:
        return None
    wanted = dtype if isinstance(dtype, torch.dtype) else cast(torch.dtype, config.dtype)
    try:
        files = [] if scaled is not None else [MappedWeights(file) for file in weight_files(folder)]
        stored = (
            scaled.read(wanted)
            if scaled is not None
            else {name: tensor for file in files for name, tensor in file.tensors.items()}
        )
        weights = {
            name: tensor.to(device=device, dtype=wanted)
            for name, tensor in stored.items()
            if not name.endswith(_OLD_ANGLES)
        }
        model = DecoderModel(architecture, config, read_generation_config(folder), weights)
        if scaled is not None:
            say_scaled(folder, scaled, wanted)
        elif any(tensor is stored[name] for name, tensor in weights.items()):
            model.pages = tuple(files)
    except Exception:  # safetensors and transformers' settings raise almost anything; transformers tells what is wrong
        return None
    return model.requires_grad_(False).train(False)


def _is_plain(config: DecoderConfig, architecture: Architecture) -> bool:
    """Return whether nothing in a config asks for more than is built here."""
    sizes = [config.num_key_value_heads, config.head_dim, *(getattr(config, size) for size in _STATED)]
    return (
        all(isinstance(size, int) and size > 0 for size in sizes)
        and config.num_attention_heads % cast(int, config.num_key_value_heads) == 0
        and cast(int, config.head_dim) % 2 == 0
        and config.max_position_embeddings > 0
        and getattr(config, architecture.norm_eps) > 0
        and getattr(config, architecture.activation) in ACTIVATIONS
        and config.dtype in _STORED_DTYPES
        and _has_known_layers(config, architecture)
        and isinstance(config.rope_parameters, dict)
        and set(architecture.rotary_kinds(config)) <= {None, *rotary_parameters(config)}
        and all(_is_known_rotation(one, architecture) for one in rotary_parameters(config).values())
    )


def _has_known_layers(config: DecoderConfig, architecture: Architecture) -> bool:
    """Return whether each layer attends to all tokens before it, or to those of a window that the entry knows of."""
    kinds = {"full_attention"} if config.layer_types is None else set(config.layer_types)
    if not architecture.has_windows:
        return config.sliding_window is None and kinds == {"full_attention"}
    window, has_all = config.sliding_window, config.layer_types is None
    return (
        kinds <= {"full_attention"} | WITH_WINDOW
        and (has_all or len(cast(list[str], config.layer_types)) == config.num_hidden_layers)
        and (window > 0 if window is not None else not kinds & WITH_WINDOW)
        and not getattr(config, "use_bidirectional_attention", False)
    )


def _is_known_rotation(rope: Mapping[str, Any], architecture: Architecture) -> bool:
    part = rope.get(_PARTIAL, 1.0)
    return (
        rope["rope_type"] in _ROPE_TYPES
        and isinstance(rope["rope_theta"], int | float)
        and rope["rope_theta"] > 0
        and (_PARTIAL not in rope or architecture.turns_parts)
        and isinstance(part, int | float)
        and 0 < part <= 1
    )
