"""What generate and chat say of their defaults: of an answer that was cut off, and of integers, once a process."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.commands import Ran, run_command
from tests.pair import Pair

PROMPT = "the cat sat"
HINT = "card: the weights run as they are stored; --dtype int8 reads half as much and is faster"
Run = Callable[..., Ran]

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def run(pair: Pair, capfd: pytest.CaptureFixture[str]) -> Run:
    """Answer with the target alone, as in a process of its own."""
    models = ["--target", pair.target, "--method", "vanilla", "--policy", "fixed", "--threads", "1", "--no-cache"]

    def one(command: str, *args: str, stdin: bytes = b"") -> Ran:
        return run_command(capfd, command, *models, *args, stdin=stdin)

    return one


def test_without_a_bound_an_answer_ends_with_the_context_and_a_line_says_so(run: Run) -> None:
    said = "card: the answer is cut off: the context of 300 tokens is full; --max-model-len raises it"
    asked = ["--dtype", "float32", "--ignore-eos", "--max-model-len", "300"]
    ran = run("generate", *asked, "--json", PROMPT)
    stats = json.loads(ran.out)["stats"]
    assert stats["num_prompt_tokens"] + stats["num_new_tokens"] == 300, "256 tokens would be fewer"
    assert ran.err.startswith(said) and ran.err.count("\n") == 1
    assert said in run("chat", *asked, stdin=b"hello\n").err


def test_an_answer_that_comes_to_its_end_is_not_called_cut_off(run: Run) -> None:
    ran = run("generate", "--dtype", "float32", "--regex", "[ab]{3}", PROMPT)
    assert (ran.status, len(ran.out), ran.err) == (0, 4, "")


def test_where_weights_run_as_stored_one_line_tells_of_integers(run: Run) -> None:
    told = run("generate", "--regex", "[ab]", PROMPT).err
    assert told.startswith(HINT) and told.count("\n") == 1


@pytest.mark.parametrize("dtype", ["auto", "float32", "int8"])
def test_whoever_gives_a_dtype_is_told_nothing_of_others(run: Run, dtype: str) -> None:
    assert run("generate", "--dtype", dtype, "--regex", "[ab]", PROMPT).err == ""


def test_in_chat_the_hint_comes_once_for_several_answers(run: Run) -> None:
    assert run("chat", "--regex", "[ab]", stdin=b"one\ntwo\nthree\n").err.count(HINT) == 1
