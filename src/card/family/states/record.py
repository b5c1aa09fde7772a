"""Drafters that read a token and a state in each row.

A block lies in the target's own checkpoint (multi-token prediction, DeepSeek-V3, arXiv:2412.19437); a head is a folder
of its own (EAGLE-3, arXiv:2503.01840). Every method with a draft model can use them.
"""

from card.config.record import Record

RECORD = Record(draft_writer="card.family.states.writer:make_writer")
