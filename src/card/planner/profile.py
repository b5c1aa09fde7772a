"""What a model's passes cost on some hardware, and what goes on around them: the planner's only idea of time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from importlib import resources
from itertools import accumulate
from pathlib import Path

import msgspec

from card.errors import PlanError, SettingsError
from card.planner.files import read_file, write_bytes
from card.policy.cost import PassCost

KIND, VERSION = "profile", 1


class PassTable(msgspec.Struct, frozen=True, kw_only=True):
    """A `PassCost` in a file: what the engine itself measures at start."""

    points: tuple[tuple[int, float], ...]  # (new tokens, seconds) of one sequence with a short context
    per_sequence_s: float = 0.0
    per_context_row_s: float = 0.0

    @classmethod
    def of(cls, cost: PassCost) -> PassTable:
        """Return what the engine measured."""
        return cls(points=cost.points, per_sequence_s=cost.per_sequence_s, per_context_row_s=cost.per_context_row_s)


class PassGrid(msgspec.Struct, frozen=True, kw_only=True):
    """Measured seconds of passes over (sequences, rows that each holds, new tokens of each): medians of runs."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: tuple[tuple[tuple[float, ...], ...], ...]  # [batch][context][tokens]

    def __post_init__(self) -> None:
        for name, least in (("batches", 1), ("contexts", 0), ("tokens", 1)):
            axis = getattr(self, name)
            if not axis or axis[0] < least or list(axis) != sorted(set(axis)):
                raise PlanError(f"{name} of a grid must rise from {least} on, got {axis}")
        shape = (len(self.batches), len(self.contexts), len(self.tokens))
        found = {(len(self.seconds), len(plane), len(row)) for plane in self.seconds for row in plane}
        if found != {shape}:
            raise PlanError(f"a grid of {shape} passes has seconds for {sorted(found)}; measure it again")
        if not all(0.0 <= one < math.inf for plane in self.seconds for row in plane for one in row):
            raise PlanError("seconds of a grid must be finite and 0 or more; measure it again")

    def at(self, num_tokens: int, num_sequences: int, num_context_rows: int) -> float:
        """Return the seconds of a pass; arguments as of `PassCost.seconds`.

        Linear between the points of each axis, clamped before the first and along the last two beyond the last; never
        falling with more tokens. A ragged pass costs what an even one of as many tokens and rows does; where one size
        of batch was measured, what counts is the tokens of all sequences.
        """
        num_shared = num_sequences if len(self.batches) > 1 else self.batches[0]
        tokens, rows = num_tokens / num_shared, num_context_rows / num_shared

        def in_batch(batch_idx: int) -> float:
            plane = self.seconds[batch_idx]
            return _line(self.contexts, [_rising(self.tokens, row, tokens) for row in plane], rows)

        return max(0.0, _line(self.batches, [in_batch(idx) for idx in range(len(self.batches))], num_sequences))


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the model: on so many threads, or on the device as it is."""

    threads: int | None  # None: a device that has no threads to share out
    cost: PassTable
    grid: PassGrid | None = None  # None: `cost` is all that is known

    def pass_cost(self) -> PassCost:
        """Return what the engine would measure at start. Raises: SettingsError for seconds that cannot be."""
        return PassCost(self.cost.points, self.cost.per_sequence_s, self.cost.per_context_row_s)


class Overheads(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds beyond the passes. Defaults: medians on two cores of an AMD EPYC, of card 0.1 in November 2026."""

    round_s: float = 1.7e-4  # a round of the target: query, choice of tokens, rows kept, text
    request_s: float = 1e-4  # each further request in a round
    drafted_request_s: float = 0.0  # each request in a round that verifies a drafter's candidates, besides messages
    tuned_s: float = 1.7e-4  # a round whose policy tunes itself, or that has local writers of which nothing is known
    by_writer: dict[str, float] = {}  # seconds of a round with this local writer, by its name
    drafted_s: float = 0.0  # a round that verifies a drafter's candidates; by default it is in what messages take
    step_s: float = 1e-4  # a drafter pass: top-k, growth of the tree
    node_s: float = 1.2e-5  # each node that it expands
    commit_s: float = 2e-4  # a correction in the drafter: re-root, prune, KV rows moved
    cold_s: float = 0.0  # the first passes behind another model's on the same cores, whose weights took the caches
    message_s: float = 2.5e-5  # of the target's time, for each message to or from a drafter elsewhere
    latency_s: float = 1e-4  # of a message on its way, each way, before any network
    beside_factor: float = 1.0  # by which passes, and a drafter's steps, take longer beside the other model
    source: str = "defaults, measured on another machine"

    def of_round(self, writers: Sequence[str], *, is_tuned: bool, has_drafter: bool) -> float:
        """Return the seconds of a round with one request beyond its pass, messages left out."""
        is_unknown = any(name not in self.by_writer for name in writers)
        return (
            self.round_s
            + (self.tuned_s if is_tuned or is_unknown else 0.0)
            + sum(self.by_writer.get(name, 0.0) for name in writers)
            + (self.drafted_s if has_drafter else 0.0)
        )

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("source", "by_writer")}
        values |= {f"by_writer.{name}": seconds for name, seconds in self.by_writer.items()}
        for name, value in values.items():
            if not 0.0 <= value < math.inf:
                raise PlanError(f"{name} of the overheads must be finite and 0 or more, got {value}")
        if self.beside_factor < 1.0:
            raise PlanError(f"beside_factor of the overheads must be 1 or more, got {self.beside_factor}")


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one machine."""

    kind: str = KIND
    version: int = VERSION
    name: str
    measured: bool  # False: typed in
    source: str  # command, or where typed-in figures come from
    machine: str = ""
    device: str = ""
    dtype: str = ""
    num_parameters: int = 0
    cost_of: str = ""  # for an inflated model, what it costs
    tokenizer: str = ""  # fingerprint; empty: unknown, and not compared
    date: str = ""
    versions: dict[str, str] = {}
    load_average: float = 0.0  # before the measurement
    setups: tuple[Setup, ...]
    overheads: Overheads = Overheads()

    def setup(self, max_threads: int | None = None) -> Setup:
        """Return the fastest way to verify a few tokens on so many threads at most; None allows all.

        Raises: PlanError if every measured way takes more.
        """
        possible = [s for s in self.setups if max_threads is None or s.threads is None or s.threads <= max_threads]
        if not possible:
            known = sorted(s.threads for s in self.setups if s.threads is not None)
            raise PlanError(
                f"the profile of {self.name} was made with {', '.join(map(str, known))} threads, and {max_threads} are "
                "left for it; make one with fewer (card profile --threads)"
            )
        return min(possible, key=lambda s: s.pass_cost().seconds(4))

    def setup_of(self, threads: int | None) -> Setup:
        """Return the way to run on just so many threads, as where another model on the same cores wants that many.

        Where that was not measured, the most threads below count. Raises: PlanError if every measured way takes more.
        """
        counts = [s.threads for s in self.setups if s.threads is not None and threads is not None]
        most = max((count for count in counts if count <= (threads or 0)), default=None)
        return next((s for s in self.setups if s.threads == most), None) or self.setup(threads)

    @property
    def max_threads(self) -> int | None:
        """The most threads of any setup; None if it has none to share out."""
        threads = [s.threads for s in self.setups if s.threads is not None]
        return max(threads, default=None)


class TrueCost:
    """What virtual passes take: the grid where there is one, times a factor."""

    def __init__(self, setup: Setup, factor: float = 1.0) -> None:
        self._grid = setup.grid
        self._cost = setup.pass_cost()
        self._factor = factor
        self._known: dict[tuple[int, int, int], float] = {}

    def seconds(self, num_tokens: int, num_sequences: int, num_context_rows: int) -> float:
        """Return the seconds of a pass; arguments as of `PassCost.seconds`, context to the nearest 16 rows."""
        key = (num_tokens, num_sequences, num_context_rows // 16)
        found = self._known.get(key)
        if found is None:
            rows = 16 * key[2]
            cost = self._grid.at(num_tokens, num_sequences, rows) if self._grid else self._cost.seconds(*key[:2], rows)
            found = self._known[key] = self._factor * cost
        return found


def load_profile(name_or_path: str | Path) -> Profile:
    """Read a profile: a file, or the name of one that ships with the package.

    Raises: PlanError if it cannot be read, is no profile, of another version, or holds what cannot be.
    """
    path = Path(name_or_path)
    if not path.is_file() and str(name_or_path) in shipped_profiles():
        path = _folder() / f"{name_or_path}.json"
    if not path.is_file():
        raise PlanError(
            f"there is no profile {name_or_path}; make one with card profile, or take one of "
            f"{', '.join(shipped_profiles())}"
        )
    profile = read_file(path, Profile, KIND, VERSION, msgspec.json.decode)
    try:
        check_profile(profile)
    except (SettingsError, PlanError) as error:
        raise PlanError(f"{path} is a broken profile: {error}") from error
    return profile


def check_profile(profile: Profile) -> None:
    """Raise PlanError or SettingsError if the profile says what cannot be."""
    if not profile.setups:
        raise PlanError("it has no setups")
    if not profile.source:
        raise PlanError("it does not say where its figures come from")
    threads = [setup.threads for setup in profile.setups]
    if len(set(threads)) < len(threads):
        raise PlanError(f"it has two setups with as many threads: {threads}")
    for setup in profile.setups:
        setup.pass_cost()


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON. Raises: PlanError."""
    check_profile(profile)
    write_bytes(path, msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


def shipped_profiles() -> tuple[str, ...]:
    """Return the names of the profiles in the package: published figures, typed in."""
    return tuple(sorted(path.stem for path in _folder().glob("*.json")))


def _folder() -> Path:
    return Path(str(resources.files("card"))) / "planner" / "profiles"


def _rising(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """Return y at x along the points, each raised to the one before it."""
    return _line(xs, list(accumulate(ys, max)), x)


def _line(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """Return y at x: linear between points, clamped before the first, along the last two behind the last."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    idx = min(bisect_right(xs, x), len(xs) - 1)
    (x0, x1), (y0, y1) = xs[idx - 1 : idx + 1], ys[idx - 1 : idx + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
