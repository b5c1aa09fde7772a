"""Every kind of kernels gives states, rows and logits the same bits: one process for each kind, as each loads torch."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from card.kernels.int8_linear import why_not_int8
from tests.every_kind import each_kind, printed_by
from tests.kernels import test_delta_rule, test_rows
from tests.models import test_states

MODULES = (test_delta_rule, test_rows, test_states)
pytestmark = pytest.mark.skipif(why_not_int8() is not None, reason="no exact passes here")


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The digest of each module, by the kind of kernels that tests run with."""
    return {one.__name__: one.digest() for one in MODULES}


def program(names: Iterable[str]) -> str:
    """Return a program that prints the digest of each of these modules."""
    return f"from importlib import import_module as load\nfor name in {[*names]}: print(name, load(name).digest())"


@each_kind
def test_every_kind_of_kernel_computes_the_same_bits(kind: str, expected: dict[str, str]) -> None:
    assert dict(line.split() for line in printed_by(kind, program(expected)).splitlines()) == expected
