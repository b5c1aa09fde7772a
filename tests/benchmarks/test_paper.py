"""The loop of CARD's publication keeps to its rules, and the scripts around it write what their tables read."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from card.tools.planner.profile import PassTable, Profile, Setup, save_profile
from card.tools.planner.recording import rows_of, save_recording
from tests.benchmarks.scripts import lines_of
from tests.tools.bench.bench_files import make_run, write_run
from tests.toy import TableModel

PAPER = Path(__file__).parents[2] / "benchmarks" / "paper"
VARIANTS = ("card", "one-tier", "no-re-rooting", "no-re-rooting-turns")
PROMPTS = ((1, 2, 3), (5, 6), (9, 9, 1))
NUM_TOKENS = 40
NEAR_THE_END = 2  # rounds of a text that has no room left for further layers

Modules = dict[str, ModuleType]


@pytest.fixture(scope="module")
def paper(bench: Modules) -> Modules:
    return bench


def models(agreement: float) -> tuple[TableModel, TableModel]:
    target = TableModel(3, vocab_size=40, order=2, spread=2.0)
    return target, TableModel(4, vocab_size=40, order=2, spread=2.0).blend(target, agreement)


def run(paper: Modules, agreement: float, variant: str = "card", width: int = 3, layers: int = 4) -> Any:
    """Return the counts of some texts, which must be those of plain decoding."""
    loop = paper["loop"]
    target, draft = models(agreement)
    settings = loop.LoopSettings(beam_width=width, layers_per_round=layers, variant=variant)
    plain, decoding = loop.Loop(target, None, None), loop.Loop(target, draft, settings)
    all_stats = []
    for prompt in PROMPTS:
        decoded = decoding.decode(prompt, NUM_TOKENS)
        assert decoded.token_ids == plain.decode(prompt, NUM_TOKENS).token_ids
        all_stats.append(decoded.stats)
    return loop.Counts.of(all_stats)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("width", [1, 4])
def test_whatever_is_taken_out_of_the_method_the_text_is_that_of_plain_decoding(
    paper: Modules, variant: str, width: int
) -> None:
    counts = run(paper, 0.7, variant, width)
    assert counts.num_texts == len(PROMPTS)
    assert counts.num_tokens == len(PROMPTS) * (NUM_TOKENS - 1)


def test_a_drafter_that_is_always_right_gives_a_token_for_each_layer_and_no_more(paper: Modules) -> None:
    counts = run(paper, 1.0, width=1, layers=4)
    passes = -(-(NUM_TOKENS - 1) // 4)  # the layers of a round are verified in the next one
    assert counts.target_passes == len(PROMPTS) * passes
    assert counts.hit_rate == 1.0
    assert counts.zero_rounds == 0


def test_each_round_has_as_many_drafter_passes_as_were_asked_for(paper: Modules) -> None:
    counts = run(paper, 0.8, width=1, layers=4)
    rounds = counts.target_passes + counts.num_texts  # the pass that reads the prompt has its layers, too
    assert 4 * (rounds - NEAR_THE_END * counts.num_texts) <= counts.drafter_passes <= 4 * rounds


def test_without_re_rooting_a_drafter_beside_the_target_is_worth_nothing(paper: Modules) -> None:
    counts = run(paper, 1.0, "no-re-rooting", width=1)
    assert counts.tokens_per_pass == 1.0
    assert counts.accepted_tokens == 0


def test_without_re_rooting_in_turns_a_right_chain_and_the_targets_own_token_are_gained(paper: Modules) -> None:
    counts = run(paper, 1.0, "no-re-rooting-turns", width=1, layers=4)
    assert counts.target_passes == len(PROMPTS) * -(-(NUM_TOKENS - 1) // 5)


def test_only_the_secondary_tier_brings_late_hits(paper: Modules) -> None:
    assert run(paper, 0.9, "card").late_hits > 0
    assert run(paper, 0.9, "one-tier").late_hits == 0


def test_rounds_take_as_long_as_the_slower_model_unless_they_are_taken_in_turns(paper: Modules) -> None:
    for takes_turns, seconds in ((False, 7.0 + 6.0), (True, 7.0 + 5.0 + 6.0)):
        clock = paper["loop"].RoundClock(takes_turns=takes_turns)
        clock.draft(2.0)
        clock.draft(3.0)
        clock.verify(7.0)
        clock.verify(5.5, overhead_s=0.5)
        assert clock() == seconds


def test_a_made_up_pair_agrees_as_often_as_it_should_and_says_how_likely_its_candidates_are(paper: Modules) -> None:
    made_up = paper["made_up"]
    recording = made_up.make_recording(made_up.Behaviour(0.9, 1.5, 1.0), num_texts=10, num_tokens=200)
    assert recording.agreement() == pytest.approx(0.9, abs=0.02)
    sure: list[bool] = []
    for text in recording.texts:
        rows = rows_of(recording, text)
        is_right = rows.draft_ids[:, 0] == text.token_ids
        sure += is_right[np.exp(rows.draft_logprobs[:, 0]) > 0.9].tolist()
    assert sum(sure) / len(sure) > 0.95


def test_virtual_time_is_that_of_the_slower_side_of_each_round(paper: Modules) -> None:
    made_up, pairs, loop = paper["made_up"], paper["pairs"], paper["loop"]
    recording = made_up.make_recording(made_up.Behaviour(0.9, 1.5, 1.0), num_texts=2, num_tokens=24)
    settings = loop.LoopSettings(beam_width=3, layers_per_round=4)
    for target_s, drafter_s, round_s in ((8.0, 1.0, 8.0), (1.0, 1.0, 4.0)):
        costs = pairs.Costs("toy", lambda *_, t=target_s: t, lambda *_, d=drafter_s: d)
        (timed,) = pairs.ReplayedPair(recording).run(settings, [costs])
        rounds = timed.counts.target_passes
        assert round_s * (rounds - NEAR_THE_END * 2) <= timed.decode_s <= round_s * rounds
        assert timed.speed_up == pytest.approx(timed.counts.num_tokens * target_s / timed.decode_s)


def test_bookkeeping_takes_time_and_changes_nothing_else(paper: Modules) -> None:
    made_up, pairs, loop = paper["made_up"], paper["pairs"], paper["loop"]
    recording = made_up.make_recording(made_up.Behaviour(0.9, 1.5, 1.0), num_texts=1, num_tokens=24)
    books = [pairs.Bookkeeping(), pairs.Bookkeeping(node_s=1.0), pairs.Bookkeeping(commit_s=1.0)]
    costs = [pairs.Costs("toy", lambda *_: 1.0, lambda *_: 1.0, one) for one in books]
    settings = loop.LoopSettings(beam_width=3, layers_per_round=4)
    plain, nodes, commits = pairs.ReplayedPair(recording).run(settings, costs)
    assert plain.counts == nodes.counts == commits.counts
    rounds = plain.counts.target_passes
    assert 2 * plain.decode_s < nodes.decode_s <= (1 + 3) * 4 * rounds  # three nodes a pass, one where it is the root's
    assert 0 < commits.decode_s - plain.decode_s <= rounds


@pytest.fixture(scope="module")
def results(paper: Modules, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with lines of every script, from one prompt and eight tokens."""
    folder = tmp_path_factory.mktemp("results")
    out = ["--out", str(folder / "paper_width.jsonl")]
    tiny = ["--data", "questions", "--limit", "1", "--max-tokens", "8"]
    assert paper["width"].main(["measure", "--widths", "2,5", *tiny, *out]) == 0
    assert paper["width"].main(["simulate", "--widths", "2,5", "--limit", "1", *out]) == 0
    out = ["--out", str(folder / "paper_ablation.jsonl")]
    assert paper["ablation"].main(["measure", "--width", "2", *tiny, *out]) == 0
    out = ["--out", str(folder / "paper_draft_size.jsonl")]
    assert paper["draft_size"].main(["measure", "--width", "2", "--draft", "demo-target", *tiny, *out]) == 0
    simulating = ["simulate", "--width", "2", "--agreements", "0.9", "--limit", "1"]
    assert paper["draft_size"].main([*simulating, *out]) == 0
    return folder


