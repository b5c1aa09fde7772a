"""A decoder of a known architecture as arrays: its config and its weights, as files have them.

What is unusual in any way is not read here: `read_decoder` returns None, and `card.backends.transformers` loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np

from card.errors import ModelError
from card.kernels.number_types import FLOAT32, STORED_DTYPES, Array, Dtype, Floats
from card.kernels.packed_linear import PackedLinear
from card.models.architectures import Architecture, find_architecture
from card.models.architectures.architecture import sizes_of
from card.models.files.generation_config import GenerationConfig, read_generation_config
from card.models.files.mapped_weights import MappedWeights
from card.models.files.scaled_weights import find_scaled, say_scaled
from card.models.files.weight_files import is_of_drafter, weight_files
from card.models.inner_text import inner_name
from card.models.layer_shape import DeltaHeads, LayerShape
from card.models.loaded_model import LoadedModel
from card.models.own.expert_weights import split_experts
from card.models.own.kept_experts import read_experts
from card.models.own.layer_inputs import LAYER_TABLE, layer_inputs_of
from card.models.own.layers import BlockWeight, Linear, Weight
from card.models.own.mxfp4_experts import blocks_explained, is_mxfp4, with_blocks
from card.models.own.plain_config import read_config
from card.models.own.row_inputs import RowInputs
from card.models.parts import SPLITS, ExpertPlace, Part
from card.models.rows.row_tree import IntArray

_OLD_ANGLES = ".rotary_emb.inv_freq"  # which files of Llama 2 hold; they are computed
_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

_SHARED_PLACES: tuple[ExpertPlace, ...] = ("shared_both", "shared_gate", "shared_up", "shared_down")

Angles = Callable[[int, str], tuple[Floats, Floats]]


@dataclass(slots=True, eq=False)
class DecoderLayer:
    """The parts of a layer, by transformers' names."""

    shape: LayerShape
    linears: Mapping[str, Linear]
    norms: Mapping[str, Array]
    filters: Mapping[str, Array]  # [channels, 1, taps]
    vectors: Mapping[str, Array]


