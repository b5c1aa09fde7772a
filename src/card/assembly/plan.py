"""Consequences of settings and facts before an engine is built. Nothing in here loads, measures or starts anything.

`resolve` may be called again whenever more is known: before anything is loaded, to refuse contradictions; when the
target is loaded, for its context; and when latencies can be measured, for threads and lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from card.assembly.sharing import foresees_forced, share_out
from card.config import DraftSettings, EngineSettings, Placement, Schedule, TreeShape, parse_size
from card.config.fields import Setting, declared
from card.config.method import Method, default_method
from card.config.reading import CANDIDATES, DRAFTING, DRAFTING_HERE, IMAGES, refuse_unread, unread
from card.config.registry import find_method
from card.config.selection import SelfDrafting, parse_selection
from card.config.splitting import engine_settings, split_settings
from card.errors import SettingsError, named
from card.machine.pass_cost import PassCost
from card.machine.threads import CorePlan, CoreSet
from card.tree.verify import MATCH, Verifier

SPARE_ROWS = 64  # KV rows of a sequence beyond its text and its tree: `num_speculative_tokens` may grow by measurement
DEFAULT_MODEL_LEN = 4096  # tokens of a text by default, where the target allows it and memory holds no more
_RAM_SHARE = 0.25  # of the free memory that the KV cache may take by default
_ROUND_TOKENS = 1024  # where memory limits the context, it is a multiple of this
_POOL_BYTES = 1 << 20  # beyond the rows that are asked for: a pool gives them out in blocks
_TYPICAL_TOKENS = 4  # of a verification, for the ratio of target and drafter passes
_LONGEST_ROUND = 16  # drafter passes beside one of the target's, at most


class Latencies(Protocol):
    """Costs of passes: measured, remembered, or typed in."""

    def with_useful_threads(self, cores: CorePlan) -> CorePlan:
        """Return the cores with all threads for the target, or fewer that are faster."""

    def target(self, plan: Plan, schedule: Schedule) -> PassCost:
        """Return what the target's passes cost under a schedule."""

    def drafter(self, plan: Plan, schedule: Schedule) -> PassCost | None:
        """Return what the drafter's passes cost under a schedule; None if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Known facts of models and machine; those that are not known yet are left out."""

    has_draft: bool = False  # there is a draft model
    has_pool: bool = False  # draft servers are leased from a pool
    is_draft_loaded: bool = False  # as an object of this process, which it cannot leave
    wants_states: bool = False  # the draft model reads the target's hidden states, which stay in this process
    cores: tuple[int, ...] | None = None  # CPU cores that the process may use; None: not known which
    num_cores: int | None = None  # it gets the time of so many of them; None: of all
    spare_cores: int = 0  # so many of them the target can spare at no loss of speed; 0 also where that is unknown
    in_integers: bool = False  # the target's passes are integer ones
    context_limit: int | None = None  # most tokens of a text that the target allows
    room_tokens: int = 0  # of a text whose rows fit into memory, see `room_tokens`; 0: not known
    longest_text: int = 0  # tokens of the longest text that is known to come, answer included
    num_texts: int | None = None  # texts that come at once, of that length at most; None: not known
    row_bytes: int | None = None  # of the target's KV; None: memory is no matter
    state_bytes: int = 0  # of the states that the target keeps of a text
    free_bytes: int = 0  # on the target's device
    latencies: Latencies | None = None
    verifier: Verifier = MATCH  # decides which candidates stay
    verifier_named: str = ""  # by which settings, in words; empty: it was given as an object

    @property
    def draft_stays_here(self) -> bool:
        """True if the draft model cannot run in another process."""
        return self.is_draft_loaded or self.wants_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that was decided about an engine before it is built."""

    method: Method
    settings: EngineSettings
    draft: DraftSettings  # as the method shapes them
    pinned: frozenset[str]  # names of those of them that were set
    placements: Mapping[Schedule, Placement]  # where the drafter runs under each schedule; empty: there is none
    writers: tuple[str, ...]  # those without a model, but for the grammars of requests
    foresees: bool  # the grammar of a request is a writer too
    cores: CorePlan
    max_model_len: int
    target_tree_rows: int  # KV rows of one sequence beyond its text, in the target
    draft_tree_rows: int  # and in the draft model
    max_kv_bytes: int | None  # of the target; None: no limit
    verifier: Verifier

    @property
    def self_drafting(self) -> SelfDrafting | None:
        """Settings of a target that drafts for itself; None: it does not."""
        usual = self.method.selection
        if usual is None:
            return None
        return SelfDrafting(parse_selection(self.method.select(self.settings) or usual), self.method.num_looked_up)

    @property
    def has_candidates(self) -> bool:
        """True if a pass may verify candidates."""
        return bool(self.placements or self.writers or self.foresees or self.method.selection is not None)

    @property
    def first_schedule(self) -> Schedule:
        """The schedule of an engine that chooses none."""
        return next(iter(self.placements), "off")

    @property
    def leases_drafter(self) -> bool:
        """True if a pool says which draft server to use."""
        return "remote" in self.placements.values() and self.settings.draft_address is None

    @property
    def has_drafter_process(self) -> bool:
        """True if a drafter runs in a process of its own, with cores of its own."""
        return "process" in self.placements.values()

    def cores_of(self, schedule: Schedule) -> CoreSet:
        """Return where the target computes under a schedule."""
        return self.cores.beside if self.placements.get(schedule) == "process" else self.cores.alone


def resolve(settings: Mapping[str, Any], facts: Facts, *, method: str | None = None) -> Plan:
    """Return the plan that settings and facts determine.

    Args:
        settings: fields of `EngineSettings` and `DraftSettings`; the others are as by default.
        method: name of the decoding method; None takes card if there is a draft model and suffix if not.
    Raises: SettingsError for settings that are unknown, out of range, or contradict each other or the facts.
    """
    engine_changes, draft_changes = split_settings(settings)
    has_draft = facts.has_draft or facts.has_pool or engine_changes.get("draft_address") is not None
    chosen = find_method(default_method(has_draft=has_draft) if method is None else method)
    engine = EngineSettings(**{**engine_changes, "method": chosen.name})
    # A policy that weighs candidates can afford those of more writers, and an exact text is the same with them.
    takes_more = engine.policy != "fixed" and draft_changes.get("verify") != "chain" and facts.verifier.is_exact
    drafts, writers = share_out(chosen, engine.writers, chosen.usual_writers if takes_more else ())
    _refuse_contradictions(engine, chosen, facts, drafts=drafts, has_draft=has_draft)
    placements = _placements(chosen, engine, facts) if drafts else {}
    asked = DraftSettings(**draft_changes)
    shaped, with_draft = chosen.shape(asked), facts.has_draft
    there = _readers(chosen, engine, drafts=drafts, with_draft=with_draft, writers=writers, growth=shaped.growth)
    refuse_unread(settings, _known(), there, f"method {chosen.name}")
    max_model_len, target_tree_rows = _model_len(engine, facts), shaped.budget + SPARE_ROWS
    has_process = "process" in placements.values()
    cores = _plan_cores(engine, facts, own_drafter_core=has_process)
    plan = Plan(
        method=chosen,
        settings=engine,
        draft=shaped,
        pinned=frozenset(draft_changes),
        placements=placements,
        writers=writers,
        foresees=foresees_forced(chosen, engine.writers),
        cores=cores if facts.latencies is None else facts.latencies.with_useful_threads(cores),
        max_model_len=max_model_len,
        target_tree_rows=target_tree_rows,
        draft_tree_rows=draft_tree_rows(shaped),
        max_kv_bytes=_kv_bytes(engine, facts, max_model_len, target_tree_rows),
        verifier=facts.verifier,
    )
    return plan if "num_speculative_tokens" in plan.pinned else _with_measured_length(plan, asked, facts.latencies)


def readable(settings: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return those of some settings that a method reads, for tools that give the same ones to several methods."""
    engine_changes, draft_changes = split_settings(settings)
    chosen, engine = find_method(method), EngineSettings(**engine_changes)
    drafts, writers = share_out(chosen, engine.writers, ())
    growth = chosen.shape(DraftSettings(**draft_changes)).growth
    there = _readers(chosen, engine, drafts=drafts, with_draft=False, writers=writers, growth=growth)
    left_out = unread(settings, _known(), there)
    return {name: value for name, value in settings.items() if name not in left_out}


