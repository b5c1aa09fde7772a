"""Profiles: what was measured comes out again, between the points too; what is wrong is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.errors import PlanError, SettingsError
from card.models.protocol import Extension
from card.models.toy import TableModel
from card.planner.measuring import ProfileRequest, measure_grid, measure_overheads
from card.planner.profile import (
    PassGrid,
    PassTable,
    Setup,
    TrueCost,
    load_profile,
    save_profile,
    shipped_profiles,
)
from tests.planner.making import flat

TOKENS, CONTEXTS, BATCHES = (1, 4, 16), (8, 64), (1, 3)


def price(num_tokens: float, num_sequences: float, num_rows: float) -> float:
    """Return the seconds of a machine whose passes are linear in everything."""
    return 1e-2 + 1e-3 * num_tokens + 5e-4 * num_sequences + 1e-5 * num_rows


def linear_grid() -> PassGrid:
    seconds = tuple(tuple(tuple(price(t * b, b, c * b) for t in TOKENS) for c in CONTEXTS) for b in BATCHES)
    return PassGrid(batches=BATCHES, contexts=CONTEXTS, tokens=TOKENS, seconds=seconds)


class PricedModel(TableModel):
    """A toy model whose passes advance a clock by their price."""

    def __init__(self) -> None:
        super().__init__(1, max_model_len=512)
        self.now = 0.0

    def forward(self, extensions: Sequence[Extension]):
        num_rows = sum(self.num_rows(extension.slot) for extension in extensions)
        self.now += price(sum(len(e.token_ids) for e in extensions), len(extensions), num_rows)
        return super().forward(extensions)


def test_a_measured_grid_holds_what_the_passes_took():
    model = PricedModel()
    request = ProfileRequest(model="toy", tokens=TOKENS, contexts=CONTEXTS, batches=BATCHES, num_runs=2)
    grid = measure_grid(model, request, clock=lambda: model.now)
    expected = linear_grid()
    for ours, theirs in zip(grid.seconds, expected.seconds, strict=True):
        for row, other in zip(ours, theirs, strict=True):
            assert row == pytest.approx(other)
    assert model.num_open == 0


@given(tokens=st.integers(1, 60), sequences=st.integers(1, 6), rows=st.integers(8, 400))
def test_between_and_beyond_its_points_a_linear_machine_is_found_exactly(tokens, sequences, rows):
    found = linear_grid().at(tokens * sequences, sequences, rows * sequences)
    assert found == pytest.approx(price(tokens * sequences, sequences, rows * sequences))


@given(data=st.data(), rows=st.integers(0, 300), sequences=st.integers(1, 5))
def test_more_tokens_never_cost_less(data, rows, sequences):
    seconds = st.floats(0, 1)
    drawn = [[[data.draw(seconds) for _ in TOKENS] for _ in CONTEXTS] for _ in (1,)]
    grid = PassGrid(
        batches=(1,), contexts=CONTEXTS, tokens=TOKENS, seconds=tuple(tuple(tuple(r) for r in p) for p in drawn)
    )
    sizes = [1, 2, 3, 5, 8, 13, 16]
    found = [grid.at(size * sequences, sequences, min(rows, 56) + 8) for size in sizes]
    assert found == pytest.approx(sorted(found))


def test_with_one_size_of_batch_all_tokens_count_as_one_sequence():
    grid = PassGrid(batches=(1,), contexts=(8,), tokens=(1, 9), seconds=(((0.1, 0.9),),))
    assert grid.at(9, 3, 24) == pytest.approx(0.9)


def test_a_setup_without_a_grid_takes_what_the_engine_would_expect():
    setup = flat(1e-2, 1e-3).setups[0]
    assert TrueCost(setup).seconds(5, 2, 160) == setup.pass_cost().seconds(5, 2, 160)
    assert TrueCost(setup, 3.0).seconds(5, 1, 0) == pytest.approx(3 * setup.pass_cost().seconds(5))


def test_the_fastest_setup_that_has_the_cores_is_taken():
    fast, slow = flat(1e-2).setups[0].cost, flat(3e-2).setups[0].cost
    setups = tuple(Setup(threads=num, cost=cost) for num, cost in ((1, slow), (2, fast), (4, slow)))
    profile = msgspec.structs.replace(flat(1.0), setups=setups)
    assert profile.setup(1).threads == 1
    assert profile.setup(4).threads == 2  # more threads than are useful
    assert profile.max_threads == 4
    with pytest.raises(PlanError, match="made with 2, 4 threads, and 1 are left"):
        msgspec.structs.replace(profile, setups=setups[1:]).setup(1)


def test_a_profile_survives_a_file(tmp_path):
    setup = Setup(threads=2, cost=PassTable(points=((1, 0.1), (8, 0.2))), grid=linear_grid())
    profile = msgspec.structs.replace(flat(1e-2), setups=(setup,), tokenizer="abc")
    save_profile(profile, tmp_path / "a.json")
    assert load_profile(tmp_path / "a.json") == profile


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "recording"}, "is no profile but a recording"),
        ({"version": 9}, "version 9, this card reads version 1"),
        ({"setups": []}, "has no setups"),
        ({"source": ""}, "where its figures come from"),
        ({"measured": "yes"}, "broken profile"),
        ({"setups": [{"threads": 1, "cost": {"points": [[1, 0.1]]}}]}, "two or more"),
        ({"setups": [{"threads": 1, "cost": {"points": [[1, 0.1], [2, -1]]}}]}, "0 or more"),
        ({"overheads": {"round_s": -1.0}}, "round_s of the overheads"),
        ({"overheads": {"beside_factor": 0.5}}, "1 or more"),
    ],
)
def test_a_broken_profile_is_refused(tmp_path, change, complaint):
    data = json.loads(msgspec.json.encode(flat(1e-2))) | change
    (tmp_path / "a.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=complaint):
        load_profile(tmp_path / "a.json")


def test_a_grid_with_holes_or_without_order_is_refused():
    with pytest.raises(PlanError, match="has seconds for"):
        PassGrid(batches=(1,), contexts=(8,), tokens=(1, 2), seconds=(((0.1,),),))
    with pytest.raises(PlanError, match="must rise"):
        PassGrid(batches=(1,), contexts=(8,), tokens=(2, 1), seconds=(((0.1, 0.2),),))


def test_what_is_not_there_is_refused_with_what_there_is():
    with pytest.raises(PlanError, match=r"no profile nothing.*llama-3.1-70b-4xh100"):
        load_profile("nothing")


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles_can_be_read_and_say_that_they_are_typed_in(name):
    profile = load_profile(name)
    assert not profile.measured
    assert "arXiv:" in profile.source


def test_the_workers_own_time_is_found_on_any_model():
    found = measure_overheads(TableModel(1, vocab_size=64, max_model_len=512))
    for name in ("round_s", "step_s", "commit_s"):
        assert 0 < getattr(found, name) < 1


def test_a_measurement_refuses_axes_that_do_not_rise():
    with pytest.raises(PlanError, match="rising order"):
        ProfileRequest(model="toy", tokens=(4, 1))
    with pytest.raises(PlanError, match="two sizes"):
        ProfileRequest(model="toy", tokens=(4,))
    assert issubclass(PlanError, Exception) and not issubclass(PlanError, SettingsError)
