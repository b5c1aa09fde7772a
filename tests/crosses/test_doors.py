"""Each method crossed with each way to a text: the text of plain decoding, with lawful figures, or one line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from card.api.llm import LLM
from card.cli.parts.options import DEMO_DRAFT, DEMO_TARGET
from card.config import SamplingParams
from card.config.fields import declared
from card.config.method import Method
from card.config.registry import all_methods, own_settings, settings_of_writers
from card.drafting.local import writer_names
from tests.commands import exit_status
from tests.crosses.doors import DOORS, MAX_TOKENS, MESSAGES, REQUESTS, Answer, Setup, bench_rows, serve
from tests.figures import check_figures

pytestmark = pytest.mark.timeout(240)
METHODS = all_methods()
# Doors that hand all of a method to the same code, so that each method is tried by one of both.
_TWINS = (("generate", "chat"), ("async_llm", "llm"))
# Each method with each door but a twin once, and with each kind of request; and each door with each kind.
_KINDS = list(REQUESTS)
_ROWS = {
    (row, column): (method, door, _KINDS[(row + column) % len(_KINDS)])
    for (row, method), (column, door) in itertools.product(enumerate(METHODS), enumerate(DOORS))
}
_LEFT_OUT = {(row, twins[row % 2]) for row, twins in itertools.product(range(len(METHODS)), _TWINS)}
COVER = {cell for (row, _), cell in _ROWS.items() if (row, cell[1]) not in _LEFT_OUT}


def _depends_on_request(method: str, door: str, kind: str) -> bool:
    """Whether this kind of request could fail alone: a refusal reads none, and `card bench` takes no penalties."""
    is_refused = METHODS[method].needs_training or (METHODS[method].runs and door != "generate")
    return not is_refused and (door, kind) != ("bench", "penalised")


_CELLS = list(itertools.product(METHODS, DOORS, REQUESTS))
_TABLE = [cell for cell in _CELLS if cell in COVER or _depends_on_request(*cell)]
# Where the tests of the core run beside, without PyTorch: each method once, and all that is there with PyTorch alone.
BESIDE_CORE = {
    cell for (row, column), cell in _ROWS.items() if column == row % len(DOORS) or METHODS[cell[0]].extra == "torch"
}

Plain = Callable[[str], str]


@pytest.fixture(scope="module")
def plain() -> Plain:
    """Return what plain decoding answers to a kind of request."""

    @cache
    def text(kind: str) -> str:
        with LLM(DEMO_TARGET, method="vanilla") as llm:
            params = SamplingParams(**REQUESTS[kind], max_tokens=MAX_TOKENS)
            return llm.chat(MESSAGES, params)[0].outputs[0].text

    return text


def setup_of(method: Method, draft: str = DEMO_DRAFT, **own: str) -> Setup:
    """Return a method with the demo pair, or with the demo target alone."""
    has_draft = method.needs_draft or bool(method.runs)
    return Setup(method, DEMO_TARGET, draft if has_draft else None, own)


def check(answer: Answer, setup: Setup, text: str) -> None:
    """Check what a method that can run answers."""
    assert not answer.refusal, answer.refusal
    assert answer.text in (None, text)
    if answer.stats is not None:
        check_figures(answer.stats)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give all cells of the table to a test of one, most of them to `make test-slow`."""
    if "cell" in metafunc.fixturenames:
        quick = BESIDE_CORE if metafunc.config.option.beside_core else COVER
        marks = {cell: () if cell in quick else pytest.mark.slow for cell in _TABLE}
        metafunc.parametrize("cell", [pytest.param(cell, id="-".join(cell), marks=marks[cell]) for cell in _TABLE])


