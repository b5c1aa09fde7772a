"""Choose the writer for a draft model."""

from __future__ import annotations

from card.config.registry import plugin_places
from card.drafting.beam import BeamWriter
from card.drafting.draft_shaping import FindGrammar
from card.drafting.protocol import DraftWriter
from card.machine.importing import load_place
from card.models.parallel_draft import ParallelDraft
from card.models.protocol import LanguageModel
from card.models.runner import RowRunner


def make_writer(
    model: LanguageModel,
    kv_cache_bytes: int | None = None,
    *,
    takes_turns: bool,
    find_grammar: FindGrammar | None = None,
    parallel: ParallelDraft | None = None,
    target: RowRunner | None = None,
) -> DraftWriter:
    """Return the writer for ``model``: the first that a folder beside the core makes for it, else a beam.

    Args:
        kv_cache_bytes: most memory for its KV rows; None: from the length of a sequence.
        takes_turns: the drafter works while the target waits, so it must not draft ahead.
        find_grammar: as in `DraftWriter`.
        parallel: settings of a model that guesses several tokens in a pass; None: from the runner.
        target: provides its hidden states to a writer that reads them; None: no target does.
    Raises: ModelError if the model reads hidden states of another target, or of a target that does not provide them.
    """
    parallel = parallel or (model.parallel_draft if isinstance(model, RowRunner) else None)
    for place in plugin_places("draft_writer"):
        writer: DraftWriter | None = load_place(place)(
            model,
            kv_cache_bytes,
            takes_turns=takes_turns,
            find_grammar=find_grammar,
            parallel=parallel,
            target=target,
        )
        if writer is not None:
            return writer
    return BeamWriter(model, kv_cache_bytes, find_grammar=find_grammar)
