"""Write the values of fields that config.json does not state, by the classes of the installed transformers.

    python scripts/make_config_defaults.py  # for each architecture that has a pass of our own

An entry has values that differ from those of `DecoderConfig`, and its own fields by type.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from card.models.architectures import all_architectures
from card.models.decoder_config import fields_of

TABLE = Path(__file__).parents[1] / "src" / "card" / "models" / "config_defaults.json"
_USUAL = {**fields_of("", {}).defaults, "rope_theta": 10_000.0}
OF_NO_DECODER = PreTrainedConfig().to_dict().keys() - _USUAL.keys()  # labels and the like
_ALSO = {"swiglu_alpha": "int", "swiglu_limit": "int", "block_ffn_dim_multiplier": "None"}  # types, too


def table() -> dict[str, dict[str, Any]]:
    """Return the entry of each ``model_type``."""
    return {one.model_type: entry_of(CONFIG_MAPPING[one.model_type]) for one in all_architectures()}


def entry_of(config_class: Any) -> dict[str, Any]:
    """Return the values of the usual fields that differ, and all fields of its own by their types."""
    stated = {one.name: one for one in fields(config_class) if one.name not in OF_NO_DECODER}
    common = {name: one.default for name, one in stated.items() if _USUAL.get(name, one.default) != one.default}
    if config_class.default_theta != _USUAL["rope_theta"]:
        common["rope_theta"] = config_class.default_theta
    own: dict[str, dict[str, Any]] = {}
    for name, one in stated.items():
        if name not in _USUAL:
            own.setdefault(_types_of(one), {})[name] = one.default
    return {"common": common, "own": own}


def _types_of(stated: Any) -> str:
    if "Literal" in str(stated.type):
        return "str | None"
    types = str(getattr(stated.type, "__name__", stated.type) if isinstance(stated.type, type) else stated.type)
    return " | ".join([types, *([_ALSO[stated.name]] if stated.name in _ALSO else [])])


def text_of(entries: dict[str, dict[str, Any]]) -> str:
    """Return the file, with a line for each entry."""
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    TABLE.write_text(text_of(table()), "utf-8")
