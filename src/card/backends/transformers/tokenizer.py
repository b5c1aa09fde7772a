"""Tokenizers that only transformers can read: those of folders without a tokenizer.json."""

from __future__ import annotations

from transformers import AutoTokenizer

from card.text.given_tokenizer import as_tokenizer
from card.text.tokenizer import Tokenizer


def read_tokenizer(path: str, *, is_local: bool) -> Tokenizer:
    """Return the tokenizer of a folder or of a model on the hub. Raises: errors of any type."""
    return as_tokenizer(AutoTokenizer.from_pretrained(path, local_files_only=is_local, trust_remote_code=False))
