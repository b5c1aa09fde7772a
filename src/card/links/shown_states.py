"""Send a drafter in this process the target's hidden states of each row that becomes text."""

from __future__ import annotations

from card.drafting.messages import TargetStates
from card.links.link import DrafterLink
from card.models.features import FeatureWish, SeenRows


class ShownStates:
    """A consumer of features that passes them to a link."""

    def __init__(self, link: DrafterLink, wish: FeatureWish) -> None:
        """Connect to a drafter, with the wish of its writer."""
        self.wish = wish
        self._link = link

    def observe(self, seen: SeenRows) -> None:
        """Send the drafter new rows of a text that it drafts for, without those of places that it is not sent."""
        if not seen.has_drafter:
            return
        first, states = seen.first, seen.features
        if seen.hidden is not None:
            first, states = seen.hidden.rows_left(first, states)
        if len(states):
            self._link.show(TargetStates(seen.request_id, first, states))
