"""A process that compiles machine code while this one reads files: a first start keeps two cores busy with it.

The code reaches this process through the folder where it is kept. What the other process is compiling is waited for;
what it has not begun is compiled here, when it is needed. So it may fail, or be missing, at any time.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable
from types import TracebackType

from card.kernels.machine_code import has_machine_code, machine_code
from card.machine.children import import_paths
from card.machine.container import num_usable_cores

_PROGRAM = """import sys
sys.path += sys.argv[1:]
from card.kernels.compiler_process import compile_told
compile_told()
"""
_PASS = "passes_run"  # the last part of a pass that is compiled


class CompilerProcess:
    """Compiles requested functions whose machine code is not kept yet, in a process that the first of them starts.

    A ``with`` block ends when all of them are compiled. Our own process compiles too at the end, so both cores work.
    """

    def __init__(self, *, patience_s: float = 60.0) -> None:
        """Begin with a pass, which every model needs.

        Args:
            patience_s: seconds that the process may still take at the end of the block, where a pass takes 3; then it
                is ended, and what it leaves is compiled when it is needed.
        """
        self._patience_s = patience_s
        self._is_useful = has_machine_code() and num_usable_cores() > 1 and bool(sys.executable)
        self._process: subprocess.Popen[bytes] | None = None
        self._requested: list[str] = []
        if self._is_useful and machine_code("object_code").is_missing(_PASS):
            self._start()

    def compile(self, products: Iterable[str]) -> None:
        """Compile the products of these formats, too."""
        if not self._is_useful:
            return
        for name in products:
            if name not in self._requested and machine_code("object_code").is_missing(name):
                self._requested.append(name)
                self._tell(name)

    def __enter__(self) -> CompilerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError), process:  # which waits for its end
            try:
                if kind is None:
                    machine_code("formats").prepare(self._requested)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.communicate(timeout=self._patience_s)  # which closes its input
            finally:
                process.kill()

    def _start(self) -> None:
        with contextlib.suppress(OSError):  # everything is compiled here then
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-E", "-c", _PROGRAM, *import_paths(sys.path)),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C reaches this process only
            )

    def _tell(self, name: str) -> None:
        if self._process is None:
            self._start()
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._process.stdin.write(f"{name}\n".encode())
                self._process.stdin.flush()


def compile_told() -> None:
    """Compile a pass, then the products of each format that standard input names, until it ends."""
    machine_code("team")
    for line in sys.stdin:
        machine_code("formats").prepare([line.strip()])