def test_every_line_says_what_was_run_where_and_whether_it_was_measured_or_simulated(results: Path) -> None:
    lines = [line for path in sorted(results.glob("*.jsonl")) for line in lines_of(path)]
    assert {line["basis"] for line in lines} == {"measured", "simulated"}
    for line in lines:
        assert {"command", "commit", "machine", "dtype", "pair", "workload", "beam_width", "counts"} <= line.keys()
        assert line["counts"]["target_passes"] > 0
        if line["basis"] == "simulated":
            assert line["latencies"] and not line["latencies_measured"]
    assert {line["ablation"] for line in lines if line["kind"] == "ablation"} >= {"whole", "no secondary tier"}


def test_the_loop_on_a_recorded_pair_stands_beside_turns_by_temperature(
    paper: Modules, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = Profile(
        name="toy",
        measured=True,
        source="typed in",
        setups=tuple(Setup(threads=n, cost=PassTable(points=((1, 1.0 / n), (64, 2.0 / n)))) for n in (1, 2)),
    )
    recording = paper["made_up"].make_recording(paper["made_up"].Behaviour(0.9, 1.5, 1.0), num_texts=1, num_tokens=24)
    sampled = msgspec.structs.replace(recording, temperature=1.0)
    out, model = tmp_path / "paper_real_loop.jsonl", tmp_path / "model.json"
    save_profile(profile, model)
    options = ["--target", str(model), "--draft", str(model), "--widths", "2,3", "--out", str(out)]
    for name, one in (("greedy.rec", recording), ("sampled.rec", sampled)):
        save_recording(one, tmp_path / name)
        options += ["--recording", f"toy={tmp_path / name}"]
    assert paper["real_loop"].main(options) == 0
    lines = lines_of(out)
    assert {line["temperature"] for line in lines} == {0.0, 1.0}
    speeds = {(line["temperature"], line["row"], line["layers_per_round"]): line["speed_up"] for line in lines}
    assert speeds[1.0, "turns, all cores", 4] == pytest.approx(2 * speeds[1.0, "turns, one core each", 4], rel=0.01)
    _, head, _, *rows = [row for row in paper["tables"].all_tables(tmp_path).splitlines() if row]
    assert head == "| set | K = 2 | K = 3 | turns, one core each | turns, all cores |"
    assert [row.split("|")[1].strip() for row in rows] == ["toy, T = 0", "toy, T = 1"]
    best = max(line["speed_up"] for line in lines if line["temperature"] == 1.0 and line["beam_width"] == 2)
    assert f"| toy, T = 1 | {best:.2f} (" in rows[1]
    assert paper["real_loop"].main([*options, "--recording", "no-file"]) == 2
    assert "must be NAME=FILE, got no-file" in capsys.readouterr().err


def test_the_target_as_its_own_draft_is_never_wrong(results: Path) -> None:
    (line,) = [line for line in lines_of(results / "paper_draft_size.jsonl") if line["basis"] == "measured"]
    assert line["draft_parameters"] == line["target_parameters"]
    assert line["counts"]["zero_rounds"] == 0


def test_tables_take_the_last_line_of_its_kind(paper: Modules, results: Path, tmp_path: Path) -> None:
    (line, *_) = lines_of(results / "paper_ablation.jsonl")
    texts = [json.dumps({**line, "tokens_per_pass": tokens}) for tokens in (1.25, 3.75)]
    (tmp_path / "paper_ablation.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    made = paper["tables"].all_tables(tmp_path)
    assert "| whole | 3.75 |" in made
    assert "1.25" not in made


def test_hits_of_a_tree_that_is_never_re_rooted_are_not_told(paper: Modules, results: Path, tmp_path: Path) -> None:
    lines = [line for line in lines_of(results / "paper_ablation.jsonl") if line["workload"] == "questions"]
    (tmp_path / "paper_ablation.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    rows = paper["tables"].all_tables(tmp_path).splitlines()
    cells = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in rows if "|" in row}
    assert cells["no re-rooting"] == ["1.00", "–"]
    assert cells["whole"][1] != "–"


def test_rows_that_the_readme_shows_are_those_of_the_committed_lines(paper: Modules) -> None:
    tables = paper["tables"]
    made = tables.all_tables(tables.RESULTS).splitlines()
    readme = (PAPER / "README.md").read_text(encoding="utf-8").splitlines()
    for heading, count in (("| K |", 3), ("| what is left |", 5)):
        shown = next(i for i, line in enumerate(readme) if line.startswith(heading))
        assert set(readme[shown : shown + 2 + count]) <= set(made), heading
        assert not readme[shown + 2 + count].startswith("|")


def test_the_plot_shows_published_points_beside_ours(paper: Modules, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw, tables = paper["draw"], paper["tables"]
    lines = tables.read_lines(tables.RESULTS)
    axes = draw.draw(lines, ("gsm8k", "mt-bench")).axes
    for i, workload in enumerate(("gsm8k", "mt-bench")):
        found, speeds = draw.curves(lines, workload), draw.speeds(lines, workload)
        assert found.keys() == {"published", "measured", "simulated"} and speeds.keys() >= {"flat", "busy"}
        drawn = [dict(zip(*one.get_data(), strict=True)) for one in axes[i].get_lines()]
        assert drawn == [{width: tokens for width, (tokens, _) in curve.items()} for curve in found.values()]
        fastest = {f"{max(curve.values()):.2f}" for curve in speeds.values()}
        assert fastest <= {text.get_text() for text in axes[4 + i].texts}
        assert all(one.get_ylabel() for one in (axes[0], axes[2], axes[4])) and axes[4 + i].get_xlabel()
    assert draw.curves(lines, "gsm8k")["published"][5] == pytest.approx((4.43, 0.845))
    assert draw.main(["--out", str(tmp_path / "plot.png")]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_map_is_faster_with_agreement_and_with_a_device_of_ones_own(paper: Modules) -> None:
    points = {(line["agreement"], line["devices"]): line for line in paper["speed_map"].map_lines((0.6, 0.95), (7,), 2)}
    assert points[0.95, "own"]["speed_up"] > points[0.6, "own"]["speed_up"] > 1
    assert points[0.95, "own"]["speed_up"] > points[0.95, "shared"]["speed_up"]
    assert points[0.95, "own"]["schedules"].keys() == {"beside"}


def test_tables_of_a_real_pair_are_of_all_prompts_with_intervals_between_them(paper: Modules, tmp_path: Path) -> None:
    run = make_run(workloads=("gsm8k", "mbpp"), num_prompts=4, repeats=1)
    told = paper["real_pair"].tables_of(write_run(tmp_path / "run.jsonl", run))
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in told.splitlines() if line.startswith("| ")}
    card = [one for one in run.samples if one.row == "card"]
    tokens = sum(one.decode_tokens for one in card) / sum(one.target_passes for one in card)
    whole = next(line for line in told.splitlines() if line.startswith("| card |"))
    assert f"| {tokens:.2f} (" in whole and "Temperature 0, 8 prompts" in told
    assert "| vanilla-all-cores | 1.00 (1.00–1.00) | – |" in told, "it has no drafter to hit"
    low, high = (float(one) for one in rows["card"][0].split("(")[1].rstrip(") ").split("–"))
    assert low <= float(rows["card"][0].split("(")[0]) <= high
