"""The block in a checkpoint that drafts: one decoder layer behind the others, which reads the target's last state.

A row of it stands for a token of the text and for the target's state from which that token was chosen. Both are normed
and joined by a linear layer; the layer follows, then a norm, then the target's head. The normed state stands in for the
target's in the next row of a draft. Source: DeepSeek-V3, arXiv:2412.19437, section 2.2 (multi-token prediction); the
names and the state after the final norm are those of Qwen3.5's and Qwen3-Next's files; GLM-4.5 and MiMo-7B have other
names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from card.kernels.number_types import STORED_DTYPES, Dtype, Floats
from card.kernels.packed_linear import PANEL, PackedLinear, multiply_rows
from card.models.architectures import Architecture, find_architecture
from card.models.draft_vocab import with_head_of
from card.models.features import FINAL
from card.models.files.block_names import JOIN, PREFIX, STATE_NORM, TOKEN_NORM, BlockNames, names_of_block
from card.models.files.generation_config import GenerationConfig
from card.models.files.gguf.model import block_in_words
from card.models.files.gguf.source import GgufSource
from card.models.files.mapped_weights import MappedWeights
from card.models.files.scaled_weights import find_scaled
from card.models.files.weight_files import tensor_shapes, weight_files
from card.models.inner_text import inner_name
from card.models.own.decoder_model import DecoderModel
from card.models.own.exact_layers import as_stored, check_numbers, norm_weight, packed, rms_norm
from card.models.own.expert_weights import split_experts
from card.models.own.layers import BlockWeight, EmbeddedRows, Linear, Weight
from card.models.own.plain_config import config_of_block, read_config

_JOINING = (JOIN, TOKEN_NORM, STATE_NORM)
_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class BlockError(ValueError):
    """A reason why the block of a model cannot draft, in words that follow its name."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockInputs:
    """The layers that make a row's input of a token's embedding and a state."""

    embeddings: EmbeddedRows  # [V, D], the target's
    token_norm: Floats  # [D]
    state_norm: Floats  # [D]
    eps: float
    join: PackedLinear  # [D, 2 D]

    target_layers: ClassVar[tuple[int, ...]] = (FINAL,)
    own_state: ClassVar[int] = FINAL
    first_place: ClassVar[int] = 0

    @property
    def width(self) -> int:
        """Numbers of a state, D."""
        return len(self.state_norm)

    @property
    def target_width(self) -> int:
        """Numbers of each of the target's states, D."""
        return self.width

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrix."""
        return int(self.join.panels.nbytes)

    def fused(self, states: Floats) -> Floats:
        """Return the target's states as they are."""
        return states

    def handed_on(self, states: Floats, depths: Sequence[int]) -> Floats:
        """Return the block's own states as they are."""
        return states

    def rows(self, token_ids: Sequence[int], states: Floats) -> Floats:
        """Return the inputs of rows, [n, D], from tokens [n] and states [n, D]."""
        tokens = rms_norm(self.embeddings.of(token_ids), self.token_norm, self.eps)
        both = np.concatenate([tokens, rms_norm(states, self.state_norm, self.eps)], -1)
        return multiply_rows(both, self.join)[:, : self.width]


@dataclass(frozen=True, slots=True)
class Lent:
    """The ends of a target, which its block uses too; they are in memory once."""

    embeddings: Weight  # [V, D]
    head: PackedLinear
    head_blocks: BlockWeight | None = None  # the same head, to choose some of its tokens; None: it is no blocks
    head_weight: Weight | None = None  # as it is stored, for the same; None: the checkpoint tells


