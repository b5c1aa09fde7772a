"""A head that drafts as EAGLE-3 does: one decoder layer that reads states of three layers of the target.

A row of it stands for a token of the text and for the target's states from which that token was chosen. A linear layer
joins the states to one. Queries, keys and values are made of the token's embedding and of that state, each normed. They
are sums of two parts: that of the embedding is kept by token, and the pass adds that of the state. The state behind the
layer stands in for the target's in the next row of a draft. Source: EAGLE-3, arXiv:2503.01840.

A P-EAGLE head (arXiv:2602.01469) has some more layers. Its pass runs masks behind the newest token, each a row of one
token and one state that were trained for it, and each drafts a token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from card.kernels.number_types import Array, Dtype, Floats
from card.kernels.packed_linear import PANEL, PackedLinear, multiply_rows
from card.models.architectures import Architecture, find_architecture
from card.models.features import FINAL, RAW
from card.models.files.eagle_folder import FC, LAYER_PREFIXES, HeadFacts
from card.models.files.generation_config import GenerationConfig
from card.models.layer_shape import LayerShape, stated_shape
from card.models.own.decoder_model import DecoderModel
from card.models.own.draft_block import BlockError, Lent
from card.models.own.exact_layers import as_stored, check_numbers, packed, rms_norm, with_padded_heads
from card.models.own.layer_tables import padded_head
from card.models.own.layers import Linear, Weight, embedded
from card.models.own.plain_config import config_of
from card.models.parts import HEAD_NORMS, PRE_NORMS, NormPlace, Part
from card.models.rows.row_tree import IntArray

_TABLE, _HEAD, _NORM, _LAYER = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.0."
_MASK = "mask_hidden"
_NUMBERED = re.compile(r"model\.layers\.(\d{1,3})\.")
_OFFSETS, _IN_SUBSET, _INPUT_NORM, _LAYER_NORM = "d2t", "t2d", "input_norm.weight", "fc_norm.{}.weight"
_TOKEN_NORM, _STATE_NORM = "input_layernorm.weight", "hidden_norm.weight"
_PROJECTIONS = tuple(f"self_attn.{one}_proj.weight" for one in "qkv")
_BIASES = {"qkv": "self_attn.q_proj.bias", "out": "self_attn.o_proj.bias", "mlp": "mlp.gate_proj.bias"}
_KEPT_BYTES = 1 << 24  # of sums, which are kept by token


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """The target of a head."""

    num_layers: int
    width: int  # of its states
    max_model_len: int
    lent: Lent


@dataclass(frozen=True, slots=True)
class _Joining:
    """The tensors that make inputs of rows, in float32 but for the matrices."""

    fc: Array  # [D, layers * width]
    norms: tuple[Floats, ...]  # of each layer's state, or of all of them as one; none: they are joined as they are
    token_norm: Floats  # [D]
    state_norm: Floats | None  # [D]: of what a row begins with; None: it begins with the state as it is
    sums: Array  # [first heads with their padding, D]
    mask: Floats | None  # [layers * width]: what stands for the target's states in rows of masks


class HeadInputs:
    """The layers that make inputs of rows: what the residual stream begins with, and sums for the heads behind it."""

    first_place = 1  # the first token has no state, and heads are trained without a row for it

    def __init__(
        self,
        joining: _Joining,
        embeddings: Weight,
        eps: float,
        target_layers: tuple[int, ...],
        own_state: int,
        masks: tuple[int, int],
    ) -> None:
        """Pack the matrices; ``masks`` are the tokens that a pass drafts, and the id of those of masks."""
        self.target_layers, self.own_state = target_layers, own_state
        self.width, states = joining.fc.shape
        self.target_width = states // len(target_layers)
        self._norms, self._token_norm, self._state_norm = joining.norms, joining.token_norm, joining.state_norm
        self._embeddings, self._eps = embeddings, eps
        self._fc = _packed(joining.fc)
        self._sums, self._num_sums = _packed(joining.sums), len(joining.sums)
        self._sums_of: dict[int, Floats] = {}
        self._most_kept = max(1, _KEPT_BYTES // (4 * self._num_sums))
        self.num_tokens, self.mask_id = masks
        self._mask = None if joining.mask is None else self.fused(joining.mask[None])

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrices."""
        return int(self._fc.panels.nbytes + self._sums.panels.nbytes)

    def fused(self, states: Floats) -> Floats:
        """Return the joined states, [n, D], of the target's, [n, layers * width]."""
        if self._norms:
            parts = np.split(states, len(self._norms), -1)
            normed = [rms_norm(part, norm, self._eps) for part, norm in zip(parts, self._norms, strict=True)]
            states = np.concatenate(normed, -1)
        return multiply_rows(states, self._fc)[:, : self.width]

    def handed_on(self, states: Floats, depths: Sequence[int]) -> Floats:
        """Return the head's own states as they are."""
        return states

    def rows(self, token_ids: Sequence[int], states: Floats) -> Floats:
        """Return the inputs of rows with tokens [n] and states [n, D], sums for the heads behind each."""
        begin = states if self._state_norm is None else rms_norm(states, self._state_norm, self._eps)
        return np.concatenate([begin, self._sums_for(token_ids)], -1)

    def mask_rows(self, count: int) -> Floats:
        """Return the inputs of so many rows of masks, as `rows` does."""
        assert self._mask is not None
        return self.rows([self.mask_id] * count, np.repeat(self._mask, count, 0))

    def _sums_for(self, token_ids: Sequence[int]) -> Floats:
        """Return the parts of queries, keys and values that embeddings make, those of the latest tokens kept."""
        sums = self._sums_of
        new_ids = [one for one in dict.fromkeys(token_ids) if one not in sums]
        if len(sums) + len(new_ids) > self._most_kept:
            sums = self._sums_of = {}
            new_ids = list(dict.fromkeys(token_ids))
        if new_ids:
            normed = rms_norm(embedded(self._embeddings, new_ids), self._token_norm, self._eps)
            sums.update(zip(new_ids, multiply_rows(normed, self._sums)[:, : self._num_sums], strict=True))
        return np.stack([sums[one] for one in token_ids])


