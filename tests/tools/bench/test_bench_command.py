"""`card bench` as a user runs it, on a tiny pair: every row writes the same text, and Ctrl-C loses nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from card.tools.bench import runner
from card.tools.bench.records import Run, planned
from card.tools.bench.results import load, read_unchecked
from card.tools.bench.row_names import OURS, PRESETS
from card.tools.bench.rows import CardRow
from tests.commands import Ran, exit_status, run_command
from tests.pair import Pair
from tests.reaching_in import llm_of

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
]

# Few drafter processes, as each costs seconds to start, and few rows of two threads, which crawl on a busy machine.
SOME = "vanilla,sps-all-cores,suffix,card-tree,card-best-first"
EVERY = pytest.param("all,card+beam,suffix", marks=[pytest.mark.slow, pytest.mark.timeout(900)])


@pytest.fixture
def card_bench(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run `card bench` inside this process."""
    return partial(run_command, capfd, "bench")


@pytest.fixture(scope="module")
def common(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of every run: the tiny pair, and a conversation of two turns."""
    path = tmp_path_factory.mktemp("data") / "chat.jsonl"
    path.write_text(json.dumps({"question_id": 1, "category": "cats", "turns": ["how many cats sat?", "and then?"]}))
    models = ["--target", pair.target, "--draft", pair.draft, "--dtype", "float32", "--max-model-len", "256"]
    return [*models, "--data", f"mt-bench={path}", "--sps-lengths", "2,3"]


@pytest.fixture(scope="module", params=[pytest.param(SOME, id="some"), EVERY])
def greedy(request: pytest.FixtureRequest, common: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("results") / "new" / "bench.jsonl"
    options = ["--max-tokens", "8", "--repeats", "1", "--target-cost", "100K", "--methods", request.param]
    assert exit_status("bench", *common, *options, "--out", str(out), "--trace", str(out.with_name("trace.json"))) == 0
    (run,) = load(out)
    return run


def test_a_trace_shows_each_row_that_can_tell_and_adds_no_sample(greedy: Run) -> None:
    events = json.loads(Path(greedy.command.split()[-1]).read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    ours = [row.name for row in greedy.rows if not row.name.startswith("transformers")]
    assert {name.split(", ")[2].split()[0].rstrip(":") for name in names} == set(ours)
    assert any(event["ph"] == "X" for event in events)
    assert len(greedy.samples) == 2 * len(greedy.rows)


def settings_by_row(run: Run) -> dict[str, dict[str, Any]]:
    return {one.row: one.settings for one in run.chosen}


def test_every_method_writes_the_text_of_plain_decoding_in_both_turns(greedy: Run) -> None:
    names = [row.name for row in greedy.rows]
    assert greedy.status == "complete" and [sample.key for sample in greedy.samples] == list(planned(greedy))
    assert set(SOME.split(",")) <= set(names) and "vanilla-all-cores" in names
    if len(names) > 20:
        assert set(names) == {*PRESETS["all"], "card+beam+suffix"}
    assert len({(one.turn, one.token_ids) for one in greedy.samples}) == 2
    assert {(one.row, one.num_texts, one.num_equal) for one in greedy.checks} == {(name, 2, 2) for name in names}


def test_a_run_says_all_that_it_takes_to_repeat_it(greedy: Run) -> None:
    assert greedy.command.startswith("card bench --target") and greedy.dtype == "float32"
    assert greedy.versions.keys() == {"card", "card_sources", "python", "torch", "transformers"}
    assert greedy.machine["cores"] >= 2 and greedy.machine["load_average"] >= 0 and len(greedy.commit) >= 7
    (pair,) = greedy.pairs
    assert pair.target_cost is not None and "inflated" in pair.target_cost and pair.target_parameters > 90_000
    assert (greedy.sampling.temperature, greedy.sampling.seed, greedy.max_tokens) == (0.0, 0, 8)
    (workload,) = greedy.workloads
    assert (workload.name, workload.turns) == ("mt-bench", (2,)) and workload.source.endswith("chat.jsonl")


def test_rows_are_set_up_as_their_names_say(greedy: Run) -> None:
    settings = settings_by_row(greedy)
    tuned = {name for name, spec in OURS.items() if spec.is_tuned}
    for name, one in settings.items():
        on_all = "all-cores" in name or name in tuned or name.startswith("card+")
        assert len(one["cores"]) == 1 + on_all
        assert one["threads"] == (None if name in tuned or name.startswith("card+") else 1 + on_all)
    for name in {"pearl", "ssd", "specbranch"} & settings.keys():
        assert settings[name]["placement"] == "process" and settings[name]["draft_cores"] != settings[name]["cores"]
        assert settings[name]["length_from"] == "latencies"
        assert settings[name].get("hrad") == ("off" if name == "specbranch" else None)  # the tiny pair has none
    assert settings["card-tree"]["verify"] == settings["card-best-first"]["verify"] == "tree"
    assert (settings["card-tree"]["growth"], settings["card-best-first"]["growth"]) == ("layer", "best-first")
    assert settings["suffix"]["writers"] == ["suffix"]
    if "card+beam+suffix" in settings:
        assert settings["ouroboros-all-cores"]["writers"] == ["phrases"]
        assert settings["card+beam+suffix"]["writers"] == ["beam", "suffix"]


def test_the_fastest_draft_length_is_chosen_and_named(greedy: Run) -> None:
    settings = settings_by_row(greedy)
    for name in {"sps", "sps-all-cores", "ouroboros-all-cores", "card-turns-all-cores"} & settings.keys():
        tried = settings[name]["chosen_among"]
        assert set(tried) == {"2", "3"}
        assert tried[str(settings[name]["num_speculative_tokens"])] == max(tried.values())
    for name in {"transformers-assisted", "transformers-assisted-all-cores"} & settings.keys():
        assert set(settings[name]["chosen_among"]) == {"defaults", "constant 2", "constant 3"}


def test_an_interrupted_run_exits_with_130_and_goes_on_with_what_is_missing(
    common: list[str], tmp_path: Path, card_bench: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, decode = str(tmp_path / "bench.jsonl"), CardRow.decode
    options = ["--max-tokens", "6", "--repeats", "2", "--methods", "sps-all-cores,suffix", "--out", out]

    def press(self: CardRow, *args: Any) -> Any:
        if Path(out).read_text("utf-8").count('"kind":"sample"') == 5:  # in the middle of the second turn
            raise KeyboardInterrupt
        return decode(self, *args)

    monkeypatch.setattr(CardRow, "decode", press)
    cut = card_bench(*common, *options)
    assert cut.status == 130 and f"card bench --resume {out} goes on" in cut.err
    done = read_unchecked(Path(out)).samples
    assert len(done) == 5 and load(Path(out))[0].status == "interrupted"
    monkeypatch.setattr(CardRow, "decode", decode)
    refused = card_bench("--resume", out, "--repeats", "3")
    assert refused.status == 2 and "--repeats was 2 in that run and is 3 now" in refused.err
    resumed = card_bench("--resume", out)
    assert resumed.status == 0
    (run,) = load(Path(out))
    assert run.status == "complete" and run.samples[: len(done)] == done
    assert [sample.key for sample in run.samples] == list(planned(run))
    assert len({(one.turn, one.token_ids) for one in run.samples}) == 2


def test_a_method_that_emits_other_text_fails_the_command_and_shows_no_time(
    common: list[str], tmp_path: Path, card_bench: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_missing = runner.decode_missing

    def spoilt(keys: Any, rows: Any, job: Any, done: Any, writer: Any, step: Any) -> None:
        for those in rows.values():
            for row in those:
                if row.name == "suffix":
                    llm_of(row).host.end_ids = frozenset(range(1000))  # it ends after one token
        decode_missing(keys, rows, job, done, writer, step)

    monkeypatch.setattr(runner, "decode_missing", spoilt)
    out = str(tmp_path / "bench.jsonl")
    options = ["--max-tokens", "6", "--repeats", "1", "--methods", "suffix", "--out", out]
    ran = card_bench(*common, *options)
    assert ran.status == 2 and ran.out == ""
    assert "row suffix differs from vanilla-all-cores at token 1, which is no recorded near-tie" in ran.err


def test_sampled_text_is_compared_with_and_without_coupled_candidates(common: list[str], tmp_path: Path) -> None:
    out = tmp_path / "bench.jsonl"
    options = ["--max-tokens", "6", "--repeats", "1", "--temperature", "1", "--coupling-report"]
    rows = ["--methods", "sps-all-cores,transformers-all-cores", "--out", str(out)]
    assert exit_status("bench", *common, *options, *rows) == 0
    (run,) = load(out)
    settings = settings_by_row(run)
    assert settings["sps-all-cores"]["coupled_noise"] and not settings["sps-all-cores-uncoupled"]["coupled_noise"]
    lengths = {settings[name]["num_speculative_tokens"] for name in ("sps-all-cores", "sps-all-cores-uncoupled")}
    assert len(lengths) == 1
    compared = {check.row for check in run.checks if check.is_same}
    assert compared == {"vanilla-all-cores", "sps-all-cores", "sps-all-cores-uncoupled"}


def test_several_pairs_and_data_sets_are_measured_in_one_run(
    common: list[str], pair: Pair, tmp_path: Path, card_bench: Callable[..., Ran]
) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"question": "the cat"}\n{"question": "one two", "raw": true}\n')
    options = ["--pair", pair.target, pair.draft, "--target-cost", "none", "--target-cost", "100K"]
    options += ["--prompts", f"own={prompts}", "--max-tokens", "4", "--repeats", "1", "--methods", "vanilla"]
    ran = card_bench(*options, "--dtype", "float32", "--out", str(tmp_path / "b.jsonl"))
    assert ran.status == 0
    (run,) = load(tmp_path / "b.jsonl")
    assert [one.name for one in run.pairs] == ["target+draft", "target+draft@100K"]
    assert run.pairs[0].target_cost is None and run.pairs[1].target_parameters > run.pairs[0].target_parameters
    assert "target+draft, own: prompts: 2" in ran.out and "target+draft@100K, own: prompts: 2" in ran.out


def test_a_target_without_a_draft_runs_the_rows_that_need_none(
    card_bench: Callable[..., Ran], pair: Pair, tmp_path: Path
) -> None:
    prompts = tmp_path / "own.jsonl"
    prompts.write_text(json.dumps({"question": "how many cats sat?"}))
    options = ["--target", pair.target, "--dtype", "float32", "--max-model-len", "256", "--prompts", f"own={prompts}"]
    ran = card_bench(*options, "--max-tokens", "4", "--repeats", "1", "--out", str(tmp_path / "b.jsonl"))
    assert ran.status == 0, ran.err
    assert "no draft model is given, so the rows are vanilla,suffix,recycling" in ran.err
    (run,) = load(tmp_path / "b.jsonl")
    assert [row.name for row in run.rows] == ["vanilla", "vanilla-all-cores", "recycling", "suffix"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--methods", "magic"], "unknown method 'magic'"),
        (["--data", "poems"], "unknown data 'poems'"),
        (["--out", "b.jsonl.gz"], "leave .gz out"),
        (["--coupling-report"], "--coupling-report needs a temperature above 0"),
        (["--cores", "0"], "cores must be two or more"),
        (["--sps-lengths", "2,0"], "--sps-lengths must be from 1 to 4096, got 0"),
        (["--target-cost", "much"], "--target-cost must be a positive number of parameters"),
        (["--sps-lengths", "5000"], "--sps-lengths must be from 1 to 4096, got 5000"),
        (["--max-tokens", "1"], "--max-tokens must be 2 or more"),
        (["--methods", "vanilla,sps", "--hrad", "demo"], "--hrad would do nothing: no row reads it"),
        (["--repeats", "0"], "--repeats and --limit must be 1 or more"),
        (["--draft", "none", "--methods", "card"], "needs a draft model"),
        (["--resume", "no-such-file.jsonl"], "no-such-file.jsonl cannot be read"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    card_bench: Callable[..., Ran], options: list[str], reason: str
) -> None:
    ran = card_bench(*options)
    assert ran.status == 2 and reason in ran.err and ran.out == ""