def test_a_method_writes_the_text_of_plain_decoding_by_every_door(
    cell: tuple[str, str, str], plain: Plain, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that needs a trained part, is run by another command, or writes by steps and is to penalise, says so."""
    method, door, kind = cell
    setup = setup_of(METHODS[method])
    answer = DOORS[door](setup, REQUESTS[kind], tmp_path, capfd)
    if setup.method.runs and door == "generate" and kind != "penalised" and find_spec("torch") is not None:
        assert answer.text
    elif setup.method.runs or setup.method.needs_training:
        assert answer.refusal.count("\n") == 1 and method in answer.refusal
    else:
        check(answer, setup, plain(kind))


def test_every_writer_without_a_trained_part_has_rows_that_write_the_text_of_plain_decoding(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained = {writer for method in METHODS.values() if method.needs_head for writer in method.writers}
    rows = [f"card+{writer}" for writer in writer_names() if writer not in trained]
    files = [
        name for name in settings_of_writers(writer_names()) if declared(own_settings()[name])[name].default is None
    ]
    own = {name: str(tmp_path / name) for name in files if name not in trained}
    answer = bench_rows(rows, Setup(METHODS["card"], DEMO_TARGET, DEMO_DRAFT, own), REQUESTS["greedy"], tmp_path, capfd)
    assert not answer.refusal and answer.stats is not None
    check_figures(answer.stats)


_ALONE = [name for name, one in METHODS.items() if not (one.runs or one.needs_training)]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), list(zip(_ALONE, itertools.cycle(REQUESTS), strict=False)))
def test_the_command_serve_runs_every_method(
    method: str, kind: str, plain: Plain, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    setup = setup_of(METHODS[method])
    check(serve(setup, REQUESTS[kind], tmp_path, capfd), setup, plain(kind))


# ---- methods with a trained part -------------------------------------------------------------------------------------

_LESSONS = [("Ann has 5 pens and buys 2 more. How many?", 7), ("Tom has 9 cows and sells 2. How many?", 7),
            ("Sue has 9 hats and sells 3. How many?", 6), ("Bob has 4 eggs and eats 1. How many?", 3)]  # fmt: skip
_OF_TRAINED = [
    (door, kind) for door, kind in itertools.product(DOORS, REQUESTS) if (door, kind) != ("bench", "penalised")
]
_TRAINED = [name for name, one in METHODS.items() if one.needs_training and find_spec("torch") is not None]


@pytest.fixture(scope="module")
def lessons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file that any training can learn from."""
    file = tmp_path_factory.mktemp("lessons") / "lessons.jsonl"
    rows = ({"question": question, "answer": f"It is {number}. #### {number}",
             "messages": [{"role": "user", "content": question}]} for question, number in _LESSONS)  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


@pytest.fixture(scope="module")
def train(lessons: Path) -> Callable[[Method], Setup]:
    """Return a function that trains what a method needs, by its own command, which has learnt little."""

    @cache
    def trained(name: str) -> Setup:
        method, out = METHODS[name], str(lessons.with_name(name))
        if method.needs_parallel_draft:
            assert exit_status("train", name, "--draft", DEMO_DRAFT, "--data", str(lessons), "--out", out) == 0
            return setup_of(method, draft=out)
        (head, *_) = method.reads
        args = ("train", head, "--target", DEMO_TARGET, "--data", str(lessons), "--max-tokens", "16", "--out", out)
        assert exit_status(*args) == 0
        return setup_of(method, **{head: out})

    return lambda method: trained(method.name)


@pytest.mark.slow
@pytest.mark.parametrize(("door", "kind"), [*_OF_TRAINED, (serve.__name__, "sampled")])
@pytest.mark.parametrize("method", _TRAINED)
def test_a_method_with_a_trained_part_writes_the_text_of_plain_decoding_by_every_door(
    method: str,
    door: str,
    kind: str,
    train: Callable[[Method], Setup],
    plain: Plain,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    setup = train(METHODS[method])
    check({**DOORS, serve.__name__: serve}[door](setup, REQUESTS[kind], tmp_path, capfd), setup, plain(kind))
