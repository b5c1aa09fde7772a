"""Settings of an engine: which models run where and how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, get_args

from card.config.fields import Replaceable, check, declared, make_plain, require, setting
from card.config.reading import DRAFTING, DRAFTING_HERE, IMAGES
from card.errors import named

T = TypeVar("T")
Placement = Literal["inline", "thread", "process", "remote"]  # where a drafter runs
PlacementSetting = Literal["inline", "thread", "process"]  # draft_address says remote
ScheduleSetting = Literal["auto", "beside", "turns"]
PolicyName = Literal["auto", "fixed"]
GenerationConfigSource = Literal["auto", "none"]

# Instructions for integer passes, the fastest first on each kind of processor.
KERNEL_KINDS = ("amx", "avx512-vnni", "avx-vnni", "avx2", "arm-i8mm", "arm-dotprod")
KERNELS_VARIABLE = "CARD_KERNELS"  # sets one for this process and its children
INT8 = "int8"  # a dtype of ours: 8-bit integers in every product of a runner

MAX_THREADS = 1024  # more than any machine has cores
_COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(Replaceable):
    """Settings of an engine: which models run where and how."""

    SECTION: ClassVar[str] = "Machine"

    target: str = setting(
        "demo-target",
        "Target model: a folder, a GGUF file, a hub name, or demo-target.",
        section="Models",
        is_common=True,
    )
    draft: str | None = setting(
        None,
        "Draft model, named like the target; demo-draft for demo-target; mtp for the target's own block.",
        read_by=DRAFTING_HERE,
        section="Models",
        is_common=True,
    )
    method: str = setting("card", "Decoding method: how tokens are drafted.", section="Method", is_common=True)
    writers: tuple[str, ...] | None = setting(
        None,
        "Sources of candidates, such as beam,suffix; beam is the draft model.",
        num_items=(1, 64),
        allowed="a list of names",
        shown="by method",
        section="Method",
        is_common=True,
    )
    placement: PlacementSetting | None = setting(
        None,
        f"Where the drafter runs: {', '.join(get_args(PlacementSetting))}.",
        shown="by method",
        read_by=DRAFTING_HERE,
        section="Method",
    )
    schedule: ScheduleSetting = setting(
        "auto", "Drafter beside the target, in turns, or the faster (auto).", section="Method"
    )
    policy: PolicyName = setting("auto", "Tune all unset options (auto) or nothing (fixed).", section="Method")
    draft_address: str | None = setting(
        None, "Draft server at tcp://host:port.", read_by=DRAFTING, section="Draft server", is_common=True
    )
    draft_optional: bool = setting(
        False,
        "Decode plainly while no draft server answers, or end.",
        shown="required",
        section="Draft server",
        is_common=True,
    )
    draft_keys: str | None = setting(None, "Folder of card keys.", section="Draft server", is_common=True)
    dtype: str = setting(
        "auto", "auto (as stored), int8, float32, bfloat16, float16, float64.", section="Models", is_common=True
    )
    draft_dtype: str | None = setting(
        None,
        "The same for the draft model.",
        shown="the target's",
        read_by=DRAFTING_HERE,
        section="Models",
    )
    draft_vocab: int | None = setting(
        None,
        "Draft only so many tokens.",
        least=1,
        allowed="a whole number of 1 or more",
        shown="by pair",
        read_by=DRAFTING_HERE,
        section="Models",
    )
    device: str = setting("cpu", "Device of the target: cpu, cuda, cuda:1.", section="Models", is_common=True)
    draft_device: str | None = setting(
        None, "Device of the draft model.", shown="the target's", read_by=DRAFTING_HERE, section="Models"
    )
    cuda_graphs: bool = setting(False, "Record passes on CUDA; unproven.", section="Models")
    target_cost: str | None = setting(None, "Inflate the target to 300M, say; same outputs.", section="Models")
    max_model_len: int | None = setting(
        None,
        "Most tokens of prompt and answer.",
        least=2,
        shown="the model's, in a quarter of free RAM",
        section="Models",
        is_common=True,
    )
    threads: int | None = setting(
        None, "CPU threads of the target.", least=1, most=MAX_THREADS, shown="the fastest", is_common=True
    )
    draft_threads: int = setting(1, "CPU threads of the drafter.", least=1, most=MAX_THREADS, read_by=DRAFTING_HERE)
    cores: tuple[int, ...] | None = setting(  # None divides the cores of this process
        None, "CPU cores of the target, such as 0,1.", least=0, allowed="a list of core numbers"
    )
    draft_cores: tuple[int, ...] | None = setting(
        None, "CPU cores of the drafter.", least=0, allowed="a list of core numbers", read_by=DRAFTING_HERE
    )
    max_num_seqs: int = setting(16, "Most requests at once; others wait.", least=1, is_common=True)
    max_images: int = setting(0, "Most images in a prompt.", least=0, section="Images")
    image_dir: str | None = setting(None, "Folder of images that prompts may name.", read_by=IMAGES, section="Images")
    kv_cache_memory: str | None = setting(
        None, "Most target KV, such as 2GiB.", shown="by the RAM"
    )  # by max_num_seqs too
    kv_offload: str | None = setting(None, "Folder for paused KV.")
    prefix_cache: str | None = setting(None, "Folder for lasting KV.")
    prefix_cache_size: str | None = setting(None, "Its size.", shown="4GiB")
    prefill_chunk: int = setting(64, "Most prompt tokens in a pass that also decodes.", least=1)
    wait_for_drafter: bool | None = setting(
        None, "Wait for the drafter at first.", shown="not under --policy auto", read_by=DRAFTING
    )
    cache: bool = setting(True, "Keep latencies and converted weights.", shown="--cache")
    check: bool = setting(True, "Compare passes once with transformers' own.", shown="--check")
    cache_dir: str | None = setting(
        None,
        "Folder for files kept between starts.",
        shown="~/.cache/card",
        allowed=f"a folder; leave it out for the usual one, and set {named('cache')} to False to keep nothing",
    )
    start_timeout_s: float = setting(
        120.0,
        "Longest time for a drafter to load.",
        above=0,
        unit="seconds",
        read_by=DRAFTING,
        is_option=False,
    )
    drafter_timeout_s: float = setting(
        3.0, "Silence after which the drafter is replaced.", above=0, unit="seconds", read_by=DRAFTING
    )
    grammar_timeout_s: float = setting(
        10.0, "Seconds to compile and to follow a grammar.", above=0, unit="seconds", section="Server"
    )
    generation_config: GenerationConfigSource = setting(
        "auto", "Default sampling: the model's, or greedy.", section="Server"
    )
    answer_format: str = setting("auto", "Marks of thoughts and calls.", shown="by template", section="Models")
    chat_template: str | None = setting(None, "Chat template.", shown="the model's", section="Models")
    tool_template: str | None = setting(None, "Template with tools.", shown="the former", section="Models")
    allows_inexact: bool = setting(
        False,
        "Allow a verifier whose text differs from plain decoding; every result then says so.",
        is_option=False,
    )
    own: Mapping[str, Any] = setting(
        factory=dict, meaning="Settings of folders beside the core, by name.", is_option=False
    )

    def of(self, kind: type[T]) -> T:
        """Return the settings of a folder, as its class declares them. Raises: SettingsError for a value out of range.

        Args:
            kind: a dataclass, whose defaults hold for what was not set.
        """
        return kind(**{name: value for name, value in self.own.items() if name in declared(kind)})

    @property
    def weights_dir(self) -> str | None:
        """Folder of converted weights for the loaders: empty keeps none, None uses the system's usual folder."""
        return self.cache_dir if self.cache else ""

    @property
    def dtype_of_draft(self) -> str:
        """The dtype that the draft model computes in."""
        return self.draft_dtype or self.dtype

    def __post_init__(self) -> None:
        make_plain(self)
        check(self)
        if self.target_cost is not None:
            parse_parameter_count(self.target_cost)
        if self.kv_cache_memory is not None:
            parse_size(self.kv_cache_memory, "kv_cache_memory")
        if self.prefix_cache_size is not None:
            parse_size(self.prefix_cache_size, "prefix_cache_size")
            allowed = f"set only together with {named('prefix_cache')}"
            require(self.prefix_cache is not None, "prefix_cache_size", allowed, self.prefix_cache_size)
        has_cuda = any(str(one).startswith("cuda") for one in (self.device, self.draft_device))
        allowed = f"set only together with {named('device')} cuda"
        require(has_cuda or not self.cuda_graphs, "cuda_graphs", allowed, self.cuda_graphs)
        if self.draft_address is None:
            allowed = f"set only together with {named('draft_address')}"
            require(not self.draft_optional, "draft_optional", allowed, self.draft_optional)
            return
        allowed = f"left out with {named('draft_address')}, which says where the drafter is"
        require(self.placement is None, "placement", allowed, self.placement)


def parse_parameter_count(text: str | int) -> int:
    """Return the number of parameters that a `target_cost` names: "300M", "1.5B", "90_000_000", an int.

    Raises: SettingsError if it is not a positive number with K, M, B or no unit.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMB]?)", str(text).strip().replace("_", "").upper())
    number = round(float(match[1]) * _COUNT_UNITS[match[2]]) if match else 0
    require(number > 0, "target_cost", "a positive number of parameters such as 300M, 1.5B or 90000000", text)
    return number


def parse_size(text: str, setting: str) -> int:
    """Return the bytes that a setting means by "512M", "2GiB" or "1000000"; units are powers of 1,024.

    Raises: SettingsError.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(text), re.IGNORECASE)
    size = int(float(match[1]) * _SIZE_UNITS[match[2].upper()]) if match else 0
    require(size > 0, setting, "a number of bytes above 0 such as 512M or 2GiB", text)
    return size
