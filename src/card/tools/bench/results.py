"""Bench files: JSON lines that say what a run plans and what it measured; reading one checks that the two agree.

Lines are appended as the run goes: a line of kind ``run``, what was chosen for each row (``chosen``), one ``sample``
per decode, one ``check`` per row once texts were compared, and an ``end``. A run that was cut off goes on under the
same ``run_id``. One that is packed with gzip is read, too. Summaries are never stored: `card.tools.bench.summary`
computes them from the samples. The format is described in README.md of bench.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import msgspec

from card.errors import BenchError
from card.text.lines import text_of
from card.tools.bench.records import Check, Chosen, Compared, Run, Sample, SampleKey, Status, compared_texts, planned

VERSION = 1

PROMISED = ("pairs", "dtype", "sampling", "max_tokens", "repeats", "rows", "workloads", "baseline")  # of a run
_DIGITS = 7  # of seconds: a tenth of a microsecond
_TOLERANCE_S = 1e-5  # by which rounded times may disagree
_HALF_PRECISION = ("bfloat16", "float16")  # where two orders of summation may differ at a near-tie

T = TypeVar("T")


class ResultsWriter:
    """Appends the lines of one run to a file, and flushes each at once."""

    def __init__(self, path: Path, run_id: str) -> None:
        """Open ``path`` for appending; its folder is made, and an incomplete last line is dropped."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._run_id = run_id
        self._out: IO[str] = path.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()

    def run(self, run: Run) -> None:
        """Write the facts of the run."""
        facts: dict[str, Any] = msgspec.to_builtins(run)
        for name in ("status", "samples", "checks", "chosen"):
            del facts[name]
        if not run.resumed:
            del facts["resumed"]
        self._write("run", facts)

    def write(self, item: Chosen | Sample | Check) -> None:
        """Write one finding of the run."""
        facts: dict[str, Any] = msgspec.to_builtins(item)
        if isinstance(item, Sample):
            facts["token_times"] = [[round(at_s, _DIGITS), count] for at_s, count in item.token_times]
            for name in ("prefill_s", "decode_s", "wall_s", "cpu_s"):
                facts[name] = round(facts[name], _DIGITS)
            facts["stats"] = item.stats.as_dict() if item.stats else None
        self._write(type(item).__name__.lower(), facts)

    def end(self, status: Status) -> None:
        """Write how the run ended."""
        self._write("end", {"status": status})

    def _write(self, kind: str, facts: Mapping[str, Any]) -> None:
        line = {"kind": kind, "run_id": self._run_id, **facts}
        self._out.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
        self._out.flush()


def load(paths: Path | Iterable[Path]) -> list[Run]:
    """Return the runs of bench files, in their order, each of them checked.

    Raises: BenchError, with file and line, if a sample is missing, doubled or out of place, if counts do not agree, or
        if the text of an exact row differs from the baseline's other than at a recorded near-tie.
    """
    runs: list[Run] = []
    for path in [paths] if isinstance(paths, Path) else paths:
        for draft in _read(path):
            _check_texts(draft)
            runs.append(draft.run())
    return runs


def read_unchecked(path: Path, run_id: str | None = None) -> Run:
    """Return one run of a file, by default the last one; its texts may not have been compared yet.

    Raises: BenchError as `load` does, except about texts.
    """
    drafts = _read(path)
    return next(draft for draft in reversed(drafts) if run_id in (None, draft.facts.run_id)).run()


