"""Configs and generation configs as makers publish them, all their fields, with sizes for a tiny model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

# What takes the place of the published sizes. A published share of KV heads and a stated head size stay different.
VOCAB = 128
SMALL: Mapping[str, int] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

CONFIGS: dict[str, tuple[dict[str, Any], bool]] = {
    name: (one["config"], one["is_walked"])
    for name, one in json.loads(Path(__file__).with_name("published.json").read_text("utf-8")).items()
}
"""By name: what config.json has, and whether the model is walked directly."""


def save_published(folder: Path, name: str, generation_config: Mapping[str, Any] | None = None) -> None:
    """Write a published config with small sizes, random weights for it, and a generation config if there is one."""
    config = {**CONFIGS[name][0], **SMALL}
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = "float32"  # where no tokens tie
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + (weight.dim() == 1))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
