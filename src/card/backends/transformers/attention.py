"""Attention of one sequence's new rows over its own KV cache, for chains and trees alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from card.backends.transformers.arrays import as_array
from card.config.selection import BLOCK_ROWS, ScoreKind
from card.models.protocol import Extension
from card.models.rows.kv_cache import SequenceRows
from card.models.rows.row_tree import Window, window_size

MAX_PACKED_ROWS = 128  # up to this, the query heads of one KV head are rows of one product


@dataclass(frozen=True, slots=True)
class SequencePass:
    """The part of a forward pass that belongs to one sequence: T new rows, S rows in all.

    ``biases`` has an entry for each window (None: no window) of the model's layers: [T, 1, S] or None, added to the
    scores. ``packed`` holds the same as [1, 1, T * heads per KV head, S] if that is few rows, else as [1, 1, T, S].
    """

    offset: int  # of the first new row among the rows of the pass
    num_new: int  # T
    is_packed: bool
    is_causal: bool  # a chain in an empty sequence: each row sees the rows up to itself
    new_rows: tuple[Tensor, ...]  # L of [2, Hkv, T, D]: destination of the new keys and values
    keys: tuple[Tensor, ...]  # L of [1, Hkv, S, D], the new rows included
    values: tuple[Tensor, ...]
    biases: dict[Window, Tensor | None]
    packed: dict[Window, Tensor | None]
    chosen: Tensor | None = None  # [L, Hkv, N] rows that layers without a window read besides those from ``since`` on
    since: int = 0
    score_kind: ScoreKind | None = None  # of the scores to keep
    score_room: Tensor | None = None  # [L, Hkv, S - T] float32, filled by layers without a window

    @property
    def scores(self) -> Any:
        """The scores as an array; None if none are kept."""
        return None if self.score_room is None else as_array(self.score_room)


def sequence_pass(
    sequence: SequenceRows,
    extension: Extension,
    offset: int,
    *,
    group: int,
    windows: Iterable[Window],
    needs_bias: bool = False,
) -> SequencePass:
    """Prepare the pass of an extension's rows, the newest ones of a sequence.

    Args:
        offset: of the first of them among all rows of the pass.
        group: query heads per KV head.
        windows: of the model's layers, in any order, also repeated.
        needs_bias: never leave the causal mask to the attention kernel.
    """
    num_new, reads = len(extension.token_ids), extension.reads
    tree, kv = sequence.tree, sequence.kv
    start = tree.num_rows - num_new
    is_packed = group * num_new <= MAX_PACKED_ROWS
    is_chain = start == 0 and tree.num_prefix_rows == tree.num_rows
    biases: dict[Window, Tensor | None] = {}
    packed: dict[Window, Tensor | None] = {}
    longest = int(tree.positions(start).max())
    num_read = tree.num_rows if reads is None else reads.num_read(tree.num_rows)
    for window in sorted(set(windows), key=lambda window: window_size(window) or 0):  # None first
        size = window_size(window)
        if is_chain and not is_packed and not needs_bias and (size is None or longest < size):
            biases[window] = packed[window] = None
            continue
        if reads is None and size is not None and longest < size and biases.get(None) is not None:
            biases[window], packed[window] = biases[None], packed[None]
            continue
        num_seen = num_read if window is None else tree.num_rows
        array = tree.bias(start, window)
        if array is None:
            biases[window] = packed[window] = None
            continue
        if num_seen < tree.num_rows:  # of the rows before the pass, all that are read are seen
            array = array[:, tree.num_rows - num_seen : tree.num_rows]
        bias = torch.from_numpy(array).to(device=kv.device, dtype=kv.dtype)
        biases[window] = bias[:, None, :num_seen]
        repeated = bias.repeat_interleave(group, 0) if is_packed and group > 1 else bias
        packed[window] = repeated[None, None, :, :num_seen]
    seen = kv.narrow(3, 0, tree.num_rows).flatten(0, 1).unsqueeze(1).unbind(0)
    return SequencePass(
        offset=offset,
        num_new=num_new,
        is_packed=is_packed,
        is_causal=is_chain and not is_packed,
        new_rows=kv.narrow(3, start, num_new).unbind(0),
        keys=seen[0::2],
        values=seen[1::2],
        biases=biases,
        packed=packed,
        chosen=None if reads is None else torch.from_numpy(reads.rows).to(kv.device),
        since=0 if reads is None else reads.since,
        score_kind=extension.scores,
        score_room=None if extension.scores is None else torch.zeros((len(kv), kv.shape[2], start), device=kv.device),
    )


@dataclass(frozen=True, slots=True)
class Scoring:
    """Conversion of products of queries and keys into weights, in one layer."""

    scale: float | None = None  # factor on the scores; None for 1 / sqrt(D)
    softcap: float | None = None  # bounds the scores by ``softcap * tanh(scores / softcap)``
    sinks: Tensor | None = None  # [H], a score of each query head that gets weight but has no value

    @property
    def is_plain(self) -> bool:
        """True if an attention kernel can apply it."""
        return self.softcap is None and self.sinks is None


def attend(step: SequencePass, layer: int, query: Tensor, window: Window, scoring: Scoring) -> Tensor:
    """Return the attention of the new rows over all rows they may see; the new keys and values must be written.

    Args:
        query: [Hkv, T, G, D] any strides; G query heads share a KV head.
    Returns: [Hkv, T, G, D] any strides.
    """
    keys, values = step.keys[layer], step.values[layer]
    num_kv_heads, num_new, group, head_size = query.shape
    if window is None and step.score_room is not None:
        _keep_scores(step, layer, query, scoring)
    if window is None and step.chosen is not None:
        keys, values = (_chosen_of(rows, step.chosen[layer], step.since) for rows in (keys, values))
    if not scoring.is_plain:
        return _attend_in_steps(query, keys, values, step.biases[window], scoring)
    scale, bias = scoring.scale, step.packed[window]
    if not step.is_packed:
        heads = query.transpose(1, 2)  # KV heads are the batch, so that they are not repeated
        num_rows = keys.shape[2]
        shape = (num_kv_heads, group, num_rows, head_size)
        is_causal = step.is_causal and bias is None
        expanded_keys, expanded_values = keys[0, :, None].expand(shape), values[0, :, None].expand(shape)
        out = functional.scaled_dot_product_attention(
            heads, expanded_keys, expanded_values, bias, 0.0, is_causal, scale=scale
        )
        return out.transpose(1, 2)
    num_rows = num_new * group
    packed = query.reshape(1, num_kv_heads, num_rows, head_size)
    if num_rows == 1 and packed.dtype == torch.bfloat16:
        packed = packed.expand(
            1, num_kv_heads, 2, head_size
        )  # on a CPU, a product of two rows is twice as fast as of one
    out = functional.scaled_dot_product_attention(packed, keys, values, bias, 0.0, False, scale=scale)
    return out[0, :, :num_rows].view(num_kv_heads, num_new, group, head_size)


def _chosen_of(rows: Tensor, chosen: Tensor, since: int) -> Tensor:
    """Return the chosen rows and those from ``since`` on, [1, Hkv, N + S - since, D] of [1, Hkv, S, D]."""
    picked = torch.take_along_dim(rows, chosen[None, :, :, None], 2)
    return torch.cat((picked, rows[:, :, since:]), 2)


def _keep_scores(step: SequencePass, layer: int, query: Tensor, scoring: Scoring) -> None:
    """Score the rows from before the pass, which all new rows see."""
    assert step.score_room is not None and step.score_kind is not None
    keys = step.keys[layer][0]
    if step.score_kind == "bounds":
        scale = query.shape[3] ** -0.5 if scoring.scale is None else scoring.scale
        step.score_room[layer] = _bound_scores(query * scale, keys[:, : step.score_room.shape[2]])
        return
    rows = query.reshape(len(keys), -1, query.shape[3])
    bias = step.biases[None]
    logits = _logits_of(rows, keys, scoring).view(*query.shape[:3], -1).float()
    if bias is not None:
        logits = logits + bias
    step.score_room[layer] = MEANS[step.score_kind](logits)[:, : step.score_room.shape[2]]


def _logits_of(rows: Tensor, keys: Tensor, scoring: Scoring) -> Tensor:
    """Return the attention logits [Hkv, rows, S] of query rows [Hkv, rows, D] and keys [Hkv, S, D]."""
    logits = torch.bmm(rows, keys.transpose(1, 2)) * (rows.shape[2] ** -0.5 if scoring.scale is None else scoring.scale)
    if scoring.softcap is not None:
        logits = torch.tanh(logits / scoring.softcap) * scoring.softcap
    return logits


def _attend_in_steps(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scoring: Scoring) -> Tensor:
    num_kv_heads, num_new, group, head_size = query.shape
    rows = query.reshape(num_kv_heads, num_new * group, head_size)
    scores = _logits_of(rows, keys[0], scoring).view(num_kv_heads, num_new, group, -1)
    if bias is not None:
        scores = scores + bias
    if scoring.sinks is not None:
        sinks = scoring.sinks.view(num_kv_heads, 1, group, 1).expand(-1, num_new, -1, -1)
        scores = torch.cat((scores, sinks), -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32)[..., : keys.shape[2]].to(query.dtype)
    return torch.bmm(weights.reshape(num_kv_heads, num_new * group, -1), values[0]).view(query.shape)


def _mean_weights(logits: Tensor) -> Tensor:
    return torch.softmax(logits, -1).mean((1, 2))


def _mean_logits(logits: Tensor) -> Tensor:
    return logits.mean((1, 2))


MEANS: Mapping[ScoreKind, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"weights": _mean_weights, "logits": _mean_logits}
)
"""Scores [Hkv, S] of rows, by attention logits [Hkv, T, G, S] of T new rows and the G query heads of each KV head.

