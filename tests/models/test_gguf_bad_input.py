"""What is wrong with a file of experts or parts is one line that says what would work, before weights are read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from card.models.files.gguf import model as gguf_model
from card.models.files.gguf import source as gguf_source
from tests.commands import run_command
from tests.gguf_files import write_gguf


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Path], str]:
    """Return what gives the line that ``card generate`` ends with for a file, whose weights nothing may read."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("weights were read")

    for module, name in (
        (gguf_source, "read_blocks"),
        (gguf_source, "write_blocks"),
        (gguf_source, "write_weights"),
        (gguf_model, "read_raw"),
        (gguf_model, "read_rows"),
        (gguf_model, "are_equal"),
    ):
        monkeypatch.setattr(module, name, refuse)

    def run(file: Path) -> str:
        ran = run_command(capsys, "generate", "--target", str(file), "--method", "vanilla", "--no-cache", "hi")
        assert (ran.status, ran.out) == (2, "")
        (line,) = ran.err.splitlines()
        begin = f"card: error: {file} "
        assert line.startswith(begin)
        return line.removeprefix(begin)

    return run


_ALL_EXPERTS = tuple(f"blk.{layer}.ffn_{part}_exps.weight" for layer in range(2) for part in ("gate", "up", "down"))
_AGAIN = "; copy or download it again"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"without": _ALL_EXPERTS}, f"layers.0.mlp.experts.0.gate_proj.weight is missing{_AGAIN}"),
        ({"without": _ALL_EXPERTS[-1:]}, f"model.layers.1.mlp.experts.0.down_proj.weight is missing{_AGAIN}"),
        ({"without": ("blk.0.ffn_gate_inp.weight",)}, f"model.layers.0.mlp.gate.weight is missing{_AGAIN}"),
        ({"metadata": {"expert_used_count": 9}}, "its tokens take 9 experts each (expert_used_count), and there are 6"),
        ({"metadata": {"expert_used_count": 0}}, f"its qwen3moe.expert_used_count is 0{_AGAIN}"),
        (
            {"metadata": {"expert_used_count": [2, 3]}},
            "has layers that differ in expert_used_count, which is not known",
        ),
        (
            {"metadata": {"expert_count": 5}},
            "blk.0.ffn_gate_exps.weight has shape [6, 32, 64], and there are 5 experts",
        ),
        ({"metadata": {"expert_count": 2**31}}, "it has 2147483648 experts, and at most 4096 are possible"),
        ({"metadata": {"expert_gating_func": 4}}, "chooses experts by a router of the kind 4 (expert_gating_func)"),
        (
            {"metadata": {"expert_gating_func": "x"}},
            "by a router of the kind x (expert_gating_func), which is not known",
        ),
    ],
)
def test_experts_that_are_not_there_or_cannot_be_chosen(folders, tmp_path, refused, options, said):
    line = refused(write_gguf(folders("qwen3_moe"), tmp_path / "model.gguf", **options))
    assert said in line
    assert line.endswith((_AGAIN, "use a folder saved by transformers"))


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("glm4_moe", {"metadata": {"expert_group_count": 4}}, "asks for expert_group_count 4, which is not known here"),
        ("glm4_moe", {"metadata": {"expert_weights_scale": -1.0}}, "its glm4moe.expert_weights_scale is -1.0"),
        ("glm4_moe", {"metadata": {"expert_gating_func": 1}}, "chooses experts by a router of the kind 1"),
        ("glm4_moe", {"metadata": {"expert_shared_count": 0}}, "its glm4moe.expert_shared_count is 0"),
        ("glm4_moe", {"without": ("blk.1.exp_probs_b.bias",)}, "layers.1.mlp.gate.e_score_correction_bias is missing"),
        ("ernie4_5_moe", {"metadata": {"interleave_moe_layer_step": 0}}, "interleave_moe_layer_step is 0"),
        ("ernie4_5_moe", {"metadata": {"interleave_moe_layer_step": 1}}, "layers.2.mlp.gate.weight is missing"),
        ("ministral3", {"metadata": {"attention.temperature_scale": -1.0}}, "attention.temperature_scale is -1.0"),
        ("granitemoeshared", {"without": ("blk.0.ffn_gate_shexp.weight",)}, "shared_mlp.gate_linear.weight is missing"),
    ],
)
def test_entries_and_tensors_of_newer_families(folders, tmp_path, refused, kind, options, said):
    line = refused(write_gguf(folders(kind), tmp_path / "model.gguf", **options))
    assert said in line
    assert line.endswith((_AGAIN, "use a folder saved by transformers"))


def test_one_expert_of_many_that_is_missing(folders, tmp_path, refused):
    options = {"joins_experts": None, "without": ("blk.1.ffn_up.2.weight",)}
    line = refused(write_gguf(folders("mixtral"), tmp_path / "model.gguf", **options))
    assert line == f"is incomplete: its tensor model.layers.1.mlp.experts.2.up_proj.weight is missing{_AGAIN}"


def _lose(parts: list[Path], other: Path) -> None:
    parts[1].unlink()


def _double(parts: list[Path], other: Path) -> None:
    shutil.copy(parts[2], parts[1])


def _mix(parts: list[Path], other: Path) -> None:
    shutil.copy(other / "model-00002-of-00003.gguf", parts[1])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_lose, "lacks 1 of its 4 parts, the first is model-00002-of-00004.gguf"),
        (_double, "has a part model-00002-of-00004.gguf that is part 3 by what it says, not 2"),
        (_mix, "has a part model-00002-of-00004.gguf that is of another model: its split.count is 3, not 4"),
    ],
)
def test_parts_that_are_missing_doubled_or_of_another_model(folders, tmp_path, refused, spoil, said):
    for name, part_tensors in (("parts", 6), ("other", 8)):
        (tmp_path / name).mkdir()
        write_gguf(folders("llama"), tmp_path / name / "model.gguf", part_tensors=part_tensors)
    parts = sorted((tmp_path / "parts").iterdir())
    spoil(parts, tmp_path / "other")
    line = refused(parts[0])
    assert line.startswith(said) and "; copy or download all parts" in line


@pytest.mark.timeout(60)
def test_a_file_that_is_cut_off_ends_at_once(folders, tmp_path, refused):
    file = write_gguf(folders("llama"), tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:-64])
    assert refused(file).startswith("is cut off: ")


@pytest.mark.parametrize(
    "metadata",
    [{"nextn_predict_layers": 2}, {"attention.head_count_kv": [2]}, {"feed_forward_length": 0}, {"block_count": 0}],
)
def test_numbers_that_no_model_has(folders, tmp_path, refused, metadata: dict[str, Any]):
    line = refused(write_gguf(folders("llama"), tmp_path / "model.gguf", metadata=metadata))
    assert f"{next(iter(metadata))}" in line and line.endswith(_AGAIN)
