"""The one exception tree: everything that a user of CARD may catch."""

import difflib
import re
from collections.abc import Callable, Iterable

_LEAST_LIKENESS = 0.7  # of a name to the one that was meant; store is not meant to be stop, which has 0.67
_MOST_COMPARED_CHARS = 100  # of a name; the time grows with their square


_OPEN, _CLOSE = "\ue000", "\ue001"  # private characters around the name of a setting in an error's text
_NAMED = re.compile(f"{_OPEN}(.*?){_CLOSE}")


def named(setting: str) -> str:
    """Return the name of a setting for the text of an error: a command, Python and each API spell it in their way."""
    return f"{_OPEN}{setting}{_CLOSE}"


def spelled(text: str, spell: Callable[[str], str] = str) -> str:
    """Return a text with each of its named settings as ``spell`` writes it."""
    return _NAMED.sub(lambda match: spell(match[1]), text)


class CardError(Exception):
    """Base of all errors that CARD raises on purpose; its text is one line that a user can act on."""

    def __str__(self) -> str:
        """Return the text with settings spelled as in Python."""
        return self.spelled(str)

    def spelled(self, spell: Callable[[str], str]) -> str:
        """Return the text with each setting as ``spell`` writes it."""
        return spelled(super().__str__(), spell)

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings that the text names, in their order."""
        return tuple(_NAMED.findall(super().__str__()))


def in_words(error: BaseException) -> str:
    """Return one line that tells users what went wrong; errors of other packages come with their kind."""
    line = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, CardError) and line:
        return line
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def plain_words(text: str, most: int = 300) -> str:
    """Return what somebody else said as one short line that is safe to print: without control characters."""
    words = " ".join("".join(char if char.isprintable() else " " for char in text[: 4 * most]).split())
    return words if len(words) <= most and len(text) <= 4 * most else words[:most] + "..."


def known_instead(name: object, known: Iterable[str]) -> str:
    """Return what to say behind an unknown name: the known one that was meant, or all of them if none is near."""
    return did_you_mean(name, known) or f"known: {', '.join(sorted(known))}"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a question about the known name that is nearest; empty if none is near."""
    given = str(name)[:_MOST_COMPARED_CHARS].lower()
    near = difflib.get_close_matches(given, sorted(known), n=1, cutoff=_LEAST_LIKENESS)
    return f"did you mean {near[0]}?" if near else ""


class SettingsError(CardError, ValueError):
    """A setting or sampling parameter is out of range, unknown, or at odds with another one."""


class ModelError(CardError):
    """A model cannot be found, loaded or run: missing path, not a model, unsupported architecture."""


class MissingError(ModelError, ImportError):
    """A package is not installed that some models and methods need; the text says how to install it."""


class ShortageError(ModelError, MemoryError):
    """This process has too little memory; the text says what was needed, what there is, and what would do."""


class VocabularyError(ModelError):
    """The tokenizers of target and draft do not fit; the text names the first difference."""


class PromptError(CardError, ValueError):
    """A prompt is empty, not valid text, or does not fit into the context."""


class CapacityError(CardError):
    """A KV cache has no room for the rows asked for."""

    def __init__(self, message: str, *, num_lent: int = 0) -> None:
        """Say what is wrong, and how many of these rows running sequences would lend."""
        super().__init__(message)
        self.num_lent = num_lent


class WorkerError(CardError):
    """A worker died, hangs or could not be started within its time limit."""


class ClosedError(WorkerError):
    """The engine was shut down by its owner."""


class TargetError(CardError):
    """The target's pass failed for this request; other requests go on."""


class GrammarError(TargetError):
    """The grammar of this request cannot be followed, or takes too long; other requests go on."""


class ProtocolError(CardError):
    """A message between workers is malformed, of an unknown version or out of bounds.

    Its text may quote the message, so it is cut short and has no control characters.
    """

    def __init__(self, text: str) -> None:
        super().__init__(plain_words(text))


class BenchError(CardError):
    """A data set or a bench file is not what it should be, or texts differ that must not; the text names the line."""


class PlanError(CardError):
    """A profile or a recording is broken, of another version, or does not fit to the others; or too much is asked."""


class ScoreError(CardError, ValueError):
    """A score by which candidates are compared is not a number; the text names the candidate."""


def in_few_words(error: BaseException, most: int = 200) -> str:
    """Return an error's first line, with the second if the first ends in a colon; its class if it has no text.

    Args:
        most: characters, since errors of other libraries have any length. A `MissingError` is not cut short: it ends
            with what to do.
    """
    if isinstance(error, MissingError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    words = " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__
    return words if len(words) <= most else words[:most] + "..."
