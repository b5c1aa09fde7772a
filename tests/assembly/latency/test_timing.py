"""The cost of a pass: what is measured comes back, noise and small models included, and the model is left as it was."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.assembly.latency.timing import measure_pass_cost, single_pass_takes
from card.errors import CapacityError, SettingsError
from card.kernels.number_types import Floats
from card.machine.expert_cost import ExpertUse
from card.machine.pass_cost import PassCost
from card.models.protocol import Extension, Routed
from tests.assembly.latency.timed_model import TimedModel
from tests.examples import settings
from tests.routed import RoutedTable


def bent(num_tokens: int, num_sequences: int, num_rows: int) -> float:
    """Cheap up to 16 tokens, dearer beyond; further sequences and rows cost a little."""
    tokens_s = 1e-4 * min(num_tokens, 16) + 5e-4 * max(num_tokens - 16, 0)
    return 0.01 + tokens_s + 2e-4 * (num_sequences - 1) + 1e-6 * num_rows


@st.composite
def costs(draw: st.DrawFn) -> PassCost:
    starts = sorted(draw(st.sets(st.integers(1, 80), min_size=2, max_size=6)))
    return PassCost(
        tuple((start, draw(st.floats(0, 10))) for start in starts), draw(st.floats(0, 1)), draw(st.floats(0, 1))
    )


# ---- PassCost -------------------------------------------------------------------------------------------------------


def test_a_cost_passes_through_its_points_and_is_linear_between_and_beyond_them() -> None:
    cost = PassCost(((1, 1.0), (4, 4.0), (8, 6.0)))
    assert [cost.seconds(n) for n in (1, 2, 4, 6, 8, 12)] == pytest.approx([1, 2, 4, 5, 6, 8])


def test_a_pass_below_the_first_point_takes_as_long_as_there_and_one_without_tokens_takes_nothing() -> None:
    cost = PassCost(((4, 1.0), (8, 2.0)), per_sequence_s=5.0)
    assert cost.seconds(2) == 1.0
    assert cost.seconds(0, num_sequences=3, num_context_rows=9) == 0.0


def test_further_sequences_and_rows_of_context_add_their_price() -> None:
    cost = PassCost(((1, 1.0), (2, 2.0)), per_sequence_s=0.25, per_context_row_s=0.01)
    assert cost.seconds(2, num_sequences=3, num_context_rows=50) == pytest.approx(2.0 + 0.5 + 0.5)


@given(cost=costs(), num_tokens=st.integers(0, 200))
@settings(max_examples=40)
def test_more_tokens_never_take_less_time_even_where_the_points_fall(cost: PassCost, num_tokens: int) -> None:
    assert cost.seconds(num_tokens) <= cost.seconds(num_tokens + 1)


@given(cost=costs(), factor=st.floats(0.1, 10), num_tokens=st.integers(1, 200))
@settings(max_examples=40)
def test_a_scaled_cost_is_that_factor_times_the_cost_everywhere(cost: PassCost, factor: float, num_tokens: int) -> None:
    assert cost.scaled(factor).seconds(num_tokens, 3, 70) == pytest.approx(factor * cost.seconds(num_tokens, 3, 70))


@pytest.mark.parametrize(
    ("points", "per_sequence_s", "message"),
    [
        (((1, 1.0),), 0.0, "two or more"),
        (((8, 1.0), (1, 2.0)), 0.0, "rising"),
        (((0, 1.0), (1, 2.0)), 0.0, "from 1 on"),
        (((1, 1.0), (2, float("nan"))), 0.0, "finite"),
        (((1, 1.0), (2, 2.0)), -1.0, "0 or more"),
    ],
)
def test_impossible_costs_are_refused(
    points: tuple[tuple[int, float], ...], per_sequence_s: float, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        PassCost(points, per_sequence_s)


# ---- measuring ------------------------------------------------------------------------------------------------------


def test_the_measured_cost_is_that_of_the_model() -> None:
    model = TimedModel(bent, max_model_len=600)
    cost = measure_pass_cost(model, clock=model.clock, time_limit_s=100.0)
    for size in (1, 2, 8, 12, 16, 32, 64, 100):
        assert cost.seconds(size) == pytest.approx(bent(size, 1, 8))
    assert cost.seconds(8, num_sequences=8) == pytest.approx(bent(8, 8, 64), rel=1e-3)
    assert cost.seconds(4, num_sequences=4, num_context_rows=2000) == pytest.approx(bent(4, 4, 2000), rel=1e-2)
    assert cost.per_context_row_s == pytest.approx(1e-6)


def test_runs_that_something_else_slowed_down_do_not_count() -> None:
    num_passes = 0

    def disturbed(num_tokens: int, num_sequences: int, num_rows: int) -> float:
        nonlocal num_passes
        num_passes += 1
        return bent(num_tokens, num_sequences, num_rows) * (4.0 if num_passes % 4 else 1.0)

    model = TimedModel(disturbed, max_model_len=100)
    cost = measure_pass_cost(model, clock=model.clock, max_sequences=1, time_limit_s=1000.0)
    assert cost.seconds(1) == pytest.approx(bent(1, 1, 8))
    assert cost.seconds(64) == pytest.approx(bent(64, 1, 8))


def test_the_first_run_of_a_pass_is_not_counted_even_if_it_seems_fast() -> None:
    seen: set[tuple[int, int, int]] = set()

    def slower_later(*shape: int) -> float:
        is_new, _ = shape not in seen, seen.add(shape)
        return 0.01 if is_new else 0.02

    model = TimedModel(slower_later, max_model_len=100)
    cost = measure_pass_cost(model, clock=model.clock, time_limit_s=100.0)
    assert [cost.seconds(1), cost.seconds(8)] == pytest.approx([0.02, 0.02])


@pytest.mark.parametrize("max_model_len", [2, 3, 4, 5])
def test_a_context_of_two_tokens_is_enough_to_measure(max_model_len: int) -> None:
    model = TimedModel(bent, max_model_len=max_model_len)
    cost = measure_pass_cost(model, clock=model.clock, time_limit_s=100.0)
    assert len(cost.points) >= 2 and cost.seconds(1) > 0.0


def test_a_slow_model_is_timed_up_to_the_first_row_of_a_second_tile_only() -> None:
    model = TimedModel(lambda tokens, sequences, rows: 1.0 + 0.125 * tokens + (tokens > 16))
    cost = measure_pass_cost(model, clock=model.clock, time_limit_s=1.5)
    assert cost == PassCost(((1, 1.125), (16, 3.0), (17, 4.125), (18, 4.25))), "8 is on the line from 1 to 16"
    assert model.num_forward_passes == 9  # the prefix, and two of each


def test_a_pass_that_ran_to_warm_up_is_timed_at_once() -> None:
    model = TimedModel(lambda tokens, sequences, rows: 0.01 + 1.0 * (tokens > 8))
    measure_pass_cost(model, clock=model.clock, time_limit_s=0.25)
    assert model.num_forward_passes == 9  # the prefix, 17 to warm up, two of 1, 8 and 16, one of 17


def test_a_few_tokens_are_timed_before_many_as_one_request_has_few() -> None:
    model = TimedModel(lambda tokens, sequences, rows: 0.1 + 0.01 * max(0, tokens - 3), max_model_len=100)
    cost = measure_pass_cost(model, clock=model.clock, max_sequences=1, time_limit_s=1.8)
    assert [num_tokens for num_tokens, _ in cost.points] == [1, 4, 16, 17, 18]
    assert cost.seconds(4) == pytest.approx(0.11), "a line from 1 to 8 would say 0.12"


def test_passes_of_every_size_that_a_round_may_have_run_before_any_counts() -> None:
    sizes: list[int] = []

    def noted(num_tokens: int, num_sequences: int, num_rows: int) -> float:
        sizes.append(num_tokens)
        return 0.01

    model = TimedModel(noted, max_model_len=100)
    measure_pass_cost(model, clock=model.clock, time_limit_s=100.0)
    assert set(sizes[1:18]) == set(range(1, 18))


@given(pass_s=st.floats(0.001, 0.5), time_limit_s=st.floats(0.1, 5.0))
@settings(max_examples=30)
def test_measuring_ends_soon_after_its_time_limit(pass_s: float, time_limit_s: float) -> None:
    model = TimedModel(lambda tokens, sequences, rows: pass_s)
    measure_pass_cost(model, clock=model.clock, time_limit_s=time_limit_s)
    assert model.now_s <= time_limit_s / 2 + max(time_limit_s, 8 * pass_s) + 5 * pass_s


@pytest.mark.parametrize("max_slots", [1, 2, 5])
def test_a_model_with_few_slots_is_measured_as_far_as_they_go(max_slots: int) -> None:
    model = TimedModel(bent, max_slots=max_slots)
    cost = measure_pass_cost(model, clock=model.clock, time_limit_s=100.0)
    expected_s = 2e-4 if max_slots > 1 else 0.0
    assert cost.per_sequence_s == pytest.approx(expected_s, rel=0.1)


@pytest.mark.parametrize("max_model_len", [3, 8, 20, 40])
def test_a_model_of_short_context_is_measured_within_it(max_model_len: int) -> None:
    model = TimedModel(bent, max_model_len=max_model_len, num_tree_rows=0)
    cost = measure_pass_cost(model, clock=model.clock, time_limit_s=100.0)
    assert 2 <= cost.points[-1][0] < max_model_len
    assert cost.seconds(2) == pytest.approx(bent(2, 1, 4), rel=1e-3)


def test_more_tokens_are_timed_on_request() -> None:
    model = TimedModel(bent, max_model_len=600)
    cost = measure_pass_cost(model, clock=model.clock, max_tokens=300, time_limit_s=100.0)
    assert (cost.points[0][0], cost.points[-1][0]) == (1, 300)
    assert cost.seconds(256) == pytest.approx(bent(256, 1, 0), rel=1e-3)


def test_a_disturbed_pass_does_not_make_later_tokens_seem_free() -> None:
    def disturbed(num_tokens: int, num_sequences: int, num_rows: int) -> float:
        return bent(num_tokens, num_sequences, num_rows) * (30.0 if num_tokens == 32 else 1.0)

    model = TimedModel(disturbed, max_model_len=200)
    cost = measure_pass_cost(model, clock=model.clock, max_tokens=64, time_limit_s=0.2)
    assert all(cost.seconds(num_tokens + 1) > cost.seconds(num_tokens) for num_tokens in (16, 32, 63, 64, 100))


def test_all_sequences_are_closed_after_measuring() -> None:
    model = TimedModel(bent)
    kept = model.open()
    measure_pass_cost(model, clock=model.clock)
    assert model.num_open == 1
    model.close(kept)


def test_all_sequences_are_closed_when_measuring_fails() -> None:
    def failing(num_tokens: int, num_sequences: int, num_rows: int) -> float:
        if num_sequences > 1:
            raise CapacityError("no memory for this pass; close something")
        return 0.01

    model = TimedModel(failing)
    with pytest.raises(CapacityError, match="no memory for this pass"):
        measure_pass_cost(model, clock=model.clock, time_limit_s=100.0)
    assert model.num_open == 0


def test_a_model_of_one_token_of_context_cannot_be_measured() -> None:
    model = TimedModel(bent, max_model_len=1)
    with pytest.raises(SettingsError, match="at least two sizes"):
        measure_pass_cost(model, clock=model.clock)


# ---- tokens and experts ---------------------------------------------------------------------------------------------


class Noting(RoutedTable):
    """A model that notes the tokens of its passes."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, vocab_size=5000, max_model_len=200)
        self.passes: list[list[int]] = []

    def forward(self, extensions: Sequence[Extension]) -> list[Floats]:
        self.passes.append([token_id for one in extensions for token_id in one.token_ids])
        return super().forward(extensions)


