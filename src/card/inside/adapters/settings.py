"""Settings of CARD inside another engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from card.config import DraftSettings, parse_size
from card.config.drafting import MAX_BEAM_WIDTH, MAX_LEAD
from card.config.fields import Setting, check, declared, refuse_unknown, require, setting
from card.config.reading import DRAFTING, DRAFTING_HERE, refuse_unread
from card.drafting.local import writer_names
from card.engine.offers import DRAFTER
from card.errors import SettingsError

_NEEDS_TREES = frozenset({"lookahead"})  # learns from candidates beside the best path
_NEEDS_STATES = frozenset({"ctc"})  # drafts from the target's hidden states
_DEFAULT_WRITERS = ("suffix", "recycling")
# Nodes of one drafter pass beside the engine; in turns it is one, as the engine waits for every node.
# Evidence: with 2 and 3 one request takes 4 % more steps, and 16 as many (benchmarks/LOG.md).
_BEAM_WIDTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """The writers of candidates, and where the draft model runs."""

    draft: str | None = None  # folder, GGUF file, hub name or demo-draft; None: no local draft model
    draft_address: str | None = None  # tcp://host:port of a draft server to use instead
    draft_keys: str | None = None  # folder with the keys for it, as made by `card keys`
    # whether the draft model runs beside the engine, or in turns with it in its process
    schedule: Literal["beside", "turns"] = "beside"
    # beam is the draft model; (): all writers that need no further settings
    writers: tuple[str, ...] = setting((), allowed="a list of names such as beam,suffix")
    draft_dtype: str = setting("auto", read_by=DRAFTING_HERE)  # as stored, or int8, float32, bfloat16, float16
    draft_device: str = setting("cpu", read_by=DRAFTING_HERE)  # of the draft model, such as cuda:1
    # most memory for its KV rows, such as 2GiB; None: 16 texts of full length
    draft_kv_cache_memory: str | None = setting(None, read_by=DRAFTING_HERE)
    draft_threads: int = setting(1, least=1, read_by=DRAFTING_HERE)
    # CPU cores of the drafter's process; None: free ones
    draft_cores: tuple[int, ...] | None = setting(
        None, least=0, allowed="a list of core numbers such as 2,3", read_by=DRAFTING_HERE
    )
    draft_optional: bool = setting(
        False, read_by=DRAFTING
    )  # start without waiting for the drafter, which joins when it is ready
    # most nodes of one drafter pass; None: 4 beside the engine, 1 in turns
    beam_width: int | None = setting(None, least=1, most=MAX_BEAM_WIDTH, read_by=DRAFTING)
    lead: int = setting(24, least=1, most=MAX_LEAD, read_by=DRAFTING)  # most layers beyond the last committed token
    row_cost: float | None = setting(None, least=0, most=1)  # tokens that a candidate must gain; None: as measured
    drafter_timeout_s: float = setting(
        3.0, above=0, unit="seconds", read_by=DRAFTING
    )  # silence after which a drafter is replaced
    start_timeout_s: float = setting(
        120.0, above=0, unit="seconds", read_by=DRAFTING
    )  # longest time for a drafter to load
    suffix_store: str | None = None  # file in which the writer `store` keeps finished texts
    suffix_store_tokens: int = setting(1_000_000, least=1, read_by="writer store")  # most tokens kept in it
    # serves figures to this machine; None: only the process's registry has them
    metrics_port: int | None = setting(None, least=1, most=65535, allowed="a port from 1 to 65535")

    def __post_init__(self) -> None:
        check(self)
        if self.draft_kv_cache_memory is not None:
            parse_size(self.draft_kv_cache_memory, "draft_kv_cache_memory")
        has_draft = self.draft is not None or self.draft_address is not None
        if not self.writers:
            object.__setattr__(self, "writers", ((DRAFTER,) if has_draft else ()) + _DEFAULT_WRITERS)
        self._check_writers(has_draft)

    def _check_writers(self, has_draft: bool) -> None:
        known = (DRAFTER, *(name for name in writer_names() if name not in _NEEDS_TREES | _NEEDS_STATES))
        for name in self.writers:
            if name in _NEEDS_TREES:
                raise SettingsError(f"the writer {name} needs trees, and this engine verifies chains; leave it out")
            if name in _NEEDS_STATES:
                raise SettingsError(
                    f"the writer {name} needs the target's hidden states, and this engine keeps them; leave it out"
                )
            if name not in known:
                raise SettingsError(f"unknown writer {name!r}; known: {', '.join(known)}")
        if len(set(self.writers)) < len(self.writers):
            raise SettingsError(f"each writer can be named once, got {', '.join(self.writers)}")
        if self.draft is not None and self.draft_address is not None:
            raise SettingsError("draft and draft_address are two drafters; leave one of them out")
        if has_draft != (DRAFTER in self.writers):
            missing = "one of draft and draft_address" if DRAFTER in self.writers else f"the writer {DRAFTER}"
            raise SettingsError(f"the writer {DRAFTER} and a draft model go together; {missing} is missing")
        if self.schedule == "turns" and self.draft is None:
            raise SettingsError(
                "in turns the draft model is in the engine's process; give draft, or leave schedule out"
            )
        if self.schedule == "turns" and (self.draft_optional or self.draft_cores is not None):
            raise SettingsError(
                "draft_optional and draft_cores are for a drafter beside the engine; leave them out in turns"
            )
        if self.draft_keys is not None and self.draft_address is None:
            raise SettingsError("draft_keys are for a draft server; give draft_address too")
        if (self.suffix_store is None) == ("store" in self.writers):
            raise SettingsError("the writer store and the file suffix_store go together; give both or neither")
        there = {f"writer {name}" for name in self.writers} | ({DRAFTING} if has_draft else set())
        there |= set() if self.draft is None else {DRAFTING_HERE}
        given = {name: getattr(self, name) for name in declared(AdapterSettings)}
        refuse_unread(given, declared(AdapterSettings), frozenset(there), f"an engine with {', '.join(self.writers)}")

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """Return the settings in a mapping, such as one from JSON.

        Lists may be texts with commas.

        Raises: SettingsError for an unknown name, or a value of the wrong kind or out of range.
        """
        if not isinstance(given, Mapping):
            raise SettingsError(f"settings must be a mapping of names to values, got {given!r}")
        known, values = declared(AdapterSettings), dict(given)
        refuse_unknown(values, known)
        for name, value in given.items():
            one = known[name]
            if value is None and one.is_optional:
                continue
            if one.is_list:
                values[name] = _listed(one, value)
            elif one.kind is str:
                require(isinstance(value, str) and value != "", name, "a text", value)
        return cls(**values)

    def draft_settings(self, num_speculative_tokens: int) -> DraftSettings:
        """Return the draft settings for an engine that verifies chains of at most ``num_speculative_tokens`` tokens."""
        return DraftSettings(
            beam_width=self.beam_width or (1 if self.schedule == "turns" else _BEAM_WIDTH),
            lead=self.lead,
            budget=num_speculative_tokens,
            num_speculative_tokens=num_speculative_tokens,
            coupled_noise=False,  # the engine's noise is not ours
        )


def _listed(one: Setting, value: Any) -> tuple[Any, ...]:
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if one.kind is int and isinstance(value, str) and all(part.isdecimal() for part in parts):
        parts = [int(part) for part in parts]
    holds = isinstance(parts, list | tuple) and len(parts) > 0 and "" not in parts
    require(holds, one.name, one.rule.allowed, value)
    return tuple(parts)
