"""gpt-oss on the exact pass is transformers' own, from each of its files, and wrong files are one line."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers import GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from card.api.llm import LLM
from card.backends.transformers.arrays import as_tensor
from card.backends.transformers.loading import load_model
from card.backends.transformers.modules import modules_of
from card.backends.transformers.walking import why_not_walked
from card.config import SamplingParams
from card.errors import ModelError
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import Floats
from card.machine.threads import use_threads
from card.models.files.gguf.source import GgufSource
from card.models.loading import load_decoder
from card.models.own.decoder_model import DecoderModel, is_int8
from card.models.own.expert_weights import join_experts
from card.models.own.mxfp4_experts import ExpertBlocks
from card.models.protocol import Extension
from card.models.runners import how_it_runs, plain_runner
from tests.gguf_files import demo_tokenizer, save_model, write_gguf
from tests.mxfp4_folders import change_config, in_mxfp4

REASON = why_not_int8()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
TEXT = [4 + (7 * idx * idx + 3 * idx) % 500 for idx in range(90)]  # beyond the window of 9, and the first context of 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model in float32; not to be changed."""
    made = tmp_path_factory.mktemp("gpt-oss")
    save_model(made, "gpt_oss", demo_tokenizer())
    return made


@pytest.fixture(scope="module")
def folders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders: experts in MXFP4, and the numbers that they stand for; not to be changed."""
    return in_mxfp4(folder, tmp_path_factory.mktemp("mxfp4"))


@pytest.fixture(scope="module")
def file(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of the same blocks; not to be changed."""
    made = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write_gguf(folders[1], made, kind=Kind.BF16, experts=Kind.MXFP4)


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copied"))


@pytest.fixture
def copied_blocks(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders[0], tmp_path / "copied"))


def logits(model: Any, text: list[int] = TEXT) -> Floats:
    runner = plain_runner(model, max_model_len=128)
    found: Floats = runner.forward([Extension(runner.open(), text, range(-1, len(text) - 1))])[0]
    return found


def own(place: Path, **options: Any) -> DecoderModel:
    model = load_decoder(place, cache_dir="", **options)
    assert type(model) is DecoderModel
    return model


def distance(found: Floats, expected: Floats) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def greedy(model: Any, num_tokens: int) -> list[int]:
    """Return the tokens that follow the text, each by a pass of its own behind the last one."""
    runner, text = plain_runner(model, max_model_len=128), TEXT[:60]
    slot, first = runner.open(), 0
    while len(text) < 60 + num_tokens:
        new = text[first:]
        (found,) = runner.forward([Extension(slot, new, range(first - 1, first + len(new) - 1), len(new) - 1)])
        first = len(text)
        text.append(int(found[-1].argmax()))
    return text[60:]


