"""Commands of the folders take GGUF files."""

from __future__ import annotations

from tests.cli.test_gguf import PROMPT, files, run

__all__ = ["files", "run"]  # fixtures


def test_other_commands_take_files(run, files, tmp_path):
    pair = [files["target"], files["draft"]]
    (tmp_path / "prompts.txt").write_text(PROMPT)
    status, _, said = run("check-pair", *pair, "--max-tokens", "8", "--prompts", tmp_path / "prompts.txt")
    assert status in (0, 1), said  # whether it pays is not the question
    named = ["--target", pair[0], "--draft", pair[1], "--methods", "sps", "--data", "code", "--limit", "1"]
    status, _, said = run("bench", *named, "--max-tokens", "8", "--repeats", "1", "--out", tmp_path / "runs.jsonl")
    assert status == 0, said
