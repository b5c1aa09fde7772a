"""SpecBranch: its rounds are as long as the target's pass, and it branches where it is told to."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from card.config.registry import find_method
from card.engine.engine import Engine
from card.engine.target import TargetWorker
from tests.assembly.test_plan import OF_ROUNDS, length_of
from tests.decoding import fake, make_request, plain, run_all, toy_draft, toy_target
from tests.engine.test_methods import agreements, faults, sampling, shapes
from tests.examples import settings
from tests.watching import Notes, watched


def test_target_and_drafter_meet_after_each_block() -> None:
    assert find_method("specbranch").name in OF_ROUNDS


def test_wide_passes_make_short_rounds() -> None:
    length = length_of("specbranch", beam_width=6, ratio=12.0, per_token_s=0.1)
    assert length == 9, "half of the passes run six: 1.0 * 4 + 1.5 * 5 = 11.5"


@settings(max_examples=40)
@given(
    seed=st.integers(0, 99),
    agreement=agreements,
    params=sampling,
    shape=shapes,
    faults=faults,
    hints=st.lists(st.sampled_from([0.0, 0.2, 0.6, 0.9, 1.0]), min_size=1, max_size=5),
)
def test_wherever_specbranch_is_told_to_branch_the_text_is_that_of_plain_decoding(
    seed, agreement, params, shape, faults, hints
):
    target = toy_target(seed)
    told: list[float] = []

    def tell() -> float:
        told.append(hints[len(told) % len(hints)])
        return told[-1]

    worker = TargetWorker(target, clock=time.perf_counter, watchers=watched(target, Notes("last", tell)))
    engine = Engine(worker, fake(toy_draft(target, agreement), faults))
    text = run_all(engine, {0: [make_request(7, method="specbranch", params=params, draft=shape)]})[7]
    assert text == plain(toy_target(seed), params=params)
    assert told, "it is asked after each pass"
