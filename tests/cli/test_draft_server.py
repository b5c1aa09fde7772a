"""`card keys` and `card draft-server` as a user runs them: real processes, real keys, real sockets."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.draft_server.delay_proxy import DelayProxy
from card.api.llm import LLM
from card.cli.main import cli
from card.config import SamplingParams, Schedule
from card.engine.policy.rounds import Outcome
from card.errors import CardError, SettingsError, WorkerError
from tests.pair import Pair
from tests.reaching_in import engine_of, force_schedule, policy_of
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.timeout(240)
PROMPT = "the cat sat"
PARAMS = SamplingParams(temperature=0.8, seed=11, max_tokens=200, ignore_eos=True)


@contextlib.contextmanager
def draft_server(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command until its one line says that it is ready; yields process and address."""
    code = "import sys; from card.cli import main; sys.argv[0] = 'card'; main()"
    root = str(Path(__file__).parents[2] / "src")
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    server = subprocess.Popen(
        [sys.executable, "-c", code, "draft-server", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None and server.stderr is not None
        line = server.stdout.readline()
        found = re.search(r"ready on (tcp://\S+:[1-9]\d*)$", line)
        assert found, line + server.stderr.read()
        yield server, found[1]
    finally:
        server.kill()
        server.communicate()


def generate_until_accepted(llm: LLM, expected: tuple[int, ...]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        result = llm.generate(PROMPT, PARAMS)[0]
        assert result.outputs[0].token_ids == expected
        if result.stats.accepted_tokens:
            return
        assert time.monotonic() < deadline, result.stats


def test_targets_with_keys_draft_on_a_server_and_others_are_told_why_not(pair: Pair, tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["keys", str(tmp_path), "--client", "ann", "--client", "bob"]).exit_code == 0
    (tmp_path / "server" / "clients" / "bob.key").unlink()
    with LLM(pair.target, dtype="float32", method="vanilla") as llm:
        expected = llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids
    arguments = ("--draft", pair.draft, "--dtype", "float32", "--keys", str(tmp_path / "server"))
    with draft_server("--listen", "tcp://127.0.0.1:0", *arguments, "--max-sessions", "2") as (server, address):
        settings = {"draft_address": address, "dtype": "float32", "policy": "fixed", "max_wait_s": 0.5}
        with (
            LLM(pair.target, draft_keys=str(tmp_path / "ann"), **settings) as one,
            LLM(pair.target, draft_keys=str(tmp_path / "ann"), **settings) as other,
        ):
            generate_until_accepted(one, expected)
            generate_until_accepted(other, expected)
        with pytest.raises(WorkerError, match="does not have this client's key"):
            LLM(pair.target, draft_keys=str(tmp_path / "bob"), **settings)
        with pytest.raises(WorkerError, match="another tokenizer"):
            LLM(pair.foreign_draft, draft_keys=str(tmp_path / "ann"), **settings)
        server.send_signal(signal.SIGINT)
        assert server.communicate(timeout=PATIENCE_S) == ("", "")
        assert server.returncode == 0


@pytest.mark.timeout(600)  # on a machine full of other work
def test_a_server_and_a_draft_model_here_both_draft_and_change_no_text() -> None:
    models = {"dtype": "float32", "device": "cpu"}
    with LLM("demo-target", method="vanilla", **models) as llm:
        expected = text_of(llm)
    drafted = Counter[Schedule]()
    with (
        draft_server("--listen", "tcp://127.0.0.1:0", "--draft", "demo-draft", "--dtype", "float32") as (
            server,
            address,
        ),
        DelayProxy(int(address.rpartition(":")[2]), one_way_s=0.002) as proxy,
        LLM("demo-target", "demo-draft", draft_address=proxy.address, wait_for_drafter=True, **models) as llm,
    ):
        policy = policy_of(engine_of(llm))
        begin, observe, wanted = policy.begin, policy.observe, list[Schedule]()

        def begin_as_wanted(num_requests: int, available: frozenset[Schedule]) -> None:
            begin(num_requests, available)
            if wanted and wanted[0] in available:
                force_schedule(policy, wanted[0])

        def count(outcome: Outcome) -> None:
            drafted[policy.schedule] += sum(one.num_agreed for one in outcome.result.verified)
            observe(outcome)

        policy.begin, policy.observe = begin_as_wanted, count
        for schedule in ("beside", "turns"):
            wanted[:] = [schedule]
            until(lambda: text_of(llm) == expected and drafted[schedule])  # noqa: B023
        wanted.clear()
        assert text_of(llm) == expected
        reason = llm.stats().schedule_reason
        assert "tokens/s beside" in reason and "tokens/s in turns" in reason, "it chooses by what each one brings"
        server.kill()
        until(lambda: text_of(llm) == expected and "beside" not in llm.stats().schedule_reason)
        assert drafted["turns"] and llm.stats().schedule != "beside", "the draft model here goes on"


def text_of(llm: LLM) -> tuple[int, ...]:
    return llm.generate(PROMPT, PARAMS.replace(max_tokens=60))[0].outputs[0].token_ids


def test_a_server_that_is_told_to_end_ends_cleanly(pair: Pair) -> None:
    with draft_server("--listen", "tcp://127.0.0.1:*", "--draft", pair.draft) as (server, _):
        server.send_signal(signal.SIGTERM)
        assert server.communicate(timeout=PATIENCE_S) == ("", "")
        assert server.returncode == 0


def test_keys_are_made_and_never_overwritten(tmp_path: Path) -> None:
    made = CliRunner().invoke(cli, ["keys", str(tmp_path / "keys")])
    assert made.exit_code == 0
    assert made.output.split() == [str(tmp_path / "keys" / "server"), str(tmp_path / "keys" / "client")]
    again = CliRunner().invoke(cli, ["keys", str(tmp_path / "keys")])
    assert isinstance(again.exception, SettingsError)
    assert "is not overwritten" in str(again.exception)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--listen", "tcp://0.0.0.0:0"], "card keys DIR"),
        (["--listen", "127.0.0.1:5555"], "must look like tcp://"),
        (["--keys", "nowhere"], "made for a server"),
        (["--kv-cache-memory", "lots"], "--kv-cache-memory must be a number of bytes"),
        (["--kv-cache-memory", "1K"], "KV memory must be"),
        (["--draft", "no/such/folder"], "no/such/folder"),
        (["--cores", "4096"], "cannot run on cores"),
    ],
)
def test_what_cannot_work_is_an_error_of_one_line_before_anything_listens(arguments: list[str], reason: str) -> None:
    done = CliRunner().invoke(cli, ["draft-server", *arguments])
    assert isinstance(done.exception, CardError), done.output
    assert reason in str(done.exception)
    assert done.output == ""
