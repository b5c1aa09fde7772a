"""Programs that run where torch and transformers cannot be imported."""

from __future__ import annotations

import subprocess
import sys

QUESTION = "Paul has 3 apples and buys 4 more. How many apples does he have?"
# Runs a program as if neither package were installed.
ALONE = """
import importlib.util, sys

LARGE, found = ("torch", "transformers"), importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] in LARGE else found(name, *rest)

class NotHere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in LARGE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotHere())
"""
COMMAND = ALONE + "from card.__main__ import main\nsys.argv[0] = 'card'\nmain()"


def alone(*arguments: str, program: str = COMMAND) -> subprocess.CompletedProcess[str]:
    ran = [sys.executable, "-c", program, *arguments]
    return subprocess.run(ran, capture_output=True, text=True, check=False)


def text_of(*options: str) -> str:
    """Return what `card generate` writes with these options."""
    done = alone("generate", QUESTION, "--max-tokens", "24", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
