"""Decoders read without transformers' modelling code are, bit for bit, those that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from card.backends.transformers.arrays import as_tensor, torch_dtype
from card.backends.transformers.loading import load_model
from card.backends.transformers.walking import why_not_walked
from card.errors import ModelError
from card.models.architectures.architecture import rotary_size
from card.models.facts import end_token_ids, parameter_count, sampling_defaults
from card.models.loading import load_decoder
from card.models.own.decoder_model import DecoderModel, read_decoder
from card.models.own.expert_weights import join_experts
from card.models.protocol import Extension
from card.models.runners import plain_runner
from tests.tiny import LLAMA3, LONG_ROPE, YARN, causal, tiny

SIZES = tiny(64, max_position_embeddings=128)
WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
KINDS: dict[str, transformers.PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama, tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama, biases": transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, longer": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama, yarn": transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama, other heads": transformers.LlamaConfig(**SIZES, head_dim=16),
    "gemma2": transformers.Gemma2Config(**SIZES, head_dim=16, sliding_window=9),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=9, sliding_window_pattern=2),
    "granite": transformers.GraniteConfig(**SIZES, attention_multiplier=0.1, residual_multiplier=0.4),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None),
    "mistral, with a window": transformers.MistralConfig(**SIZES, sliding_window=9),
    "phi3": transformers.Phi3Config(**SIZES, pad_token_id=0, partial_rotary_factor=0.5),
    "phi3, longrope": transformers.Phi3Config(
        **SIZES, pad_token_id=0, original_max_position_embeddings=32, rope_parameters=LONG_ROPE
    ),
    "phi3, longrope in part": transformers.Phi3Config(
        **SIZES,
        pad_token_id=0,
        original_max_position_embeddings=32,
        rope_parameters=LONG_ROPE
        | {"short_factor": [1.0, 1.5], "long_factor": [1.5, 6.0], "partial_rotary_factor": 0.5},
    ),
    "llama, longrope": transformers.LlamaConfig(**SIZES, rope_parameters=LONG_ROPE | {"factor": 4.0}),
    "smollm3": transformers.SmolLM3Config(**SIZES, pad_token_id=0, no_rope_layers=[0, 1]),
    "glm4": transformers.Glm4Config(**SIZES, pad_token_id=0, head_dim=16),
    "olmo2": transformers.Olmo2Config(**SIZES),
    "olmo3": transformers.Olmo3Config(**SIZES, **WINDOWS),
    "exaone4": transformers.Exaone4Config(**SIZES, **WINDOWS),
    "cohere2": transformers.Cohere2Config(**SIZES, **WINDOWS),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=8),
    "qwen3, yarn": transformers.Qwen3Config(**SIZES, head_dim=8, rope_parameters=YARN | {"truncate": False}),
    "olmo3, yarn": transformers.Olmo3Config(**SIZES, **WINDOWS, rope_scaling=YARN | {"truncate": False}),
    "glm4, yarn": transformers.Glm4Config(
        **SIZES, pad_token_id=0, head_dim=16, rope_parameters=YARN | {"attention_factor": 1.4}
    ),
    "lfm2": transformers.Lfm2Config(**SIZES, pad_token_id=0, layer_types=["conv", "full_attention"]),
}
_CHOSEN = {"num_experts_per_tok": 2}
EXPERTS: dict[str, transformers.PreTrainedConfig] = {
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SIZES, **_CHOSEN, head_dim=8, num_experts=6, moe_intermediate_size=16, norm_topk_prob=True
    ),
    "qwen3_moe, not normed": transformers.Qwen3MoeConfig(
        **SIZES, **_CHOSEN, num_experts=6, moe_intermediate_size=16, norm_topk_prob=False
    ),
    "qwen3_moe, one layer with an MLP": transformers.Qwen3MoeConfig(
        **SIZES, **_CHOSEN, num_experts=4, moe_intermediate_size=16, mlp_only_layers=[0]
    ),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **SIZES, **_CHOSEN, num_experts=5, moe_intermediate_size=16, shared_expert_intermediate_size=48
    ),
    "mixtral": transformers.MixtralConfig(**SIZES, **_CHOSEN, num_local_experts=4, sliding_window=9),
    "olmoe": transformers.OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=3),
    "granitemoe": transformers.GraniteMoeConfig(
        **SIZES, **_CHOSEN, num_local_experts=6, attention_multiplier=0.1, residual_multiplier=0.4
    ),
}
KINDS |= EXPERTS


def save(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    torch.manual_seed(0)
    model = causal(KINDS[kind]).to(dtype)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    model.generation_config.eos_token_id = [3, 5]
    model.save_pretrained(folder, **options)


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def logits(model: Any) -> torch.Tensor:
    runner = plain_runner(model, max_model_len=64)
    return torch.from_numpy(runner.forward([Extension(runner.open(), list(range(3, 40)), range(-1, 36))])[0])


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_logits_and_facts_are_those_of_transformers(tmp_path: Path, kind: str, dtype: str):
    save(tmp_path, kind, torch.bfloat16 if dtype == "auto" else torch.float32)
    own, theirs = load_decoder(tmp_path, dtype=dtype), load_model(tmp_path, dtype=dtype)
    assert type(own) is DecoderModel
    weights, stored = dict(theirs.named_parameters()), join_experts(own.weights, own.architecture)
    assert stored.keys() == weights.keys()
    for name, weight in stored.items():
        assert isinstance(weight, np.ndarray)
        assert torch.equal(as_tensor(weight), weights[name])
        assert torch_dtype(weight.dtype) == weights[name].dtype
    assert torch.equal(logits(own), logits(theirs))
    assert sampling_defaults(own) == sampling_defaults(theirs)
    assert end_token_ids(own) == end_token_ids(theirs) == {3, 5}
    assert parameter_count(own) == parameter_count(theirs)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "yarn" in kind or "longrope" in kind])
def test_texts_beyond_the_first_context_have_the_logits_of_transformers(tmp_path: Path, kind: str):
    save(tmp_path, kind)
    own, theirs = load_decoder(tmp_path), load_model(tmp_path)
    assert type(own) is DecoderModel
    runner, ids = plain_runner(own, max_model_len=128), [(7 * idx * idx + 3 * idx) % 64 for idx in range(120)]
    slot = runner.open()
    if "longrope" in kind:
        assert runner.switch_len == 32
        runner.make_long(slot)
    (found,) = runner.forward([Extension(slot, ids, range(-1, 119))])
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert np.linalg.norm(found - expected.numpy()) < 1e-5 * float(expected.norm())


def test_layers_behind_the_last_one_which_draft_are_left_out(tmp_path: Path):
    save(tmp_path, "llama")
    change_config(tmp_path, num_hidden_layers=1)
    own = load_decoder(tmp_path)
    assert type(own) is DecoderModel and len(own.layers) == 1
    assert torch.equal(logits(own), logits(load_model(tmp_path)))


@pytest.mark.parametrize("kind", EXPERTS)
def test_the_experts_that_a_pass_reads_are_those_that_transformers_chooses(tmp_path: Path, kind: str):
    save(tmp_path, kind)
    own, theirs, ids = (
        load_decoder(tmp_path),
        load_model(tmp_path),
        [(7 * idx * idx + 3 * idx) % 64 for idx in range(40)],
    )
    runner = plain_runner(own, max_model_len=64)
    chosen: list[torch.Tensor] = []
    for module in theirs.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda *args: chosen.append(args[-1][2]))
    for count in (1, 3, len(ids)):
        chosen.clear()
        slot = runner.open()
        runner.forward([Extension(slot, ids[:count], range(-1, count - 1))])
        runner.close(slot)
        with torch.no_grad():
            theirs(torch.tensor([ids[:count]]))
        distinct = [len(experts.unique()) for experts in chosen]
        assert runner.experts_read == sum(distinct) > 0
        assert len(distinct) == runner.experts.num_expert_layers


def test_weights_in_several_files_are_read(tmp_path: Path):
    save(tmp_path, "llama", max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    own = load_decoder(tmp_path)
    assert type(own) is DecoderModel
    assert torch.equal(logits(own), logits(load_model(tmp_path)))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"sliding_window": 16, "use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0}},
        {"rope_parameters": {name: value for name, value in LLAMA3.items() if name != "factor"}},
        {"rope_parameters": LLAMA3 | {"low_freq_factor": "one"}},
        {"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}},
        {"rope_parameters": YARN | {"factor": 0}},
        {"rope_parameters": YARN | {"factor": "4"}},
        {"rope_parameters": YARN | {"beta_fast": -1.0}},
        {"rope_parameters": YARN | {"mscale": "one"}},
        {"rope_parameters": YARN | {"truncate": "no"}},
        {"rope_parameters": YARN | {"rope_theta": 1.0}},
        {"rope_parameters": LONG_ROPE | {"long_factor": [1.0, 2.0]}},
        {"rope_parameters": LONG_ROPE | {"long_factor": 2.0}},
        {"rope_parameters": LONG_ROPE | {"short_factor": [1.0, 1.0, 1.0, 0.0]}},
        {"rope_parameters": LONG_ROPE | {"original_max_position_embeddings": 1}},
        {"rope_parameters": LONG_ROPE | {"original_max_position_embeddings": 16.5}},
        {"rope_parameters": LONG_ROPE | {"attention_factor": "one"}},
        {"quantization_config": {"quant_method": "gptq"}},
        {"auto_map": {"AutoModelForCausalLM": "code.Model"}},
        {"model_type": "gemma"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"dtype": ...},
        {"num_hidden_layers": 3},
        {"intermediate_size": 64},
        {"vocab_size": 65},
    ],
)
def test_an_unusual_model_is_left_to_transformers(tmp_path: Path, changes: dict[str, Any]):
    save(tmp_path, "llama")
    assert read_decoder(tmp_path, dtype="auto") is not None
    change_config(tmp_path, **changes)
    assert read_decoder(tmp_path, dtype="auto") is None


def test_rotations_by_kinds_that_no_layer_has_are_left_to_transformers_modules(tmp_path: Path):
    save(tmp_path, "mistral")
    change_config(tmp_path, rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4}})
    reason = why_not_walked(load_decoder(tmp_path))
    assert reason == "its config does not say which rotary embedding each layer has"


@pytest.mark.parametrize("part", [1e308, 0, -0.5, [1], "half", float("nan")])
def test_a_share_of_channels_that_cannot_turn_is_named(part: Any):
    config = SimpleNamespace(rope_parameters={"rope_type": "default", "partial_rotary_factor": part})
    with pytest.raises(ModelError, match="partial_rotary_factor must be a number above 0 and at most 1"):
        rotary_size(config, "", 64)


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"mlp_bias": True}])
def test_a_model_with_other_biases_than_its_config_says_is_refused_by_their_name(
    tmp_path: Path, changes: dict[str, bool]
):
    save(tmp_path, "llama, biases")
    assert read_decoder(tmp_path, dtype="auto") is not None
    change_config(tmp_path, **dict.fromkeys(("attention_bias", "mlp_bias"), False) | changes)
    assert read_decoder(tmp_path, dtype="auto") is None
    for load in (load_decoder, load_model):
        with pytest.raises(ModelError, match=r"does not take, the first is model\.layers\.0\..*\.bias"):
            load(tmp_path)


def test_angles_that_files_of_llama_2_hold_are_computed_instead(tmp_path: Path):
    save(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    held = load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(held, file, metadata={"format": "pt"})
    own = load_decoder(tmp_path)
    assert type(own) is DecoderModel
    assert torch.equal(logits(own), logits(load_model(tmp_path)))


def test_broken_weights_are_named_by_the_same_error(tmp_path: Path):
    save(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ModelError, match=r"the weights of .* cannot be read"):
        load_decoder(tmp_path)