class EagleHead(DecoderModel):
    """A head as a decoder of one layer, with embeddings and a head of its own or the target's embeddings."""

    adds_heads = True
    inputs: HeadInputs

    def __init__(
        self,
        architecture: Architecture,
        config: Any,
        weights: Mapping[str, Weight],
        output_ids: IntArray | None,
        inputs: HeadInputs,
    ) -> None:
        """Take over the weights by a decoder's names. Raises: KeyError, ValueError as `DecoderModel` does."""
        super().__init__(architecture, config, GenerationConfig(), weights, output_ids=output_ids)
        self.inputs = inputs


def eagle_head(facts: HeadFacts, stored: Mapping[str, Array], target: HeadTarget, dtype: Dtype) -> EagleHead:
    """Return a head for its target.

    Args:
        stored: its tensors by the names of folders, `d2t` as offsets.
        dtype: of the weights.
    Raises: BlockError that names what does not fit, in words that follow the head's name.
    """
    tensors = _named(stored)
    num_layers = 1 + max((int(number[1]) for number in map(_NUMBERED.match, tensors) if number), default=0)
    config = _config(facts, dtype, target, min(num_layers, len(tensors)))
    masks = facts.num_tokens, _mask_id(facts, int(config.vocab_size))
    layers = _target_layers(facts, target.num_layers)
    fc = _take(tensors, FC)
    _check_fc(fc, int(config.hidden_size), layers, target.width)
    table: Weight = tensors.pop(_TABLE) if _TABLE in tensors else target.lent.embeddings
    _check_tables(config, table, target.lent.embeddings)
    tensors.pop(_IN_SUBSET, None)
    head = _take(tensors, _HEAD)
    output_ids = _output_ids(tensors.pop(_OFFSETS, None), len(head), int(config.vocab_size))
    architecture = _architecture(facts, tensors)
    joining = _joining(facts, tensors, fc, architecture.layer_shape(config, 0), len(layers))
    weights: dict[str, Weight] = {
        name: array.astype(dtype, copy=False) for name, array in {**tensors, _HEAD: head}.items()
    }
    weights[_TABLE] = table
    own_state = FINAL if facts.norm_output else RAW
    inputs = HeadInputs(joining, table, float(config.rms_norm_eps), layers, own_state, masks)
    try:
        made = EagleHead(architecture, config, weights, output_ids, inputs)
    except KeyError as error:
        raise BlockError(f"its tensor {_in_file(error.args[0])} is missing") from None
    except ValueError as error:
        raise BlockError(_in_file(str(error))) from None
    check_numbers(made, ((name, array) for name, array in stored.items() if array.dtype.kind not in "biu"))
    return made


