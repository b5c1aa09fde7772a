"""Generation configs: the end tokens, the sampling and the length of answers that a model's maker states."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from card.models.files.weight_files import raw_config

GENERATION_NAME = "generation_config.json"
_INNER = ("decoder", "generator", "text_config")  # configs in a config.json that may state what it does not


@dataclass(kw_only=True)
class GenerationConfig:
    """Facts under transformers' names; None is not stated. Values are checked by `card.models.facts.check_facts`."""

    eos_token_id: Any = None
    max_new_tokens: Any = None
    do_sample: Any = None
    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> Self:
        """Return the facts that are known here of all that is stated."""
        return cls(**{one.name: stated.get(one.name) for one in dataclasses.fields(cls)})

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what is stated."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def read_generation_config(folder: Path) -> GenerationConfig:
    """Return the generation config of a folder; without generation_config.json the end tokens of config.json alone.

    Like transformers, it does not take sampling from config.json, where older models have it.
    Raises: OSError, ValueError if the file cannot be read.
    """
    file = folder / GENERATION_NAME
    if file.is_file():
        stated = json.loads(file.read_text("utf-8"))
        if not isinstance(stated, dict):
            raise ValueError(f"it is no JSON object but {str(stated)[:40]}")
        return GenerationConfig.of(stated)
    config = raw_config(folder)
    outer = config if isinstance(config, dict) else {}
    places = [outer, *(outer[name] for name in _INNER if isinstance(outer.get(name), dict))]
    ends = [place["eos_token_id"] for place in places if place.get("eos_token_id") is not None]
    return GenerationConfig(eos_token_id=ends[0] if ends else None)
