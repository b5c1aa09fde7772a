"""A decoder over KV rows at fixed addresses, so that its passes can be recorded once and replayed.

Each sequence keeps its rows in its runner's cache. The rows of the decoding sequence are copied to one fixed place, the
*desk*; a pass reads and writes there, and its new rows are copied back. Between two passes of one sequence only rows
that a rollback moved are copied again. So recorded steps use one place for all sequences. A change of sequence costs
one copy of its rows, which is little compared with the weights that a pass reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from card.backends.cuda.fused import FusedDecoder, StaticPass, TensorStates
from card.backends.cuda.graphs import Recorder, Step, bucket_of
from card.backends.transformers.attention import MAX_PACKED_ROWS
from card.models.rows.row_tree import BIAS_ALIGNMENT

TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # sizes of recorded passes
MAX_STATIC_TOKENS = TOKEN_BUCKETS[-1]
SMALLEST_SPAN = 256  # rows in the attention of a recorded pass: this, twice as many, and so on up to all


class StaticDecoder:
    """Runs a fused decoder on the rows of one sequence at a time, on the desk.

    Unused rows are zeros or old finite numbers: attention gives them weight 0, and 0 times a finite number is 0.
    """

    def __init__(self, decoder: FusedDecoder, max_rows: int) -> None:
        """Make the desk for sequences of at most ``max_rows`` rows."""
        self._decoder = decoder
        layout = decoder.layout
        with_padding = max_rows + MAX_STATIC_TOKENS  # room for a padded pass after the last row
        self.num_rows = -(-with_padding // BIAS_ALIGNMENT) * BIAS_ALIGNMENT
        num_kv_heads, head_size = layout.shape
        shape = (len(layout.layers), 2, num_kv_heads, self.num_rows, head_size)
        self._kv = torch.zeros(shape, dtype=decoder.embedding.dtype, device=layout.device)
        self._spans = _spans(self.num_rows)
        self._slot: int | None = None  # of the sequence on the desk
        self._num_valid = 0  # of its first rows
        self.recorder = Recorder(layout.device)

    @property
    def device(self) -> torch.device:
        """The device of the desk."""
        return self._kv.device

    @property
    def vocab_size(self) -> int:
        """V of the logits."""
        return self._decoder.vocab_size

    def span_of(self, num_rows: int) -> int:
        """Return the span of a pass that must see the first ``num_rows`` rows, which the desk has."""
        span = bucket_of(num_rows, self._spans)
        assert span is not None, f"{num_rows} rows, the desk has {self.num_rows}"
        return span

    def record(self, run: Step) -> Step:
        """Return the recorded form of ``run``, a step that calls `forward`."""
        self._slot, self._num_valid = None, 0  # warming up writes to the desk
        return self.recorder.record(run)

    def bring(self, slot: int, source: Tensor, num_rows: int) -> None:
        """Copy the first rows of a sequence to the desk; the rows after them are to be written.

        Args:
            source: [L, 2, Hkv, capacity, D] the sequence's own rows.
        """
        if slot != self._slot:
            self._slot, self._num_valid = slot, 0
        num_missing = num_rows - self._num_valid
        if num_missing > 0:
            there = self._kv.narrow(3, self._num_valid, num_missing)
            there.copy_(source.narrow(3, self._num_valid, num_missing))
        self._num_valid = num_rows

    def give_back(self, slot: int, target: Tensor, num_new: int) -> None:
        """Copy the ``num_new`` rows that a pass wrote after the valid ones to the sequence's own rows, ``target``."""
        assert slot == self._slot, f"the desk holds slot {self._slot}, not {slot}"
        target.narrow(3, self._num_valid, num_new).copy_(self._kv.narrow(3, self._num_valid, num_new))
        self._num_valid += num_new

    def forget(self, slot: int, num_rows: int = 0) -> None:
        """Record that only the first ``num_rows`` rows of a sequence are unchanged."""
        if slot == self._slot:
            self._num_valid = min(self._num_valid, num_rows)

    def forward(
        self, token_ids: Tensor, positions: Tensor, row_idx: Tensor, visible: Tensor, states: TensorStates | None = None
    ) -> Tensor:
        """Run T tokens over the desk, as a part of a step: fixed shapes, nothing is read back.

        Args:
            token_ids, positions: [T] int64.
            row_idx: [T] int64, different rows of the desk for the keys and values of the tokens.
            visible: [T, span] bool, the rows that each token sees, its own among them; ``span`` from `span_of`.
            states: receives the hidden states of all rows; None: none are wanted.
        Returns: logits [T, V].
        """
        step = self._static_pass(row_idx, visible)
        return self._decoder.run(token_ids, positions, [step], slice(None), states)

    def _static_pass(self, row_idx: Tensor, visible: Tensor) -> StaticPass:
        num_new, span = visible.shape
        group = self._decoder.group
        bias = torch.zeros(visible.shape, dtype=self._kv.dtype, device=self.device)
        bias.masked_fill_(~visible, float("-inf"))
        is_packed = group * num_new <= MAX_PACKED_ROWS
        repeated = bias[:, None].expand(num_new, group, span).reshape(-1, span) if is_packed else bias
        seen = self._kv.narrow(3, 0, span).flatten(0, 1).unsqueeze(1).unbind(0)
        return StaticPass(
            offset=0,
            num_new=num_new,
            is_packed=is_packed,
            is_causal=False,
            new_rows=(),
            keys=seen[0::2],
            values=seen[1::2],
            biases={None: bias[:, None]},
            packed={None: repeated[None, None]},
            kv=self._kv,
            row_idx=row_idx,
        )


def _spans(num_rows: int) -> list[int]:
    spans = [min(SMALLEST_SPAN, num_rows)]
    while spans[-1] < num_rows:
        spans.append(min(2 * spans[-1], num_rows))
    return spans
