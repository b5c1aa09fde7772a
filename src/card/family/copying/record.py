"""Writers that copy, and the methods made of them."""

from dataclasses import dataclass

from card.config.fields import Checked, setting
from card.config.record import Record
from card.family.copying import methods, ouroboros

_STORE = "writer store"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings(Checked):
    """Settings of the writer store."""

    suffix_store: str | None = setting(
        None, "File of finished texts for the writer store.", section="Method", read_by=_STORE
    )
    suffix_store_key: str = setting("default", "Texts under other keys are not read.", section="Method", read_by=_STORE)
    suffix_store_tokens: int = setting(
        1_000_000, "Most tokens kept under a key.", least=1, section="Method", read_by=_STORE
    )


RECORD = Record(
    methods=(methods.RECYCLING, methods.LOOKAHEAD, ouroboros.METHOD),
    settings=StoreSettings,
    writers={
        "lookahead": "card.family.copying.lookahead:LookaheadWriter",
        "phrases": "card.family.copying.phrases:PhraseWriter",
        "recycling": "card.family.copying.recycling:RecyclingWriter",
        "store": "card.family.copying.store:StoreWriter",
    },
    draft_writer="card.family.copying.phrase_drafting:make_writer",
)
