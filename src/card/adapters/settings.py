"""What an operator can set of CARD inside another engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from card.config import DraftSettings, parse_size
from card.errors import SettingsError
from card.tree.messages import MAX_BEAM_WIDTH, MAX_LEAD
from card.workers.offers import DRAFTER
from card.writers.local import writer_names

_NEEDS_TREES = frozenset({"lookahead"})  # what it learns from are candidates beside the best path
_DEFAULT_WRITERS = ("suffix", "recycling")
_SCHEDULES = ("beside", "turns")
_BEAM_WIDTHS = {"beside": 4, "turns": 1}  # in turns the engine waits for every node
_NOUNS: Mapping[type, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """Who writes candidates, and where the draft model runs."""

    draft: str | None = None  # folder, GGUF file, hub name or demo-draft; None: no draft model of one's own
    draft_address: str | None = None  # tcp://host:port of a draft server to use instead
    draft_keys: str | None = None  # folder with the keys for it, as made by `card keys`
    schedule: str = "beside"  # the draft model runs beside the engine, or in turns with it, in its process
    writers: tuple[str, ...] = ()  # beam is the draft model; (): all that need no more settings
    draft_dtype: str = "auto"  # as stored, or int8, float32, bfloat16, float16
    draft_device: str = "cpu"  # of the draft model, such as cuda:1
    draft_kv_cache_memory: str | None = None  # most memory for its KV rows, such as 2GiB; None: 16 texts of full length
    draft_threads: int = 1
    draft_cores: tuple[int, ...] | None = None  # CPU cores of the drafter's process; None: those that are free
    draft_optional: bool = False  # start without waiting for the drafter; it joins when it is ready
    beam_width: int | None = None  # most nodes made in one drafter pass; None: 4 beside the engine, 1 in turns
    lead: int = 24  # most layers held beyond the last committed token
    row_cost: float | None = None  # tokens that a candidate must be worth, from 0 to 1; None: as measured
    drafter_timeout_s: float = 3.0  # silence after which a drafter counts as hung and is replaced
    start_timeout_s: float = 120.0  # longest time for a drafter to load
    suffix_store: str | None = None  # file in which the writer `store` keeps finished texts
    suffix_store_tokens: int = 1_000_000  # most tokens kept in it
    metrics_port: int | None = None  # serves figures on this machine alone; None: in the process's registry only

    def __post_init__(self) -> None:
        if self.draft_kv_cache_memory is not None:
            parse_size(self.draft_kv_cache_memory)
        has_draft = self.draft is not None or self.draft_address is not None
        if not self.writers:
            object.__setattr__(self, "writers", ((DRAFTER,) if has_draft else ()) + _DEFAULT_WRITERS)
        self._check_writers(has_draft)
        rules = (
            ("draft_threads", self.draft_threads >= 1, "1 or more"),
            ("schedule", self.schedule in _SCHEDULES, " or ".join(_SCHEDULES)),
            (
                "beam_width",
                self.beam_width is None or 1 <= self.beam_width <= MAX_BEAM_WIDTH,
                f"from 1 to {MAX_BEAM_WIDTH}",
            ),
            ("lead", 1 <= self.lead <= MAX_LEAD, f"from 1 to {MAX_LEAD}"),
            ("row_cost", self.row_cost is None or 0.0 <= self.row_cost <= 1.0, "from 0 to 1"),
            ("drafter_timeout_s", self.drafter_timeout_s > 0.0, "above 0 seconds"),
            ("start_timeout_s", self.start_timeout_s > 0.0, "above 0 seconds"),
            ("suffix_store_tokens", self.suffix_store_tokens >= 1, "1 or more"),
            ("metrics_port", 1 <= (self.metrics_port or 1) <= 65535, "a port from 1 to 65535"),
            ("draft_cores", min(self.draft_cores or (0,)) >= 0, "numbers of CPU cores"),
        )
        for name, holds, allowed in rules:
            if not holds:
                raise SettingsError(f"{name} must be {allowed}, got {getattr(self, name)}")

    def _check_writers(self, has_draft: bool) -> None:
        known = (DRAFTER, *(name for name in writer_names() if name not in _NEEDS_TREES))
        for name in self.writers:
            if name in _NEEDS_TREES:
                raise SettingsError(f"the writer {name} needs trees, and this engine verifies chains; leave it out")
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
        if self.draft_keys is not None and self.draft_address is None:
            raise SettingsError("draft_keys are for a draft server; give draft_address too")
        if (self.suffix_store is None) == ("store" in self.writers):
            raise SettingsError("the writer store and the file suffix_store go together; give both or neither")

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """Return the settings that a mapping, such as one from JSON, holds.

        Lists may be given as texts with commas.

        Raises: SettingsError for an unknown name, or a value of the wrong kind or out of range.
        """
        if not isinstance(given, Mapping):
            raise SettingsError(f"settings must be a mapping of names to values, got {given!r}")
        known = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                raise SettingsError(f"unknown setting {name!r}; known: {', '.join(known)}")
            if name in ("writers", "draft_cores"):
                values[name] = _as_tuple(name, value, str if name == "writers" else int)
            else:
                values[name] = _checked(name, value, str(known[name].type))
        return cls(**values)

    def draft_settings(self, num_speculative_tokens: int) -> DraftSettings:
        """Return how a request is to be drafted for an engine that verifies chains of at most so many tokens."""
        beam_width = self.beam_width or _BEAM_WIDTHS[self.schedule]
        return DraftSettings(
            beam_width=beam_width,
            lead=self.lead,
            budget=num_speculative_tokens,
            num_speculative_tokens=num_speculative_tokens,
            coupled_noise=False,  # the engine's noise is not ours
            max_nodes=max(1024, 2 * self.lead * beam_width),
        )


def _as_tuple(name: str, value: Any, kind: type) -> tuple[Any, ...]:
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if kind is int and isinstance(value, str) and all(part.isdecimal() for part in parts):
        parts = [int(part) for part in parts]
    is_list = isinstance(parts, list | tuple) and len(parts) > 0
    if not is_list or not all(type(part) is kind and part != "" for part in parts):
        what = "names" if kind is str else "core numbers"
        raise SettingsError(f"{name} must be a list of {what} such as {_EXAMPLES[name]}, got {value!r}")
    return tuple(parts)


_EXAMPLES: Mapping[str, str] = {"writers": "beam,suffix", "draft_cores": "2,3"}


def _checked(name: str, value: Any, annotation: str) -> Any:
    kind = next(kind for kind in (bool, int, float, str) if annotation.startswith(kind.__name__))
    if value is None and annotation.endswith("| None"):
        return None
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool) or value == "":
        raise SettingsError(f"{name} must be {_NOUNS[kind]}, got {value!r}")
    return value
