"""One run: its plan, its decodes in an order in which drift affects all rows alike, and the comparison of texts.

Everything is appended to the file at once. So a run that was interrupted or killed can be resumed with exactly the
decodes that are missing. No time is shown before all texts of a pair were compared.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from card.config import ResolvedParams
from card.engine.trace import Trace
from card.errors import BenchError, PromptError, SettingsError
from card.machine.heartbeat import Heartbeat
from card.text.answers import final_number
from card.text.tokenizer import Tokenizer
from card.text.tokens import decode
from card.tools.bench.compare import TextJudge, checks_of
from card.tools.bench.datasets import Dataset, DatasetQuestion
from card.tools.bench.environment import Environment
from card.tools.bench.lineup import BenchPlan, Lineup
from card.tools.bench.records import Chosen, ModelPair, Run, Sample, SampleKey, Sampling, Status, Workload, planned
from card.tools.bench.results import PROMISED, VERSION, ResultsWriter, load, read_unchecked
from card.tools.bench.rows import Row

_DECODED = (
    "token_ids",
    "token_times",
    "prefill_s",
    "decode_s",
    "wall_s",
    "cpu_s",
    "stats",
)  # fields of a decode that are kept
_SPEED_PERIOD_S = 3600.0  # over which the time left is estimated: single rows differ, whole rounds over them do not


@dataclass(frozen=True, slots=True)
class PairJob:
    """Everything needed to decode and compare one pair."""

    name: str
    tokenizer: Tokenizer
    datasets: Mapping[str, Dataset]
    params: ResolvedParams
    judge: TextJudge

    def prompt_ids(self, key: SampleKey, done: Mapping[SampleKey, Sample]) -> list[int]:
        """Return the text that a decode continues: a later turn follows the row's own answers to the earlier ones."""
        question = self.datasets[key.workload].questions[key.prompt]
        answers: list[str] = []
        for turn in range(key.turn):
            asked = question.encode(self.tokenizer, answers)
            answers.append(decode(self.tokenizer, done[replace(key, turn=turn)].token_ids, after=asked))
        return question.encode(self.tokenizer, answers)

    def outcome(self, key: SampleKey, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the number that a text ends with and whether it solves its question, as fields of `Sample`."""
        question = self.datasets[key.workload].questions[key.prompt]
        if question.answer is None or key.turn < len(question.turns) - 1:
            return {}
        number = final_number(decode(self.tokenizer, token_ids, after=prompt_ids))
        return {"final_number": None if number is None else str(number), "is_solved": number == question.answer}

    def first_prompts(self, workload: str) -> list[list[int]]:
        """Return the first turns of a workload's prompts as token ids."""
        return [question.encode(self.tokenizer) for question in self.datasets[workload].questions]


def run_bench(
    plan: BenchPlan,
    environment: Environment,
    path: Path,
    console: Console,
    resumed: Run | None = None,
    traces: dict[str, Trace] | None = None,
) -> Run:
    """Measure everything, then read the run back from its file, checked. Ctrl-C ends it early and keeps what is done.

    Args:
        path: the file that lines are appended to.
        resumed: the unfinished run in that file, to be continued.
        traces: filled with one trace of each row that can record them, for each pair and workload: of its first prompt,
            decoded once more. These decodes are no samples.
    Raises: SettingsError, PromptError, ModelError, WorkerError; BenchError if texts differ that must not, or if the
        resumed run was another one.
    """
    if resumed is not None:
        _refuse_elsewhere(resumed, environment)
    elif path.exists() and path.stat().st_size:
        load(path)  # refuse now a file that could not be read later
    run, datasets = _promise(plan, environment, console)
    if resumed is not None:
        refuse_changes(resumed, run)
        run = replace(run, run_id=resumed.run_id, resumed=True)
    with ResultsWriter(path, run.run_id) as writer:
        writer.run(run)
        writer.end(_measure(plan, run, datasets, path, writer, console, traces))
    return next(one for one in load(path) if one.run_id == run.run_id)


def refuse_changes(old: Run, new: Run) -> None:
    """Raise BenchError if ``new`` does not measure the same as ``old``."""
    _refuse({name: (getattr(old, name), getattr(new, name)) for name in PROMISED})


def _refuse_elsewhere(old: Run, environment: Environment) -> None:
    """Raise BenchError if the code or the machine has changed."""
    now = environment.versions
    same: dict[str, tuple[Any, Any]] = {
        f"versions.{name}": (old.versions.get(name), now.get(name)) for name in old.versions | now
    }
    for name in ("cpu", "cores"):
        same[f"machine.{name}"] = old.machine.get(name), environment.machine.get(name)
    _refuse(same)


def _refuse(same: Mapping[str, tuple[Any, Any]]) -> None:
    for name, (before, now) in same.items():
        if before != now:
            raise BenchError(
                f"the run cannot go on: {name} was {_short(before, now)} and is {_short(now, before)} now; run it anew "
                "into another file"
            )


def _short(value: Any, other: Any) -> str:
    """Return a value in a few words; of two lists, the first item that differs."""
    if isinstance(value, tuple) and isinstance(other, tuple) and value and len(value) == len(other):
        value = next(ours for ours, theirs in zip(value, other, strict=True) if ours != theirs)
    return f"{value!s:.200}"


# ---- the plan of a run -----------------------------------------------------------------------------------------------


def _promise(plan: BenchPlan, environment: Environment, console: Console) -> tuple[Run, list[Dataset]]:
    """Return the facts of the run, and the data sets cut to the prompts that all pairs can take."""
    pairs: list[ModelPair] = []
    limits: list[tuple[Tokenizer, int]] = []
    dtypes: list[str] = []
    for name, open_pair in plan.pairs.items():
        console.print(f"reading {name}", highlight=False, soft_wrap=True)
        with _progress_lines(console, f"reading {name}".__str__), closing(open_pair(lambda _: None)) as pair:
            pairs.append(pair.pair_facts())
            dtypes.append(pair.dtype)
            limits.append((pair.tokenizer, pair.max_model_len))
    if len(set(dtypes)) > 1:
        raise SettingsError(f"targets are stored in different dtypes ({', '.join(dtypes)}); give one with --dtype")
    datasets = [_cut(dataset, limits, plan, console) for dataset in plan.datasets]
    asked = {name: getattr(plan.params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return Run(
        run_id=secrets.token_hex(6),
        version=VERSION,
        **asdict(environment),
        pairs=tuple(pairs),
        dtype=dtypes[0],
        sampling=Sampling(**asked, seed=plan.params.seed or 0),
        max_tokens=plan.params.max_tokens,
        repeats=plan.repeats,
        rows=plan.rows,
        workloads=tuple(_workload(dataset) for dataset in datasets),
        baseline=plan.baseline,
        options=dict(plan.options),
    ), datasets


def _workload(dataset: Dataset) -> Workload:
    return Workload(
        name=dataset.name,
        source=dataset.source,
        num_prompts=len(dataset.questions),
        turns=tuple(len(question.turns) for question in dataset.questions),
        prompts_sha256=dataset.sha256,
    )


def _fits(dataset: Dataset, prompt: int, limits: Sequence[tuple[Tokenizer, int]], plan: BenchPlan) -> bool:
    """Return whether a prompt and its longest answers fit into the context of every pair's target."""
    question = dataset.questions[prompt]
    num_turns = len(question.turns)
    for tokenizer, most in limits:
        needed = len(question.encode(tokenizer, ["."] * (num_turns - 1))) + num_turns * plan.params.max_tokens
        if needed > most and not plan.skips_long:
            raise PromptError(
                f"prompt {prompt} of {dataset.name} and its answers may take {needed} tokens, the target takes {most}; "
                "lower --max-tokens, leave long prompts out with --skip-long, or use another target"
            )
        if needed > most:
            return False
    return True


def _cut(dataset: Dataset, limits: Sequence[tuple[Tokenizer, int]], plan: BenchPlan, console: Console) -> Dataset:
    """Return the first prompts that fit, as many as asked for."""
    taken: list[DatasetQuestion] = []
    num_skipped = 0
    for prompt, question in enumerate(dataset.questions):
        if len(taken) == plan.limit:
            break
        if _fits(dataset, prompt, limits, plan):
            taken.append(question)
        else:
            num_skipped += 1
    if not taken:
        raise PromptError(f"no prompt of {dataset.name} fits; lower --max-tokens, or use another target")
    if num_skipped:
        console.print(
            f"{dataset.name}: {num_skipped} prompts left out, as they do not fit", highlight=False, soft_wrap=True
        )
    return replace(dataset, questions=tuple(taken))


# ---- decoding --------------------------------------------------------------------------------------------------------


def _measure(
    plan: BenchPlan,
    run: Run,
    datasets: Sequence[Dataset],
    path: Path,
    writer: ResultsWriter,
    console: Console,
    traces: dict[str, Trace] | None,
) -> Status:
    """Decode and compare what is missing, pair by pair; return how the run ended."""
    keys = list(planned(run))
    before = read_unchecked(path, run.run_id)
    by_name = {dataset.name: dataset for dataset in datasets}
    with BenchProgress(console, len(keys), len(before.samples)) as step, step.progress_lines():
        try:
            for name, open_pair in plan.pairs.items():
                wanted = [key for key in keys if key.pair == name]
                done = {sample.key: sample for sample in before.samples if sample.pair == name}
                if len(done) == len(wanted) and _is_compared(before, name):
                    continue
                with closing(open_pair(step.say)) as pair:
                    job = PairJob(name, pair.tokenizer, by_name, plan.params, pair.judge)
                    try:
                        if len(done) < len(wanted):
                            rows = _bring_up(pair, job, before, writer)
                            decode_missing(wanted, rows, job, done, writer, step)
                            if traces is not None:
                                step.say("tracing")
                                _trace(rows, job, traces)
                    finally:  # also after Ctrl-C
                        step.say("comparing texts")
                        compare(job, path, writer, run.run_id)
        except KeyboardInterrupt:
            return "interrupted"
    return "complete"


def _is_compared(run: Run, pair: str) -> bool:
    comparable = [row.name for row in run.rows if row.is_exact and row.is_comparable]
    wanted = {(row, workload.name): sum(workload.turns) for row in comparable for workload in run.workloads}
    num_texts = {(check.row, check.workload): check.num_texts for check in run.checks if check.pair == pair}
    return all(num_texts.get(key) == count * run.repeats for key, count in wanted.items())


def _bring_up(pair: Lineup, job: PairJob, before: Run, writer: ResultsWriter) -> dict[str, Sequence[Row]]:
    """Return the rows of each workload, warmed up; write the settings chosen for them."""
    rows: dict[str, Sequence[Row]] = {}
    for workload in job.datasets:
        known = {one.row: one.settings for one in before.chosen if (one.pair, one.workload) == (job.name, workload)}
        rows[workload] = pair.make_rows(job.first_prompts(workload), known)
        for row in rows[workload]:
            if row.name not in known:
                writer.write(Chosen(pair=job.name, row=row.name, workload=workload, settings=dict(row.settings)))
    return rows


def decode_missing(
    keys: Sequence[SampleKey],
    rows: Mapping[str, Sequence[Row]],
    job: PairJob,
    done: dict[SampleKey, Sample],
    writer: ResultsWriter,
    step: BenchProgress,
) -> None:
    """Decode what is not done yet, in the order of ``keys``.

    Args:
        rows: by workload.
        done: filled with each sample as it is written.
    Raises: WorkerError or TargetError if a row fails.
    """
    by_name = {workload: {row.name: row for row in those} for workload, those in rows.items()}
    for key in keys:
        if key in done:
            continue
        step.say(f"{key.pair}, repeat {key.repeat + 1}, {key.workload} {key.prompt + 1}, {key.row}")
        prompt_ids = job.prompt_ids(key, done)
        decoded = by_name[key.workload][key.row].decode(prompt_ids, job.params)
        facts = {name: getattr(decoded, name) for name in _DECODED}
        facts |= job.outcome(key, prompt_ids, decoded.token_ids)
        done[key] = Sample(**asdict(key), new_tokens=len(decoded.token_ids), **facts)
        writer.write(done[key])
        step.count()


def _trace(rows: Mapping[str, Sequence[Row]], job: PairJob, traces: dict[str, Trace]) -> None:
    for workload, those in rows.items():
        prompt_ids = job.first_prompts(workload)[0]
        for row in those:
            if (trace := row.traced(prompt_ids, job.params)) is not None:
                traces[f"{job.name}, {workload}, {row.name}"] = trace


def compare(job: PairJob, path: Path, writer: ResultsWriter, run_id: str) -> None:
    """Write how the texts of a pair compare, including those of an earlier part of the run."""
    run = read_unchecked(path, run_id)  # from the file, as an interrupted decode may be in it or not
    samples = {sample.key: sample for sample in run.samples if sample.pair == job.name}
    for check in checks_of(run, samples.values(), lambda sample: job.prompt_ids(sample.key, samples), job.judge):
        writer.write(check)


# ---- progress --------------------------------------------------------------------------------------------------------


def _progress_lines(console: Console, words: Callable[[], str]) -> AbstractContextManager[object]:
    """Write a line now and then in the block, where nothing can be drawn."""
    if console.is_terminal:
        return nullcontext()
    return Heartbeat(words, lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True))


class BenchProgress(Progress):
    """The progress bar and the current step. It is drawn between decodes only, so that no thread works beside them."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        how: dict[str, Any] = {"transient": True, "auto_refresh": False, "speed_estimate_period": _SPEED_PERIOD_S}
        super().__init__(TextColumn("{task.description}"), *bar, console=console, **how)
        self._task = self.add_task("preparing", total=total, completed=done)

    def progress_lines(self) -> AbstractContextManager[object]:
        """Write a line now and then in the block, where nothing can be drawn."""
        return _progress_lines(self.console, self.in_words)

    def in_words(self) -> str:
        """Return what is being done, and how much is done."""
        task = self.tasks[0]
        return f"{task.completed:g} of {task.total:g} decodes; {task.description}"

    def say(self, what: str) -> None:
        """Show what is being done."""
        self.update(self._task, description=what, refresh=True)

    def count(self) -> None:
        """Count one decode."""
        self.advance(self._task)
