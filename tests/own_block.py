"""Tiny random checkpoints with a block that drafts, and what transformers' modules make of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from card.models.files.gguf.header import read_header
from tests.gguf_files import SHARED_EXPERTS, classes_of, entry_of, write_gguf
from tests.pair import make_tokenizer
from tests.tiny import CLEAR, NO_ENDS, SIZES

_SIZES: Mapping[str, Any] = {
    **SIZES,
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "initializer_range": CLEAR,
    **NO_ENDS,
}
_DELTA: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5": _DELTA,
    "qwen3_5, tied": {**_DELTA, "tie_word_embeddings": True},
    "qwen3_5_moe": {**_DELTA, **_EXPERTS},
    "qwen3_next": {**_DELTA, **_EXPERTS},
    # Scores without norms of heads: if large, a chain of states carries float32's errors beyond the tests' bound.
    "glm4_moe": {**SHARED_EXPERTS, "attention_bias": True, "pad_token_id": 0, "initializer_range": CLEAR / 2},
    "glm4_moe, norms of heads": {**SHARED_EXPERTS, "use_qk_norm": True, "pad_token_id": 0},
    "qwen2, of MiMo": {"initializer_range": CLEAR / 2},
}
_NUMBERED: Mapping[str, str] = {  # as DeepSeek-V3's and GLM-4.5's folders have them, behind the last layer
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "shared_head.norm.weight",
}
_LISTED: Mapping[str, str] = {  # as MiMo-7B's folders have them, with the columns of the state first
    "fc.weight": "input_proj.weight",
    "pre_fc_norm_embedding.weight": "token_layernorm.weight",
    "pre_fc_norm_hidden.weight": "hidden_layernorm.weight",
    "norm.weight": "final_layernorm.weight",
}
_GGUF_NAMES: Mapping[str, str] = {
    **{part.name: part.gguf_name for kind in ("qwen3_5", "qwen3_5_moe", "glm4_moe") for part in entry_of(kind).parts},
    "fc": "nextn.eh_proj",
    "pre_fc_norm_embedding": "nextn.enorm",
    "pre_fc_norm_hidden": "nextn.hnorm",
    "norm": "nextn.shared_head_norm",
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A target, and its block as a model of one layer with its final norm."""

    target: PreTrainedModel
    block: PreTrainedModel
    join: Tensor  # [D, 2 D]
    token_norm: Tensor
    state_norm: Tensor

    def states(self, token_ids: Sequence[int]) -> Tensor:
        """Return the target's last states, [T, D]."""
        with torch.no_grad():
            ids = torch.tensor([list(token_ids)])
            return self.target(ids, output_hidden_states=True).hidden_states[-1][0]

    def inputs(self, token_ids: Sequence[int], states: Tensor) -> Tensor:
        """Return the inputs of rows, [n, D]: both halves normed, the embedding first."""
        with torch.no_grad():
            embedded = self.target.get_input_embeddings()(torch.tensor(list(token_ids)))
            norms, eps = (self.token_norm, self.state_norm), self.target.config.rms_norm_eps
            halves = [_normed(x, norm + self.offset, eps) for x, norm in zip((embedded, states), norms, strict=True)]
            return torch.cat(halves, -1) @ self.join.T

    def run(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [n, V] and states [n, D] of a chain of rows."""
        with torch.no_grad():
            states = self.block.model(inputs_embeds=inputs[None]).last_hidden_state[0]
            return self.target.lm_head(states), states

    def draft(self, text: Sequence[int], candidates: Sequence[int], first: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Return logits [V] and state [D] behind a text and behind each candidate.

        Args:
            first: place of the first token that is read.
        """
        zeros = torch.zeros(1, self.join.shape[0])
        inputs = self.inputs(text, torch.cat([zeros, self.states(text)[:-1]]))[first:]
        found = []
        for candidate in (*candidates, None):
            logits, states = self.run(inputs)
            found.append((logits[-1], states[-1]))
            if candidate is not None:
                inputs = torch.cat([inputs, self.inputs([candidate], states[-1:])])
        return found

    @property
    def offset(self) -> float:
        """What norms add to their weights."""
        return entry_of(self.target.config.model_type).norm_offset

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The block's weights under the names of published folders."""
        if self.target.config.model_type == "qwen2":
            parts = self.parts | {"fc.weight": self.join.roll(self.join.shape[0], 1)}
            named = {_LISTED.get(name, name.removeprefix("layers.0.")): one for name, one in parts.items()}
            return {f"model.mtp_layers.0.{name}": weight for name, weight in named.items()}
        if self.target.config.model_type != "glm4_moe":
            return {f"mtp.{name}": weight for name, weight in self.parts.items()}
        begin = f"model.layers.{self.target.config.num_hidden_layers}."
        copies = {
            "embed_tokens.weight": self.target.get_input_embeddings().weight.detach(),
            "shared_head.head.weight": self.target.get_output_embeddings().weight.detach(),
        }
        named = {_NUMBERED.get(name, name.removeprefix("layers.0.")): one for name, one in self.parts.items()}
        return {begin + name: weight.clone() for name, weight in {**named, **copies}.items()}

    @property
    def parts(self) -> dict[str, Tensor]:
        """The block's weights under the names that Qwen3.5's folders have behind `mtp.`."""
        inner = {
            name.removeprefix("model."): weight
            for name, weight in self.block.state_dict().items()
            if name.startswith(("model.layers.", "model.norm."))
        }
        inner |= {
            "fc.weight": self.join,
            "pre_fc_norm_embedding.weight": self.token_norm,
            "pre_fc_norm_hidden.weight": self.state_norm,
        }
        return {name: weight.clone() for name, weight in inner.items()}

    def save_gguf(
        self,
        folder: Path,
        file: Path,
        *,
        kind: Kind = Kind.F32,
        without: Sequence[str] = (),
        changes: Mapping[str, np.ndarray[Any, Any]] | None = None,
        num_blocks: int = 1,
    ) -> str:
        """Write a GGUF file with target, block and tokenizer, from a folder made by `save`; return its name.

        Args:
            without, changes: as of `save`, by the names of the file.
            num_blocks: that it states; those behind the first are of ``changes``.
        """
        more = {name: values for name, values in self.gguf_tensors.items() if not name.endswith(tuple(without))}
        more |= changes or {}
        counts = self._gguf_counts(num_blocks)
        return str(write_gguf(folder, file, kind=kind, metadata=counts, more=more))

    def save_block_file(
        self, folder: Path, file: Path, *, kind: Kind = Kind.F32, ids: Sequence[int] | None = None, num_rows: int = 0
    ) -> str:
        """Write a GGUF file with the block alone, as `mtp-*.gguf` beside the model's; return its name.

        Args:
            ids: of the tokens that its head is for; None: all.
            num_rows: of that head, if not one for each of them.
        """
        whole = write_gguf(folder, file.with_name("whole.gguf"))
        layers = tuple(name for name in read_header(whole).tensors if name.startswith("blk."))
        more = dict(self.gguf_tensors)
        if ids is not None:
            layers += ("output.weight",)
            head = self.target.get_output_embeddings().weight.detach().numpy()
            more["output.weight"] = head[: num_rows or len(ids)]
            more["d2t"] = np.array(ids, np.int64)
        counts = self._gguf_counts()
        return str(write_gguf(folder, file, kind=kind, metadata=counts, more=more, without=layers))

    def _gguf_counts(self, num_blocks: int = 1) -> dict[str, Any]:
        return {
            "block_count": self.target.config.num_hidden_layers + num_blocks,
            "nextn_predict_layers": num_blocks,
        }

    @property
    def gguf_tensors(self) -> dict[str, np.ndarray[Any, Any]]:
        """The block's weights under the names of GGUF files."""
        more: dict[str, np.ndarray[Any, Any]] = {}
        begin = f"blk.{self.target.config.num_hidden_layers}"
        for name, weight in self.parts.items():
            stem, _, kind = name.removeprefix("layers.0.").rpartition(".")
            is_norm = weight.ndim == 1 and kind == "weight"
            values = weight.numpy() + np.float32(self.offset if is_norm else 0)
            whole = f"{stem}.{kind}"
            if kind in ("gate_up_proj", "down_proj"):  # of experts
                found = {"ffn_down_exps.weight": values}
                if kind == "gate_up_proj":
                    halves = np.split(values, 2, axis=1)
                    found = dict(zip(("ffn_gate_exps.weight", "ffn_up_exps.weight"), halves, strict=True))
            elif whole in _GGUF_NAMES:  # a vector
                found = {_GGUF_NAMES[whole]: values}
            else:
                found = {f"{_GGUF_NAMES[stem]}.{kind}": values[0] if "shared_expert_gate" in stem else values}
            more |= {f"{begin}.{own}": np.ascontiguousarray(one) for own, one in found.items()}
        if self.target.config.model_type == "glm4_moe":  # whose files have these again
            table = self.target.get_input_embeddings().weight.detach().numpy()
            more |= {f"{begin}.nextn.{own}.weight": table for own in ("embed_tokens", "shared_head_head")}
        return more

    def save(self, folder: Path, *, without: Sequence[str] = (), changes: Mapping[str, Tensor] | None = None) -> str:
        """Write a folder with target, block and tokenizer; return its name.

        Args:
            without: tensors that are left out.
            changes: tensors in the place of the block's, or beside them.
        """
        self.target.save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        block = {**self.tensors, **(changes or {})}
        weights = load_file(folder / "model.safetensors")
        weights |= {name: weight.contiguous() for name, weight in block.items() if name not in without}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text("utf-8"))
        count = "mtp_num_hidden_layers" if "mtp.fc.weight" in self.tensors else "num_nextn_predict_layers"
        if config["model_type"] == "qwen2":
            config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "auto_map": {"AutoConfig": "x.Y"}}
        (folder / "config.json").write_text(json.dumps({**config, count: 1}), "utf-8")
        return str(folder)


