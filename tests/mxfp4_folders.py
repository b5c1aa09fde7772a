"""Folders whose experts are in MXFP4, as gpt-oss is published, and folders with the numbers that these stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

PUBLISHED = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


def in_mxfp4(folder: Path, out: Path) -> tuple[Path, Path]:
    """Return a folder like another one in bfloat16 with experts in MXFP4, and one with the numbers of these."""
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    stored, meant = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")) or ".experts." not in name:
            continue
        raw = quantize(np.ascontiguousarray(tensor.float().numpy().swapaxes(1, 2)), Kind.MXFP4)
        del stored[name]
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = _blocks_and_scales(raw)
        meant[name] = torch.from_numpy(dequantize(raw, Kind.MXFP4)).bfloat16().transpose(1, 2).contiguous()
    return _like(folder, out / "stored", stored, quantization_config=PUBLISHED), _like(folder, out / "meant", meant)


def _like(folder: Path, made: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    shutil.copytree(folder, made)
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    change_config(made, dtype="bfloat16", **changes)
    return made


def change_config(folder: Path, **changes: Any) -> None:
    """Write some fields of a folder's config.json; those that are ... are taken out."""
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    kept = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def _blocks_and_scales(raw: np.ndarray[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return GGUF's blocks as safetensors have them: bytes of neighbours, and exponents beside them."""
    blocks = raw.reshape(*raw.shape[:-1], -1, 17)
    numbers = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
    both = numbers[..., ::2] | numbers[..., 1::2] << 4
    return torch.from_numpy(both), torch.from_numpy(np.ascontiguousarray(blocks[..., 0]))
