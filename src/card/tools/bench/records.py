"""Parts of a bench file: the facts of a run, and its findings, one typed record per line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from card.engine.metrics import RequestStats

Status = Literal["complete", "interrupted"]


_BUSY_SHARE = 0.5  # of the cores; above this load, figures are unreliable


def busy_load(machine: Mapping[str, Any]) -> str:
    """Return how busy a machine was before a run, in words; empty if it was quiet enough for figures."""
    load, cores = machine["load_average"], machine["cores"]
    return f"load {load} on {cores} cores" if load > _BUSY_SHARE * cores else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPair:
    """A target and the draft model beside it."""

    name: str
    target: str  # as the user named it
    draft: str | None
    target_cost: str | None  # of an inflated target: what it costs and what it is
    target_parameters: int
    draft_parameters: int | None
    draft_bytes: int | None = None  # of weights that a step of the draft model reads; None: it is not known
    fingerprint: str = ""  # of both models' weights, checked when a run is resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling rule of every row."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """One method on stated cores, as the user asked for it; `Chosen` holds its settings for one pair."""

    name: str
    method: str
    cores: tuple[int, ...]  # that it may use, its drafter's included
    threads: int | None  # of the target; None: the method chooses
    is_exact: bool  # its text is that of plain decoding
    is_comparable: bool  # False: it draws or computes with other numbers, so that its text differs
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The prompts of one data set."""

    name: str
    source: str
    num_prompts: int
    turns: tuple[int, ...]  # of each prompt
    prompts_sha256: str


GroupKey = tuple[str, str, str]


