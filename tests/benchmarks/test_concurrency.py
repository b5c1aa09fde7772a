"""The closed loop keeps as many requests in flight as asked for; texts decide, then times; lines make tables."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from card.config import SamplingParams
from card.engine.metrics import RequestStats
from card.engine.request import Update
from card.errors import SettingsError, TargetError
from tests.benchmarks.scripts import lines_of
from tests.pair import Pair

SETTINGS = ["--sps-lengths", "1,3", "--turn-lengths", "2", "--beam-widths", "2", "--dtype", "float32"]
needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


@pytest.fixture(scope="module")
def common(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"question": f"how many of the {i} cats sat?"}) + "\n" for i in range(5)))
    loads = ["--least-requests", "3", "--requests-per-slot", "2", "--max-tokens", "12"]
    models = ["--target", pair.target, "--draft", pair.draft, "--target-cost", "0"]
    return ["--prompts", str(prompts), *models, *loads, *SETTINGS]


@pytest.fixture(scope="module")
def results(bench: dict[str, ModuleType], common: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results") / "concurrency.jsonl"
    options = ["--concurrency", "1,2", "--repeats", "2", "--finalists", "1"]
    assert bench["concurrency"].main([*common, *options, "--out", str(out)]) == 0
    return out


@needs_two_cores
def test_every_row_at_every_concurrency_writes_the_text_of_plain_decoding(results: Path) -> None:
    lines = [line for line in lines_of(results) if line["kind"] == "row"]
    names = ["vanilla", "sps-1", "sps-3", "beside-chain-w2", "beside-tree-w2", "turns-2-w2", "card"]
    assert [(line["concurrency"], line["row"]) for line in lines] == [(c, name) for c in (1, 2) for name in names]
    for line in lines:
        assert line["outputs_equal"] is True
        assert 0 < line["first_token_p50_s"] <= line["latency_p50_s"] <= line["latency_p90_s"]
        assert line["tokens_per_s"] > 0 and line["full_load_tokens_per_s"] > 0
    by_name = {line["row"]: line for line in lines}
    for name in ("vanilla", "card"):
        assert by_name[name]["num_prompts"] == 4 and len(by_name[name]["tokens_per_s_runs"]) == 1
    assert {by_name[name]["num_prompts"] for name in ("sps-1", "sps-3")} == {2, 4}  # the slower one ran half of them
    assert by_name["vanilla"]["speedup_vanilla"] == 1.0 and by_name["vanilla"]["schedules"] == {"off": 1.0}
    assert by_name["turns-2-w2"]["schedules"] == {"turns": 1.0}
    assert (
        by_name["beside-tree-w2"]["settings"] | {"verify": "tree", "beam_width": 2, "placement": "process"}
        == (by_name["beside-tree-w2"]["settings"])
    )
    num_cores = len(by_name["vanilla"]["settings"]["cores"])
    for name, threads in (("vanilla", num_cores), ("sps-3", num_cores), ("turns-2-w2", num_cores)):
        assert by_name[name]["settings"]["threads"]["alone"] == threads
    assert by_name["beside-tree-w2"]["settings"]["threads"]["beside"] == num_cores - 1
    assert sum(by_name["card"]["schedules"].values()) == pytest.approx(1.0, abs=0.01)


@needs_two_cores
def test_the_summary_compares_the_tuned_policy_with_the_best_that_ran_again(results: Path) -> None:
    for concurrency in (1, 2):
        lines = [line for line in lines_of(results) if line["concurrency"] == concurrency]
        rates = {line["row"]: line["tokens_per_s"] for line in lines if line["kind"] == "row"}
        firsts = {line["row"]: line["tokens_per_s_first_run"] for line in lines if line["kind"] == "row"}
        (summary,) = (line for line in lines if line["kind"] == "summary")
        best_sps = max(("sps-1", "sps-3"), key=lambda name: firsts[name])  # one finalist, chosen by the first run
        assert summary["best_sps"] == {"row": best_sps, "tokens_per_s": rates[best_sps]}
        assert summary["best_fixed"]["row"].startswith(("beside", "turns"))
        assert summary["card_vs_best_sps"] == pytest.approx(rates["card"] / rates[best_sps], rel=0.01)
        assert summary["card_vs_best_other"] == min(
            summary[f"card_vs_{kind}"] for kind in ("vanilla", "best_sps", "best_fixed")
        )


@needs_two_cores
def test_lines_make_tables_of_the_summary_and_of_each_concurrency(
    results: Path,
    bench: dict[str, ModuleType],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench["table"].main([str(results)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("| at once | vanilla | best sps |")
    assert "1 at once, 3 requests:" in printed and "2 at once, 4 requests:" in printed
    assert printed.count("| beside-tree-w2 |") == 2 and "2 to 4 prompts, 2 repeats" in printed


@needs_two_cores
def test_a_wrong_text_is_named_and_makes_the_exit_status_1(
    bench: dict[str, ModuleType],
    common: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, out = bench["concurrency"], tmp_path / "wrong.jsonl"
    measure = module.measure

    def spoilt(*args: Any) -> Any:
        runs, is_interrupted = measure(*args)
        load = runs["sps-3"][0]
        first = dataclasses.replace(load.served[0], token_ids=(5, *load.served[0].token_ids[1:]))
        runs["sps-3"] = [dataclasses.replace(load, served=(first, *load.served[1:]))]
        return runs, is_interrupted

    monkeypatch.setattr(module, "measure", spoilt)
    options = ["--rows", "sps-3", "--concurrency", "1", "--repeats", "1", "--out", str(out)]
    assert module.main([*common, *options]) == 1
    by_name = {line.get("row"): line for line in lines_of(out)}
    assert by_name["vanilla"]["outputs_equal"] is True
    (difference,) = by_name["sps-3"]["first_differences"]
    assert (difference["position"], difference["token_id"], difference["is_near_tie"]) == (0, 5, False)


def test_rows_are_chosen_by_name_or_family_and_an_unknown_one_is_refused(
    bench: dict[str, ModuleType],
    common: list[str],
) -> None:
    module = bench["concurrency"]

    def names(rows: str) -> list[str]:
        return [spec.name for spec in module.row_specs(module.parse_arguments([*common, "--rows", rows]))]

    assert names("sps-3,turns") == ["vanilla", "sps-3", "turns-2-w2"]
    assert names("card") == ["vanilla", "card"]
    with pytest.raises(SettingsError, match=r"unknown row 'sps-9'; known: .*sps-3"):
        names("sps-9")


def test_too_few_prompts_for_the_concurrency_are_refused(
    bench: dict[str, ModuleType],
    common: list[str],
    tmp_path: Path,
) -> None:
    with pytest.raises(SettingsError, match=r"concurrency 6 needs as many prompts, got 5"):
        bench["concurrency"].main([*common, "--concurrency", "6", "--out", str(tmp_path / "none.jsonl")])


class StubEngine:
    """Ends the oldest request of each step with its second token; fails the one whose id is ``fails``."""

    def __init__(self, fails: int | None = None) -> None:
        self.running: deque[int] = deque()
        self.seen: list[int] = []  # requests in flight at each step
        self.aborted: list[int] = []
        self._fails = fails
        self._num_tokens: Counter[int] = Counter()

    def add(self, checked: Any) -> None:
        self.running.append(checked.request.request_id)

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)

    def step(self) -> list[Update]:
        self.seen.append(len(self.running))
        request_id = self.running[0]
        self._num_tokens[request_id] += 1
        stats = RequestStats(schedule="beside", schedule_reason="it pays")
        if request_id == self._fails:
            return [Update(request_id, (), "error", stats, TargetError("out of memory"))]
        is_end = self._num_tokens[request_id] == 2
        if is_end:
            self.running.popleft()
        return [Update(request_id, (request_id,), "stop" if is_end else None, stats)]


def stub_host(engine: StubEngine) -> Any:
    def make_request(prompt: Sequence[int], params: SamplingParams, request_id: int) -> Any:
        text = SimpleNamespace(take=lambda token_ids, *, is_end: "")
        request = SimpleNamespace(request_id=request_id)
        return SimpleNamespace(request=request, checked=SimpleNamespace(request=request), text=text)

    return SimpleNamespace(engine=engine, make_request=make_request)


def test_as_many_requests_are_in_flight_as_asked_for_until_the_queue_is_dry(
    bench: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(seconds)), process_time=time.process_time)
    monkeypatch.setattr(bench["closed_loop"], "time", clock)
    engine = StubEngine()
    loop = bench["closed_loop"].ClosedLoop(stub_host(engine))
    load = loop.run([[1], [2], [3], [4]], 3, SamplingParams())
    assert engine.seen == [3, 3, 3, 3, 2, 2, 1, 1]
    assert [one.token_ids for one in load.served] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert load.num_tokens == 8 and load.full_tokens == 4
    assert 0 < load.full_s < load.wall_s
    assert load.served[0].first_token_s < load.served[0].latency_s < load.served[2].latency_s <= load.wall_s
    assert load.schedules == {"beside": 8} and load.reason == "it pays"
    again = loop.run([[1]], 3, SamplingParams())
    assert again.served[0].token_ids == (4, 4) and again.full_tokens == 0  # ids go on; one request is no full load


def test_a_failed_request_ends_the_run_and_leaves_nothing_in_the_engine(
    bench: dict[str, ModuleType],
) -> None:
    engine = StubEngine(fails=1)
    with pytest.raises(TargetError, match="out of memory"):
        bench["closed_loop"].ClosedLoop(stub_host(engine)).run([[1], [2], [3], [4]], 2, SamplingParams())
    assert engine.aborted == [1, 2]


def load_of(rate: float) -> Any:
    return SimpleNamespace(num_tokens=100, wall_s=100 / rate)


def test_the_run_that_chooses_the_finalists_is_no_part_of_their_figures(bench: dict[str, ModuleType]) -> None:
    report = bench["load_report"]
    runs = {"a": [load_of(9), load_of(4), load_of(6)], "b": [load_of(8), load_of(2), load_of(2)], "c": [load_of(1)]}
    kinds = {"a": "fixed", "b": "fixed", "c": "vanilla"}
    assert report.best_of_each_kind(kinds, runs, 1) == {"a", "c"}
    assert report.best_of_each_kind(kinds, runs, 2) == {"a", "b", "c"}
    assert report.ratio(runs["a"], runs["b"]) == 2.5
    assert report.ratio(runs["a"], runs["c"]) == 9.0  # what ran once is compared in that one run


def test_quantiles_lie_between_the_values(bench: dict[str, ModuleType]) -> None:
    quantile = bench["load_report"].quantile
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 0.9) == pytest.approx(1.9)
    assert quantile([7.0], 0.9) == 7.0
