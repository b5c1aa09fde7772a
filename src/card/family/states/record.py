"""Drafters that read a token and a state in each row (multi-token prediction, DeepSeek-V3, arXiv:2412.19437).

The block lies in the target's own checkpoint. Every method with a draft model can use it.
"""

from card.config.record import Record

RECORD = Record(draft_writer="card.family.states.writer:make_writer")
