"""Measure the time that the workers take around the passes of a model.

The workers run for a moment; their time outside of passes is the overhead. Passes evict everything else from the
caches, so it is measured between real passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from card.api.text_stream import TextStream
from card.assembly.build import Models, build, make_writers
from card.assembly.drafters import make_worker
from card.assembly.plan import Facts, readable, resolve
from card.config import DraftSettings, SamplingParams, Schedule
from card.drafting.draft_writers import make_writer
from card.drafting.local import writer_names
from card.drafting.local.protocol import LocalWriter
from card.drafting.messages import Close, DraftSpec, Open
from card.drafting.protocol import DraftWriter
from card.engine.policy.rounds import ScheduleCost
from card.engine.policy.tuned import TunedPolicy
from card.engine.replica import draft_spec
from card.engine.request import Request
from card.engine.watchers import Watchers
from card.errors import MissingError, SettingsError
from card.links.in_process import InlineLink
from card.machine.pass_cost import PassCost
from card.machine.threads import CoreSet
from card.models.protocol import Extension, LanguageModel, Selective
from card.models.rows.selection import ChosenRows, choose_rows
from card.models.runner import RowRunner
from card.text.tokenizer import Tokenizer
from card.tools.planner.own_drafts import HEAD
from card.tools.planner.profile import Overheads

_WIDTHS = (1, 8)  # of the beams whose steps are timed
_NUM_STEPS = 60  # layers of a beam
_NUM_TOKENS = 24  # of the texts in which rounds are timed; twice as many for several requests at once
_NUM_DRAFTED = 6  # candidates in a round with drafts
_COMMITTED = 3  # tokens of a correction
_EVICTING_BYTES = 1 << 27  # more than the caches of a core hold
_RANKED_ROWS, _NUM_RANKED = 1024, 9
_NUM_COLD, _NUM_EVICTIONS = 4, 7
_TEXT_TOKENS = 64
_NOT_MEASURED = ("request_s", "writer_s", "message_s", "latency_s")


class _Timed:
    """A model or link that counts the seconds inside some of its methods."""

    def __init__(self, inner: LanguageModel | InlineLink, *methods: str) -> None:
        self._inner = inner
        self._methods = methods
        self.spent_s = 0.0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        return partial(self._timed, attribute) if name in self._methods else attribute

    def _timed(self, method: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        result = method(*args)
        if method.__name__ == "forward":  # reading the logits waits for a GPU
            result[-1][-1:, :1].tolist()
        self.spent_s += time.perf_counter() - started
        return result


def measure_overheads(model: LanguageModel, tokenizer: Tokenizer | None = None, *, ctc: str | None = None) -> Overheads:
    """Measure the overheads around the model's passes, as a target and as a drafter.

    Overheads of several processes or requests are not measured: they are the defaults of `Overheads`, scaled like the
    measured round.

    Args:
        tokenizer: turns the tokens of a round into text; None leaves that time out.
        ctc: file of a head that drafts for the model; it is timed, too.
    Raises: ModelError if the head is of another model.
    """
    defaults = Overheads()
    round_s, tuned_s = _round_s(model, tokenizer), _round_s(model, tokenizer, is_tuned=True)
    by_writer: dict[str, float] = {}
    for name in writer_names():
        with suppress(SettingsError, MissingError):  # a writer that needs settings of its own, or PyTorch
            by_writer[name] = max(0.0, _round_s(model, tokenizer, is_tuned=True, writers=(name,)) - tuned_s)
    if ctc is not None:
        by_writer[HEAD] = max(0.0, _round_s(model, tokenizer, writers=(HEAD,), ctc=ctc) - round_s)
    narrow_s, wide_s = (_step_overhead_s(model, width) for width in _WIDTHS)
    node_s = max(0.0, (wide_s - narrow_s) / (_WIDTHS[1] - _WIDTHS[0]))
    slower = round_s / defaults.round_s
    cold_s, cold_later_s = _cold_s(model)
    commit_s, commit_row_s = _commit_s(model)
    chosen_row_s, scored_row_s = _selection_s(model) if isinstance(model, Selective) else (0.0, 0.0)
    return Overheads(
        round_s=round_s,
        tuned_s=max(0.0, tuned_s - round_s),
        drafted_s=max(0.0, _round_s(model, tokenizer, is_drafted=True) - round_s),
        by_writer=by_writer,
        step_s=max(0.0, narrow_s - node_s),
        node_s=node_s,
        commit_s=commit_s,
        commit_row_s=commit_row_s,
        chosen_row_s=chosen_row_s,
        scored_row_s=scored_row_s,
        cold_s=cold_s,
        cold_later_s=cold_later_s,
        source=f"card profile; {', '.join(_NOT_MEASURED)}: the defaults, by the ratio of round_s",
        **{name: slower * getattr(defaults, name) for name in _NOT_MEASURED},
    )


def _round_s(
    model: LanguageModel,
    tokenizer: Tokenizer | None,
    *,
    is_tuned: bool = False,
    is_drafted: bool = False,
    writers: tuple[str, ...] = (),
    ctc: str | None = None,
) -> float:
    """Return the median seconds of a round beyond its pass.

    Args:
        is_tuned: the policy tunes itself.
        is_drafted: a chain of candidates is verified in each; the drafter's time is left out.
        writers: names of local ones that propose candidates.
        ctc: file of a head, for the writer of that name.
    """
    asked: dict[str, Any] = {"num_speculative_tokens": _NUM_DRAFTED, "writers": writers or None, "ctc": ctc}
    if ctc is not None:
        asked["min_verify_prob"] = 0.0  # verify a head's candidates, however unlikely in this text
    facts = Facts(has_draft=is_drafted, is_draft_loaded=True)
    method = "sps" if is_drafted else "vanilla"
    plan = resolve(readable(asked, method), facts, method=method)
    timed = _Timed(model, "forward")
    link: Any = _Timed(InlineLink(make_worker(_beam_writer(model))), "send", "draft") if is_drafted else None
    costs: dict[Schedule, ScheduleCost] = {"off": ScheduleCost(CoreSet(), PassCost(((1, 1e-3), (2, 1e-3))))}
    local = make_writers(plan, model.vocab_size, None)
    models = Models(target=timed, link=link, writers=local, watchers=_watchers(model, local))
    engine = build(plan, models, policy=TunedPolicy(costs, plan.draft) if is_tuned else None).engine
    num_tokens = 2 * _NUM_TOKENS if is_drafted or writers else _NUM_TOKENS
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=num_tokens, ignore_eos=True).resolved()
    request = Request(
        request_id=0,
        prompt_ids=_text(model),
        params=params,
        draft=plan.draft,
        end_ids=frozenset(),
        uses_drafter=is_drafted,
    )
    engine.add(engine.check(request))
    text = TextStream(tokenizer, ()) if tokenizer is not None else None
    beyond: list[float] = []
    while engine.has_work:
        before_s, started = timed.spent_s + (link.spent_s if link else 0.0), time.perf_counter()
        for update in engine.step():
            if text is not None:
                text.take(update.token_ids, is_end=update.finish_reason is not None)
        others_s = timed.spent_s + (link.spent_s if link else 0.0) - before_s
        beyond.append(time.perf_counter() - started - others_s)
    if models.watchers is not None:
        timed.features.wish([])
    return median(beyond)


def _watchers(model: LanguageModel, writers: Mapping[str, LocalWriter]) -> Watchers | None:
    """Give the model's hidden states to writers that read them. Raises: ModelError if they are of another model."""
    readers = [writer for writer in writers.values() if writer.reads_states]
    if not readers:
        return None
    assert isinstance(model, RowRunner), "a head drafts for a model with hidden states"
    for writer in readers:
        writer.attach(model)
    return Watchers(model.features, (), for_writers=True)


