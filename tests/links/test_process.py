"""A drafter process that is killed, stopped, slow or talking nonsense is replaced, and the text stays the same."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from card.api.llm import LLM, StreamChunk
from card.config import SamplingParams
from card.drafting.messages import PROTOCOL_VERSION, Ping
from card.errors import WorkerError
from card.links import child, process, zmq_link
from card.links.in_process import InlineLink
from card.links.process import DrafterConfig, DraftModel, ProcessLink
from card.links.switch import SwitchLink
from card.links.zmq_link import MAX_BACKOFF_S
from tests.decoding import decode, drafter_for, plain, toy_draft, toy_target
from tests.links.serving import Clock
from tests.pair import Pair
from tests.processes import has_ended
from tests.shortage import no_more_files
from tests.waiting import PATIENCE_S, until

TARGET = toy_target()
STUB = str(Path(__file__).with_name("stub_drafter.py"))

pytestmark = pytest.mark.timeout(240)


# ---- a stub in place of the drafter ---------------------------------------------------------------------------------


@pytest.fixture
def stub_link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ProcessLink]]:
    """Make links whose child is the stub; they are closed afterwards and leave nothing behind."""
    folder = tempfile.mkdtemp(prefix="c")  # a short path: it becomes part of a socket's
    monkeypatch.setattr(tempfile, "tempdir", folder)
    links: list[ProcessLink] = []

    def make(
        behaviour: str, *, start_timeout_s: float = PATIENCE_S, silence_timeout_s: float = PATIENCE_S
    ) -> ProcessLink:
        monkeypatch.setattr(child, "_COMMAND", (sys.executable, STUB, behaviour))
        monkeypatch.setattr(zmq_link, "FIRST_BACKOFF_S", 0.05)
        monkeypatch.setattr(process, "_EXIT_TIMEOUT_S", 0.2)
        model = DraftModel(
            name="none", dtype="float32", device="cpu", max_model_len=128, max_tree_rows=64, warm_up_tokens=1
        )
        template = DrafterConfig(threads=1, cores=(), model=model)
        links.append(ProcessLink(template, start_timeout_s=start_timeout_s, silence_timeout_s=silence_timeout_s))
        return links[-1]

    yield make
    for link in links:
        link.close()
    assert not os.listdir(folder), "a closed link leaves no socket behind"
    os.rmdir(folder)


def test_a_drafter_that_no_file_is_left_for_is_down_and_tried_again(stub_link: Callable[..., ProcessLink]) -> None:
    link = stub_link("silence")
    with no_more_files():
        link.begin()
        for _ in range(3):
            link.receive()
        assert link.status.state == "down"
        assert "open files" in link.status.reason
    until(lambda: (link.receive(), link.status.state == "starting")[1])


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("noise", "is not a message"),
        ("huge frame", "at most 16777216 are allowed"),
        ("other version", f"protocol version {PROTOCOL_VERSION + 1}, this side speaks {PROTOCOL_VERSION}"),
        ("lies", "root position 500"),
        ("fault", "out of memory"),
        ("exit", "exit status 7"),
        ("mute", "silent for"),
    ],
)
def test_a_misbehaving_drafter_is_replaced_and_the_text_is_the_same(stub_link, behaviour, reason):
    link = stub_link(behaviour, silence_timeout_s=0.3 if behaviour == "mute" else PATIENCE_S)
    link._watch._backoff_s = 9 * MAX_BACKOFF_S  # so that nobody overlooks that it is down
    link.start()
    first_pid = link.pid
    expected = plain(TARGET)

    def has_come_to(state: str) -> bool:
        token_ids, finish_reason, _ = decode(TARGET, link)
        assert (token_ids, finish_reason) == expected
        return link.status.state == state

    until(lambda: has_come_to("down"))
    assert link._watch._backoff_s == MAX_BACKOFF_S, "no pause is longer"
    assert reason in link.status.reason
    assert reason in decode(TARGET, link)[2].drafter_state
    assert has_ended(first_pid)
    link._watch.forgive()
    until(lambda: has_come_to("starting") or link.status.num_restarts > 0)


def test_frames_of_another_incarnation_are_ignored(stub_link):
    link = stub_link("ghost")
    link.start()
    for _ in range(20):
        assert decode(TARGET, link)[:2] == plain(TARGET)
        time.sleep(0.01)
    assert str(link.status) == "up"
    assert link.status.num_restarts == 0


def test_the_pause_before_a_restart_grows(stub_link):
    link = stub_link("short life")
    link.start()
    pauses: list[float] = []
    down_since: list[float] = []

    def look() -> bool:
        before = time.monotonic()
        link.receive()
        if link.status.state == "down" and not down_since:
            down_since.append(before)  # or a little later, so that no pause is taken for shorter than it was
        elif link.status.state != "down" and down_since:
            pauses.append(time.monotonic() - down_since.pop())
        return len(pauses) == 4

    until(look)
    assert all(pause >= 0.05 * 2**i for i, pause in enumerate(pauses)), pauses
    assert link.status.num_restarts == 4


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("not ready", "not ready after 0.5 s"),
        ("foreign ready", "not ready after 0.5 s"),
        ("dead at start", "exit status 3"),
        ("fault at start", "no such model"),
    ],
)
def test_a_drafter_that_does_not_come_up_is_a_worker_error_and_leaves_nothing(stub_link, behaviour, reason):
    link = stub_link(behaviour, start_timeout_s=0.5 if "0.5 s" in reason else PATIENCE_S)
    children = set(psutil.Process().children())
    with pytest.raises(WorkerError, match=f"could not be started: .*{reason}"):
        link.start()
    assert set(psutil.Process().children()) == children
    assert link.status.state == "down"
    link.close()


def test_a_socket_that_cannot_be_made_is_a_worker_error(stub_link, monkeypatch):
    long_folder = Path(tempfile.gettempdir(), "x" * 120)
    long_folder.mkdir()
    link = stub_link("mute")
    monkeypatch.setattr(link, "_folder", long_folder)
    with pytest.raises(WorkerError, match="TMPDIR"):
        link.start()
    os.rmdir(next(Path(tempfile.gettempdir()).glob("card-*")))


@pytest.mark.parametrize("behaviour", ["stubborn", "stopped", "killed"])
def test_close_ends_any_child_within_its_time_limit_and_may_be_called_twice(stub_link, behaviour):
    link = stub_link("stubborn")
    link.start()
    pid = link.pid
    if behaviour != "stubborn":
        os.kill(pid, signal.SIGSTOP if behaviour == "stopped" else signal.SIGKILL)
    link.close()
    link.close()
    assert has_ended(pid)
    assert str(link.status) == "down: closed"


def test_a_stopped_drafter_is_down_until_it_goes_on(stub_link):
    link = stub_link("stubborn")
    link.start()
    os.kill(link.pid, signal.SIGSTOP)
    until(lambda: str(link.status) == "down: its process is stopped")
    os.kill(link.pid, signal.SIGCONT)
    until(lambda: str(link.status) == "up")
    assert link.status.num_restarts == 0


def test_a_drafter_that_is_stopped_while_it_starts_is_replaced_after_the_silence_timeout(stub_link):
    link = stub_link("not ready", silence_timeout_s=0.3)
    link.begin()
    assert link.status.state == "starting"
    pid = link.pid
    os.kill(pid, signal.SIGSTOP)
    until(lambda: str(link.status) == "down: its process is stopped")
    until(lambda: link.receive() == [] and link.status.num_restarts == 1)
    assert has_ended(pid)


def test_a_drafter_that_speaks_between_two_looks_that_find_it_stopped_is_not_replaced(stub_link, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(process, "time", clock)
    monkeypatch.setattr(zmq_link, "time", clock)
    monkeypatch.setattr(process, "_process_state", lambda pid: "T")
    link = stub_link("stubborn", silence_timeout_s=1.0)
    link.start()
    for nonce in range(10):
        clock.now += 0.4
        link.send(Ping(nonce))
        until(lambda: [link.receive(), link._watch.heard_at == clock.now][1])
    assert link.status.num_restarts == 0
    clock.now += 1.1
    link.receive()
    assert str(link.status) == "down: its process was stopped for 1 s"


def test_of_two_drafters_the_one_that_is_down_is_told_of_while_the_other_one_drafts(stub_link):
    link = SwitchLink(stub_link("stubborn"), InlineLink(drafter_for(toy_draft(TARGET, 1.0))))
    link.start()
    link.use("turns")
    assert str(link.worst_status) == "up"
    os.kill(link._links["beside"].pid, signal.SIGSTOP)
    until(lambda: str(link.worst_status) == "down: its process is stopped")
    assert str(link.status) == "up", "the present drafter is another one"


def test_a_closed_link_stays_closed_and_the_text_goes_on(stub_link):
    link = stub_link("mute", silence_timeout_s=0.01)
    link.start()
    link.close()
    for _ in range(5):
        assert decode(TARGET, link)[:2] == plain(TARGET)
        time.sleep(0.02)
    assert link.pid is None


# ---- real drafters --------------------------------------------------------------------------------------------------

PROMPT = "the cat sat"
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, seed=0, ignore_eos=True)
SAMPLED = GREEDY.replace(temperature=0.8, seed=11)
LONGER = SAMPLED.replace(max_tokens=400)
LONG = SAMPLED.replace(max_tokens=1500)  # a new drafter comes up within it
BESIDE = {"method": "card", "placement": "process", "policy": "fixed", "cache": False}
BESIDE |= {"drafter_timeout_s": PATIENCE_S}  # on a busy machine a drafter may say nothing for seconds
PACE_S = 0.02  # a pause after a chunk, so that a drafter does something within the text


@pytest.fixture(scope="module")
def vanilla(pair: Pair) -> LLM:
    return LLM(pair.target, dtype="float32", method="vanilla")


@pytest.fixture(scope="module")
def expected(vanilla: LLM) -> Callable[[SamplingParams], tuple[int, ...]]:
    """Return the tokens of plain decoding."""
    known: dict[SamplingParams, tuple[int, ...]] = {}

    def look_up(params: SamplingParams) -> tuple[int, ...]:
        if params not in known:
            known[params] = vanilla.generate(PROMPT, params)[0].outputs[0].token_ids
        return known[params]

    return look_up


@pytest.fixture(scope="module")
def llm(pair: Pair) -> Iterator[LLM]:
    """One LLM with a drafter process, started from a thread that ends at once."""
    made: list[LLM] = []
    maker = threading.Thread(target=lambda: made.append(LLM(pair.target, pair.draft, dtype="float32", **BESIDE)))
    maker.start()
    maker.join()
    with made[0] as llm:
        yield llm
    assert link_of(llm).pid is None


def link_of(llm: LLM) -> ProcessLink:
    assert isinstance(llm.host.link, ProcessLink)
    return llm.host.link


def pid_of(llm: LLM) -> int:
    pid = link_of(llm).pid
    assert pid is not None
    return pid


@pytest.fixture
def drafting(llm: LLM, expected) -> LLM:
    """The shared LLM once its drafter, perhaps a new one, drafts."""

    def has_drafted() -> bool:
        result = llm.generate(PROMPT, LONG.replace(max_tokens=100))[0]
        assert result.outputs[0].token_ids == expected(LONG)[:100]
        return result.stats.drafter_passes > 0 and result.stats.drafter_state == "up"

    until(has_drafted)
    return llm


def stream_through(
    llm: LLM, trouble: Callable[[], None], *, wait_for: str
) -> tuple[tuple[int, ...], list[str], StreamChunk]:
    """Stream a long text with ``trouble`` after the first chunks; go slowly until the drafter's state is ``wait_for``.

    Returns: the tokens, the states seen since then in their order, the last chunk.
    """
    watch = link_of(llm)._watch
    token_ids: list[int] = []
    states: list[str] = []
    is_over = False
    for num_chunks, chunk in enumerate(llm.stream(PROMPT, LONG)):
        token_ids += chunk.token_ids
        if num_chunks == 20:
            watch._backoff_s = MAX_BACKOFF_S  # until a chunk has told that it is down
            trouble()
        if num_chunks > 20:
            state = chunk.stats.drafter_state
            if not states or states[-1] != state:
                states.append(state)
            if state == f"down: {watch.reason}":
                watch.forgive()
            is_over = is_over or (len(states) > 1 and state == wait_for)
            if not is_over:
                time.sleep(PACE_S)
    return tuple(token_ids), states, chunk


def test_a_drafter_outlives_the_thread_that_started_it(llm):
    time.sleep(0.3)
    assert not has_ended(pid_of(llm))
    assert llm.generate(PROMPT, GREEDY)[0].stats.drafter_restarts == 0


def test_a_drafter_says_what_its_passes_cost(llm):
    ready = link_of(llm).ready
    assert ready.passes is not None
    sizes = [num_tokens for num_tokens, _ in ready.passes.points]
    assert len(sizes) > 1
    assert sizes == sorted(sizes)
    assert sizes[0] == 1
    assert all(seconds > 0 for _, seconds in ready.passes.points)


@pytest.mark.parametrize("verify", ["chain", "tree"])
@pytest.mark.parametrize("params", [GREEDY, LONGER], ids=["greedy", "sampled"])
def test_text_is_that_of_plain_decoding(drafting, expected, monkeypatch, verify, params):
    monkeypatch.setattr(
        drafting,
        "draft_settings",
        drafting.draft_settings.replace(verify=verify, min_verify_prob=0.0, max_wait_s=PATIENCE_S),
    )
    result = drafting.generate(PROMPT, params)[0]
    assert result.outputs[0].token_ids == expected(params)
    if params is LONGER:
        assert result.stats.drafter_passes > 0
        assert result.stats.accepted_tokens > 0


def test_each_side_keeps_to_its_cores_and_the_caller_gets_his_back(drafting):
    if not hasattr(os, "sched_getaffinity"):
        return
    before = os.sched_getaffinity(0)
    plan = drafting.host.plan.cores
    if len(before) > 1:
        assert plan.beside.cores and plan.draft and not set(plan.beside.cores) & set(plan.draft)
        assert set(psutil.Process(pid_of(drafting)).cpu_affinity()) == set(plan.draft)
    drafting.generate(PROMPT, GREEDY)
    assert os.sched_getaffinity(0) == before
    first, second = drafting.stream(PROMPT, GREEDY), drafting.stream(PROMPT, SAMPLED)
    next(first), next(second)
    assert os.sched_getaffinity(0) == before, "the caller's own work between two chunks is not confined"
    first.close()
    list(second)
    assert os.sched_getaffinity(0) == before


def test_after_a_kill_the_text_is_the_same_and_a_new_drafter_drafts(drafting, expected):
    pid = pid_of(drafting)
    token_ids, states, last = stream_through(drafting, lambda: os.kill(pid, signal.SIGKILL), wait_for="up")
    assert token_ids == expected(LONG)
    assert last.stats.drafter_restarts >= 1
    assert "down: it ended with exit status -9" in states
    assert pid_of(drafting) != pid


def test_after_a_stop_the_text_is_the_same_and_a_new_drafter_drafts(drafting, expected, monkeypatch):
    pid = pid_of(drafting)

    def stop() -> None:
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(link_of(drafting)._watch, "silence_timeout_s", 0.5)

    token_ids, states, last = stream_through(drafting, stop, wait_for="starting")
    assert token_ids == expected(LONG)
    assert last.stats.drafter_restarts >= 1
    assert any(state.startswith("down: silent for") for state in states), states
    assert has_ended(pid)


def test_a_drafter_slowed_tenfold_is_not_replaced_and_the_text_is_the_same(drafting, expected):
    child = psutil.Process(pid_of(drafting))

    def has_drafted() -> bool:
        token_ids: list[int] = []
        for num_chunks, chunk in enumerate(drafting.stream(PROMPT, LONG)):
            token_ids += chunk.token_ids
            if num_chunks % 10 == 0:
                child.suspend()
            elif num_chunks % 10 == 9:
                child.resume()
                time.sleep(PACE_S)  # else a fast target leaves it too little time for a single pass
        assert tuple(token_ids) == expected(LONG)
        assert chunk.stats.drafter_restarts == 0
        return chunk.stats.drafter_passes > 0

    try:
        until(has_drafted)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.resume()


def test_a_perfect_drafter_is_accepted_always(pair, expected):
    with LLM(pair.target, pair.target, dtype="float32", **BESIDE, max_wait_s=PATIENCE_S) as llm:
        for params in (GREEDY, SAMPLED):
            result = llm.generate(PROMPT, params)[0]
            assert result.outputs[0].token_ids == expected(params)
            assert result.stats.accepted_tokens == result.stats.verified_tokens > 0
            assert result.stats.acceptance_rate == 1.0


def test_a_draft_that_cannot_be_loaded_is_a_worker_error_that_says_why(pair, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        source = Path(pair.draft, name)
        if source.exists():
            (tmp_path / name).write_bytes(source.read_bytes())
    children = set(psutil.Process().children())
    with pytest.raises(WorkerError, match=r"could not be started: the weights of .* cannot be read"):
        LLM(pair.target, str(tmp_path), dtype="float32", **BESIDE)
    assert set(psutil.Process().children()) == children


def test_a_drafter_ends_when_its_parent_is_killed(pair):
    script = (
        "import sys, time; from card.api.llm import LLM\n"
        f"llm = LLM({pair.target!r}, {pair.draft!r}, **{BESIDE!r})\n"
        "link = llm.host.link; print(link.pid, link._folder, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], env=child_env(), stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        assert not has_ended(int(pid))
    finally:
        parent.kill()
        parent.wait()
    until(lambda: has_ended(int(pid)))
    assert not Path(folder).exists(), "the parent could not clean up any more"


def child_env() -> dict[str, str]:
    package_root = str(Path(process.__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def test_close_of_an_llm_ends_a_stopped_drafter(llm, monkeypatch):
    monkeypatch.setattr(process, "_EXIT_TIMEOUT_S", 0.2)
    with contextlib.suppress(AssertionError):  # there may be none at this moment
        os.kill(pid_of(llm), signal.SIGSTOP)
    llm.close()
    llm.close()
    assert link_of(llm).pid is None
