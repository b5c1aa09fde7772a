"""Files of llama.cpp's own converter have the ids, the template and the sampling of the folders that they were made of.

`make test-tokenizers` fetches the converter, in the source of llama-cpp-python, and the published tokenizers.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from card.models.facts import end_token_ids, sampling_defaults
from card.models.loading import load_decoder, load_tokenizer
from tests.text.made_tokenizers import around, marks_of, mistral, npm, npm_pieces, phi3, tekken
from tests.text.test_published_tokenizers import KEPT, TEXTS, pieces

pytestmark = [pytest.mark.tokenizers, pytest.mark.timeout(3600)]

VERSION = "0.3.36"
SOURCE = f"llama_cpp_python-{VERSION}"
SAMPLING = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "do_sample": True}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of models with a tokenizer that is published."""

    model_type: str
    make: Callable[[Path], None]  # writes the tokenizer to a folder
    sizes: dict[str, Any] = field(default_factory=dict)  # beside those that all have


FAMILIES = {
    "Llama-2": Family("llama", partial(npm_pieces, "llama2", adds_blank=True)),
    "Llama-3": Family("llama", partial(npm, "llama3")),
    "Llama-3.1": Family("llama", partial(npm, "llama3_1")),
    "Mistral-7B-v0.3": Family("mistral", lambda made: mistral(made, converter()[1])),
    "Mistral-Nemo": Family("mistral", tekken),
    "Phi-3": Family("phi3", phi3, {"num_key_value_heads": 2}),
    "gemma-2": Family("gemma2", partial(npm_pieces, "gemini", adds_blank=False)),
    "gemma-3": Family("gemma3_text", partial(npm_pieces, "gemma3", adds_blank=False)),
    "Qwen3": Family("qwen3", partial(npm, "qwen3")),
    "gpt-oss": Family("gpt_oss", partial(npm, "gptoss"), {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "DeepSeek": Family("llama", partial(npm, "deepseek_v3")),
}


@functools.cache
def converter() -> tuple[Path, str]:
    """Return llama.cpp's folder, fetched if it is not there, and the path for modules of its converter."""
    place, modules = KEPT / SOURCE / "vendor" / "llama.cpp", KEPT / "modules"
    pip = [sys.executable, "-m", "pip", "--quiet"]
    if not place.is_dir():
        KEPT.mkdir(parents=True, exist_ok=True)
        options = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(KEPT)]  # what builds it may be binary
        subprocess.run([*pip, "download", *options, f"llama-cpp-python=={VERSION}"], check=True, timeout=600)
        with tarfile.open(KEPT / f"{SOURCE}.tar.gz") as files:
            files.extractall(KEPT, filter="data")
    if not modules.is_dir():
        subprocess.run(
            [*pip, "install", "--no-deps", "--target", str(modules), "sentencepiece", "protobuf"],
            check=True,
            timeout=300,
        )
    return place, os.pathsep.join((str(place / "gguf-py"), str(modules)))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_and_the_file_made_of_it_give_the_same(name: str, tmp_path: Path) -> None:
    family, made, file = FAMILIES[name], tmp_path / name, tmp_path / "model.gguf"
    made.mkdir()
    family.make(made)
    (made / "config.json").write_text(json.dumps({"model_type": family.model_type}))
    tokenizer = load_tokenizer(made)
    ids = {"bos_token_id": tokenizer.convert_tokens_to_ids(tokenizer.bos_token or ""), "pad_token_id": None}
    rows = -(-len(tokenizer) // 8) * 8
    config = AutoConfig.for_model(
        family.model_type, vocab_size=rows, eos_token_id=tokenizer.eos_token_id, **ids, **(SIZES | family.sizes)
    )
    AutoModelForCausalLM.from_config(config).to(torch.float16).save_pretrained(made)
    (made / "generation_config.json").write_text(json.dumps({**SAMPLING, "eos_token_id": tokenizer.eos_token_id}))
    place, modules = converter()
    subprocess.run(
        [sys.executable, str(place / "convert_hf_to_gguf.py"), str(made), "--outfile", str(file), "--outtype", "f16"],
        check=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": modules, "HF_HUB_OFFLINE": "1"},
    )
    of_folder, of_file = load_tokenizer(made), load_tokenizer(file, cache_dir="")
    for text in (*TEXTS, *pieces(200), *around(marks_of(of_folder))):
        for with_specials in (True, False):
            expected = of_folder.encode(text, add_special_tokens=with_specials)
            assert of_file.encode(text, add_special_tokens=with_specials) == expected, text
            assert of_file.decode(expected) == of_folder.decode(expected)
    assert of_file.chat_template == of_folder.chat_template
    models = load_decoder(made), load_decoder(file, cache_dir="")
    assert sampling_defaults(models[1]) == sampling_defaults(models[0]) != {}
    # A file names one end; the others are those of the family, known by name.
    assert end_token_ids(models[0], of_folder) <= end_token_ids(models[1], of_file)
