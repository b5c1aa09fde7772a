"""The growing batch of one call of `generate`: rows of separate requests in the form of transformers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

logger = logging.getLogger(__name__)


class GenerateBatch:
    """Rows as in transformers: all of one length, growing by one column at a time.

    Each row gets its tokens from the engine at its own pace; a column is added once every row has a token for it. So
    stopping criteria and streamers see exactly the same as in transformers, and nothing goes beyond a stop.
    """

    def __init__(
        self, input_ids: Tensor, config: GenerationConfig, criteria: StoppingCriteriaList, streamer: BaseStreamer | None
    ) -> None:
        self.ids = input_ids
        self.is_wanted = [True] * len(input_ids)  # rows that need further tokens
        self._is_finished = [False] * len(input_ids)
        self._has_ended = [False] * len(input_ids)  # rows that get no more tokens
        self._arrived: list[deque[int]] = [deque() for _ in input_ids]
        self._pads_finished = any(hasattr(one, "eos_token_id") for one in criteria)  # as in transformers
        pad_id = getattr(config, "_pad_token_tensor", None)
        self._pad_id = 0 if pad_id is None else int(pad_id)
        self._criteria = criteria
        self._streamer = streamer

    @property
    def is_running(self) -> bool:
        """True until every row is finished."""
        return not all(self._is_finished)

    def append(self, row: int, token_ids: Sequence[int], *, has_ended: bool) -> None:
        """Append new tokens of the engine to a row."""
        self._arrived[row] += token_ids
        self._has_ended[row] = has_ended

    def advance(self) -> None:
        """Add all complete columns."""
        while self.is_running and all(self._is_ready(row) for row in range(len(self._arrived))):
            self._finish_full_rows()
            if self.is_running:
                self._add_column()

    def _is_ready(self, row: int) -> bool:
        return bool(self._arrived[row]) or self._has_ended[row] or not self.is_wanted[row]

    def _finish_full_rows(self) -> None:
        for row, arrived in enumerate(self._arrived):
            if self.is_wanted[row] and not arrived:
                logger.warning("row %d has filled the model's context and ends there", row)
                self._is_finished[row], self.is_wanted[row] = True, False

    def _add_column(self) -> None:
        pairs = zip(self._arrived, self.is_wanted, strict=True)
        tokens = [arrived.popleft() if is_wanted else self._pad_id for arrived, is_wanted in pairs]
        column = torch.tensor(tokens, dtype=self.ids.dtype, device=self.ids.device)
        self.ids = torch.cat([self.ids, column[:, None]], 1)
        is_done = self._criteria(cast(torch.LongTensor, self.ids), None).tolist()
        self._is_finished = [before or now for before, now in zip(self._is_finished, is_done, strict=True)]
        if self._pads_finished:
            self.is_wanted = [w and not finished for w, finished in zip(self.is_wanted, self._is_finished, strict=True)]
        if self._streamer is not None:
            self._streamer.put(column.cpu())  # type: ignore[no-untyped-call]
