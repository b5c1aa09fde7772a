"""Places at the edge: the same seed draws the same one, and what cannot be is one clear line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from card.errors import PlanError
from card.tools.planner.edge.scenario import (
    NARROW,
    PLACES,
    Device,
    EdgeServer,
    Scenario,
    ServerSpread,
    check_scenario,
    draw_scenario,
    in_reach,
    load_scenario,
    snr,
    spread_out,
)
from tests.tools.planner.edge.places import small


def _near(**changes: float) -> dict[str, Any]:
    return {"devices": (msgspec.structs.replace(NEAR, **changes),)}


NEAR, SERVER = Device(x_m=0, y_m=30), EdgeServer(x_m=0, y_m=0)


def test_the_same_seed_draws_the_same_place_and_every_device_reaches_a_server():
    assert draw_scenario(30, seed=1) == draw_scenario(30, seed=1) != draw_scenario(30, seed=2)
    for seed in range(20):
        assert all(in_reach(draw_scenario(30, seed=seed, place=place)).any(axis=1).all() for place in PLACES)
    assert [len(draw_scenario(count).servers) for count in (1, 30, 180)] == [4, 4, 20]


def test_a_nearer_device_with_more_power_has_a_better_signal():
    far = msgspec.structs.replace(NEAR, y_m=300)
    loud = msgspec.structs.replace(far, tx_dbm=far.tx_dbm + 10)
    near_snr, far_snr = (snr(Scenario(devices=(one,), servers=(SERVER,)))[0, 0] for one in (NEAR, far))
    assert near_snr == pytest.approx(far_snr * 10**3.76)
    assert snr(Scenario(devices=(loud,), servers=(SERVER,)))[0, 0] == pytest.approx(10 * far_snr)


def test_servers_that_are_spread_out_differ_within_the_factors_and_nothing_else_changes():
    drawn = draw_scenario(30, num_servers=50, seed=3)
    spread = ServerSpread(compute=8.0, bandwidth_hz=1e5, bandwidth=4.0)
    made = spread_out(drawn, spread)
    speeds, widths = ([getattr(one, name) for one in made.servers] for name in ("speed", "bandwidth_hz"))
    assert 1 / 8 <= min(speeds) < 1 / 4 and 4 < max(speeds) <= 8
    assert 0.25e5 <= min(widths) < 0.5e5 and 2e5 < max(widths) <= 4e5
    assert made.devices == drawn.devices and spread_out(drawn, spread) == made
    far = spread_out(drawn, ServerSpread(compute=1.0, bandwidth_hz=10e6, bandwidth=1.0, scale=3.0))
    assert [one.x_m for one in far.devices] == [3 * one.x_m for one in drawn.devices]
    assert {(one.speed, one.bandwidth_hz) for one in far.servers} == {(1.0, 10e6)}


def test_a_place_is_drawn_by_its_name():
    assert draw_scenario(9, seed=2, place="narrow") == spread_out(draw_scenario(9, seed=2), NARROW)
    with pytest.raises(PlanError, match="one of even, narrow, got 'wide'"):
        draw_scenario(9, place="wide")


def test_a_file_is_read_as_it_was_written(tmp_path: Path):
    path = tmp_path / "place.json"
    path.write_bytes(msgspec.json.encode(small()))
    assert load_scenario(path) == small()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": ()}, "needs devices and servers, got 0 and 3"),
        (
            _near(x_m=9e6),
            "device 0 has no server in reach: its best signal is -",
        ),
        (
            _near(tx_dbm=math.nan),
            "tx_dbm of device 0 must be a finite number, got",
        ),
        (_near(speed=0.0), "speed of device 0 must be above 0"),
        (_near(battery=2.0), "battery of device 0"),
        (
            {"servers": (msgspec.structs.replace(SERVER, bandwidth_hz=-1.0),)},
            "bandwidth_hz of server 0",
        ),
        ({"acceptance": 1.5}, "acceptance must be from 0 to 1, got 1.5"),
        ({"hit_rate": math.nan}, "hit_rate must be from 0 to 1, got nan"),
        ({"kept_share": -0.1}, "kept_share must be from 0 to 1, got -0.1"),
        ({"lead": 0}, "lead must be 1 or more"),
        ({"one_way_s": math.inf}, "one_way_s must be finite"),
    ],
)
def test_what_cannot_be_is_one_line(changes: dict[str, Any], words: str):
    with pytest.raises(PlanError, match=words) as raised:
        check_scenario(small(**changes))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("count", [(0, 1), (1, 0)])
def test_a_place_without_devices_or_servers_is_not_drawn(count: tuple[int, int]):
    with pytest.raises(PlanError, match="needs 1 device and 1 server or more"):
        draw_scenario(count[0], num_servers=count[1])
