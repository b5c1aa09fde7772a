"""Running a piece of code under every kind of kernels that the processor has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from card.config import KERNEL_KINDS, KERNELS_VARIABLE
from card.machine.processor import possible_kernels

ROOT = Path(__file__).parents[1]
each_kind = pytest.mark.parametrize("kind", KERNEL_KINDS)


def printed_by(kind: str, code: str) -> str:
    """Return what a program prints under a kind of kernels; skip the test if the processor has it not."""
    if kind not in possible_kernels():
        pytest.skip(f"this processor does not run {kind}")
    env = {**os.environ, KERNELS_VARIABLE: kind}
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()
