"""The core where torch and transformers cannot be imported: text by the command line, from Python and from a file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.alone import ALONE, QUESTION, alone, text_of
from tests.processes import unhurried


@pytest.mark.parametrize(
    "options",
    [
        ("--method", "card"),
        ("--method", "sps", "--temperature", "0.8", "--seed", "3", "--top-p", "0.9", "--frequency-penalty", "0.5"),
        ("--method", "suffix", "--dtype", "int8"),
        ("--method", "lookup", "--target-cost", "20M"),
        ("--method", "pearl", "--regex", "[0-9 ]+"),
    ],
    ids=lambda options: options[1],
)
def test_text_is_written(options: tuple[str, ...]) -> None:
    assert text_of(*options)


def test_python_programs_answer_with_logprobs_and_logits_processors() -> None:
    program = ALONE + (
        "from card import LLM, SamplingParams\nPARAMS = SamplingParams(max_tokens=9, logprobs=2)\n"
        "with LLM('demo-target', 'demo-draft', cache=False) as llm:\n"
        "    (answer,) = llm.chat([{'role': 'user', 'content': sys.argv[1]}], PARAMS)\n"
        "    assert len(answer.outputs[0].logprobs) == len(answer.outputs[0].token_ids)\n"
        "    print(answer.outputs[0].text)\n"
    )
    done = alone(QUESTION, program=program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_an_example_that_needs_more_says_in_one_line_what_installs_it() -> None:
    example = Path(__file__).parents[1] / "examples" / "transformers_generate.py"
    done = alone(str(example), program=ALONE + "import runpy; runpy.run_path(sys.argv[1])\n")
    assert done.returncode == 1
    assert unhurried(done.stderr).count("\n") == 1
    assert (
        f"torch is not installed: {shlex.quote(sys.executable)} -m pip install" in done.stderr
        and "[torch]" in done.stderr
    )


def test_a_model_that_needs_more_is_refused_in_one_line_with_the_command_that_installs_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "falcon_mamba", "architectures": ["FalconMambaForCausalLM"]}')
    done = alone("generate", "hi", "--target", str(tmp_path), "--method", "vanilla")
    assert done.returncode == 2
    assert unhurried(done.stderr).count("\n") == 1
    assert "pip install" in done.stderr and "[torch]" in done.stderr
