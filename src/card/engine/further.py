"""A further draft model as one more writer: its tree joins that of the first at every query.

Drafters of different size miss at different places. Each has its own link and its own replicas; neither waits for the
other, and the loss of one costs what it would have proposed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from card.config import DraftSettings, ShapingRule
from card.errors import ProtocolError
from card.transport.link import DrafterLink
from card.tree.messages import Close, Layer, Ready, Resync, TargetMessage
from card.workers.metrics import RequestStats
from card.workers.replica import Replica
from card.workers.target import TargetRequest
from card.writers.local.protocol import Observation, Proposal

FURTHER = "beam2"  # its name among the writers


class FurtherDrafter:
    """Lets a drafter that runs by itself write besides the one that the engine speaks to."""

    def __init__(self, link: DrafterLink, draft: DraftSettings, *, vocab_size: int, max_model_len: int) -> None:
        """Take over a started link.

        Args:
            vocab_size, max_model_len: of the target.
        """
        self._link = link
        self._draft = draft
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._open: dict[int, _Sequence] = {}
        self._ids = itertools.count()

    @property
    def link(self) -> DrafterLink:
        """How the drafter is reached."""
        return self._link

    def open(self, request: TargetRequest) -> _Sequence:
        """Begin a request whose seed is fixed."""
        request_id, params = next(self._ids), request.params
        token_ids = list(request.prompt_ids)
        replica = Replica(
            request_id,
            token_ids,
            self._draft,
            params,
            max_len=min(len(token_ids) + params.max_tokens, self._max_model_len),
            vocab_size=self._vocab_size,
            stats=RequestStats(num_prompt_tokens=len(token_ids)),
            shaping=ShapingRule.of(params, num_prompt_tokens=len(token_ids), end_ids=request.end_ids),
        )
        self._open[request_id] = _Sequence(self, request_id, replica, token_ids)
        self._link.send(replica.open_message())
        return self._open[request_id]

    def close(self) -> None:
        """End the drafter. May be called twice."""
        self._link.close()

    def listen(self) -> None:
        """Give every replica what the drafter has said of it."""
        for message in self._link.receive():
            if isinstance(message, Ready):
                for sequence in self._open.values():
                    sequence.replica.forget_drafter()
                    self._link.send(sequence.replica.open_message())
            elif isinstance(message, Layer | Resync) and message.request_id in self._open:
                try:
                    self.send_all(self._open[message.request_id].replica.receive(message))
                except ProtocolError as error:
                    self._link.reject(str(error))
                    return

    def send_all(self, messages: Sequence[TargetMessage]) -> None:
        """Tell the drafter."""
        for message in messages:
            self._link.send(message)

    def forget(self, request_id: int) -> None:
        """End a request."""
        del self._open[request_id]
        self._link.send(Close(request_id))


class _Sequence:
    """One request's tree."""

    def __init__(self, drafter: FurtherDrafter, request_id: int, replica: Replica, token_ids: list[int]) -> None:
        self.replica = replica
        self._drafter = drafter
        self._request_id = request_id
        self._token_ids = token_ids  # the replica looks at them

    def propose(self, best_path: Sequence[int], budget: int) -> Proposal:
        """Return the best candidates that have arrived."""
        self._drafter.listen()
        found = self.replica.tree.query(budget, "tree")
        return Proposal(found.tokens, found.parents, found.path_logprobs)

    def observe(self, seen: Observation) -> None:
        """Move on, and correct the drafter."""
        self._token_ids += seen.new_ids
        self.replica.advance(seen.new_ids)
        self._drafter.send_all([self.replica.correction()])

    def close(self) -> None:
        """The request is over."""
        self._drafter.forget(self._request_id)
