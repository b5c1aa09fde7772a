"""What a drafter outside the target's process is told when it starts."""

from __future__ import annotations

from typing import Any

import msgspec

_SERVED_TREE_ROWS = 512  # per request, whatever lead and width its client asks for
_SERVED_WARM_UP_TOKENS = 16  # most tokens of a usual pass, as far as that is known before any client comes


class DraftModel(msgspec.Struct, frozen=True, kw_only=True):
    """Which draft model, and how much of it."""

    name: str  # a folder, a GGUF file, a hub name, or demo-draft
    dtype: str
    device: str
    max_model_len: int  # the model's own limit counts if it is lower
    max_tree_rows: int
    warm_up_tokens: int  # most tokens of a usual pass
    kv_cache_bytes: int | None = None  # memory for KV rows; None: a few sequences of full length
    measures: bool = True  # find out what passes cost; targets are told
    cache_dir: str | None = None  # for converted weights, as of `load_model`
    has_unknown_target: bool = False  # the target must be told which tokenizer this is

    @classmethod
    def to_serve(cls, name: str, **model: Any) -> DraftModel:
        """Return a model for targets that are not known yet; ``model`` are other fields."""
        return cls(
            name=name,
            max_tree_rows=_SERVED_TREE_ROWS,
            warm_up_tokens=_SERVED_WARM_UP_TOKENS,
            has_unknown_target=True,
            **model,
        )


class DrafterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a child needs to know; its parent's link fills in the first three."""

    address: str = ""
    incarnation: int = 0
    parent_pid: int = 0
    threads: int
    cores: tuple[int, ...]  # where the parent has put the process; empty: anywhere
    model: DraftModel
