"""Latencies of earlier starts, kept in a file: what was measured once on this machine is not measured at each start."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from card.config import EngineSettings
from card.kernels.machine_code import kernels_identity
from card.machine.container import cpu_quota, num_usable_cores
from card.machine.expert_cost import ExpertCounts
from card.machine.folders import expanded, is_safe_folder, read_kept, write_kept
from card.machine.packages import installed_version
from card.machine.pass_cost import PassCost
from card.machine.processor import processor_name
from card.machine.threads import CoreSet
from card.models.demo import DEMO_NAMES, demo_folder
from card.models.files.gguf.parts import part_files
from card.models.files.places import is_gguf
from card.models.names import OWN_BLOCK

logger = logging.getLogger(__name__)

_MOST_ENTRIES = 200  # the oldest go first
_METHOD = "passes of different tokens"  # of measuring; with another one all is measured anew
_MAX_AGE_S = 30 * 86400.0  # after which machines and libraries may have changed in ways that no key tells


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement."""

    about: dict[str, str]  # what the key was made of, for people
    measured_at: float  # seconds since the epoch
    is_checked: bool = False  # its logits were found to be transformers' own
    threads: int | None = None  # a number of threads or cores that was found
    agreement: float | None = None  # share of a draft model's tokens that were the target's
    pass_s: tuple[tuple[int, float], ...] = ()
    per_sequence_s: float = 0.0
    per_context_row_s: float = 0.0
    experts: ExpertCounts | None = None


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file."""

    digest: str  # of the entries: half a number is a number too
    entries: dict[str, _Entry]


class LatencyStore:
    """The file with the latencies of one machine's models. If it is damaged or missing, decoding goes on without it."""

    def __init__(self, folder: Path | None) -> None:
        """Read the file in ``folder``; None keeps nothing, nor does a folder that others can write to."""
        is_kept = folder is not None and is_safe_folder(folder, "measured latencies")
        self._file = folder / "latencies.json" if folder is not None and is_kept else None
        self._entries: dict[str, _Entry] = _read(self._file)

    def cost(self, key: LatencyKey | None) -> PassCost | None:
        """Return what passes cost by an earlier start; None if it is not known."""
        entry = self._find(key)
        if entry is None or len(entry.pass_s) < 2:
            return None
        return PassCost(entry.pass_s, entry.per_sequence_s, entry.per_context_row_s, entry.experts)

    def threads(self, key: LatencyKey | None) -> int | None:
        """Return how many threads, or cores, an earlier start found; None if it is not known."""
        entry = self._find(key)
        return None if entry is None else entry.threads

    def agreement(self, key: LatencyKey | None) -> float | None:
        """Return how often a draft model's token was the target's in earlier starts; None if it is not known."""
        entry = self._find(key)
        return None if entry is None else entry.agreement

    def keep_agreement(self, key: LatencyKey | None, agreement: float) -> None:
        """Keep such a share; without a key nothing is kept."""
        self._keep(key, agreement=agreement)

    def keep_cost(self, key: LatencyKey | None, cost: PassCost) -> None:
        """Keep a measurement; without a key nothing is kept."""
        parts = {"per_sequence_s": cost.per_sequence_s, "per_context_row_s": cost.per_context_row_s}
        self._keep(key, pass_s=cost.points, experts=cost.experts, **parts)

    def keep_threads(self, key: LatencyKey | None, threads: int) -> None:
        """Keep a number of threads or cores; without a key nothing is kept."""
        self._keep(key, threads=threads)

    def was_checked(self, key: LatencyKey | None) -> bool:
        """Return whether the logits of a model were compared at an earlier start."""
        entry = self._find(key)
        return entry is not None and entry.is_checked

    def keep_check(self, key: LatencyKey | None) -> None:
        """Keep that they were; without a key nothing is kept."""
        self._keep(key, is_checked=True)

    def forget(self, key: LatencyKey | None) -> None:
        """Forget one measurement; without a key there is none."""
        if key is None or self._file is None:
            return
        self._entries = {**self._entries, **_read(self._file)}
        if self._entries.pop(key.digest, None) is not None:
            _write(self._file, self._entries)

    def forget_times(self) -> None:
        """Forget all but checks and agreements: this machine is not what it was, and these know nothing of time."""
        self._entries = {
            digest: one
            for digest, one in (self._entries | _read(self._file)).items()
            if one.is_checked or one.agreement is not None
        }
        if self._file is not None:
            _write(self._file, self._entries)

    def _find(self, key: LatencyKey | None) -> _Entry | None:
        entry = None if key is None else self._entries.get(key.digest)
        return entry if entry is not None and time.time() - entry.measured_at < _MAX_AGE_S else None

    def _keep(self, key: LatencyKey | None, **found: Any) -> None:
        if key is None or self._file is None:
            return
        self._entries |= _read(self._file)  # other processes write there, too
        self._entries[key.digest] = _Entry(about=key.about, measured_at=time.time(), **found)
        newest = sorted(self._entries.items(), key=lambda item: -item[1].measured_at)[:_MOST_ENTRIES]
        self._entries = dict(newest)
        _write(self._file, self._entries)