class DecoderModel:
    """Weights and config of a known architecture, under transformers' names, without a forward pass."""

    device = "cpu"
    adds_heads: ClassVar[bool] = False
    """Queries, keys and values of its first layer begin from sums, which stand behind each row's input."""
    inputs: RowInputs | None = None
    """Makes its inputs of tokens and states; None: it reads tokens alone."""

    def __init__(
        self,
        architecture: Architecture,
        config: Any,
        generation_config: GenerationConfig,
        weights: Mapping[str, Weight],
        *,
        angles: Angles | None = None,
        output_ids: IntArray | None = None,
    ) -> None:
        """Take over the weights, all of one dtype; or those of blocks, and others beside them.

        Args:
            weights: by transformers' names. Blocks of embeddings are rows, and the head is a weight of its own then.
            angles: gives cosines and sines [n, channels that turn] of the first n positions for a kind of layer, where
                the type of the angles is unknown here.
            output_ids: tokens that the outputs of the head are for; None: all of them, in order.
        Raises: KeyError, ValueError if they are not those that the architecture and the config ask for.
        """
        self.architecture, self.config, self.generation_config = architecture, config, generation_config
        self.angles = angles
        self.pages: tuple[MappedWeights, ...] = ()  # the memory that they are mapped to
        self.computes_int8 = False  # its weights stay as they are, and passes make integers of them
        self.packed_head: PackedLinear | None = None  # a head that another model has packed; None: its own
        source = _FileWeights(weights)
        self.embeddings = source.take(_TABLE, config.vocab_size, config.hidden_size)
        self.layers = [source.layer(idx, architecture, config) for idx in range(config.num_hidden_layers)]
        self._norm_name = f"model.{architecture.last_norm[0]}.weight"
        self.norm = source.array(self._norm_name, config.hidden_size)
        is_shared = config.tie_word_embeddings and not isinstance(self.embeddings, BlockWeight) and output_ids is None
        num_outputs = config.vocab_size if output_ids is None else len(output_ids)
        self.output_ids = output_ids
        self.lm_head = Linear(self.embeddings if is_shared else source.take(_HEAD, num_outputs, config.hidden_size))
        self.layer_inputs = layer_inputs_of(architecture, config, source.take)  # None: tokens have embeddings alone
        source.check_empty()

    @property
    def dtype(self) -> Dtype:
        """The dtype of the weights; of those that are no blocks."""
        return self.norm.dtype

    @property
    def linears(self) -> Iterator[Linear]:
        """All linear layers, the head last."""
        for layer in self.layers:
            yield from layer.linears.values()
        if self.layer_inputs is not None:
            yield self.layer_inputs.projection
        yield self.lm_head

    @property
    def weights(self) -> Iterator[tuple[str, Weight]]:
        """All weights by name, one that is used twice once; of tied blocks the embeddings' form is left out."""
        has_rows = isinstance(self.embeddings, BlockWeight) and self.config.tie_word_embeddings
        if not has_rows:
            yield _TABLE, self.embeddings
        for idx in range(len(self.layers)):
            yield from self.weights_of(idx)
        yield from () if self.layer_inputs is None else self.layer_inputs.weights
        yield self._norm_name, self.norm
        if self.lm_head.weight is not self.embeddings:
            yield _HEAD, self.lm_head.weight

    def weights_of(self, idx: int) -> Iterator[tuple[str, Weight]]:
        """Yield the weights of a layer by name."""
        layer = self.layers[idx]
        for name, linear in layer.linears.items():
            yield f"model.layers.{idx}.{name}.weight", linear.weight
            if linear.bias is not None:
                yield f"model.layers.{idx}.{name}.bias", linear.bias
        for name, array in (*layer.norms.items(), *layer.filters.items()):
            yield f"model.layers.{idx}.{name}.weight", array
        for name, array in layer.vectors.items():
            yield f"model.layers.{idx}.{name}", array

    @property
    def tables(self) -> Iterator[tuple[str, Weight]]:
        """The weights by name of which passes read the rows of their tokens alone."""
        if self.lm_head.weight is not self.embeddings:
            yield _TABLE, self.embeddings
        if self.layer_inputs is not None:
            yield LAYER_TABLE, self.layer_inputs.table

    @property
    def ending(self) -> Iterator[tuple[str, Weight]]:
        """The last norm and the head by name; a tied head by that of the embeddings."""
        yield self._norm_name, self.norm
        yield (_TABLE if self.lm_head.weight is self.embeddings else _HEAD), self.lm_head.weight

    @property
    def has_blocks(self) -> bool:
        """Return whether some weights are blocks, which only the machine code can multiply by."""
        return isinstance(self.embeddings, BlockWeight) or any(one.has_blocks for one in self.linears)

    @property
    def num_parameters(self) -> int:
        """Number of weights; one that is used twice counts once."""
        return sum(int(weight.size) for _, weight in self.weights)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights as they are stored."""
        weights = [weight for _, weight in self.weights]
        if weights and weights[0] is not self.embeddings:
            weights.append(self.embeddings)
        return sum(int(weight.nbytes) for weight in weights)


class _FileWeights:
    """The weights of a file, each of which is taken once."""

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self._weights = dict(weights)

    def take(self, name: str, *shape: int) -> Weight:
        weight = self._weights.pop(name)
        if tuple(weight.shape) != shape:
            raise ValueError(f"{name} has shape {list(weight.shape)}, the config asks for {list(shape)}")
        return weight

    def array(self, name: str, *shape: int) -> Array:
        return cast(Array, self.take(name, *shape))  # no file has norms in blocks

    def layer(self, idx: int, architecture: Architecture, config: Any) -> DecoderLayer:
        """Return the parts of a layer under their names."""
        shape = architecture.layer_shape(config, idx)
        sizes, prefix = sizes_of(config, shape), f"model.layers.{idx}."
        linears: dict[str, Linear] = {}
        norms: dict[str, Array] = {}
        filters: dict[str, Array] = {}
        vectors: dict[str, Array] = {}
        are_vectors = set(architecture.vectors_of(shape).values())
        for part in architecture.parts_of(shape):
            name, part_sizes = prefix + part.name, [sizes[size] for size in part.shape]
            if part in are_vectors:
                vectors[part.name] = self.array(name, *part_sizes)
            elif len(part_sizes) == 1:
                norms[part.name] = self.array(f"{name}.weight", *part_sizes)
            elif part in architecture.filters:
                filters[part.name] = self.array(f"{name}.weight", *part_sizes)
            else:
                weight, has_bias = self.take(f"{name}.weight", *part_sizes), architecture.has_bias(part, config)
                linears[part.name] = Linear(weight, self.array(f"{name}.bias", part_sizes[0]) if has_bias else None)
        for part in architecture.unread(shape):
            for kind in ("weight", "bias"):
                self._weights.pop(f"{prefix}{part.name}.{kind}", None)
        return DecoderLayer(shape, linears, norms, filters, vectors)

    def check_empty(self) -> None:
        if self._weights:
            raise ValueError(f"the config asks for no {next(iter(self._weights))}")


class Mlp(NamedTuple):
    """The linear layers of an MLP, or of an expert."""

    gate: Linear
    up: Linear
    down: Linear


class ExpertLinears(NamedTuple):
    """The linear layers of a layer's experts."""

    router: Linear
    each: Sequence[Mlp]  # one that all rows take last
    shared_score: Linear | None  # [1, D]: how much of it


