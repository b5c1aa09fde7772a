"""The script of rollbacks counts the same on a recording each time, and all uses of H-RAD by the engine itself."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from card.tools.planner.recording import save_recording
from card.tools.planner.synthetic import make_synthetic
from tests.benchmarks.scripts import lines_of


def test_groups_have_four_levels_and_blocks_of_a_gguf_file_hold_them_exactly(bench):
    weight = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    step, least, codes = bench["two_bits"].rounded(weight.reshape(-1, 32))
    held = gguf.quants.dequantize(bench["two_bits"].as_q4_1(weight), gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_allclose(held, (least + step * codes).reshape(weight.shape), rtol=1e-6)
    assert all(len(set(group.tolist())) <= 4 for group in held.reshape(-1, 32))
    assert np.square(held - weight).sum() < 0.15 * np.square(weight).sum(), "levels lie where the weights are"


def test_a_replay_has_a_line_for_each_recording_length_and_method_and_counts_the_same_again(bench, tmp_path):
    path = tmp_path / "made-up.rec"
    save_recording(make_synthetic(0.6, num_texts=2, num_tokens=24), path)
    counts = []
    for name in ("one", "two"):
        asked = [
            "replay",
            "--recording",
            str(path),
            "--lengths",
            "2",
            "--branch-below",
            "0.7",
            "--branch-below",
            "1",
            "--out",
            str(tmp_path / name),
        ]
        assert CliRunner().invoke(bench["rollback"].main, asked, catch_exceptions=False).exit_code == 0
        lines = lines_of(tmp_path / name)
        assert [(line["method"], line["num_speculative_tokens"], line["branch_below"]) for line in lines] == [
            ("pearl", 2, None),
            ("specbranch", 2, 0.7),
            ("specbranch", 2, 1.0),
        ]
        counts.append([{key: line[key] for key in bench["rollback"].COUNTS} for line in lines])
        assert all(line["tokens"] == 46 and line["rolled_back_tokens"] > 0 for line in lines)
    assert counts[0] == counts[1]


def test_figures_are_ratios_of_counts(bench):
    line = {"tokens": 100, "target_passes": 40, "rolled_back_tokens": 50, "accepted_tokens": 150, "drafter_passes": 120}
    assert bench["rollback"].figures(line) == ["2.50", "0.50", "25 %", "1.20"]


@pytest.mark.timeout(240)
def test_h_rad_is_left_out_heard_and_obeyed(bench, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps({"question": "What is 2 and 3?"}))
    asked = ["hrad", "--hrad", "demo", "--prompts", str(prompts), "--max-tokens", "6", "--out", str(out)]
    assert CliRunner().invoke(bench["rollback"].main, asked, catch_exceptions=False).exit_code == 0
    lines = lines_of(out)
    assert [(line["method"], line["hrad"]) for line in lines] == [
        ("pearl", "–"),
        ("specbranch", "off"),
        ("specbranch", "evidence"),
        ("specbranch", "obeyed"),
    ]
    assert all(line["tokens"] == 5 for line in lines)
