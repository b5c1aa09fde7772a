"""Models that cannot be used are refused before their weights are read, each in one clear line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from card.backends.transformers.loading import load_model
from card.models.loading import load_tokenizer
from tests.commands import Ran, run_command
from tests.every_family import script
from tests.pair import Pair
from tests.tiny import NO_ENDS


@pytest.fixture(scope="module")
def hybrid(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a hybrid model in several files; not to be changed."""
    folder = tmp_path_factory.mktemp("hybrid")
    tokenizer = load_tokenizer(pair.target)
    config = script().tiny_config("qwen3_5_moe_text")
    for name, value in {"vocab_size": len(tokenizer), **NO_ENDS}.items():
        setattr(config, name, value)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="64KB")
    tokenizer.save(folder)
    return folder


@pytest.fixture
def copied(hybrid: Path, tmp_path: Path) -> Path:
    for file in hybrid.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command that must end before any weight is read; return the one line that it says."""
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)

    def run(*args: str) -> str:
        ran: Ran = run_command(capfd, *args)
        lines = [line for line in ran.err.splitlines() if line.startswith("card: error: ")]
        assert ran.status == 2 and len(lines) == 1 and "Traceback" not in ran.err
        return lines[0]

    return run


def generate(target: Path | str, *args: str) -> list[str]:
    return ["generate", "--target", str(target), *(args or ("--method", "vanilla")), "hi"]


def change(folder: Path, change_one: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change_one(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_a_missing_file_of_several_is_named_with_how_many_there_are(copied: Path, refused: Callable[..., str]) -> None:
    files = sorted(copied.glob("*.safetensors"))
    assert len(files) > 2
    files[1].unlink()
    said = refused(*generate(copied))
    assert f"1 of the {len(files)} files that model.safetensors.index.json names are missing, the first is" in said
    assert files[1].name in said


def test_a_kind_of_layer_that_nobody_knows_is_named(copied: Path, refused: Callable[..., str]) -> None:
    change(copied, lambda config: config["layer_types"].__setitem__(0, "unknown"))
    said = refused(*generate(copied))
    assert "has layers of type unknown, which neither CARD nor transformers" in said
    assert "choose a model of another family" in said


def test_older_names_for_kinds_of_layers_are_read_as_their_family_reads_them(tmp_path: Path) -> None:
    model = script().tiny_model("granitemoehybrid")
    model.save_pretrained(tmp_path)
    change(tmp_path, lambda config: config.update(layer_types=["mamba", "attention"] * 2))
    assert load_model(tmp_path).config.layer_types == model.config.layer_types


def test_experts_whose_names_nobody_knows_are_missing_before_the_weights_are_read(
    copied: Path, refused: Callable[..., str]
) -> None:
    for file in copied.glob("*.safetensors"):
        tensors = {name: tensor for name, tensor in load_file(file).items() if ".experts." not in name}
        save_file(tensors, file, metadata={"format": "pt"})
    said = refused(*generate(copied))
    assert "tensors are missing or have unknown names, the first is layers.0.mlp.experts." in said


def test_states_that_have_no_room_are_refused_before_the_weights_are_read(
    hybrid: Path, refused: Callable[..., str]
) -> None:
    said = refused(*generate(hybrid, "--method", "vanilla", "--kv-cache-memory", "1K"))
    assert "--kv-cache-memory 1K has no room for the states of one request, which take 0.0M or more" in said


def test_a_draft_of_another_tokenizer_is_refused_before_a_hybrid_target_is_read(
    hybrid: Path, pair: Pair, refused: Callable[..., str]
) -> None:
    said = refused(*generate(hybrid, "--draft", pair.foreign_draft))
    assert f"draft {pair.foreign_draft} does not fit the target: " in said and "token 270" in said
