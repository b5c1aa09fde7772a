"""Toy targets and drafters for the tests of the adapters, in one thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from card.config import EngineSettings
from card.drafting.drafter_pass import NO_END, TurnEnd
from card.drafting.local import find_writer
from card.drafting.messages import DrafterMessage, TargetMessage
from card.inside.adapters.proposer import ChainProposer
from card.inside.adapters.settings import AdapterSettings
from card.links.link import DrafterLink, LinkStatus
from tests.decoding import drafter_for
from tests.inside.adapters.engine import FakeEngine
from tests.toy import TableModel
from tests.unreliable_link import FakeLink, Faults

VOCAB_SIZE = 12


class DirectLink(DrafterLink):
    """Leads to a link whose drafter works whenever its messages are asked for."""

    def __init__(self, link: FakeLink) -> None:
        self.link = link
        self.is_closed = False

    def send(self, message: TargetMessage) -> None:
        """Send at once."""
        self.link.send(message)

    def receive(self) -> list[DrafterMessage]:
        """Let the drafter work, and return what has arrived."""
        self.link.draft(1)
        return self.link.receive()

    def draft(self, num_passes: int, end: TurnEnd = NO_END) -> list[tuple[int, float]]:
        """Fail: nobody may wait for it."""
        raise AssertionError("it drafts by itself")

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
    link: DrafterLink | None = None,
    clock: Callable[[], float] | None = None,
    writers: tuple[str, ...] = ("suffix", "recycling"),
    most: int = 5,
    max_len: int = 128,
    max_parked: int = 8,
    row_cost: float | None = 0.05,
    local_writers_s: float = 1.0,
) -> ChainProposer:
    """Return a proposer whose drafter, if it has one, works in this thread; behind ``link``, if that is given."""
    faults = faults or Faults(max_passes=8)
    if link is None and draft is not None:
        link = DirectLink(FakeLink(lambda: drafter_for(draft), faults))
    times = iter(range(1 << 30))
    return ChainProposer(
        vocab_size=VOCAB_SIZE,
        max_model_len=max_len,
        num_speculative_tokens=most,
        draft=AdapterSettings(draft="a model", lead=8).draft_settings(most),
        writers={name: find_writer(name)(EngineSettings(), VOCAB_SIZE) for name in writers},
        link=link,
        clock=clock or (lambda: next(times) / 1000),
        row_cost=row_cost,
        local_writers_s=local_writers_s,
        max_parked=max_parked,
    )
