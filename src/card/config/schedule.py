"""The ways that a drafter works for a target, and its states: words that policies, links and statistics share."""

from __future__ import annotations

from typing import Literal

Schedule = Literal["beside", "turns", "off"]
"""The drafter runs beside the target, takes turns with it, or rests."""

DrafterState = Literal["none", "starting", "up", "degraded", "down"]
