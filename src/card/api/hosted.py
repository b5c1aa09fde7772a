"""Facts and recordings that `LLM` and `AsyncLLM` share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from card.api.host import Host
from card.config.method import Method
from card.engine.trace import Trace
from card.errors import SettingsError
from card.machine.home import AT_HOME
from card.text.tokenizer import Tokenizer


class Hosted:
    """Facts that `LLM` and `AsyncLLM` report about their engine."""

    _host: Host

    def __reduce__(self) -> NoReturn:
        """Raise SettingsError: neither models nor threads can be sent to another process."""
        raise SettingsError(AT_HOME)

    @property
    def host(self) -> Host:
        """The models, the tokenizer and the settings, read-only."""
        return self._host

    @property
    def method(self) -> Method:
        """The decoding method."""
        return self._host.method

    @property
    def is_exact(self) -> bool:
        """True if each text is that of plain decoding; False for modules of 16 bits, where two tokens may tie."""
        return self._host.is_exact

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self._host.tokenizer

    @property
    def target_cost(self) -> str | None:
        """Size and cost of an inflated target, in words; None for an ordinary target."""
        return self._host.target_cost

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and answer together."""
        return self._host.max_model_len

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record what the engine does inside a block, for `card.engine.trace.write_trace`; one recording at a time.

        with llm.trace() as trace:
            llm.generate(prompt)
        """
        engine = self._host.engine
        trace = engine.trace = Trace(shares_clock="remote" not in self._host.plan.placements.values())
        try:
            yield trace
        finally:
            engine.trace = None
