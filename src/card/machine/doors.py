"""Public modules whose names need packages of an extra: importing one works everywhere, using a name may not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from card.errors import SettingsError
from card.machine.packages import install_command


def door(
    name: str, public: Sequence[str], modules: Sequence[str], *, needs: Sequence[str], extra: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a public module that imports nothing before a name is used.

    Args:
        name: of the public module.
        public: its names.
        modules: where they are defined.
        needs: packages that these modules import, and ``extra`` installs; one before its own modules.
    """

    def missing() -> str | None:
        return next((package for package in needs if find_spec(package) is None), None)

    def get(wanted: str) -> Any:
        if wanted not in public:
            raise AttributeError(f"module {name!r} has no attribute {wanted!r}; it has {', '.join(public)}")
        if (package := missing()) is not None:
            raise SettingsError(
                f"{name}.{wanted} needs {package}, which is not installed; run {install_command(extra)}"
            )
        return getattr(next(one for one in map(import_module, modules) if hasattr(one, wanted)), wanted)

    def names() -> list[str]:
        return [] if missing() else sorted(public)  # whatever looks at all that is listed must not fail

    return get, names
