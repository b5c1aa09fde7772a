"""Tiny random EAGLE-3 heads in the forms of their makers, and what plain formulas make of them.

The formulas are those of the paper (arXiv:2503.01840) and of its authors' code, written here row by row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from card.models.block_loading import load_head
from tests.pair import make_tokenizer
from tests.state_drafting import Drafting
from tests.tiny import NO_ENDS, tiny_llama

WIDTH, NUM_LAYERS, SUBSET = 64, 8, 200
EPS, THETA = 1e-5, 10000.0
MASK_ID = 7


@dataclass(frozen=True, slots=True)
class Form:
    """A form of heads: how its folder says what, and what that is."""

    layers: tuple[int, ...] = (2, 4, 5)  # of the target, as `hidden_states` count them; NUM_LAYERS: before the norm
    stated: Mapping[str, Any] = field(default_factory=dict)  # in config.json, besides sizes
    is_nested: bool = False  # sizes lie in transformer_layer_config
    prefix: str = "midlayer."
    norm_before_residual: bool = False
    norm_output: bool = False
    norms: str = ""  # of the states: "input_norm" or "fc_norm"
    has_head_norms: bool = False
    has_biases: bool = False
    has_subset: bool = True
    has_embeddings: bool = False
    num_more: int = 0  # ordinary layers behind the first
    num_tokens: int = 1  # that a pass drafts


_IDS = "eagle_aux_hidden_state_layer_ids"
FORMS: Mapping[str, Form] = {
    "SafeAILab": Form(stated={"architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
    "SpecForge": Form(
        stated={"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {_IDS: [1, 3, 6]}}, layers=(2, 4, 7)
    ),
    "SpecForge, own embeddings and biases": Form(
        stated={"architectures": ["LlamaForCausalLMEagle3"]}, has_embeddings=True, has_biases=True
    ),
    "SpecForge, normed": Form(
        stated={"architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True, "norm_output": True},
        norms="fc_norm",
        norm_output=True,
    ),
    "speculators": Form(
        stated={"speculators_model_type": "eagle3", "norm_before_residual": True},
        is_nested=True,
        prefix="layers.0.",
        norm_before_residual=True,
    ),
    "speculators, other layers": Form(
        stated={
            "speculators_model_type": "eagle3",
            "norm_before_residual": False,
            "norm_before_fc": True,
            _IDS: [2, 4, NUM_LAYERS],
        },
        layers=(2, 4, NUM_LAYERS),
        is_nested=True,
        prefix="layers.0.",
        norms="input_norm",
    ),
    "DeepSpec": Form(
        stated={"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [-1, 1, 3, 5, 6]},
        layers=(0, 2, 4, 6, 7),
        has_head_norms=True,
        has_subset=False,
    ),
}
_PARALLEL: Mapping[str, Any] = {"mask_token_id": MASK_ID, "norm_before_residual": True}
PARALLEL_FORMS: Mapping[str, Form] = {  # P-EAGLE
    "speculators": Form(
        stated={"speculators_model_type": "peagle", "para_depths": 5, **_PARALLEL},
        is_nested=True,
        prefix="layers.0.",
        norm_before_residual=True,
        num_more=2,
        num_tokens=5,
    ),
    "SpecForge": Form(
        stated={"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": MASK_ID, "parallel_drafting": True},
        num_more=1,
        num_tokens=7,
    ),
}

_GGUF_NAMES: Mapping[str, str] = {
    "fc": "fc",
    "input_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
}


@dataclass(frozen=True, slots=True)
class Head:
    """A target and a head; tensors by the names that follow the prefix, or by whole names."""

    target: LlamaForCausalLM
    form: Form
    tensors: Mapping[str, Tensor]
    outer: Mapping[str, Tensor]
    ids: Tensor  # tokens of the head's outputs
    sizes: Mapping[str, int]

    def states(self, token_ids: Sequence[int]) -> Tensor:
        """Return the target's states that the head reads, [T, layers * D]."""
        raw: list[Tensor] = []
        handle = self.target.model.norm.register_forward_pre_hook(lambda _, args: raw.append(args[0]))
        with torch.no_grad():
            found = self.target(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
        handle.remove()
        return torch.cat([raw[0][0] if one == NUM_LAYERS else found[one][0] for one in self.form.layers], -1)

    def fused(self, states: Tensor) -> Tensor:
        """Return the joined states, [n, D]."""
        if self.form.norms == "input_norm":
            states = _normed(states, self.outer["input_norm.weight"])
        elif self.form.norms == "fc_norm":
            parts = states.split(WIDTH, -1)
            states = torch.cat([_normed(one, self.outer[f"fc_norm.{i}.weight"]) for i, one in enumerate(parts)], -1)
        return states @ self.outer["fc.weight"].T

    def run(self, token_ids: Sequence[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [V] and the state [D] that is handed on, behind the last of some rows, which are a chain."""
        logits, handed = self.run_all(token_ids, states)
        return logits[-1], handed[-1]

    def run_all(self, token_ids: Sequence[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [n, V] and states [n, D] that are handed on, of rows that are a chain."""
        its = self.tensors
        table = self.outer.get("embed_tokens.weight", self.target.get_input_embeddings().weight.detach())
        normed = _normed(states, its["hidden_norm.weight"])
        x = torch.cat([_normed(table[list(token_ids)], its["input_layernorm.weight"]), normed], -1)
        u = self._layer(its, x, normed if self.form.norm_before_residual else states)
        for idx in range(1, self.form.num_more + 1):
            prefix = f"layers.{idx}."
            its = {name.removeprefix(prefix): one for name, one in self.outer.items() if name.startswith(prefix)}
            u = self._layer(its, _normed(u, its["input_layernorm.weight"]), u)
        last = _normed(u, self.outer["norm.weight"])
        logits = torch.full((len(u), len(table)), -torch.inf)
        logits[:, self.ids] = last @ self.outer["lm_head.weight"].T
        return logits, last if self.form.norm_output else u

    def _layer(self, its: Mapping[str, Tensor], x: Tensor, residual: Tensor) -> Tensor:
        """Return the states behind a layer, [n, D], of what its attention reads and adds to."""
        q, k, v = (
            (x @ its[f"self_attn.{one}_proj.weight"].T + its.get(f"self_attn.{one}_proj.bias", 0.0)).unflatten(
                -1, (-1, self.sizes["head_dim"])
            )
            for one in "qkv"
        )
        if self.form.has_head_norms:
            q, k = (_normed(one, its[f"self_attn.{name}_norm.weight"]) for name, one in (("q", q), ("k", k)))
        q, k = _turned(q), _turned(k)
        k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
        scores = torch.einsum("qhd,nhd->hqn", q, k) * self.sizes["head_dim"] ** -0.5
        scores += torch.full((len(q), len(q)), -torch.inf).triu(1)
        attended = torch.einsum("hqn,nhd->qhd", scores.softmax(-1), v).flatten(1)
        u = residual + attended @ its["self_attn.o_proj.weight"].T + its.get("self_attn.o_proj.bias", 0.0)
        inner = _normed(u, its["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(inner @ its["mlp.gate_proj.weight"].T)
        return u + (gate * (inner @ its["mlp.up_proj.weight"].T)) @ its["mlp.down_proj.weight"].T

    def draft_at_once(self, text: Sequence[int]) -> Tensor:
        """Return logits [K, V] of the rows that draft: that of the newest token, and those of masks behind it."""
        count = self.form.num_tokens
        masks = self.fused(self.outer["mask_hidden"].reshape(1, -1)).expand(count - 1, -1)
        states = torch.cat([self.fused(self.states(text[:-1])), masks])
        return self.run_all([*text[1:], *[MASK_ID] * (count - 1)], states)[0][-count:]

    def draft(self, text: Sequence[int], candidates: Sequence[int], first: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Return logits and state behind a text and behind each candidate; the first token has no row.

        Args:
            first: place of the first token that is read.
        """
        first = max(first, 1)
        token_ids, states = list(text[first:]), self.fused(self.states(text[:-1]))[first - 1 :]
        found = [self.run(token_ids, states)]
        for candidate in candidates:
            token_ids, states = [*token_ids, candidate], torch.cat([states, found[-1][1][None]])
            found.append(self.run(token_ids, states))
        return found

    @property
    def stored(self) -> dict[str, Tensor]:
        """All tensors under the names of the form."""
        found = {**self.outer, **{self.form.prefix + name: tensor for name, tensor in self.tensors.items()}}
        if self.form.has_subset:
            vocab_size = self.target.config.vocab_size
            found["d2t"] = self.ids - torch.arange(len(self.ids))
            found["t2d"] = torch.isin(torch.arange(vocab_size), self.ids)
        return found

    def config(self) -> dict[str, Any]:
        """Return what config.json has."""
        of_layer = {
            "hidden_size": WIDTH,
            "intermediate_size": len(self.tensors["mlp.up_proj.weight"]),
            "num_hidden_layers": 1 + self.form.num_more,
            **self.sizes,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "max_position_embeddings": 16,  # which is no limit
            "vocab_size": self.target.config.vocab_size,
            "hidden_act": "silu",
            "torch_dtype": "float32",
            "tie_word_embeddings": True,  # as transformers writes it for some, and no head does
        }
        stated = {"draft_vocab_size": len(self.ids), **self.form.stated}
        if self.form.is_nested:
            return {**stated, "transformer_layer_config": {**of_layer, "model_type": "llama"}}
        return {**of_layer, **stated}

    def save_gguf(
        self,
        file: Path,
        *,
        kind: Kind = Kind.F32,
        without: Sequence[str] = (),
        changes: Mapping[str, np.ndarray[Any, Any]] | None = None,
        stated: Mapping[str, Any] | None = None,
    ) -> str:
        """Write a GGUF file as llama.cpp's converter does; return its name. Arguments as of `save`."""
        facts: dict[str, Any] = {
            "block_count": 1,
            "context_length": 16,
            "embedding_length": WIDTH,
            "feed_forward_length": len(self.tensors["mlp.up_proj.weight"]),
            "attention.head_count": self.sizes["num_attention_heads"],
            "attention.head_count_kv": self.sizes["num_key_value_heads"],
            "attention.key_length": self.sizes["head_dim"],
            "attention.layer_norm_rms_epsilon": EPS,
            "rope.freq_base": THETA,
            "target_layers": list(self.form.layers),
            "norm_before_residual": self.form.norm_before_residual,
            "norm_before_fc": self.form.norms == "input_norm",
            **(stated or {}),
        }
        writer = GGUFWriter(file, "eagle3")
        for key, value in facts.items():
            if value is None:
                continue
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            add.get(type(value), writer.add_array)(f"eagle3.{key}", value)
        writer.add_token_list([f"<{one}>" for one in range(self.target.config.vocab_size)])
        tensors = {_GGUF_NAMES[name.removesuffix(".weight")]: one.numpy() for name, one in self.outer.items()}
        for name, one in self.tensors.items():
            values, stem = one.numpy(), _GGUF_NAMES[name.removesuffix(".weight")]
            if stem in ("attn_q", "attn_k"):  # halves of a head become neighbours
                halves = values.reshape(-1, 2, self.sizes["head_dim"] // 2, values.shape[-1])
                values = halves.swapaxes(1, 2).reshape(values.shape)
            tensors[f"blk.0.{stem}"] = values
        tensors = {f"{name}.weight": values for name, values in tensors.items()}
        for name, values in {**tensors, "d2t": self.ids.numpy(), **(changes or {})}.items():
            if name in without:
                continue
            of = kind if values.ndim == 2 else Kind.F32
            stored = np.ascontiguousarray(values)
            if name == "d2t":
                writer.add_tensor(name, stored)
            else:
                writer.add_tensor(name, quantize(stored, of), raw_dtype=of)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return str(file)

    def rounded(self, kind: Kind) -> Head:
        """Return the head with the weights that a file of this kind stands for."""

        def of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: torch.from_numpy(dequantize(quantize(one.numpy(), kind), kind)) if one.ndim == 2 else one
                for name, one in tensors.items()
            }

        return replace(self, tensors=of(self.tensors), outer=of(self.outer))

    def save(
        self,
        folder: Path,
        *,
        without: Sequence[str] = (),
        changes: Mapping[str, Tensor] | None = None,
        stated: Mapping[str, Any] | None = None,
    ) -> str:
        """Write a folder; return its name.

        Args:
            without: tensors that are left out.
            changes: tensors in the place of others, or beside them.
            stated: in the place of fields of config.json, or beside them.
        """
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**self.config(), **(stated or {})}), "utf-8")
        tensors = {**self.stored, **(changes or {})}
        kept = {name: tensor.clone().contiguous() for name, tensor in tensors.items() if name not in without}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        return str(folder)


def save_target(head: Head, folder: Path) -> str:
    """Write the folder of a head's target; return its name."""
    head.target.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def drafting_of(target: str, folder: str, head: Head) -> Drafting:
    """Return the writer of a head in a folder or a file."""
    return Drafting(target, lambda runner, _: load_head(folder, runner, dtype="float32", cache_dir=""), head)


def random_head(form: Form, *, seed: int = 0, heads: int = 8, kv_heads: int = 4) -> Head:
    """Return the same random target and head each time."""
    vocab_size, make = len(make_tokenizer()), torch.Generator().manual_seed(seed)
    target = tiny_llama(
        vocab_size,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        max_position_embeddings=512,
        **NO_ENDS,
    )
    head_dim = WIDTH // heads
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=make) / columns**0.5

    def norm(size: int) -> Tensor:
        return 1.0 + 0.2 * torch.randn(size, generator=make)

    def layer(num_inputs: int) -> dict[str, Tensor]:
        return {
            **{f"{name}.weight": norm(WIDTH) for name in ("input_layernorm", "post_attention_layernorm")},
            "self_attn.q_proj.weight": matrix(heads * head_dim, num_inputs),
            "self_attn.k_proj.weight": matrix(kv_heads * head_dim, num_inputs),
            "self_attn.v_proj.weight": matrix(kv_heads * head_dim, num_inputs),
            "self_attn.o_proj.weight": matrix(WIDTH, heads * head_dim),
            "mlp.gate_proj.weight": matrix(96, WIDTH),
            "mlp.up_proj.weight": matrix(96, WIDTH),
            "mlp.down_proj.weight": matrix(WIDTH, 96),
        }

    tensors = {"hidden_norm.weight": norm(WIDTH), **layer(2 * WIDTH)}
    if form.has_head_norms:
        tensors |= {f"self_attn.{one}_norm.weight": norm(head_dim) for one in "qk"}
    if form.has_biases:
        tensors |= {
            f"self_attn.{one}_proj.bias": torch.randn(len(tensors[f"self_attn.{one}_proj.weight"]), generator=make)
            for one in "qkvo"
        }
    ids = torch.arange(vocab_size)
    if form.has_subset:
        ids = torch.randperm(vocab_size, generator=make)[:SUBSET].sort().values
    outer = {
        "fc.weight": matrix(WIDTH, len(form.layers) * WIDTH),
        "norm.weight": norm(WIDTH),
        "lm_head.weight": matrix(len(ids), WIDTH) * 4,
    }
    if form.norms == "input_norm":
        outer["input_norm.weight"] = norm(len(form.layers) * WIDTH)
    elif form.norms:
        outer |= {f"fc_norm.{i}.weight": norm(WIDTH) for i in range(len(form.layers))}
    for idx in range(1, form.num_more + 1):
        outer |= {f"layers.{idx}.{name}": one for name, one in layer(WIDTH).items()}
    if form.num_tokens > 1:
        outer["mask_hidden"] = torch.randn(1, 1, len(form.layers) * WIDTH, generator=make)
    if form.has_embeddings:
        outer["embed_tokens.weight"] = matrix(vocab_size, WIDTH)
    return Head(target, form, tensors, outer, ids, sizes)


def right_head(of: str) -> Head:
    """Return a target whose next token follows from its last one, and a head that is right at every depth.

    Embeddings are the powers of a rotation of one vector, so that the next one is a rotation of the newest token's, or
    of the state before it, twice. Attention is on the row itself: its query and key are the token's embedding.

    Args:
        of: "token" or "state": the half of a row that the head reads. A shift by one of that half makes it wrong.
    """
    form = replace(FORMS["SafeAILab" if of == "state" else "speculators"])
    made = random_head(form, heads=1, kv_heads=1)
    target, tensors, outer = made.target, dict(made.tensors), dict(made.outer)
    embeddings, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    num_tokens = len(embeddings)
    turns = 2 * torch.pi * torch.arange(3, 3 + 2 * WIDTH, 4, dtype=torch.float64) / num_tokens
    angles = turns[None] * torch.arange(num_tokens, dtype=torch.float64)[:, None]
    rotation, pairs, one = torch.zeros(WIDTH, WIDTH), torch.arange(0, WIDTH, 2), torch.eye(WIDTH)
    rotation[pairs, pairs] = rotation[pairs + 1, pairs + 1] = turns.cos().float()
    rotation[pairs + 1, pairs], rotation[pairs, pairs + 1] = turns.sin().float(), -turns.sin().float()
    with torch.no_grad():
        embeddings.copy_(torch.stack([angles.cos(), angles.sin()], -1).reshape(num_tokens, WIDTH))
        head.copy_(embeddings.roll(1, 0))  # the logit of each token is highest behind the one before it
        for name, weight in target.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
    nothing = torch.zeros(WIDTH, WIDTH)
    is_of_token, size = of == "token", 0.5**0.5  # of the numbers of an embedding
    tensors |= {
        "input_layernorm.weight": torch.full((WIDTH,), size),
        "hidden_norm.weight": torch.zeros(WIDTH) if is_of_token else torch.full((WIDTH,), size),
        "self_attn.q_proj.weight": torch.cat([8 * one, nothing], -1),
        "self_attn.k_proj.weight": torch.cat([8 * one, nothing], -1),
        "self_attn.v_proj.weight": torch.cat([rotation, nothing] if is_of_token else [nothing, rotation - one], -1),
        "self_attn.o_proj.weight": one,
        "mlp.down_proj.weight": torch.zeros_like(tensors["mlp.down_proj.weight"]),
    }
    ids = torch.arange(num_tokens - 1, -1, -1)
    outer |= {
        "fc.weight": torch.cat([nothing, nothing, rotation], -1),
        "norm.weight": torch.ones(WIDTH),
        "lm_head.weight": embeddings.detach()[ids],
    }
    return Head(target, form, tensors, outer, ids, made.sizes)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def _turned(heads: Tensor) -> Tensor:
    """Return heads [n, heads, d] of a chain, turned by their places."""
    size = heads.shape[-1]
    frequencies = THETA ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(len(heads), dtype=torch.float64)[:, None] * frequencies
    cos, sin = (one.float().repeat(1, 2)[:, None] for one in (angles.cos(), angles.sin()))
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin
