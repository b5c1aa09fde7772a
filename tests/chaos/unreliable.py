"""An unreliable world in one thread: seeded, deterministic, and far worse than any real one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np

from card.drafting.drafter import DrafterWorker
from card.drafting.drafter_pass import NO_END, TurnEnd
from card.drafting.messages import DrafterMessage, Ready
from card.engine.engine import Engine
from card.engine.queue import Limits
from card.engine.target import TargetWorker
from card.errors import CardError, ModelError
from card.kernels.number_types import Floats
from card.models.protocol import Extension
from tests.chaos.forgery import LIES, OFFENCES, Forger, forged_order
from tests.chaos.soak import MAX_NUM_SEQS
from tests.decoding import drafter_for
from tests.toy import TableModel
from tests.unreliable_link import FakeLink, Faults

VOCAB_SIZE = 40
MOST_DRAFTER_REQUESTS = 64  # open at once in one drafter
_MAX_KV_ROWS = 900  # about ten requests: the memory is full before the batch is
_MODEL = {"vocab_size": VOCAB_SIZE, "order": 2, "spread": 2.5, "max_model_len": 128, "num_tree_rows": 64}


def sound_target() -> TableModel:
    """Return the target as it is without faults."""
    return TableModel(0, **_MODEL)


class FailingTarget(TableModel):
    """A target that fails now and then for a whole pass, and always for a few sequences; unless it is calm."""

    def __init__(self, rng: random.Random, troubles: Counter[str]) -> None:
        super().__init__(0, **_MODEL)
        self.is_calm = False
        self._rng, self._troubles = rng, troubles
        self._broken: set[int] = set()  # slots; none is used twice
        self._sick: set[int] = set()  # slots whose scores are no numbers

    def forward(self, extensions: Sequence[Extension]) -> list[Floats]:
        """Fail, or do what a model does."""
        if self.is_calm:
            return super().forward(extensions)
        draw, slots = self._rng.random(), [extension.slot for extension in extensions]
        if draw < 0.02:
            self._troubles["failed pass"] += 1
            raise self._rng.choice([RuntimeError, MemoryError, ModelError])("a fault that passes")
        if draw < 0.04:
            self._broken.add(self._rng.choice(slots))
        elif draw < 0.06:
            self._sick.add(self._rng.choice(slots))
        if self._broken.intersection(slots):
            self._troubles["failed sequence"] += 1
            raise RuntimeError("a fault that stays")
        results = super().forward(extensions)
        return [
            np.full_like(logits, np.nan) if slot in self._sick else logits
            for slot, logits in zip(slots, results, strict=True)
        ]


class TreacherousLink(FakeLink):
    """A link whose drafter dies, hangs, fails, hears nonsense and talks nonsense; a rejected one is replaced."""

    def __init__(self, faults: Faults, rng: random.Random, troubles: Counter[str]) -> None:
        super().__init__(self._new_worker, faults)
        self.is_calm = False
        self.forger: Forger | None = None  # set once there is a target to lie to
        self._chaos, self._troubles = rng, troubles
        self._num_hung = 0

    @property
    def longest_way(self) -> int:
        """Rounds until all that was sent has arrived and was answered."""
        return 2 * self._faults.max_delay + 2 + self._num_hung

    @property
    def num_requests(self) -> int:
        """Requests that the drafter holds."""
        return len(self.worker.drafting)

    def draft(self, num_passes: int, end: TurnEnd = NO_END) -> list[tuple[int, float]]:
        """Let a round go by, as badly as it may."""
        draw = 1.0 if self.is_calm else self._chaos.random()
        if self._num_hung:
            self._num_hung -= 1
            self._now += 1
        elif draw < 0.02:
            self._replace("killed")
        elif draw < 0.04:
            self._troubles["hung"] += 1
            self._num_hung = self._chaos.randint(1, 30)
        else:
            try:
                if draw < 0.06:
                    self.worker.receive(forged_order(self._chaos))
                if draw < 0.08:
                    raise RuntimeError("the draft model fails")
                return super().draft(num_passes, end)
            except (CardError, RuntimeError) as error:
                self._replace(type(error).__name__)
        return []

    def receive(self) -> list[DrafterMessage]:
        """Return what has come, and what nobody has sent."""
        received = super().receive()
        draw = self._chaos.random()
        if self.forger is not None and not self.is_calm and draw < 0.3:
            kind = self._chaos.choice(OFFENCES if draw < 0.03 else LIES)
            forged = self.forger.forge(kind)
            if forged is not None:
                self._troubles[kind] += 1
                received.insert(self._chaos.randint(0, len(received)), forged)
        return received

    def reject(self, reason: str) -> None:
        """Replace a drafter that sends nonsense."""
        self._replace("rejected")

    @staticmethod
    def _new_worker() -> DrafterWorker:
        return drafter_for(TableModel(1, **_MODEL).blend(sound_target(), 0.9))

    def _replace(self, why: str) -> None:
        """Begin with a new drafter; what was on its way from or to the old one is gone."""
        self._troubles[why] += 1
        self.worker = self._new_worker()
        self._num_restarts += 1
        self._num_hung = 0
        self._to_drafter._queue.clear()
        self._to_target._queue.clear()
        self._urgent = [Ready(0, 0, 0)]


class UnreliableWorld:
    """The two of them with an engine."""

    def __init__(self, rng: random.Random, faults: Faults) -> None:
        self.troubles: Counter[str] = Counter()
        self.end_ids = frozenset({0})
        self.target = FailingTarget(rng, self.troubles)
        self.link = TreacherousLink(faults, rng, self.troubles)
        self.max_kv_bytes = _MAX_KV_ROWS * self.target.row_bytes
        worker = TargetWorker(self.target, clock=lambda: 0.0, max_kv_bytes=self.max_kv_bytes)
        limits = Limits(max_num_seqs=MAX_NUM_SEQS, prefill_chunk=16)
        self.engine = Engine(worker, self.link, limits=limits)
        self.link.forger = Forger(rng, worker)
        self.is_up = True
        self.spare_trees = MOST_DRAFTER_REQUESTS if faults.drop else 0  # of those whose Close was lost
        self.spare_tensors = 1 << 30  # tables that grow with the texts that were met

    @property
    def is_calm(self) -> bool:
        """Whether neither target nor drafter does harm; what is lost on the way is lost in any case."""
        return self.link.is_calm

    @is_calm.setter
    def is_calm(self, is_calm: bool) -> None:
        self.target.is_calm = self.link.is_calm = is_calm

    def trouble(self, progress: float) -> None:
        """It comes by itself."""

    def settle(self) -> None:
        """Let everything arrive that is on its way."""
        for _ in range(self.link.longest_way):
            self.link.draft(0)

    def close(self) -> None:
        """Nothing to end."""
