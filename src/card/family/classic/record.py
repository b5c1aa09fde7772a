"""Methods that are settings of the engine, and those of one local writer of the core."""

from card.config.record import Record
from card.family.classic import card, no_draft_model, pearl, sps, ssd

RECORD = Record(
    methods=(
        no_draft_model.VANILLA,
        no_draft_model.LOOKUP,
        no_draft_model.SUFFIX,
        sps.METHOD,
        card.METHOD,
        pearl.METHOD,
        ssd.METHOD,
    )
)
