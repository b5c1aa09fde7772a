"""The script of rollbacks counts the same on a recording each time, and all uses of H-RAD by the engine itself."""

from __future__ import annotations

import gzip

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from card.engine.metrics import RequestStats
from card.tools.planner.recording import load_recording, rows_of, save_recording
from card.tools.planner.synthetic import make_synthetic
from tests.benchmarks.scripts import BENCHMARKS, lines_of


def test_groups_have_four_levels_and_blocks_of_a_gguf_file_hold_them_exactly(bench):
    weight = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    step, least, codes = bench["two_bits"].rounded(weight.reshape(-1, 32))
    held = gguf.quants.dequantize(bench["two_bits"].as_q4_1(weight), gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_allclose(held, (least + step * codes).reshape(weight.shape), rtol=1e-6)
    assert all(len(set(group.tolist())) <= 4 for group in held.reshape(-1, 32))
    assert np.square(held - weight).sum() < 0.15 * np.square(weight).sum(), "levels lie where the weights are"


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "made-up.rec"
    save_recording(make_synthetic(0.6, num_texts=2, num_tokens=24), path)
    return path


def lines_by(bench, out, *asked):
    """Run the script and return its lines."""
    arguments = [*asked, "--lengths", "2", "--out", str(out)]
    assert CliRunner().invoke(bench["rollback"].main, arguments, catch_exceptions=False).exit_code == 0
    return lines_of(out)


def test_a_replay_has_a_line_for_each_recording_length_and_method_and_counts_the_same_again(bench, recording, tmp_path):
    asked, counts = ["--recording", str(recording), "--branch-below", "0.7", "--branch-below", "1"], []
    for name in ("one", "two"):
        lines = lines_by(bench, tmp_path / name, *asked)
        assert [(line["method"], line["num_speculative_tokens"], line["branch_below"]) for line in lines] == [
            ("pearl", 2, None),
            ("specbranch", 2, 0.7),
            ("specbranch", 2, 1.0),
        ]
        counts.append([{key: line[key] for key in bench["rollback"].COUNTS} for line in lines])
        assert all(line["tokens"] == 46 and line["rolled_back_tokens"] > 0 for line in lines)
    assert counts[0] == counts[1]


def test_what_a_predictor_says_after_each_token_is_what_branches(bench, recording):
    replay = bench["rollback"].Replay(load_recording(recording))

    def counts(below, told=None):
        total = RequestStats.joined(replay.run("specbranch", 4, below, told))
        return [getattr(total, name) for name in bench["rollback"].COUNTS]

    usual = counts(0.7)
    assert counts(0.7, [[0.7] * 24] * 2) == usual, "what is told is what is set"
    often, seldom = counts(0.7, [[0.99] * 24] * 2), counts(0.7, [[0.01] * 24] * 2)
    rolled_back = bench["rollback"].COUNTS.index("rolled_back_tokens")
    assert often[rolled_back] < usual[rolled_back] < seldom[rolled_back]
    assert counts(0.7, [[0.99] * 24, [0.01] * 24]) not in (often, seldom), "each text has its own"


def test_a_perfect_predictor_knows_how_many_of_the_next_drafts_are_accepted(bench, recording):
    made = load_recording(recording)
    (told, _), text = bench["rollback"].perfect_of(made, 2, 0.7), made.texts[0]
    firsts = rows_of(made, text).draft_ids[:, 0].tolist()
    assert {0.0, 0.7, 1.0} == set(told[:-2])
    for n, below in enumerate(told[:-2]):
        is_right, is_next_right = (firsts[n + i] == text.token_ids[n + i] for i in (1, 2))
        assert below == (1.0 if not is_right else 0.0 if is_next_right else 0.7)


def test_figures_are_ratios_of_counts(bench):
    line = {"tokens": 100, "target_passes": 40, "rolled_back_tokens": 50, "accepted_tokens": 150, "drafter_passes": 120}
    assert bench["rollback"].figures({**line, "drafter_dropped_nodes": 60}) == ["2.50", "0.50", "2.10", "1.20"]


@pytest.mark.timeout(240)
def test_h_rad_is_left_out_heard_and_obeyed(bench, tmp_path):
    """Its file is of a predictor whose evidence has no weight, so only the last line may differ."""
    path = tmp_path / "demo.rec"
    path.write_bytes(gzip.decompress((BENCHMARKS / "data" / "demo.rec.gz").read_bytes()))
    uses = ["--target", "demo-target", "--hrad", "demo", "--perfect"]
    lines = lines_by(bench, tmp_path / "out.jsonl", "--recording", str(path), *uses)
    assert [(line["method"], line["hrad"]) for line in lines] == [
        ("pearl", "off"),
        ("specbranch", "off"),
        ("specbranch", "evidence"),
        ("specbranch", "obeyed"),
        ("specbranch", "perfect"),
    ]
    _, off, evidence, obeyed, perfect = ([line[name] for name in bench["rollback"].COUNTS] for line in lines)
    rolled_back = bench["rollback"].COUNTS.index("rolled_back_tokens")
    assert off == evidence != obeyed and perfect[rolled_back] < off[rolled_back]


def test_a_predictor_needs_the_target_that_it_reads(bench, recording):
    ran = CliRunner().invoke(bench["rollback"].main, ["--recording", str(recording), "--hrad", "demo"])
    assert ran.exit_code == 2 and "--hrad and --target go together" in ran.output
