"""Parts that folders beside the core give to an engine, as far as its settings ask for them."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Protocol, runtime_checkable

from card.assembly.plan import Plan
from card.config import EngineSettings
from card.config.fields import declared
from card.config.registry import find_method, records
from card.machine.importing import load_place
from card.models.features import FeatureConsumer, FeatureWish
from card.models.runner import RowRunner
from card.tree.verify import Verifier


@runtime_checkable
class Wishing(Protocol):
    """A verifier that looks at hidden states of the target."""

    def wish_for(self, target: RowRunner, draft: str) -> FeatureWish:
        """Return the features that it needs.

        Args:
            draft: name of the draft model; empty if it is not known: it is elsewhere, or an object.
        Raises: ModelError if it was made for another pair.
        """


def choose_verifier(settings: EngineSettings, given: Verifier) -> tuple[Verifier, str]:
    """Return the verifier of an engine, and what named it in words: the given one, unless the settings name another.

    Raises: SettingsError, ModelError.
    """
    for place in _places("verifier", (*settings.own, *find_method(settings.method).reads)):
        chosen: tuple[Verifier, str] | None = load_place(place)(settings, given)
        if chosen is not None:
            return chosen
    return given, ""


def feature_wish(verifier: Verifier, target: RowRunner, draft: str) -> FeatureWish | None:
    """Return the features of the target that the verifier needs; None for most. Arguments as of `Wishing.wish_for`."""
    return verifier.wish_for(target, draft) if isinstance(verifier, Wishing) else None


def feature_consumers(plan: Plan, target: RowRunner) -> list[FeatureConsumer]:
    """Return what the method of a plan shows the target's features to."""
    found: list[FeatureConsumer] = []
    for place in _places("consumers", plan.method.reads):
        found += load_place(place)(plan.settings, target, plan.draft)
    return found


def _places(field: str, names: Container[str]) -> Iterator[str]:
    """Yield the places in this field of the records of folders that one of the settings in ``names`` belongs to."""
    for entry in records():
        place, kind = getattr(entry.record, field), entry.record.settings
        if place and kind is not None and any(name in names for name in declared(kind)):
            yield place
