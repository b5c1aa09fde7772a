"""The settings of an engine as keyword arguments. Made by scripts/make_keywords.py."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypedDict

from card.config.fields import Setting

NAMED_ARGUMENTS: frozenset[str]

def of_engine() -> Mapping[str, Setting]: ...

class DraftKeywords(TypedDict, total=False):
    """Fields of `DraftSettings`."""

    beam_width: int
    branch: int
    lead: int
    max_nodes: int
    min_path_logprob: float
    growth: Literal["layer", "best-first", "branch", "fan-out", "phrases"]
    branch_below: float
    fan_out: int | Sequence[int]
    num_speculative_tokens: int
    coupled_noise: bool
    verify: Literal["chain", "tree", "trunk"]
    budget: int
    min_verify_prob: float
    max_wait_s: float
    min_depth: int
    waits_after_miss: bool
    hide_images: bool

class LLMSettings(DraftKeywords, total=False):
    """Settings of `card.LLM` and `card.AsyncLLM` besides target, draft and method."""

    writers: str | Sequence[str] | None
    placement: Literal["inline", "thread", "process"] | None
    schedule: Literal["auto", "beside", "turns"]
    policy: Literal["auto", "fixed"]
    draft_address: str | PathLike[str] | None
    draft_optional: bool
    draft_keys: str | PathLike[str] | None
    dtype: str | PathLike[str]
    draft_dtype: str | PathLike[str] | None
    draft_vocab: int | None
    device: str | PathLike[str]
    draft_device: str | PathLike[str] | None
    cuda_graphs: bool
    target_cost: str | PathLike[str] | None
    max_model_len: int | None
    threads: int | None
    draft_threads: int
    cores: int | Sequence[int] | None
    draft_cores: int | Sequence[int] | None
    max_num_seqs: int
    max_images: int
    image_dir: str | PathLike[str] | None
    kv_cache_memory: str | PathLike[str] | None
    kv_offload: str | PathLike[str] | None
    prefix_cache: str | PathLike[str] | None
    prefix_cache_size: str | PathLike[str] | None
    prefill_chunk: int
    wait_for_drafter: bool | None
    cache: bool
    check: bool
    cache_dir: str | PathLike[str] | None
    start_timeout_s: float
    drafter_timeout_s: float
    grammar_timeout_s: float
    generation_config: Literal["auto", "none"]
    answer_format: str | PathLike[str]
    chat_template: str | PathLike[str] | None
    tool_template: str | PathLike[str] | None
    allows_inexact: bool
    suffix_store: str | PathLike[str] | None
    suffix_store_key: str | PathLike[str]
    suffix_store_tokens: int
    ctc: str | PathLike[str] | None
    judge: str | PathLike[str] | None
    kv_selection: str | PathLike[str] | None
    hrad: str | PathLike[str]
