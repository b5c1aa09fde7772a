"""Costs of a model's passes on some hardware, and overheads around them: all times that the planner knows."""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path

import msgspec

from card.errors import PlanError
from card.machine.expert_cost import ExpertCounts
from card.machine.folders import expanded
from card.machine.pass_cost import PassCost
from card.models.drafter_facts import DrafterFacts
from card.tools.planner.files import read_file, write_bytes

KIND, VERSION = "profile", 1


class PassTable(msgspec.Struct, frozen=True, kw_only=True):
    """A `PassCost` in a file."""

    points: tuple[tuple[int, float], ...]  # (new tokens, seconds) of one sequence with a short context
    per_sequence_s: float = 0.0
    per_context_row_s: float = 0.0
    experts: ExpertCounts | None = None  # that the passes read; None: the model has none

    @classmethod
    def of(cls, cost: PassCost) -> PassTable:
        """Return what the engine measured."""
        shared = {"per_sequence_s": cost.per_sequence_s, "per_context_row_s": cost.per_context_row_s}
        return cls(points=cost.points, experts=cost.experts, **shared)

    def pass_cost(self) -> PassCost:
        """Return what the engine knows of passes. Raises: SettingsError for seconds or counts that cannot be."""
        return PassCost(self.points, self.per_sequence_s, self.per_context_row_s, self.experts)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the model: with a number of threads, or on a device."""

    threads: int | None  # None: a device without threads
    cost: PassTable  # as the engine would measure it at start
    taken: PassTable | None = None  # of virtual passes; None: the same

    def pass_cost(self) -> PassCost:
        """Return the cost that the engine would measure at start. Raises: SettingsError for impossible seconds."""
        return self.cost.pass_cost()

    def true_cost(self, factor: float = 1.0) -> PassCost:
        """Return the cost of virtual passes, times a factor. Raises: SettingsError for impossible seconds."""
        return (self.taken or self.cost).pass_cost().scaled(factor)


# Proposing 16 candidates, the most that are verified by default, takes 85 us; proposing one takes 18 us, of which 14
# are the call itself (suffix, AMD EPYC).
_FULL, _ASKING = 16, 3  # candidates; as many as take as long as the call itself


class Overheads(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds beyond the passes. Defaults: medians on two cores of an AMD EPYC, of card 0.1 in November 2026."""

    round_s: float = 1.7e-4  # a round of plain decoding: choice of tokens, rows kept, text
    request_s: float = 2.6e-5  # each further request in a round
    drafted_s: float = 0.0  # a round that drafts, besides messages: the order, and the choice of candidates
    drafted_request_s: float = 0.0  # each request whose candidates are verified
    tuned_s: float = 1.7e-4  # a round whose policy tunes itself, and tuned_drafted_s more if it drafts
    tuned_request_s: float = 0.0  # each further request in it, and tuned_drafted_request_s more
    tuned_drafted_s: float = 0.0
    tuned_drafted_request_s: float = 0.0
    tuned_step_s: float = 0.0  # a drafter pass under such a policy, beyond step_s; tuned_node_s: a node
    tuned_node_s: float = 0.0
    by_writer: dict[str, float] = {}  # seconds of a request in a round with the most candidates of this local writer
    writer_s: float = 8.5e-5  # the same of an unknown local writer
    step_s: float = 1e-4  # a drafter pass: top-k, growth of the tree
    node_s: float = 1.2e-5  # each node that it expands
    commit_s: float = 2e-4  # a correction in the drafter: re-root, prune, KV rows moved
    commit_row_s: float = 0.0  # each KV row that the tree has then
    chosen_row_s: float = 0.0  # each chosen KV row of a drafting pass, beyond reading it
    scored_row_s: float = 0.0  # each KV row that a verification ranks for the next drafts, beyond reading it
    cold_s: float = 0.0  # the first passes after another model on the same cores has filled the caches
    cold_later_s: float = 0.0  # the part of it that falls to passes after the very first
    message_s: float = 2.5e-5  # of the target's time, for each message to or from a drafter elsewhere
    latency_s: float = 1e-4  # of a message on its way, each way, before any network
    beside_factor: float = 1.0  # by which passes, and a drafter's steps, take longer beside the other model
    source: str = "defaults, measured on another machine"

    def of_round(
        self, *, is_tuned: bool = False, has_drafted: bool = False, num_requests: int = 1, num_verifying: int = 0
    ) -> float:
        """Return the seconds of a round beyond its passes, without messages, further orders and proposals.

        Args:
            has_drafted: the drafter made a pass in it, or runs beside it.
            num_verifying: requests whose candidates are verified.
        """
        further = num_requests - 1
        seconds = self.round_s + further * self.request_s + num_verifying * self.drafted_request_s
        if has_drafted:
            seconds += self.drafted_s
        if is_tuned:
            seconds += self.tuned_s + further * self.tuned_request_s
        if is_tuned and has_drafted:
            seconds += self.tuned_drafted_s + further * self.tuned_drafted_request_s
        return seconds

    def of_proposal(self, writer: str, num_candidates: int) -> float:
        """Return the seconds in which a local writer proposes ``num_candidates`` candidates for a request."""
        return self.by_writer.get(writer, self.writer_s) * (num_candidates + _ASKING) / (_FULL + _ASKING)

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("source", "by_writer")}
        values |= {f"by_writer.{name}": seconds for name, seconds in self.by_writer.items()}
        for name, value in values.items():
            if not 0.0 <= value < math.inf:
                raise PlanError(f"{name} of the overheads must be finite and 0 or more, got {value}")
        if self.cold_later_s > self.cold_s:
            raise PlanError(f"cold_later_s of the overheads must be at most cold_s, {self.cold_s}: it is a part of it")
        if self.beside_factor < 1.0:
            raise PlanError(f"beside_factor of the overheads must be 1 or more, got {self.beside_factor}")


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one machine."""

    kind: str = KIND
    version: int = VERSION
    name: str
    measured: bool  # False: typed in
    source: str  # command, or the origin of typed-in figures
    machine: str = ""
    device: str = ""
    dtype: str = ""
    num_parameters: int = 0
    kv_row_bytes: int = 0  # of one token in all layers; 0: unknown
    cost_of: str = ""  # for an inflated model, what it costs
    tokenizer: str = ""  # fingerprint; empty: unknown, and not compared
    date: str = ""
    versions: dict[str, str] = {}
    load_average: float = 0.0  # before the measurement
    setups: tuple[Setup, ...]
    overheads: Overheads = Overheads()
    drafter: DrafterFacts | None = None  # what it is as a drafter, and reads; None: unknown

    @property
    def reads_states(self) -> bool:
        """True if it drafts from the hidden states of its target: a block or a head."""
        return self.drafter is not None and self.drafter.num_states > 0

    def setup(self, max_threads: int | None = None) -> Setup:
        """Return the fastest setup to verify a few tokens with at most ``max_threads`` threads; None allows all.

        Raises: PlanError if every measured setup has more.
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
        """Return the setup with exactly these threads, or the closest one below.

        Raises: PlanError if every measured setup has more.
        """
        counts = [s.threads for s in self.setups if s.threads is not None and threads is not None]
        most = max((count for count in counts if count <= (threads or 0)), default=None)
        return next((s for s in self.setups if s.threads == most), None) or self.setup(threads)

    @property
    def max_threads(self) -> int | None:
        """The most threads of any setup; None for a device without threads."""
        threads = [s.threads for s in self.setups if s.threads is not None]
        return max(threads, default=None)