def random_checkpoint(kind: str = "qwen3_5", *, seed: int = 0) -> Checkpoint:
    """Return the same random target and block each time; no norm of them is all zeros."""
    (model_class, config_class), changes = classes_of(kind), KINDS[kind]
    sizes = {**_SIZES, "vocab_size": len(make_tokenizer()), **changes}
    rng_state = torch.get_rng_state()
    torch.manual_seed(seed)
    target = model_class(config_class(**sizes))
    of_block = {"layer_types": ["full_attention"]} if "linear_num_key_heads" in sizes else {"first_k_dense_replace": 0}
    block = model_class(config_class(**{**sizes, "num_hidden_layers": 1, **of_block}))
    width, is_centred = sizes["hidden_size"], entry_of(kind.partition(",")[0]).norm_offset > 0
    with torch.no_grad():
        for name, weight in (*target.named_parameters(), *block.named_parameters()):
            if name.endswith("norm.weight"):
                weight.normal_(0.0 if "linear_attn" not in name and is_centred else 1.0, 0.2)
            if name.endswith("_proj.bias"):
                weight.normal_(0.0, 0.2)
        for name, buffer in (*target.named_buffers(), *block.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    join = torch.randn(width, 2 * width) / width**0.5
    norms = [torch.randn(width) * 0.2 + (not is_centred) for _ in range(2)]
    made = Checkpoint(target.train(False), block.train(False), join, *norms)
    torch.set_rng_state(rng_state)
    return made


def right_checkpoint(of: str, kind: str = "qwen3_5") -> Checkpoint:
    """Return a target whose next token follows from its last one, and a block that is right at every depth.

    Embeddings are the powers of a rotation of one vector, so that the next one can be found of the newest token, or of
    the state before it, which is the rotation of the one before.

    Args:
        of: "token" or "state": the half of a row that the block reads. A shift by one of that half makes it wrong.
    """
    made = random_checkpoint(kind)
    embeddings, head = made.target.get_input_embeddings().weight, made.target.get_output_embeddings().weight
    num_tokens, width = embeddings.shape
    turns = 2 * torch.pi * torch.arange(3, 3 + 4 * width // 2, 4, dtype=torch.float64)[: width // 2] / num_tokens
    angles = turns[None] * torch.arange(num_tokens, dtype=torch.float64)[:, None]
    rotation = torch.zeros(width, width)
    pairs = torch.arange(0, width, 2)
    rotation[pairs, pairs] = rotation[pairs + 1, pairs + 1] = turns.cos().float()
    rotation[pairs + 1, pairs], rotation[pairs, pairs + 1] = turns.sin().float(), -turns.sin().float()
    with torch.no_grad():
        embeddings.copy_(torch.stack([angles.cos(), angles.sin()], -1).reshape(num_tokens, width))
        head.copy_(embeddings.roll(1, 0))  # the logit of each token is highest behind the one before it
        for name, weight in (*made.target.named_parameters(), *made.block.named_parameters()):
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
                weight.zero_()
            elif name.endswith("norm.weight"):
                weight.fill_(1 - made.offset)
        made.block.model.norm.weight.fill_(-1 - made.offset)  # so that a block that read embeddings would be wrong
    join = torch.zeros_like(made.join)
    if of == "token":
        join[:, :width] = -torch.eye(width)
    else:
        join[:, width:] = -rotation
    return Checkpoint(made.target, made.block, join, *(torch.full((width,), 1 - made.offset) for _ in range(2)))


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
