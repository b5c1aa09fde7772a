"""Names that `card bench` accepts: rows, presets, data sets. Quick to import, as its help needs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from card.config.method import BenchRow, Drafter, Method
from card.config.registry import find_method, methods, own_settings, records, settings_of_writers
from card.config.splitting import engine_settings
from card.drafting.local import writer_names
from card.errors import SettingsError
from card.family.judges.knobs import parse_judge

PUBLISHED = ("gsm8k", "mgsm", "mt-bench", "humaneval", "mbpp", "spec-bench")  # data sets with a format of their own
BASELINE, ONE_CORE = "vanilla-all-cores", "vanilla"
OTHER_NUMBERS = (
    "other numbers"  # of a row that draws or computes with other numbers, so that its text cannot be compared
)
SEVERAL_WRITERS = "card-writers"
ALL_CORES, UNCOUPLED = "-all-cores", "-uncoupled"
DRAFTER, GRAMMAR = "beam", "grammar"  # the draft model and a request's grammar among the writers
_OWN_WRITERS = "card+"
JUDGED = "/"  # sps/relaxed:0.5 is the row sps with that judge

# The draft settings that may be given for the rows that take them.
DRAFT_OPTIONS = ("beam_width", "branch", "budget", "min_verify_prob", "lead", "max_wait_s", "min_depth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(BenchRow):
    """One of our rows, and its method."""

    method: str


def _spec(method: str, row: BenchRow, **changes: Any) -> Spec:
    return Spec(method=method, **{one.name: getattr(row, one.name) for one in fields(row)} | changes)


def _tuned(method: str, drafter: Drafter = "none", **engine: Any) -> Spec:
    return Spec(method=method, name=method, drafter=drafter, is_tuned=True, engine=engine)


def _usual(method: Method) -> BenchRow:
    """Return the row of a method that states none: it drafts where it says, with its own settings."""
    if method.is_tuned:
        return BenchRow(name=method.name, drafter="own" if method.needs_draft else "none", is_tuned=True)
    is_in_turns = method.placement == "inline"
    drafter: Drafter = ("turns" if is_in_turns else "beside") if method.needs_draft else "none"
    return BenchRow(name=method.name, drafter=drafter, is_as_shipped=method.needs_draft, has_twin=drafter == "turns")


def _rows_of(method: Method) -> Iterator[tuple[str, Spec]]:
    """Yield the rows of a method, and their twins on all cores."""
    for row in method.rows or (_usual(method),):
        yield row.name, _spec(method.name, row)
        if row.has_twin:
            yield row.name + ALL_CORES, _spec(method.name, row, is_best=True)


def _place(method: Method) -> tuple[Any, ...]:
    """Return the place of a method among the others: plain decoding, what drafts in turns, all others, by name."""
    if not method.rows:
        return (len(_DRAFTERS),)
    rank = _DRAFTERS.index(method.rows[0].drafter)
    return rank, len(method.writers), method.needs_training


_DRAFTERS = get_args(Drafter)
_IN_ORDER = sorted(methods().values(), key=_place)  # those of equal places by name
OURS: Mapping[str, Spec] = MappingProxyType(dict(pair for method in _IN_ORDER for pair in _rows_of(method)))
DEFAULT_ROWS, ROWS_ALONE = "vanilla,sps,card", "vanilla,suffix,recycling"  # with a draft model and without
SINGLE_WRITERS = tuple(  # rows that one of several writers is compared with
    "card" if writer == DRAFTER else writer for writer in OURS[SEVERAL_WRITERS].engine["writers"]
)
THEIRS = ("transformers", "transformers-all-cores", "transformers-assisted", "transformers-assisted-all-cores")
COUPLED = tuple(name for name, spec in OURS.items() if spec.has_uncoupled)  # which may run without coupled noise
# Rows of any pair. The other rows need something trained for the pair; only the preset `learned` has them.
ANY_DRAFT = tuple(name for name, spec in OURS.items() if not find_method(spec.method).needs_training)
KNOWN = (*OURS, *THEIRS, *(name + UNCOUPLED for name in COUPLED))
_LEARNED = {  # methods with a part that a training makes; one that is not exact is named by itself alone
    method.name
    for entry in records()
    for method in entry.record.methods
    if method.is_exact
    and (method.needs_training or any(one.name.startswith("train ") for one in entry.record.commands))
}


def _is_of_schedules(method: Method) -> bool:
    return bool(method.rows) and not method.writers and not method.needs_training


PRESETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "all": (*ANY_DRAFT, *THEIRS),
        "ours": ANY_DRAFT,
        "schedules": tuple(name for name, spec in OURS.items() if _is_of_schedules(find_method(spec.method))),
        "rivals": tuple(name for name in ANY_DRAFT if OURS[name].is_best),  # each method once, at its best
        "writers": (ONE_CORE, BASELINE, *SINGLE_WRITERS, SEVERAL_WRITERS),
        "learned": tuple(name for name, spec in OURS.items() if spec.method in _LEARNED),
        "transformers": THEIRS,
    }
)


def names_of(asked: Sequence[str]) -> list[str]:
    """Return the rows of these names and presets, in our order.

    Plain decoding on all cores, the baseline, is always among them. So is the twin on all cores of a row that has one:
    each method gets what the parallel methods get. ``card+beam,suffix`` is CARD with these writers; names of writers
    that follow it, after a comma or a plus, belong to it. ``sps/relaxed:0.5`` is a row with a judge.
    Raises: SettingsError for an unknown name.
    """
    wanted, foreign = {BASELINE}, list[str]()
    for name in _joined(asked):
        if name.startswith(_OWN_WRITERS):
            _check_writers(name)
            foreign.append(name)
        elif JUDGED in name:
            _check_judge(name)
            foreign.append(name)
        elif name in KNOWN or name in PRESETS:
            wanted.update(PRESETS.get(name, (name,)))
        elif name in methods():
            wanted.update(row for row, spec in OURS.items() if spec.method == name)
        else:
            known = ", ".join((*PRESETS, *KNOWN))
            raise SettingsError(f"unknown method {name!r}; known: {known}, {_OWN_WRITERS}WRITERS and ROW{JUDGED}JUDGE")
    wanted.update(name + ALL_CORES for name in tuple(wanted) if name + ALL_CORES in KNOWN)
    return [*(name for name in KNOWN if name in wanted), *dict.fromkeys(foreign)]


def uncoupled(names: Sequence[str]) -> list[str]:
    """Return the rows, each followed by its twin that ranks candidates without the target's sampling noise."""
    return names_of([*names, *(name + UNCOUPLED for name in COUPLED if name in names)])


