"""The pairs that the loop runs on: models with their prompts, or a recording with what passes cost."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loop import Counts, Loop, LoopSettings, RoundClock

from card.assembly.plan import draft_tree_rows
from card.backends.transformers.loading import load_model
from card.errors import BenchError
from card.models.facts import context_limit, end_token_ids, parameter_count
from card.models.loading import check_pair, load_tokenizer
from card.models.runners import make_runner
from card.tools.bench.datasets import Dataset, DatasetQuestion, parse_spec, read_datasets
from card.tools.planner.profile import Overheads, Profile
from card.tools.planner.recording import Recording
from card.tools.planner.replay import PassSize, ReplayedModel, Role
from card.tools.planner.replayed_texts import ReplayedTexts, TextEnd

_MAX_MODEL_LEN = 1024
_SPARE_ROWS = 64
_TYPICAL_ROWS = 128  # of a text
_LEAST_CANDIDATES = 8


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """Seconds of a round beyond the passes."""

    round_s: float = 0.0  # of the target: query, choice of tokens, rows kept
    step_s: float = 0.0  # of a drafter pass
    node_s: float = 0.0  # of each node that it expands
    commit_s: float = 0.0  # of a correction in the drafter
    commit_row_s: float = 0.0  # of each row that its tree has then

    @classmethod
    def of(cls, target: Overheads, draft: Overheads) -> Bookkeeping:
        """Return what was measured around the passes of both."""
        return cls(target.round_s, draft.step_s, draft.node_s, draft.commit_s, draft.commit_row_s)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, encoded."""

    name: str
    source: str
    num_skipped: int
    prompts: tuple[tuple[int, ...], ...]

    def facts(self) -> dict[str, Any]:
        """Return what a line says of it."""
        digest = hashlib.sha256(repr(self.prompts).encode()).hexdigest()[:16]
        return {
            "workload": self.name,
            "source": self.source,
            "num_skipped": self.num_skipped,
            "num_prompts": len(self.prompts),
            "prompts_sha256": digest,
        }


