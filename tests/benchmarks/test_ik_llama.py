"""Rows of ik_llama.cpp: command lines and answers, by a made-up server and a made-up `llama-bench`; no figures."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from card.errors import SettingsError

SERVER = """import json, pathlib, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if "--version" in sys.argv:
    sys.exit("version: 4242 (8337e4cd)\\nbuilt with a compiler")
pathlib.Path(__file__).with_name("told.json").write_text(json.dumps(sys.argv[1:]))
TIMINGS = {"prompt_ms": 500.0, "predicted_ms": 250.0, "predicted_n": 4, "draft_n_accepted": 2}

class Answers(BaseHTTPRequestHandler):
    def answer(self, what):
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer({"status": "ok"})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.answer({"tokens": [ord(letter) for letter in asked["content"]]})
        else:
            self.answer({"content": "".join(map(chr, asked["prompt"])), "timings": TIMINGS})
    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answers).serve_forever()
"""
BENCH = """import json, pathlib, sys
pathlib.Path(__file__).with_name("told.json").write_text(json.dumps(sys.argv[1:]))
print(json.dumps([{"n_prompt": 64, "avg_ts": 9.5}, {"n_prompt": 0, "avg_ts": 2.5}]))
"""


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A folder like one that ik_llama.cpp was built in."""
    (tmp_path / "bin").mkdir()
    for name, text in (("llama-server", SERVER), ("llama-bench", BENCH)):
        program = tmp_path / "bin" / name
        program.with_suffix(".py").write_text(text)
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$0.py" "$@"\n')
        program.chmod(0o755)
    return tmp_path


def told(build: Path) -> str:
    return " ".join(json.loads((build / "bin" / "told.json").read_text()))


@pytest.mark.parametrize(
    ("method", "option", "flags"),
    [
        ("plain", {}, ""),
        ("draft", {"draft_tokens": 4}, "--spec-type draft:n_max=4"),
        ("suffix", {}, "--spec-type suffix:n_max=16,n_min=2"),
    ],
)
def test_a_row_starts_the_server_with_its_flags_and_cuts_texts_into_tokens(
    bench: dict[str, ModuleType], build: Path, method: str, option: dict[str, Any], flags: str
) -> None:
    worker = bench["worker_ik_llama"].IkLlama()
    job = {"server": str(bench["environments"].ik_program(build, "llama-server")), "target": "t.gguf"}
    job |= {"draft": "d.gguf", "cores": [0, 1], "context": 64, "end_ids": [3], "version": "ik"}
    assert worker.load(job) == {"version": "ik"}
    try:
        assert worker.prepare(method, option, []) == {**option, "threads": 2}
        command = told(build)
        assert command.startswith("-m t.gguf --host 127.0.0.1") and "-t 2 -tb 2 -c 64 -np 1" in command
        assert command.endswith(" ".join(["-rtr --webui none --log-disable", flags]).strip())
        assert ("-md d.gguf" in command) == (method == "draft")
        done = worker.generate(method, option, [7, 8, 3, 9], 4)
        assert (done.token_ids, done.prefill_s, done.decode_s) == ([7, 8, 3], 0.5, 0.25)
        assert (done.decode_tokens, done.accepted) == (3, 2)
        assert worker.generate_many(method, option, [[5], [6, 3]], 4, 2).token_ids == [[5], [6, 3]]
    finally:
        worker.close()


def test_llama_bench_repacks_rows_and_its_figures_are_read(bench: dict[str, ModuleType], build: Path) -> None:
    program = bench["environments"].ik_program(build, "llama-bench")
    figures = bench["structure"].llama_figures(Path("t.gguf"), program=program, threads=2, flags=("-rtr", "1"))
    assert figures == {"prompt 64": 9.5, "decode": 2.5}
    assert "-m t.gguf -t 2" in told(build) and "-rtr 1" in told(build)


def test_its_rows_are_there_only_where_a_build_is_named(bench: dict[str, ModuleType]) -> None:
    catalog = bench["catalog"]
    model = catalog.MODELS["qwen"]
    assert not any(row.peer == catalog.IK for row in catalog.chosen_rows(model, []))
    rows = catalog.chosen_rows(model, ["ik_llama.cpp:Q4_K_M"], has_ik=True)
    assert [row.method for row in rows] == ["plain", "draft", "suffix"]
    with pytest.raises(SettingsError, match="--ik"):
        catalog.chosen_rows(model, ["ik_llama.cpp"])


def test_the_version_is_that_of_the_build(bench: dict[str, ModuleType], build: Path) -> None:
    environments = bench["environments"]
    assert environments.ik_version(build) == "ik_llama.cpp 4242 (8337e4cd)"
    (build / "bin" / "llama-server").write_text("#!/bin/sh\n")
    with pytest.raises(environments.BuildError, match="says no version"):
        environments.ik_version(build)


@pytest.mark.parametrize(("script", "program"), [("run", "llama-server"), ("structure", "llama-bench")])
def test_a_folder_without_the_program_is_one_line(
    bench: dict[str, ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    program: str,
) -> None:
    options = ["--ik", str(tmp_path), "--envs", str(tmp_path / "envs"), "--out", str(tmp_path / "out.jsonl")]
    monkeypatch.setattr(sys, "argv", ["script", *options])
    assert bench[script].main() != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path} has no program bin/{program}; --ik takes the folder" in line
