"""A day of one server: which requests come, what they took, and that two servers are asked the same."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.machine_code import lent
from tests.pair import Pair, own_tokenizer

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def agents(bench: dict[str, ModuleType]) -> ModuleType:
    return bench["agents"]


def asked(agents: ModuleType, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> dict[str, list[Any]]:
    """Return the bodies of each kind of request, each answered with its number."""
    bodies: list[Any] = []

    def ask(_place: Any, body: Any) -> Any:
        bodies.append(body)
        return agents.Answer(f"answer {len(bodies)}", 0.5, 1.5, 11, 100, 90)

    monkeypatch.setattr(agents, "ask", ask)
    day = agents.Day(agents.Texts(own_tokenizer()), ["How many?", "How much?"], agents.Sizes(*sizes))
    told = {}
    for kind in agents.KINDS:
        day.answer(kind, agents.Place("", 1))
        told[kind] = bodies.copy()
        bodies.clear()
    return told


def test_a_day_has_the_requests_that_it_promises(agents: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    told = asked(agents, monkeypatch, (4_900, 11_000, 1_500, 96))
    assert [len(told[kind]) for kind in agents.KINDS] == [12, 7, 3, 10]
    tokenizer = own_tokenizer()
    sizes = [sum(len(tokenizer.encode(m["content"])) for m in body["messages"]) for body in told[agents.AGENT]]
    assert sizes == sorted(sizes) and 4_900 <= sizes[0] < 5_200 and 10_000 < sizes[-1] < 11_500
    beginnings = [body["messages"][0]["content"] for body in told[agents.AGENT]]
    assert len(set(beginnings[:3])) == len(set(beginnings[3:])) == 1, "one edit, before the fourth turn"
    lines = [one.split("\n") for one in (beginnings[0], beginnings[-1])]
    (place,) = [idx for idx, (old, new) in enumerate(zip(*lines, strict=True)) if old != new]
    assert 0.4 < place / len(lines[0]) < 0.6
    last = told[agents.CHAT][-1]["messages"]
    assert [one["role"] for one in last] == ["system", *(["user", "assistant"] * 11), "user"]
    assert last[2]["content"] == "answer 1", "what the server has said is sent back"
    assert all(body["response_format"]["json_schema"]["schema"] for body in told[agents.STRUCTURED])


PEER = """
import runpy, sys

given = sys.argv[1:]
target, port = given[given.index("-m") + 1], given[given.index("--port") + 1]
assert {"-np", "-c", "--spec-type", "-md"} <= set(given)
sys.argv = ["card", "serve", target, "--served-model-name", "model", "--dtype", "float32", "--method", "vanilla"]
sys.argv += ["--port", port]
runpy.run_module("card", run_name="__main__")
"""


def test_two_servers_are_measured_on_the_same_day(
    agents: ModuleType,
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    serving = agents.served.serving
    monkeypatch.setattr(
        agents.served, "serving", lambda command, cache: serving(command, lent(Path(cache, "card")).parent)
    )
    peer, out = tmp_path / "llama-server", tmp_path / "agents.jsonl"
    peer.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$0.py" "$@"\n')
    Path(f"{peer}.py").write_text(PEER)
    peer.chmod(0o755)
    sizes = ["--first-tokens", "150", "--last-tokens", "300", "--copied-tokens", "30", "--max-tokens", "5"]
    models = ["--target", pair.target, "--draft", pair.draft, "--dtype", "float32"]
    named = ["--llama-server", str(peer), "--rows", "both", "--day", "copies last"]
    assert agents.main([*models, *sizes, *named, "--out", str(out)]) == 0
    theirs, ours = (json.loads(line) for line in out.read_text().splitlines())
    assert (theirs["server"], ours["server"]) == ("llama-server both", "card serve")
    assert ours["num_texts"] == 32 and ours["num_texts_differing"] == 0
    for line in (theirs, ours):
        assert list(line["kinds"]) == list(agents.DAYS["copies last"])
        assert line["memory_bytes"] > 10**7 and line["commit"]
        agent = line["kinds"][agents.AGENT]
        assert 0 < agent["num_cached"] < agent["num_prompt"] and 0 < agent["first_token_s"] <= agent["seconds"]
        assert line["seconds"] == pytest.approx(sum(one["seconds"] for one in line["kinds"].values()))
    assert f"| {agents.COPIES} |" in capsys.readouterr().out


def test_each_row_of_llama_server_speculates_with_what_it_is_named_for(agents: ModuleType) -> None:
    args = agents.make_parser().parse_args(["--llama-server", "x", "--target", "t.gguf", "--draft", "d.gguf"])
    args.sizes = agents.Sizes(100, 200, 10, 5)
    found = agents.commands(args)
    assert list(found) == [*(f"llama-server {row}" for row in agents.ROWS), "card serve"]
    kinds = [command[-1] if "--spec-type" in command else "" for command in found.values()]
    assert kinds == ["", "ngram-simple", "draft-simple", "draft-simple,ngram-simple", ""]
    assert [("-md" in command) for command in found.values()] == [False, False, True, True, False]
