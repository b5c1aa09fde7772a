"""Real GGUF files, fetched by scripts/fetch_weights.py --gguf: the memory that they take, and sensible text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from card.kernels.int8_linear import why_not_int8

pytestmark = [pytest.mark.weights, pytest.mark.timeout(1800)]

MOST_BYTES = 6_000_000_000
RUN = """
import json, resource, sys
from card.config import SamplingParams
from card.api.llm import LLM
target, dtype, cache, question = sys.argv[1:]
with LLM(target, dtype=dtype, cache_dir=cache) as llm:
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    params = SamplingParams(max_tokens=40, temperature=0.0)
    is_base = question.endswith(" is")  # a base model has no chat template
    chat = [{"role": "user", "content": question}]
    output = (llm.generate(question, params) if is_base else llm.chat(chat, params))[0]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"loaded": loaded, "most": most, "text": output.outputs[0].text}))
"""


def gguf_file(name: str) -> Path:
    assert os.environ.get("CARD_WEIGHTS"), "set CARD_WEIGHTS to the folder that scripts/fetch_weights.py wrote"
    file = Path(os.environ["CARD_WEIGHTS"]).expanduser() / f"{name}.gguf"
    assert file.is_file(), f"there is no {file}; run scripts/fetch_weights.py {name} --gguf"
    return file


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize(
    ("name", "dtype", "question", "said"),
    [
        ("smollm2-135m", "float32", "What is the capital of France?", "Paris"),
        ("smollm2-135m", "auto", "What is the capital of France?", "Paris"),
        ("qwen-0.5b", "auto", "What is the capital of France?", "Paris"),
        ("qwen-1.5b", "auto", "Write a Python function that adds two numbers.", "def "),
        ("qwen-0.5b", "bfloat16", "What is the capital of France?", "Paris"),
        ("qwen-1.5b", "bfloat16", "Write a Python function that adds two numbers.", "def "),
        ("qwen-1.5b", "int8", "Write a Python function that adds two numbers.", "def "),
        ("gemma-270m", "bfloat16", "France's capital is Paris. Germany's is Berlin. The capital of Italy is", "Rome"),
        ("gemma-270m", "int8", "France's capital is Paris. Germany's is Berlin. The capital of Italy is", "Rome"),
    ],
)
def test_a_real_file_loads_within_6_gb_and_answers(cache: str, name: str, dtype: str, question: str, said: str) -> None:
    if dtype in ("int8", "auto") and (reason := why_not_int8()):
        pytest.skip(reason)
    for _ in range(2):  # converted, then kept
        command = [sys.executable, "-c", RUN, str(gguf_file(name)), dtype, cache, question]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
        assert done.returncode == 0, done.stderr
        ran = json.loads(done.stdout.splitlines()[-1])
        print(name, dtype, {key: round(ran[key] / 1e9, 2) for key in ("loaded", "most")}, "GB:", ran["text"])
        assert said in ran["text"]
        assert ran["most"] < MOST_BYTES
