"""A drafter that reads text and one state of its target: some decoder layers of a width of their own.

A row of it stands for a token of the text and for the target's last state from which that token was chosen; one linear
layer joins both, each scaled to a mean square of 1. Behind its layers the drafter predicts the next state, which stands
in for the target's in the next row of a draft, with a learnt vector of the step. It proposes only tokens that the
target wrote in training, and compares its output with the target's own embeddings of these.

Source: HiViS, arXiv:2509.23928, on the drafter of EAGLE, arXiv:2401.15077; the vectors of the steps are ours in form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from card.kernels.number_types import Array, Dtype, Floats
from card.kernels.packed_linear import PANEL, PackedLinear, multiply_rows
from card.models.architectures import find_architecture
from card.models.features import FINAL
from card.models.files.generation_config import GenerationConfig
from card.models.files.trained_file import TrainedFile
from card.models.files.weight_files import raw_config
from card.models.fingerprint import TargetSizes
from card.models.own.decoder_model import DecoderModel
from card.models.own.exact_layers import as_stored, packed
from card.models.own.head_sizes import EPS, ROTARY_BASE, heads_of, layer_shapes, scaled_rows
from card.models.own.layers import Linear
from card.models.own.plain_config import config_of

FUSED_FILE = TrainedFile("drafter", "card-hivis-2", "card train hivis")
FUSED_WEIGHTS, FUSED_TYPE = "model.safetensors", "card-hivis"  # that file of a folder, and its config's model_type
MOST_LAYERS = 16  # that a drafter may have: it is to be small
_LLAMA_NAMES = {  # of a layer's weights, by their names in files
    "norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}

Embed = Callable[[Sequence[int]], Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedFacts(TargetSizes):
    """Sizes of a drafter and of its target."""

    num_steps: int  # S: steps after the newest token in training
    width: int  # of its layers, d
    num_layers: int

    @classmethod
    def of(cls, said: Mapping[str, str]) -> FusedFacts:
        """Return what a file says. Raises: KeyError, ValueError if it is faulty."""
        facts = cls(**{one.name: int(said[one.name]) for one in fields(cls)})
        if not 1 <= facts.num_layers <= MOST_LAYERS:
            raise ValueError(f"it has {facts.num_layers} layers, there may be 1 to {MOST_LAYERS}")
        return facts


def weight_shapes(facts: FusedFacts) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a file by its name."""
    d, size = facts.width, facts.hidden_size
    layers = (layer_shapes(d, f"layers.{idx}") for idx in range(facts.num_layers))
    return {
        "fuse.weight": (d, 2 * size),
        "steps": (facts.num_steps - 1, size),
        **{name: shape for layer in layers for name, shape in layer.items()},
        "norm.weight": (d,),
        "state.weight": (size, d),
        "state.bias": (size,),
        "word.weight": (size, d),
    }


def is_fused_folder(folder: Path) -> bool:
    """Return whether `card train hivis` wrote a folder."""
    config = raw_config(folder)
    return isinstance(config, dict) and config.get("model_type") == FUSED_TYPE


class FusedInputs:
    """The layers that make inputs of rows, [n, d]."""

    target_layers = (FINAL,)
    own_state = FINAL
    first_place = 1  # the first token has no state

    def __init__(self, facts: FusedFacts, arrays: Mapping[str, Floats], embed: Embed) -> None:
        """Take the arrays, float32; ``embed`` returns the target's embeddings of tokens, [n, D]."""
        self.width, self.target_width = facts.width, facts.hidden_size
        self._embed = embed
        of_states, of_tokens = np.split(arrays["fuse.weight"], 2, 1)
        self._of_states, self._of_tokens = _packed(of_states), _packed(of_tokens)
        # Its states are read at once: as inputs of rows they are one product.
        self._of_own = _packed(of_states @ arrays["state.weight"])
        none: Floats = np.zeros((1, facts.hidden_size), np.float32)
        steps = arrays["steps"] if len(arrays["steps"]) else none
        self._steps: Floats = ((arrays["state.bias"] + steps) @ of_states.T).astype(np.float32)  # [S - 1 or 1, d]

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrices."""
        return int(sum(one.panels.nbytes for one in (self._of_states, self._of_tokens, self._of_own)))

    def fused(self, states: Floats) -> Floats:
        """Return the part of a row that states make, [n, d], of the target's, [n, D]."""
        return self._product(scaled_rows(states), self._of_states)

    def handed_on(self, states: Floats, depths: Sequence[int]) -> Floats:
        """Return that part of the drafter's own states, [n, d]; deeper steps than the trained ones are as the last."""
        return self._product(states, self._of_own) + self._steps[np.minimum(depths, len(self._steps) - 1)]

    def rows(self, token_ids: Sequence[int], states: Floats) -> Floats:
        """Return the inputs of rows with tokens [n] and parts [n, d] that states make."""
        made: Floats = states + self._product(scaled_rows(self._embed(token_ids)), self._of_tokens)
        return made

    def _product(self, rows: Floats, matrix: PackedLinear) -> Floats:
        return multiply_rows(np.ascontiguousarray(rows), matrix)[:, : self.width]