class LatencyKey(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a latency depends on."""

    about: dict[str, str]

    @property
    def digest(self) -> str:
        """The key of its entry in the file."""
        return hashlib.sha256(msgspec.json.encode(self.about, order="sorted")).hexdigest()[:32]

    @classmethod
    def of(
        cls, what: str, model: str, *, dtype: str, device: str, core_set: CoreSet, more: str = ""
    ) -> LatencyKey | None:
        """Return the key of a model's latency; None if its files cannot be looked at now, so that it has none.

        Args:
            what: which of its latencies.
            model: a folder, a GGUF file, a hub name, or one of the demo pair.
            more: whatever else it depends on.
        """
        try:
            identity, kernels = _identity(model), kernels_identity() if device.startswith("cpu") else ""
        except OSError as error:
            logger.info("latencies of %s are not looked up: %s", model, error.strerror or error)
            return None
        about = {
            "what": what,
            "method": _METHOD,
            "model": identity,
            "dtype": dtype,
            "device": device,
            "threads": str(core_set.threads),
            "cores": str(len(core_set.cores)),
            "more": more,
            "machine": _machine(),
            "kernels": kernels,
            "versions": f"card {installed_version('card-decoding')}, torch {installed_version('torch')}",
        }
        return cls(about=about)


def drafter_key(what: str, settings: EngineSettings, core_set: CoreSet, more: str = "") -> LatencyKey | None:
    """Return the key of a latency of the draft model that the settings name; others as of `LatencyKey.of`."""
    assert settings.draft is not None
    device, dtype = settings.draft_device or settings.device, settings.dtype_of_draft
    more += f"{settings.target} decides tokens" if settings.draft_vocab is None else f"{settings.draft_vocab} tokens"
    draft = settings.draft
    if draft == OWN_BLOCK:
        draft, more = settings.target, f"{more} of its block"
    return LatencyKey.of(what, draft, dtype=dtype, device=device, core_set=core_set, more=more)


def _read(file: Path | None) -> dict[str, _Entry]:
    """Return the entries of a file; none if it is not there, or not as it was written."""
    if file is None:
        return {}
    try:
        stored = msgspec.json.decode(read_kept(file), type=_Kept)
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError):  # ValueError: words that are no UTF-8
        return {}
    return stored.entries if stored.digest == _digest(stored.entries) else {}


def _write(file: Path, entries: dict[str, _Entry]) -> None:
    """Replace the file atomically, so that no process reads half of it."""
    stored = _Kept(digest=_digest(entries), entries=entries)
    try:
        write_kept(file, msgspec.json.format(msgspec.json.encode(stored)))
    except OSError as error:
        logger.info("measured latencies cannot be kept in %s: %s", file, error.strerror or error)


def _digest(entries: dict[str, _Entry]) -> str:
    return hashlib.sha256(msgspec.json.encode(entries, order="sorted")).hexdigest()


def _identity(model: str) -> str:
    """Return a model's name, and for a folder or a GGUF file a digest that identifies its weights."""
    folder = demo_folder(DEMO_NAMES[model]) if model in DEMO_NAMES else expanded(model)
    if folder.is_file() and is_gguf(folder):
        facts = [fact for part in part_files(folder) for fact in _facts(part)]
        return hashlib.sha256(repr(tuple(facts)).encode()).hexdigest()[:32]
    config = folder / "config.json"
    if not config.is_file():
        return model
    files = sorted(one for one in folder.iterdir() if one.suffix in (".safetensors", ".bin"))
    sizes = [_facts(one) for one in files]
    return hashlib.sha256(config.read_bytes() + repr(sizes).encode()).hexdigest()[:32]


def _facts(file: Path) -> tuple[str, int, int]:
    stat = file.stat()
    return file.name, stat.st_size, stat.st_mtime_ns


@functools.cache
def _machine() -> str:
    quota = cpu_quota()
    allowed = "" if quota is None else f", a quota of {quota:g}"
    return f"{processor_name()}, {num_usable_cores()} of {os.cpu_count()} cores{allowed}"
