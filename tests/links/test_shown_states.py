"""States of the target reach a drafter of the same process before the correction that they belong to."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from card.drafting.drafter import DrafterWorker
from card.drafting.messages import Close, Correction, Open, TargetStates
from card.drafting.protocol import DraftSequence, DraftWriter
from card.kernels.number_types import Floats
from card.links.in_process import InlineLink, ThreadLink
from card.links.link import NoDrafter
from card.links.shown_states import ShownStates
from card.models.features import FeatureWish, SeenRows
from tests.drafts import draft_spec

WISH = FeatureWish((-1,), "all")


class NotingSequence(DraftSequence):
    def frontier(self) -> list[int]:
        return []

    def read(self, first: int, states: Floats) -> None:
        NotingWriter.heard.append((len(self.token_ids), first, states[:, 0].tolist()))


class NotingWriter(DraftWriter):
    """Drafts nothing and notes what it is shown, with the length of the text that it knows."""

    heard: list[Any]

    def open(self, token_ids: Any, spec: Any, *, epoch: int) -> NotingSequence:
        return NotingSequence(self, token_ids, spec, epoch=epoch)


def seen(request_id: int, first: int, rows: list[float], *, has_drafter: bool = True) -> SeenRows:
    return SeenRows(request_id, [1, 2, 3], first, np.array(rows, np.float32)[:, None], has_drafter)


@pytest.mark.parametrize("kind", [InlineLink, ThreadLink])
def test_states_are_heard_in_order_with_messages_and_only_of_known_texts(kind: Any) -> None:
    NotingWriter.heard = []
    link = kind(DrafterWorker(NotingWriter(12, 64), clock=time.perf_counter))
    link.begin()
    shown = ShownStates(link, WISH)
    shown.observe(seen(7, 0, [0.5]))  # nobody has opened it
    link.send(Open(7, (1, 2, 3), draft_spec()))
    shown.observe(seen(7, 0, [0.0, 1.0, 2.0]))
    shown.observe(seen(7, 2, [9.0], has_drafter=False))
    link.send(Correction(7, 0, 3, (4, 5), False))
    shown.observe(seen(7, 3, [3.0]))
    link.send(Close(7))
    shown.observe(seen(7, 4, [4.0]))
    deadline = time.monotonic() + 10
    while len(NotingWriter.heard) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    link.close()
    assert NotingWriter.heard == [(3, 0, [0.0, 1.0, 2.0]), (5, 3, [3.0])]
    assert link.status.state == "up" or kind is ThreadLink, "which was closed"


def test_links_to_elsewhere_and_writers_that_read_no_states_ignore_them() -> None:
    states = TargetStates(7, 0, np.zeros((1, 1), np.float32))
    NoDrafter().show(states)
    link = InlineLink(DrafterWorker(DraftWriter(12, 64), clock=time.perf_counter))
    link.send(Open(7, (1, 2, 3), draft_spec()))
    link.show(states)
    assert link.status.state == "up"
