"""Moments in which somebody else has the cores, or nobody: tests ask no machine."""

from __future__ import annotations


class QuietMoment:
    """In place of a `CoreWatch`: nobody else has the cores."""

    said: bool | None = True

    def was_quiet(self) -> bool | None:
        """Return what this kind of moment says."""
        return self.said


class DisturbedMoment(QuietMoment):
    """Somebody else has them."""

    said = False


class UntoldMoment(QuietMoment):
    """The system does not tell."""

    said = None
