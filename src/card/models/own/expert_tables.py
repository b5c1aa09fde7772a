"""Tables of a layer's experts, as the machine code reads them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from card.kernels.float_linear import float_linear
from card.kernels.jit.tables import GATED_SHARED, NO_SHARED, PLAIN_SHARED, ExpertEntry, ExpertTable
from card.kernels.machine_code import machine_code
from card.kernels.number_types import Floats
from card.kernels.packed_linear import GROUP, PANEL, PackedLinear, extended, padded
from card.models.architectures.architecture import Architecture
from card.models.layer_shape import Experts, LayerShape
from card.models.own.decoder_model import DecoderLayer, ExpertLinears, Mlp
from card.models.own.exact_layers import Pack, norm_weight, packed
from card.models.own.exact_rows import IntArray
from card.models.own.layers import BlockWeight, Linear
from card.models.parts import NormPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRoom:
    """Room that a pass needs for a layer with experts."""

    gated: int  # channels of all experts that a row takes, with their padding
    scores: int  # of a row, with their padding
    listed: int  # experts
    taken: int  # of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFacts:
    """Facts of a model's experts, as what its rows cost depends on them."""

    num_expert_layers: int
    num_experts: int  # of each such layer, but for one that all rows take
    experts_per_token: int  # that a row chooses in each such layer


def expert_facts(shapes: Sequence[LayerShape]) -> ExpertFacts | None:
    """Return the facts of the layers of these shapes that have experts; None if none has any."""
    experts = [shape.experts for shape in shapes if shape.experts is not None]
    if not experts:
        return None
    return ExpertFacts(
        num_expert_layers=len(experts),
        num_experts=max(one.count for one in experts),
        experts_per_token=max(one.chosen for one in experts),
    )


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The packed experts of a layer."""

    entries: IntArray
    room: ExpertRoom
    held: Any  # what the entries hold addresses of


def expert_table(
    pack: Pack, linears: ExpertLinears, experts: Experts, factor: float, biases: Floats | None = None
) -> PackedExperts:
    """Pack the experts of a layer, whose results are times a factor; the router stays in floats.

    Args:
        biases: what is added to the scores for the choice alone, [count].
    """
    router = _router(linears)
    biases = None if biases is None else extended(biases.ravel().astype(np.float32), PANEL * len(router.panels))
    each = _packed(pack, linears.each, factor)
    shared = NO_SHARED
    if experts.shared_width:
        shared = GATED_SHARED if experts.has_shared_gate else PLAIN_SHARED
    table = ExpertTable.pack(
        {
            "num_experts": experts.count,
            "num_chosen": experts.chosen,
            "is_normed": experts.is_normed,
            "weight_scale": experts.scale,
            "shared": shared,
            "takes": functools.reduce(operator.or_, (linear.takes for gate, up, _ in each for linear in (gate, up))),
            "has_sigmoids": experts.has_sigmoids,
            "biases": 0 if biases is None else biases,
            "sum_offset": experts.sum_offset,
            "code": machine_code("experts").run_experts.address,
            "router": router,
        }
    )
    entries = [
        ExpertEntry.pack({"gate": gate, "up": up, "down": down, "num_groups": len(gate.panels) * PANEL // GROUP})
        for gate, up, down in each
    ]
    num_shared = int(experts.shared_width > 0)
    room = ExpertRoom(
        gated=experts.chosen * padded(experts.width, GROUP) + padded(experts.shared_width, GROUP),
        scores=PANEL * len(router.panels),
        listed=experts.count + num_shared,
        taken=experts.chosen + num_shared,
    )
    return PackedExperts(np.concatenate([table, *entries]), room, (router, each, biases))


def stand_beside(table: IntArray, architecture: Architecture, layer: DecoderLayer, width: int) -> Any:
    """Write into the table of experts what they need beside an MLP; return what its entries then hold addresses of."""
    norms: dict[str, NormPlace] = {
        "input_norm": "experts_in",
        "mlp_norm": "mlp_alone",
        "output_norm": "experts_out",
    }
    weights = {
        place: norm_weight(layer.norms[architecture.norms[name].name], architecture.norm_offset)
        for place, name in norms.items()
    }
    scale, factors = (layer.vectors[architecture.vectors[one].name] for one in ("router", "experts"))
    weights["router_norm"] = scale.astype(np.float32) * np.float32(width**-0.5)
    arrays = {place: extended(weight, padded(width, GROUP)) for place, weight in weights.items()}
    arrays["factors"] = factors.astype(np.float32)
    ExpertTable.write(table, arrays)
    return arrays


def _router(linears: ExpertLinears) -> PackedLinear:
    """Return the router in 32 bits; behind its experts comes the score of a shared one."""
    scores = [linears.router] if linears.shared_score is None else [linears.router, linears.shared_score]
    weights = [one.weight for one in scores]
    assert not any(isinstance(weight, BlockWeight) for weight in weights), "readers keep routers in floats"
    bias = None if linears.router.bias is None else linears.router.bias.astype(np.float32)
    return float_linear(np.concatenate([np.asarray(weight, np.float32) for weight in weights]), bias)


def _packed(pack: Pack, each: Sequence[Mlp], factor: float) -> list[tuple[PackedLinear, PackedLinear, PackedLinear]]:
    """Pack all experts; those in blocks share one array of scales and of biases, which they state nothing about."""
    made: dict[tuple[float, int], PackedLinear] = {}

    def one(linear: Linear, factor: float = 1.0) -> PackedLinear:
        packed_one = packed(pack, linear, factor=factor, out_multiple=GROUP)
        if not linear.has_blocks:
            return packed_one
        alike = made.setdefault((factor, len(packed_one.scales)), packed_one)
        return replace(packed_one, scales=alike.scales, bias=alike.bias if linear.bias is None else packed_one.bias)

    return [(one(gate), one(up), one(down, factor)) for gate, up, down in each]
