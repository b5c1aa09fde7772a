"""What is resolved of settings and facts; draft lengths whose passes take no longer than one of the target's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.assembly.plan import Facts, Plan, resolve, room_tokens, round_length
from card.config import DraftSettings, Schedule
from card.config.registry import methods, origin_of
from card.errors import SettingsError
from card.machine.pass_cost import PassCost
from card.machine.threads import CorePlan, CoreSet
from card.tree.verify import MATCH, Verdict, Verification

OF_ROUNDS = sorted(name for name, method in methods().items() if method.length_from_latencies)


def cost(first_s: float, per_token_s: float = 0.0) -> PassCost:
    return PassCost(((1, first_s), (101, first_s + 100 * per_token_s)))


def length_of(name: str, *, ratio: float, per_token_s: float = 0.0, most: int = 100, **draft: object) -> int:
    """Return the length beside a target whose pass takes ``ratio`` drafter passes of one token, each of a second."""
    settings = DraftSettings(**draft)  # type: ignore[arg-type]
    target, drafter = cost(ratio), cost(1.0, per_token_s)
    return round_length(methods()[name], settings, target=target, drafter=drafter, most=most)


def test_they_are_the_methods_in_which_target_and_drafter_meet_after_each_block() -> None:
    assert [name for name in OF_ROUNDS if origin_of(name) == "family/classic"] == ["pearl", "ssd"]


@pytest.mark.parametrize("name", OF_ROUNDS)
def test_where_width_costs_nothing_a_round_is_as_long_as_the_target_takes(name: str) -> None:
    assert [length_of(name, ratio=ratio) for ratio in (7.0, 7.9, 12.0)] == [7, 7, 12]


@pytest.mark.parametrize("name", OF_ROUNDS)
def test_a_round_is_two_long_at_least_and_bounded(name: str) -> None:
    assert length_of(name, ratio=0.1) == 2
    assert length_of(name, ratio=99.0) == 16
    assert length_of(name, ratio=99.0, most=9) == 9


def test_wide_passes_make_short_rounds() -> None:
    wide = {"ratio": 12.0, "per_token_s": 0.1}
    assert length_of("pearl", **wide) == 12, "its passes run one token"
    assert length_of("ssd", fan_out=(3,), **wide) == 4, "15 outcomes: 4 passes of 2.4 s; 5 of 2.7 s are too long"
    assert length_of("ssd", fan_out=(6, 1), **wide) == 5, "11 outcomes: 5 passes of 2.0 s; 6 of 2.1 s are too long"


@given(
    name=st.sampled_from(OF_ROUNDS),
    ratio=st.floats(0.5, 40.0),
    per_token_s=st.floats(0.0, 0.5),
    beam_width=st.integers(1, 12),
    fan_out=st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
    most=st.integers(2, 40),
)
def test_its_passes_fit_and_those_of_a_longer_round_do_not(
    name: str, ratio: float, per_token_s: float, beam_width: int, fan_out: tuple[int, ...], most: int
) -> None:
    shape = {"beam_width": beam_width, "fan_out": fan_out}
    length = length_of(name, ratio=ratio, per_token_s=per_token_s, most=most, **shape)
    method, drafter = methods()[name], cost(1.0, per_token_s)
    assert method.passes_of_round is not None

    def round_s(num_speculative_tokens: int) -> float:
        draft = method.shape(DraftSettings(num_speculative_tokens=num_speculative_tokens, **shape))
        widths = method.passes_of_round(draft)
        assert len(widths) == num_speculative_tokens, "one pass for each token of a chain"
        return sum(drafter.seconds(width) for width in widths)

    assert 2 <= length <= min(16, most)
    assert length == 2 or round_s(length) <= ratio
    assert length == min(16, most) or round_s(length + 1) > ratio


# ---- what is resolved -----------------------------------------------------------------------------------------------


class Told:
    """Latencies that are typed in."""

    def with_useful_threads(self, cores: CorePlan) -> CorePlan:
        return cores

    def target(self, plan: Plan, schedule: Schedule) -> PassCost:
        return cost(8.0)

    def drafter(self, plan: Plan, schedule: Schedule) -> PassCost | None:
        return cost(1.0)


TWO_CORES = Facts(has_draft=True, cores=(0, 1))


@pytest.mark.parametrize(
    ("method", "settings", "facts", "placements"),
    [
        ("vanilla", {}, TWO_CORES, {}),
        ("card", {}, TWO_CORES, {"turns": "inline"}),
        ("card", {}, replace(TWO_CORES, spare_cores=1), {"beside": "process", "turns": "inline"}),
        ("card", {"draft_threads": 2}, replace(TWO_CORES, spare_cores=1), {"turns": "inline"}),
        ("card", {"schedule": "beside"}, TWO_CORES, {"beside": "process"}),
        ("card", {"policy": "fixed"}, TWO_CORES, {"beside": "process"}),
        ("card", {"schedule": "turns"}, TWO_CORES, {"turns": "inline"}),
        ("card", {"device": "cuda"}, TWO_CORES, {"beside": "thread"}),
        ("card", {}, replace(TWO_CORES, is_draft_loaded=True), {"turns": "inline"}),
        ("pearl", {}, replace(TWO_CORES, is_draft_loaded=True), {"beside": "thread"}),  # it cannot leave this process
        ("card", {}, replace(TWO_CORES, wants_states=True), {"turns": "inline"}),
        ("card", {"schedule": "beside"}, replace(TWO_CORES, wants_states=True), {"beside": "thread"}),
        ("pearl", {}, replace(TWO_CORES, wants_states=True), {"beside": "thread"}),
        ("card", {"draft_address": "tcp://127.0.0.1:1"}, Facts(), {"beside": "remote"}),
        ("card", {"draft_address": "tcp://127.0.0.1:1"}, TWO_CORES, {"beside": "remote", "turns": "inline"}),
        ("card", {"draft_address": "tcp://a:1", "draft_vocab": 9}, TWO_CORES, {"beside": "remote", "turns": "inline"}),
        ("pearl", {}, TWO_CORES, {"beside": "process"}),
        ("pearl", {"placement": "inline"}, TWO_CORES, {"turns": "inline"}),
    ],
)
def test_the_drafter_is_placed_under_each_schedule(method, settings, facts, placements):
    assert resolve(settings, facts, method=method).placements == placements


class Lenient:
    """A verifier whose text may be another one."""

    is_exact = False

    def decide(self, seen: Verification) -> Verdict:
        return MATCH.decide(seen)


@pytest.mark.parametrize(
    ("method", "settings", "verifier", "writers"),
    [
        ("card", {}, MATCH, ("suffix",)),
        ("card", {"writers": ("beam",)}, MATCH, ()),
        ("card", {"writers": ("beam", "lookup")}, MATCH, ("lookup",)),
        ("card", {"policy": "fixed"}, MATCH, ()),
        ("card", {"verify": "chain"}, MATCH, ()),
        ("card", {}, Lenient(), ()),
        ("sps", {}, MATCH, ()),
    ],
)
def test_copies_join_the_draft_model_under_a_policy_that_weighs_them_unless_writers_are_named(
    method, settings, verifier, writers
):
    facts = replace(TWO_CORES, verifier=verifier)
    assert resolve({"allows_inexact": True, **settings}, facts, method=method).writers == writers


@pytest.mark.parametrize(
    ("method", "settings", "foresees"),
    [
        ("card", {}, True),
        ("suffix", {}, True),
        ("sps", {}, True),
        ("vanilla", {}, False),
        ("vanilla", {"writers": ("grammar",)}, True),
        ("card", {"writers": ("beam", "suffix")}, False),
        ("card", {"writers": ("beam", "grammar")}, True),
    ],
)
def test_grammars_write_unless_a_method_has_no_candidates_or_other_writers_are_named(method, settings, foresees):
    plan = resolve(settings, TWO_CORES, method=method)
    assert (plan.foresees, "grammar" in plan.writers) == (foresees, False)
    assert plan.has_candidates == (method != "vanilla" or foresees)


def test_trees_that_fan_out_have_room_for_all_outcomes():
    narrow, wide = (
        resolve({"growth": growth, "beam_width": 2, **fan_out}, TWO_CORES).draft_tree_rows
        for growth, fan_out in (("layer", {}), ("fan-out", {"fan_out": (9,)}))
    )
    assert narrow == 2 * 24 * 2 + 64
    assert wide == 2 * 24 * 9 * 7 + 64


def test_a_method_of_rounds_drafts_as_long_as_latencies_say_unless_it_is_told():
    known = replace(TWO_CORES, latencies=Told())
    assert resolve({}, TWO_CORES, method="pearl").draft.num_speculative_tokens == 6
    assert resolve({}, known, method="pearl").draft.budget == 7
    assert resolve({"num_speculative_tokens": 3}, known, method="pearl").draft.budget == 2


def test_texts_and_memory_are_bounded_by_what_is_known():
    facts = Facts(context_limit=1000, row_bytes=10, free_bytes=1 << 30)
    plan = resolve({"max_num_seqs": 2}, facts)
    assert (plan.max_model_len, plan.max_kv_bytes) == (1000, 2 * (1000 + plan.target_tree_rows) * 10)
    assert resolve({}, replace(facts, context_limit=None, longest_text=5000)).max_model_len == 5000
    assert resolve({}, Facts()).max_kv_bytes is None
    with pytest.raises(SettingsError, match="at most 1000, the target's own limit"):
        resolve({"max_model_len": 1001}, facts)
    with pytest.raises(SettingsError, match=r"holds 0 rows of KV beside the 5M of its states, but .* \(5M\)"):
        resolve({"kv_cache_memory": "4M"}, replace(facts, state_bytes=5 << 20))
    with pytest.raises(SettingsError, match="kv_cache_memory 1K holds 102 rows"):
        resolve({"kv_cache_memory": "1K"}, facts)


def test_a_text_may_have_the_models_context_as_far_as_memory_holds_its_rows():
    known = Facts(context_limit=32_768, room_tokens=20_480)
    assert resolve({}, known).max_model_len == 20_480
    assert resolve({}, replace(known, room_tokens=1 << 20)).max_model_len == 32_768
    assert resolve({}, replace(known, room_tokens=0)).max_model_len == 4096
    assert resolve({}, replace(known, room_tokens=0, context_limit=1000)).max_model_len == 1000
    assert resolve({"max_model_len": 30_000}, known).max_model_len == 30_000


def test_rows_have_a_quarter_of_the_free_memory_or_what_is_given_for_them():
    plan = resolve({}, Facts())
    quarter = (1 << 28) // 1000 - plan.target_tree_rows
    assert room_tokens(plan, row_bytes=1000, state_bytes=0, free_bytes=1 << 30) == quarter // 1024 * 1024
    assert room_tokens(plan, row_bytes=1000, state_bytes=1 << 27, free_bytes=1 << 30) < quarter // 2
    given = resolve({"kv_cache_memory": "64M"}, Facts())
    fitting = (1 << 26) // 1000 - plan.target_tree_rows
    assert room_tokens(given, row_bytes=1000, state_bytes=0, free_bytes=1 << 30) == fitting // 1024 * 1024
    assert room_tokens(plan, row_bytes=1000, state_bytes=0, free_bytes=0) == 0


@pytest.mark.parametrize(
    ("method", "settings", "facts", "words"),
    [
        ("card", {}, Facts(), "needs a draft model"),
        ("vanilla", {"writers": ("beam",)}, TWO_CORES, "has no draft model"),
        ("pearl", {"writers": ("suffix",)}, TWO_CORES, "is defined by its draft model"),
        ("pearl", {"schedule": "turns"}, TWO_CORES, "schedule is for method card"),
        (
            "card",
            {"schedule": "turns", "placement": "process"},
            TWO_CORES,
            "does not go with a drafter that is process",
        ),
        (
            "card",
            {"placement": "process"},
            replace(TWO_CORES, is_draft_loaded=True),
            "cannot move into another process",
        ),
        (
            "card",
            {"placement": "process"},
            replace(TWO_CORES, wants_states=True),
            "reads the target's hidden states, which do not leave the process: give placement inline or thread",
        ),
        ("card", {"draft_keys": "keys"}, TWO_CORES, "give its draft_address too"),
        *(
            (method, {"draft_address": "tcp://127.0.0.1:1", **more}, TWO_CORES, "are two drafters: leave one of them")
            for method, more in (
                ("pearl", {}),
                ("card", {"policy": "fixed"}),
                ("card", {"schedule": "beside"}),
                ("card", {"draft_device": "cuda"}),
            )
        ),
        ("card", {"cores": (7,)}, TWO_CORES, r"cores must be among the cores of this process \[0, 1\], got 7"),
    ],
)
def test_contradictions_are_refused_before_anything_is_loaded(method, settings, facts, words):
    with pytest.raises(SettingsError, match=words):
        resolve(settings, facts, method=method)


def test_a_quota_limits_threads_and_pins_nothing() -> None:
    """A container may run on all cores of a machine; each would choose the same ones of them."""
    eight = Facts(has_draft=True, cores=tuple(range(8)))

    def shared_out(num_cores: int, **settings: Any) -> tuple[CoreSet, CoreSet, tuple[int, ...]]:
        cores = resolve({"schedule": "beside", **settings}, replace(eight, num_cores=num_cores), method="card").cores
        return cores.beside, cores.alone, cores.draft

    assert shared_out(8) == (CoreSet(tuple(range(7)), 7), CoreSet((), 8), (7,))
    assert shared_out(3) == (CoreSet((), 2), CoreSet((), 3), ())
    assert shared_out(3, draft_threads=2) == (CoreSet((), 1), CoreSet((), 3), ())
    assert shared_out(1) == (CoreSet((), 1), CoreSet((), 1), ())
    assert shared_out(3, threads=5) == (CoreSet((), 5), CoreSet((), 5), ()), "as was asked for"
    assert shared_out(2, cores=(1, 2, 3)) == (CoreSet((1, 2, 3), 1), CoreSet((1, 2, 3), 2), ())
    assert shared_out(3, cores=(1, 2, 3)) == (CoreSet((1, 2, 3), 3), CoreSet((1, 2, 3), 3), (7,))


def test_in_turns_the_target_has_all_cores_whatever_a_drafter_beside_it_would_take() -> None:
    four = Facts(has_draft=True, cores=(0, 1, 2, 3), spare_cores=1)
    plan = resolve({}, four, method="card")
    assert plan.cores_of("beside") == CoreSet((0, 1, 2), 3)
    assert plan.cores_of("turns") == plan.cores_of("off") == CoreSet((), 4)
    alone = resolve({}, replace(four, spare_cores=0), method="card")
    assert alone.cores_of("turns") == CoreSet((), 4)
    assert alone.cores.draft == ()


def test_kv_takes_its_share_of_what_is_free_and_no_more() -> None:
    free = 700 << 20  # as in a container of 1,024 MiB with the weights in it
    facts = replace(TWO_CORES, row_bytes=24 << 10, free_bytes=free)
    kv_bytes = resolve({"max_num_seqs": 64}, facts, method="card").max_kv_bytes
    assert kv_bytes is not None and kv_bytes == free // 4