@dataclass(frozen=True, slots=True, order=True)
class ResultGroup:
    """One row on one workload of one pair."""

    pair: str
    row: str
    workload: str

    @property
    def group(self) -> GroupKey:
        """Identity of the group."""
        return self.pair, self.row, self.workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen(ResultGroup):
    """All settings of a row for one pair and workload, with the chosen draft length."""

    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class SampleKey(ResultGroup):
    """Identity of one decode of a run."""

    prompt: int
    turn: int
    repeat: int

    def __str__(self) -> str:
        return (
            f"pair {self.pair}, workload {self.workload}, prompt {self.prompt}, turn {self.turn}, "
            f"repeat {self.repeat}, row {self.row}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(SampleKey):
    """One decode. Times are seconds; the request starts with its prompt already encoded."""

    new_tokens: int  # the stop token included
    token_ids: tuple[int, ...]
    prefill_s: float  # to the first token
    decode_s: float  # from the first token to the last
    wall_s: float
    token_times: tuple[tuple[float, int], ...]  # seconds since the start, tokens so far: one entry per target pass
    stats: RequestStats | None  # of our own methods
    cpu_s: float = 0.0  # processor time of the target's process; a drafter's own process is not in it
    final_number: str | None = None  # of the text, if its question has an answer
    is_solved: bool | None = None  # that number is the answer; None: the question has none

    @property
    def key(self) -> SampleKey:
        """Identity of the decode."""
        return SampleKey(*self.group, self.prompt, self.turn, self.repeat)

    @property
    def decode_tokens(self) -> int:
        """Tokens of decoding: without those of the first pass, which reads the prompt."""
        return self.new_tokens - self.token_times[0][1]

    @property
    def target_passes(self) -> int:
        """Target passes while decoding."""
        return len(self.token_times) - 1 if self.stats is None else self.stats.target_passes


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDifference:
    """First place where a text differs from the baseline's; ``gap`` is between the two tokens' logits."""

    prompt: int
    turn: int
    position: int  # counted from the first new token
    gap: float | None  # None: one of the texts ends there
    token_id: int | None = None
    plain_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(ResultGroup):
    """Comparison of a row's texts with the baseline's; written before any time is shown."""

    num_texts: int
    num_equal: int
    near_ties: tuple[TextDifference, ...]
    is_same: bool  # all texts are equal, or differ first at near-ties only
    differences: tuple[TextDifference, ...] = ()  # without near-ties


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: what it was asked to measure, and what it measured."""

    run_id: str
    version: int
    command: str
    commit: str
    date: str  # ISO 8601, UTC
    versions: dict[str, str]
    machine: dict[str, Any]
    pairs: tuple[ModelPair, ...]
    dtype: str
    sampling: Sampling
    max_tokens: int
    repeats: int
    rows: tuple[RowFacts, ...]
    workloads: tuple[Workload, ...]
    baseline: str
    options: dict[str, Any] = field(default_factory=dict)  # of the command, so that it can be resumed
    resumed: bool = False
    status: Status = "interrupted"
    chosen: tuple[Chosen, ...] = ()
    samples: tuple[Sample, ...] = ()
    checks: tuple[Check, ...] = ()

    def facts_of(self, row: str) -> RowFacts:
        """Return the facts of a row."""
        return next(one for one in self.rows if one.name == row)

    def pair_of(self, name: str) -> ModelPair:
        """Return the pair of this name."""
        return next(pair for pair in self.pairs if pair.name == name)

    def check_of(self, group: GroupKey) -> Check | None:
        """Return how a row's texts compare; None if they have not been compared."""
        return next((check for check in self.checks if check.group == group), None)

    def settings_of(self, group: GroupKey) -> dict[str, Any]:
        """Return a row's settings for a pair and workload; those asked for where none were chosen yet."""
        return next((one.settings for one in self.chosen if one.group == group), self.facts_of(group[1]).settings)


def row_order(num_rows: int, round_idx: int) -> list[int]:
    """Return the order of the rows on a prompt: rotated from prompt to prompt, so that none is always first."""
    return [(round_idx + i) % num_rows for i in range(num_rows)]


def planned(run: Run) -> Iterator[SampleKey]:
    """Yield every decode that a run plans, in its order.

    The loops, outermost first: pairs (only one is in memory), repeats, workloads, prompts, turns, rows.
    """
    names = [row.name for row in run.rows]
    num_prompts = sum(workload.num_prompts for workload in run.workloads)
    for pair in run.pairs:
        for repeat in range(run.repeats):
            round_idx = repeat * (num_prompts + 1)  # a prompt has another first row in the next repeat
            for workload in run.workloads:
                for prompt, num_turns in enumerate(workload.turns):
                    order = row_order(len(names), round_idx)
                    for turn in range(num_turns):
                        for i in order:
                            yield SampleKey(pair.name, names[i], workload.name, prompt, turn, repeat)
                    round_idx += 1


def first_difference(ids: Sequence[int], plain: Sequence[int]) -> int | None:
    """Return the first position at which two texts differ; None if they are equal.

    If one text begins with the other, that is the length of the shorter one."""
    if tuple(ids) == tuple(plain):
        return None
    both = zip(ids, plain, strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(len(ids), len(plain)))


@dataclass(slots=True)
class Compared:
    """Differences between the texts of one row and the baseline's, on one workload."""

    num_texts: int = 0
    num_equal: int = 0
    parted: list[tuple[Sample, Sample, int]] = field(default_factory=list)  # text, baseline's text, first difference


def compared_texts(run: Run, samples: Iterable[Sample]) -> dict[GroupKey, Compared]:
    """Compare texts with those of the run's baseline, by pair, row and workload, without rows that cannot be compared.

    Once a conversation differs, its later turns answer other texts: they count, but are no further difference.
    """
    comparable = {row.name for row in run.rows if row.is_exact and row.is_comparable}
    by_key = {sample.key: sample for sample in samples}
    found: dict[GroupKey, Compared] = {}
    has_parted: set[SampleKey] = set()
    for key, sample in by_key.items():
        plain = by_key.get(replace(key, row=run.baseline))
        if sample.row not in comparable or plain is None:  # None: the run was cut off before the baseline's turn
            continue
        group = found.setdefault(sample.group, Compared())
        group.num_texts += 1
        position = first_difference(sample.token_ids, plain.token_ids)
        if position is None:
            group.num_equal += 1
        elif replace(key, turn=0) not in has_parted:
            has_parted.add(replace(key, turn=0))
            group.parted.append((sample, plain, position))
    return found
