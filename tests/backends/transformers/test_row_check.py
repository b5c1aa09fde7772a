"""The check at loading: what a model's rows must not depend on, and that it runs once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from card.api.llm import LLM
from card.backends.transformers.row_check import check_rows, differing_rows
from card.config import SamplingParams
from card.errors import ModelError
from card.models.loading import load_tokenizer
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from tests.models.test_torch_runner import make_model
from tests.pair import Pair
from tests.tiny import tiny

GENERIC = ["gemma", "gemma4", "gpt-oss", "deepseek3", "granite-swa", "mimo"]


def runner_of(model: Any) -> RowRunner:
    return plain_runner(model, max_model_len=32, own_pass=False)


@pytest.mark.parametrize("kind", GENERIC)
def test_the_rows_of_a_model_that_is_run_rightly_pass(kind: str) -> None:
    runner = runner_of(make_model(kind))
    try:
        assert differing_rows(runner) == ""
        assert all(runner.num_rows(slot) == 0 for slot in [runner.open()]), "nothing is left of it"
    finally:
        runner.release()


class MeanOfThePass(nn.Module):
    """Lets each row depend on all rows of a pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out + x.mean(1, keepdim=True)


class MaskedByItself(nn.Module):
    """Stands for a model whose attention sees more than its own text: it adds what the row before in the pass has."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


@pytest.mark.parametrize(
    ("fault", "words"), [(MeanOfThePass, "one by one"), (MaskedByItself, "one by one|in a tree|beside")]
)
def test_a_model_whose_rows_depend_on_their_neighbours_is_refused(fault: type[nn.Module], words: str) -> None:
    model: Any = make_model.__wrapped__("gemma")
    model.model.layers[1].mlp = fault(model.model.layers[1].mlp)
    with pytest.raises(ModelError, match=rf"^x cannot be run exactly: the logits of its tokens ({words}) .*differ by"):
        check_rows(runner_of(model), "x")


@pytest.mark.parametrize(("max_model_len", "is_refused"), [(16, False), (17, True)])
def test_a_model_whose_own_forward_ignores_its_window_is_refused_where_texts_outgrow_it(
    max_model_len: int, is_refused: bool
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    config = transformers.MoshiConfig(vocab_size=61, num_key_value_heads=4, sliding_window=16, **sizes)
    runner = plain_runner(transformers.MoshiForCausalLM(config).eval(), max_model_len=max_model_len)
    assert differing_rows(runner).startswith("at once differ by") is is_refused
    assert config.sliding_window == 16, "the model has its own window again"


@pytest.fixture
def folder(pair: Pair, tmp_path: Path) -> str:
    """A tiny Gemma with the tokenizer of the pair."""
    tokenizer = load_tokenizer(pair.target)
    config = transformers.GemmaConfig(**tiny(len(tokenizer), head_dim=8, max_position_embeddings=64))
    torch.manual_seed(0)
    transformers.GemmaForCausalLM(config).save_pretrained(tmp_path / "gemma")
    tokenizer.save(tmp_path / "gemma")
    return str(tmp_path / "gemma")


def test_a_folder_is_checked_at_its_first_start_only_and_not_if_nobody_wants_it(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    monkeypatch.setattr("card.backends.transformers.row_check.check_rows", lambda runner, name: checked.append(name))
    options: dict[str, Any] = {"dtype": "float32", "cache_dir": str(tmp_path / "cache")}
    for more, wanted in [({"check": False}, 0), ({}, 1), ({}, 1), ({"dtype": "float64"}, 2), ({"cache": False}, 3)]:
        with LLM(folder, **{**options, **more}) as llm:
            llm.generate("the cat", SamplingParams(max_tokens=2, temperature=0.0))
        assert checked == [folder] * wanted, more


def test_models_with_a_pass_of_our_own_are_not_checked(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("card.backends.transformers.row_check.check_rows", lambda runner, name: pytest.fail("checked"))
    with LLM(pair.target, cache=False) as llm:
        assert llm.generate("the cat", SamplingParams(max_tokens=2, temperature=0.0))
