"""Tiny random models that take images, on disk, with the tokenizer of `tests.pair`; and small pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.pair import make_tokenizer
from tests.tiny import CLEAR, tiny

IMAGE_TOKEN = "<|image|>"
SIDE = 28  # pixels of pictures that LLaVA's processor makes
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}[<|image|>]{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|turn|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_QWEN = {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 7, "spatial_merge_size": 2, "in_channels": 3}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 7,
}
FAMILIES = ("llava", "qwen2_vl", "qwen2_5_vl")


def seeing_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for images and a chat template that places it."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _config(family: str, vocab_size: int, image_id: int) -> tuple[str, Any]:
    ends = {"bos_token_id": None, "eos_token_id": [0, 1], "pad_token_id": None}
    text = tiny(vocab_size, head_dim=8, max_position_embeddings=512, initializer_range=CLEAR, **ends)
    if family == "llava":
        config = transformers.LlavaConfig(
            text_config={**text, "model_type": "llama"}, vision_config=_CLIP, image_token_id=image_id
        )
        return "LlavaForConditionalGeneration", config
    text = {**text, "rope_parameters": _MROPE}
    ids = {"image_token_id": image_id, "video_token_id": 3, "vision_start_token_id": 4, "vision_end_token_id": 5}
    if family == "qwen2_vl":
        vision = {**_QWEN, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
        return "Qwen2VLForConditionalGeneration", transformers.Qwen2VLConfig(
            text_config=text, vision_config=vision, **ids
        )
    vision = {**_QWEN, "intermediate_size": 16, "out_hidden_size": 32, "fullatt_block_indexes": [0], "window_size": 28}
    return "Qwen2_5_VLForConditionalGeneration", transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, **ids
    )


def save_seeing(family: str, folder: Path) -> PreTrainedModel:
    """Save a tiny model of a family with tokenizer and image processor; return it as transformers has it."""
    tokenizer = seeing_tokenizer()
    image_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    class_name, config = _config(family, len(tokenizer), image_id)
    torch.manual_seed(5)
    model: PreTrainedModel = getattr(transformers, class_name)(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "language_model" not in name and "lm_head" not in name and weight.dim() > 1:
                weight.normal_(std=0.4)  # images that matter
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor_of(family).save_pretrained(folder)
    return model


def processor_of(family: str) -> Any:
    """Return the image processor of a family, for tiny pictures."""
    if family == "llava":
        side = {"height": SIDE, "width": SIDE}
        return transformers.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=side)
    return transformers.Qwen2VLImageProcessorPil(min_pixels=14 * 14, max_pixels=56 * 56, patch_size=7)


def picture(seed: int, width: int = 56, height: int = 28) -> Image.Image:
    """Return a picture of coloured noise, the same for each seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def asked(text: str, *pictures: object) -> list[dict[str, Any]]:
    """Return a conversation of one turn that shows pictures and then says a text."""
    parts = [{"type": "image", "image": one} for one in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def generated(model: PreTrainedModel, family: str, messages: list[dict[str, Any]], num_tokens: int) -> list[int]:
    """Return what transformers' own greedy `generate` makes of a conversation."""
    tokenizer, processor = seeing_tokenizer(), processor_of(family)
    parts = messages[0]["content"]
    images = [part["image"] for part in parts if part["type"] == "image"]
    shown = [{"role": "user", "content": [{**part, "image": None} for part in parts]}]
    ids = tokenizer.apply_chat_template(shown, add_generation_prompt=True, return_dict=False)
    image_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    inputs: dict[str, Any] = dict(processor(images=images, return_tensors="pt")) if images else {}
    grids = inputs.get("image_grid_thw")
    sizes = [16] * len(images) if grids is None else [int(grid.prod()) // 4 for grid in grids]
    placed: list[int] = []
    for token_id in ids:
        placed += [token_id] * sizes.pop(0) if token_id == image_id else [token_id]
    token_ids = torch.tensor([placed])
    if family != "llava":
        inputs["mm_token_type_ids"] = (token_ids == image_id).int()
    with torch.no_grad():
        made = model.generate(
            input_ids=token_ids, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, **inputs
        )
    return made[0, len(placed) :].tolist()


def save_text_draft(model: PreTrainedModel, folder: Path, *, noise: float = 0.05) -> None:
    """Save a text model like a target's, a little other, and without the token that stands for images."""
    tokenizer = make_tokenizer()
    text = tiny(len(tokenizer), head_dim=8, max_position_embeddings=512)
    ends = {"bos_token_id": None, "eos_token_id": [0, 1], "pad_token_id": None}
    draft = transformers.LlamaForCausalLM(transformers.LlamaConfig(**text, **ends))
    theirs: dict[str, torch.Tensor] = {
        name.removeprefix("model.language_model."): weight for name, weight in model.state_dict().items()
    }
    torch.manual_seed(6)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            own = theirs[name.removeprefix("model.")]
            own = own[: len(weight)] if own.shape != weight.shape else own
            weight.copy_(own + noise * own.std() * torch.randn_like(own) if own.dim() > 1 else own)
    draft.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
