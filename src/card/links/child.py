"""Start of the drafter's process: its import path, its environment, and a start before its settings are known.

Few imports: the command line starts the process before it imports torch itself, so that both import in parallel.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping

from card.config import KERNELS_VARIABLE
from card.machine.children import import_paths

# Runs without the working directory (-P) and without PYTHON* variables (-E) on its import path. The parent's other
# paths come last, where they can shadow nothing. Collecting garbage during imports costs a tenth of a start.
_PROGRAM = """import gc, sys
gc.disable()
sys.path += sys.argv[1:]
from card.assembly.drafter_process import main
main()
"""
_COMMAND = (sys.executable, "-P", "-E", "-c", _PROGRAM)

# Environment variables that the draft model's libraries read. The child does not get any others, above all no keys.
_KEPT_NAMES = frozenset(
    {
        "HOME",
        "LOGNAME",
        "USERPROFILE",
        "PATH",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "TEMP",
        "TMP",
        "SYSTEMROOT",
        "VIRTUAL_ENV",
    }
    | {"LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "XDG_CACHE_HOME", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
    | {"http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", KERNELS_VARIABLE}
)
_KEPT_PREFIXES = (
    *("LC_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH", "PYTORCH_", "CUDA_", "NVIDIA_", "HIP_"),
    *("ROCR_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "MALLOC_"),
)

# Settings that bind threads to cores are left out: the drafter has its own cores.
_BINDINGS = frozenset({"KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY"})


class DrafterChild:
    """A drafter's process that has imported everything and waits for its settings on standard input."""

    def __init__(self, num_threads: int = 1) -> None:
        """Start the process. Raises: OSError if that fails."""
        self.num_threads = num_threads
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            (*_COMMAND, *import_paths(sys.path)),
            stdin=subprocess.PIPE,
            process_group=0,  # Ctrl-C reaches the target's process only
            env=_environment(os.environ, num_threads),
        )

    def tell_ahead(self, line: bytes) -> None:
        """Send the process a line of work for the time before its settings come; a dead process is ignored."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(line + b"\n")
                self._process.stdin.flush()

    def take(self, num_threads: int) -> subprocess.Popen[bytes] | None:
        """Return the process, once, if it is alive and has so many threads."""
        process, self._process = self._process, None
        if process is not None and (num_threads != self.num_threads or process.poll() is not None):
            _end(process)
            return None
        return process

    def close(self) -> None:
        """End the process unless `take` has returned it."""
        if self._process is not None:
            _end(self._process)
            self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


def _environment(environment: Mapping[str, str], num_threads: int) -> dict[str, str]:
    passed_on = {
        name: value
        for name, value in environment.items()
        if name not in _BINDINGS and (name in _KEPT_NAMES or name.startswith(_KEPT_PREFIXES))
    }
    return {**passed_on, "OMP_NUM_THREADS": str(num_threads)}