def test_rows_are_of_different_tokens_and_of_the_same_ones_in_each_measurement() -> None:
    models = [Noting(seed) for seed in (1, 2)]
    for model in models:
        model.seconds_of = (1e-2, 0.0, 0.0)
        measure_pass_cost(model, clock=model.clock, time_limit_s=100.0)
    assert models[0].passes == models[1].passes
    assert all(len(set(token_ids)) > 0.9 * len(token_ids) for token_ids in models[0].passes if len(token_ids) <= 64)


def tiled(num_tokens: int, num_sequences: int, num_rows: int) -> float:
    """Return the seconds of a pass whose rows are multiplied in tiles of 16."""
    return 5e-3 + 4e-3 * -(-num_tokens // 16) + 1e-4 * num_tokens


def test_the_first_row_of_another_tile_is_known_to_cost_more_than_the_next_ones() -> None:
    model = TimedModel(tiled, max_model_len=100)
    cost = measure_pass_cost(model, clock=model.clock, max_sequences=1, time_limit_s=1000.0)
    first, next_ = cost.seconds(17) - cost.seconds(16), cost.seconds(18) - cost.seconds(17)
    assert first == pytest.approx(4.1e-3) and next_ < 0.1 * first
    assert cost.seconds(33) - cost.seconds(32) == pytest.approx(4.1e-3)
    assert [cost.seconds(size) for size in (1, 16, 32, 64)] == pytest.approx([tiled(n, 1, 8) for n in (1, 16, 32, 64)])


class Dense(TimedModel):
    """A model that can say which experts it read, as our own runner can, and has none."""

    experts = None
    experts_read = 0


def test_a_model_without_experts_has_its_steps_measured_whatever_its_runner_could_count() -> None:
    model = Dense(tiled, max_model_len=100)
    assert isinstance(model, Routed)
    cost = measure_pass_cost(model, clock=model.clock, max_sequences=1, time_limit_s=1000.0)
    assert cost.seconds(17) - cost.seconds(16) == pytest.approx(4.1e-3)


def test_rows_behind_the_last_measured_step_cost_no_further_step_each() -> None:
    model = TimedModel(lambda size, *_: 0.5 + 0.4 * -(-size // 16) + 0.04 * size, max_model_len=100)
    cost = measure_pass_cost(model, clock=model.clock, time_limit_s=0.25)
    assert cost.seconds(17) - cost.seconds(16) == pytest.approx(0.44)
    assert cost.seconds(32) - cost.seconds(17) == pytest.approx(15 * 0.04)


def test_a_step_that_something_else_made_is_no_higher_than_the_next_tile() -> None:
    def disturbed(num_tokens: int, num_sequences: int, num_rows: int) -> float:
        return tiled(num_tokens, num_sequences, num_rows) * (9.0 if num_tokens == 17 else 1.0)

    model = TimedModel(disturbed, max_model_len=100)
    cost = measure_pass_cost(model, clock=model.clock, max_sequences=1, time_limit_s=1000.0)
    assert cost.seconds(17) <= tiled(32, 1, 8)


def test_a_pass_that_is_concave_in_its_rows_is_measured_as_it_is() -> None:
    model = RoutedTable(1, vocab_size=5000, max_model_len=600)
    model.seconds_of = pass_s, expert_s, row_s = 5e-3, 4e-4, 1e-4
    cost = measure_pass_cost(model, clock=model.clock, time_limit_s=100.0)
    assert cost.experts is not None
    assert (cost.experts.num_experts, cost.experts.per_row) == (96, 12)
    read = dict(cost.experts.counted)
    assert sorted(read) == [1, 2, 4, 8, 16, 32, 64]
    for size, num_read in read.items():
        assert cost.seconds(size, num_experts=num_read) == pytest.approx(pass_s + expert_s * num_read + row_s * size)
        assert cost.seconds(size) == pytest.approx(cost.seconds(size, num_experts=num_read), rel=0.1)
    line = cost.seconds(1) + 7 / 63 * (cost.seconds(64) - cost.seconds(1))
    assert cost.seconds(8) > 1.5 * line, "a convex hull would say the line"
    assert cost.per_sequence_s == pytest.approx(0.0, abs=1e-6), "sequences of one token bring experts, and nothing else"


def test_a_slow_model_with_experts_is_priced_by_four_passes() -> None:
    model = RoutedTable(1, vocab_size=5000)
    model.seconds_of = 0.1, 0.02, 0.0
    cost = measure_pass_cost(model, clock=model.clock, time_limit_s=0.5)
    assert [size for size, _ in cost.points] == [1, 4, 8, 16]
    assert cost.seconds(4) == pytest.approx(0.1 + 0.02 * ExpertUse(cost.experts).expected(4))


def test_experts_that_a_model_does_not_count_are_taken_to_be_chosen_independently() -> None:
    model = Uncounted(1, vocab_size=5000)
    model.seconds_of = 1e-2, 1e-3, 0.0
    cost = measure_pass_cost(model, clock=model.clock, time_limit_s=100.0)
    assert cost.experts is not None and cost.experts.counted == ()
    assert cost.seconds(8) > cost.seconds(1) + 7 / 63 * (cost.seconds(64) - cost.seconds(1))


class Uncounted(RoutedTable):
    """A model that says that it has experts, and not which it reads."""

    def forward(self, extensions: Sequence[Extension]) -> list[Floats]:
        logits = super().forward(extensions)
        self.experts_read = 0
        return logits


# ---- whether it is still the same machine ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "takes", "num_passes"),
    [
        ([9.0, 1.0, 9.0, 9.0], True, 2),  # the first one is not timed; the first that fits ends it
        ([1.0, 9.0, 9.0, 1.0], True, 4),  # a slow moment is waited out
        ([1.0, 9.0, 9.0, 9.0], False, 4),
        ([1.0, 0.1, 0.1, 0.1], False, 4),
    ],
)
def test_a_pass_is_timed_until_one_takes_what_is_known(seconds: list[float], takes: bool, num_passes: int) -> None:
    left = iter(seconds)
    model = TimedModel(lambda *_: next(left))
    assert single_pass_takes(model, 0.5, 1.5, clock=model.clock, num_runs=3) is takes
    assert len(list(left)) == len(seconds) - num_passes
