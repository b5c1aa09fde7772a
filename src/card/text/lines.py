"""Text files that users give: UTF-8, with or without a byte order mark, lines ended by LF or CRLF and nothing else.

U+2028, U+0085, a form feed or a lone CR are characters like others: JSON may hold the first two as they are.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from card.errors import CardError, PromptError

MOST_PIPED_BYTES = 256 << 20  # of a pipe or a device, such as /dev/zero, which would fill the memory


def text_of(data: bytes, source: str, fault: type[CardError] = PromptError) -> str:
    """Return what bytes say, without a byte order mark, and with LF alone at the ends of lines.

    Raises: ``fault``, with the name of the source, if they are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise not_utf8(source, error, fault) from None


def read_text(path: Path, fault: type[CardError] = PromptError) -> str:
    """Return what a file says, as `text_of` does. Raises: ``fault`` if it cannot be read, or has no end in sight."""
    try:
        with path.open("rb") as file:
            data = file.read(-1 if path.is_file() else MOST_PIPED_BYTES + 1)
    except OSError as error:
        raise fault(f"{path} cannot be read: {error.strerror}; name another file") from None
    if len(data) > MOST_PIPED_BYTES and not path.is_file():
        raise _endless(path, fault)
    return text_of(data, str(path), fault)


def file_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, which gzip may have packed, as they are read.

    Raises: OSError, EOFError and UnicodeDecodeError, as reading does; PromptError if it has no end in sight.
    """
    open_file: Any = gzip.open if path.suffix == ".gz" else open
    is_file, num_read = path.is_file(), 0
    with open_file(path, "rt", encoding="utf-8-sig", newline="\n") as file:
        while line := file.readline(-1 if is_file else MOST_PIPED_BYTES):
            num_read += len(line)
            if num_read >= MOST_PIPED_BYTES and not is_file:
                raise _endless(path, PromptError)
            yield line.removesuffix("\n").removesuffix("\r")


def numbered_lines(path: Path, kind: str) -> list[tuple[int, str]]:
    """Return the lines of a file that are not blank, each with its number from 1 on.

    Args:
        kind: noun in the plural for what a line holds, for errors.
    Raises: PromptError if there are none, or the file cannot be read.
    """
    lines = read_text(path).split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise PromptError(f"{path} holds no {kind}; put one on each line")
    return numbered


def _endless(path: Path, fault: type[CardError]) -> CardError:
    return fault(f"{path} has no end in sight; name a file")


def not_utf8(source: str, error: UnicodeDecodeError, fault: type[CardError] = PromptError) -> CardError:
    """Return the error for bytes that are not UTF-8, which says where they are not."""
    byte = error.object[error.start]
    return fault(f"{source} is not valid UTF-8: byte 0x{byte:02x} at offset {error.start}; convert it first")
