"""`card check-pair` with the block in a target's checkpoint as the draft model."""

from __future__ import annotations

from pathlib import Path

import pytest

from card.errors import SettingsError
from card.tools.check_pair.command import examine
from tests.own_block import random_checkpoint, right_checkpoint
from tests.own_head import FORMS, WIDTH, random_head, save_target

pytestmark = pytest.mark.timeout(240)

OPTIONS = {"dtype": "float32", "device": "cpu", "draft_device": None, "target_cost": None, "max_model_len": 128}


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_kind_states_and_bytes_of_a_block_are_told(tmp_path: Path, kind: str) -> None:
    checkpoint = random_checkpoint(kind)
    target = checkpoint.save(tmp_path / "target")
    report = examine(target, "mtp", ("the cat", "one two"), 16, dict(OPTIONS), lambda _: None)
    assert report.drafter is not None and report.memory is not None and report.agreement is not None
    facts, (_, memory) = report.drafter, report.memory
    tensors = checkpoint.tensors
    own_bytes = sum(4 * one.numel() for one in tensors.values())
    unread = sum(2 * one.numel() for name, one in tensors.items() if ".experts." in name)  # two of four are chosen
    head = checkpoint.target.get_output_embeddings().weight
    assert (facts.kind, facts.num_states) == ("a block that drafts, in the target", 1)
    assert (facts.head_tokens, facts.head_bytes) == (head.shape[0], 4 * head.numel())
    assert facts.step_bytes == pytest.approx(own_bytes - unread + facts.head_bytes, rel=0.03)
    assert memory.weight_bytes == pytest.approx(own_bytes, rel=0.03)
    assert memory.packed_bytes < own_bytes, "the head is in memory once, with the target"
    assert len(report.agreement.taken_by_depth) > 1


def test_a_block_in_a_file_of_its_own_is_told_with_the_tokens_of_its_head(tmp_path: Path) -> None:
    checkpoint = right_checkpoint("state")
    target = checkpoint.save(tmp_path / "target")
    block = checkpoint.save_block_file(tmp_path / "target", tmp_path / "mtp.gguf", ids=range(100, 200))
    report = examine(target, block, ("the cat", "one two"), 16, dict(OPTIONS), lambda _: None)
    assert report.drafter is not None
    assert report.drafter.kind == "a block that drafts, in a file of its own"
    assert 100 <= report.drafter.head_tokens < 110, "special tokens are proposed besides"
    assert "MB are the head of 10" in report.drafter.in_words


def test_a_head_is_told_with_the_states_that_it_reads_and_the_tokens_that_it_knows(tmp_path: Path) -> None:
    head = random_head(FORMS["SafeAILab"])
    target, folder = save_target(head, tmp_path / "target"), head.save(tmp_path / "head")
    report = examine(target, folder, ("the cat", "one two"), 16, dict(OPTIONS), lambda _: None)
    assert report.drafter is not None
    facts = report.drafter
    assert (facts.kind, facts.num_states, facts.head_tokens) == ("an EAGLE-3 head", 3, 200)
    assert facts.head_bytes == 4 * 200 * WIDTH
    assert "an EAGLE-3 head, reads 3 states of the target; a step reads" in facts.in_words


def test_a_block_has_no_other_price(tmp_path: Path) -> None:
    target = random_checkpoint().save(tmp_path / "target")
    with pytest.raises(SettingsError, match="target_cost does not go with a block"):
        examine(target, "mtp", ("the cat",), 8, {**OPTIONS, "target_cost": "1M"}, lambda _: None)
