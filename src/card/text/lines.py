"""Lines of the text files that users give."""

from __future__ import annotations

from pathlib import Path

from card.errors import PromptError


def numbered_lines(path: Path, kind: str) -> list[tuple[int, str]]:
    """Return the lines of a UTF-8 file that are not blank, each with its number from 1 on.

    Args:
        kind: noun in the plural for what a line holds, for errors.
    Raises: PromptError if there are none, or the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise PromptError(f"{path} is not valid UTF-8; convert it first") from None
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}; name another file") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise PromptError(f"{path} holds no {kind}; put one on each line")
    return numbered
