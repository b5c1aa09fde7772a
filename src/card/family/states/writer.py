"""Writers of drafters whose rows stand for a token and a state: a block of a target, or a head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from card.drafting.beam import BeamSequence, BeamWriter
from card.drafting.draft_shaping import FindGrammar
from card.drafting.messages import DraftSpec
from card.drafting.protocol import DraftWriter
from card.errors import ModelError
from card.family.states.parallel import ParallelStateSequence
from card.family.states.sequence import StateSequence
from card.models.features import FeatureWish
from card.models.own.eagle_head import HeadInputs
from card.models.own.row_inputs import RowInputs
from card.models.protocol import LanguageModel
from card.models.runner import RowRunner
from card.tree.logits import Logits
from card.tree.nodes import NewNodes


class StateWriter(BeamWriter):
    """Drafts for several requests with the block of their target."""

    def __init__(
        self,
        runner: RowRunner,
        inputs: RowInputs,
        kv_cache_bytes: int | None = None,
        *,
        find_grammar: FindGrammar | None = None,
    ) -> None:
        """Make a writer of a block and the layers that make its inputs; other arguments as of `BeamWriter`."""
        super().__init__(runner, kv_cache_bytes, find_grammar=find_grammar)
        self.runner, self.inputs = runner, inputs
        self.wanted_states = FeatureWish(inputs.target_layers, "all")
        self.own_states = FeatureWish((inputs.own_state,), "logits")  # which the drafter hands on
        runner.features.wish([self.own_states])
        self._kind: type[StateSequence] = StateSequence
        if isinstance(inputs, HeadInputs) and inputs.num_tokens > 1:
            self.layers_per_pass = inputs.num_tokens
            self._kind = ParallelStateSequence

    def open(self, token_ids: Sequence[int], spec: DraftSpec, *, epoch: int) -> StateSequence:
        """Start the tree of a request after its text. Raises: CapacityError if there is no room."""
        return self._kind(self, self.inputs, token_ids, spec, epoch=epoch)

    def grow(self, place: int, beam: BeamSequence, frontier: Sequence[int], logits: Logits) -> NewNodes:
        """Add what the last pass has left of a beam: its own states first."""
        cast(StateSequence, beam).hand_on(frontier, self.runner.features.of(place, self.own_states))
        return super().grow(place, beam, frontier, logits)


def make_writer(model: LanguageModel, kv_cache_bytes: int | None = None, **asked: Any) -> DraftWriter | None:
    """Return the writer of a block that drafts; None for any other model.

    Args:
        asked: as of `card.drafting.draft_writers.make_writer`.
    Raises: ModelError if the target is of another width, or no target gives its states.
    """
    inputs = model.block_inputs if isinstance(model, RowRunner) else None
    if inputs is None:
        return None
    target: RowRunner | None = asked["target"]
    width = None if target is None else target.original.hidden_size
    if width != inputs.target_width:
        raise ModelError(
            f"this block reads states of {inputs.target_width} numbers, and its target gives "
            f"{'none' if width is None else width}; let it draft in the process of its own target"
        )
    return StateWriter(cast(RowRunner, model), inputs, kv_cache_bytes, find_grammar=asked["find_grammar"])
