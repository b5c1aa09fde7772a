"""Load a draft model and find out what its passes cost: the first thing that a drafter outside the target does."""

from __future__ import annotations

import time
from dataclasses import dataclass

from card.models.draft_vocab import restrict_head
from card.models.fingerprint import tokenizer_fingerprint
from card.models.grammar import BackgroundGrammars, GrammarCompiler
from card.models.loading import context_limit, end_token_ids, load_decoder, load_tokenizer, parameter_count
from card.models.torch_runner import TorchRunner
from card.policy.latency import measure_pass_cost
from card.tree.messages import PassSeconds, Ready
from card.writers.beam import BeamWriter

_MEASURING_S = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """Which draft model, and how much of it."""

    name: str  # a folder, a GGUF file, a hub name, or demo-draft
    dtype: str
    device: str
    max_model_len: int  # the model's own limit counts if it is lower
    max_tree_rows: int
    warm_up_tokens: int  # most tokens of a usual pass
    kv_cache_bytes: int | None  # None: a few sequences of full length
    measures: bool = True  # find out what passes cost; targets are told
    cache_dir: str | None = None  # for converted weights, as of `load_model`
    draft_vocab: int | None = None  # the first so many tokens are proposed; None: all
    always_drafted: tuple[int, ...] = ()  # and these
    has_unknown_target: bool = False  # the target must be told which tokenizer this is


def load_drafter(draft: DraftModel) -> tuple[BeamWriter, Ready]:
    """Load and warm up the model; return its writer, and what targets are told of it.

    Raises: ModelError if it cannot be loaded; SettingsError if not one sequence fits into the memory.
    """
    model = load_decoder(draft.name, dtype=draft.dtype, device=draft.device, cache_dir=draft.cache_dir)
    num_parameters = parameter_count(model)
    if draft.draft_vocab is not None:
        model = restrict_head(model, draft.draft_vocab, {*draft.always_drafted, *end_token_ids(model)})
    max_model_len = min(draft.max_model_len, context_limit(model))
    runner = TorchRunner(model, max_model_len=max_model_len, max_tree_rows=draft.max_tree_rows)
    runner.warm_up(draft.warm_up_tokens)
    cost = None
    if draft.measures:
        cost = measure_pass_cost(runner, clock=time.perf_counter, time_limit_s=_MEASURING_S)
    ready = Ready(
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        num_parameters=num_parameters,
        passes=PassSeconds(cost.points, cost.per_sequence_s, cost.per_context_row_s) if cost else None,
        tokenizer=tokenizer_fingerprint(load_tokenizer(draft.name, cache_dir=draft.cache_dir))
        if draft.has_unknown_target
        else None,
    )

    def make_compiler() -> GrammarCompiler:
        tokenizer = load_tokenizer(draft.name, cache_dir=draft.cache_dir)
        return GrammarCompiler(tokenizer, runner.vocab_size, tuple(end_token_ids(model, tokenizer)))

    return BeamWriter(runner, draft.kv_cache_bytes, find_grammar=BackgroundGrammars(make_compiler)), ready