class FusedHead(DecoderModel):
    """The drafter of a folder as a decoder whose rows have inputs of their own."""

    inputs: FusedInputs

    @property
    def num_parameters(self) -> int:
        """Number of parameters of its layers and its head."""
        return sum(int(one.size) for _, one in self.weights if one is not self.embeddings)

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights: it has no embeddings."""
        return sum(int(one.nbytes) for _, one in self.weights if one is not self.embeddings) + self.inputs.num_bytes


def fused_head(
    facts: FusedFacts, arrays: Mapping[str, Array], embed: Embed, *, max_model_len: int, dtype: Dtype
) -> FusedHead:
    """Return the drafter of a folder for its target.

    Args:
        arrays: of its file.
        embed: returns the target's embeddings of tokens, [n, D].
        dtype: of the layers' weights.
    Raises: KeyError, ValueError if the arrays do not fit the facts.
    """
    shapes, width = weight_shapes(facts), facts.width
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise ValueError(f"{name} has shape {list(arrays[name].shape)}, its facts ask for {list(shape)}")
    token_ids = arrays["token_ids"].astype(np.int64)
    if token_ids.ndim != 1 or len(token_ids) != len(np.unique(token_ids)):
        raise ValueError("its token_ids name a token twice")
    if len(wrong := token_ids[(token_ids < 0) | (token_ids >= facts.vocab_size)]):
        raise ValueError(f"its token_ids name token {wrong[0]}, and there are 0 to {facts.vocab_size - 1}")
    own_arrays = {name: arrays[name].astype(np.float32) for name in shapes if not name.startswith("layers.")}
    weights = {
        "model.norm.weight": own_arrays["norm.weight"],
        "lm_head.weight": embed(token_ids.tolist()) @ own_arrays["word.weight"],
    }
    for idx in range(facts.num_layers):
        for name, known in _LLAMA_NAMES.items():
            weights[f"model.layers.{idx}.{known}.weight"] = arrays[f"layers.{idx}.{name}.weight"]
    stored: dict[str, Array] = {name: np.ascontiguousarray(one, dtype) for name, one in weights.items()}
    # No row has an embedding alone, so all of them are one zero.
    stored["model.embed_tokens.weight"] = np.broadcast_to(np.zeros((), dtype), (facts.vocab_size, width))
    architecture, config = find_architecture("llama"), _config(facts, max_model_len, dtype)
    assert architecture is not None
    made = FusedHead(architecture, config, GenerationConfig(), stored, output_ids=token_ids)
    made.inputs = FusedInputs(facts, own_arrays, embed)
    return made


# ---- inside ----------------------------------------------------------------------------------------------------------


def _packed(weight: Floats) -> PackedLinear:
    return packed(as_stored, Linear(np.ascontiguousarray(weight, np.float32)), out_multiple=PANEL)


def _config(facts: FusedFacts, max_model_len: int, dtype: Dtype) -> Any:
    """Return the config of the layers, those of a Llama. Raises: ValueError if there is no such Llama."""
    num_heads = heads_of(facts.width)
    config = config_of(
        {
            "name_or_path": FUSED_FILE.kind,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": facts.vocab_size,
            "hidden_size": facts.width,
            "intermediate_size": 2 * facts.width,
            "num_hidden_layers": facts.num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "head_dim": facts.width // num_heads,
            "max_position_embeddings": max_model_len,
            "rms_norm_eps": EPS,
            "rope_theta": ROTARY_BASE,
            "tie_word_embeddings": False,
            "dtype": dtype.name,
        }
    )
    if config is None:
        raise ValueError(f"it has {facts.num_layers} layers of a width of {facts.width}, which no decoder has")
    return config
