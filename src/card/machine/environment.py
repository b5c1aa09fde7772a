"""Odd places to run in: without standard streams, for a user without a name, in a locale of ASCII, on an output that
lacks characters.

Imports nothing that computes: the command calls it before anything else.
"""

from __future__ import annotations

import codecs
import getpass
import io
import json
import os
import sys

_ERRORS = "card-escape"  # under which Python knows `_escaped`


def settle() -> None:
    """Repair the environment. In an ASCII locale the process is replaced by one that reads UTF-8."""
    _read_utf8()
    _open_standard_streams()
    name_the_user()
    write_all_characters()


def _read_utf8() -> None:
    """Start anew in UTF-8 mode: arguments, names of files and standard input were read as ASCII."""
    if codecs.lookup(sys.getfilesystemencoding()).name == "ascii" and sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _open_standard_streams() -> None:
    """Let what is written to a closed standard stream go nowhere, not to the file or socket that takes its number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # as the lowest free number, which is this one
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # as Python leaves it
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def name_the_user() -> None:
    """Name a user id that has no name: torch and others ask, and some of their releases end where there is none."""
    try:
        getpass.getuser()
    except (KeyError, OSError, ImportError):
        os.environ["LOGNAME"] = f"uid-{os.getuid()}"


def write_all_characters() -> None:
    r"""Let standard output and error write \uXXXX for what their encoding has not, so that JSON stays JSON."""
    codecs.register_error(_ERRORS, _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end
