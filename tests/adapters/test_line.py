"""The line to a drafter never makes a step wait, whatever its link does; and with a real process behind it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from card.adapters.line import ThreadedLine
from card.adapters.proposer import ChainProposer
from card.adapters.settings import AdapterSettings
from card.adapters.setup import make_proposer
from card.errors import SettingsError, WorkerError
from card.transport.link import LinkStatus
from card.transport.process import ProcessLink
from card.tree.messages import Close, DrafterMessage, Pong, Ready, TargetMessage
from tests.pair import Pair

PATIENCE_S = 90.0
pytestmark = pytest.mark.timeout(240)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


class Link:
    """A link that records what it is asked, and may hang or fail."""

    runs_by_itself = True
    layers_per_pass = 1
    ready: Ready | None = None

    def __init__(self) -> None:
        self.sent: list[TargetMessage] = []
        self.rejected: list[str] = []
        self.is_closed = self.has_begun = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.fails = False
        self.status = LinkStatus("up")

    def begin(self) -> None:
        self.has_begun = True

    def start(self) -> None:
        raise WorkerError("drafter could not be started: no such model")

    def send(self, message: TargetMessage) -> None:
        self.sent.append(message)

    def receive(self) -> list[DrafterMessage]:
        self.may_go_on.wait(PATIENCE_S)
        if self.fails:
            raise RuntimeError("secret")
        return [Pong(len(self.sent))] if self.sent else []

    def wait(self, timeout_s: float) -> None:
        raise AssertionError("nobody may wait")

    def draft(self, num_passes: int) -> None:
        raise AssertionError("it drafts by itself")

    def reject(self, reason: str) -> None:
        self.rejected.append(reason)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    link.may_go_on.set()


def test_messages_go_out_and_come_in(link: Link):
    line = ThreadedLine(link)
    line.open(waits=False)
    line.post([Close(1), Close(2)])
    line.reject("nonsense")
    until(lambda: link.sent == [Close(1), Close(2)] and link.rejected == ["nonsense"])
    until(lambda: Pong(2) in line.take())
    assert line.status.state == "up"
    line.close()
    line.close()
    until(lambda: link.is_closed)


def test_a_link_that_hangs_makes_no_step_wait(link: Link):
    line = ThreadedLine(link)
    link.may_go_on.clear()
    line.open(waits=False)
    began = time.monotonic()
    for _ in range(2000):
        line.post([Close(1)] * 10)
        line.take()
        line.reject("nonsense")
    assert time.monotonic() - began < PATIENCE_S / 2  # a single wait would last as long as the link hangs
    assert len(line._out) <= 8192
    link.may_go_on.set()
    line.close()


def test_a_link_that_fails_is_down_and_its_message_is_not_logged(link: Link, caplog: pytest.LogCaptureFixture):
    link.fails = True
    line = ThreadedLine(link)
    line.open(waits=False)
    until(lambda: line.status.state == "down" and link.is_closed)
    line.post([Close(1)])
    assert line.take() == []
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text
    line.close()


def test_a_drafter_that_is_waited_for_and_does_not_come_up_is_told(link: Link):
    with pytest.raises(WorkerError, match="no such model"):
        ThreadedLine(link).open(waits=True)


# ---- a real process -------------------------------------------------------------------------------------------------


@pytest.fixture
def make(pair: Pair) -> Iterator[Callable[..., ChainProposer]]:
    made: list[ChainProposer] = []

    def make(**given: object) -> ChainProposer:
        settings = AdapterSettings.from_mapping(
            {"draft": pair.draft, "draft_dtype": "float32", "drafter_timeout_s": PATIENCE_S, **given}
        )
        made.append(
            make_proposer(settings, vocab_size=320, max_model_len=512, num_speculative_tokens=4, tokenizer=None)
        )
        return made[-1]

    yield make
    for proposer in made:
        proposer.close()


@pytest.fixture(scope="module")
def drafted(pair: Pair) -> list[int]:
    """A text that the draft model would write."""
    model = LlamaForCausalLM.from_pretrained(pair.draft, dtype=torch.float32)
    made = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=400, do_sample=False, eos_token_id=319)
    return made[0].tolist()


def step(proposer: ChainProposer, text: list[int]) -> list[int]:
    """Let the engine commit the last token of the text."""
    tokens = np.zeros((1, 512), np.int32)
    tokens[0, : len(text)] = text
    return proposer.propose([[text[-1]]], [len(text)], tokens)[0]


def test_a_killed_drafter_is_replaced_and_the_request_is_drafted_on(
    make: Callable[..., ChainProposer], drafted: list[int]
):
    proposer = make(writers="beam", row_cost=0.0)
    ends = iter(range(4, len(drafted)))

    def has_candidates() -> bool:
        time.sleep(0.1)  # nobody else waits for the drafter
        return bool(step(proposer, drafted[: next(ends)]))

    line = proposer.line
    assert isinstance(line, ThreadedLine)
    assert isinstance(line._link, ProcessLink)
    until(has_candidates)
    pid = line._link.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: line.status.state != "up")
    until(lambda: line.status.num_restarts == 1 and line.status.state == "up")
    until(has_candidates)


def test_a_draft_model_that_is_not_there_is_one_line_or_costs_candidates_only(
    make: Callable[..., ChainProposer], pair: Pair
):
    with pytest.raises(WorkerError) as caught:
        make(draft=pair.missing)
    assert "\n" not in str(caught.value)
    assert step(make(draft=pair.missing, draft_optional=True), [1, 2, 3]) == []


def test_a_malformed_address_is_refused_at_once():
    settings = AdapterSettings.from_mapping({"draft_address": "somewhere"})
    with pytest.raises(SettingsError):
        make_proposer(settings, vocab_size=8, max_model_len=64, num_speculative_tokens=4, tokenizer=None)
