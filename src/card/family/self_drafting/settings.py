"""The setting of methods in which the target drafts for itself."""

from __future__ import annotations

from dataclasses import dataclass

from card.config.engine import EngineSettings
from card.config.fields import Checked, setting
from card.config.selection import parse_selection


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionSettings(Checked):
    """The KV rows that a target reads in drafting passes."""

    kv_selection: str | None = setting(
        None, "KV rows for sparsespec and specpv.", section="Models", read_by=("method sparsespec", "method specpv")
    )

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.kv_selection is not None:
            parse_selection(self.kv_selection)


def named_selection(settings: EngineSettings) -> str | None:
    """Return the name of the settings' selection."""
    return settings.of(SelectionSettings).kv_selection
