"""Facts that make a folder a drafter of several tokens a pass: `pard.json`, or the name of a mask token alone.

Such a model reads copies of one mask token behind the text. The text's last token and each mask guess one token each.
Published folders name the mask token in config.json; our own file, `pard.json`, states more.
Source: PARD, arXiv:2504.18583.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from card.errors import ModelError
from card.machine.folders import expanded, replaced
from card.models.files.weight_files import raw_config
from card.models.loaded_model import LoadedModel

FILE = "pard.json"
STATES_FILE = "pard_features.safetensors"
MOST_TOKENS = 64  # of a pass
MASK_KEY = "pard_token"  # of config.json, as the authors' folders have it
# All keys that engines find a mask token under, in the order in which vLLM looks.
_MASK_KEYS = ("dflash_config.mask_token_id", "mask_token_id", "dspark_noise_token_id", MASK_KEY, "ptd_token_id")
_PUBLISHED_TOKENS = 12  # of a pass of published folders, which do not say: as their authors run them
_FORMAT = 1
_MARK = "parallel_draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDraft:
    """Facts of a model that drafts K tokens in one pass."""

    mask_id: int
    num_tokens: int  # K, which it was trained for
    temperatures: tuple[float, ...]  # [K] by which the logits of each guess are divided, so that its chances are true
    vocab_size: int  # rows of the model's embedding
    states_file: Path | None = None  # the layer that reads a target's hidden states; None: it reads none

    def save(self, folder: Path, figures: Mapping[str, Any]) -> None:
        """Write the file; ``figures`` of the training are for people only and are not read back."""
        facts: dict[str, Any] = {
            "format": _FORMAT,
            "mask_id": self.mask_id,
            "num_tokens": self.num_tokens,
            "temperatures": list(self.temperatures),
            "vocab_size": self.vocab_size,
        }
        if self.states_file is not None:
            facts["target_features"] = self.states_file.name
        with replaced(folder / FILE) as part:
            part.write_text(json.dumps({**facts, "training": dict(figures)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> ParallelDraft:
        """Read the file of a folder. Raises: ModelError if it is cut off, of another format, or makes no sense."""
        try:
            read = json.loads((folder / FILE).read_text(encoding="utf-8"))
            facts = cls(
                mask_id=read["mask_id"],
                num_tokens=read["num_tokens"],
                temperatures=tuple(read["temperatures"]),
                vocab_size=read["vocab_size"],
                states_file=folder / STATES_FILE if "target_features" in read else None,
            )
            is_usable = read["format"] == _FORMAT and facts._is_plausible()
            is_usable = is_usable and read.get("target_features") in (None, STATES_FILE)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            is_usable = False
        if not is_usable:
            raise ModelError(
                f"{folder / FILE} is cut off, damaged or of another format (this version reads format {_FORMAT}); "
                "copy the folder again, or make it with card train pard"
            )
        return facts

    def _is_plausible(self) -> bool:
        counts = (self.mask_id, self.num_tokens, self.vocab_size)
        return (
            all(type(count) is int for count in counts)
            and 0 <= self.mask_id < self.vocab_size
            and 1 <= self.num_tokens <= MOST_TOKENS
            and len(self.temperatures) == self.num_tokens
            and all(math.isfinite(one) and one > 0 for one in self.temperatures)
        )


def names_mask(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json names the mask token of a model that drafts several tokens in one pass."""
    return _mask_in(config) is not None


def is_parallel_draft(folder: Path) -> bool:
    """Return whether a model folder says that it drafts several tokens in one pass."""
    config = raw_config(folder)
    return (folder / FILE).is_file() or (isinstance(config, dict) and names_mask(config))


def read_parallel_draft(folder: Path | None, model: LoadedModel) -> None:
    """Mark a loaded model as its folder says, or its config where there is no `pard.json`.

    Args:
        folder: None: there is none on this disk.
    Raises: ModelError if the file is damaged, or of another model, or if the model has no row for the mask token.
    """
    num_rows = int(model.config.get_text_config().vocab_size)
    if folder is not None and (folder / FILE).is_file():
        facts = ParallelDraft.load(folder)
        if facts.vocab_size != num_rows:
            raise ModelError(
                f"{folder / FILE} belongs to another model: it states {facts.vocab_size} embedding rows, config.json "
                f"{num_rows}; copy the folder again, or make it with card train pard"
            )
        setattr(model, _MARK, facts)
    elif (mask := _mask_in(model.config.to_dict())) is not None:
        key, mask_id = mask
        if type(mask_id) is not int or not 0 <= mask_id < num_rows:
            raise ModelError(
                f"config.json names {str(mask_id)[:40]!r} as the mask token ({key}), which must be the id of one of "
                f"the model's {num_rows} tokens; download the folder again"
            )
        setattr(model, _MARK, _published(mask_id, num_rows))


def _published(mask_id: int, num_rows: int) -> ParallelDraft:
    """Return the facts of a published drafter, which states its mask token only."""
    ones = (1.0,) * _PUBLISHED_TOKENS
    return ParallelDraft(mask_id=mask_id, num_tokens=len(ones), temperatures=ones, vocab_size=num_rows)


def _mask_in(config: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the first key that names a mask token, and what it names; None if there is none."""
    for key in _MASK_KEYS:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return key, value
    return None


def parallel_draft_of(model: LoadedModel) -> ParallelDraft | None:
    """Return what a model was marked with; None for a model that makes one token a pass."""
    return getattr(model, _MARK, None)


def wants_states(draft: str | LoadedModel) -> bool:
    """Return whether a model that drafts several tokens a pass reads its target's hidden states.

    One on the hub is not looked at. Raises: ModelError if what its folder says is damaged.
    """
    if not isinstance(draft, str):
        facts = parallel_draft_of(draft)
    else:
        folder = expanded(draft)  # one that is not there is refused when it is loaded
        facts = ParallelDraft.load(folder) if (folder / FILE).is_file() else None
    return facts is not None and facts.states_file is not None
