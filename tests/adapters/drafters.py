"""Toy targets and drafters for the tests of the adapters, in one thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from card.adapters.line import DrafterLine
from card.adapters.proposer import ChainProposer
from card.adapters.settings import AdapterSettings
from card.config import EngineSettings
from card.transport.link import LinkStatus
from card.tree.messages import DrafterMessage, TargetMessage
from card.writers.local import find_writer
from tests.adapters.engine import FakeEngine
from tests.decoding import drafter_for
from tests.toy import TableModel
from tests.unreliable_link import FakeLink, Faults

VOCAB_SIZE = 12


class DirectLine:
    """A line to a link that drafts whenever it is told anything."""

    takes_turns = False

    def __init__(self, link: FakeLink) -> None:
        self.link = link
        self.is_closed = False

    def post(self, messages: Sequence[TargetMessage]) -> None:
        """Send at once, and let the drafter work."""
        for message in messages:
            self.link.send(message)
        self.link.draft(1)

    def take(self) -> list[DrafterMessage]:
        """Return what has arrived."""
        return self.link.receive()

    def draft(self) -> None:
        """Nothing: it has drafted."""

    def reject(self, reason: str) -> None:
        """Tell the link."""
        self.link.reject(reason)

    @property
    def status(self) -> LinkStatus:
        """That of the link."""
        return self.link.status

    def close(self) -> None:
        """Close the link."""
        self.is_closed = True
        self.link.close()


def greedy_of(model: TableModel) -> Callable[[Sequence[int]], int]:
    """Return the model's likeliest next token, remembered by the tokens that it depends on."""

    @functools.cache
    def after(context: tuple[int, ...]) -> int:
        return int(model.logits_after(list(context)).argmax())

    return lambda text: after(tuple(text[-model.order :]))


def plain(follow: Callable[[Sequence[int]], int], prompt_ids: Sequence[int], num_new: int) -> list[int]:
    """Return the text of plain decoding."""
    text = list(prompt_ids)
    for _ in range(num_new):
        text.append(follow(text))
    return text


def decode_all(
    engine: FakeEngine, follow: Callable[[Sequence[int]], int], prompts: Sequence[Sequence[int]], num_new: int
) -> None:
    """Decode the prompts and check each text against plain decoding; one that was cancelled as far as it came."""
    jobs = [engine.add(prompt, num_new) for prompt in prompts]
    engine.run()
    for job in jobs:
        text = plain(follow, job.token_ids[: job.prompt_len], num_new)
        assert job.token_ids == text[: len(job.token_ids)]
        assert len(job.token_ids) == len(text) or job in engine.cancelled


def toy_proposer(
    draft: TableModel | None,
    faults: Faults | None = None,
    *,
    line: DrafterLine | None = None,
    clock: Callable[[], float] | None = None,
    writers: tuple[str, ...] = ("suffix", "recycling"),
    most: int = 5,
    max_len: int = 128,
    max_parked: int = 8,
    row_cost: float | None = 0.05,
    local_writers_s: float = 1.0,
) -> ChainProposer:
    """Return a proposer whose drafter, if it has one, works in this thread; behind ``line``, if that is given."""
    faults = faults or Faults(max_passes=8)
    if line is None and draft is not None:
        line = DirectLine(FakeLink(lambda: drafter_for(draft), faults))
    times = iter(range(1 << 30))
    return ChainProposer(
        vocab_size=VOCAB_SIZE,
        max_model_len=max_len,
        num_speculative_tokens=most,
        draft=AdapterSettings(lead=8).draft_settings(most),
        writers={name: find_writer(name)(EngineSettings(), VOCAB_SIZE) for name in writers},
        line=line,
        clock=clock or (lambda: next(times) / 1000),
        row_cost=row_cost,
        local_writers_s=local_writers_s,
        max_parked=max_parked,
    )
