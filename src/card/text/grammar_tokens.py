"""A model's tokens as llguidance has them, in this process and in the children that try grammars."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from card.errors import SettingsError, named
from card.machine.packages import install_command
from card.text.compiling import wrap_tokens
from card.text.grammar_sandbox import SandboxSetup
from card.text.tokenizer import Tokenizer


class NoGrammarsError(SettingsError):
    """llguidance is not installed, so that nothing on this machine can be held to a grammar."""


def has_grammars() -> bool:
    """Return whether llguidance is installed, without importing it."""
    return find_spec("llguidance") is not None


class GrammarTokens:
    """Makes llguidance's tokenizer when it is first wanted. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Take the tokenizer; arguments as of `GrammarCompiler`."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = tuple(sorted(end_ids))
        self._lock = threading.Lock()
        self._setup: SandboxSetup | None = None
        self._tokens: Any = None  # it takes about a second to build

    def check(self) -> None:
        """Raise SettingsError if there can be no grammars for this model, or on this machine."""
        if not self._end_ids:
            raise SettingsError(
                f"a grammar needs a model with an end token, and this one has none; leave {named('grammar')} out"
            )
        if not has_grammars():
            raise NoGrammarsError(
                "a grammar needs the package llguidance, which is not installed; run " + install_command("grammar")
            )

    def setup(self) -> SandboxSetup:
        """Return the settings of a child. Raises: SettingsError for a tokenizer that the library cannot use."""
        with self._lock:
            if self._setup is None:
                num_ids = max(self._vocab_size, len(self._tokenizer))
                with self._says_that_it_cannot_be_used():
                    core = _core_of(self._tokenizer).encode()
                self._setup = SandboxSetup(core=core, num_ids=num_ids, end_ids=self._end_ids)
            return self._setup

    def own(self) -> Any:
        """Return llguidance's tokenizer of this process. Raises: SettingsError if it does not know this one."""
        setup = self.setup()
        with self._lock, self._says_that_it_cannot_be_used():
            if self._tokens is None:
                self._tokens = wrap_tokens(setup.core.decode(), setup.num_ids, setup.end_ids)
            return self._tokens

    @contextlib.contextmanager
    def _says_that_it_cannot_be_used(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the library raises many types for an unknown tokenizer
            raise SettingsError(
                f"llguidance cannot use the tokenizer {type(self._tokenizer).__name__}: {error}; leave "
                f"{named('grammar')} out, or use a model with a fast tokenizer"
            ) from error


def _core_of(tokenizer: Tokenizer) -> str:
    """Return a tokenizer as llguidance reads it: one that marks blanks by Metaspace as one that replaces them.

    To the library the marks of Metaspace are characters of the text, so that no text with a blank keeps to a grammar.

    Raises: ValueError for one without a core in Rust.
    """
    backend = tokenizer.backend_tokenizer
    if backend is None:
        raise ValueError("only fast tokenizers are supported")
    core = json.loads(backend.to_str())
    core["truncation"] = core["padding"] = None
    decoder = core.get("decoder") or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    marks = [step["replacement"] for step in steps if step.get("type") == "Metaspace"]
    if marks:
        blanks = {"type": "Replace", "pattern": {"String": marks[0]}, "content": " "}
        core["decoder"] = {"type": "Sequence", "decoders": [blanks, {"type": "ByteFallback"}, {"type": "Fuse"}]}
        core["pre_tokenizer"] = None
        core["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": marks[0]}
    return json.dumps(core)
