"""Records of the classic methods."""

from card.config.record import Record
from card.family.classic import no_draft_model, pearl, query_and_correct, sps, ssd

RECORD = Record(
    methods=(
        no_draft_model.VANILLA,
        no_draft_model.LOOKUP,
        no_draft_model.SUFFIX,
        sps.METHOD,
        query_and_correct.METHOD,
        pearl.METHOD,
        ssd.METHOD,
    )
)
