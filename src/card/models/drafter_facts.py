"""The kind of a draft model, and the bytes of weights that one of its steps reads."""

from __future__ import annotations

from dataclasses import dataclass

from card.models.draft_vocab import proposed_by
from card.models.facts import num_bytes
from card.models.loaded_model import LoadedModel
from card.models.own.decoder_model import DecoderModel, is_int8
from card.models.own.draft_block import DraftBlock
from card.models.own.eagle_head import EagleHead
from card.models.own.fused_head import FusedHead
from card.models.own.layers import BlockWeight, Weight
from card.models.parallel_draft import parallel_draft_of

_LONGEST = 16  # of the chains that are compared
_RIGHT, _LOST = 0.9, 0.02  # of a draft model that fits, and what trimming takes from it, as measured with MT-Bench


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """Kind of a draft model, and the bytes of weights that one of its steps reads, as they run."""

    kind: str
    num_states: int  # of the target that it reads, of each token
    step_bytes: int
    head_tokens: int  # that it proposes
    head_bytes: int

    @property
    def in_words(self) -> str:
        """The same in a line for users."""
        read = "the target's last state" if self.num_states == 1 else f"{self.num_states} states of the target"
        states = f", reads {read}" if self.num_states else ""
        return (
            f"{self.kind}{states}; a step reads {self.step_bytes / 1e6:,.1f} MB, of which {self.head_bytes / 1e6:,.1f} "
            f"MB are the head of {self.head_tokens:,} tokens"
        )


def drafter_of(model: LoadedModel, *, is_own: bool) -> DrafterFacts | None:
    """Return what a draft model is and reads; None if it does not run in our own pass.

    Args:
        is_own: a block lies in the target's checkpoint.
    """
    if not isinstance(model, DecoderModel):
        return None
    kind, inputs = "a model of its own", model.inputs
    if isinstance(model, DraftBlock):
        kind = f"a block that drafts, in {'the target' if is_own else 'a file of its own'}"
    elif isinstance(model, EagleHead):
        kind = "an EAGLE-3 head" if model.inputs.num_tokens == 1 else "a head of several tokens a pass (P-EAGLE)"
    elif isinstance(model, FusedHead):
        kind = "a drafter of text alone (HiViS)"
    elif parallel_draft_of(model) is not None:
        kind = "a model that drafts several tokens in a pass (PARD)"
    num_tokens, head_bytes = head_size(model)
    num_states = 0 if inputs is None else len(inputs.target_layers)
    return DrafterFacts(kind, num_states, pass_bytes(model), num_tokens, head_bytes)


def pass_bytes(model: LoadedModel) -> int:
    """Return the bytes of weights that a pass of one token reads; all of them, if it does not run in our own pass."""
    if not isinstance(model, DecoderModel):
        return num_bytes(model)
    total = 0.0
    for idx, layer in enumerate(model.layers):
        experts = layer.shape.experts
        for name, weight in model.weights_of(idx):
            is_chosen = experts is not None and ".experts." in name
            share = experts.chosen / experts.count if experts is not None and is_chosen else 1.0
            total += share * (running_bytes(weight, model) if len(weight.shape) > 1 else weight.nbytes)
    makes_inputs = 0 if model.inputs is None else model.inputs.num_bytes
    return int(total) + makes_inputs + head_size(model)[1]


def gains_by_trimming(whole: LoadedModel, part: LoadedModel, target_bytes: int) -> bool:
    """Return whether a draft model with a part of its head is faster for a target, by the bytes that passes read.

    The head must be over a quarter of what a step reads, and the best chains of `_RIGHT` must gain.

    Args:
        whole, part: the model as it is, and with a head of the tokens that texts use most.
        target_bytes: that a pass of the target reads.
    """
    if not (isinstance(whole, DecoderModel) and isinstance(part, DecoderModel)):
        return False
    step_bytes, head_bytes = pass_bytes(whole), head_size(whole)[1]
    shares = step_bytes / target_bytes, pass_bytes(part) / target_bytes
    return 4 * head_bytes > step_bytes and _speed(_RIGHT * (1 - _LOST), shares[1]) > _speed(_RIGHT, shares[0])


def _speed(right: float, step_share: float) -> float:
    """Return the tokens in the time of a target pass, with chains of the best length.

    Args:
        right: share of the drafted tokens that are the target's, in [0, 1).
        step_share: time of a draft step in that of a target pass.
    """
    lengths = range(1, _LONGEST + 1)
    return max((1 - right ** (length + 1)) / (1 - right) / (1 + length * step_share) for length in lengths)


def head_size(model: DecoderModel) -> tuple[int, int]:
    """Return the tokens of the head that is computed, and its bytes."""
    ids, head = proposed_by(model), model.lm_head
    num_tokens = head.out_features if ids is None else len(ids)
    return num_tokens, running_bytes(head.weight, model) * num_tokens // head.out_features


def running_bytes(weight: Weight, model: DecoderModel) -> int:
    """Return the bytes of a matrix as passes read it."""
    return int(weight.size if is_int8(model) and not isinstance(weight, BlockWeight) else weight.nbytes)
