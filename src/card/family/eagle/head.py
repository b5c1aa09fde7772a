"""An EAGLE-3 head as it is trained; `card.models.own.eagle_head` runs it.

A row stands for a token and for the target's states from which that token was chosen. One decoder layer guesses the
state behind the token, and the head's rows are the target's own of the tokens that it proposes: they are not trained,
as little data would spoil them.

Source: EAGLE-3, arXiv:2503.01840. Names of tensors: SafeAILab's and SpecForge's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from card.backends.transformers.arrays import as_array
from card.errors import ModelError
from card.family.learning.bound_module import STORED_DTYPE, SavedHead
from card.family.learning.head_layer import turned
from card.kernels.number_types import dtype_name
from card.models.files.eagle_folder import FC, LAYER_PREFIXES, stated_config
from card.models.files.tensor_files import write_tensors
from card.models.own.head_sizes import EPS, ROTARY_BASE

HEAD_SIZE = 64
_NUM_SHARING = 4  # heads of queries to one of keys and values


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSizes:
    """Sizes of a head and of its target."""

    width: int  # D, the target's too
    mlp_width: int
    vocab_size: int  # rows of the target's embeddings
    target_layers: tuple[int, ...]  # whose states it reads, as transformers' ``hidden_states`` count them

    @property
    def num_heads(self) -> int:
        """Heads of queries."""
        return max(1, self.width // HEAD_SIZE)

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads // _NUM_SHARING if self.num_heads % _NUM_SHARING == 0 else self.num_heads


class _Attention(nn.Module):
    def __init__(self, sizes: EagleSizes) -> None:
        super().__init__()
        queries, others = sizes.num_heads * HEAD_SIZE, sizes.num_kv_heads * HEAD_SIZE
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(2 * sizes.width, size, bias=False) for size in (queries, others, others)
        )
        self.o_proj = nn.Linear(queries, sizes.width, bias=False)
        self._num_shared = sizes.num_heads // sizes.num_kv_heads

    def memory(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of rows [B, S, 2 D], [B, heads, S, d] each."""
        keys, values = turned(_heads(self.k_proj(x)), places), _heads(self.v_proj(x))
        return keys.repeat_interleave(self._num_shared, 1), values.repeat_interleave(self._num_shared, 1)

    def forward(self, x: Tensor, places: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        """Return what rows [B, T, 2 D] read of a memory of S rows, [B, T, D]; ``seen`` is [T, S] bool."""
        query = turned(_heads(self.q_proj(x)), places)
        mixed = functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output


class _Mlp(nn.Module):
    def __init__(self, sizes: EagleSizes) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(sizes.width, sizes.mlp_width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(sizes.mlp_width, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return rows [..., D]."""
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class _Layer(nn.Module):
    def __init__(self, sizes: EagleSizes) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(sizes.width, eps=EPS) for _ in range(3)
        )
        self.self_attn, self.mlp = _Attention(sizes), _Mlp(sizes)


class EagleModule(SavedHead):
    """The head: states behind rows of tokens and states, and logits of N tokens."""

    token_ids: Tensor
    table: Tensor

    def __init__(self, sizes: EagleSizes, token_ids: Tensor, table: Tensor, norm: Tensor) -> None:
        """Make a head with random weights from torch's present seed; a state begins as the target's last that is read.

        Args:
            token_ids: [N] int64, that it proposes, in ascending order.
            table: [N, D] float32, of the target's head.
            norm: [D] float32, the target's final one.
        """
        super().__init__()
        self.sizes = sizes
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.register_buffer("table", table, persistent=False)
        width, num_layers = sizes.width, len(sizes.target_layers)
        self.fc = nn.Linear(num_layers * width, width, bias=False)
        self.midlayer = _Layer(sizes)
        self.norm = nn.RMSNorm(width, eps=EPS)
        with torch.no_grad():
            self.norm.weight.copy_(norm)
            self.fc.weight.zero_()
            self.fc.weight[:, -width:] = torch.eye(width)

    def joined(self, states: Tensor) -> Tensor:
        """Return what rows begin with, [..., D], of the target's states, [..., layers * D]."""
        joined: Tensor = self.fc(states)
        return joined

    def read(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """Return what attention reads, [..., 2 D], of states and of tokens' embeddings, [..., D]."""
        return torch.cat((self.midlayer.input_layernorm(embeddings), self.midlayer.hidden_norm(states)), -1)

    def combined(self, states: Tensor, attended: Tensor) -> Tensor:
        """Return the states behind the layer, [..., D], which stand in for the target's in the next rows."""
        states = states + attended
        output: Tensor = states + self.midlayer.mlp(self.midlayer.post_attention_layernorm(states))
        return output

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of states behind the layer, [..., N]."""
        logits: Tensor = self.norm(states) @ self.table.T
        return logits

    def save(self, path: Path, figures: Mapping[str, str]) -> None:
        """Write the folder of the head; config.json, which makes it one, comes last. Raises: ModelError."""
        tensors = {name: weight.to(STORED_DTYPE) for name, weight in self.state_dict().items()}
        stored = {
            **{
                name.replace("midlayer.", LAYER_PREFIXES[0]).replace("fc.weight", FC): one
                for name, one in tensors.items()
            },
            "lm_head.weight": self.table.to(STORED_DTYPE),
            "d2t": self.token_ids - torch.arange(len(self.token_ids)),
            "t2d": torch.isin(torch.arange(self.sizes.vocab_size), self.token_ids),
        }
        config = stated_config(self._sizes_of_a_llama(), self.sizes.target_layers, len(self.token_ids))
        try:
            path.mkdir(exist_ok=True)
            arrays = {name: as_array(one, keeps_bits=True) for name, one in stored.items()}
            write_tensors(path / "model.safetensors", arrays, {"format": "pt", **figures})
            (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ModelError(f"the head cannot be written to {path}: {error}") from error

    def _sizes_of_a_llama(self) -> dict[str, object]:
        return {
            "hidden_size": self.sizes.width,
            "intermediate_size": self.sizes.mlp_width,
            "num_attention_heads": self.sizes.num_heads,
            "num_key_value_heads": self.sizes.num_kv_heads,
            "head_dim": HEAD_SIZE,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": EPS,
            "rope_theta": ROTARY_BASE,
            "vocab_size": self.sizes.vocab_size,
            "torch_dtype": dtype_name(STORED_DTYPE),
        }


def _heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], -1, HEAD_SIZE).transpose(1, 2)
