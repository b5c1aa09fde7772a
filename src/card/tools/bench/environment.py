"""The environment of a run: command, commit, versions, machine, cores; and fingerprints of pairs of models."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from card import __version__
from card.errors import SettingsError, named
from card.machine.packages import installed_version
from card.machine.processor import processor_name
from card.machine.threads import usable_cores
from card.models.facts import weight_samples
from card.models.loaded_model import LoadedModel

# Settings of every engine whose decoding is timed: wait for its drafter, and measure latencies again.
MEASURED_START: Mapping[str, Any] = MappingProxyType(
    {"start_timeout_s": 600.0, "wait_for_drafter": True, "cache": False}
)

_PACKAGE = Path(__file__).parents[2]
_THIN_SHELLS = ("cli", "server", "bench/report", "planner", "ray")  # they neither decode nor time
_FINGERPRINT_VALUES = 64  # of each tensor: enough to recognise weights, and quick for large models


@dataclass(frozen=True, slots=True)
class Environment:
    """Facts of a run that no option chooses."""

    command: str
    commit: str
    date: str  # ISO 8601, UTC
    versions: dict[str, str]
    machine: dict[str, Any]


def describe_run() -> Environment:
    """Return command, commit, versions and machine as they are now."""
    return Environment(
        command=_command(),
        commit=_commit(),
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        versions={
            "card": __version__,
            "card_sources": _sources_sha256()[:16],
            "python": platform.python_version(),
            **{package: installed_version(package) for package in ("torch", "transformers")},
        },
        machine={
            "cpu": processor_name(),
            "cores": len(allowed_cores()),
            "platform": platform.platform(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "load_average": round(os.getloadavg()[0], 2),  # before the run: figures of a busy machine are unreliable
        },
    )


def allowed_cores() -> tuple[int, ...]:
    """Return the cores that this process may use; all of them where the system does not say."""
    return usable_cores() or tuple(range(os.cpu_count() or 1))


def choose_cores(asked: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the cores of a comparison, the last of them the drafter's: as asked for, or the first and the last one.

    Raises: SettingsError if these are not two cores of this process or more.
    """
    allowed = allowed_cores()
    chosen = asked or (allowed[0], allowed[-1])
    if len(set(chosen)) < max(2, len(chosen)) or not set(chosen) <= set(allowed):
        raise SettingsError(
            f"{named('cores')} must be two or more different ones of {list(allowed)}, such as 0,1, got "
            f"{list(chosen)}: methods that draft beside the target need one for each"
        )
    return chosen


def weights_fingerprint(*models: LoadedModel | None) -> str:
    """Return a fingerprint of the models: of their names, shapes and the first values of each weight."""
    digest = hashlib.sha256()
    for model in models:
        for name, shape, dtype, values in weight_samples(model, _FINGERPRINT_VALUES) if model is not None else ():
            digest.update(f"{name} {tuple(shape)} {dtype}".encode())
            digest.update(values.astype(np.float64).tobytes())
        digest.update(b"|")
    return digest.hexdigest()[:16]


def _command() -> str:
    """Return the command as a user would type it again."""
    program = Path(sys.argv[0])
    if program.suffix != ".py" or program.name == "__main__.py":
        return shlex.join(["card", *sys.argv[1:]])
    return shlex.join(["python", os.path.relpath(program), *sys.argv[1:]])


def _commit() -> str:
    """Return the commit of the package's working tree, marked if it has changes; "unknown" outside its repository."""
    answers = []
    known = ["ls-files", "--error-unmatch", str(_PACKAGE / "__init__.py")]  # it may lie in another repository's folder
    for question in (known, ["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(["git", *question], cwd=_PACKAGE, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return "unknown"
        answers.append(done.stdout.strip())
    return answers[1] + ("-dirty" if answers[2] else "")


def _sources_sha256() -> str:
    """Return a checksum of all code of this package that decodes or measures."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = path.relative_to(_PACKAGE).as_posix()
        if not name.startswith(tuple(f"{shell}/" for shell in _THIN_SHELLS)):
            digest.update(f"{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()