def test_logits_and_greedy_tokens_are_those_of_transformers(folder: Path) -> None:
    theirs: Any = GptOssForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = theirs(torch.tensor([TEXT])).logits[0].numpy()
        written = theirs.generate(torch.tensor([TEXT[:60]]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
    model = own(folder)
    assert distance(logits(model), expected) < 1e-4
    assert np.array_equal(logits(load_model(folder)), logits(model))
    assert greedy(model, 24) == written[0, 60:].tolist()


def test_weights_are_named_and_laid_out_as_transformers_has_them(folder: Path) -> None:
    theirs = dict(load_model(folder).named_parameters())
    joined = join_experts(((name, np.asarray(one)) for name, one in own(folder).weights), own(folder).architecture)
    assert joined.keys() == theirs.keys()
    assert all(torch.equal(as_tensor(one), theirs[name]) for name, one in joined.items())


def test_a_model_becomes_one_of_transformers_with_its_logits(folder: Path) -> None:
    made: Any = modules_of(own(folder))
    with torch.no_grad():
        assert distance(logits(own(folder)), made(torch.tensor([TEXT])).logits[0].numpy()) < 1e-4


def test_blocks_are_multiplied_as_they_are_stored(folders: tuple[Path, Path]) -> None:
    stored, meant = own(folders[0]), own(folders[1])
    assert stored.has_blocks and is_int8(stored) and not meant.has_blocks
    assert how_it_runs(plain_runner(stored, max_model_len=64)).startswith("own pass in the blocks")
    blocks = [one.weight for one in stored.layers[0].linears.values() if one.has_blocks]
    assert len(blocks) == 3 * 6
    assert all(one.nbytes == one.shape[0] * 34 * -(-one.shape[1] // 64) for one in blocks)  # of whole groups of 64
    assert stored.num_parameters == meant.num_parameters
    assert distance(logits(stored), logits(meant)) < 0.15  # only activations are rounded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_stand_for_the_numbers_that_transformers_makes_of_them(folders: tuple[Path, Path], dtype: str) -> None:
    assert np.array_equal(logits(own(folders[0], dtype=dtype)), logits(own(folders[1], dtype=dtype)))
    stored, meant = (load_file(folder / "model.safetensors") for folder in folders)
    for name in (name for name in stored if name.endswith("_blocks")):
        stem = name.removesuffix("_blocks")
        assert torch.equal(convert_moe_packed_tensors(stored[name], stored[f"{stem}_scales"]), meant[stem])


def test_a_file_of_the_same_blocks_gives_the_same_bits(folders: tuple[Path, Path], file: Path, tmp_path: Path) -> None:
    expected = logits(own(folders[0]))
    kept = load_decoder(file, cache_dir=str(tmp_path))
    for model in (own(file), kept):
        assert type(model) is DecoderModel and model.has_blocks
        assert np.array_equal(logits(model), expected)


def test_blocks_of_a_folder_are_packed_once_and_kept(
    folders: tuple[Path, Path], copied_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, cache = logits(load_decoder(folders[0], cache_dir="")), str(tmp_path / "cache")
    first = logits(load_decoder(copied_blocks, cache_dir=cache))
    (kept,) = (tmp_path / "cache" / "gguf").glob("*-mxfp4")
    packed, panels = list[str](), ExpertBlocks.panels

    def counted(one: ExpertBlocks) -> Any:
        packed.append(one.name)
        return panels(one)

    monkeypatch.setattr(ExpertBlocks, "panels", counted)
    assert (first == expected).all()
    assert (logits(load_decoder(copied_blocks, cache_dir=cache)) == expected).all() and packed == []
    written = kept / "model.safetensors"
    written.write_bytes(written.read_bytes()[:-64])  # cut off: it is made again
    assert (logits(load_decoder(copied_blocks, cache_dir=cache)) == expected).all() and packed
    packed.clear()
    os.utime(copied_blocks / "model.safetensors", ns=(1, 1))  # another file, for all that is known
    assert (logits(load_decoder(copied_blocks, cache_dir=cache)) == expected).all() and packed


def test_a_folder_that_does_not_say_what_its_other_weights_are_in_is_the_same_model(
    folders: tuple[Path, Path], copied_blocks: Path
) -> None:
    change_config(copied_blocks, dtype=..., layer_types=...)
    assert np.array_equal(logits(own(copied_blocks)), logits(own(folders[0])))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.F16])
def test_a_file_with_other_types_beside_the_experts_runs_with_its_blocks(
    folders: tuple[Path, Path], tmp_path: Path, kind: Kind
) -> None:
    model = own(write_gguf(folders[1], tmp_path / "model.gguf", kind=kind, experts=Kind.MXFP4))
    assert model.has_blocks
    assert distance(logits(model), logits(own(folders[1], dtype="float32"))) < 0.15


@pytest.mark.parametrize("joins", [True, False])
def test_tensors_of_a_file_are_those_of_the_folder(folder: Path, tmp_path: Path, *, joins: bool) -> None:
    theirs = dict(load_model(folder).named_parameters())
    file = write_gguf(folder, tmp_path / "model.gguf", joins_experts=joins)
    found = GgufSource(file, None).weights("float32")
    assert found.keys() == theirs.keys()
    assert all(torch.equal(as_tensor(one), theirs[name]) for name, one in found.items())


def test_a_file_scales_its_angles_as_transformers_does_not_as_their_edges_are_rounded(file: Path) -> None:
    assert own(file).config.rope_parameters["truncate"] is False


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_logits_of_blocks_depend_on_the_text_alone(folders: tuple[Path, Path], num_threads: int) -> None:
    model = own(folders[0])
    use_threads(1, in_integers=True)
    expected = logits(model)
    use_threads(num_threads, in_integers=True)
    runner = plain_runner(model, max_model_len=128)
    slot, other = runner.open(), runner.open()
    for first in range(0, 80, 16):
        piece = TEXT[first : first + 16]
        beside = Extension(other, TEXT[first : first + 3], range(3 * first // 16 - 1, 3 * first // 16 + 2))
        (found, _) = runner.forward([Extension(slot, piece, range(first - 1, first + 15)), beside])
        assert np.array_equal(found, expected[first : first + 16])
    (tree,) = runner.forward([Extension(slot, [*TEXT[80:83], 9, *TEXT[83:86]], [79, 80, 81, 80, 82, 84, 85])])
    assert np.array_equal(tree[[0, 1, 2, 4, 5, 6]], expected[80:86])
    assert np.array_equal(tree[3], logits(model, [*TEXT[:81], 9])[-1])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_of_candidates_write_the_text_of_plain_decoding(
    folder: Path, folders: tuple[Path, Path], tmp_path: Path, temperature: float
) -> None:
    save_model(tmp_path / "draft", "gpt_oss", demo_tokenizer(), noise=0.1)
    params = [SamplingParams(max_tokens=40, temperature=temperature, seed=seed) for seed in (1, 2)]
    prompts = ["Anna has 25 apples, and then she", "One and two and three"]
    for target in (folder, folders[0]):
        texts = []
        for more in (
            {"method": "vanilla"},
            {"draft": str(tmp_path / "draft"), "method": "card", "placement": "inline"},
        ):
            with LLM(str(target), cache=False, **more) as llm:
                outputs = llm.generate(prompts, params)
            texts.append([one.outputs[0].token_ids for one in outputs])
        assert texts[0] == texts[1]


# ---- bad input ------------------------------------------------------------------------------------------------------


def refusal(place: Path) -> str:
    """Return the one line that loading raises."""
    with pytest.raises(ModelError) as caught:
        load_decoder(place, cache_dir="")
    said = str(caught.value)
    assert "\n" not in said and len(said) < 400
    return said


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of layer 0 by the ends of their names; None takes them out."""
    tensors = load_file(folder / "model.safetensors")
    for end, tensor in changes.items():
        (name,) = (one for one in tensors if one.startswith("model.layers.0.") and one.endswith(f".{end}"))
        del tensors[name]
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("change", [{"swiglu_limit": 5.0}, {"swiglu_alpha": 1.0}])
def test_another_gate_is_left_to_transformers_modules_with_the_reason(copied: Path, change: dict[str, float]) -> None:
    change_config(copied, **change)
    model: Any = load_decoder(copied)
    with torch.no_grad():
        expected = model(torch.tensor([TEXT])).logits[0].numpy()
    name, value = next(iter(change.items()))
    said = str(why_not_walked(model))
    assert said.startswith("its gate has swiglu_alpha") and f"{name} {value}" in said
    assert not plain_runner(model, max_model_len=128).has_own_pass
    assert distance(logits(model), expected) < 1e-4


def test_missing_sinks_are_named(copied: Path, folder: Path, tmp_path: Path) -> None:
    change_tensors(copied, sinks=None)
    assert "the first is model.layers.0.self_attn.sinks; copy or download" in refusal(copied)
    file = write_gguf(folder, tmp_path / "model.gguf", without=("blk.0.attn_sinks.weight",))
    assert "its tensor model.layers.0.self_attn.sinks is missing" in refusal(file)


@pytest.mark.parametrize("gone", ["sinks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_bias"])
def test_tensors_that_are_missing_beside_blocks_are_named(copied_blocks: Path, gone: str) -> None:
    change_tensors(copied_blocks, **{gone: None})
    named = {"down_proj_bias": "0.down_proj.bias"}.get(gone, gone)
    assert refusal(copied_blocks).endswith(f".{named} is missing; download it again")


def test_blocks_of_another_shape_or_with_a_scale_that_is_no_number_are_named(copied_blocks: Path) -> None:
    change_tensors(copied_blocks, down_proj_blocks=torch.zeros(6, 64, 3, 8, dtype=torch.uint8))
    assert "MXFP4 needs blocks [..., 16]" in refusal(copied_blocks)
    change_tensors(copied_blocks, down_proj_blocks=torch.zeros(6, 64, 2, 16, dtype=torch.uint8))
    assert "down_proj_blocks has shape [6, 64, 2, 16] and " in refusal(copied_blocks)
    change_tensors(copied_blocks, down_proj_blocks=torch.zeros(6, 64, 3, 16, dtype=torch.uint8))
    change_tensors(copied_blocks, down_proj_scales=torch.full((6, 64, 3), 255, dtype=torch.uint8))
    assert "down_proj.weight: a scale in it is no finite number" in refusal(copied_blocks)


def test_fewer_experts_in_blocks_than_the_config_says_are_named(copied_blocks: Path) -> None:
    change_config(copied_blocks, num_local_experts=7)
    assert "model.layers.0.mlp.router.weight has shape [6, 64], the config asks for [7, 64]" in refusal(copied_blocks)


def test_more_experts_for_a_token_than_there_are_is_one_line(folder: Path, copied: Path, tmp_path: Path) -> None:
    change_config(copied, num_experts_per_tok=7)
    assert "its num_experts_per_tok is 7, and it has 6 experts (num_local_experts)" in refusal(copied)
    file = write_gguf(folder, tmp_path / "model.gguf", metadata={"expert_used_count": 7})
    assert "take 7 experts each (expert_used_count), and there are 6" in refusal(file)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "unheard"])
def test_another_way_to_quantise_is_one_line(copied_blocks: Path, method: str) -> None:
    change_config(copied_blocks, quantization_config={"quant_method": method, "bits": 4, "group_size": 128})
    said = refusal(copied_blocks)
    assert method in said.lower() or "tensors are missing, the first is model.layers.0.mlp.experts." in said


def test_a_missing_bias_of_experts_is_named(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(folder, tmp_path / "model.gguf", without=("blk.0.ffn_up_exps.bias",))
    assert "its tensor model.layers.0.mlp.experts.0.up_proj.bias is missing" in refusal(file)