def draft_tree_rows(draft: TreeShape) -> int:
    """Return the KV rows that the tree of one request may take in the draft model."""
    width = draft.beam_width
    if draft.growth == "fan-out":
        width = max(width, max(draft.fan_out) * (draft.num_speculative_tokens + 1))
    return min(2 * draft.lead * width, draft.max_nodes) + SPARE_ROWS


def kv_bytes_for(num_texts: int, bytes_of_one: int) -> int:
    """Return the memory that so many texts take, each with its tree."""
    return num_texts * bytes_of_one + _POOL_BYTES


def room_tokens(plan: Plan, *, row_bytes: int, state_bytes: int, free_bytes: int) -> int:
    """Return the tokens of the longest text whose rows fit into the memory for KV, its tree included.

    Args:
        row_bytes, state_bytes: of the target's KV, as of `Facts`.
        free_bytes: of which KV may take a quarter, unless the settings say how much it may take.
    """
    given = plan.settings.kv_cache_memory
    most = int(_RAM_SHARE * free_bytes) if given is None else parse_size(given, "kv_cache_memory")
    num_tokens = (most - state_bytes) // max(1, row_bytes) - plan.target_tree_rows
    return max(0, num_tokens // _ROUND_TOKENS * _ROUND_TOKENS)


def round_length(method: Method, draft: DraftSettings, *, target: PassCost, drafter: PassCost, most: int) -> int:
    """Return the longest draft whose drafter passes fit into one of the target's: 2 to ``most``, and 16 at most.

    Args:
        method: one that says what its passes are.
        draft: settings before the method shapes them; they say how wide its passes are.
    """
    assert method.passes_of_round is not None
    target_s = target.seconds(_TYPICAL_TOKENS)
    for length in range(2, min(_LONGEST_ROUND, most)):
        longer = method.shape(draft.replace(num_speculative_tokens=length + 1))
        if sum(drafter.seconds(num_tokens) for num_tokens in method.passes_of_round(longer)) > target_s:
            return length
    return min(_LONGEST_ROUND, most)


# ---- inside ----------------------------------------------------------------------------------------------------------


def _known() -> Mapping[str, Setting]:
    return {**engine_settings(), **declared(DraftSettings)}


def _readers(
    method: Method, settings: EngineSettings, *, drafts: bool, with_draft: bool, writers: Sequence[str], growth: str
) -> frozenset[str]:
    """Return what reads settings in this engine, in the words of `card.config.reading`."""
    there = {f"method {method.name}", f"growth {growth}", *(f"writer {name}" for name in writers)}
    if drafts or writers or foresees_forced(method, settings.writers) or method.selection is not None:
        there.add(CANDIDATES)
    here = {DRAFTING_HERE} if with_draft or not settings.draft_address else set()
    there |= {DRAFTING, *here} if drafts else set()
    return frozenset(there | ({IMAGES} if settings.max_images else set()))


def _refuse_contradictions(
    settings: EngineSettings, method: Method, facts: Facts, *, drafts: bool, has_draft: bool
) -> None:
    if drafts and not has_draft:
        raise SettingsError(
            f"method {method.name} needs a draft model; give {named('draft')}, or {named('method')} vanilla"
        )
    if facts.verifier_named and not (drafts or method.writers or settings.writers or method.selection):
        raise SettingsError(
            f"{facts.verifier_named} has nothing to judge: method {method.name} has no candidates; leave it out, or "
            "name a method or writers that have"
        )
    if not facts.verifier.is_exact and not (settings.allows_inexact or facts.verifier_named):
        raise SettingsError(
            "this verifier may keep tokens that the target would not choose: leave it out, or set "
            f"{named('allows_inexact')}=True"
        )
    if facts.is_draft_loaded and settings.placement == "process":
        raise SettingsError(
            f"a loaded draft model cannot move into another process; give its folder, or {named('placement')} thread"
        )
    if facts.wants_states and settings.placement == "process":
        raise SettingsError(
            "this draft model reads the target's hidden states, which do not leave the process: give "
            f"{named('placement')} inline or thread, or name one that reads none"
        )
    if settings.schedule != "auto":
        placement = settings.placement or ("remote" if settings.draft_address or facts.has_pool else None)
        if not method.is_tuned or not drafts:
            raise SettingsError(f"{named('schedule')} is for method card; {method.name} has its own, so leave it out")
        if placement is not None and (settings.schedule == "turns") != (placement == "inline"):
            raise SettingsError(
                f"{named('schedule')} {settings.schedule} does not go with a drafter that is {placement}: turns are "
                "taken with a drafter inline, and only that one takes turns; leave one of the two out"
            )
    if settings.draft_address is not None and facts.has_draft:
        _refuse_two_drafters(settings, method)
    if facts.has_pool and (facts.has_draft or settings.draft_address or settings.placement):
        raise SettingsError(
            f"a pool has the drafters: leave {named('draft')}, {named('draft_address')} and {named('placement')} out"
        )
    if settings.draft_keys is not None and settings.draft_address is None and not facts.has_pool:
        raise SettingsError(f"{named('draft_keys')} are for a draft server: give its {named('draft_address')} too")


def _refuse_two_drafters(settings: EngineSettings, method: Method) -> None:
    """Refuse a draft server beside a draft model here unless a policy chooses among them in each round."""
    is_auto = method.is_tuned and settings.schedule == "auto" and settings.policy == "auto"
    if not is_auto or {settings.device, settings.draft_device or settings.device} != {"cpu"}:
        raise SettingsError(
            f"{named('draft')} and {named('draft_address')} are two drafters: leave one of them out, or let method "
            f"card choose on a CPU, with {named('schedule')} and {named('policy')} auto"
        )


def _placements(method: Method, settings: EngineSettings, facts: Facts) -> dict[Schedule, Placement]:
    """Return where the drafter runs under each schedule: as set, else by the method.

    A tuned one on a CPU takes turns with the target. It may run beside it, too, if that does not slow the target, or
    on a draft server.
    """
    if settings.draft_address is not None or facts.has_pool:
        return {"beside": "remote", "turns": "inline"} if facts.has_draft else {"beside": "remote"}
    if settings.placement is not None or not method.is_tuned:
        stays_here = facts.draft_stays_here and method.placement == "process"
        placement = settings.placement or ("thread" if stays_here else method.placement)
        return {"turns" if placement == "inline" else "beside": placement}
    if settings.schedule == "turns":
        return {"turns": "inline"}
    if {settings.device, settings.draft_device or settings.device} != {"cpu"}:
        return {"beside": "thread"}
    if facts.draft_stays_here:
        return {"beside": "thread"} if settings.schedule == "beside" else {"turns": "inline"}
    if settings.schedule == "beside" or settings.policy == "fixed":
        return {"beside": "process"}
    if facts.spare_cores < settings.draft_threads:
        return {"turns": "inline"}
    return {"beside": "process", "turns": "inline"}


def _plan_cores(settings: EngineSettings, facts: Facts, *, own_drafter_core: bool) -> CorePlan:
    """Share out the cores that this process may use: the last ones go to the drafter, if it has a process of its own.

    The target may have as many threads as cores, unless the settings say how many. Where the system does not tell which
    cores these are, the scheduler decides, and nothing is shared out. The same holds where the process gets the time of
    fewer cores than it may run on: every container of the machine would choose the same ones.

    Raises: SettingsError if a core is asked for that this process may not use.
    """
    allowed, in_integers = facts.cores, facts.in_integers
    if allowed is None:
        core_set = CoreSet((), settings.threads, in_integers)
        return CorePlan(core_set, core_set, ())
    for name, cores in (("cores", settings.cores), ("draft_cores", settings.draft_cores)):
        for core in cores or ():
            if core not in allowed:
                raise SettingsError(
                    f"{named(name)} must be among the cores of this process {list(allowed)}, got {core}"
                )
    all_cores, count = settings.cores or tuple(allowed), settings.draft_threads
    limit = facts.num_cores if facts.num_cores is not None and facts.num_cores < len(all_cores) else None
    alone = CoreSet(settings.cores or (), settings.threads or limit or len(all_cores), in_integers)
    if not own_drafter_core:
        return CorePlan(alone, alone, ())
    if limit is not None and not settings.draft_cores:
        threads = settings.threads or max(1, limit - count)
        return CorePlan(CoreSet(alone.cores, threads, in_integers), alone, ())
    free = [core for core in allowed if core not in (settings.cores or ())]
    draft = settings.draft_cores or (tuple(free[-count:]) if len(allowed) > count else ())
    target = settings.cores or tuple(core for core in allowed if core not in draft)
    return CorePlan(CoreSet(target, settings.threads or len(target), in_integers), alone, draft)


def _model_len(settings: EngineSettings, facts: Facts) -> int:
    """Return the most tokens of a text: as set, else the target's context as far as memory holds it.

    It is never below a usual length, nor below a longer text that is known to come, however small the memory is.
    """
    limit = facts.context_limit
    usual = max(DEFAULT_MODEL_LEN, facts.room_tokens, facts.longest_text)
    wanted = settings.max_model_len or (usual if limit is None else min(usual, limit))
    if limit is not None and wanted > limit:
        raise SettingsError(f"{named('max_model_len')} must be at most {limit}, the target's own limit, got {wanted}")
    return wanted


def _kv_bytes(settings: EngineSettings, facts: Facts, max_model_len: int, tree_rows: int) -> int | None:
    """Return the most memory for the target's KV. Raises: SettingsError if one longest request does not fit."""
    if facts.row_bytes is None:
        return None
    num_rows = max_model_len + tree_rows
    least = num_rows * facts.row_bytes + facts.state_bytes
    if settings.kv_cache_memory is not None:
        given = parse_size(settings.kv_cache_memory, "kv_cache_memory")
        if given < least:
            states = f" beside the {facts.state_bytes / 2**20:.0f}M of its states" if facts.state_bytes else ""
            num_held = max(0, given - facts.state_bytes) // max(1, facts.row_bytes)
            raise SettingsError(
                f"{named('kv_cache_memory')} {settings.kv_cache_memory} holds {num_held} rows of KV{states}, but a "
                f"request of {named('max_model_len')} {max_model_len} with its candidates needs {num_rows} "
                f"({least / 2**20:.0f}M); raise it, or lower {named('max_model_len')}"
            )
        return given
    if facts.num_texts is not None:
        bytes_of_one = (facts.longest_text + tree_rows) * facts.row_bytes + facts.state_bytes
        return kv_bytes_for(facts.num_texts, bytes_of_one)
    return max(min(settings.max_num_seqs * least, int(_RAM_SHARE * facts.free_bytes)), least)


def _with_measured_length(plan: Plan, asked: DraftSettings, latencies: Latencies | None) -> Plan:
    """Let a method that is defined by rounds draft as much as fits into one of the target's passes."""
    if latencies is None or not plan.placements or not plan.method.length_from_latencies:
        return plan
    drafter = latencies.drafter(plan, plan.first_schedule)
    if drafter is None:
        return plan
    target = latencies.target(plan, plan.first_schedule)
    length = round_length(plan.method, asked, target=target, drafter=drafter, most=plan.max_model_len)
    return replace(plan, draft=plan.method.shape(asked.replace(num_speculative_tokens=length)))