class RealPair:
    """Two models on this machine."""

    def __init__(self, target: str, draft: str, *, dtype: str, draft_dtype: str = "auto") -> None:
        """Load both. Raises: CardError."""
        self.draft_name = Path(draft).name
        self.target_name = Path(target).name
        self.tokenizer = load_tokenizer(target)
        target_model = load_model(target, dtype=dtype)
        self._draft_model = load_model(draft, dtype=draft_dtype)
        check_pair(self.tokenizer, target_model, self._draft_model)
        self._end_ids = end_token_ids(target_model, self.tokenizer)
        self._max_model_len = min(_MAX_MODEL_LEN, context_limit(target_model), context_limit(self._draft_model))
        self._target = make_runner(target_model, max_model_len=self._max_model_len, max_tree_rows=_SPARE_ROWS * 2)
        self._dtypes = [str(model.dtype).removeprefix("torch.") for model in (target_model, self._draft_model)]
        self._num_parameters = [parameter_count(model) for model in (target_model, self._draft_model)]
        self._plain: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}  # by prompt and length

    def facts(self) -> dict[str, Any]:
        """Return what a line says of it."""
        return {
            "pair": f"{self.draft_name} -> {self.target_name}",
            "draft": self.draft_name,
            "target_parameters": self._num_parameters[0],
            "draft_parameters": self._num_parameters[1],
            "dtype": self._dtypes[0],  # of the target, which decides the text
            "draft_dtype": self._dtypes[1],
        }

    def workloads(self, data: Sequence[str], *, skip: int, limit: int, max_tokens: int) -> list[Workload]:
        """Return the first turns of these data sets, those left out that do not fit into the context.

        Raises: CardError for a data set that cannot be read, or of which nothing is left.
        """
        sets = read_datasets([parse_spec(text) for text in data], limit=None)
        return [self._encoded(dataset, skip, limit, max_tokens) for dataset in sets]

    def count(self, settings: LoopSettings, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Counts:
        """Answer the prompts in the loop. Raises: BenchError if a text is not that of plain decoding."""
        draft = make_runner(
            self._draft_model, max_model_len=self._max_model_len, max_tree_rows=draft_tree_rows(settings.draft)
        )
        loop = Loop(self._target, draft, settings)
        all_stats = []
        for prompt_ids in prompts:
            decoded = loop.decode(prompt_ids, max_tokens, end_ids=self._end_ids)
            if decoded.token_ids != self._plainly(prompt_ids, max_tokens):
                raise BenchError(f"with {settings} a text is not that of plain decoding; take --dtype float32")
            all_stats.append(decoded.stats)
        return Counts.of(all_stats)

    def _plainly(self, prompt_ids: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        if (prompt_ids, max_tokens) not in self._plain:
            loop = Loop(self._target, None, None)
            decoded = loop.decode(prompt_ids, max_tokens, end_ids=self._end_ids)
            self._plain[prompt_ids, max_tokens] = decoded.token_ids
        return self._plain[prompt_ids, max_tokens]

    def _encoded(self, dataset: Dataset, skip: int, limit: int, max_tokens: int) -> Workload:
        def fitting() -> Iterator[tuple[int, ...]]:
            for question in dataset.questions[skip:]:
                prompt_ids = tuple(DatasetQuestion(question.turns[:1], question.is_raw).encode(self.tokenizer))
                if len(prompt_ids) + max_tokens <= self._max_model_len:
                    yield prompt_ids

        prompts = tuple(prompt for prompt, _ in zip(fitting(), range(limit), strict=False))
        if not prompts:
            raise BenchError(f"{dataset.name} has no prompt behind the first {skip} that leaves {max_tokens} tokens")
        return Workload(dataset.name, Path(dataset.source).name, skip, prompts)


@dataclass(frozen=True, slots=True)
class Costs:
    """What the passes of a pair take, and what goes on around them."""

    name: str
    target_s: Callable[[int, int], float]  # of so many tokens on so many rows
    drafter_s: Callable[[int, int], float]
    bookkeeping: Bookkeeping = Bookkeeping()
    sources: tuple[str, ...] = ()
    is_measured: bool = False  # on a machine, not typed in
    dtype: str = ""

    @classmethod
    def of(cls, name: str, target: Profile, draft: Profile, *, keeps_books: bool, threads: int | None = 1) -> Costs:
        """Return the costs of two profiles.

        Args:
            keeps_books: what goes on around the passes takes its time, too.
            threads: most threads of each, where they were measured with several; None: all.
        """

        def seconds(profile: Profile) -> Callable[[int, int], float]:
            cost = profile.setup(None if profile.max_threads is None else threads).true_cost()
            return lambda num_tokens, num_rows: cost.seconds(num_tokens, 1, num_rows)

        overheads = [profile.overheads for profile in (target, draft)]
        return cls(
            name,
            seconds(target),
            seconds(draft),
            Bookkeeping.of(*overheads) if keeps_books else Bookkeeping(),
            (target.source, draft.source, *({one.source for one in overheads} if keeps_books else ())),
            target.measured and draft.measured,
            target.dtype,
        )


@dataclass(frozen=True, slots=True)
class Timed:
    """What happened, and the seconds that it took."""

    counts: Counts
    decode_s: float
    speed_up: float  # tokens/s over those of plain decoding


class ReplayedPair:
    """What a recording holds, in virtual time."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._texts: dict[int, ReplayedTexts] = {}

    def run(self, settings: LoopSettings, costs: Sequence[Costs]) -> list[Timed]:
        """Write the recorded texts in the loop, timed with each of the costs: what happens is the same under all.

        Raises: BenchError if a text comes out otherwise.
        """
        texts = self._replayed(max(settings.draft.branch, _LEAST_CANDIDATES))
        timers = [_Timer(one, RoundClock(takes_turns=settings.variant == "no-re-rooting-turns")) for one in costs]

        def on_target_pass(size: PassSize) -> None:
            for timer in timers:
                timer.target_pass(size)

        def on_drafter_pass(size: PassSize) -> None:
            for timer in timers:
                timer.drafter_pass(size)

        def on_drafter_keep(num_rows: int) -> None:
            for timer in timers:
                timer.drafter_keep(num_rows)

        target = self._model(texts, "target", settings, on_target_pass, lambda _: None)
        draft = self._model(texts, "draft", settings, on_drafter_pass, on_drafter_keep)
        loop = Loop(target, draft, settings, clock=lambda: 0.0)
        all_stats = []
        for text, prompt_ids, wanted in zip(self.recording.texts, texts.prompts, texts.answers, strict=True):
            for timer in timers:
                timer.is_reading = True
            is_stopped = text.finish_reason == "stop"
            decoded = loop.decode(
                prompt_ids,
                self.recording.max_tokens if is_stopped else len(wanted),
                stop_check=TextEnd(len(wanted)) if is_stopped else None,
            )
            if decoded.token_ids != wanted:
                raise BenchError("a recorded text came out otherwise: a bug in card")
            all_stats.append(decoded.stats)
        counts = Counts.of(all_stats)
        return [Timed(counts, timer.decode_s, counts.num_tokens * timer.plain_s / timer.decode_s) for timer in timers]

    def facts(self, costs: Costs) -> dict[str, Any]:
        """Return what a line says of it."""
        return {
            "pair": costs.name,
            "source": self.recording.source,
            "latencies": list(costs.sources),
            "latencies_measured": costs.is_measured,
            "bookkeeping": costs.bookkeeping != Bookkeeping(),
            "target_pass_ms": round(1e3 * costs.target_s(1, _TYPICAL_ROWS), 4),
            "dtype": costs.dtype,
            "max_tokens": self.recording.max_tokens,
        }

    def _replayed(self, num_candidates: int) -> ReplayedTexts:
        most = min(num_candidates, self.recording.num_candidates)
        if most not in self._texts:
            self._texts[most] = ReplayedTexts(self.recording, most)
        return self._texts[most]

    def _model(
        self,
        texts: ReplayedTexts,
        role: Role,
        settings: LoopSettings,
        on_pass: Callable[[PassSize], None],
        on_keep: Callable[[int], None],
    ) -> ReplayedModel:
        longest = max(len(text.prompt_ids) for text in self.recording.texts) + self.recording.max_tokens
        rows = draft_tree_rows(settings.draft) + settings.draft.budget
        return ReplayedModel(texts, role, max_model_len=longest, num_tree_rows=rows, on_pass=on_pass, on_keep=on_keep)


@dataclass(slots=True)
class _Timer:
    """The rounds of all texts under one kind of costs; those that read a prompt take no time."""

    costs: Costs
    clock: RoundClock
    is_reading: bool = True
    _commits_s: float = 0.0  # of corrections since the last drafter pass

    @property
    def decode_s(self) -> float:
        """Seconds of all rounds."""
        return self.clock.now

    @property
    def plain_s(self) -> float:
        """Seconds per token of plain decoding."""
        return self.costs.target_s(1, _TYPICAL_ROWS) + self.costs.bookkeeping.round_s

    def target_pass(self, size: PassSize) -> None:
        """End a round."""
        before = self.clock.now
        self.clock.verify(self.costs.target_s(size.num_tokens, size.num_context_rows), self.costs.bookkeeping.round_s)
        if self.is_reading:
            self.clock.now, self.is_reading = before, False

    def drafter_pass(self, size: PassSize) -> None:
        """Count a drafter pass and what goes on around it."""
        books = self.costs.bookkeeping
        pass_s = self.costs.drafter_s(size.num_tokens, size.num_context_rows)
        self.clock.draft(pass_s + books.step_s + books.node_s * size.num_logits + self._commits_s)
        self._commits_s = 0.0

    def drafter_keep(self, num_rows: int) -> None:
        """Count a correction of a tree with so many rows."""
        books = self.costs.bookkeeping
        self._commits_s += books.commit_s + books.commit_row_s * num_rows
