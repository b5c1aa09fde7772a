"""Looking at the package fails nowhere; a name whose packages are missing tells which command installs them."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from tests.sources import DOORS

# As if none of these were installed.
_BARE = "import sys\nsys.modules |= dict.fromkeys(('torch', 'transformers', 'vllm', 'ray', 'onnxruntime_genai'))\n"


def _run(program: str, *arguments: str) -> str:
    ran = [sys.executable, "-c", _BARE + program, *arguments]
    done = subprocess.run(ran, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_whatever_looks_at_the_package_needs_no_torch() -> None:
    program = (
        "import inspect, pydoc, card\nfrom card import *\n"
        "assert hf is card.hf and len(inspect.getmembers(card)) == len(card.__all__)\n"
        "print(pydoc.render_doc(card))"
    )
    assert "LLM" in _run(program)


@pytest.mark.parametrize("door", sorted(DOORS))
def test_whatever_looks_at_a_public_module_needs_no_extra(door: str) -> None:
    program = (
        "import inspect, pydoc\nfrom importlib import import_module\nmodule = import_module(sys.argv[1])\n"
        "members = inspect.getmembers(module)\nprint(pydoc.render_doc(module))"
    )
    assert f"card.{door}" in _run(program, f"card.{door}")


@pytest.mark.parametrize("door", sorted(DOORS))
def test_a_public_name_works_or_tells_in_one_line_what_installs_its_packages(door: str) -> None:
    program = (
        "from importlib import import_module\nfrom card import CardError\nmodule = import_module(sys.argv[1])\n"
        "for name in module.__all__:\n"
        "    try:\n        getattr(module, name)\n"
        "    except CardError as error:\n"
        "        assert f'{sys.argv[1]}.{name} needs ' in str(error), error\n"
        "        assert 'pip install' in str(error) and '\\n' not in str(error), error"
    )
    _run(program, f"card.{door}")


@pytest.mark.parametrize("door", ["hf", "series"])
def test_an_open_door_shows_the_names_that_it_has(door: str) -> None:
    module = import_module(f"card.{door}")
    assert dir(module) == sorted(module.__all__)
    assert {getattr(module, name).__module__.split(".")[0] for name in dir(module) if name != "SHAPES"} == {"card"}


def test_a_door_has_no_other_name() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'generat'; it has GenerateOutput, generate, release"):
        import_module("card.hf").generat  # noqa: B018
