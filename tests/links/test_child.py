"""The drafter's process: what it imports, what it knows of the environment, and one that was started ahead of need."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from card.api.llm import LLM
from card.assembly import drafter_process, drafters
from card.config import SamplingParams
from card.links import child
from card.links.child import DrafterChild
from card.links.process import DrafterConfig, DraftModel, LikelyModel
from tests.pair import Pair
from tests.reaching_in import child_pid
from tests.waiting import until

PROMPT = "the cat sat on the mat and"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
BESIDE = {"placement": "process", "policy": "fixed", "drafter_timeout_s": 90.0}
PACKAGE_ROOT = str(Path(child.__file__).parents[2])

pytestmark = pytest.mark.timeout(240)


def test_no_file_of_the_working_directory_runs_in_the_drafter(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("zmq", "random", "msgspec", "sitecustomize", "card"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\nraise SystemExit(9)"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f".:{tmp_path}:")  # it is on the path by all its names
    with LLM(pair.target, pair.draft, **BESIDE) as llm:
        assert llm.generate(PROMPT, GREEDY)[0].stats.drafter_state == "up"
    assert not (tmp_path / "ran").exists()


def test_the_drafter_gets_no_keys_but_what_the_libraries_below_it_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CARD_API_KEY", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("HF_HOME", "/models")
    started = DrafterChild(num_threads=3)
    process = started.take(3)
    assert process is not None
    with process:
        try:
            while not (environment := psutil.Process(process.pid).environ()):
                time.sleep(0.001)  # the system shows none while it starts the program
        finally:
            process.kill()
    assert "secret" not in environment.values()
    assert "PYTHONPATH" not in environment
    assert (environment["HF_HOME"], environment["OMP_NUM_THREADS"]) == ("/models", "3")


def test_a_process_started_ahead_of_need_becomes_the_drafter(pair: Pair):
    spare = DrafterChild()
    pid = child_pid(spare)
    with LLM(pair.target, pair.draft, **BESIDE, spare=spare) as llm:
        assert llm.host.link.pid == pid  # type: ignore[union-attr]
        assert llm.generate(PROMPT, GREEDY)[0].stats.drafter_state == "up"


@pytest.mark.parametrize("asked", ["the likely model", "another one"])
def test_a_model_that_is_likely_is_loaded_before_the_settings_come(pair: Pair, monkeypatch: pytest.MonkeyPatch, asked):
    likely = LikelyModel(name=pair.draft, dtype="float32", device="cpu", cache_dir="")
    name = pair.draft if asked == "the likely model" else pair.target
    limits = {"max_model_len": 64, "max_tree_rows": 16, "warm_up_tokens": 1}
    model = DraftModel(name=name, dtype="float32", device="cpu", cache_dir="", **limits)
    config = DrafterConfig(threads=1, cores=(), model=model, parent_pid=os.getppid())
    lines = b"".join(msgspec.json.encode(one) + b"\n" for one in (likely, config))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    loaded, given, looks_for_garbage = [], [], list[bool]()
    load = drafters.load_decoder

    def noted(*one: object, **more: object) -> object:
        looks_for_garbage.append(gc.isenabled())
        loaded.append(load(*one, **more))
        return loaded[-1]

    monkeypatch.setattr(drafters, "load_decoder", noted)
    monkeypatch.setattr(drafter_process, "draft_until_told", lambda config, connection, model: given.append(model))
    monkeypatch.setattr(drafter_process, "_Connection", lambda config: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(drafter_process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(logging.getLogger("card"), "setLevel", lambda level: None)
    monkeypatch.setattr(drafter_process.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(drafter_process.os, "_exit", lambda status: None)
    gc.disable()  # as it is when it imports
    try:
        drafter_process.main()
    finally:
        gc.enable()
        gc.unfreeze()
    assert looks_for_garbage == [True]
    assert given == (loaded if asked == "the likely model" else [None])


@pytest.mark.parametrize("settings", [{"method": "vanilla"}, {"placement": "inline"}, {"draft_threads": 2}])
def test_a_process_started_in_vain_is_ended(pair: Pair, settings: dict[str, object]):
    spare = DrafterChild()
    process = psutil.Process(child_pid(spare))
    draft = None if "method" in settings else pair.draft
    with LLM(pair.target, draft, policy="fixed", spare=spare, **settings):
        assert not process.is_running()


def test_a_process_that_nobody_needs_ends_with_its_parent():
    script = "import sys; sys.path.append(sys.argv[1]); from card.links.child import DrafterChild\n"
    script += "spare = DrafterChild(); print(spare._process.pid, flush=True)"
    done = subprocess.run([sys.executable, "-c", script, PACKAGE_ROOT], capture_output=True, text=True, check=True)
    process_id = int(done.stdout)
    until(lambda: not psutil.pid_exists(process_id))


def test_text_begins_before_the_drafter_is_up_and_the_drafter_joins(pair: Pair):
    with LLM(pair.target, method="vanilla") as alone:
        expected = alone.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    spare = DrafterChild()
    pid = child_pid(spare)
    os.kill(pid, signal.SIGSTOP)  # it cannot come up
    try:
        with LLM(
            pair.target,
            pair.draft,
            placement="process",
            policy="fixed",
            wait_for_drafter=False,
            drafter_timeout_s=600.0,
            spare=spare,
        ) as llm:
            first = llm.generate(PROMPT, GREEDY)[0]
            assert first.outputs[0].token_ids == expected
            assert first.stats.drafter_passes == 0
            assert first.stats.drafter_state == "down: its process is stopped"
            os.kill(pid, signal.SIGCONT)
            while not (later := llm.generate(PROMPT, GREEDY)[0]).stats.drafter_passes:
                assert later.outputs[0].token_ids == expected
            assert later.outputs[0].token_ids == expected
            assert later.stats.drafter_restarts == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_a_drafter_that_cannot_start_is_told_of_while_decoding_goes_on(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes(Path(pair.draft, name).read_bytes())
    settings = {"placement": "process", "policy": "fixed", "wait_for_drafter": False}
    with LLM(pair.target, str(tmp_path), **settings) as llm:
        while "could not be started" not in caplog.text:
            assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    (record,) = (one for one in caplog.records if "could not be started" in one.message)
    assert record.levelname == "ERROR"
    assert "the weights of" in record.message
