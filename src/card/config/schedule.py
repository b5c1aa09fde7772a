"""Schedules of a drafter and its states: words shared by policies, links and statistics."""

from __future__ import annotations

from typing import Literal

Schedule = Literal["beside", "turns", "off"]
"""The drafter runs beside the target, takes turns with it, or rests."""

DrafterState = Literal["none", "starting", "up", "degraded", "down"]