def load_profile(name_or_path: str | Path) -> Profile:
    """Read a profile: a file, or the name of one that ships with the package.

    Raises: PlanError if it cannot be read, is no profile, of another version, or has impossible values.
    """
    path = expanded(name_or_path)
    if not path.is_file() and str(name_or_path) in shipped_profiles():
        path = _folder() / f"{name_or_path}.json"
    if not path.is_file():
        raise PlanError(
            f"there is no profile {name_or_path}; make one with card profile, or take one of "
            f"{', '.join(shipped_profiles())}"
        )
    return read_file(path, Profile, KIND, VERSION, msgspec.json.decode, check_profile)


def check_profile(profile: Profile) -> None:
    """Raise PlanError or SettingsError if the profile has impossible values."""
    if not profile.setups:
        raise PlanError("it has no setups")
    if not profile.source:
        raise PlanError("it does not say where its figures come from")
    threads = [setup.threads for setup in profile.setups]
    if len(set(threads)) < len(threads):
        raise PlanError(f"it has two setups with as many threads: {threads}")
    for setup in profile.setups:
        setup.pass_cost()
        setup.true_cost()


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON. Raises: PlanError."""
    check_profile(profile)
    write_bytes(path, msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


def shipped_profiles() -> tuple[str, ...]:
    """Return the names of the profiles in the package: published figures, typed in."""
    return tuple(sorted(path.stem for path in _folder().glob("*.json")))


def _folder() -> Path:
    return Path(str(resources.files(__package__))) / "profiles"