class Linears(NamedTuple):
    """The linear layers of a decoder layer, which has an MLP or experts; those of a convolution give B, C and u.

    Those of the delta rule give what its convolution takes in, scores of beta, scores of the decay, and as gates those
    of its output.
    """

    query: Linear
    key: Linear | None  # None: it reads the keys and values of another layer
    value: Linear | None  # None: that of the keys makes values too
    gates: Linear | None
    out: Linear
    mlp: Mlp | None
    experts: ExpertLinears | None


def linears_of(layer: DecoderLayer, architecture: Architecture, config: Any) -> Linears:
    """Return the linear layers of a layer; those that are stored as one are views of it, or copies if it is blocks."""
    sizes = sizes_of(config, layer.shape)
    parts: list[Any] = []
    for part in architecture.places_of(layer.shape):
        is_there = part.is_in(layer.shape)
        parts += _split(layer.linears[part.name], part, sizes, layer.shape.delta) if is_there else [None]
    gates: Linear | None = None
    if layer.shape.has_gates or layer.shape.mixer == "delta_rule":
        gates = parts.pop(1)
    query, key, value, out, *mlp = parts
    return Linears(query, key, value, gates, out, Mlp(*mlp) if mlp else None, _expert_linears(layer, architecture))


def _expert_linears(layer: DecoderLayer, architecture: Architecture) -> ExpertLinears | None:
    experts, linears = layer.shape.experts, layer.linears
    if experts is None:
        return None
    names = {place: part.name for place, part in architecture.expert_parts.items()}
    each = [
        Mlp(*(linears[names[place].format(expert)] for place in ("gate", "up", "down")))
        for expert in range(experts.count)
    ]
    if experts.shared_width:
        sizes = {"shared": experts.shared_width}
        shared = [architecture.expert_parts[one] for one in _SHARED_PLACES if one in architecture.expert_parts]
        each.append(Mlp(*(layer for part in shared for layer in _split(linears[part.name], part, sizes, None))))
    return ExpertLinears(
        linears[names["router"]], each, linears[names["shared_score"]] if experts.has_shared_gate else None
    )