def _beam_writer(model: LanguageModel) -> DraftWriter:
    """Return a writer of beams, which a drafter has too that reads states or masks: no target shows it any here."""
    return make_writer(_Timed(model), takes_turns=True)


def _step_overhead_s(model: LanguageModel, width: int) -> float:
    """Return the median seconds of a drafter pass beyond the model's."""
    timed = _Timed(model, "forward")
    worker = make_worker(make_writer(timed, takes_turns=True))
    worker.receive(Open(0, _text(model), _spec(width)))
    worker.step()  # reads the text
    beyond: list[float] = []
    while not worker.is_idle and len(beyond) < _NUM_STEPS // 2:
        before_s, started = timed.spent_s, time.perf_counter()
        worker.step()
        beyond.append(time.perf_counter() - started - (timed.spent_s - before_s))
    worker.receive(Close(0))
    return median(beyond)


def _commit_s(model: LanguageModel) -> tuple[float, float]:
    """Return a drafter's seconds for a correction that hits, and those for each row of its tree."""
    (few, narrow_s), (many, wide_s) = (_commit_of_width(model, width) for width in _WIDTHS)
    row_s = max(0.0, wide_s - narrow_s) / (many - few) if many > few else 0.0
    return max(0.0, narrow_s - few * row_s), row_s


