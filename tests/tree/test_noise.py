"""Noise of tokens is a pure function of seed, position and token, and what is drawn quickly finds the same winner."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.kernels import gumbel
from card.models.candidate_scorer import CandidateScorer
from card.tree.noise import GumbelNoise
from card.tree.sampling import Sampler
from tests.reaching_in import num_kept
from tests.sampling_laws import PLAIN, seeds


def slow_philox(seed: int, position: int, count: int) -> list[int]:
    """Return the first words of Philox 4x64 with ten rounds. Source: Salmon et al. 2011, section 3."""
    words: list[int] = []
    for block in range(1, -(-count // 4) + 1):
        c0, c1, c2, c3 = block, 0, position, 0
        k0, k1 = seed, 0
        for _ in range(10):
            high0, low0 = divmod(0xD2E7470EE14C6C93 * c0, 2**64)
            high1, low1 = divmod(0xCA5A826395121157 * c2, 2**64)
            c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) % 2**64, (k1 + 0xBB67AE8584CAA73B) % 2**64
        words += [c0, c1, c2, c3]
    return words[:count]


@given(seed=seeds, position=st.integers(0, 2**40))
def test_noise_is_the_gumbel_transform_of_philox_keyed_by_seed_and_position(seed: int, position: int) -> None:
    uniforms = [((word >> 12) + 0.5) / 2**52 for word in slow_philox(seed, position, 9)]
    expected = np.array([-math.log(-math.log(u)) for u in uniforms], np.float32)
    np.testing.assert_allclose(GumbelNoise(seed, 9).row(position), expected, rtol=1e-5, atol=1e-6)


def test_noise_is_finite_at_both_ends_of_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    class Extremes:
        def __init__(self, **_: object) -> None: ...

        def random_raw(self, count: int) -> np.ndarray:
            return np.array([0, 2**64 - 1] * count, np.uint64)[:count]

    monkeypatch.setattr(np.random, "Philox", Extremes)
    assert np.isfinite(GumbelNoise(0, 2).row(0)).all()


@given(seed=seeds, positions=st.lists(st.integers(0, 10**6), min_size=1, max_size=6))
def test_noise_depends_on_nothing_but_seed_position_and_token(seed: int, positions: list[int]) -> None:
    noise, other = GumbelNoise(seed, 133), GumbelNoise(seed, 133)
    rows = [(noise.row(position), noise.near(position)) for position in positions]
    for position in reversed(positions):  # another order, and each asked for twice
        other.near(position)
    for (row, near), position in zip(rows, positions, strict=True):
        assert np.array_equal(other.row(position), row)
        assert np.array_equal(other.near(position), near)
        assert np.array_equal(GumbelNoise(seed, 10).row(position), row[:10]), "rows of padding change nothing"
        assert np.array_equal(GumbelNoise(seed, 10).near(position), near[:10]), "rows of padding change nothing"


@given(seed=seeds | st.integers(2**63, 2**128 - 1), position=st.integers(0, 2**40), data=st.data())
def test_quick_noise_is_near_the_noise_itself_for_all_tokens_and_for_some(
    seed: int, position: int, data: st.DataObject
) -> None:
    noise = GumbelNoise(seed, 1_000)
    np.testing.assert_allclose(noise.near(position), noise.row(position), rtol=0, atol=1e-5)
    tokens = np.array(sorted(data.draw(st.sets(st.integers(0, 999)))), np.int64)
    assert np.array_equal(noise.near(position, tokens), noise.near(position)[tokens])


def test_noise_is_the_same_after_it_has_been_forgotten() -> None:
    noise, scores = GumbelNoise(5, 60_000), np.zeros(60_000, np.float32)
    before, choice = noise.near(0).copy(), noise.likeliest(scores, 0)
    for position in range(1, 100):
        noise.likeliest(scores, position)
    assert num_kept(noise) < 99, "memory is bounded"
    assert np.array_equal(noise.near(0), before)
    assert noise.likeliest(scores, 0) == choice


@given(seed=seeds, spread=st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]), position=st.integers(0, 500))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_winner_is_that_of_the_noise_itself(dtype: type, seed: int, spread: float, position: int) -> None:
    scores = np.random.default_rng(position).normal(0, spread, 2_000).astype(dtype)
    scores[position:] = scores[: 2_000 - position].copy()  # a part repeats: equal scores
    noise = GumbelNoise(seed, 2_000)
    sums = scores + noise.row(position)
    assert noise.likeliest(scores, position) == (int(sums.argmax()), pytest.approx(sums.max(), abs=1e-4))
    tokens = np.flatnonzero(np.random.default_rng(seed).random(2_000) < 0.1)
    found = noise.likeliest(scores[tokens], position, tokens)
    assert found == (int(sums[tokens].argmax()), pytest.approx(sums[tokens].max(), abs=1e-4))


@pytest.mark.parametrize("width", [1e-7, 1e-5])
def test_the_noise_itself_decides_between_sums_that_quick_noise_cannot_tell_apart(width: float) -> None:
    noise = GumbelNoise(3, 1_000)
    for position in range(50):
        row = noise.row(position)
        scores = np.random.default_rng(position).normal(0, width, 1_000).astype(np.float32) - row
        assert noise.likeliest(scores, position)[0] == int((scores + row).argmax())


def test_without_machine_code_the_noise_itself_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    noise, scores, tokens = GumbelNoise(3, 1_000), np.linspace(0, 3, 1_000, dtype=np.float32), np.arange(0, 1_000, 7)
    quick = [noise.likeliest(scores, 5)[0], noise.likeliest(scores[tokens], 5, tokens)[0]]
    monkeypatch.setattr(gumbel, "draws_noise", lambda: False)
    noise = GumbelNoise(3, 1_000)
    assert [noise.likeliest(scores, 5)[0], noise.likeliest(scores[tokens], 5, tokens)[0]] == quick
    assert np.array_equal(noise.near(5), noise.row(5))
    assert np.array_equal(noise.near(5, tokens), noise.row(5)[tokens])


def test_a_row_that_a_drafter_has_drawn_is_not_drawn_again_for_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def noise(seed: int, position: int, num_tokens: int) -> np.ndarray:
        drawn.append(position)
        return np.zeros(num_tokens, np.float32)

    monkeypatch.setattr(gumbel, "draws_noise", lambda: True)
    monkeypatch.setattr(gumbel, "noise", noise)
    rule, logits = replace(PLAIN, seed=812), np.array([[0.0, 2.0, 1.0]] * 2, np.float32)
    scorer, sampler = CandidateScorer(rule, 3, coupled=True), Sampler(rule, 3)
    scorer.top(logits, [4, 5], 1)
    sampler.choose(logits, [4, 5])
    assert drawn == [4, 5]


def test_noise_of_neighbouring_seeds_and_positions_shares_no_value() -> None:
    values = [v for seed in range(4) for position in range(25) for v in GumbelNoise(seed, 50).row(position).tolist()]
    assert len(set(values)) > len(values) - 5  # float32 may repeat by chance; a shared stream repeats by tens