def _split(whole: Linear, part: Part, sizes: Mapping[Any, int], delta: DeltaHeads | None) -> list[Linear]:
    """Return the layers that one is made of."""
    if part.shape[0] not in SPLITS:
        return [whole]
    if part.shape[0] == "gated_queries":  # a query and its gate, head by head
        heads = np.arange(whole.out_features).reshape(-1, 2, sizes["head"])
        return [whole.select(heads[:, half].ravel()) for half in range(2)]
    if part.shape[0] == "delta_joined":
        assert delta is not None
        *inputs, gates = delta.ungrouped(delta.joined_sizes)
        return [whole.select(np.concatenate(inputs)), whole.select(gates)]
    if part.shape[0] == "delta_scores":
        assert delta is not None
        return [whole.select(rows) for rows in delta.ungrouped([delta.num_values // delta.num_keys] * 2)]
    ends = np.cumsum([sizes[size] for size in SPLITS[part.shape[0]]]).tolist()
    rows = [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]
    if isinstance(whole.weight, BlockWeight):
        return [whole.select(np.arange(one.start, one.stop)) for one in rows]
    return [Linear(whole.weight[one], None if whole.bias is None else whole.bias[one]) for one in rows]


def is_int8(model: LoadedModel) -> bool:
    """Return whether runners of this model are to compute in 8-bit integers."""
    return bool(getattr(model, "computes_int8", False))


def release_pages(model: DecoderModel) -> None:
    """Give back the memory of weights that are mapped from a file: what has been packed is rarely read again."""
    for pages in model.pages:
        pages.release()


def read_decoder(folder: Path, *, dtype: str, cache: Path | None = None) -> DecoderModel | None:
    """Return the model in a folder; None if it is unusual: transformers then loads it, or says what is wrong.

    Args:
        dtype: "auto" takes what the config names, and leaves blocks as they are.
        cache: the folder for blocks that are packed at a first start; None keeps nothing.
    Raises: ModelError if blocks are damaged, or what stands beside them is: transformers would unpack them first.
    """
    try:
        scaled = find_scaled(folder)
    except Exception:  # as below
        return None
    config = read_config(folder, is_scaled=scaled is not None)
    architecture = None if config is None else find_architecture(config.model_type)
    if config is None or architecture is None:
        return None
    wanted = STORED_DTYPES[cast(str, config.dtype) if dtype == "auto" else dtype]
    try:
        paths = [] if scaled is not None else weight_files(folder)
        files = [MappedWeights(file) for file in paths]
        stored = (
            scaled.read(wanted)
            if scaled is not None
            else {name: array for file in files for name, array in file.arrays.items()}
        )
        blocks, mapped = read_experts(stored, architecture, None if dtype == "auto" else wanted, paths, cache)
        if architecture.outer_type is not None:
            stored = {inner: array for name, array in stored.items() if (inner := inner_name(name)) is not None}
        weights = {
            name: array
            if architecture.is_vector(name) or (name == LAYER_TABLE and _holds(wanted, array))
            else array.astype(wanted, copy=False)
            for name, array in stored.items()
            if not name.endswith(_OLD_ANGLES)
            and not is_of_drafter(name, config.num_hidden_layers)
            and not is_mxfp4(name, architecture)
        }
        is_mapped = any(array is stored[name] for name, array in weights.items())
        single = with_blocks(split_experts(weights, architecture), blocks)
        with blocks_explained(blocks):
            model = DecoderModel(architecture, config, read_generation_config(folder), single)
        if scaled is not None:
            say_scaled(folder, scaled, wanted)
        elif is_mapped:
            model.pages = tuple(files)
        model.pages += mapped
    except ModelError:
        raise
    except Exception:  # a damaged file or setting raises almost anything; transformers tells what is wrong
        return None
    return model


def _holds(wanted: Dtype, array: Array) -> bool:
    """Return whether numbers stay the same in a dtype, so that rows can be converted when they are read."""
    return array.dtype == wanted or (wanted == FLOAT32 and array.dtype in STORED_DTYPES.values())
