"""Frozen settings: what a request asks for and how the engine is set up."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from card.errors import SettingsError

VerifyShape = Literal["chain", "tree", "trunk"]
Growth = Literal["layer", "best-first", "branch", "fan-out"]
Placement = Literal["inline", "thread", "process"]
ScheduleSetting = Literal["auto", "beside", "turns"]
PolicyName = Literal["auto", "fixed"]
GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]

INT8 = "int8"  # a dtype of ours: 8-bit integers in every product of a runner
MAX_LOGPROBS = 20  # alternatives to a token that a request can be told of

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


def split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the engine and those of drafting. Raises: SettingsError for an unknown name."""
    engine_names, draft_names = ({f.name for f in fields(kind)} for kind in (EngineSettings, DraftSettings))
    for name in settings:
        if name not in engine_names | draft_names:
            raise SettingsError(f"unknown setting {name!r}; known: {', '.join(sorted(engine_names | draft_names))}")
    engine = {name: value for name, value in settings.items() if name in engine_names}
    return engine, {name: value for name, value in settings.items() if name in draft_names}


def parse_size(text: str) -> int:
    """Return the bytes that "512M", "2GiB" or "1000000" means; units are powers of 1,024. Raises: SettingsError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    size = int(float(found[1]) * _SIZE_UNITS[found[2].upper()]) if found else 0
    _require(size > 0, "a memory size", "a number of bytes above 0 such as 512M or 2GiB", text)
    return size


def _checked_bias(given: object) -> LogitBias:
    """Return a bias that cannot be changed. Raises: SettingsError."""
    given = {} if given is None else given
    _require(isinstance(given, Mapping), "logit_bias", "a mapping of token ids to numbers", given)
    assert isinstance(given, Mapping)
    for token_id, value in given.items():
        is_id = isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0
        _require(is_id, "a token of logit_bias", "an id of 0 or more", token_id)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and -100.0 <= value <= 100.0
        _require(is_number, f"the logit_bias of token {token_id}", "a number from -100 to 100", value)
    return LogitBias({int(token_id): float(value) for token_id, value in sorted(given.items())})


class _Replaceable:
    """Lets a frozen settings object be copied with some values changed; unknown names raise."""

    def replace(self, **changes: Any) -> Self:
        """Return a copy with ``changes``. Raises: SettingsError for a name that does not exist."""
        known = {f.name for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        for name in changes:
            if name not in known:
                raise SettingsError(f"unknown setting {name!r}; known: {', '.join(sorted(known))}")
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text must look like from its first new token to its end."""

    kind: GrammarKind
    source: str = ""  # JSON of a schema, a regular expression of the whole text, or a grammar in Lark's notation

    def __post_init__(self) -> None:
        _require_choice("kind of a grammar", self.kind, get_args(GrammarKind))
        _require(isinstance(self.source, str), "source of a grammar", "a string", self.source)
        has_source = bool(self.source.strip())
        if self.kind == "json_object":
            _require(not has_source, "source of a grammar", "empty for json_object: any object will do", self.source)
        else:
            _require(has_source, "source of a grammar", f"a {self.kind} that is not empty", self.source)


