"""The tokenizer and chat template of a GGUF file.

transformers builds the tokenizer. What it leaves out is added: tokens that only pad the vocabulary go, digits are split
where the file says so, and a text begins as llama.cpp begins it.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from card.models.gguf.header import GgufError, Header

logger = logging.getLogger(__name__)

_KINDS = ("gpt2", "llama")  # pairs of bytes, and SentencePiece
_UNUSED = 5  # the type of tokens that pad the vocabulary
_SPLIT_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
_BEGIN = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})  # where a text begins with bos unless stated
# What the tokenizer is made of text before the pairs are joined; of these, transformers' own rule is the file's.
_KNOWN_SPLITS = _BEGIN | {"default", "gpt-2", "qwen2", "deepseek-r1-qwen", "falcon3", "smaug-bpe", "dbrx", "megrez"}
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def check_tokenizer(header: Header) -> None:
    """Check that the file has a tokenizer of a kind that is known. Raises: GgufError."""
    kind, tokens = header.metadata.get("tokenizer.ggml.model"), header.metadata.get("tokenizer.ggml.tokens")
    if kind is None or not isinstance(tokens, list):
        raise GgufError("has no tokenizer; use a file that was made of a whole model folder")
    if kind not in _KINDS:
        raise GgufError(f"has a tokenizer of the kind {kind}, which is not known here; use the model's folder")
    num_rows = header.tensors["token_embd.weight"].shape[0]
    if len(tokens) > num_rows:
        raise GgufError(f"is damaged: its tokenizer has {len(tokens)} tokens, its model {num_rows}")


def read_tokenizer(path: Path, header: Header) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a file that `check_tokenizer` lets pass, with its chat template.

    Raises: almost anything, if the file is damaged.
    """
    loader: Any = PreTrainedTokenizerFast  # which has no types
    built = loader.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    metadata = header.metadata
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type") or []
    num_tokens = len(tokens)
    while len(types) == len(tokens) and num_tokens > 1 and types[num_tokens - 1] == _UNUSED:
        num_tokens -= 1
    parts = json.loads(built.backend_tokenizer.to_str())
    vocab = parts["model"]["vocab"]
    if isinstance(vocab, dict):
        parts["model"]["vocab"] = {token: token_id for token, token_id in vocab.items() if token_id < num_tokens}
    core = Tokenizer.from_str(json.dumps(parts))
    special = {
        role: tokens[token_id]
        for role, name in _SPECIAL.items()
        if (token_id := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None and token_id < len(tokens)
    }
    _set_splits(core, metadata)
    _set_beginning(core, metadata, special.get("bos_token"))
    template = metadata.get("tokenizer.chat_template")
    tokenizer: PreTrainedTokenizerBase = loader(tokenizer_object=core, chat_template=template, **special)
    return tokenizer


def _set_splits(core: Tokenizer, metadata: Any) -> None:
    rule = metadata.get("tokenizer.ggml.pre", "default")
    if metadata["tokenizer.ggml.model"] != "gpt2":
        return
    if rule in _SPLIT_DIGITS:
        pieces = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        core.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    elif rule not in _KNOWN_SPLITS:
        logger.warning("the tokenizer splits text by the rule %s, which is not known here: GPT-2's stands in", rule)


def _set_beginning(core: Tokenizer, metadata: Any, bos: str | None) -> None:
    rule, is_spm = metadata.get("tokenizer.ggml.pre"), metadata["tokenizer.ggml.model"] == "llama"
    if bos is None or not metadata.get("tokenizer.ggml.add_bos_token", is_spm or rule in _BEGIN):
        if core.post_processor is not None:
            core.post_processor = processors.Sequence([])
        return
    special = [(bos, core.token_to_id(bos))]
    core.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=special
    )
