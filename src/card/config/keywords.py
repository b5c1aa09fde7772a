"""The settings of an engine as keyword arguments, for completion in editors and for type checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from card.config.drafting import DraftSettings, Growth, VerifyShape
from card.config.engine import GenerationConfigSource, PlacementSetting, PolicyName, ScheduleSetting
from card.config.fields import Setting, declared, told
from card.config.splitting import engine_settings

NAMED_ARGUMENTS = frozenset({"target", "draft", "method"})  # fields that are separate arguments of `LLM`


class DraftKeywords(TypedDict, total=False):
    """Fields of `DraftSettings`."""

    beam_width: int
    branch: int
    lead: int
    max_nodes: int
    min_path_logprob: float
    growth: Growth
    branch_below: float
    fan_out: int | Sequence[int]
    num_speculative_tokens: int
    coupled_noise: bool
    verify: VerifyShape
    budget: int
    min_verify_prob: float
    max_wait_s: float
    min_depth: int
    waits_after_miss: bool
    hide_images: bool


class LLMSettings(DraftKeywords, total=False):
    """Settings of `card.LLM` and `card.AsyncLLM` besides target, draft and method; each may be left out."""

    placement: PlacementSetting | None
    schedule: ScheduleSetting
    policy: PolicyName
    draft_address: str | None
    draft_keys: str | None
    dtype: str
    draft_dtype: str | None
    draft_vocab: int | None
    device: str
    draft_device: str | None
    target_cost: str | None
    max_model_len: int | None
    max_num_seqs: int
    max_images: int
    image_dir: str | None
    kv_cache_memory: str | None
    kv_offload: str | None
    prefix_cache: str | None
    prefix_cache_size: str | None
    prefill_chunk: int
    threads: int | None
    draft_threads: int
    cores: int | Sequence[int] | None
    draft_cores: int | Sequence[int] | None
    wait_for_drafter: bool | None
    draft_optional: bool
    cache: bool
    check: bool
    cache_dir: str | None
    start_timeout_s: float
    drafter_timeout_s: float
    grammar_timeout_s: float
    generation_config: GenerationConfigSource
    answer_format: str
    chat_template: str | None
    tool_template: str | None
    allows_inexact: bool
    judge: str | None
    ctc: str | None
    hivis: str | None
    hrad: str
    kv_selection: str | None
    writers: str | Sequence[str] | None
    suffix_store: str | None
    suffix_store_key: str
    suffix_store_tokens: int


def _told(settings: Mapping[str, Setting]) -> str:
    """Return a line for each setting: its default and its meaning."""
    return told({name: one for name, one in settings.items() if name not in NAMED_ARGUMENTS})


LLMSettings.__doc__ = f"""{LLMSettings.__doc__}

The engine:
{_told(engine_settings())}

Drafting, as in `card.DraftSettings`:
{_told(declared(DraftSettings))}
"""
