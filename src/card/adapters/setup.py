"""Make a proposer from settings: the writers, the drafter in a process of its own or on a server, the line to it."""

from __future__ import annotations

import time
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from card.adapters.line import ThreadedLine
from card.adapters.proposer import ChainProposer
from card.adapters.settings import AdapterSettings
from card.config import DraftSettings, EngineSettings, parse_size
from card.models.fingerprint import tokenizer_fingerprint
from card.transport.drafter_process import DrafterConfig
from card.transport.link import DrafterLink
from card.transport.process import ProcessLink
from card.transport.remote import RemoteLink
from card.workers.offers import DRAFTER
from card.writers.local import find_writer

_SPARE_ROWS = 64


def make_proposer(
    settings: AdapterSettings,
    *,
    vocab_size: int,
    max_model_len: int,
    num_speculative_tokens: int,
    tokenizer: PreTrainedTokenizerBase | None,
    draft_cores: tuple[int, ...] = (),
    max_num_seqs: int = 16,
) -> ChainProposer:
    """Return a proposer whose drafter is up, or is starting if the settings say that it is optional.

    Args:
        vocab_size: of the target.
        max_model_len: most tokens of a text.
        num_speculative_tokens: most tokens of a chain.
        tokenizer: the target's, to compare with a draft server's; None compares sizes alone.
        draft_cores: for the drafter unless the settings name some; empty: anywhere.
        max_num_seqs: most requests that run at once.
    Raises: SettingsError for settings that a writer or the link cannot follow; WorkerError if the drafter does not
        come up.
    """
    draft = settings.draft_settings(num_speculative_tokens)
    fingerprint = tokenizer_fingerprint(tokenizer) if tokenizer is not None else ""
    engine_settings = EngineSettings(
        suffix_store=settings.suffix_store, suffix_store_tokens=settings.suffix_store_tokens
    )
    names = [name for name in settings.writers if name != DRAFTER]
    writers = {name: find_writer(name)(engine_settings, vocab_size, fingerprint) for name in names}
    line: ThreadedLine | None = None
    if DRAFTER in settings.writers:
        cores = draft_cores if settings.draft_cores is None else settings.draft_cores
        if settings.draft_address is not None:
            link: DrafterLink = _remote_link(settings, vocab_size, fingerprint)
        else:
            link = _process_link(settings, draft, max_model_len, cores)
        line = ThreadedLine(link, cores)
        line.open(waits=not settings.draft_optional)
    return ChainProposer(
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        num_speculative_tokens=num_speculative_tokens,
        draft=draft,
        writers=writers,
        line=line,
        clock=time.perf_counter,
        row_cost=settings.row_cost,
        max_parked=max(64, max_num_seqs),
    )


def _process_link(
    settings: AdapterSettings, draft: DraftSettings, max_model_len: int, cores: tuple[int, ...]
) -> ProcessLink:
    assert settings.draft is not None
    memory = settings.draft_kv_cache_memory
    template = DrafterConfig(
        address="",
        incarnation=0,
        parent_pid=0,
        model=settings.draft,
        dtype=settings.draft_dtype,
        device=settings.draft_device,
        threads=settings.draft_threads,
        cores=cores,
        max_model_len=max_model_len,
        max_tree_rows=min(2 * draft.lead * draft.beam_width, draft.max_nodes) + _SPARE_ROWS,
        warm_up_tokens=draft.beam_width,
        kv_cache_bytes=parse_size(memory) if memory is not None else None,
        measures=False,
    )
    return ProcessLink(template, start_timeout_s=settings.start_timeout_s, silence_timeout_s=settings.drafter_timeout_s)


def _remote_link(settings: AdapterSettings, vocab_size: int, fingerprint: str) -> RemoteLink:
    assert settings.draft_address is not None
    return RemoteLink(
        settings.draft_address,
        vocab_size=vocab_size,
        tokenizer=fingerprint,
        keys=Path(settings.draft_keys) if settings.draft_keys is not None else None,
        start_timeout_s=settings.start_timeout_s,
        silence_timeout_s=settings.drafter_timeout_s,
    )
