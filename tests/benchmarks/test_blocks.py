"""The script that lets blocks draft at a set acceptance makes what is missing, and goes on behind a run that hangs."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from click.testing import CliRunner

from card.cli.main import cli


def test_each_model_is_made_if_need_be_and_run_and_one_that_hangs_is_named(bench, tmp_path, monkeypatch, capsys):
    ran = []

    def run(command, env=None, timeout=None, check=False):
        ran.append((command[1:], {} if env is None else env))
        if "b.gguf" in " ".join(command):
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "b.gguf").touch()
    asked = [
        "a",
        "b",
        "c",
        "--models",
        str(tmp_path),
        "--tokenizer",
        "t.gguf",
        "--avx2",
        "--out",
        str(tmp_path / "out.jsonl"),
    ]
    with pytest.raises(SystemExit, match=r"did not end well: .*b\.gguf"):
        bench["blocks"].main(asked)
    made = [command[-1] for command, _ in ran if "structure_models.py" in command[0]]
    assert made == ["a", "c"]
    measured = [(command, env) for command, env in ran if command[:3] == ["-m", "card", "bench"]]
    assert [command[4] for command, _ in measured] == [str(tmp_path / f"{name}.gguf") for name in "abc"]
    assert all(env["CARD_KERNELS"] == "avx2" for _, env in measured)
    told = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("card bench")]
    assert [line[1:] for line in told] == [command[2:] for command, _ in measured]
    # Options that `card bench` does not know would be refused before the file that is missing is.
    monkeypatch.undo()
    refused = CliRunner().invoke(cli, told[0][1:])
    assert "a.gguf" in str(refused.exception) + refused.output
