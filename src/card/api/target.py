"""The target model of a `Host`, checked against its draft model and the memory before its weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from card.assembly.plan import Plan
from card.config import EngineSettings, parse_parameter_count, parse_size
from card.errors import SettingsError, ShortageError, named
from card.kernels.compiler_process import CompilerProcess
from card.machine.memory import free_memory, in_gigabytes, memory_in_words
from card.models.block_loading import require_block
from card.models.by_transformers import torch_module
from card.models.draft_vocab import check_draft_vocab
from card.models.files.places import GGUF_SUFFIX
from card.models.inflation import inflate
from card.models.loaded_model import LoadedModel
from card.models.loading import (
    check_pair,
    load_decoder,
    load_tokenizer,
    products_in_file,
    require_parallel_draft,
    state_bytes_of,
)
from card.models.names import OWN_BLOCK
from card.models.own.decoder_model import DecoderModel
from card.text.given_tokenizer import as_tokenizer
from card.text.template_files import with_templates
from card.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Target:
    """A target model and its tokenizer."""

    model: LoadedModel
    tokenizer: Tokenizer


def load_target(
    target: str | LoadedModel,
    draft: str | LoadedModel | None,
    plan: Plan,
    compiler: CompilerProcess,
    given: str | Tokenizer | PreTrainedTokenizerBase | None = None,
    *,
    is_made_for_it: bool = False,
) -> Target:
    """Load what is given by name, and inflate the model if the plan's settings say so.

    Args:
        draft: the draft model that must fit; None: there is none.
        compiler: is told what both models need.
        given: a tokenizer, of ours or of transformers, or the name of one; None: the tokenizer of ``target``.
        is_made_for_it: the draft model is a block or a head, which has the target's tokens.
    Raises: SettingsError, ModelError, VocabularyError.
    """
    settings, method = plan.settings, plan.method
    is_own = given is None
    name = settings.target if given is None else given
    tokenizer = load_tokenizer(name, cache_dir=settings.weights_dir) if isinstance(name, str) else as_tokenizer(name)
    tokenizer = with_templates(tokenizer, settings.chat_template, settings.tool_template)
    check_draft_vocab(settings.draft_vocab, tokenizer)
    needs_draft = method.needs_draft and bool(plan.placements)
    if needs_draft and draft == OWN_BLOCK and not method.needs_parallel_draft:
        require_block(target, cache_dir=settings.weights_dir)
    elif needs_draft and draft is not None:
        if not is_made_for_it:
            has_images = settings.max_images > 0
            check_pair(tokenizer, target, draft, cache_dir=settings.weights_dir, is_own=is_own, may_lack=has_images)
        if method.needs_parallel_draft:
            require_parallel_draft(draft, f"method {method.name}", cache_dir=settings.weights_dir)
    other_model = draft if needs_draft and isinstance(draft, str) and not is_made_for_it else None
    _tell_products(compiler, target, other_model, plan)
    if isinstance(target, str):
        _check_states_fit(target, settings.kv_cache_memory, settings.weights_dir)
    model = _load(target, settings) if isinstance(target, str) else _given(target)
    if settings.target_cost is not None:
        model = inflate(model, parse_parameter_count(settings.target_cost))
    return Target(model, tokenizer)


def _tell_products(compiler: CompilerProcess, target: str | LoadedModel, draft: str | None, plan: Plan) -> None:
    """Have compiled what models multiply by, as far as their files tell."""
    settings, cache_dir = plan.settings, plan.settings.weights_dir
    if isinstance(target, str):
        compiler.compile(products_in_file(target, dtype=settings.dtype, device=settings.device, cache_dir=cache_dir))
    if draft is not None:
        device = settings.draft_device or settings.device
        compiler.compile(products_in_file(draft, dtype=settings.dtype_of_draft, device=device, cache_dir=cache_dir))


def _load(target: str, settings: EngineSettings) -> LoadedModel:
    dtype = settings.dtype
    if settings.target_cost is not None and dtype == "auto" and target.endswith(GGUF_SUFFIX):
        dtype = "bfloat16"  # blocks cannot be inflated
    return load_decoder(target, dtype=dtype, device=settings.device, cache_dir=settings.weights_dir)


def _given(model: LoadedModel) -> LoadedModel:
    """Return a model that the caller made: as a decoder of our own pass if that can run it, over the same memory."""
    if isinstance(model, DecoderModel) or str(model.device) != "cpu":
        return model
    walking = torch_module("transformers.walking", "a model of transformers")
    return walking.walked(model) or model


def _check_states_fit(target: str, kv_cache_memory: str | None, weights_dir: str | None) -> None:
    """Raise SettingsError or ShortageError if the states of one request do not fit into the memory."""
    least = state_bytes_of(target, cache_dir=weights_dir)
    if kv_cache_memory is not None and least > parse_size(kv_cache_memory, "kv_cache_memory"):
        raise SettingsError(
            f"{named('kv_cache_memory')} {kv_cache_memory} has no room for the states of one request, which take "
            f"{least / 2**20:.1f}M or more with {target}; raise it"
        )
    if least > free_memory():
        raise ShortageError(
            f"the states of one request take {in_gigabytes(least)} or more with {target}, and {memory_in_words()}; "
            "take a smaller model, or allow more memory"
        )
