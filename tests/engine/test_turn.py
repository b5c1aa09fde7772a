"""What the engine does for a drafter before a pass, as the policy says."""

from __future__ import annotations

import pytest

from card.config import DraftSettings
from card.drafting.messages import DrafterMessage, TargetMessage
from card.engine.engine import Engine
from card.engine.policy.rounds import Policy
from card.engine.target import TargetWorker
from card.links.link import DrafterLink, DrafterState, LinkStatus
from tests.decoding import make_request, plain, run_all, toy_target


class Silent(DrafterLink):
    """A drafter beside the target that never says anything; to wait for it takes time on its own clock."""

    def __init__(self, state: DrafterState) -> None:
        self._status = LinkStatus(state)
        self.now_s, self.waits = 0.0, list[float]()

    def send(self, message: TargetMessage) -> None:
        pass

    def receive(self) -> list[DrafterMessage]:
        return []

    def wait(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        self.now_s += 2.0


@pytest.mark.parametrize(("state", "waits"), [("up", [5.0, 3.0, 1.0]), ("down", []), ("degraded", [])])
def test_a_silent_drafter_is_waited_for_once_if_it_is_up_until_the_time_is_over(
    state: DrafterState, waits: list[float]
) -> None:
    link, target = Silent(state), toy_target(1)
    worker = TargetWorker(target, clock=lambda: link.now_s)
    engine = Engine(worker, link, policy=Policy("beside"), clock=lambda: link.now_s)
    request = make_request(0, draft=DraftSettings(max_wait_s=5.0))
    texts = run_all(engine, {0: [request]})
    assert texts[0] == plain(toy_target(1), params=request.params, prompt=request.prompt_ids)
    assert link.waits == waits
