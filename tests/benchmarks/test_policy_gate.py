"""The gate of the tuned policy: its matrix is complete, its texts are what they claim, its verdict is strict."""

from __future__ import annotations

import itertools
from dataclasses import astuple

import pytest


@pytest.fixture
def gate(bench):
    return bench["policy_gate"]


def line(over_plain: float, over_best: float, cell: str = "a") -> dict[str, float | str]:
    return {"cell": cell, "over_plain": over_plain, "over_best": over_best}


def test_every_pair_of_properties_occurs_in_some_cell(gate):
    cells = [astuple(cell) for cell in gate.cells() if cell.price in gate.PRICES]
    axes = (gate.KINDS, gate.PRICES, gate.TOKENS, gate.DRAFTS, gate.WRITERS)
    for i, j in itertools.combinations(range(len(axes)), 2):
        assert {(cell[i], cell[j]) for cell in cells} == set(itertools.product(axes[i], axes[j]))


@pytest.mark.parametrize("name", ["good", "poor", "adversarial"])
def test_a_draft_is_right_as_often_as_it_should_be(gate, name):
    draft = gate.DRAFTS[name]
    recording = gate.make_recording("prose", draft)
    assert recording.agreement() == pytest.approx(draft.agreement, abs=0.03)
    assert recording == gate.make_recording("prose", draft), "texts are seeded"


def test_every_second_mixed_text_copies_its_prompt(gate):
    recording = gate.make_recording("mixed", gate.DRAFTS["poor"])
    shares = [len(set(text.token_ids) & set(text.prompt_ids)) / len(set(text.token_ids)) for text in recording.texts]
    assert max(shares[::2]) < 0.15
    assert min(shares[1::2]) > 0.4


def test_a_run_takes_the_same_virtual_time_whenever_it_is_made(gate):
    cell = gate.Cell("prose", "int8 90M", 4, "good", "draft")

    def run():
        scene = gate.make_scene(cell, gate.make_recording(cell.kind, gate.DRAFTS[cell.draft]))
        texts = gate.replayed_texts(scene, gate.plan_method(scene, "card", {}))
        return gate.decode(scene, texts, "card", {}, 800)

    assert run() == run()


@pytest.mark.parametrize("start", ["right", "dear drafting"])
def test_the_tuned_policy_takes_a_good_draft_model_back_that_began_badly_where_costs_are_measured_wrongly(gate, start):
    recording = gate.make_recording("prose", gate.Draft(0.88, 0.88, num_wrong=32))
    scene = gate.make_scene(gate.Cell("prose", gate.AVX2, 1, gate.LATE, "draft", start), recording)
    texts = gate.replayed_texts(scene, gate.plan_method(scene, "card", {}))
    plain, tuned = (gate.decode(scene, texts, method, {}, 500) for method in ("vanilla", "card"))
    assert tuned.schedules["off"] > 0.0, "the beginning speaks against it"
    assert tuned.later > 1.3 * plain.later


def test_the_verdict_names_each_rule_that_is_broken(gate):
    good = [line(1.2, 0.97), line(0.98, 1.0)]
    assert gate.verdict(good, []) == []
    assert gate.verdict(good, good) == []
    (worse,) = gate.verdict(good, [line(1.3, 1.0), line(1.0, 1.0)])
    assert "geometric mean" in worse
    assert gate.verdict([*good, line(0.99, 1.0, "new")], good) == [], "a cell that the other lacks is not compared"
    (behind,) = gate.verdict([line(1.2, 0.94)], [])
    assert "behind best" in behind
    (slower,) = gate.verdict([line(0.96, 1.0)], [])
    assert "behind plain" in slower
