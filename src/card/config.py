"""Frozen settings: what a request asks for and how the engine is set up."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from card.errors import SettingsError

VerifyShape = Literal["chain", "tree", "trunk"]
Growth = Literal["layer", "best-first", "branch", "fan-out"]
Placement = Literal["inline", "thread", "process"]
Schedule = Literal["auto", "beside", "turns"]
PolicyName = Literal["auto", "fixed"]

_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _require(holds: bool, name: str, allowed: str, value: object) -> None:
    if not holds:
        raise SettingsError(f"{name} must be {allowed}, got {value!r}")


def _require_kinds(settings: object, kinds: dict[type, tuple[str, ...]]) -> None:
    """Refuse values of the wrong kind: a float takes an int, an int takes nothing else, a flag is no number."""
    for kind, names in kinds.items():
        for name in names:
            value = getattr(settings, name)
            accepted = (int, float) if kind is float else kind
            is_flag = isinstance(value, bool)
            words = {int: "a whole number", float: "a number", bool: "True or False"}
            _require(isinstance(value, accepted) and is_flag == (kind is bool), name, words[kind], value)


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    _require(value in choices, name, "one of " + ", ".join(choices), value)


def parse_size(text: str) -> int:
    """Return the bytes that "512M", "2GiB" or "1000000" means; units are powers of 1,024. Raises: SettingsError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    size = int(float(found[1]) * _SIZE_UNITS[found[2].upper()]) if found else 0
    _require(size > 0, "a memory size", "a number of bytes above 0 such as 512M or 2GiB", text)
    return size


