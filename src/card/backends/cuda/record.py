"""Passes in fixed shapes for CUDA devices."""

from card.config.record import Record

RECORD = Record(draft_writer="card.backends.cuda.choosing:make_writer")
