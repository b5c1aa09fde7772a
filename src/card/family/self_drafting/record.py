"""Methods in which the target drafts for itself, reading few of its KV rows."""

from card.config.record import Record
from card.family.self_drafting import sparsespec, specpv
from card.family.self_drafting.settings import SelectionSettings

RECORD = Record(methods=(sparsespec.METHOD, specpv.METHOD), settings=SelectionSettings)