class _Replaceable:
    """Lets a frozen settings object be copied with some values changed; unknown names raise."""

    def replace(self, **changes: Any) -> Self:
        """Return a copy with ``changes``. Raises: SettingsError for a name that does not exist."""
        known = {f.name for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        for name in changes:
            if name not in known:
                raise SettingsError(f"unknown setting {name!r}; known: {', '.join(sorted(known))}")
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(_Replaceable):
    """How the target's logits become tokens, and when a request ends. Same names as in vLLM."""

    temperature: float = 1.0  # 0 takes the most likely token
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None draws one; the result reports it
    max_tokens: int = 256  # most new tokens, the end token included
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    stop_token_ids: tuple[int, ...] = ()  # end tokens besides the model's own
    ignore_eos: bool = False  # go on past the model's own end tokens

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _require_kinds(self, {int: ("top_k", "max_tokens"), float: ("temperature", "top_p", "min_p")})
        _require(self.seed is None or isinstance(self.seed, int), "seed", "a whole number or None", self.seed)
        _require(all(isinstance(s, str) for s in self.stop), "stop", "a list of strings", self.stop)
        _require(
            all(isinstance(i, int) for i in self.stop_token_ids), "stop_token_ids", "a list of ids", self.stop_token_ids
        )
        _require(0.0 <= self.temperature < float("inf"), "temperature", "0 or more", self.temperature)
        _require(self.top_k >= 0, "top_k", "0 (keep all) or more", self.top_k)
        _require(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1", self.top_p)
        _require(0.0 <= self.min_p < 1.0, "min_p", "at least 0 and below 1", self.min_p)
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed", "an integer from 0 to 2**63 - 1", self.seed)
        _require(self.max_tokens >= 1, "max_tokens", "1 or more", self.max_tokens)
        _require(all(self.stop), "stop", "a list of strings that are not empty", self.stop)
        _require(
            all(i >= 0 for i in self.stop_token_ids),
            "stop_token_ids",
            "a list of ids of 0 or more",
            self.stop_token_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings(_Replaceable):
    """How candidates are drafted and how many of them the target verifies."""

    verify: VerifyShape = "chain"
    beam_width: int = 6  # K: most nodes made in one drafter pass
    branch: int = 8  # most children kept of one node, in both tiers together
    budget: int = 16  # most nodes verified in one round
    min_verify_prob: float = 0.2  # a candidate whose path is less likely than this is not verified
    lead: int = 24  # most layers held beyond the last committed token
    max_nodes: int = 4096  # most nodes held at once
    min_path_logprob: float = -12.0  # a path less likely than this is not expanded
    growth: Growth = "layer"  # which candidates the drafter expands and which of their children it keeps
    branch_below: float = 0.4  # branch: the trunk ends at the first token less likely than this
    fan_out: tuple[int, ...] = (3,)  # fan-out: branches at each position of the chain; the last number goes on
    num_speculative_tokens: int = 6  # sps: tokens drafted before each verification; branch, fan-out: of each branch
    coupled_noise: bool = True  # at temperature > 0, rank candidates with the target's own sampling noise
    max_wait_s: float = 0.0  # longest time the target waits when the cache holds less than min_depth
    min_depth: int = 1  # candidates on the best path below which the target waits, if it may
    waits_after_miss: bool = True  # if not, a round after a miss runs the last token alone, at once

    def __post_init__(self) -> None:
        if isinstance(self.fan_out, int | list):
            object.__setattr__(
                self, "fan_out", (self.fan_out,) if isinstance(self.fan_out, int) else tuple(self.fan_out)
            )
        _require_choice("verify", self.verify, get_args(VerifyShape))
        _require_choice("growth", self.growth, get_args(Growth))
        counts = ("beam_width", "branch", "budget", "lead", "max_nodes", "num_speculative_tokens", "min_depth")
        numbers = ("min_verify_prob", "min_path_logprob", "max_wait_s", "branch_below")
        _require_kinds(self, {int: counts, float: numbers, bool: ("coupled_noise", "waits_after_miss")})
        for name in counts:
            _require(getattr(self, name) >= 1, name, "1 or more", getattr(self, name))
        _require(self.min_path_logprob < 0, "min_path_logprob", "below 0", self.min_path_logprob)
        _require(0 <= self.min_verify_prob < 1, "min_verify_prob", "at least 0 and below 1", self.min_verify_prob)
        _require(self.max_wait_s >= 0, "max_wait_s", "0 or more seconds", self.max_wait_s)
        _require(0 <= self.branch_below <= 1, "branch_below", "from 0 to 1", self.branch_below)
        is_listed = isinstance(self.fan_out, tuple) and 1 <= len(self.fan_out) <= 64
        has_counts = is_listed and all(type(num) is int and num >= 0 for num in self.fan_out)
        _require(has_counts, "fan_out", "1 to 64 whole numbers of 0 or more", self.fan_out)
        _require(
            self.max_nodes >= self.beam_width, "max_nodes", f"at least beam_width ({self.beam_width})", self.max_nodes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(_Replaceable):
    """Which models run where and how."""

    target: str = "demo-target"  # folder, hub name, or demo-target
    draft: str | None = None  # folder, hub name, or demo-draft; None decodes without a drafter
    second_draft: str | None = None  # another draft model, whose candidates join those of the first
    method: str = "card"
    placement: Placement | None = None  # of the drafter: own process, own thread, or in the target's; None: by method
    schedule: Schedule = "auto"  # drafter beside the target, turns taken on all cores, or whichever is faster
    policy: PolicyName = (
        "auto"  # tune what was not set, by measurement; or take the settings and their defaults as they are
    )
    draft_address: str | None = None  # tcp://host:port of a draft server to use instead of a drafter of one's own
    draft_keys: str | None = None  # folder with the CURVE keys for it, as made by `card keys`
    dtype: str = "auto"  # as stored, or float32, bfloat16, float16, float64
    device: str = "cpu"
    draft_device: str | None = None  # None: the target's device
    target_cost: str | None = None  # inflate the target to the price of so many parameters, such as 300M
    max_model_len: int | None = None  # most tokens of a request; None takes the model's limit, at most 4096
    max_num_seqs: int = 16  # most requests that run at once; the others wait
    kv_cache_memory: str | None = (
        None  # most memory of the target's KV, such as 2GiB; None: by max_num_seqs and the RAM
    )
    prefill_chunk: int = 64  # most prompt tokens run in one pass while other requests are being answered
    threads: int | None = None  # torch threads of the target; None: as many as it has cores
    draft_threads: int = 1
    cores: tuple[int, ...] | None = None  # CPU cores of the target; None shares out what the process may use
    draft_cores: tuple[int, ...] | None = None
    start_timeout_s: float = 120.0  # longest time for a drafter to load
    drafter_timeout_s: float = 3.0  # silence after which a drafter counts as hung and is replaced
    hrad: str = "auto"  # predictor of rejections for specbranch: a file, off, or auto: the one of the demo pair for it
    writers: tuple[str, ...] | None = None  # candidate writers, beam is the draft model; None: by method
    suffix_store: str | None = None  # file that the writer `store` keeps finished texts in; it needs one
    suffix_store_key: str = "default"  # texts under another key are neither read nor counted
    suffix_store_tokens: int = 1_000_000  # most tokens kept under a key; the oldest texts go first

    def __post_init__(self) -> None:
        if self.placement is not None:
            _require_choice("placement", self.placement, get_args(Placement))
        _require_choice("schedule", self.schedule, get_args(Schedule))
        _require_choice("policy", self.policy, get_args(PolicyName))
        counts = ("draft_threads", "max_num_seqs", "prefill_chunk", "suffix_store_tokens")
        _require_kinds(self, {int: counts})
        for name in counts:
            _require(getattr(self, name) >= 1, name, "1 or more", getattr(self, name))
        _require(self.threads is None or self.threads >= 1, "threads", "1 or more", self.threads)
        for name in ("start_timeout_s", "drafter_timeout_s"):
            _require(getattr(self, name) > 0, name, "above 0 seconds", getattr(self, name))
        _require(
            self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "2 or more", self.max_model_len
        )
        if self.writers is not None:
            names = (self.writers,) if isinstance(self.writers, str) else tuple(self.writers)
            _require(bool(names) and all(isinstance(n, str) for n in names), "writers", "a list of names", self.writers)
            object.__setattr__(self, "writers", names)
        if self.kv_cache_memory is not None:
            parse_size(self.kv_cache_memory)
        _require(
            self.draft_address is None or self.placement is None,
            "placement",
            "left out with draft_address, which says where the drafter is",
            self.placement,
        )
