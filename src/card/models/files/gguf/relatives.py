"""Architectures of llama.cpp whose files are not read here, but whose models run from a folder of transformers."""

from __future__ import annotations

from collections.abc import Mapping

# By llama.cpp's name, the ``model_type`` of a folder; a test compares both with what is known of them.
RELATIVES: Mapping[str, str] = {
    "afmoe": "afmoe",
    "apertus": "apertus",
    "arcee": "arcee",
    "bitnet": "bitnet",
    "command-r": "cohere",
    "deepseek2": "deepseek_v3",
    "exaone-moe": "exaone_moe",
    "falcon-h1": "falcon_h1",
    "gemma": "gemma",
    "gemma3n": "gemma3n_text",
    "gpt2": "gpt2",
    "gptneox": "gpt_neox",
    "granitehybrid": "granitemoehybrid",
    "jais2": "jais2",
    "jamba": "jamba",
    "kimi-linear": "kimi_linear",
    "llama4": "llama4_text",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "minicpm3": "minicpm3",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
    "olmo": "olmo",
    "phi2": "phi",
    "phimoe": "phimoe",
    "starcoder": "gpt_bigcode",
    "starcoder2": "starcoder2",
}