class DraftBlock(DecoderModel):
    """A block as a decoder of one layer, with the target's embeddings and head."""

    inputs: BlockInputs

    def __init__(
        self,
        architecture: Architecture,
        config: Any,
        weights: Mapping[str, Weight],
        joining: Mapping[str, Weight],
        lent: Lent,
        in_words: Callable[[str], str],
    ) -> None:
        """Take over the weights of the layer, by the names of a decoder's first, and those that make inputs.

        Args:
            weights: with the target's embeddings and head, as a decoder has them.
            joining: what makes inputs, by their names here.
            in_words: returns words about a tensor with the name that its file has for it.
        Raises: KeyError, ValueError as `DecoderModel` does; BlockError for weights of another width.
        """
        super().__init__(architecture, config, GenerationConfig(), weights)
        self.packed_head = lent.head
        width = int(config.hidden_size)
        for name, shape in ((JOIN, (width, 2 * width)), (TOKEN_NORM, (width,)), (STATE_NORM, (width,))):
            if tuple(joining[name].shape) != shape:
                words = f"{name} has shape {list(joining[name].shape)}, the model asks for {shape}"
                raise BlockError(in_words(words))
        check_numbers(self, ((in_words(name), weight) for name, weight in joining.items()))
        token_norm, state_norm = (
            norm_weight(np.asarray(joining[name]), architecture.norm_offset) for name in (TOKEN_NORM, STATE_NORM)
        )
        self.inputs = BlockInputs(
            EmbeddedRows(lent.embeddings),
            token_norm,
            state_norm,
            float(getattr(config, architecture.norm_eps)),
            packed(as_stored, Linear(joining[JOIN]), out_multiple=PANEL),  # a coarser one costs acceptance
        )

    @property
    def own_weights(self) -> Iterator[Weight]:
        """The weights that the block does not share with its target, but for those that make inputs."""
        return (weight for name, weight in self.weights if name not in (_TABLE, _HEAD))

    @property
    def num_parameters(self) -> int:
        """Number of parameters of its own."""
        return sum(int(one.size) for one in self.own_weights) + 2 * self.inputs.width * (self.inputs.width + 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of its own weights."""
        return sum(int(one.nbytes) for one in self.own_weights) + self.inputs.num_bytes

    @property
    def ending(self) -> Iterator[tuple[str, Weight]]:
        """The last norm by name: the head has been looked at with the target."""
        yield self._norm_name, self.norm


def has_folder_block(folder: Path) -> bool:
    """Return whether the files of a folder hold a block that drafts. Raises: OSError, ValueError."""
    return _names_of(folder, tensor_shapes(folder) or {}) is not None


def _names_of(folder: Path, names: Iterable[str]) -> BlockNames | None:
    """Return what a folder calls the tensors of its block; None: it has none."""
    config = read_config(folder)
    return names_of_block(names, None if config is None else config.num_hidden_layers)


def read_folder_block(folder: Path, lent: Lent, *, dtype: str) -> DraftBlock:
    """Return the block of a folder that `has_folder_block`.

    Args:
        dtype: "auto" takes what the config names.
    Raises: BlockError if it cannot be run; OSError, ValueError if it cannot be read.
    """
    if find_scaled(folder) is not None:
        raise BlockError("its weights are 8-bit floats with scales, of which no block is read yet")
    config = read_config(folder)
    architecture = None if config is None else find_architecture(config.model_type)
    if config is None or architecture is None:
        raise BlockError("the model does not run in our own pass")
    wanted = STORED_DTYPES[str(config.dtype) if dtype == "auto" else dtype]
    files = tuple(MappedWeights(file) for file in weight_files(folder))
    stored = {name: array for file in files for name, array in file.arrays.items()}
    names = names_of_block(stored, config.num_hidden_layers)
    assert names is not None
    block = {part: array for name, array in stored.items() if (part := names.local_name(name)) is not None}
    if names.has_state_first and JOIN in block:
        block[JOIN] = np.roll(block[JOIN], block[JOIN].shape[-1] // 2, -1)
    head = next((array for name, array in stored.items() if inner_name(name) == _HEAD), None)
    try:
        made = block_of(architecture, config, block, head, lent, wanted, names.in_words)
    finally:
        del stored
    made.pages = files
    return made


def read_gguf_block(gguf: GgufSource, lent: Lent, *, dtype: str, as_stored: bool = False) -> DraftBlock:
    """Return the block of a GGUF file that has one, with its weights as floats; others as `read_folder_block`.

    Args:
        as_stored: its layer has the blocks of the file, if there are products for them; what makes inputs has floats.
    Raises: GgufError too.
    """
    config = gguf.block_config(dtype)
    architecture = find_architecture(config.model_type)
    assert architecture is not None
    if gguf.is_block_alone and (stated := (config.vocab_size, config.hidden_size)) != lent.embeddings.shape:
        raise BlockError(
            f"it is made for a model of {stated[0]} tokens and a width of {stated[1]}, and the target has "
            f"{lent.embeddings.shape[0]} and {lent.embeddings.shape[1]}"
        )
    plain = architecture

    def in_words(words: str) -> str:
        return block_in_words(BlockNames().in_words(words), gguf.block_layer, plain)

    as_stored = as_stored and gguf.block_runs_as_stored
    only = {_HEAD, *(PREFIX + name for name in _JOINING)} if as_stored else None
    weights: dict[str, Weight] = dict(gguf.block_weights(dtype, only))
    head = weights.pop(_HEAD, None)
    pages: MappedWeights | None = None
    if as_stored:
        packed_weights, pages = gguf.stored_block_weights()
        weights = {**packed_weights, **weights}
        architecture = architecture.as_stored(weights)
    block = {name.removeprefix(PREFIX): array for name, array in weights.items()}
    made = block_of(architecture, config, block, head, lent, gguf.stored_dtype(dtype), in_words)
    made.pages = () if pages is None else (pages,)
    ids = gguf.block_ids
    return made if ids is None else with_head_of(made, ids)


def block_of(
    architecture: Architecture,
    config: Any,
    block: Mapping[str, Weight],
    head: Weight | None,
    lent: Lent,
    dtype: Dtype,
    in_words: Callable[[str], str],
) -> DraftBlock:
    """Return a block of arrays.

    Args:
        config: of the whole model.
        block: its weights by their names here.
        head: of the model, for a block that proposes some tokens only; None: it is tied to the embeddings.
        dtype: of the weights of the layer.
        in_words: as of `DraftBlock`.
    Raises: BlockError that names a weight.
    """
    if more := sorted(name for name in block if name.startswith("layers.") and not name.startswith("layers.0.")):
        raise BlockError(f"it has several blocks ({in_words(f'model.{more[0]}')}), and one is run here")
    joining = {name: block[name] for name in _JOINING if name in block}
    layer = {f"model.{name}": array for name, array in block.items() if name not in joining}
    weights = {
        name: one if isinstance(one, BlockWeight) else one.astype(dtype, copy=False) for name, one in layer.items()
    }
    if not any(isinstance(one, BlockWeight) for one in weights.values()):  # else experts are apart
        weights = split_experts(weights, architecture)
    layer_config = config_of_block(config, architecture)
    weights[_TABLE] = lent.embeddings
    if (lent_head := lent.head_blocks or lent.head_weight) is not None:
        weights[_HEAD], layer_config.tie_word_embeddings = lent_head, False
    elif not layer_config.tie_word_embeddings:
        if head is None:
            raise BlockError("its head is missing")
        weights[_HEAD] = head
    try:
        return DraftBlock(architecture, layer_config, weights, joining, lent, in_words)
    except KeyError as error:
        raise BlockError(f"its tensor {in_words(error.args[0])} is missing") from None
    except BlockError:
        raise
    except ValueError as error:
        raise BlockError(in_words(str(error))) from None
