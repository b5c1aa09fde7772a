"""Models load from a folder without network and noise, and each failure is one clear line."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging as transformers_logging

from card.backends.transformers.arrays import torch_dtype
from card.backends.transformers.devices import computes_bfloat16
from card.backends.transformers.loading import load_model
from card.errors import ModelError, VocabularyError
from card.models import demo
from card.models.demo import DEMO_NAMES, DEMO_PROBLEMS, demo_folder
from card.models.facts import end_token_ids, parameter_count, vocab_size
from card.models.loading import check_pair, load_decoder, load_tokenizer
from card.models.own.decoder_model import is_int8
from card.models.warn_once import warn_once
from tests.reaching_in import say_why_not_int8
from tests.tiny import tiny

V = 32


def make_model(vocab_rows: int = V) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": [3, 4]}
    config = LlamaConfig(**tiny(vocab_rows, **sizes, **heads, **ends, tie_word_embeddings=True))
    return LlamaForCausalLM(config).to(torch.bfloat16)


def save_pair_member(folder: Path, vocab_rows: int = V, last_token: str = "w31") -> None:
    model = make_model(vocab_rows)
    model.generation_config.eos_token_id = 5
    model.save_pretrained(folder)
    vocab = {f"w{idx}": idx for idx in range(V - 1)} | {last_token: V - 1}
    core = Tokenizer(models.WordLevel(vocab=vocab, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w6", unk_token="w0").save_pretrained(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its tokenizer; not to be changed."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_pair_member(folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copied"))


def change(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def failure(name: str | Path, **options: object) -> str:
    """Return the text of the error that loading raises; it is one line."""
    with pytest.raises(ModelError) as caught:
        load_model(name, **options)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    return text


@pytest.mark.usefixtures("no_network")
def test_a_folder_loads_as_stored_ready_for_inference_and_without_network(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("card.backends.transformers.loading.computes_bfloat16", lambda device: True)
    model = load_model(saved)
    assert isinstance(model, LlamaForCausalLM)
    assert (model.dtype, model.device.type, model.training) == (torch.bfloat16, "cpu", False)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), make_model().parameters(), strict=True))
    assert load_tokenizer(str(saved)).encode("w3", add_special_tokens=False) == [3]


@pytest.mark.parametrize(
    ("dtype", "wanted"), [("float32", torch.float32), ("fp16", torch.float16), (torch.float64, torch.float64)]
)
def test_the_dtype_is_the_one_asked_for(saved: Path, dtype: str | torch.dtype, wanted: torch.dtype) -> None:
    assert load_model(saved, dtype=dtype).dtype == wanted


@pytest.mark.parametrize("load", [load_model, load_decoder])
def test_weights_that_are_cut_off_are_told_with_both_sizes(
    saved: Path, tmp_path: Path, load: Callable[..., Any]
) -> None:
    folder = shutil.copytree(saved, tmp_path / "cut")
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    with pytest.raises(ModelError, match=r"is cut off: .* end at byte \d+, the file at \d+; download it again$"):
        load(folder)


@pytest.mark.parametrize("load", [load_model, load_decoder])
def test_without_bfloat16_instructions_or_machine_code_sixteen_bits_are_widened_unless_they_are_asked_for(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, load: Callable[..., Any]
) -> None:
    stored = load_model(saved, dtype="bfloat16")
    monkeypatch.setattr("card.backends.transformers.loading.computes_bfloat16", lambda device: False)
    say_why_not_int8(monkeypatch, None)
    assert torch_dtype(load(saved).dtype) == torch.bfloat16  # which our machine code multiplies as they are
    say_why_not_int8(monkeypatch, "not here")
    warn_once.cache_clear()
    widened = [load(saved), load(saved)]
    assert [model.dtype for model in widened] == [torch.float32] * 2
    assert torch.equal(widened[0].lm_head.weight, stored.lm_head.weight.float())
    assert caplog.text.count("widened to float32") == 1
    assert load(saved, dtype="bfloat16").dtype == torch.bfloat16
    assert is_int8(load(saved, dtype="int8"))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="only oneDNN knows the CPU's instructions")
def test_only_a_cpu_can_lack_bfloat16_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_them in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda has_them=has_them: has_them)
        assert [computes_bfloat16(device) for device in ("cpu", torch.device("cpu"), "cuda:0")] == [
            has_them,
            has_them,
            True,
        ]


def test_loading_is_silent_and_leaves_the_settings_as_they_were(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bars, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.enable_progress_bar()
    transformers_logging.set_verbosity(logging.DEBUG)
    try:
        load_model(saved)
        load_tokenizer(saved)
        failure(saved.parent / "missing")
        assert capfd.readouterr() == ("", "")
        assert transformers_logging.get_verbosity() == logging.DEBUG
        assert transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.set_verbosity(level)
        if not bars:
            transformers_logging.disable_progress_bar()


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["./missing", "../missing", "/missing/model", "~/missing-model", "a/b/c", "missing/"])
def test_a_path_that_is_not_there_is_named(name: str) -> None:
    assert failure(name) == f"there is no folder {name}; give a model folder, or a name on the hub"


@pytest.mark.usefixtures("no_network")
def test_something_else_than_a_model_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert "gpt2 holds no config.json, so it is no model folder" in failure("gpt2")
    assert "./model.gguf is cut off or damaged: it ends inside its header" in failure("./model.gguf")
    (tmp_path / "weights.bin").write_bytes(b"PK")
    assert "./weights.bin is a file, so it is no model folder" in failure("./weights.bin")
    assert "give a folder saved by transformers, or a GGUF file" in failure("./weights.bin")
    (tmp_path / "gpt2" / "gpt2.Q4.gguf").write_bytes(b"GGUF")
    assert "gpt2 holds GGUF files and no config.json; name the file, such as gpt2/gpt2.Q4.gguf" in failure("gpt2")


def test_other_models_than_causal_ones_are_refused(tmp_path: Path) -> None:
    small = tiny(V, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    BertForMaskedLM(BertConfig(**small)).save_pretrained(tmp_path / "bert")
    t5 = T5Config(vocab_size=V, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1, decoder_start_token_id=0)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    assert "is no causal language model but BertForMaskedLM" in failure(tmp_path / "bert")
    assert "is no causal language model but T5ForConditionalGeneration" in failure(tmp_path / "t5")


def test_other_causal_architectures_load(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=8, n_layer=1, n_head=2, n_positions=16)).save_pretrained(tmp_path)
    assert isinstance(load_model(tmp_path), GPT2LMHeadModel)


@pytest.mark.parametrize("kept_bytes", [0, 30, -20])
def test_cut_off_weights_are_refused(copied: Path, kept_bytes: int) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    assert f"the weights of {copied} cannot be read: " in failure(copied)


def test_missing_weights_and_weights_of_another_shape_are_refused(copied: Path) -> None:
    weights = copied / "model.safetensors"
    tensors = load_file(weights)
    key = "model.layers.0.mlp.up_proj.weight"
    for missing, said in (
        ("model.norm.weight", "are incomplete: 1 tensors are missing, the first is model.norm.weight"),
        (key, "tensors are missing or have unknown names, the first is layers.0.mlp.up_proj.weight"),
    ):
        rest = {name: tensor for name, tensor in tensors.items() if name != missing}
        save_file(rest, weights, metadata={"format": "pt"})
        assert said in failure(copied)
    save_file(tensors | {key: tensors[key][:1].clone()}, weights, metadata={"format": "pt"})
    assert "do not fit its config: it asks for 384 numbers in layers.0.mlp.up_proj.weight, and they have 16" in failure(
        copied
    )
    weights.unlink()
    assert "no file named model.safetensors" in failure(copied)
    (copied / "pytorch_model.bin").write_bytes(b"junk")
    assert "cannot be read" in failure(copied)


@pytest.mark.parametrize("config", ["{not json", "{}", '{"model_type": "nope"}', "[]"])
def test_a_config_that_cannot_be_used_is_refused(copied: Path, config: str) -> None:
    (copied / "config.json").write_text(config)
    assert f"the config of {copied} cannot be used: " in failure(copied)


def test_code_from_a_model_folder_is_not_run(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (copied / "config.json").write_text(json.dumps(config))
    (copied / "mine.py").write_text("raise SystemExit('ran')")
    assert "cannot be used" in failure(copied)


def test_a_hub_name_without_network_says_that_it_is_neither_here_nor_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise ConnectionError("[Errno -2] Name or service not known\nmore about it")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    text = failure("nobody/no-such-model")
    assert text.startswith(
        "nobody/no-such-model is neither a folder here nor in the local cache, and the hub cannot be used: "
    )
    assert "[Errno -2] Name or service not known; give a model folder" in text
    with pytest.raises(ModelError, match="neither a folder here"):
        load_tokenizer("nobody/no-such-model")
    monkeypatch.setattr("card.models.by_transformers.find_spec", lambda _: None)  # as where PyTorch is not installed
    with pytest.raises(ModelError) as caught:
        load_decoder("nobody/no-such-model")
    assert str(caught.value) == text


def test_a_name_that_the_hub_cannot_have_is_refused() -> None:
    assert "this is not a valid name there" in failure("what is this?")
    assert "this is not a valid name there" in failure("")


def test_unknown_dtypes_and_devices_say_what_is_allowed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert failure(saved, dtype="int4").startswith("unknown dtype 'int4'; allowed: auto, int8, float64, float32")
    assert "unknown dtype 'torch.int8'" in failure(saved, dtype=torch.int8)
    for device in ("cuda", "cuda:0", "gpu", "cpu:1", "meta", ""):
        assert failure(saved, device=device).startswith(f"device {device!r} is not available here; allowed: cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "allowed: cpu, cuda:0, cuda:1" in failure(saved, device="cuda:2")


def test_a_tokenizer_that_is_missing_or_broken_is_refused(copied: Path) -> None:
    (copied / "tokenizer.json").write_text("{broken")
    with pytest.raises(ModelError, match=r"the tokenizer of .* is missing or cannot be read: [^\n]*$"):
        load_tokenizer(copied)
    (copied / "tokenizer.json").unlink()
    (copied / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=r"the tokenizer of .* is missing or cannot be read: [^\n]*$"):
        load_tokenizer(copied)


def test_a_pair_shares_a_tokenizer(saved: Path, tmp_path: Path) -> None:
    save_pair_member(tmp_path / "padded", vocab_rows=V + 8)
    target, tokenizer = load_model(saved, dtype="float32"), load_tokenizer(saved)
    check_pair(tokenizer, target, tmp_path / "padded")
    assert (vocab_size(target), vocab_size(load_model(tmp_path / "padded"))) == (V, V + 8)


@pytest.mark.parametrize(
    ("of_generation", "of_config", "expected"),
    [
        (5, [3, 4], {5}),
        ([5, 7], 3, {5, 7}),
        (None, [3, 4], {3, 4}),
        (None, None, {6}),
        ([5, V, -1], 3, {5}),  # ids that no token has
        ([], 3, {3}),
    ],
)
def test_a_text_ends_at_the_ids_of_the_first_place_that_states_any(
    copied: Path, of_generation: object, of_config: object, expected: set[int]
) -> None:
    change(copied / "generation_config.json", eos_token_id=of_generation)
    change(copied / "config.json", eos_token_id=of_config)
    tokenizer = load_tokenizer(copied)
    for model in (load_model(copied), load_decoder(copied)):
        assert end_token_ids(model, tokenizer) == expected
        assert end_token_ids(model) == expected - {6}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m['content'] }}<turn>\n{% endfor %}<over>", {5, 30}),
        ("{% for m in messages %}{{ m['content'] }} {{ eos_token }}{% endfor %}", {5, 6}),
        ("{% for m in messages %}{{ m['content'] }} w9{% endfor %}", {5}),  # not a special token
        ("{{ messages[0]['content'] }}<turn>{{ raise_exception('no') }}", {5}),
        ("{{ nothing.at.all }}", {5}),
    ],
)
def test_the_token_that_closes_an_answer_in_the_chat_template_ends_a_text(
    copied: Path, template: str, expected: set[int]
) -> None:
    tokenizer = load_tokenizer(copied)
    tokenizer.backend_tokenizer.add_special_tokens(["<turn>", "<over>"])
    tokenizer.chat_template = template
    turn = tokenizer.convert_tokens_to_ids("<turn>")
    model = make_model(V + 8)
    model.generation_config.eos_token_id = 5
    assert end_token_ids(model, tokenizer) == {turn if one == 30 else one for one in expected}


@pytest.mark.parametrize(("others", "is_end"), [(["<|flush|>", "<|calls|>"], False), (["<|flush|>"], True)])
def test_a_token_that_ends_a_part_of_an_answer_ends_no_text(copied: Path, others: list[str], is_end: bool) -> None:
    """Solar-Open thinks up to the token that ends its turns too, and ends its answers with another one."""
    tokenizer = load_tokenizer(copied)
    tokenizer.backend_tokenizer.add_special_tokens(["<|end|>", *others])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"
    model = make_model(V + 8)
    model.generation_config.eos_token_id = 5
    turn = tokenizer.convert_tokens_to_ids("<|end|>")
    assert end_token_ids(model, tokenizer) == ({5, turn} if is_end else {5})


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("config.json", {"eos_token_id": ["3"]}, "eos_token_id"),
        ("config.json", {"max_position_embeddings": "silu"}, "max_position_embeddings"),
        ("config.json", {"max_position_embeddings": {"a": 1}}, "max_position_embeddings"),
        (
            "config.json",
            {"max_position_embeddings": -1},
            "its max_position_embeddings is -1, it must be a number above",
        ),
        ("config.json", {"model_type": ["llama"]}, "cannot be used"),
        ("config.json", {"layer_types": 1}, "cannot be used"),
        ("config.json", {"head_dim": 7}, "RoPE requires an even rotary dimension, but got `head_dim`=7"),
        ("config.json", {"head_dim": 6}, "do not fit its config: it asks for 192 numbers in layers.0.self_attn.q_proj"),
        ("config.json", {"num_hidden_layers": 2147483648}, "its num_hidden_layers is 2147483648, and at most 4096"),
        ("config.json", {"num_hidden_layers": 300}, "its num_hidden_layers is 300, but the weights are 11 tensors"),
        ("config.json", {"vocab_size": 10**9}, "it asks for 16000000000 numbers in embed_tokens.weight"),
        ("config.json", {"intermediate_size": 10**12}, "do not fit its config"),
        ("config.json", {"num_labels": 2147483648}, "its num_labels is 2147483648"),
        (
            "generation_config.json",
            {"eos_token_id": "</s>"},
            "its eos_token_id is </s>, it must be a token id or a list",
        ),
        ("generation_config.json", {"eos_token_id": {"a": 1}}, "eos_token_id"),
        ("generation_config.json", {"temperature": "warm"}, "temperature"),
        ("generation_config.json", {"max_new_tokens": [7]}, "cannot be used"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_one_line(
    copied: Path, file: str, changes: dict[str, object], said: str
) -> None:
    change(copied / file, **changes)
    for load in (load_model, load_decoder):
        with pytest.raises(ModelError) as caught:
            load(copied)
        text = str(caught.value)
        assert str(copied) in text
        assert said in text
        assert "\n" not in text


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/../../b", "C:\\b", "..\\b", ""])
def test_weights_outside_the_folder_are_refused_by_name(copied: Path, name: str) -> None:
    weights = copied / "model.safetensors"
    key = "model.norm.weight"
    weights.rename(copied.parent / "other.safetensors")
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        (copied / index).write_text(json.dumps({"metadata": {}, "weight_map": {key: name}}))
        for load in (load_model, load_decoder):
            with pytest.raises(ModelError, match="which is not in the folder") as caught:
                load(copied)
            assert f"{index} names {name!r}" in str(caught.value)
        (copied / index).unlink()


def test_an_index_without_files_is_refused(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    for content in ("[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{not json"):
        (copied / "model.safetensors.index.json").write_text(content)
        assert f"the weights of {copied} cannot be read: " in failure(copied)


def test_a_pair_with_other_tokens_or_too_few_rows_is_refused(saved: Path, tmp_path: Path) -> None:
    save_pair_member(tmp_path / "other", last_token="other")
    save_pair_member(tmp_path / "short", vocab_rows=V - 1)
    target, tokenizer = load_model(saved), load_tokenizer(saved)
    with pytest.raises(VocabularyError, match=r"other does not fit the target: token 31 is 'w31' in the target's"):
        check_pair(tokenizer, target, tmp_path / "other")
    with pytest.raises(VocabularyError, match="the draft model has 31 embedding rows"):
        check_pair(tokenizer, target, tmp_path / "short")


def test_tied_embeddings_count_once() -> None:
    model = make_model()
    assert parameter_count(model) == V * 16 + (4 * 16 * 16 + 3 * 16 * 24 + 2 * 16) + 16


def test_the_demo_names_lead_into_the_package(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.resources, "files", lambda package: tmp_path)
    with pytest.raises(ModelError, match="the demo target model is not part of this installation"):
        demo_folder("target")
    shutil.copytree(saved, tmp_path / "models" / "demo_pair" / "target")
    assert demo_folder("target") == tmp_path / "models" / "demo_pair" / "target"
    assert set(DEMO_NAMES) == {"demo-target", "demo-draft"}
    assert isinstance(load_model("demo-target"), LlamaForCausalLM)
    assert "the demo draft model is not part" in failure("demo-draft")


def test_the_demo_problems_are_short_questions() -> None:
    assert len(set(DEMO_PROBLEMS)) == len(DEMO_PROBLEMS) >= 10
    assert all(40 < len(problem) < 300 and problem.endswith("?") and problem.isascii() for problem in DEMO_PROBLEMS)
