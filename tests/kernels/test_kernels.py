"""Kinds of kernels: which run where, what names one, and that all of them compute the same bits."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from card.cli import verify_machine
from card.config import KERNEL_KINDS, KERNELS_VARIABLE
from card.errors import SettingsError
from card.kernels.int8_linear import why_not_int8
from card.machine import processor
from card.machine.processor import kernel_kind, llvm_target, possible_kernels
from card.models import machine_digest

REASON = why_not_int8()
PLAIN = {"avx2", "fma", "f16c"}
SERVER = PLAIN | {"avx512f", "avx512bw", "avx512vl", "avx512vnni"}


@pytest.fixture
def on_processor(monkeypatch: pytest.MonkeyPatch):
    """Let the processor have these features and no others."""

    def become(features: set[str], *, machine: str = "x86_64", has_unit: bool = False) -> None:
        binding = SimpleNamespace(get_host_cpu_features=lambda: dict.fromkeys(features, True))
        monkeypatch.setattr(processor, "import_module", lambda name: binding)
        monkeypatch.setattr(processor.platform, "machine", lambda: machine)
        monkeypatch.setattr(processor, "has_matrix_unit", lambda: has_unit)
        monkeypatch.setattr(processor, "possible_kernels", possible_kernels.__wrapped__)
        monkeypatch.setattr(processor, "kernel_kind", kernel_kind.__wrapped__)

    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    return become


@pytest.mark.parametrize(
    ("features", "has_unit", "expected"),
    [
        (PLAIN, False, ("avx2",)),
        (PLAIN - {"f16c"}, False, ()),
        (PLAIN | {"avxvnni"}, False, ("avx-vnni", "avx2")),
        (SERVER, False, ("avx512-vnni", "avx2")),
        (SERVER | {"amx-tile", "amx-int8"}, True, ("amx", "avx512-vnni", "avx2")),
        (SERVER | {"amx-tile", "amx-int8"}, False, ("avx512-vnni", "avx2")),  # the system does not let us use it
    ],
)
def test_a_processor_runs_the_kinds_whose_instructions_it_has(on_processor, features, has_unit, expected) -> None:
    on_processor(features, has_unit=has_unit)
    assert processor.possible_kernels() == expected
    assert processor.kernel_kind() == (expected[0] if expected else None)


def test_other_processors_run_none(on_processor) -> None:
    on_processor(SERVER, machine="riscv64")
    assert processor.possible_kernels() == ()
    assert processor.kernel_kind() is None


@pytest.mark.parametrize(
    ("dot_products", "matrices", "expected"),
    [(0, 0, ()), (1 << 20, 0, ("arm-dotprod",)), (1 << 20, 1 << 13, ("arm-i8mm", "arm-dotprod"))],
)
def test_an_arm_processor_runs_what_the_system_says_it_has(
    on_processor, monkeypatch, tmp_path: Path, dot_products: int, matrices: int, expected: tuple[str, ...]
) -> None:
    entries = struct.pack("8Q", 6, 4096, 16, 0b11 | dot_products, 26, matrices, 0, 0)
    (tmp_path / "auxv").write_bytes(entries)
    on_processor(SERVER, machine="aarch64")
    monkeypatch.setattr(processor, "AUXILIARY_VECTOR", tmp_path / "auxv")
    monkeypatch.setattr(processor.platform, "system", lambda: "Linux")
    assert processor.possible_kernels() == expected
    if expected:
        assert processor.llvm_target() == ("generic", "+dotprod,+i8mm" if matrices else "+dotprod")


def test_a_kind_that_is_named_gets_no_instruction_beyond_its_own(on_processor, monkeypatch) -> None:
    on_processor(SERVER | {"avxvnni"})
    assert llvm_target() is None, "what is not named is made for the processor as it is"
    for kind, target in [("avx2", ("x86-64-v3", "")), ("avx-vnni", ("x86-64-v3", "+avxvnni"))]:
        monkeypatch.setenv(KERNELS_VARIABLE, kind)
        assert processor.kernel_kind() == kind
        assert llvm_target() == target


def test_a_kind_that_does_not_run_here_is_refused_by_name(on_processor, monkeypatch) -> None:
    on_processor(PLAIN)
    monkeypatch.setenv(KERNELS_VARIABLE, "amx")
    with pytest.raises(SettingsError, match="got 'amx'; allowed: avx2"):
        processor.kernel_kind()
    on_processor(set())
    with pytest.raises(SettingsError, match="allowed: none: int8 needs an x86 processor with AVX2, or an ARM"):
        processor.kernel_kind()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", KERNEL_KINDS)
def test_every_kind_of_kernel_computes_the_bits_of_every_computer(kind: str) -> None:
    if REASON is not None or kind not in possible_kernels():
        pytest.skip(f"this processor does not run {kind}")
    ran = subprocess.run(
        [sys.executable, "-m", "card", "verify-machine", "--json"],
        env={**os.environ, KERNELS_VARIABLE: kind},
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(ran.stdout)
    assert (ran.returncode, found["kernels"], found["digest"]) == (0, kind, machine_digest.EXPECTED), ran.stderr


def test_a_machine_that_computes_other_bits_is_told(monkeypatch, capsys) -> None:
    if REASON is not None:
        pytest.skip(f"no integer passes: {REASON}")
    monkeypatch.setattr(machine_digest, "EXPECTED", "0123456789abcdef")
    assert verify_machine.run(as_json=False) == 1
    assert "Different" in capsys.readouterr().out


@pytest.mark.parametrize(("answer", "is_allowed"), [(0, True), (-1, False)])
def test_the_matrix_unit_is_used_if_the_system_permits_it(on_processor, monkeypatch, answer: int, is_allowed) -> None:
    asked = []

    def syscall(*words) -> int:
        asked.append([word.value for word in words])
        return answer

    permission = processor.has_matrix_unit.__wrapped__
    monkeypatch.setattr(processor.ctypes, "CDLL", lambda name: SimpleNamespace(syscall=syscall))
    on_processor(SERVER)
    assert not permission() and not asked, "a processor without the unit needs no permission"
    on_processor(SERVER | {"amx-tile", "amx-int8"})
    monkeypatch.setattr(processor.platform, "system", lambda: "Linux")
    assert permission() is is_allowed
    assert asked == [[158, 0x1023, 18]], "arch_prctl(ARCH_REQ_XCOMP_PERM, tile data)"
