"""Choose the writer for a draft model."""

from __future__ import annotations

from card.drafting.draft_shaping import FindGrammar
from card.drafting.parallel import ParallelWriter
from card.drafting.phrase_drafting import PhraseDraftWriter
from card.drafting.protocol import DraftWriter
from card.errors import ModelError
from card.models.parallel_draft import ParallelDraft
from card.models.protocol import LanguageModel
from card.models.state_input import StateInput
from card.models.torch_runner import TorchRunner


def make_writer(
    model: LanguageModel,
    kv_cache_bytes: int | None = None,
    *,
    takes_turns: bool,
    find_grammar: FindGrammar | None = None,
    parallel: ParallelDraft | None = None,
    target: TorchRunner | None = None,
) -> DraftWriter:
    """Return the writer that suits ``model``, by how many tokens it guesses in a pass and whether passes are recorded.

    Args:
        kv_cache_bytes: most memory for its KV rows; None: by the length of a sequence.
        takes_turns: the drafter works while the target waits, so that it must not work ahead.
        find_grammar: as of `DraftWriter`.
        parallel: of a model that guesses several tokens in a pass; None: as the runner states.
        target: gives its hidden states to a writer that wants them; None: there are none.
    Raises: ModelError if the model reads the hidden states of another target, or of one that does not show them.
    """
    parallel = parallel or (model.parallel_draft if isinstance(model, TorchRunner) else None)
    if parallel is not None:
        state_input = _state_input(model, parallel, target)
        return ParallelWriter(model, parallel, kv_cache_bytes, find_grammar=find_grammar, state_input=state_input)
    if not (isinstance(model, TorchRunner) and model.has_recorded_passes):
        return PhraseDraftWriter(model, kv_cache_bytes, find_grammar=find_grammar)
    from card.theirs.cuda.bucketed import BucketedRunner
    from card.theirs.cuda.device_beam import DeviceBeamWriter

    assert isinstance(model, BucketedRunner)
    return DeviceBeamWriter(model, kv_cache_bytes, looks_ahead=not takes_turns, find_grammar=find_grammar)


def _state_input(model: LanguageModel, parallel: ParallelDraft, target: TorchRunner | None) -> StateInput | None:
    path = parallel.states_file
    if path is None:
        return None
    if target is None:
        raise ModelError(
            f"{path.parent} reads its target's hidden states, which reach no drafter in another process, on a "
            "server or in another engine; run it with LLM or card generate, or adapt one without --target-features"
        )
    assert isinstance(model, TorchRunner), "a folder says what it reads"
    state_input = StateInput.load(path)
    state_input.check(target, model.original.hidden_size, str(path))
    return state_input
