"""Weights in 8-bit floats are multiplied by their scales in every layout; what a model does not take is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from card.api.llm import LLM
from card.backends.transformers.arrays import as_tensor
from card.backends.transformers.loading import load_model
from card.config import SamplingParams
from card.errors import ModelError
from card.models.loading import load_decoder
from card.models.own.decoder_model import DecoderModel
from tests.pair import make_tokenizer
from tests.tiny import NO_ENDS, SIZES

FLOAT8 = torch.float8_e4m3fn
LARGEST = float(torch.finfo(FLOAT8).max)
Tensors = dict[str, Tensor]
_KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},  # a pass of our own
    "Gemma": {"head_dim": 8},  # transformers' modules
    "Qwen3Moe": {"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 24},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A folder of each kind in float32; not to be changed."""
    tokenizer, made = make_tokenizer(), {}
    for kind, more in _KINDS.items():
        made[kind] = tmp_path_factory.mktemp(kind)
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=len(tokenizer), **{**SIZES, "max_position_embeddings": 256, **NO_ENDS, **more}
        )
        torch.manual_seed(3)
        getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(made[kind])
        tokenizer.save_pretrained(made[kind])
    return made


def _by_scale(weight: Tensor, scale: Tensor, spread: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight in 8-bit floats, its scale, and what both mean."""
    spread = scale if spread is None else spread
    stored = (weight / spread).clamp(-LARGEST, LARGEST).to(FLOAT8)
    return stored, scale, stored.float() * spread


def of_tensor(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _by_scale(weight, weight.abs().max() / LARGEST)


def of_rows(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _by_scale(weight, weight.abs().amax(1, keepdim=True) / LARGEST)


def of_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return it in blocks of 16 by 20, of which the last are cut off."""
    rows, columns = -(-weight.shape[0] // 16), -(-weight.shape[1] // 20)
    scale = torch.rand(rows, columns) / 10 + 0.01
    spread = scale.repeat_interleave(16, 0)[: weight.shape[0]].repeat_interleave(20, 1)[:, : weight.shape[1]]
    return _by_scale(weight, scale, spread)


Quantize = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
_FLOAT_GROUPS = {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
# The name of a scale, how weights are stored, what config.json says of it, and tensors that stand beside a weight.
LAYOUTS: dict[str, tuple[str, Quantize, dict[str, Any], tuple[str, ...]]] = {
    "ModelOpt": ("weight_scale", of_tensor, {}, ("input_scale",)),
    "ModelOpt, in config.json": (
        "weight_scale",
        of_tensor,
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        ("input_scale", "k_scale", "v_scale"),
    ),
    "compressed-tensors, rows": (
        "weight_scale",
        of_rows,
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": _FLOAT_GROUPS},
        (),
    ),
    "compressed-tensors, tensors": (
        "weight_scale",
        of_tensor,
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": _FLOAT_GROUPS},
        ("input_scale",),
    ),
    "blocks": (
        "weight_scale_inv",
        of_blocks,
        {"quant_method": "fp8", "weight_block_size": [16, 20], "activation_scheme": "dynamic"},
        (),
    ),
}


def is_quantized(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and "_proj" in name


def write(folder: Path, like: Path, tensors: Tensors, **changes: Any) -> Path:
    """Make a folder that is like another one but for its weights and its config."""
    folder.mkdir()
    for file in like.iterdir():
        if not file.name.startswith("model"):
            (folder / file.name).write_bytes(file.read_bytes())
    config = {**json.loads((like / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def quantized(like: Path, layout: str, folder: Path) -> tuple[Path, Path]:
    """Return a folder with weights in 8-bit floats, and one with the weights that they mean."""
    scale_name, quantize, stated, beside = LAYOUTS[layout]
    stored: Tensors = {}
    meant: Tensors = {}
    torch.manual_seed(5)
    for name, tensor in load_file(like / "model.safetensors").items():
        stored[name] = meant[name] = tensor
        if is_quantized(name, tensor):
            stem = name.removesuffix("weight")
            stored[name], stored[stem + scale_name], meant[name] = quantize(tensor)
            stored.update({stem + one: torch.tensor(0.5) for one in beside})
    changes = {"quantization_config": stated} if stated else {}
    made = write(folder / "stored", like, stored, **changes)
    if layout == "ModelOpt":
        told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
        (made / "hf_quant_config.json").write_text(json.dumps(told))
    return made, write(folder / "meant", like, meant)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a model of ours or of transformers by name."""
    if isinstance(model, DecoderModel):
        return {name: as_tensor(weight) for name, weight in model.weights}
    return dict(model.state_dict())


def text_of(folder: Path) -> str:
    with LLM(str(folder), method="vanilla", max_model_len=64, cache=False) as llm:
        (output,) = llm.generate("the cat", SamplingParams(max_tokens=12, temperature=0.0))
        return str(output.outputs[0].text)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_exactly_those_that_numbers_and_scales_mean(
    folders: Mapping[str, Path], tmp_path: Path, layout: str, kind: str
) -> None:
    stored, meant = quantized(folders[kind], layout, tmp_path)
    for load in (load_model, load_decoder):
        theirs = weights_of(load(meant))
        for name, tensor in weights_of(load(stored)).items():
            assert tensor.dtype == torch.float32 and torch.equal(tensor, theirs[name]), name
    assert text_of(stored) == text_of(meant)


@pytest.mark.parametrize("load", [load_model, load_decoder])
def test_scaled_weights_are_in_the_dtype_that_is_asked_for_and_a_line_says_so(
    folders: Mapping[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, load: Callable[..., Any]
) -> None:
    stored, meant = quantized(folders["Llama"], "compressed-tensors, rows", tmp_path)
    with caplog.at_level(logging.INFO, "card.models.files.scaled_weights"):
        model = load(stored, dtype="bfloat16")
    theirs = weights_of(load(meant, dtype="bfloat16"))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights_of(model).items())
    assert "14 weights in 8-bit floats are multiplied by their scales to bfloat16" in caplog.text


@pytest.mark.parametrize("layout", ["ModelOpt", "compressed-tensors, rows", "blocks"])
def test_weights_without_their_scales_are_refused_by_name(
    folders: Mapping[str, Path], tmp_path: Path, layout: str
) -> None:
    stored, _ = quantized(folders["Llama"], layout, tmp_path)
    tensors = load_file(stored / "model.safetensors")
    gone = f"model.layers.1.mlp.up_proj.{LAYOUTS[layout][0]}"
    del tensors[gone]
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    for load in (load_model, load_decoder):
        with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is in 8-bit floats and has no"):
            load(stored)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        (
            "model.layers.0.mlp.up_proj.weight_scale",
            (7,),
            "up_proj.weight_scale has shape [7], which fits no weight of",
        ),
        ("model.layers.0.mlp.up_proj.weight_scale", (3, 5), "up_proj.weight_scale has shape [3, 5], which fits no"),
    ],
)
def test_a_scale_that_fits_no_weight_is_refused_by_name(
    folders: Mapping[str, Path], tmp_path: Path, name: str, shape: tuple[int, ...], said: str
) -> None:
    stored, _ = quantized(folders["Llama"], "ModelOpt", tmp_path)
    tensors = {**load_file(stored / "model.safetensors"), name: torch.ones(shape)}
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError) as refused:
        load_decoder(stored)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj.weight_scale",
        "model.layers.0.mlp.up_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.up_proj.lora_A.weight",
        "something.else",
    ],
)
@pytest.mark.parametrize("kind", ["Llama", "Gemma"])
def test_a_tensor_that_the_model_does_not_take_is_refused_by_name(
    folders: Mapping[str, Path], tmp_path: Path, name: str, kind: str
) -> None:
    tensors = {**load_file(folders[kind] / "model.safetensors"), name: torch.ones(2)}
    folder = write(tmp_path / "strange", folders[kind], tensors)
    for load in (load_model, load_decoder):
        with pytest.raises(ModelError) as refused:
            load(folder)
        said = str(refused.value)
        assert f"1 tensors that a {kind.lower()} model does not take, the first is {name};" in said and "\n" not in said


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.k_proj.k_scale",
        "model.embeddings.position_ids",
        "model.layers.2.enorm.weight",
        "mtp.layers.0.mlp.up_proj.weight",
        "model.visual.blocks.0.attn.qkv.weight",
    ],
)
def test_buffers_and_parts_that_text_does_not_need_are_left_out(
    folders: Mapping[str, Path], tmp_path: Path, name: str
) -> None:
    tensors = {**load_file(folders["Llama"] / "model.safetensors"), name: torch.ones(2)}
    folder = write(tmp_path / "more", folders["Llama"], tensors)
    expected = weights_of(load_model(folders["Llama"]))
    for load in (load_model, load_decoder):
        assert all(torch.equal(tensor, expected[one]) for one, tensor in weights_of(load(folder)).items())


@pytest.mark.parametrize("name", ["weight_packed", "weight_scale_2", "weight_global_scale"])
def test_weights_that_are_packed_to_fewer_bits_are_refused_by_name(
    folders: Mapping[str, Path], tmp_path: Path, name: str
) -> None:
    full = f"model.layers.0.mlp.up_proj.{name}"
    tensors = {**load_file(folders["Llama"] / "model.safetensors"), full: torch.ones(2, dtype=torch.uint8)}
    folder = write(tmp_path / "packed", folders["Llama"], tensors)
    with pytest.raises(ModelError, match=r"packed to fewer bits by .*up_proj.*use the model's folder in bfloat16"):
        load_decoder(folder)
