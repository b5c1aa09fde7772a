"""GGUF's block formats that run as they are: all that the modules of this folder give as ``FORMATS``.

The layout of blocks is ggml's (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from card.kernels.formats.block_format import BlockFormat

__all__ = ["BLOCK_FORMATS", "BlockFormat", "find_product"]


def _found() -> Mapping[int, BlockFormat]:
    """Return the formats by ggml's number. Raises: ValueError if two have one number or name."""
    found: dict[int, BlockFormat] = {}
    names = (module.name for module in pkgutil.iter_modules(__path__) if module.name != "block_format")
    for form in (form for name in names for form in import_module(f"{__name__}.{name}").FORMATS):
        other = next((one for one in found.values() if form.type_id == one.type_id or form.name == one.name), None)
        if other is not None:
            raise ValueError(f"two block formats are {form.type_id} or {form.name}: give one another number and name")
        found[form.type_id] = form
    return dict(sorted(found.items()))


BLOCK_FORMATS: Mapping[int, BlockFormat] = _found()  # by ggml's number of the type


def find_product(name: str) -> BlockFormat:
    """Return the format that machine code knows by a name. Raises: KeyError for an unknown one."""
    return {form.product: form for form in BLOCK_FORMATS.values()}[name]
