"""Ctrl-C at any moment: one empty line or none, exit status 130, never a stack, and no process left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event

import psutil
import pytest

from card.cli.parts.interrupts import raising
from tests.cli.terminal import CTRL_C, terminal
from tests.pair import Pair
from tests.processes import unhurried

# Interrupts itself when a module is about to be imported: the first argument.
AT_IMPORT = """
import signal, sys
moment = sys.argv.pop(1)
class At:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, At())
from card.__main__ import main
main()
"""
# Interrupts itself when a function of LLVM's library has returned: the first argument.
AT_RETURN = """
import signal, sys, threading
moment = sys.argv.pop(1)
def profile(frame, event, _):
    is_call = event == "return" and frame.f_code.co_qualname == "_lib_fn_wrapper.__call__"
    if is_call and frame.f_locals["self"]._cfn.__name__ == moment:
        sys.setprofile(None)
        threading.setprofile(None)
        signal.raise_signal(signal.SIGINT)
threading.setprofile(profile)
sys.setprofile(profile)
from card.__main__ import main
main()
"""
OF_LLVM = ("LLVMPY_DisposeString", "LLVMPY_DisposeMemoryBuffer", "LLVMPY_DisposeTargetMachine")
MOMENTS = (
    "card.cli",
    "card.cli.parts.interrupts",
    "click",
    "card.cli.parts.options",
    "numpy",
    "tokenizers",
    "card.models.loading",
    "card.engine.engine",
)
WHILE_LOADING = "card.models.own.exact_decoder"

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("moment", [*MOMENTS, WHILE_LOADING])
def test_an_interrupt_while_modules_are_imported_is_silent(moment: str, pair: Pair) -> None:
    arguments = ["generate", "--target", pair.target, "--target-cost", "30M", "--method", "vanilla", "hi"]
    done = subprocess.run(
        [sys.executable, "-c", AT_IMPORT, moment, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout, unhurried(done.stderr)) == (130, "", "")


@pytest.mark.parametrize("function", OF_LLVM)
def test_an_interrupt_while_code_is_compiled_frees_nothing_twice(function: str, pair: Pair, tmp_path: Path) -> None:
    arguments = ["generate", "--target", pair.target, "--target-cost", "30M", "--method", "vanilla", "hi"]
    done = subprocess.run(
        [sys.executable, "-c", AT_RETURN, function, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
    )
    assert (done.returncode, done.stdout, unhurried(done.stderr)) == (130, "", "")


class Finalised:
    """Is interrupted `times` times while Python finalises objects, where an error goes to `sys.unraisablehook`."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __del__(self) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            if self.times > 1:
                self.__class__(self.times - 1)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("more_work", [True, False])
def test_an_interrupt_within_a_callback_ends_the_block_all_the_same(times: int, *, more_work: bool) -> None:
    with pytest.raises(KeyboardInterrupt), raising():
        Finalised(times)
        if more_work:
            Event().wait(60)
            pytest.fail("the interrupt was lost")


# Is run by `python -m`, as the command is.
WITHIN_A_TEXT = """
import signal, sys
from card.cli.parts.interrupts import INTERRUPTED, raising
try:
    with raising():
        exec("import signal; signal.raise_signal(signal.SIGINT)")
except KeyboardInterrupt:
    sys.exit(INTERRUPTED)
"""


def test_an_interrupt_within_a_text_that_runs_leaves_the_status_alone(tmp_path: Path) -> None:
    (tmp_path / "within_a_text.py").write_text(WITHIN_A_TEXT)
    done = subprocess.run([sys.executable, "-m", "within_a_text"], cwd=tmp_path, check=False, timeout=120)
    assert done.returncode == 130


@pytest.mark.parametrize("words", [["importing"], ["loading", "measuring", "waiting"], ["reading"]], ids="-".join)
def test_ctrl_c_on_a_terminal_leaves_a_clean_line_and_no_process(words: list[str], pair: Pair) -> None:
    arguments = ["--target", pair.target, "--draft", pair.draft, "--max-tokens", "4000", "--ignore-eos", "--raw"]
    arguments += ["--target-cost", "5M", "--policy", "fixed", "--threads", "1"]  # nothing is measured
    with terminal(["generate", *arguments, "the cat sat"]) as one:
        one.wait_for(*words)  # the spinner draws twelve times a second: a step that is quicker may never show
        if words == ["reading"]:
            one.wait_for_text()
        children = psutil.Process(one.process.pid).children(recursive=True)
        one.type(CTRL_C)
        assert one.wait() == 130, one.text
        assert not re.search(r"Traceback|Error|Exception|File \"", one.text), one.text
        assert one.raw.rindex("\x1b[?25h") > one.raw.rindex("\x1b[?25l"), "the cursor is there again"
        _, alive = psutil.wait_procs(children)
        assert not alive
