"""Frozen settings: what a request asks for and how the engine is set up."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from card.errors import SettingsError
from card.fields import check, require, setting, take_lists

VerifyShape = Literal["chain", "tree", "trunk"]
Growth = Literal["layer", "best-first", "branch", "fan-out"]
Placement = Literal["inline", "thread", "process", "remote"]  # where a drafter runs
PlacementSetting = Literal["inline", "thread", "process"]  # draft_address says remote
ScheduleSetting = Literal["auto", "beside", "turns"]
PolicyName = Literal["auto", "fixed"]
GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]

INT8 = "int8"  # a dtype of ours: 8-bit integers in every product of a runner
MAX_LOGPROBS = 20  # alternatives to a token that a request can be told of

_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


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
    require(size > 0, "a memory size", "a number of bytes above 0 such as 512M or 2GiB", text)
    return size


def _checked_bias(given: object) -> LogitBias:
    """Return a bias that cannot be changed. Raises: SettingsError."""
    given = {} if given is None else given
    require(isinstance(given, Mapping), "logit_bias", "a mapping of token ids to numbers", given)
    assert isinstance(given, Mapping)
    for token_id, value in given.items():
        is_id = isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0
        require(is_id, "a token of logit_bias", "an id of 0 or more", token_id)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and -100.0 <= value <= 100.0
        require(is_number, f"the logit_bias of token {token_id}", "a number from -100 to 100", value)
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
        check(self, of=" of a grammar")
        require(isinstance(self.source, str), "source of a grammar", "a string", self.source)
        has_source = bool(self.source.strip())
        if self.kind == "json_object":
            require(not has_source, "source of a grammar", "empty for json_object: any object will do", self.source)
        else:
            require(has_source, "source of a grammar", f"a {self.kind} that is not empty", self.source)


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

    temperature: float = setting(1.0, "0 takes the most likely token.", least=0, below=math.inf)
    top_k: int = setting(0, "Keep the k most likely tokens; 0 keeps all.", least=0, allowed="0 (keep all) or more")
    top_p: float = setting(1.0, "Keep the likeliest tokens up to this mass.", above=0, most=1)
    min_p: float = setting(0.0, "Drop tokens below this share of the best one.", least=0, below=1)
    seed: int | None = setting(
        None, "Same seed, same text.", least=0, below=2**63, allowed="an integer from 0 to 2**63 - 1", shown="drawn"
    )
    max_tokens: int = setting(256, "Most new tokens.", least=1)  # the end token included
    stop: tuple[str, ...] = setting(
        (), "End before this string.", least=1, allowed="a list of strings that are not empty"
    )
    stop_token_ids: tuple[int, ...] = setting(
        (), "End tokens besides the model's own.", least=0, allowed="a list of ids of 0 or more"
    )
    ignore_eos: bool = setting(False, "Go on past the model's end tokens.")
    presence_penalty: float = setting(0.0, "Off tokens that the answer has, -2 to 2.", least=-2, most=2)
    frequency_penalty: float = setting(0.0, "The same, as often as it has them.", least=-2, most=2)
    repetition_penalty: float = setting(
        1.0,
        "Above 1: less of what prompt or answer have already.",
        above=0,
        below=math.inf,
        allowed="above 0, 1 changes nothing",
    )
    logit_bias: Mapping[int, float] = setting(LogitBias({}), "Added to the logits of tokens, before any penalty.")
    min_tokens: int = setting(0, "New tokens before the text may end by itself.")
    grammar: Grammar | None = setting(
        None, "The text keeps to it, and ends where nothing can follow.", allowed="a card.config.Grammar or None"
    )
    logprobs: int | None = setting(
        None,
        "Report each token's log-probability, and those of so many of the likeliest ones.",
        least=0,
        most=MAX_LOGPROBS,
        allowed=f"None or a number of alternatives from 0 to {MAX_LOGPROBS}",
    )
    speculates: bool = setting(True, "Whether candidates are verified at all.")
    shows_tree: bool = setting(False, "Report the candidates that lay beside each token.")
    shown_token_ids: tuple[int, ...] = setting(
        (), "Special tokens that the text shows.", least=0, allowed="a list of ids of 0 or more"
    )

    def __post_init__(self) -> None:
        take_lists(self)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        check(self)
        are_within = 0 <= self.min_tokens <= self.max_tokens
        require(are_within, "min_tokens", f"from 0 to max_tokens ({self.max_tokens})", self.min_tokens)
        if self.grammar is not None and self.ignore_eos:
            raise SettingsError(
                "ignore_eos does not go with a grammar, whose end is the end of the text; leave one out"
            )


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """The part of the sampling parameters that decides which token follows given logits."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int

    @classmethod
    def of(cls, params: SamplingParams) -> SamplingRule:
        """Return the rule of parameters whose seed has been fixed."""
        if params.seed is None:
            raise SettingsError("seed must be fixed before sampling, got None; draw one first")
        return cls(params.temperature, params.top_k, params.top_p, params.min_p, params.seed)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is taken and no noise is used."""
        return self.temperature == 0.0


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
class TreeShape:
    """How a drafter grows a tree of candidates."""

    beam_width: int = setting(6, "Most candidates made in one drafter pass.", least=1)  # K
    branch: int = setting(8, "Most continuations kept of one candidate.", least=1)  # in both tiers together
    lead: int = setting(24, "Most layers of candidates ahead of the text.", least=1)
    max_nodes: int = setting(4096, "Most candidates held at once.", least=1)
    min_path_logprob: float = setting(-12.0, "A path less likely than this is not expanded.", below=0)
    growth: Growth = setting("layer", f"How the tree of candidates grows: {', '.join(get_args(Growth))}.")
    branch_below: float = setting(0.7, "Probability below which growth branch takes alternatives.", least=0, most=1)
    fan_out: tuple[int, ...] = setting(
        (3,),
        "Outcomes that growth fan-out prepares at each position, such as 4,3,2; the last one repeats.",
        least=0,
        num_items=(1, 64),
        allowed="1 to 64 whole numbers of 0 or more",
    )
    num_speculative_tokens: int = setting(  # of each branch, for growth branch and fan-out
        6, "Tokens drafted per turn where drafter and target take turns.", least=1
    )
    coupled_noise: bool = setting(True, "Rank candidates with the target's sampling noise.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings(TreeShape, _Replaceable):
    """How candidates are drafted and how many of them the target verifies."""

    verify: VerifyShape = setting("chain", f"Shape that the target verifies: {' or '.join(get_args(VerifyShape))}.")
    budget: int = setting(16, "Most candidates verified in one target pass.", least=1)
    min_verify_prob: float = setting(0.2, "A candidate whose path is less likely is not verified.", least=0, below=1)
    max_wait_s: float = setting(
        0.0, "Longest wait for candidates when there are fewer than --min-depth.", least=0, unit="seconds"
    )
    min_depth: int = setting(1, "Length of the best path below which the target waits, if it may.", least=1)
    waits_after_miss: bool = setting(
        True, "Whether a round after a miss waits like others, or runs the last token at once."
    )

    def __post_init__(self) -> None:
        take_lists(self)
        check(self)
        is_enough = self.max_nodes >= self.beam_width
        require(is_enough, "max_nodes", f"at least beam_width ({self.beam_width})", self.max_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(_Replaceable):
    """Which models run where and how."""

    target: str = setting("demo-target", "Target model: a folder, a GGUF file, a hub name, or demo-target.")
    draft: str | None = setting(
        None,
        "Draft model: a folder, a GGUF file, a hub name, or demo-draft, the default beside demo-target.",
    )
    method: str = setting("card", "Who drafts, and how.")
    placement: PlacementSetting | None = setting(
        None, f"Where the drafter runs: {', '.join(get_args(PlacementSetting))}.", shown="by method"
    )
    schedule: ScheduleSetting = setting(
        "auto", "Drafter beside the target, turns taken on all cores, or auto: what is faster here."
    )
    policy: PolicyName = setting("auto", "Tune what you did not set, by measurement (auto), or nothing (fixed).")
    draft_address: str | None = setting(
        None, "Use the draft server at tcp://host:port instead of a drafter of one's own."
    )
    draft_keys: str | None = setting(None, "Folder with the keys for a draft server, as made by card keys.")
    dtype: str = setting("auto", "auto (as stored), int8, float32, bfloat16, float16, float64.")
    draft_dtype: str | None = setting(None, "The same for the draft model.", shown="the target's")
    draft_vocab: int | None = setting(
        None,
        "The draft model proposes the first so many tokens and special ones only: less work in its head, same text.",
        least=1,
        allowed="a whole number of 1 or more",
        shown="all",
    )
    device: str = setting("cpu", "Device of the target: cpu, cuda, cuda:1.")
    draft_device: str | None = setting(None, "Device of the draft model.", shown="the target's")
    target_cost: str | None = setting(
        None, "Inflate the target to the price of so many parameters, such as 300M; same outputs."
    )
    max_model_len: int | None = setting(
        None, "Most tokens of prompt and answer.", least=2, shown="the model's, at most 4096"
    )
    max_num_seqs: int = setting(16, "Most requests that run at once; others wait.", least=1)
    kv_cache_memory: str | None = setting(
        None, "Most memory for the target's KV, such as 2GiB.", shown="by the RAM"
    )  # by max_num_seqs too
    prefill_chunk: int = setting(64, "Most prompt tokens in a pass that also decodes.", least=1)
    threads: int | None = setting(None, "CPU threads of the target.", least=1, shown="as many as do not slow it down")
    draft_threads: int = setting(1, "CPU threads of the drafter.", least=1)
    cores: tuple[int, ...] | None = setting(  # None shares out what the process may use
        None, "CPU cores of the target, such as 0 or 0,1.", least=0, allowed="a list of core numbers"
    )
    draft_cores: tuple[int, ...] | None = setting(
        None, "CPU cores of the drafter.", least=0, allowed="a list of core numbers"
    )
    wait_for_drafter: bool | None = setting(
        None, "Begin once the drafter is up, or at once.", shown="at once under --policy auto"
    )
    draft_optional: bool = setting(
        False,
        "Decode plainly while no draft server answers at --draft-address, or end at once.",
        shown="required",
    )
    cache: bool = setting(True, "Keep measured latencies and converted weights for the next start.", shown="--cache")
    cache_dir: str | None = setting(None, "Folder for what is kept between starts.", shown="~/.cache/card")
    start_timeout_s: float = setting(120.0, "Longest time for a drafter to load.", above=0, unit="seconds")
    drafter_timeout_s: float = setting(
        3.0, "Silence after which the drafter is replaced, in seconds.", above=0, unit="seconds"
    )
    hrad: str = setting("auto", "Predictor for specbranch: a file of card train hrad, off, or auto.")
    writers: tuple[str, ...] | None = setting(
        None,
        "Who proposes candidates, such as beam,suffix; beam is the draft model.",
        num_items=(1, 64),
        allowed="a list of names",
        shown="by method",
    )
    suffix_store: str | None = setting(None, "File in which the writer store keeps finished texts for later requests.")
    suffix_store_key: str = setting("default", "Texts under another key are neither read nor counted.")
    suffix_store_tokens: int = setting(1_000_000, "Most tokens kept under a key; the oldest texts go first.", least=1)

    @property
    def weights_dir(self) -> str | None:
        """Where converted weights are kept, as the loaders take it: empty for nowhere, None by the system's custom."""
        return self.cache_dir if self.cache else ""

    @property
    def dtype_of_draft(self) -> str:
        """What the draft model computes in."""
        return self.draft_dtype or self.dtype

    def __post_init__(self) -> None:
        take_lists(self)
        check(self)
        if self.kv_cache_memory is not None:
            parse_size(self.kv_cache_memory)
        for name, holds, allowed in (
            (
                "draft_optional",
                self.draft_address is not None or not self.draft_optional,
                "given with draft_address only, which it is about",
            ),
            (
                "draft_vocab",
                self.draft_vocab is None or self.draft_address is None,
                "left out with draft_address, whose server has the draft model",
            ),
            (
                "placement",
                self.placement is None or self.draft_address is None,
                "left out with draft_address, which says where the drafter is",
            ),
        ):
            require(holds, name, allowed, getattr(self, name))
