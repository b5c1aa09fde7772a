"""What the command loads before it has anything to do, and what a terminal is told while it starts."""

from __future__ import annotations

import gc
import io
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import card
from card.cli import main
from card.cli.main import cli
from card.cli.parts.command import CardCommand
from card.cli.parts.starting import ReadingSpinner, load
from card.config.registry import methods
from tests.cli.terminal import screen, terminal
from tests.pair import Pair
from tests.waiting import until

HEAVY = ("torch", "transformers", "numpy", "tokenizers", "huggingface_hub", "zmq", "msgspec", "jinja2", "rich")
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(240)


def modules_after(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, set[str]]:
    """Run `card` in a fresh Python; return its status, what it printed, and the heavy packages that it has loaded."""
    code = (
        "import atexit, sys; from card.__main__ import main; sys.argv[0] = 'card'; "
        "atexit.register(lambda: sys.stderr.write('LOADED ' + ' '.join(sys.modules))); main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    said, _, loaded = done.stderr.partition("LOADED ")
    assert loaded, done.stderr
    return done.returncode, done.stdout + said, set(loaded.split()).intersection(HEAVY)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--help"], 0, "draft-server"),
        ([], 0, "draft-server"),
        (["--version"], 0, card.__version__),
        (["-V"], 0, card.__version__),
        (["generat"], 2, "Did you mean 'generate'?"),
        (["generate", "--help"], 0, "--prompt-file"),
        (["serve", "--help-all"], 0, "--kv-offload"),
        (["serve", "--help"], 0, "--port"),
        (["generate", "--colour", "red"], 2, "No such option"),
        (["generate", "--max-tokens", "0", "hi"], 2, "--max-tokens must be 1 or more"),
        (["generate", "--method", "magic", "hi"], 2, "unknown method 'magic'"),
    ],
)
def test_help_versions_and_errors_load_nothing_that_computes(arguments: list[str], status: int, said: str) -> None:
    got, printed, loaded = modules_after(*arguments)
    assert (got, loaded) == (status, set()), printed
    assert said in printed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_loads_nothing_that_computes_and_knows_options(shell: str) -> None:
    words = {"COMP_WORDS": "card generate --temp", "COMP_CWORD": "--temp" if shell == "fish" else "2"}
    status, printed, loaded = modules_after(env={"_CARD_COMPLETE": f"{shell}_complete", **words})
    assert (status, loaded) == (0, set()), printed
    assert "--temperature" in printed


def test_methods_complete() -> None:
    words = {"COMP_WORDS": "card generate --method s", "COMP_CWORD": "3"}
    printed = modules_after(env={"_CARD_COMPLETE": "bash_complete", **words})[1]
    assert printed.split() == [f"plain,{name}" for name in sorted(methods()) if name.startswith("s")]


def test_keys_and_report_load_no_torch(tmp_path: Path) -> None:
    status, printed, loaded = modules_after("keys", str(tmp_path / "keys"))
    assert (status, loaded) == (0, {"zmq"}), printed
    (tmp_path / "empty.jsonl").write_text("")
    status, printed, loaded = modules_after("report", str(tmp_path / "empty.jsonl"), "--csv", str(tmp_path / "x.csv"))
    assert status == 2
    assert not loaded.intersection({"torch", "transformers", "numpy"}), printed


def test_python_runs_the_package_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "card", "-V"], capture_output=True, text=True, check=True)
    assert done.stdout == f"card, version {card.__version__}\n"


# ---- help -----------------------------------------------------------------------------------------------------------


def help_of(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "card", *arguments], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def test_help_shows_the_common_options_and_names_where_the_rest_is() -> None:
    short, full = help_of("generate", "--help"), help_of("generate", "--help-all")
    for title in ("Options:", "Models:", "Method:", "Text:", "Help:"):
        assert f"\n{title}\n" in short
    rare = ("--beam-width", "--presence-penalty", "--cores", "--placement")
    assert all(flag in full and flag not in short for flag in rare)
    assert "more options: card generate --help-all" in short
    num_more = int(re.search(r"^(\d+) more options", short, re.MULTILINE)[1])  # type: ignore[index]
    flags = [len(re.findall(r"^  (?:-\w, )?--", text, re.MULTILINE)) for text in (short, full)]
    assert flags[1] - flags[0] == num_more


