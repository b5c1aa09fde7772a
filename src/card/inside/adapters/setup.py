"""Make a proposer from settings: the writers, and the link to the drafter."""

from __future__ import annotations

import time
from dataclasses import fields, replace

from card.assembly.build import make_writers
from card.assembly.drafters import DraftSource, make_drafter, outside_link
from card.assembly.plan import Facts, Plan, readable, resolve
from card.config import parse_size
from card.inside.adapters.proposer import PARKED_TEXTS, ChainProposer
from card.inside.adapters.settings import AdapterSettings
from card.links.background import BackgroundLink
from card.links.link import DrafterLink
from card.text.tokenizer import Tokenizer

_SHARED = (  # settings with the same meaning in `EngineSettings`
    *("draft", "draft_address", "draft_keys", "draft_threads", "start_timeout_s", "drafter_timeout_s"),
    *("writers", "suffix_store", "suffix_store_tokens"),
)


def make_proposer(
    settings: AdapterSettings,
    *,
    vocab_size: int,
    max_model_len: int,
    num_speculative_tokens: int,
    tokenizer: Tokenizer | None,
    draft_cores: tuple[int, ...] = (),
    max_num_seqs: int = 16,
) -> ChainProposer:
    """Return a proposer whose drafter is up, or still starting if the settings make it optional.

    Args:
        vocab_size: of the target.
        max_model_len: most tokens of a text.
        num_speculative_tokens: most tokens of a chain.
        tokenizer: the target's, to compare with a draft server's; None compares only sizes.
        draft_cores: of the drafter unless the settings name some; empty: any.
        max_num_seqs: most requests that run at once.
    Raises: SettingsError for settings that a writer or the link cannot follow; WorkerError if the drafter does not
        come up.
    """
    cores = draft_cores if settings.draft_cores is None else settings.draft_cores
    plan = _plan(settings, num_speculative_tokens, max_model_len, cores)
    link: DrafterLink | None = None
    writers = make_writers(plan, vocab_size, tokenizer)
    if plan.placements:
        memory = settings.draft_kv_cache_memory
        source = DraftSource(
            model=settings.draft,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            kv_cache_bytes=parse_size(memory, "draft_kv_cache_memory") if memory is not None else None,
            measures=False,
            integer_threads=settings.draft_threads,  # the engine may have bound other threads to its cores
        )
        link = _open_link(settings, plan, source, cores)
    return ChainProposer(
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        num_speculative_tokens=num_speculative_tokens,
        draft=plan.draft,
        writers=writers,
        link=link,
        clock=time.perf_counter,
        row_cost=settings.row_cost,
        max_parked=max(PARKED_TEXTS, max_num_seqs),
    )


def _open_link(settings: AdapterSettings, plan: Plan, source: DraftSource, cores: tuple[int, ...]) -> DrafterLink:
    if settings.schedule == "turns":
        return make_drafter(plan, source).link
    link = BackgroundLink(outside_link(plan, source), cores)
    if settings.draft_optional:
        link.begin()
    else:
        link.start()
    return link


def _plan(settings: AdapterSettings, num_tokens: int, max_model_len: int, draft_cores: tuple[int, ...]) -> Plan:
    """Return the plan of an equivalent engine of our own, of which only some parts are used."""
    draft = settings.draft_settings(num_tokens)
    asked = {
        **{field.name: getattr(draft, field.name) for field in fields(draft)},
        **{name: getattr(settings, name) for name in _SHARED},
        "placement": None if settings.draft is None else "inline" if settings.schedule == "turns" else "process",
        "device": settings.draft_device,
        "dtype": settings.draft_dtype,
        "max_model_len": max_model_len,
        "policy": "fixed",
    }
    plan = resolve(readable(asked, "card"), Facts(has_draft=settings.draft is not None), method="card")
    return replace(plan, cores=replace(plan.cores, draft=draft_cores))  # as assigned by the other engine's operator
