"""Tell from afar whether two tokenizers are the same."""

from __future__ import annotations

import hashlib
import json

from transformers import PreTrainedTokenizerBase


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a short text that two tokenizers share exactly if each token id, bos and eos mean the same to both."""
    tokens = sorted(tokenizer.get_vocab().items())
    facts = json.dumps([tokens, tokenizer.bos_token, tokenizer.eos_token])
    return hashlib.sha256(facts.encode()).hexdigest()[:32]