def test_a_command_with_few_options_hides_none() -> None:
    assert help_of("draft-server", "--help") == help_of("draft-server", "--help-all")


@pytest.mark.parametrize("verbose", [("before",), ("after",), ()])
def test_verbose_is_taken_before_and_after_the_command(verbose: tuple[str, ...], tmp_path: Path) -> None:
    code = "import atexit, logging; atexit.register(lambda: print(logging.getLogger().level)); "
    code += "import sys; from card.__main__ import main; main()"
    words = [*["-v"] * ("before" in verbose), "keys", str(tmp_path / "keys"), *["--verbose"] * ("after" in verbose)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) == (logging.INFO if verbose else logging.ERROR)
    every = [one for name, one in cli.commands.items() if name != "train"]
    assert all(isinstance(one, CardCommand) for one in every)


# ---- the spinner ----------------------------------------------------------------------------------------------------


CUT = "card: the answer is cut off: 8 tokens are the most; --max-tokens allows more\n"


def test_a_terminal_is_told_what_is_being_done_and_the_text_stands_alone_at_the_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    models = ["--target", pair.target, "--draft", pair.draft, "--dtype", "float32", "--placement", "inline"]
    arguments = ["generate", *models, "--max-tokens", "8", "--no-cache", "hi"]
    with terminal(arguments) as one:
        after = one.wait_for("importing libraries")
        one.wait_for("measuring the cost of passes here", after=after)
        assert one.wait() == 0
    monkeypatch.setattr(sys, "argv", ["card", *arguments])
    with pytest.raises(SystemExit, match="0"):
        main()
    plain = capfd.readouterr()
    assert plain.err in ("", CUT), "nothing is drawn where there is no terminal"
    last_line_cleared = one.raw.rindex("\x1b[2K")
    assert one.raw[last_line_cleared:].replace("\r\n", "\n").removeprefix("\x1b[2K") == plain.out + plain.err
    assert one.raw.count("\x1b[?25l") == one.raw.count("\x1b[?25h"), "the cursor is there again"


def test_no_garbage_is_looked_for_while_a_command_imports_and_it_is_again_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_once.py").write_text("import gc\nwas_enabled = gc.isenabled()\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert not load("imported_once", "").was_enabled
    assert gc.isenabled()


def test_a_spinner_says_how_far_a_prompt_is_read_and_how_long_the_rest_takes() -> None:
    now, said = 0.0, list[str]()
    spinner = ReadingSpinner("reading", lambda: now)
    spinner.tell_read(8, 100)  # before anything is shown
    spinner.say = said.append
    for now, num_read in ((2.0, 28), (4.0, 68)):  # noqa: B007
        spinner.tell_read(num_read, 100)
    assert said == ["reading: 28 of 100 tokens, 8 s left", "reading: 68 of 100 tokens, 3 s left"]


def test_a_terminal_is_shown_how_far_a_prompt_is_read_until_the_answer_begins_and_no_other_file_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, words = 0.0, "reading: 1,024 of 2,048 tokens, 8 s left"
    spinner = ReadingSpinner("reading", lambda: now)

    def answer(shown: Callable[[], str]) -> Iterator[str]:
        nonlocal now
        for now, num_read in ((0.0, 512), (4.0, 1024)):  # noqa: B007
            spinner.tell_read(num_read, 2048)
        until(lambda: words in shown())
        yield "answer"

    monkeypatch.setenv("TERM", "xterm")
    with screen() as (stderr, shown):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert list(spinner.until_first(answer(shown))) == ["answer"]
        assert shown().endswith("\x1b[2K"), "the line is gone before the answer comes"
    monkeypatch.setattr(sys, "stderr", piped := io.StringIO())
    assert list(spinner.until_first(answer(lambda: words))) == ["answer"]
    assert piped.getvalue() == ""
