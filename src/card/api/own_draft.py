"""The draft model where none is named: the block that drafts in the target's own checkpoint, if it has one.

Command line, server and Python begin here, so one rule holds for all of them. The policy still ends it where it does
not pay.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from card.api.arguments import LLMArguments
from card.assembly.plan import Facts
from card.config.method import ALONE
from card.config.registry import find_method
from card.engine.offers import DRAFTER
from card.errors import ModelError, SettingsError, named, spelled
from card.models.block_loading import has_block, is_state_drafter
from card.models.names import OWN_BLOCK

logger = logging.getLogger(__name__)

_COPIES = f"method {ALONE} drafts from the text itself"


@dataclass(frozen=True, slots=True)
class Choice:
    """The models of a start, and a line for the user about one that was not named."""

    asked: LLMArguments
    state_drafter: str | None = None  # the model in whose files the block or head lies that drafts, if one does
    note: str = ""  # settings are marked as `card.errors.named` does; empty: all was named
    given: LLMArguments | None = None  # what was asked for before the block was added; None: it was not
    is_warning: bool = False

    def without_block(self, error: ModelError) -> Choice:
        """Return the choice after its block turned out to be damaged. Raises: the error, if it cannot do without."""
        if self.given is None or self.given.method is not None:
            raise error
        return Choice(self.given, None, f"{error.args[0]}; so {_COPIES}", is_warning=True)

    def tell(self) -> None:
        """Log the line."""
        if self.note:
            logger.log(logging.WARNING if self.is_warning else logging.INFO, spelled(self.note))


def choose_draft(asked: LLMArguments, facts: Facts) -> Choice:
    """Return what is asked for, with the block as draft model if none is named and the target has one.

    Args:
        facts: of the start as it is asked for.
    """
    if facts.has_draft or facts.has_pool or asked.settings.get("draft_address") is not None:
        return Choice(asked, _state_drafter_named(asked, facts))
    choice = Choice(asked)
    if asked.method is None:
        choice = Choice(asked, None, f"no draft model is given, so {_COPIES}; {named('method')} vanilla does not")
    if not _may_try(asked):
        return choice
    tried = Choice(
        replace(asked, draft=OWN_BLOCK),
        str(asked.target),
        f"no draft model is given, so the block that drafts in {asked.target} is tried; {named('method')} {ALONE} does "
        "without",
        asked,
    )
    try:
        settings = tried.asked.plan(replace(facts, has_draft=True, wants_states=True)).settings
        return tried if has_block(settings.target, cache_dir=settings.weights_dir) else choice
    except SettingsError:
        return choice  # some settings are for another method
    except ModelError as error:
        return tried.without_block(error)


def _state_drafter_named(asked: LLMArguments, facts: Facts) -> str | None:
    """Return the model in whose files the draft model lies as a block or a head; None if it stands alone."""
    if asked.draft_name is None:
        return None
    if asked.draft_name == OWN_BLOCK:
        is_parallel = asked.method is not None and find_method(asked.method).needs_parallel_draft
        return asked.target if isinstance(asked.target, str) and not is_parallel else None
    folder = asked.plan(facts).settings.weights_dir
    return asked.draft_name if is_state_drafter(asked.draft_name, cache_dir=folder) else None


def _may_try(asked: LLMArguments) -> bool:
    """Return whether these settings leave room for a block: it runs beside the target's own pass, at its true size."""
    settings, method = asked.settings, None if asked.method is None else find_method(asked.method)
    devices = {settings.get("device") or "cpu", settings.get("draft_device") or "cpu"}
    writers = settings.get("writers")
    return (
        isinstance(asked.target, str)
        and (method is None or (method.needs_draft and not method.needs_training))
        and settings.get("target_cost") is None
        and devices == {"cpu"}
        and (writers is None or DRAFTER in writers)
    )
