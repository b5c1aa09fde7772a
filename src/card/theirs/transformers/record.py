"""Record of transformers' models."""

from __future__ import annotations

from card.config.record import Record

RECORD = Record(tokenizer="card.theirs.transformers.tokenizer:read_tokenizer")
