"""Thoughts, content and calls are those that llama-server's own parsers find in the same text behind the same prompt.

llama.cpp is the one that `make bench-peers` builds (`python benchmarks/peers/run.py --build-only`). Not compared:
Granite 3.3, Solar and Command R7B, of which it reads content alone, and what its parsers refuse though the model's own
template writes it (two calls without line breaks between them, Python's True and None, an array of mixed types).
"""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.environments import default_folder
from card.text.parts.formats import FORMATS
from tests.server.test_part_grammars import BEFORE_CONTENT, WRITTEN
from tests.text.parts.reading import read
from tests.text.parts.test_answers_of_families import WRITERS, with_call, written

pytestmark = [pytest.mark.tokenizers, pytest.mark.timeout(900)]

PEERS = default_folder()
BUILD = PEERS / "llama-build"
LIBRARIES = (
    "common/libllama-common.a",
    "common/libllama-common-base.a",
    "src/libllama.a",
    "ggml/src/libggml.a",
    "ggml/src/libggml-cpu.a",
    "ggml/src/libggml-base.a",
    "vendor/hash/libvendor-hash.a",
    "vendor/cpp-httplib/libcpp-httplib.a",
)
TEMPLATES = {  # of llama.cpp, by our format
    "hermes": "Qwen-Qwen3-0.6B",
    "qwen3-coder": "Qwen3.5-4B",
    "seed-oss": "ByteDance-Seed-OSS",
    "glm4": "GLM-4.6",
    "minimax-m2": "MiniMax-M2",
    "mistral": "mistralai-Mistral-Nemo-Instruct-2407",
    "mistral-args": "mistralai-Ministral-3-14B-Reasoning-2512",
    "lfm2": "LFM2.5-8B-A1B",
    "gemma4": "google-gemma-4-31B-it",
    "gpt-oss": "openai-gpt-oss-120b",
    "kimi-k2": "Kimi-K2-Thinking",
    "kimi-k3": "Kimi-K3",
    "deepseek-r1": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-v3": "deepseek-ai-DeepSeek-V3.1",
    "deepseek-v3.2": "deepseek-ai-DeepSeek-V3.2",
    "deepseek-v4": "deepseek-ai-DeepSeek-V4",
    "apriel-1.6": "Apriel-1.6-15b-Thinker-fixed",
    "minimax-m3": "MiniMax-M3",
    "gigachat3": "GigaChat3-10B-A1.8B",
    "gigachat3.1": "GigaChat3.1-10B-A1.8B",
    "functionary-v3.1": "meetkai-functionary-medium-v3.1",
    "functionary-v3.2": "meetkai-functionary-medium-v3.2",
    "minicpm5": "openbmb-MiniCPM5-1B",
    "hunyuan3": "tencent-Hy3",
    "muse": "muse-glimmer",
}
PROPERTIES = {
    "p": {"type": "string"},
    "n": {"type": "integer"},
    "l": {"type": "array", "items": {}},
    "o": {"type": "object", "properties": {}},
    "b": {"type": "boolean"},
}
TOOLS: dict[str, Any] = {"rm": {"type": "object", "properties": PROPERTIES}}
NEEDS_MORE = ("mistral", "gigachat3")  # llama.cpp wants an id, or a separator: what their templates write is compared


@functools.cache
def program() -> Path:
    """Return the compiled program that reads answers; the test is skipped where llama.cpp is not built."""
    source = next(iter(PEERS.glob("llama_cpp_python-*/vendor/llama.cpp")), None)
    if source is None or not (BUILD / LIBRARIES[0]).is_file():
        pytest.skip("llama.cpp is not built: python benchmarks/peers/run.py --build-only")
    made = BUILD / "card-answers"
    includes = [f"-I{source / folder}" for folder in ("common", "include", "ggml/include", "vendor")]
    has_ssl = "OPENSSL_SSL_LIBRARY:FILEPATH=/" in (BUILD / "CMakeCache.txt").read_text()
    rest = ["-ldl", "-lm", "-lgomp", "-lpthread", *(("-lssl", "-lcrypto") if has_ssl else ())]
    text = str(Path(__file__).parent / "llama_answers.cpp")
    libraries = [str(BUILD / one) for one in LIBRARIES]
    subprocess.run(["c++", "-std=c++17", *includes, text, "-o", str(made), *libraries, *rest], check=True, timeout=600)
    return made


def ask(form: str, texts: list[str]) -> list[dict[str, Any]]:
    """Return what llama-server's parser finds in answers behind one prompt, and where that prompt ends."""
    path = next(PEERS.glob("llama_cpp_python-*/vendor/llama.cpp/models/templates")) / f"{TEMPLATES[form]}.jinja"
    tools = [
        {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
        for name, schema in TOOLS.items()
    ]
    asked = [{"template": str(path), "text": text, "tools": tools} for text in texts]
    text = subprocess.check_output([str(program())], input=json.dumps(asked), text=True, timeout=300)
    told: list[dict[str, Any]] = json.loads(text)
    return told


def answers(form: str, begun: str | None) -> list[str]:
    """Return texts in a format, behind a prompt that has begun this part."""
    opening = (FORMATS[form].thoughts or ("",))[0]
    found: list[str] = []
    if form in WRITTEN and form not in NEEDS_MORE:
        thoughts, call = WRITTEN[form]
        found = [thoughts + call, thoughts + BEFORE_CONTENT.get(form, "") + "Hello."]
        if begun == "content":
            found = [call, "Hello."]
        elif begun == "thoughts":
            found = [text.removeprefix(opening) for text in found]
    if TEMPLATES[form] in WRITERS and form != "gemma4":  # it writes behind another prompt than llama.cpp
        _, text = written(TEMPLATES[form], with_call({"p": "a\nb", "n": -3}, "Hm so."))
        text = text.rstrip().removesuffix("<|message_sep|>")  # the token that ends GigaChat's answers
        found.append(text.removeprefix(opening) if begun == "thoughts" else text)
    return found


@pytest.mark.parametrize("form", TEMPLATES)
def test_the_parts_are_those_of_llama_server(form: str) -> None:
    prompt = ask(form, [""])[0]["generation_prompt"].rstrip()
    opening, closing = (mark.strip() for mark in FORMATS[form].thoughts or ("\0", "\0"))
    begun: Any = "thoughts" if prompt.endswith(opening) else "content" if prompt.endswith(closing) else None
    texts = answers(form, begun)
    assert texts
    for text, theirs in zip(texts, ask(form, texts), strict=True):
        ours = read(FORMATS[form], [text], TOOLS, starts_in=begun)
        assert "error" not in theirs, text
        thoughts = theirs["thoughts"].strip().removeprefix(opening).strip()  # they show Apriel's mark
        assert (ours.thoughts.strip(), ours.content.strip()) == (thoughts, theirs["content"].strip()), text
        calls = [(name, json.loads(arguments)) for name, arguments in theirs["calls"]]
        assert [(name, json.loads(arguments)) for name, arguments in ours.calls] == calls, text
