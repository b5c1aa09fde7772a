"""The door of the package for transformers."""

import subprocess
import sys


def test_it_is_reached_without_an_import_of_its_own() -> None:
    code = "import card; print(card.hf.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "card.hf"
