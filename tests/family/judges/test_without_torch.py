"""Text is written where torch and transformers cannot be imported."""

from __future__ import annotations

from pathlib import Path

from card.models.demo import DEMO_NAMES
from tests.alone import text_of
from tests.family.judges.rewards import write_reward


def test_text_is_written_with_a_judge() -> None:
    assert text_of("--method", "sparsespec", "--judge", "typical")


def test_text_is_written_with_a_reward_of_steps(tmp_path: Path) -> None:
    target, draft = DEMO_NAMES
    reward = write_reward(tmp_path / "reward.safetensors", target, draft, range(0, 1024, 3))
    assert text_of("--method", "arbitrage", "--reward", reward)