def _joined(asked: Sequence[str]) -> list[str]:
    """Return the names; writers that follow ``card+a`` are joined to it."""
    found: list[str] = []
    for name in asked:
        if found and found[-1].startswith(_OWN_WRITERS) and name in (DRAFTER, GRAMMAR, *writer_names()):
            found[-1] += f"+{name}"
        else:
            found.append(name)
    return found


def _check_writers(name: str) -> None:
    known = (DRAFTER, GRAMMAR, *writer_names())
    for writer in _writers(name):
        if writer not in known:
            raise SettingsError(f"unknown writer {writer!r} in row {name!r}; known: {', '.join(known)}")


def _writers(name: str) -> tuple[str, ...]:
    return tuple(name.removeprefix(_OWN_WRITERS).split("+"))


def _check_judge(name: str) -> None:
    row, _, judge = name.partition(JUDGED)
    if row not in OURS or (OURS[row].drafter == "none" and not OURS[row].is_tuned):
        able = ", ".join(one for one, spec in OURS.items() if spec.drafter != "none" or spec.is_tuned)
        raise SettingsError(f"row {name!r} has a judge, and {row!r} has no candidates to judge; rows that have: {able}")
    parse_judge(judge)


def spec_of(name: str) -> Spec:
    """Return the description of one of our rows."""
    if JUDGED in name:
        row, _, judge = name.partition(JUDGED)
        return replace(OURS[row], engine={**OURS[row].engine, "judge": judge})
    if name.startswith(_OWN_WRITERS):
        writers = _writers(name)
        return _tuned("card", "own" if DRAFTER in writers else "none", writers=writers)
    return OURS[name.removesuffix(UNCOUPLED)]


def needs_draft(name: str) -> bool:
    """Return whether a row cannot run without a draft model."""
    return "assisted" in name if name in THEIRS else spec_of(name).drafter != "none"


def needed_head(name: str) -> str | None:
    """Return the setting that names the trained head of a row; None if it needs none."""
    method = None if name in THEIRS else find_method(spec_of(name).method)
    return method.reads[0] if method is not None and method.needs_head else None


def needed_files(name: str) -> list[str]:
    """Return the settings that name the files which the writers added to a row cannot do without."""
    writers = set() if name in THEIRS else {f"writer {writer}" for writer in spec_of(name).engine.get("writers", ())}
    known = engine_settings()
    return [one for one in own_settings() if known[one].default is None and writers.intersection(known[one].readers)]


def settings_read(name: str) -> frozenset[str]:
    """Return the settings of folders that a row reads."""
    if name in THEIRS:
        return frozenset()
    spec = spec_of(name)
    return frozenset((*find_method(spec.method).reads, *settings_of_writers(spec.engine.get("writers", ()))))


def shipped_folder() -> Path:
    """Return the folder of the prompt sets that come with the package."""
    return Path(str(resources.files(__package__))) / "prompts"


def shipped() -> list[str]:
    """Return the names of the prompt sets that come with the package."""
    return sorted(path.stem for path in shipped_folder().iterdir() if path.suffix == ".jsonl")