A logit of -inf means that the new row does not see that row. Sources: mean weights as in SparseSpec (arXiv:2512.01278),
mean logits after Vegas (arXiv:2602.07223).
"""


def _bound_scores(query: Tensor, keys: Tensor) -> Tensor:
    """Return scores [Hkv, S]: the mean, over T new rows and G query heads, of a bound on the logits of a row's block.

    The bound is the sum over channels of max(q k_max, q k_min), with the largest and the smallest key of the block in
    each channel. Source: Quest, arXiv:2406.10774; the code of SpecPV uses a smaller number, which is no bound.

    Args:
        query: [Hkv, T, G, D], scaled like the logits.
        keys: [Hkv, S, D].
    """
    rows = keys.shape[1]
    padded = torch.nn.functional.pad(keys, (0, 0, 0, -rows % BLOCK_ROWS))
    if rows % BLOCK_ROWS:
        padded[:, rows:] = keys[:, -1:]
    blocks = padded.unflatten(1, (-1, BLOCK_ROWS))  # type: ignore[no-untyped-call]
    largest, least = blocks.amax(2).float(), blocks.amin(2).float()
    flat = query.flatten(1, 2).float()
    bounds = flat.clamp_min(0) @ largest.transpose(1, 2) + flat.clamp_max(0) @ least.transpose(1, 2)
    scores: Tensor = bounds.mean(1).repeat_interleave(BLOCK_ROWS, 1)
    return scores[:, :rows]
