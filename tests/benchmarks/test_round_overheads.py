"""Python around passes: rounds are told from what is in them, and what is charged adds up to what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tools.planner.making import toy_models

PLAIN_US, REQUEST_US, DRAFTED_US, VERIFIED_US, LAYER_US, NODE_US = 100.0, 10.0, 50.0, 20.0, 40.0, 5.0
OFF_US, OFF_REQUEST_US, TURNS_US, TURNS_REQUEST_US, ASKED_US = 30.0, 3.0, 60.0, 6.0, 70.0


@pytest.fixture
def script(bench):
    return bench["round_overheads"]


@pytest.fixture
def pair(script):
    target, draft = toy_models(0.9)
    return script.Pair(target, draft, [tuple((7 * i + 3 * j) % 40 for j in range(9)) for i in range(4)])


@pytest.mark.parametrize("name", ["plain", "card, off", "sps 4", "card, turns", "suffix"])
def test_every_run_of_a_row_calls_as_many_functions(script, pair, name):
    _, first, second = (  # the very first fills what the process keeps, such as the declarations of settings
        [
            (one.calls, one.layers, one.candidates)
            for one in script.Stage(script.ROWS[name], pair, 2).rounds(counts_calls=True)
        ]
        for _ in range(3)
    )
    assert first == second
    assert len(first) > 3
    assert all(calls > 0 for calls, _, _ in first)


def test_a_round_is_told_with_its_layers_and_candidates(script, pair):
    of = {name: list(script.Stage(script.ROWS[name], pair, 2).rounds()) for name in ("plain", "card, off", "sps 4")}
    assert not any(one.layers or one.candidates for one in of["plain"])
    assert max(one.layers for one in of["sps 4"]) == 4
    assert max(one.verifying for one in of["sps 4"]) == 2
    assert max(one.candidates for one in of["sps 4"]) == 8
    drafting = [one for one in of["card, off"] if one.layers]
    assert len(drafting) < len(of["card, off"]) / 4, "a drafter so dear is hardly ever asked"


def figures(script: Any, *, off_factor: float = 1.0, tuned_layer_us: float = 0.0) -> Any:
    """Return what is found where each part of a round takes what the constants say."""
    found = []
    for n in (1, 4, 16, 32):
        plain = PLAIN_US + (n - 1) * REQUEST_US
        off = off_factor * (plain + OFF_US + (n - 1) * OFF_REQUEST_US)
        drafted = plain + DRAFTED_US + n * VERIFIED_US
        layer = LAYER_US + n * NODE_US
        turns = drafted + (off - plain) + TURNS_US + (n - 1) * TURNS_REQUEST_US
        asked = plain + n * (ASKED_US * (13 + 3) / (16 + 3)) + n * VERIFIED_US

        def around(row: str, us: float, n: int = n, **more: float) -> Any:
            known = {"layers": 0.0, "verifying": 0.0, "candidates": 0.0, "calls": 1.0, "layer_us": 0.0, **more}
            return script.Around(row=row, at_once=n, rounds=9, quartile_us=us, median_us=us, **known)

        found += [around("plain", plain), around("card, off", off)]
        found += [around(f"sps {k}", drafted + k * layer, layers=k) for k in script.LENGTHS]
        own = layer + tuned_layer_us
        found.append(around("card, turns", turns + 5 * own, layers=5.0, layer_us=own))
        found.append(around("suffix, fixed", asked, verifying=n, candidates=13.0))
    return script.Figures(found)


def test_what_is_charged_adds_up_to_what_was_measured(script):
    charged = figures(script, tuned_layer_us=8.0).overheads()
    told = {name: 1e6 * getattr(charged, name) for name in charged.__struct_fields__ if name.endswith("_s")}
    assert told["round_s"] == pytest.approx(PLAIN_US)
    assert told["request_s"] == pytest.approx(REQUEST_US)
    assert (told["drafted_s"], told["drafted_request_s"]) == pytest.approx((DRAFTED_US, VERIFIED_US))
    assert (told["step_s"], told["node_s"]) == pytest.approx((LAYER_US, NODE_US))
    assert (told["tuned_s"], told["tuned_request_s"]) == pytest.approx((OFF_US, OFF_REQUEST_US))
    assert (told["tuned_drafted_s"], told["tuned_drafted_request_s"]) == pytest.approx((TURNS_US, TURNS_REQUEST_US))
    assert (told["tuned_step_s"], told["tuned_node_s"]) == pytest.approx((8.0, 0.0), abs=0.02)
    assert 1e6 * charged.by_writer["suffix"] == pytest.approx(ASKED_US)


def test_marks_name_what_is_dearer_than_plain_decoding_and_sequential_speculation(script):
    told = figures(script, tuned_layer_us=8.0).marks()
    assert any(mark.startswith("a round of off takes 130 us with 1 at once, 1.30 times") for mark in told)
    assert any("a layer of card" in mark and "that of sps" in mark for mark in told)
    assert not any("a layer of card" in mark for mark in figures(script).marks())
