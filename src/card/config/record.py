"""Records: the contributions of a folder beside the core.

Each folder of `card.family`, `card.inside`, `card.backends`, `card.tools` and `card.labs` may have a module ``record``
with a `Record` named RECORD. Other packages name such a record as an entry point of the group ``card.methods`` or
``card.commands``. Reading a record is cheap: code is named as "module:name", and imported when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from card.config.method import Method


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `card`."""

    name: str  # as typed; "train ctc" is a command of the group train
    summary: str  # a line for the list of commands
    place: str  # of the click command
    extra: str = ""  # of this package, without which it cannot run

    @property
    def needs(self) -> str:
        """The end of its line in a list."""
        return f" (extra {self.extra})" if self.extra else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The contributions of one folder, all optional."""

    methods: tuple[Method, ...] = ()
    commands: tuple[Command, ...] = ()
    settings: type[Any] | None = None  # dataclass of its settings, which users set like any other
    writers: Mapping[str, str] = field(default_factory=dict)  # places of local writers, by name
    draft_writer: str = ""  # place of a function as `card.drafting.draft_writers.make_writer`
    verifier: str = ""  # place of a function (settings, verifier given) to (verifier, its name), or None
    consumers: str = ""  # place of a function (settings, target, draft settings) to `FeatureConsumer`s
    tokenizer: str = ""  # place of a `card.models.loading.ReadTokenizer`