def _commit_of_width(model: LanguageModel, width: int) -> tuple[float, float]:
    """Return the median rows of a tree of that width, and the median seconds of a correction."""
    writer = _beam_writer(model)
    beam = writer.open(_text(model), _spec(width), epoch=0)
    found: list[tuple[int, float]] = []
    for _ in range(_NUM_STEPS // 4):
        for _ in range(2 * _COMMITTED):
            if num_tokens := beam.num_tokens_to_run():
                writer.step([(beam, num_tokens)])
        path = beam.cache.best_path(beam.cache.root_id, _COMMITTED)
        if not path:
            break
        token_ids = [beam.cache.token(node) for node in path]
        num_rows, started = beam.cache.num_nodes, time.perf_counter()  # leaves have no rows
        beam.commit(token_ids)
        found.append((num_rows, time.perf_counter() - started))
    beam.close()
    if not found:
        return 0.0, Overheads().commit_s
    return median(rows for rows, _ in found), median(seconds for _, seconds in found)


def _cold_s(model: LanguageModel) -> tuple[float, float]:
    """Return the extra seconds of the first passes after other data has filled the caches of the CPU.

    Returns: seconds of all these passes, and of those after the very first.
    """
    text = _text(model)
    slot = model.open(len(text) + 1)
    others = np.zeros(_EVICTING_BYTES // 4, np.float32)

    def passes_s() -> tuple[float, float]:
        started = [time.perf_counter()]
        for _ in range(_NUM_COLD):
            model.forward([Extension(slot, [0], [len(text) - 1])])[0]
            model.keep(slot, len(text))
            started.append(time.perf_counter())
        return started[-1] - started[0], started[-1] - started[1]

    try:
        (logits,) = model.forward([Extension.of_text(slot, text)])
        if not isinstance(logits, np.ndarray):
            return 0.0, 0.0
        warm = [passes_s() for _ in range(_NUM_EVICTIONS)]
        cold: list[tuple[float, float]] = []
        for _ in range(_NUM_EVICTIONS):
            np.add(others, 1, out=others)
            cold.append(passes_s())
        all_s, later_s = (max(0.0, median(one[i] for one in cold) - median(one[i] for one in warm)) for i in range(2))
        return all_s, min(all_s, later_s)
    finally:
        model.close(slot)


def _selection_s(model: Selective) -> tuple[float, float]:
    """Return the seconds per row of choosing a row and of ranking a row, beyond reading it.

    A pass that ranks its rows is compared with a plain one; a pass over half of the rows, chosen, is compared with one
    over a text half as long.
    """
    num_rows = min(_RANKED_ROWS, model.max_model_len - 1)
    long, short = _read(model, num_rows), _read(model, num_rows // 2)
    times: dict[str, list[float]] = {"plain": [], "ranking": [], "chosen": [], "half": []}

    def timed(kind: str, slot: int, **how: Any) -> None:
        started, last = time.perf_counter(), model.num_rows(slot) - 1
        model.forward([Extension(slot, [0], [last], **how)])[0]
        if "scores" in how:
            choose_rows(model.attention_scores.of(slot), num_rows // 2)
        times[kind].append(time.perf_counter() - started)

    try:
        for _ in range(_NUM_RANKED):
            timed("plain", long)
            model.keep(long, num_rows)
            timed("ranking", long, scores="weights")
            reads = ChosenRows(choose_rows(model.attention_scores.of(long), num_rows // 2), num_rows)
            model.keep(long, num_rows)
            timed("chosen", long, reads=reads)
            model.keep(long, num_rows)
            timed("half", short)
            model.keep(short, num_rows // 2)
    finally:
        model.close(long)
        model.close(short)
    least = {kind: min(measured_s) for kind, measured_s in times.items()}
    chosen_s = max(0.0, least["chosen"] - least["half"]) / (num_rows // 2)
    return chosen_s, max(0.0, least["ranking"] - least["plain"]) / num_rows


def _read(model: LanguageModel, num_rows: int) -> int:
    """Return a sequence that has read a text of ``num_rows`` tokens, with room for one more."""
    slot = model.open(num_rows + 1)
    text = [i % model.vocab_size for i in range(num_rows)]
    model.forward([Extension(slot, text, range(-1, num_rows - 1), num_rows - 1)])
    return slot


def _text(model: LanguageModel) -> tuple[int, ...]:
    return tuple(i % model.vocab_size for i in range(_TEXT_TOKENS))


def _spec(width: int) -> DraftSpec:
    draft = DraftSettings(beam_width=width, lead=_NUM_STEPS, min_path_logprob=-1e9)
    return draft_spec(draft, SamplingParams(temperature=0.0, seed=0).resolved(), _TEXT_TOKENS + 2 * _NUM_STEPS)
