"""Reasons why a decoder that has been read has no exact pass here."""

from __future__ import annotations

from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import dtype_name
from card.models.loaded_model import LoadedModel
from card.models.own.decoder_model import DecoderModel, is_int8


def is_exact(model: LoadedModel) -> bool:
    """Return whether runners of a model use our machine code: the bits of logits depend on the text alone."""
    return isinstance(model, DecoderModel) and why_not_int8() is None


def has_same_bits(model: LoadedModel) -> bool:
    """Return whether a token of a model's text does not depend on what runs beside it: by machine code, or 32 bits."""
    return is_exact(model) or dtype_name(model.dtype) in ("float32", "float64")


def could_run_int8(model: LoadedModel) -> bool:
    """Return whether a model runs its weights of 16 or 32 bits in our machine code, which has integers too."""
    return is_exact(model) and not is_int8(model) and not _has_blocks(model)


def _has_blocks(model: LoadedModel) -> bool:
    return isinstance(model, DecoderModel) and model.has_blocks
