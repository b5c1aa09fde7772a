"""Clients as processes: where their programs lie, what they see of the environment, and what the server counted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx2

KEY = "key-for-tests"
FOLDER = Path(__file__).parent
_TIMEOUT_S = 3600.0  # of a hung machine: schemathesis took 34 minutes on a busy one


def installed(name: str, how: str) -> str:
    """Return the path of a program: beside this Python, or of the system."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    assert found is not None, f"{name} is not installed; {how}"
    return found


def run_client(*arguments: str, folder: Path, env: dict[str, str] | None = None) -> str:
    """Run a client to its end, without a network besides this machine, and return what it printed.

    Raises: AssertionError with all that it printed if its status is not 0.
    """
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        arguments,
        cwd=folder,
        env={**os.environ, **offline, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}"
    return done.stdout


def metric(url: str, name: str, label: str = "") -> float:
    """Return one of the server's figures."""
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f"{name}{{") and label in line]
    assert len(found) == 1, (name, label, found)
    return float(found[0].rpartition(" ")[2])
