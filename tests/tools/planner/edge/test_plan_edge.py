"""`card plan --edge`: a table or JSON, and one line for what does not go together."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from card.machine.packages import install_command
from tests.commands import Ran, run_command
from tests.tools.bench.bench_files import make_run, write_run
from tests.tools.planner.edge.places import small

MODELS = ("--target", "llama-3.1-70b-4xh100", "--draft", "llama-3.2-1b-h100")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command inside this process."""
    return partial(run_command, capfd, "plan")


@pytest.fixture
def place(tmp_path: Path) -> str:
    path = tmp_path / "place.json"
    path.write_bytes(msgspec.json.encode(small()))
    return str(path)


def test_a_file_gives_a_table_that_begins_with_what_does_not_pay(run, place):
    ran = run(*MODELS, "--edge", place)
    assert (ran.status, ran.err) == (0, "")
    head, _, rows = ran.out.partition("servers by")
    assert "without drafters" in head and "no gain over that" in head
    assert rows.count("matching") == rows.count("best-signal") >= 4


def test_without_scipy_the_table_says_what_is_left_out_and_how_to_have_it(run, place, monkeypatch):
    monkeypatch.setattr("card.tools.planner.edge.shares.has_solver", lambda: False)
    monkeypatch.setattr("card.tools.planner.edge.study.has_solver", lambda: False)
    assert f"they need scipy; run {install_command('edge')}\n" in run(*MODELS, "--edge", place).out


def test_drawn_devices_give_json_and_what_is_given_besides_counts(run):
    studies = [
        json.loads(run(*MODELS, "--edge-devices", "5", "--json", "--synthetic", rate).out) for rate in ("0.3", "0.9")
    ]
    assert all(study["num_devices"] == 5 and study["num_scenarios"] > 1 for study in studies)
    assert studies[0]["rows"][0]["seconds_per_token"] > studies[1]["rows"][0]["seconds_per_token"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((*MODELS, "--edge-devices", "5", "--pool"), "either --pool, or --edge"),
        ((*MODELS[:2], "--edge-devices", "5"), "give --draft"),
        ((*MODELS, "--edge-devices", "0"), "--edge-devices"),
        ((*MODELS, "--edge-devices", "5", "--synthetic", "nan"), "nan is no number"),
        ((*MODELS, "--edge-devices", "5", "--network-ms", "nan"), "nan is no number"),
        ((*MODELS, "--edge-devices", "5", "--synthetic", "0.8", "--edge-bench", __file__), "give one of --recording"),
        ((*MODELS, "--edge-devices", "5", "--edge-bench", __file__), "line 1: not JSON"),
        ((*MODELS, "--synthetic", "0.8", "--edge-bench", __file__), "--edge-bench goes with --edge-devices or --edge;"),
    ],
)
def test_what_does_not_go_together_is_one_line(run, options, words):
    ran = run(*options)
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert words in ran.err


def test_the_table_says_where_each_figure_of_decoding_comes_from(run, place, tmp_path):
    Path(place).write_bytes(
        b'{"kind": "edge", "version": 1, "hit_rate": 0.7, '
        + msgspec.json.encode({name: getattr(small(), name) for name in ("devices", "servers")})[1:]
    )
    lines = write_run(tmp_path / "lines.jsonl", make_run())
    told = run(*MODELS, "--edge", place, "--edge-bench", str(lines)).out
    assert f"candidates of sps in {lines})\n" in told
    assert f"0.70 ({place})\n" in told
    assert "such a token keeps: 0.50 (default)\n" in told


def test_a_place_is_drawn_by_its_name_and_no_other(run, place):
    even, narrow = (
        json.loads(run(*MODELS, "--edge-devices", "5", "--json", *options).out)["plain_seconds"]
        for options in ((), ("--edge-place", "narrow"))
    )
    assert even != narrow
    assert "one of even, narrow, got 'wide'" in run(*MODELS, "--edge-devices", "5", "--edge-place", "wide").err
    assert "--edge-place goes with --edge-devices" in run(*MODELS, "--edge", place, "--edge-place", "narrow").err


def test_a_device_without_a_server_in_reach_is_named(run, place):
    far = msgspec.json.decode(Path(place).read_bytes())
    far["devices"][2]["x_m"] = 1e7
    Path(place).write_text(json.dumps(far))
    ran = run(*MODELS, "--edge", place)
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert "device 2 has no server in reach" in ran.err