class LogitBias(Mapping[int, float]):
    """What is added to the logits of some tokens: a mapping that cannot be changed, so that it can be hashed."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[int, float]) -> None:
        self._values = dict(values)

    def __getitem__(self, token_id: int) -> float:
        return self._values[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


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
    presence_penalty: float = 0.0  # taken off the logit of every token that the answer has already
    frequency_penalty: float = 0.0  # the same, as often as the answer has it
    repetition_penalty: float = 1.0  # above 1 makes every token less likely that prompt or answer have already
    logit_bias: Mapping[int, float] = LogitBias({})  # added to the logits of these tokens, before any penalty
    min_tokens: int = 0  # so many new tokens come before any that ends the text, and before stop strings count
    grammar: Grammar | None = None  # the text keeps to it; it ends the text where nothing more can follow
    logprobs: int | None = None  # report each token's log-probability, and those of so many of the likeliest ones
    speculates: bool = True  # if not, nothing is proposed for this request: plain decoding beside others
    shows_tree: bool = False  # report the candidates that lay beside each token
    shown_token_ids: tuple[int, ...] = ()  # special tokens that the text shows; it leaves the others out

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "shown_token_ids", tuple(self.shown_token_ids or ()))
        _require_kinds(self, {int: ("top_k", "max_tokens"), float: ("temperature", "top_p", "min_p")})
        _require(self.seed is None or isinstance(self.seed, int), "seed", "a whole number or None", self.seed)
        _require(all(isinstance(s, str) for s in self.stop), "stop", "a list of strings", self.stop)
        for name in ("stop_token_ids", "shown_token_ids"):
            ids = getattr(self, name)
            _require(all(isinstance(i, int) for i in ids), name, "a list of ids", ids)
            _require(all(i >= 0 for i in ids), name, "a list of ids of 0 or more", ids)
        _require(0.0 <= self.temperature < float("inf"), "temperature", "0 or more", self.temperature)
        _require(self.top_k >= 0, "top_k", "0 (keep all) or more", self.top_k)
        _require(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1", self.top_p)
        _require(0.0 <= self.min_p < 1.0, "min_p", "at least 0 and below 1", self.min_p)
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed", "an integer from 0 to 2**63 - 1", self.seed)
        _require(self.max_tokens >= 1, "max_tokens", "1 or more", self.max_tokens)
        _require(all(self.stop), "stop", "a list of strings that are not empty", self.stop)
        self._check_shaping()

    def _check_shaping(self) -> None:
        penalties = ("presence_penalty", "frequency_penalty")
        flags = ("ignore_eos", "speculates", "shows_tree")
        _require_kinds(self, {int: ("min_tokens",), float: (*penalties, "repetition_penalty"), bool: flags})
        for name in penalties:
            _require(-2.0 <= getattr(self, name) <= 2.0, name, "from -2 to 2", getattr(self, name))
        is_factor = 0.0 < self.repetition_penalty < math.inf
        _require(is_factor, "repetition_penalty", "above 0, 1 changes nothing", self.repetition_penalty)
        are_within = 0 <= self.min_tokens <= self.max_tokens
        _require(are_within, "min_tokens", f"from 0 to max_tokens ({self.max_tokens})", self.min_tokens)
        _require(
            self.logprobs is None or (type(self.logprobs) is int and 0 <= self.logprobs <= MAX_LOGPROBS),
            "logprobs",
            f"None or a number of alternatives from 0 to {MAX_LOGPROBS}",
            self.logprobs,
        )
        is_grammar = self.grammar is None or isinstance(self.grammar, Grammar)
        _require(is_grammar, "grammar", "a card.config.Grammar or None", self.grammar)
        if self.grammar is not None and self.ignore_eos:
            raise SettingsError(
                "ignore_eos does not go with a grammar, whose end is the end of the text; leave one out"
            )
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingRule:
    """The part of the sampling parameters that looks at the text before a position."""

    num_prompt_tokens: int
    end_ids: tuple[int, ...] = ()  # tokens that end the text, held back until there are min_tokens new ones
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None

    @classmethod
    def of(cls, params: SamplingParams, *, num_prompt_tokens: int, end_ids: frozenset[int]) -> ShapingRule | None:
        """Return the rule of these parameters; None if they leave the logits as they are."""
        rule = cls(
            num_prompt_tokens=num_prompt_tokens,
            end_ids=tuple(sorted(end_ids)) if params.min_tokens else (),
            min_tokens=params.min_tokens if end_ids else 0,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=tuple(params.logit_bias.items()),
            grammar=params.grammar,
        )
        return None if rule == cls(num_prompt_tokens=num_prompt_tokens) else rule

    @property
    def has_penalties(self) -> bool:
        """Whether it matters which tokens the text has."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


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
    branch_below: float = 0.7  # branch: the trunk ends at the first token less likely than this
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

    target: str = "demo-target"  # folder, GGUF file, hub name, or demo-target
    draft: str | None = None  # folder, GGUF file, hub name, or demo-draft; None decodes without a drafter
    method: str = "card"
    placement: Placement | None = None  # of the drafter: own process, own thread, or in the target's; None: by method
    schedule: ScheduleSetting = "auto"  # drafter beside the target, turns taken on all cores, or whichever is faster
    policy: PolicyName = (
        "auto"  # tune what was not set, by measurement; or take the settings and their defaults as they are
    )
    draft_address: str | None = None  # tcp://host:port of a draft server to use instead of a drafter of one's own
    draft_keys: str | None = None  # folder with the CURVE keys for it, as made by `card keys`
    dtype: str = "auto"  # as stored, or int8, float32, bfloat16, float16, float64
    draft_dtype: str | None = None  # of the draft model; None: as dtype
    draft_vocab: int | None = None  # the draft model proposes the first so many tokens and special ones; None: all
    device: str = "cpu"
    draft_device: str | None = None  # None: the target's device
    target_cost: str | None = None  # inflate the target to the price of so many parameters, such as 300M
    max_model_len: int | None = None  # most tokens of a request; None takes the model's limit, at most 4096
    max_num_seqs: int = 16  # most requests that run at once; the others wait
    kv_cache_memory: str | None = (
        None  # most memory of the target's KV, such as 2GiB; None: by max_num_seqs and the RAM
    )
    prefill_chunk: int = 64  # most prompt tokens run in one pass while other requests are being answered
    threads: int | None = None  # torch threads of the target; None: as many of its cores as do not slow it down
    draft_threads: int = 1
    cores: tuple[int, ...] | None = None  # CPU cores of the target; None shares out what the process may use
    draft_cores: tuple[int, ...] | None = None
    wait_for_drafter: bool | None = (
        None  # before the first token, so that all have candidates; None: unless it is tuned
    )
    draft_optional: bool = False  # decode plainly while there is no draft server at draft_address
    cache: bool = True  # keep what was measured at start, and converted weights, for the next start
    cache_dir: str | None = None  # folder for it; None: by the system's custom
    start_timeout_s: float = 120.0  # longest time for a drafter to load
    drafter_timeout_s: float = 3.0  # silence after which a drafter counts as hung and is replaced
    hrad: str = "auto"  # predictor of rejections for specbranch: a file, off, or auto: the one of the demo pair for it
    writers: tuple[str, ...] | None = None  # candidate writers, beam is the draft model; None: by method
    suffix_store: str | None = None  # file that the writer `store` keeps finished texts in; it needs one
    suffix_store_key: str = "default"  # texts under another key are neither read nor counted
    suffix_store_tokens: int = 1_000_000  # most tokens kept under a key; the oldest texts go first

    @property
    def weights_dir(self) -> str | None:
        """Where converted weights are kept, as the loaders take it: empty for nowhere, None by the system's custom."""
        return self.cache_dir if self.cache else ""

    @property
    def dtype_of_draft(self) -> str:
        """What the draft model computes in."""
        return self.draft_dtype or self.dtype

    def __post_init__(self) -> None:
        if self.placement is not None:
            _require_choice("placement", self.placement, get_args(Placement))
        _require_choice("schedule", self.schedule, get_args(ScheduleSetting))
        _require_choice("policy", self.policy, get_args(PolicyName))
        counts = ("draft_threads", "max_num_seqs", "prefill_chunk", "suffix_store_tokens")
        _require_kinds(self, {int: counts, bool: ("draft_optional", "cache")})
        for name in counts:
            _require(getattr(self, name) >= 1, name, "1 or more", getattr(self, name))
        _require(
            self.draft_address is not None or not self.draft_optional,
            "draft_optional",
            "given with draft_address only, which it is about",
            self.draft_optional,
        )
        _require(self.threads is None or self.threads >= 1, "threads", "1 or more", self.threads)
        is_count = self.draft_vocab is None or (type(self.draft_vocab) is int and self.draft_vocab >= 1)
        _require(is_count, "draft_vocab", "a whole number of 1 or more", self.draft_vocab)
        _require(
            self.draft_vocab is None or self.draft_address is None,
            "draft_vocab",
            "left out with draft_address, whose server has the draft model",
            self.draft_vocab,
        )
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