# ---- inside ----------------------------------------------------------------------------------------------------------


def _packed(weight: Array) -> PackedLinear:
    return packed(as_stored, Linear(weight), out_multiple=PANEL)


def _named(stored: Mapping[str, Array]) -> dict[str, Array]:
    """Return tensors under a decoder's names."""
    named = dict[str, Array]()
    for name, array in stored.items():
        if name.startswith(LAYER_PREFIXES[0]):
            named[_LAYER + name.removeprefix(LAYER_PREFIXES[0])] = array
        else:
            is_inner = name.startswith("layers.") or name in ("norm.weight", "embed_tokens.weight")
            named[f"model.{name}" if is_inner else name] = array
    return named


def _mask_id(facts: HeadFacts, vocab_size: int) -> int:
    """Return the token of masks; 0 for a head without any. Raises: BlockError if there is no such token."""
    if facts.mask_id is not None and not 0 <= facts.mask_id < vocab_size:
        raise BlockError(f"its masks are token {facts.mask_id}, and there are 0 to {vocab_size - 1}")
    return facts.mask_id or 0


def _in_file(words: str) -> str:
    """Return words about a weight with a name that files have for it."""
    words = words.replace(_LAYER, LAYER_PREFIXES[0]).replace("model.layers.", "layers.")
    return words.replace(_NORM, "norm.weight").replace(_TABLE, "embed_tokens.weight")


def _take(tensors: dict[str, Array], name: str, *shape: int) -> Array:
    """Take a tensor out of all. Raises: BlockError if it is not there, or of another shape."""
    if name not in tensors:
        raise BlockError(f"its tensor {_in_file(name)} is missing")
    tensor = tensors.pop(name)
    if shape and tensor.shape != shape:
        raise BlockError(f"{_in_file(name)} has shape {list(tensor.shape)}, the config asks for {list(shape)}")
    if not shape and tensor.ndim != 2:
        raise BlockError(f"{_in_file(name)} has shape {list(tensor.shape)}, and a matrix is needed")
    return tensor


def _config(facts: HeadFacts, dtype: Dtype, target: HeadTarget, num_layers: int) -> Any:
    """Return the config of the layers. The length that it states is that of training, and no limit."""
    whole = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": num_layers,
        "layer_types": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": dtype.name,
    }
    stated = {name: value for name, value in facts.sizes.items() if name not in ("torch_dtype", "auto_map")}
    config = config_of({"vocab_size": target.lent.embeddings.shape[0], **stated, **whole})
    if config is None:
        raise BlockError("its config.json lacks sizes of a Llama layer, or asks for more than is run here")
    config.max_position_embeddings = max(config.max_position_embeddings, target.max_model_len)
    return config


