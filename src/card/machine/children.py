"""Import paths of child processes that run our own code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def import_paths(paths: Sequence[str]) -> list[str]:
    """Return import paths of the child beside its own: the parent's, without the working directory.

    Where the package itself lies is always among them.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    barred = {Path(main).resolve().parent} if main else set()
    with suppress(FileNotFoundError):  # it was deleted meanwhile, so that nothing can be imported from it
        barred.add(Path.cwd().resolve())
    package_root = Path(__file__).resolve().parents[2]
    allowed = [path for path in paths if os.path.isabs(path) and Path(path).resolve() not in barred]
    return [*allowed, str(package_root)]