@dataclass(slots=True)
class _Draft:
    """A run while it is read, with the line numbers of its parts."""

    path: Path
    facts: Run
    plan: Iterator[SampleKey]
    last_line: int
    status: Status = "interrupted"
    chosen: dict[tuple[str, str, str], Chosen] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    lines: dict[SampleKey, int] = field(default_factory=dict)
    checks: dict[tuple[str, str, str], Check] = field(default_factory=dict)

    def run(self) -> Run:
        return replace(
            self.facts,
            status=self.status,
            chosen=tuple(self.chosen.values()),
            samples=tuple(self.samples),
            checks=tuple(self.checks.values()),
        )

    def fault(self, line: int, reason: str) -> BenchError:
        return BenchError(f"{self.path}, line {line}: {reason}")

    def read_line(self, kind: str, record: Mapping[str, Any], line: int) -> None:
        """Read one line that belongs to this run. Raises: BenchError."""
        self.last_line = line
        if kind == "sample":
            self._take_sample(_convert(_with_reasons_apart(record), Sample, self.path, line), line)
        elif kind == "chosen":
            chosen = _convert(record, Chosen, self.path, line)
            self.chosen[chosen.group] = chosen
        elif kind == "check":
            check = _convert(record, Check, self.path, line)
            self.checks.pop(check.group, None)  # a resumed run compares again, in the order of its rows
            self.checks[check.group] = check
        elif kind == "end":
            self.status = _convert(record, _End, self.path, line).status
            if self.status == "complete" and (missing := next(self.plan, None)):
                raise self.fault(line, f"the run says it is complete, but has no sample of {missing}")
        else:
            known = "run, chosen, sample, check, end"
            raise self.fault(line, f"unknown kind of line {kind!r}; known: {known}")

    def _take_sample(self, sample: Sample, line: int) -> None:
        expected = next(self.plan, None)
        if sample.key != expected:
            wanted = f"expected {expected}" if expected else "the run promises no more samples"
            raise self.fault(line, f"sample of {sample.key}; {wanted}: one is missing, doubled or out of its place")
        if reason := _wrong_counts(sample, self.facts.max_tokens):
            raise self.fault(line, f"sample of {sample.key}: {reason}")
        self.samples.append(sample)
        self.lines[sample.key] = line


@dataclass(frozen=True, slots=True)
class _End:
    status: Status


def _read(path: Path) -> list[_Draft]:
    drafts: dict[str, _Draft] = {}
    for line, record in _records(path):
        kind, run_id = record.get("kind"), record.get("run_id")
        if not isinstance(kind, str) or not isinstance(run_id, str):
            raise BenchError(f"{path}, line {line}: no line of a bench file: it needs a kind and a run_id")
        if kind == "run":
            facts = _read_facts(record, path, line)
            if run_id in drafts:
                _check_resumed(drafts[run_id], facts, line)
            else:
                drafts[run_id] = _Draft(path, facts, planned(facts), line)
        elif run_id not in drafts:
            raise BenchError(f"{path}, line {line}: {kind} of run {run_id}, which has no run line before it")
        else:
            drafts[run_id].read_line(kind, record, line)
    if not drafts:
        raise BenchError(f"{path} holds no run; give a file that card bench wrote")
    return list(drafts.values())


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each line with its number, without an incomplete last line."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    lines = text_of(data, str(path), BenchError).split("\n")
    for number, line in enumerate(lines[:-1], 1):  # text after the last line end is an incomplete line, or empty
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise BenchError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise BenchError(f"{path}, line {number}: must be a JSON object, got {line[:40]!r}")
        yield number, record


def _read_facts(record: Mapping[str, Any], path: Path, line: int) -> Run:
    if record.get("version") != VERSION:
        raise BenchError(f"{path}, line {line}: version {record.get('version')!r}; this release reads {VERSION}")
    facts = _convert(record, Run, path, line)
    for workload in facts.workloads:
        if len(workload.turns) != workload.num_prompts:
            raise BenchError(f"{path}, line {line}: workload {workload.name} must list the turns of each prompt")
    if facts.baseline not in {row.name for row in facts.rows}:
        raise BenchError(f"{path}, line {line}: the baseline {facts.baseline!r} is not among the rows")
    return facts


