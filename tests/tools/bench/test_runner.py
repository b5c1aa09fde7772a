"""A run decodes in its order, keeps what is done, and goes on with exactly what is missing; no model runs here."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from card.config import SamplingParams
from card.errors import BenchError, PromptError, SettingsError, TargetError
from card.text.tokenizer import Tokenizer
from card.tools.bench.compare import Gap
from card.tools.bench.datasets import Dataset, DatasetQuestion
from card.tools.bench.environment import Environment
from card.tools.bench.lineup import BenchPlan
from card.tools.bench.records import ModelPair, RowFacts, Run, SampleKey, planned
from card.tools.bench.results import load, read_unchecked
from card.tools.bench.rows import Decoded
from card.tools.bench.runner import BenchProgress, run_bench
from tests.pair import own_tokenizer

ROWS = ("plain", "fast", "other")
ENVIRONMENT = Environment("card bench", "abc", "2026-01-01T00:00:00Z", {"card": "1"}, {"cpu": "a CPU", "cores": 2})
CONSOLE = Console(quiet=True)
DATASETS = (
    Dataset(
        "chat", "chat.jsonl", (DatasetQuestion(("how many cats?", "and dogs?")), DatasetQuestion(("the mat", "sat?")))
    ),
    Dataset("plain", "plain.jsonl", (DatasetQuestion(("one two",), is_raw=True),)),
)


@dataclasses.dataclass
class World:
    """A tokenizer, what rows do on the n-th decode, and what they were asked."""

    tokenizer: Tokenizer
    on_decode: Callable[[int, str], None] = lambda count, row: None
    spoils: Callable[[str, Sequence[int]], bool] = lambda row, prompt_ids: False
    fingerprint: str = "a"
    is_half: bool = False
    decodes: list[tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    chosen: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    closed: int = 0

    def plan(self, **changes: Any) -> BenchPlan:
        facts = tuple(
            RowFacts(name=name, method=name, cores=(0,), threads=1, is_exact=True, is_comparable=True, settings={})
            for name in ROWS
        )
        plan = BenchPlan(
            rows=facts,
            baseline="plain",
            pairs={"pair": lambda say: FakePair(self)},
            datasets=DATASETS,
            params=SamplingParams(temperature=0.0, seed=0, max_tokens=8).resolved(),
            repeats=2,
        )
        return replace(plan, **changes)


class FakeRow:
    """Answers each prompt with a text that depends on it alone."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self._world = name, world
        self.settings: dict[str, Any] = {"length": 4}

    def decode(self, prompt_ids: Sequence[int], params: SamplingParams) -> Decoded:
        world = self._world
        world.on_decode(len(world.decodes), self.name)
        world.decodes.append((self.name, tuple(prompt_ids)))
        ids = [world.tokenizer.encode("sat")[0], 2 + sum(prompt_ids) % 200, 40]
        if world.spoils(self.name, prompt_ids):
            ids[1] += 1
        return Decoded(tuple(ids), ((0.1, 1), (0.2, 2), (0.4, 3)), 0.5, 0.3, None)

    def traced(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """It has no rounds to tell of."""


class FakePair:
    """What `card.tools.bench.runner` needs of a pair."""

    max_model_len = 128

    def __init__(self, world: World) -> None:
        self._world = world
        self.tokenizer = world.tokenizer
        self.dtype = "bfloat16" if world.is_half else "float32"
        self.judge: Any = SimpleNamespace(gap=lambda *_: Gap(0.01, is_near_tie=world.is_half))

    def pair_facts(self) -> ModelPair:
        return ModelPair(
            name="pair",
            target="t",
            draft="d",
            target_cost=None,
            target_parameters=2,
            draft_parameters=1,
            fingerprint=self._world.fingerprint,
        )

    def make_rows(self, prompts: Sequence[Sequence[int]], chosen: Mapping[str, Mapping[str, Any]]) -> list[FakeRow]:
        self._world.chosen.append(dict(chosen))
        return [FakeRow(self._world, name) for name in ROWS]

    def close(self) -> None:
        self._world.closed += 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return own_tokenizer()


@pytest.fixture
def world(tokenizer: Tokenizer) -> World:
    return World(tokenizer)


def measure(world: World, path: Path, resumed: Run | None = None, **changes: Any) -> Run:
    return run_bench(world.plan(**changes), ENVIRONMENT, path, CONSOLE, resumed)


def interrupt_at(number: int) -> Callable[[int, str], None]:
    def press(count: int, row: str) -> None:
        if count == number:
            raise KeyboardInterrupt

    return press


def content(run: Run) -> list[tuple[SampleKey, tuple[int, ...]]]:
    return [(sample.key, sample.token_ids) for sample in run.samples]


def test_a_run_decodes_what_it_promises_in_that_order_and_closes_what_it_opened(world: World, tmp_path: Path) -> None:
    run = measure(world, tmp_path / "a.jsonl")
    assert run.status == "complete" and world.closed == 2  # to describe the pair, and to run it
    assert [sample.key for sample in run.samples] == list(planned(run))
    assert [row for row, _ in world.decodes] == [key.row for key in planned(run)]
    assert [(one.name, one.num_prompts, one.turns) for one in run.workloads] == [
        ("chat", 2, (2, 2)),
        ("plain", 1, (1,)),
    ]
    assert {one.num_texts for one in run.checks if one.workload == "chat"} == {8} and len(run.checks) == 6
    assert run.settings_of(("pair", "fast", "chat")) == {"length": 4}


def test_a_second_turn_stands_behind_the_rows_own_first_answer(world: World, tmp_path: Path) -> None:
    run = measure(world, tmp_path / "a.jsonl", repeats=1)
    asked = dict(zip(planned(run), (ids for _, ids in world.decodes), strict=True))
    for key, ids in asked.items():
        text = world.tokenizer.decode(list(ids))
        if key.workload == "plain":
            assert text == "one two"
        elif key.turn == 1:
            first = next(one for one in run.samples if one.key == replace(key, turn=0))
            answer = world.tokenizer.decode(list(first.token_ids), skip_special_tokens=True)
            question = DATASETS[0].questions[key.prompt].turns
            assert f"user: {question[0]}<|turn|>\nassistant: {answer}<|turn|>\nuser: {question[1]}" in text


@pytest.mark.parametrize("number", [0, 1, 3, 8, 14, 16, 29])
def test_an_interrupted_run_keeps_what_is_done_and_resumes_with_what_is_missing(
    world: World, tokenizer: Tokenizer, tmp_path: Path, number: int
) -> None:
    path = tmp_path / "a.jsonl"
    whole = measure(World(tokenizer), tmp_path / "whole.jsonl")
    world.on_decode = interrupt_at(number)
    cut = measure(world, path)
    assert cut.status == "interrupted" and content(cut) == content(whole)[:number]
    world.on_decode = lambda count, row: None
    resumed = measure(world, path, read_unchecked(path))
    assert len(world.decodes) == len(whole.samples)  # nothing was decoded twice
    assert resumed.status == "complete" and content(resumed) == content(whole)
    assert resumed.checks == whole.checks and resumed.chosen == whole.chosen
    assert [sorted(known) for known in world.chosen] == [[], [], sorted(ROWS), sorted(ROWS)]  # kept on resuming


def test_a_run_whose_row_failed_can_go_on(world: World, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def fail(count: int, row: str) -> None:
        if count == 5:
            raise TargetError("out of memory")

    world.on_decode = fail
    with pytest.raises(TargetError, match="out of memory"):
        measure(world, path)
    assert len(read_unchecked(path).samples) == 5
    world.on_decode = lambda count, row: None
    assert measure(world, path, read_unchecked(path)).status == "complete"


def test_resuming_what_is_complete_decodes_nothing(world: World, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    run = measure(world, path)
    count = len(world.decodes)
    assert content(measure(world, path, read_unchecked(path))) == content(run) and len(world.decodes) == count


def test_a_run_does_not_go_on_as_another_one(world: World, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    world.on_decode = interrupt_at(4)
    old = measure(world, path)
    world.on_decode = lambda count, row: None
    changed: list[tuple[str, Any]] = [
        ("repeats was 2 and is 3", lambda: measure(world, path, old, repeats=3)),
        (
            "sampling",
            lambda: measure(world, path, old, params=SamplingParams(temperature=1.0, seed=0, max_tokens=8).resolved()),
        ),
        (
            "max_tokens",
            lambda: measure(world, path, old, params=SamplingParams(temperature=0.0, seed=0, max_tokens=9).resolved()),
        ),
        ("workloads", lambda: measure(world, path, old, datasets=DATASETS[:1])),
        (
            "workloads was .*prompts_sha256",
            lambda: measure(
                world, path, old, datasets=(DATASETS[0], replace(DATASETS[1], questions=(DatasetQuestion(("x",)),)))
            ),
        ),
        ("rows", lambda: measure(world, path, old, rows=world.plan().rows[:2])),
    ]
    for reason, go_on in changed:
        with pytest.raises(BenchError, match=f"cannot go on: {reason}"):
            go_on()
    for name, other in (
        ("versions.card", {"versions": {"card": "2"}}),
        ("machine.cores", {"machine": {"cpu": "a CPU", "cores": 3}}),
    ):
        with pytest.raises(BenchError, match=f"cannot go on: {name} was"):
            run_bench(world.plan(), replace(ENVIRONMENT, **other), path, CONSOLE, old)
    world.fingerprint = "b"
    with pytest.raises(BenchError, match=r"cannot go on: pairs was .*fingerprint='a'"):
        measure(world, path, old)
    assert len(read_unchecked(path).samples) == 4


def test_a_text_that_differs_fails_the_run_and_names_the_row(world: World, tmp_path: Path) -> None:
    world.spoils = lambda row, prompt_ids: row == "fast" and len(prompt_ids) > 10
    path = tmp_path / "a.jsonl"
    with pytest.raises(BenchError, match="row fast differs from plain at token 1, which is no recorded near-tie"):
        measure(world, path)
    checks = {one.row: one for one in read_unchecked(path).checks if one.workload == "chat"}
    assert checks["fast"].is_same is False and checks["other"].is_same is True
    first = checks["fast"].differences[0]
    assert (first.position, first.gap) == (1, 0.01) and first.token_id != first.plain_token_id


def test_a_near_tie_is_recorded_once_and_ends_the_comparison_of_that_conversation(world: World, tmp_path: Path) -> None:
    world.is_half = True
    world.spoils = lambda row, prompt_ids: row == "fast"
    run = measure(world, tmp_path / "a.jsonl")
    check = run.check_of(("pair", "fast", "chat"))
    assert check is not None and check.is_same and (check.num_texts, check.num_equal) == (8, 0)
    assert [(one.prompt, one.turn, one.position) for one in check.near_ties] == [(0, 0, 1), (1, 0, 1)]


def test_prompts_that_do_not_fit_are_refused_or_left_out_as_asked(world: World, tmp_path: Path) -> None:
    long = Dataset(
        "mixed",
        "x",
        (
            DatasetQuestion(("cat " * 160,)),
            DatasetQuestion(("short",)),
            DatasetQuestion(("shorter",)),
            DatasetQuestion(("s",)),
        ),
    )
    with pytest.raises(
        PromptError, match=r"prompt 0 of mixed and its answers may take \d+ tokens, the target takes 128"
    ):
        measure(world, tmp_path / "a.jsonl", datasets=(long,))
    run = measure(world, tmp_path / "b.jsonl", datasets=(long,), skips_long=True, limit=2, repeats=1)
    assert run.workloads[0].num_prompts == 2 and len(run.samples) == 6
    with pytest.raises(PromptError, match="no prompt of mixed fits"):
        measure(world, tmp_path / "c.jsonl", datasets=(replace(long, questions=long.questions[:1]),), skips_long=True)


def test_a_file_that_cannot_be_read_is_not_appended_to(world: World, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("something else\n")
    with pytest.raises(BenchError, match="line 1: not JSON"):
        measure(world, path)
    assert path.read_text() == "something else\n" and not world.decodes


def test_several_runs_may_share_a_file(world: World, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    first = measure(world, path)
    second = measure(world, path)
    assert first.run_id != second.run_id and [run.run_id for run in load(path)] == [first.run_id, second.run_id]


@pytest.mark.parametrize("changes", [{"repeats": 0}, {"limit": 0}, {"params": SamplingParams(max_tokens=1).resolved()}])
def test_plans_that_make_no_sense_are_refused(world: World, changes: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="must be"):
        world.plan(**changes)


def test_the_last_turn_of_a_question_with_an_answer_says_whether_it_was_solved(world: World, tmp_path: Path) -> None:
    number = Decimal(world.tokenizer.decode(world.tokenizer.encode("7")))
    questions = (DatasetQuestion(("how many cats?", "sure?"), answer=number), DatasetQuestion(("and dogs?",)))

    class Seven(FakeRow):
        def decode(self, prompt_ids: Sequence[int], params: SamplingParams) -> Decoded:
            ids = world.tokenizer.encode("so 7" if self.name == "plain" else "so 8" if self.name == "fast" else "so")
            return Decoded(tuple(ids), ((0.1, 1), (0.4, len(ids))), 0.5, 0.3, None)

    class Solving(FakePair):
        def make_rows(self, prompts: object, chosen: object) -> list[FakeRow]:
            return [Seven(world, name) for name in ROWS]

    pairs = {"pair": lambda say: Solving(world)}
    plan = world.plan(pairs=pairs, datasets=(Dataset("chat", "x", questions),), repeats=1)
    rows = tuple(replace(row, is_exact=row.name == "plain") for row in plan.rows)
    run = measure(world, tmp_path / "a.jsonl", pairs=pairs, datasets=plan.datasets, repeats=1, rows=rows)
    found = {(one.row, one.prompt, one.turn): (one.final_number, one.is_solved) for one in run.samples}
    assert {found[row, 0, 0] for row in ROWS} == {found[row, 1, 0] for row in ROWS} == {(None, None)}
    assert [found[row, 0, 1] for row in ROWS] == [("7", True), ("8", False), (None, False)]


def test_a_bench_in_a_pipe_tells_what_it_decodes() -> None:
    with BenchProgress(Console(file=io.StringIO()), total=6, done=2) as step:
        step.say("pair, repeat 1, questions 1, card")
        step.count()
        assert step.in_words() == "3 of 6 decodes; pair, repeat 1, questions 1, card"
