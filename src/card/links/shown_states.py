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
        """Send the drafter new rows of a text that it drafts for."""
        if seen.has_drafter:
            self._link.show(TargetStates(seen.request_id, seen.first, seen.features))