def _check_resumed(draft: _Draft, facts: Run, line: int) -> None:
    """Refuse a second run line that is another run."""
    if not facts.resumed:
        raise draft.fault(line, f"run {facts.run_id} is there twice, and this line does not say that it was resumed")
    for name in ("version", *PROMISED):
        if getattr(draft.facts, name) == getattr(facts, name):
            continue
        raise draft.fault(line, f"the resumed run has other {name} than the run that it goes on with")
    draft.status = "interrupted"
    draft.last_line = line


def _wrong_counts(sample: Sample, max_tokens: int) -> str | None:
    """Return the contradiction within one sample, if any."""
    counts = [count for _, count in sample.token_times]
    times = [at_s for at_s, _ in sample.token_times]
    if not counts or not sample.new_tokens == len(sample.token_ids) == counts[-1]:
        timed = counts[-1] if counts else 0
        return f"{sample.new_tokens} new tokens, {len(sample.token_ids)} token ids, {timed} tokens by their times"
    if sample.new_tokens > max_tokens:
        return f"{sample.new_tokens} new tokens, the run allows {max_tokens}"
    if sample.stats is not None and sample.stats.num_new_tokens != sample.new_tokens:
        return f"{sample.new_tokens} new tokens, the engine counted {sample.stats.num_new_tokens}"
    if times != sorted(times) or counts != sorted(counts) or times[0] < 0:
        return "token_times run backwards"
    decode_s = times[-1] - times[0]
    if abs(times[0] - sample.prefill_s) > _TOLERANCE_S or abs(decode_s - sample.decode_s) > _TOLERANCE_S:
        return f"prefill_s {sample.prefill_s} and decode_s {sample.decode_s} are not those of token_times"
    return None


def _check_texts(draft: _Draft) -> None:
    """Compare the texts of exact rows with the baseline's, independently of the check lines. Raises: BenchError."""
    for group, texts in compared_texts(draft.facts, draft.samples).items():
        check = draft.checks.get(group)
        known = {(d.prompt, d.turn, d.position) for d in check.near_ties} if check else set()
        for sample, _, position in texts.parted:
            if draft.facts.dtype not in _HALF_PRECISION or (sample.prompt, sample.turn, position) not in known:
                where = f"{sample.key} differs from {draft.facts.baseline} at token {position}"
                raise draft.fault(draft.lines[sample.key], f"{where}, which is no recorded near-tie")
        _check_check(draft, group, texts)


def _check_check(draft: _Draft, group: tuple[str, str, str], texts: Compared) -> None:
    check, what = draft.checks.get(group), "pair {}, row {}, workload {}".format(*group)
    if check is None:
        reason = f"texts were not compared; card bench --resume {draft.path} does it"
    elif (check.num_texts, check.num_equal) != (texts.num_texts, texts.num_equal):
        equal = f"{texts.num_equal} of {texts.num_texts} texts are equal"
        reason = f"{equal}, its check says {check.num_equal} of {check.num_texts}"
    elif not check.is_same:
        reason = "its check says that the texts are not those of plain decoding"
    else:
        return
    raise draft.fault(draft.last_line, f"{what}: {reason}")


def _with_reasons_apart(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a sample with states and reasons in two fields; older files hold both in one text."""
    stats = sample.get("stats")
    if not isinstance(stats, dict) or "schedule" in stats:
        return sample
    drafter, _, drafter_reason = str(stats.get("drafter_state", "none")).partition(": ")
    schedule, _, schedule_reason = str(stats.get("speculation", "off")).partition(": ")
    apart = {"drafter": drafter, "drafter_reason": drafter_reason}
    return {**sample, "stats": {**stats, **apart, "schedule": schedule, "schedule_reason": schedule_reason}}


def _convert(record: Mapping[str, Any], kind: type[T], path: Path, line: int) -> T:
    try:
        return msgspec.convert(record, kind)
    except msgspec.ValidationError as error:
        raise BenchError(f"{path}, line {line}: {error}") from error


def _drop_torn_line(path: Path) -> None:
    """Cut a file back to its last line end."""
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)
