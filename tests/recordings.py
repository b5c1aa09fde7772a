"""Checks of models whose rows leave records: texts go on with the same bits after trees, cuts and copies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from hypothesis import strategies as st
from transformers import PreTrainedModel

from card.kernels.number_types import Floats
from card.models.protocol import Extension
from card.models.recording_runner import RecordingRunner
from card.models.rows.records import BLOCK_ROWS

VOCAB, TREE_ROWS = 61, 12
TEXT = [(7 * i * i + 3 * i) % VOCAB for i in range(150)]
AROUND_LANDMARK = range(BLOCK_ROWS - 2, BLOCK_ROWS + 1)
"""Rows of copies that end before the first landmark of a model that has one each `BLOCK_ROWS` rows, or at it."""

GoesOn = Callable[[RecordingRunner, int, Sequence[int]], bool]
M = TypeVar("M", bound=PreTrainedModel)


class AtOnce:
    """Texts that are read at once, in a runner that has room for all their records."""

    def __init__(self, make_runner: Callable[[], RecordingRunner]) -> None:
        """Make the runner when the first text is asked for."""
        self._runner = functools.cache(make_runner)
        self._logits = functools.cache(self._read)

    def _read(self, token_ids: tuple[int, ...]) -> Floats:
        runner = self._runner()
        slot = runner.open()
        (logits,) = runner.forward([Extension.of_text(slot, token_ids, first_logits=0)])
        runner.close(slot)
        return np.array(logits)

    def logits(self, token_ids: Sequence[int]) -> Floats:
        """Return the logits of all rows of a text, [T, V]."""
        return self._logits(tuple(token_ids))

    def goes_on(self, runner: RecordingRunner, slot: int, token_ids: Sequence[int]) -> bool:
        """Return whether a sequence that holds a text goes on as if it had been read at once."""
        more = [*token_ids, 5, 6]
        (found,) = runner.forward([Extension.of_text(slot, more, len(token_ids), first_logits=-2)])
        return np.array_equal(found, self.logits(more)[-2:])

    def check_against(self, model: PreTrainedModel) -> None:
        """Compare logits and greedy tokens with those of transformers."""
        with torch.no_grad():
            expected = model(torch.tensor([TEXT])).logits[0].numpy()
        assert np.abs(self.logits(TEXT) - expected).max() < 1e-4 * np.abs(expected).max()
        ids = torch.tensor([TEXT[:9]])
        options = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": None}
        written = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
        assert self.logits(written)[8:-1].argmax(-1).tolist() == written[9:]

    def check_trees(self, runner: RecordingRunner, data: st.DataObject) -> None:
        """Reject trees or accept them in part, cut the text anywhere, and see that it goes on."""
        slot, text = runner.open(), TEXT[: data.draw(st.integers(1, 100))]
        runner.forward([Extension.of_text(slot, text)])
        for _ in range(data.draw(st.integers(1, 4))):
            if data.draw(st.booleans()):
                text = text[: data.draw(st.integers(1, len(text)))]
                runner.keep(slot, len(text))
                continue
            num_nodes = data.draw(st.integers(1, TREE_ROWS))
            parents = [data.draw(st.integers(-1, idx - 1)) for idx in range(num_nodes)]
            tokens = [data.draw(st.integers(0, VOCAB - 1)) for _ in range(num_nodes)]
            num_first = data.draw(st.integers(1, num_nodes))  # a tree may grow in several passes
            found = list[Floats]()
            for part in (slice(num_first), slice(num_first, None)):
                if tokens[part]:
                    new = Extension(slot, tokens[part], [len(text) + parent for parent in parents[part]])
                    found.extend(runner.forward([new])[0])
            path, node = list[int](), data.draw(st.integers(-1, num_nodes - 1))
            while node >= 0:
                path, node = [node, *path], parents[node]
            kept = [tokens[node] for node in path]
            if path:
                assert np.array_equal(found[path[-1]], self.logits([*text, *kept])[-1])
            runner.keep(slot, len(text), [len(text) + node for node in path])
            text = [*text, *kept]
        assert self.goes_on(runner, slot, text)
        runner.close(slot)


def made_noisy(model: M, noise: float) -> M:
    """Return a model with all its weights moved by ``noise`` times their spread; matrices are twice as large."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2.0 if weight.dim() > 1 else 1.0)
            weight.add_(noise * weight.std(unbiased=False) * torch.randn_like(weight))
    return model


def check_rows_put_back(runner: RecordingRunner, num_rows: int, goes_on: GoesOn) -> None:
    """Read a text in pieces, take its rows out, and put them back into another sequence."""
    source, slot = runner.open(), runner.open(num_rows + 2)
    for first in range(0, num_rows, 7):
        runner.forward([Extension.of_text(source, TEXT[: min(first + 7, num_rows)], first)])
    rows = runner.read_rows(source)
    runner.close(source)
    runner.write_rows(slot, rows)
    again = runner.open()
    runner.copy_rows(slot, again, num_rows // 2)
    assert goes_on(runner, slot, TEXT[:num_rows])
    assert goes_on(runner, again, TEXT[: num_rows // 2])
    for one in (slot, again):
        runner.close(one)


def check_copy_before_landmark(runner: RecordingRunner, num_rows: int, goes_on: GoesOn) -> None:
    """Copy the first rows of a text, read its rest there, and copy that: the second copy goes on as the text does."""
    source, slot, other = (runner.open() for _ in range(3))
    runner.forward([Extension.of_text(source, TEXT[: num_rows + 1])])
    runner.copy_rows(source, slot, num_rows)
    runner.forward([Extension.of_text(slot, TEXT, num_rows)])
    assert runner.lendable_rows(slot, BLOCK_ROWS) == BLOCK_ROWS
    runner.copy_rows(slot, other, BLOCK_ROWS)
    assert goes_on(runner, other, TEXT[:BLOCK_ROWS])
    for one in (source, slot, other):
        runner.close(one)