def _target_layers(facts: HeadFacts, num_layers: int) -> tuple[int, ...]:
    """Return the target's states that are read, as `FeatureWish` counts them. Raises: BlockError."""
    layers = facts.target_layers or (2, num_layers // 2, num_layers - 3)
    if wrong := [one for one in layers if not 0 <= one <= num_layers]:
        raise BlockError(f"it reads the state behind layer {wrong[0]} of its target, which has {num_layers}")
    return tuple(RAW if one == num_layers else one for one in layers)


def _check_fc(fc: Array, width: int, layers: Sequence[int], target_width: int) -> None:
    rows, columns = fc.shape
    if rows != width or columns % len(layers):
        asked = f"[{width}, {len(layers)} * {target_width}]"
        raise BlockError(f"{FC} has shape [{rows}, {columns}], its config and the target ask for {asked}")
    if columns // len(layers) != target_width:
        raise BlockError(f"it reads states of {columns // len(layers)} numbers, and its target gives {target_width}")


def _check_tables(config: Any, table: Weight, targets: Weight) -> None:
    """Check embeddings: the vocabulary is the target's. Raises: BlockError."""
    if config.vocab_size != targets.shape[0]:
        raise BlockError(
            f"it is made for a vocabulary of {config.vocab_size} tokens, and its target has {targets.shape[0]}"
        )
    if table is targets and table.shape[1] != config.hidden_size:
        raise BlockError(
            f"it is {config.hidden_size} wide without embeddings, and those of its target have {table.shape[1]} numbers"
        )


def _output_ids(offsets: Array | None, num_outputs: int, vocab_size: int) -> IntArray | None:
    """Return the tokens of the head's outputs; None: all in order. Raises: BlockError."""
    if offsets is None:
        if num_outputs != vocab_size:
            raise BlockError(f"its {_HEAD} has {num_outputs} rows for {vocab_size} tokens, and there is no {_OFFSETS}")
        return None
    if offsets.shape != (num_outputs,) or offsets.dtype.kind not in "iu":
        raise BlockError(
            f"its {_OFFSETS} is {list(offsets.shape)} of {offsets.dtype.name}, and there must be a whole number for "
            f"each of the {num_outputs} rows of {_HEAD}"
        )
    ids = offsets.astype(np.int64) + np.arange(num_outputs)
    if len(wrong := ids[(ids < 0) | (ids >= vocab_size)]):
        raise BlockError(f"its {_OFFSETS} names token {wrong[0]}, and there are 0 to {vocab_size - 1}")
    if len(np.unique(ids)) < num_outputs:
        raise BlockError(f"its {_OFFSETS} names a token twice")
    return ids


def _architecture(facts: HeadFacts, tensors: Mapping[str, Array]) -> Architecture:
    """Return the layers' architecture: a Llama's, with biases and norms of heads as its tensors have them."""
    plain = find_architecture("llama")
    assert plain is not None
    norms: dict[NormPlace, Part] = {
        "attention_in": replace(PRE_NORMS["attention_in"], only=lambda shape: not shape.reads_normed),
        "mlp_in": PRE_NORMS["mlp_in"],
    }
    if f"{_LAYER}self_attn.q_norm.weight" in tensors:
        norms |= HEAD_NORMS
    biases: Any = {kind: True for kind, name in _BIASES.items() if _LAYER + name in tensors}

    def shapes(config: Any, layer: int) -> LayerShape:
        return replace(stated_shape(config, layer), reads_normed=facts.norm_before_residual and layer == 0)

    return replace(plain, norms=norms, biases=biases, shapes=shapes)


def _joining(facts: HeadFacts, tensors: dict[str, Array], fc: Array, shape: LayerShape, num_layers: int) -> _Joining:
    """Take what makes inputs out of all tensors; what is left is that of a decoder."""
    width, num_states = fc.shape
    norms: list[Floats] = []
    if facts.asks_input_norm or _INPUT_NORM in tensors:
        norms = [_norm(tensors, _INPUT_NORM, num_states)]
    elif facts.asks_layer_norms or _LAYER_NORM.format(0) in tensors:
        norms = [_norm(tensors, _LAYER_NORM.format(i), num_states // num_layers) for i in range(num_layers)]
    token_norm = _norm(tensors, _LAYER + _TOKEN_NORM, width)
    stored_norm = _take(tensors, _LAYER + _STATE_NORM, width)
    state_norm = stored_norm.astype(np.float32) if facts.norm_before_residual else None
    if state_norm is None:  # the layer norms what it reads, as any other
        tensors[_LAYER + _TOKEN_NORM] = stored_norm
    mask: Floats | None = None
    if facts.num_tokens > 1:
        mask = _mask_of(tensors, num_states)
    halves = []
    counts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    for name, count in zip(_PROJECTIONS, counts, strict=True):
        whole = _take(tensors, _LAYER + name, count * shape.head_size, 2 * width)
        halves.append(with_padded_heads(whole[:, :width], count, 0, padded_head(shape)))
        tensors[_LAYER + name] = np.ascontiguousarray(whole[:, width:])
    return _Joining(fc, tuple(norms), token_norm, state_norm, np.concatenate(halves), mask)


def _mask_of(tensors: dict[str, Array], size: int) -> Floats:
    """Take the states of masks. Raises: BlockError if they are not there, or of another size."""
    if _MASK not in tensors:
        raise BlockError(f"its tensor {_MASK} is missing")
    mask = tensors.pop(_MASK)
    if mask.size != size:
        raise BlockError(f"{_MASK} has shape {list(mask.shape)}, and {size} numbers are needed")
    flat: Floats = mask.reshape(-1).astype(np.float32)
    return flat


def _norm(tensors: dict[str, Array], name: str, size: int) -> Floats:
    return _take(tensors, name, size).astype(np.float32)
