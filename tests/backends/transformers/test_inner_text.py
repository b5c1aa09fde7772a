"""Text models inside multimodal checkpoints: the logits of the whole model on text, and nothing else in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from card.backends.transformers.loading import load_model
from card.errors import ModelError
from card.models.facts import context_limit, parameter_count, vocab_size
from card.models.loading import load_decoder
from card.models.protocol import Extension
from card.models.runners import plain_runner
from tests.tiny import tiny

ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT = tiny(61, head_dim=8, max_position_embeddings=64, initializer_range=0.4, **ENDS)
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA4_VISION: dict[str, Any] = {
    **{name: size for name, size in VISION.items() if name != "image_size"},
    "head_dim": 8,
    "num_key_value_heads": 2,
    "position_embedding_size": 16,
}
QWEN_VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "patch_size": 14}
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral3": (
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        {"text_config": {**TEXT, "model_type": "mistral"}, "vision_config": {**VISION, "model_type": "pixtral"}},
    ),
    "gemma3": (
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {"text_config": {**TEXT, "sliding_window": 5}, "vision_config": VISION, "mm_tokens_per_image": 4},
    ),
    "gemma4": (
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "global_head_dim": 16,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 61,
                "num_kv_shared_layers": 2,
                "sliding_window": 5,
            },
            "vision_config": GEMMA4_VISION,
        },
    ),
    "llava": (
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {**QWEN_VISION, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
        },
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {**QWEN_VISION, "out_hidden_size": 32, "deepstack_visual_indexes": []},
        },
    ),
    "llama4": (
        "Llama4Config",
        "Llama4ForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "attention_chunk_size": 4,
                "num_local_experts": 2,
                "moe_layers": [1],
                "intermediate_size_mlp": 24,
            },
            "vision_config": {**VISION, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        },
    ),
}
IDS = [5, 9, 33, 7, 60, 12, 3, 44, 21]


def save(kind: str, folder: Path) -> PreTrainedModel:
    """Save a tiny random model as transformers does; return it."""
    config_name, model_name, parts = SHAPES[kind]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**parts, image_token_index=60)
    model: PreTrainedModel = getattr(transformers, model_name)(config).eval()
    model.save_pretrained(folder)
    return model


def rename(folder: Path, change: Callable[[str], str]) -> None:
    """Give the tensors other names."""
    file = folder / "model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def older(name: str) -> str:
    """Return a tensor's name as most published checkpoints have it."""
    name = name.removeprefix("model.")
    inner = name.removeprefix("language_model.").removeprefix("model.")
    if inner == "lm_head.weight":
        return "language_model.lm_head.weight"
    return name if name == inner else f"language_model.model.{inner}"


def oldest(name: str) -> str:
    """Return a tensor's name as in the first checkpoints of Qwen2-VL and Qwen2.5-VL."""
    name = name.removeprefix("model.")
    if name.startswith("language_model."):
        return "model." + name.removeprefix("language_model.")
    return name


@pytest.mark.parametrize("spelling", ["as saved", "older", "oldest"])
@pytest.mark.parametrize("kind", SHAPES)
def test_logits_are_those_of_the_whole_model_on_text(tmp_path: Path, kind: str, spelling: str) -> None:
    whole = save(kind, tmp_path)
    if spelling != "as saved":
        if spelling == "oldest" and not kind.startswith("qwen"):
            pytest.skip("no checkpoint of this family has these names")
        rename(tmp_path, older if spelling == "older" else oldest)
    with torch.no_grad():
        # The whole Llama 4 fails on text in transformers 5.24: it looks for outputs of images.
        truth = whole.language_model if kind == "llama4" else whole
        expected = truth(input_ids=torch.tensor([IDS])).logits[0]
    model = load_decoder(str(tmp_path))
    assert parameter_count(model) < parameter_count(whole)
    assert (vocab_size(model), context_limit(model)) == (61, 64)
    runner = plain_runner(model, max_model_len=32)
    slot = runner.open()
    logits = runner.forward([Extension(slot, IDS, range(-1, len(IDS) - 1))])[0]
    torch.testing.assert_close(torch.from_numpy(logits), expected, atol=2e-4, rtol=2e-4)


def test_a_checkpoint_without_its_text_model_is_refused(tmp_path: Path) -> None:
    save("llava", tmp_path)
    rename(tmp_path, lambda name: name.replace("language_model", "another_model"))
    with pytest.raises(ModelError, match=r"incomplete|do not fit") as refused:
        load_model(str(tmp_path))
    assert "\n" not in str(refused.value)
