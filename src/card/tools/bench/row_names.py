"""Names that `card bench` accepts: rows, presets, data sets. Quick to import, as its help needs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from card.config.method import Method
from card.config.registry import all_methods, find_method, methods, settings_of_writers
from card.drafting.local import writer_names
from card.errors import SettingsError
from card.family.judges.knobs import parse_judge

PUBLISHED = ("gsm8k", "mgsm", "mt-bench", "humaneval", "mbpp", "spec-bench")  # data sets with a format of their own
BASELINE, ONE_CORE = "vanilla-all-cores", "vanilla"
OTHER_NUMBERS = (
    "other numbers"  # of a row that draws or computes with other numbers, so that its text cannot be compared
)
SEVERAL_WRITERS = "card-writers"
SINGLE_WRITERS = ("card", "suffix", "recycling")  # rows that it is compared with
ALL_CORES, UNCOUPLED = "-all-cores", "-uncoupled"
PARD = "pard"
DRAFTER, GRAMMAR = "beam", "grammar"  # the draft model and a request's grammar among the writers
_OWN_WRITERS = "card+"
JUDGED = "/"  # sps/relaxed:0.5 is the row sps with that judge

# The draft settings that may be given for the rows that take them.
DRAFT_OPTIONS = ("beam_width", "branch", "budget", "min_verify_prob", "lead", "max_wait_s", "min_depth")

Drafter = Literal["none", "turns", "beside", "own"]  # no model, in turns, on a core of its own, or the policy's choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One of our rows. A row beside a drafter has the target's cores, another one the cores that its name says."""

    method: str
    drafter: Drafter = "none"
    is_tuned: bool = False  # policy auto, and nothing set
    has_lengths: bool = False  # the fastest of the given draft lengths is taken
    is_as_shipped: bool = (
        False  # the method's own draft settings for the pair: its length from latencies, if it has one
    )
    takes_options: bool = False  # reads the draft settings that the user gives
    draft: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)


def _tuned(method: str, drafter: Drafter = "none", **engine: Any) -> Spec:
    return Spec(method=method, drafter=drafter, is_tuned=True, engine=engine)


def _card(verify: str, **draft: Any) -> Spec:
    return Spec(method="card", drafter="beside", takes_options=True, draft={"verify": verify, **draft})


def _rounds(method: str) -> Spec:
    return Spec(method=method, drafter="beside", is_as_shipped=True)


def _row_of(method: Method) -> Spec:
    """Return the row of a method for which nothing is set by hand: it drafts where it says, with its own settings."""
    if method.is_tuned:
        return _tuned(method.name, "own" if method.needs_draft else "none")
    if not method.needs_draft:
        return Spec(method=method.name)
    if method.placement == "inline":
        return Spec(method=method.name, drafter="turns", is_as_shipped=True)
    return _rounds(method.name)


def _rows_of(found: Iterable[Method]) -> dict[str, Spec]:
    """Return the rows of these methods, with a twin on all cores for one that drafts in turns."""
    rows = {method.name: _row_of(method) for method in found}
    twins = {name + ALL_CORES: spec for name, spec in rows.items() if spec.drafter == "turns"}
    return dict(sorted({**rows, **twins}.items()))


_TURNS = Spec(method="card", drafter="turns", has_lengths=True, takes_options=True, draft={"verify": "tree"})
_SPS = Spec(method="sps", drafter="turns", has_lengths=True)

_BY_HAND: Mapping[str, Spec] = MappingProxyType(
    {
        ONE_CORE: Spec(method="vanilla"),
        BASELINE: Spec(method="vanilla"),
        "sps": _SPS,
        "sps-all-cores": _SPS,
        PARD: Spec(method="pard", drafter="turns", has_lengths=True),
        PARD + ALL_CORES: Spec(method="pard", drafter="turns", has_lengths=True),
        "ouroboros-all-cores": Spec(method="ouroboros", drafter="turns", has_lengths=True),
        "card-chain": _card("chain"),
        "card-tree": _card("tree"),
        "card-best-first": _card("tree", growth="best-first"),
        "card-turns-all-cores": _TURNS,
        "card": _tuned("card", "own"),
        SEVERAL_WRITERS: _tuned("card", "own", writers=(DRAFTER, "suffix", "recycling")),
    }
)
_WITH_A_ROW = frozenset(spec.method for spec in _BY_HAND.values())
OURS: Mapping[str, Spec] = MappingProxyType(
    {
        **{name: spec for name, spec in _BY_HAND.items() if spec.method in methods()},
        **_rows_of(method for name, method in methods().items() if name not in _WITH_A_ROW),
    }
)
DEFAULT_ROWS, ROWS_ALONE = "vanilla,sps,card", "vanilla,suffix,recycling"  # with a draft model and without
THEIRS = ("transformers", "transformers-all-cores", "transformers-assisted", "transformers-assisted-all-cores")
COUPLED = ("sps", "sps-all-cores", "card-chain", "card-tree")  # which may also run without coupled noise
# Rows of any pair. The other rows need something trained for the pair; only the preset `learned` has them.
ANY_DRAFT = tuple(name for name, spec in OURS.items() if not find_method(spec.method).needs_training)
KNOWN = (*OURS, *THEIRS, *(name + UNCOUPLED for name in COUPLED))
PRESETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "all": (*ANY_DRAFT, *THEIRS),
        "ours": ANY_DRAFT,
        "schedules": tuple(name for name, spec in OURS.items() if spec.method in ("vanilla", "sps", "card")),
        "rivals": tuple(
            name for name in ANY_DRAFT if name not in ("sps", "card-chain", "card-turns-all-cores")
        ),  # each method once, at its best
        "writers": (ONE_CORE, BASELINE, *SINGLE_WRITERS, SEVERAL_WRITERS),
        "learned": (*(name for name in OURS if name not in ANY_DRAFT), "specbranch"),
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
    wanted, own = {BASELINE}, list[str]()
    for name in _joined(asked):
        if name.startswith(_OWN_WRITERS):
            _check_writers(name)
            own.append(name)
        elif JUDGED in name:
            _check_judge(name)
            own.append(name)
        elif name in KNOWN or name in PRESETS:
            wanted.update(PRESETS.get(name, (name,)))
        elif name in all_methods():
            method = find_method(name).name  # one of several engines says where it runs
            wanted.update(row for row, spec in OURS.items() if spec.method == method)
        else:
            known = ", ".join((*PRESETS, *KNOWN))
            raise SettingsError(f"unknown method {name!r}; known: {known}, {_OWN_WRITERS}WRITERS and ROW{JUDGED}JUDGE")
    wanted.update(name + ALL_CORES for name in tuple(wanted) if name + ALL_CORES in KNOWN)
    return [*(name for name in KNOWN if name in wanted), *dict.fromkeys(own)]


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
