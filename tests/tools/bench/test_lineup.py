"""Rows are asked for by name, preset or writers, and get the hardware that a fair comparison gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from card.config import SamplingParams
from card.config.registry import methods
from card.errors import SettingsError
from card.tools.bench import lineup
from card.tools.bench.datasets import Dataset, DatasetQuestion
from card.tools.bench.lineup import LineupSettings, PairSpec, make_plan
from card.tools.bench.row_names import BASELINE, KNOWN, OURS, PRESETS, names_of, needs_draft, spec_of, uncoupled

SETTINGS = LineupSettings(
    params=SamplingParams(temperature=0.0, seed=0, max_tokens=8).resolved(), cores=(0, 1, 5), dtype="float32"
)
DATA = (Dataset("x", "y", (DatasetQuestion(("one",)),)),)
TRAINED = ("pard", "ctc")


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        (["card"], [BASELINE, "card"]),
        (["ssd", "vanilla", "card-tree"], ["vanilla", BASELINE, "card-tree", "ssd"]),
        (["sps"], [BASELINE, "sps", "sps-all-cores"]),
        (["transformers"], [BASELINE, *PRESETS["transformers"]]),
        (["learned"], [BASELINE, "pard", "pard-all-cores", "ctc", "specbranch"]),
        (["suffix", "recycling"], [BASELINE, "recycling", "suffix"]),
        (["ouroboros"], [BASELINE, "ouroboros-all-cores"]),
        (["card+suffix"], [BASELINE, "card+suffix"]),
        (["card+beam", "suffix", "sps-all-cores"], [BASELINE, "sps-all-cores", "card+beam+suffix"]),
        (["suffix", "card+beam+lookup", "card+beam+lookup"], [BASELINE, "suffix", "card+beam+lookup"]),
        (["all"], [*(name for name in OURS if spec_of(name).method not in TRAINED), *PRESETS["transformers"]]),
    ],
)
def test_rows_come_with_the_baseline_and_with_their_twins_on_all_cores(asked: Sequence[str], rows: list[str]) -> None:
    assert names_of(asked) == rows


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("magic", r"unknown method 'magic'; known: all, .*rivals.*pearl.*card\+WRITERS"),
        ("card+magic", "unknown writer"),
        ("arbitrage", "arbitrage uses several engines for an answer; use card generate --method arbitrage"),
    ],
)
def test_an_unknown_row_or_writer_is_refused(name: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        names_of(["card", name])


def test_every_method_of_the_library_has_a_row() -> None:
    assert {spec.method for spec in OURS.values()} == methods().keys()


def test_uncoupled_twins_stand_beside_the_rows_that_have_one() -> None:
    assert uncoupled(names_of(["sps", "card"])) == [
        BASELINE,
        "sps",
        "sps-all-cores",
        "card",
        "sps-uncoupled",
        "sps-all-cores-uncoupled",
    ]


def test_what_runs_beside_a_drafter_leaves_it_the_last_core_and_all_else_has_the_cores_of_its_name() -> None:
    target, every = (0, 1), (0, 1, 5)
    expected = {
        "vanilla": (target, 2),
        BASELINE: (every, 3),
        "sps": (target, 2),
        "sps-all-cores": (every, 3),
        "sps-all-cores-uncoupled": (every, 3),
        "card-tree": (every, 2),  # the drafter's core included
        "pearl": (every, 2),
        "card": (every, None),
        "suffix": (every, None),
        "card+beam+suffix": (every, None),
        "transformers": (target, 2),
        "transformers-assisted-all-cores": (every, 3),
    }
    for name, (cores, threads) in expected.items():
        facts = SETTINGS.facts_of(name)
        assert (facts.name, facts.cores, facts.threads) == (name, cores, threads)
    assert SETTINGS.cores_of("card-tree") == target and SETTINGS.cores_of("pearl") == target


def test_only_rows_that_draw_the_same_noise_are_compared_when_text_is_sampled() -> None:
    sampled = replace(SETTINGS, params=SamplingParams(temperature=1.0, seed=0).resolved())
    for name in KNOWN:
        assert SETTINGS.facts_of(name).is_comparable
        assert sampled.facts_of(name).is_comparable is not name.startswith("transformers")


def test_texts_of_transformers_are_compared_where_both_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, why_not, is_comparable in (
        ("float32", None, True),
        ("bfloat16", None, False),  # our activations have more bits
        ("bfloat16", "no machine code here", True),
        ("int8", None, False),
    ):
        monkeypatch.setattr(lineup, "why_not_int8", lambda why_not=why_not: why_not)
        settings = replace(SETTINGS, dtype=dtype)
        assert settings.facts_of("transformers").is_comparable is is_comparable
        assert settings.facts_of("card").is_comparable


def test_writers_of_a_row_are_those_of_its_name() -> None:
    assert spec_of("card+beam+suffix").engine == {"writers": ("beam", "suffix")}
    assert needs_draft("card+beam+suffix") and not needs_draft("card+suffix")
    assert needs_draft("transformers-assisted") and not needs_draft("transformers")


def test_draft_settings_reach_the_rows_that_take_them_and_no_others() -> None:
    settings = LineupSettings(params=SETTINGS.params, cores=(0, 1), draft={"beam_width": 3})
    with_width = {name for name in OURS if settings.facts_of(name).settings.get("beam_width") == 3}
    assert with_width == {"card-chain", "card-tree", "card-best-first", "card-turns-all-cores"}


def test_a_vocabulary_for_drafting_reaches_our_rows_with_a_draft_model_and_no_others() -> None:
    settings = LineupSettings(params=SETTINGS.params, cores=(0, 1), draft_vocab=200)
    told = {name for name in OURS if settings.facts_of(name).settings.get("draft_vocab") == 200}
    assert told == {name for name in OURS if needs_draft(name)}
    assert {"sps", "card"} <= told
    assert "vanilla" not in told


def test_pairs_that_cannot_run_a_row_or_share_a_name_are_refused() -> None:
    pair = PairSpec(target="some/t", draft="d", target_cost="90M")
    assert pair.name == "t+d@90M"
    plan = make_plan(["vanilla-all-cores"], [pair, PairSpec(target="t", draft=None)], SETTINGS, DATA)
    assert list(plan.pairs) == ["t+d@90M", "t"] and plan.baseline == BASELINE
    with pytest.raises(SettingsError, match="row card needs a draft model, and pair t has none"):
        make_plan([BASELINE, "card"], [PairSpec(target="t", draft=None)], SETTINGS, DATA)
    with pytest.raises(SettingsError, match="row ctc needs a head of card train ctc: give --ctc FILE"):
        make_plan([BASELINE, "ctc"], [pair], SETTINGS, DATA)
    assert make_plan([BASELINE, "ctc"], [pair], replace(SETTINGS, own={"ctc": "head"}), DATA).rows
    with pytest.raises(SettingsError, match=r"row card\+store needs a file: give suffix_store"):
        make_plan([BASELINE, "card+store"], [pair], SETTINGS, DATA)
    assert make_plan([BASELINE, "card+store"], [pair], replace(SETTINGS, own={"suffix_store": "f"}), DATA).rows
    assert make_plan([BASELINE, "card+recycling"], [pair], SETTINGS, DATA).rows
    with pytest.raises(SettingsError, match="two pairs are named"):
        make_plan([BASELINE], [pair, pair], SETTINGS, DATA)
