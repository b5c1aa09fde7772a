"""Steps that states of the delta rule take in a pass: which rows are absorbed, and how others go on from these.

Rows of the text are absorbed as soon as they are known to be text. What a request may still drop goes on from the state
in places that a pass forgets, depth first through the tree: a row takes over the place of its parent if it is the last
one that needs it, and the largest branch comes last. So 2^n rows need n + 1 places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from card.errors import ModelError
from card.kernels.jit.tables import StepTable
from card.models.own.exact_rows import IntArray, NewRows
from card.models.rows.pool_entries import MIN_SHARED_TOKENS
from card.models.rows.records import Records

# Most rows at the end of a chain that a rejection may still remove. Older rows are absorbed into the state; otherwise
# each pass of a text that is never cut would repeat all of them. Draft models write 24 layers ahead. With chains of 20,
# bounds of 8, 16 and 32 rows let a text of 100 tokens run 747, 588 and 0 rows again after rejections, and repeat 8,178,
# 11,208 and 11,956 records.
MOST_UNSURE = 32

Step = tuple[int, int, int, int, int]  # the entries of a `StepTable`


@dataclass(frozen=True, slots=True)
class StateSteps:
    """The steps of one sequence in a pass."""

    records: Records
    steps: Sequence[Step]
    num_absorbed: int  # rows behind the pass
    num_prompt: int = 0  # rows of a prompt that ends here; 0: none does


@contextmanager
def taking_steps(sequences: Sequence[StateSteps]) -> Iterator[None]:
    """Let a pass take steps: states that it may change count as lost until it has ended well."""
    for one in sequences:
        if not one.records.num_absorbed:
            one.records.state[...] = 0.0
        one.records.is_lost = one.num_absorbed > one.records.num_absorbed
        if one.num_prompt:  # whose state takes the place of an older one
            one.records.num_prompt = 0
    yield
    for one in sequences:
        one.records.num_absorbed, one.records.is_lost = one.num_absorbed, False
        if one.num_prompt:
            one.records.mark_prompt(one.num_prompt)


def state_steps(passes: Sequence[NewRows]) -> list[StateSteps]:
    """Return the steps of each sequence. Raises: ModelError if a row hangs below one whose state is gone."""
    made, offset = list[StateSteps](), 0
    for one in passes:
        made.append(_Planner(one, offset).plan())
        offset += one.num_new
    return made


def step_table(sequences: Sequence[StateSteps]) -> IntArray:
    """Return the steps of all sequences, one after the other."""
    return np.array([step for one in sequences for step in one.steps], np.int64).reshape(-1, StepTable.size)


class _Planner:
    """Plans the steps of one sequence."""

    def __init__(self, one: NewRows, offset: int) -> None:
        assert one.sequence.records is not None
        self._records, self._tree = one.sequence.records, one.sequence.tree
        self._start, self._end, self._offset = one.num_held, self._tree.num_rows, offset
        num_new_text = one.extension.first_logits_idx
        self._num_text = one.num_held + num_new_text if num_new_text else 0  # 0: perhaps candidates below candidates
        self._state = self._records.state.ctypes.data
        self._unsure = np.arange(self._records.num_absorbed, self._end)
        parents = self._tree.parents[self._unsure].tolist()
        self._parents: dict[int, int] = dict(zip(self._unsure.tolist(), parents, strict=True))
        self._addresses: dict[int, int] = {}
        self._repeated: list[int] = []  # rows whose records the steps read

    def plan(self) -> StateSteps:
        """Have places for the records of rows in doubt, and return the steps."""
        before, absorbed = self._records.num_absorbed, self._num_absorbed()
        if absorbed < before:
            raise ModelError(
                f"a token was given a parent before row {before - 1}, and states before it are gone; cut the sequence"
                " with keep() first"
            )
        num_needed = self._end - absorbed + self._records.layout.num_needed
        self._records.have_places(num_needed, self._start)
        self._addresses = dict(zip(self._parents, self._records.addresses(self._unsure).tolist(), strict=True))
        steps = [self._step(row, self._state, self._state, self._mark_of(row + 1)) for row in range(before, absorbed)]
        num_prompt = self._num_text if self._ends_prompt and before < self._num_text <= absorbed else 0
        steps += self._branches(absorbed)
        self._records.require_held(np.array(self._repeated, np.int64))
        return StateSteps(self._records, steps, absorbed, num_prompt)

    @property
    def _ends_prompt(self) -> bool:
        """True if the text that is read here is worth a landmark: logits follow, and texts may share what is new.

        Where one stands anyway it needs no second one. A step writes to one place, so the first would miss its state.
        """
        is_worth = self._num_text < self._end and self._num_text - self._start >= MIN_SHARED_TOKENS
        return is_worth and not self._records.mark_of(self._num_text)

    def _mark_of(self, num_rows: int) -> int:
        """Return where the state behind so many rows goes, too; 0 for nowhere."""
        if self._ends_prompt and num_rows == self._num_text:
            return self._records.begin_prompt()
        return self._records.mark_of(num_rows)

    def _num_absorbed(self) -> int:
        """Return how many rows are to be absorbed behind the pass."""
        records, chain = self._records, self._tree.num_prefix_rows
        wanted = max(
            records.num_absorbed,
            records.num_text,
            self._num_text,
            min(self._start, chain) - MOST_UNSURE,
            self._end - records.layout.num_recent + records.layout.num_needed,
        )
        below = (self._parents[row] for row in range(chain, self._end))
        branching = (parent + 1 for parent in below if parent < chain)
        return min(wanted, chain, *branching)

    def _step(self, row: int, source: int, target: int, mark: int = 0) -> Step:
        if row >= self._start:
            return row - self._start + self._offset, 0, source, target, mark
        self._repeated.append(row)
        return 0, self._addresses[row], source, target, mark

    def _branches(self, absorbed: int) -> list[Step]:
        """Return the steps of all rows that are not absorbed, each behind its parent."""
        children = self._children(absorbed)
        sizes: dict[int, int] = {}
        for row in range(self._end - 1, absorbed - 1, -1):
            sizes[row] = 1 + sum(sizes[child] for child in children[row])
        steps, free, num_places = list[Step](), list[int](), 0
        stack = [
            (row, self._state, False) for row in sorted(children[absorbed - 1], key=sizes.__getitem__, reverse=True)
        ]
        while stack:
            row, source, is_last = stack.pop()
            if is_last:
                target = source
            elif free:
                target = free.pop()
            else:
                target, num_places = num_places, num_places + 1
            steps.append(self._step(row, source, target))
            below = sorted(children[row], key=sizes.__getitem__, reverse=True)
            stack += [(child, target, child == below[0]) for child in below]
            if not below:
                free.append(target)
        return steps

    def _children(self, absorbed: int) -> dict[int, list[int]]:
        """Return the children of rows, of those that new rows are or hang below."""
        children: dict[int, list[int]] = defaultdict(list)
        needed = set[int]()
        for row in range(self._end - 1, absorbed - 1, -1):
            if row >= self._start or row in needed:
                children[self._parents[row]].append(row)
                needed.add(self._parents[row])
        return children
