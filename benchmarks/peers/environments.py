"""Build what the peers run in, each in a folder of its own: environments of Python, and llama.cpp from its source.

    python benchmarks/peers/environments.py             # all of them; `run.py` builds what it needs by itself

Everything runs at the lowest priority. What is there already is left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

HERE = Path(__file__).parent
LLAMA_VERSION = "0.3.36"  # of llama-cpp-python, whose source holds the one of llama.cpp
_SOURCE = f"llama_cpp_python-{LLAMA_VERSION}"
_FOLDER_VARIABLE = "CARD_PEERS"
_BUILD_JOBS = "2"
_LEAST_PRIORITY = 19
_LOG_LINES = 3
# By instruction set: what keeps a process from using more. Each is of one library: ours, oneDNN's below torch, torch's.
LIMITS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"avx2": {"CARD_KERNELS": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}}
)
LIMITED_PEERS = ("card", "llama.cpp", "transformers")  # which keep to that
_LLAMA_AVX2 = tuple(f"-DGGML_{name}=ON" for name in ("AVX", "AVX2", "FMA", "F16C", "BMI2"))


class BuildError(Exception):
    """Why something could not be built, in one line."""


def default_folder() -> Path:
    """Return where environments and models lie unless an option says otherwise."""
    return Path(os.environ.get(_FOLDER_VARIABLE) or HERE / ".build").absolute()


@contextlib.contextmanager
def building(folder: Path) -> Iterator[None]:
    """Keep others from building in the same folder at the same time: they wait until this one is done."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "building.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system lets go of it with the process
        yield


def run_logged(command: Sequence[str | Path], log: Path, *, env: Mapping[str, str] | None = None) -> None:
    """Run a command at the lowest priority, its output in a file. Raises: BuildError if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            list(map(str, command)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            preexec_fn=lambda: os.nice(_LEAST_PRIORITY),
            check=False,
        )
    if done.returncode != 0:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        raise BuildError(f"{Path(command[0]).name} failed, see {log}: {' | '.join(lines[-_LOG_LINES:])}")


def python_of(folder: Path, environment: str | None) -> Path:
    """Return the interpreter of an environment; of ours for None."""
    return Path(sys.executable) if environment is None else folder / environment / "bin" / "python"


def llama_source(folder: Path) -> Path:
    """Return where llama.cpp's source is."""
    return folder / _SOURCE / "vendor" / "llama.cpp"


def llama_program(folder: Path, name: str) -> Path:
    """Return a program of llama.cpp."""
    return folder / "llama-build" / "bin" / name


def ik_program(build: Path, name: str) -> Path:
    """Return a program of ik_llama.cpp in the build that a user names. Raises: BuildError if it is not there."""
    program = build.absolute() / "bin" / name
    if not os.access(program, os.X_OK):
        raise BuildError(
            f"{build} has no program bin/{name}; --ik takes the folder that ik_llama.cpp was built in, as "
            "benchmarks/README.md tells"
        )
    return program


def ik_version(build: Path) -> str:
    """Return which ik_llama.cpp was built, as its server says it. Raises: BuildError if it says nothing."""
    command = [str(ik_program(build, "llama-server")), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    found = re.search(r"version: (.+)", done.stdout + done.stderr)
    if found is None:
        raise BuildError(f"{command[0]} --version says no version, so it is no llama-server; build it again")
    return f"ik_llama.cpp {found[1].strip()}"


def ensure(folder: Path, name: str) -> None:
    """Build ``name``, one of `BUILDERS`, unless it is there. Raises: BuildError, OSError."""
    done = folder / f"{name}.installed"
    if not done.is_file():
        print(f"building {name} in {folder}", flush=True)
        BUILDERS[name](folder)
        done.touch()


def _build_llama(folder: Path) -> None:
    """Build llama.cpp for this very processor, or for what its folder names."""
    for tool in ("cmake", "ninja", "c++"):
        if shutil.which(tool) is None:
            raise BuildError(f"{tool} is not installed, and llama.cpp needs it")
    source, build = llama_source(folder), folder / "llama-build"
    if not source.is_dir():
        package = f"llama-cpp-python=={LLAMA_VERSION}"
        download = ["download", "-q", "--no-deps", "--no-binary", "llama-cpp-python", "-d", folder, package]
        run_logged([sys.executable, "-m", "pip", *map(str, download)], folder / "logs" / "llama-download.log")
        archive = folder / f"{_SOURCE}.tar.gz"
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        archive.unlink()
    shutil.rmtree(source / ".git", ignore_errors=True)  # a link to nowhere, for which ninja configures again and again
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF"]
    options += ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
    is_limited = folder.name in LIMITS
    options += ["-DGGML_NATIVE=OFF", *_LLAMA_AVX2] if is_limited else ["-DGGML_NATIVE=ON"]
    if (
        _has_matrix_unit() and not is_limited
    ):  # there this version ends with a segmentation fault, in ggml_backend_amx_mul_mat
        without = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
        options += [f"-DCMAKE_C_FLAGS={without}", f"-DCMAKE_CXX_FLAGS={without}"]
    run_logged(["cmake", "-S", source, "-B", build, "-G", "Ninja", *options], folder / "logs" / "llama-configure.log")
    targets = ["--target", "llama-server", "llama-quantize", "llama-bench"]
    run_logged(["cmake", "--build", build, "-j", _BUILD_JOBS, *targets], folder / "logs" / "llama-build.log")


def _has_matrix_unit() -> bool:
    """Return whether this processor has AMX, and so whether a native build would use it."""
    with contextlib.suppress(OSError):
        return "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return False


def _make_environment(folder: Path, name: str, unwanted: Sequence[str] = ()) -> None:
    """Make an environment from `requirements-NAME.txt`."""
    python, log = python_of(folder, name), folder / "logs" / f"{name}.log"
    if not python.exists():
        run_logged([sys.executable, "-m", "venv", folder / name], log)
    run_logged([python, "-m", "pip", "install", "-r", HERE / f"requirements-{name}.txt"], log)
    if unwanted:
        run_logged([python, "-m", "pip", "uninstall", "-y", *unwanted], folder / "logs" / f"{name}-removed.log")


def _build_openvino(folder: Path) -> None:
    _make_environment(folder, "openvino", ("torchvision",))


def _build_vllm(folder: Path) -> None:
    _make_environment(folder, "vllm", ("torchvision", "torchaudio", "torchcodec"))


BUILDERS: Mapping[str, Callable[[Path], None]] = MappingProxyType(
    {"llama.cpp": _build_llama, "openvino": _build_openvino, "vllm": _build_vllm}
)


def main() -> int:
    """Build what the command line names. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *BUILDERS], help="default: all of them")
    parser.add_argument("--envs", type=Path, default=default_folder(), help=f"default: ${_FOLDER_VARIABLE} or .build")
    args = parser.parse_args()
    failed = False
    for name in args.names or BUILDERS:
        try:
            with building(args.envs.absolute()):
                ensure(args.envs.absolute(), name)
        except (BuildError, OSError) as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
