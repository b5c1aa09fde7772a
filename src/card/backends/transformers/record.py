"""Record of transformers' models."""

from __future__ import annotations

from card.config.record import Record

RECORD = Record(tokenizer="card.backends.transformers.tokenizer:read_tokenizer")
