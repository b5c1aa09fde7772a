"""`card bench` with a block or a head as draft model: the rows that can have it, and the bytes that a step reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from card.config import SamplingParams
from card.errors import SettingsError
from card.models.loading import load_tokenizer
from card.tools.bench.datasets import Dataset, DatasetQuestion
from card.tools.bench.lineup import Lineup, LineupSettings, PairSpec, make_plan
from card.tools.bench.row_names import BASELINE
from tests.own_block import random_checkpoint, right_checkpoint
from tests.own_head import FORMS, random_head, save_target

pytestmark = pytest.mark.timeout(240)

SETTINGS = LineupSettings(
    params=SamplingParams(temperature=0.0, max_tokens=12).resolved(), cores=(0,), dtype="float32", max_model_len=64
)
DATA = (Dataset("x", "y", (DatasetQuestion(("one",)),)),)


def lineup_of(names: list[str], target: str, draft: str) -> Lineup:
    return Lineup(names, PairSpec(target=target, draft=draft), SETTINGS, lambda _: None)


def test_rows_draft_with_a_block_and_its_bytes_are_told(tmp_path: Path) -> None:
    checkpoint = right_checkpoint("state")
    target = checkpoint.save(tmp_path / "target")
    lineup = lineup_of([BASELINE, "card"], target, "mtp")
    try:
        facts, head = lineup.pair_facts(), checkpoint.target.get_output_embeddings().weight
        own = sum(one.numel() for one in checkpoint.tensors.values())
        assert facts.draft_parameters == own
        assert facts.draft_bytes == pytest.approx(4 * (own + head.numel()), rel=0.1)
        prompt = load_tokenizer(target).encode("the cat")
        plain, drafted = lineup.make_rows([prompt], {})
        texts = [row.decode(prompt, SETTINGS.params) for row in (plain, drafted)]
        assert texts[0].token_ids == texts[1].token_ids
    finally:
        lineup.close()


def test_the_experts_that_a_token_takes_are_counted(tmp_path: Path) -> None:
    checkpoint = random_checkpoint("glm4_moe")
    lineup = lineup_of([BASELINE], checkpoint.save(tmp_path / "target"), "mtp")
    try:
        facts, parts = lineup.pair_facts(), checkpoint.parts
    finally:
        lineup.close()
    unread = sum(one.numel() for name, one in parts.items() if ".experts." in name) * 4 / 6  # two of six are taken
    head = checkpoint.target.get_output_embeddings().weight.numel()
    assert facts.draft_bytes == pytest.approx(4 * (sum(one.numel() for one in parts.values()) - unread + head), rel=0.1)


@pytest.mark.parametrize(
    ("names", "cost", "words"),
    [
        (
            [BASELINE, "pearl"],
            None,
            "row pearl runs without the target's states, which .*head reads; leave the row out",
        ),
        ([BASELINE, "transformers-assisted"], None, "row transformers-assisted runs without"),
        ([BASELINE, "sps"], "1M", "target_cost does not go with a block or a head"),
    ],
)
def test_rows_and_prices_that_a_head_cannot_have_are_refused(
    tmp_path: Path, names: list[str], cost: str | None, words: str
) -> None:
    head = random_head(FORMS["SafeAILab"])
    target, folder = save_target(head, tmp_path / "target"), head.save(tmp_path / "head")
    with pytest.raises(SettingsError, match=words):
        make_plan(names, [PairSpec(target=target, draft=folder, target_cost=cost)], SETTINGS, DATA)
