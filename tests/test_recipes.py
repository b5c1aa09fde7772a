"""The recipes of docs/i-have.md: each command and program runs as it is typed, and does what the page says."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import card.drafting.local
from card.tools.bench.results import load
from tests.commands import Ran, run_command
from tests.gguf_files import demo_tokenizer, save_model, write_gguf
from tests.server.running import PATIENCE_S, command

PAGE = (Path(__file__).parents[1] / "docs" / "i-have.md").read_text("utf-8")
MAX_LINES = 15  # of a recipe's commands and programs

pytestmark = pytest.mark.timeout(240)


def recipe(title: str) -> str:
    """Return the section of the page under this title."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"the page has no recipe {title}"
    return found[1]


def commands(title: str) -> list[list[str]]:
    """Return the words of each command of a recipe."""
    lines = "".join(re.findall(r"```sh\n(.*?)```", recipe(title), re.DOTALL)).replace("\\\n", " ")
    return [shlex.split(line) for line in lines.splitlines()]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run `card` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run_here(words: list[str]) -> Ran:
        assert words[0] == "card"
        return run_command(capfd, *words[1:])

    return run_here


def save_pair(folder: Path) -> None:
    save_model(folder / "model", "llama", demo_tokenizer())
    save_model(folder / "draft", "llama", demo_tokenizer(), noise=0.1)


@pytest.mark.parametrize("title", re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
def test_a_recipe_is_short(title: str) -> None:
    blocks = "".join(re.findall(r"```\w+\n(.*?)```", recipe(title), re.DOTALL))
    assert 0 < len([line for line in blocks.splitlines() if line.strip()]) <= MAX_LINES


def test_a_gguf_file_writes_alone_and_with_a_draft_model_and_the_pair_is_judged(
    run: Callable[..., Ran], tmp_path: Path
) -> None:
    save_pair(tmp_path)
    for name in ("model", "draft"):
        shutil.rmtree(write_gguf(tmp_path / name, tmp_path / f"{name}.gguf").with_suffix(""))
    alone, pair, check = commands("A GGUF file")
    first, second = run(alone), run(pair)
    assert first.status == second.status == 0
    assert first.out == second.out != ""
    assert "suffix" in first.err
    judged = run(check)
    assert judged.status in (0, 1), judged.err


def test_a_folder_writes_as_stored_and_in_integers(run: Callable[..., Ran], tmp_path: Path) -> None:
    save_pair(tmp_path)
    for words in commands("A folder of the hub"):
        ran = run(words)
        assert ran.status == 0 and ran.out, ran.err


def test_a_team_is_served_with_its_key_and_nobody_without_it(tmp_path: Path) -> None:
    _, serve, ask = commands("A team to serve")
    (name, _, key), port = serve[0].partition("="), serve.index("--port")
    assert serve[1:3] == ["card", "serve"]
    arguments = [*serve[3:port], *serve[port + 2 :]]
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    with command(tmp_path, *arguments, env={name: key}) as server:
        place = f"127.0.0.1:{server.url.rpartition(':')[2]}"
        curl = [word.replace(f"127.0.0.1:{serve[port + 1]}", place) for word in ask]
        assert "#### 16" in _asked(curl)
        assert "invalid_api_key" in _asked([word.replace(key, "another") for word in curl])


def _asked(curl: list[str]) -> str:
    return subprocess.run([*curl, "-sS"], capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout


def test_methods_are_compared_and_drawn(run: Callable[..., Ran], tmp_path: Path) -> None:
    bench, report = commands("Methods to compare")
    assert "90M" in bench
    quicker = [word.replace("90M", "20M") for word in bench]  # price and length are a matter of time alone
    ran = run([*quicker, "--max-tokens", "24"])
    assert ran.status == 0, ran.err
    assert all(re.search(rf"\b{method}\b", ran.out) for method in ("vanilla", "sps", "suffix", "card"))
    costs = {pair.target_cost for one in load(tmp_path / "bench.jsonl") for pair in one.pairs}
    assert all(cost and "inflated" in cost for cost in costs), "beside the small target itself no draft model pays"
    assert run(report).status == 0
    assert "<html" in (tmp_path / "bench.html").read_text("utf-8")


def test_a_writer_in_a_file_of_its_own_is_used_by_its_name(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", recipe("A method to add"), re.DOTALL)
    path = re.match(r"# src/card/(drafting/local/echo\.py)\n", code)
    assert path, "the program says where it is saved"
    file = tmp_path / path[1]
    file.parent.mkdir(parents=True)
    file.write_text(code, "utf-8")
    monkeypatch.setattr(card.drafting.local, "__path__", [*card.drafting.local.__path__, str(file.parent)])
    (words,) = commands("A method to add")
    with_echo, plain = run(words), run([word for word in words if word not in ("--writers", "echo")])
    assert with_echo.status == plain.status == 0, with_echo.err + plain.err
    assert with_echo.out == plain.out
    assert re.search(r"accepted from echo [1-9]", with_echo.err), with_echo.err
    assert _passes(with_echo) < _passes(plain)


def _passes(ran: Ran) -> int:
    found = re.search(r"(\d+) target passes", ran.err)
    assert found, ran.err
    return int(found[1])
