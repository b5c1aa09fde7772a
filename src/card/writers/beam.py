"""CARD's drafter: beams of a draft model, one layer a pass, several requests in one call."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from card.candidates import CandidateCache, NewNodes
from card.messages import DraftSpec
from card.models.protocol import NO_PARENT, Extension, LanguageModel
from card.sampling import CandidateScorer, SamplingRule


class BeamSequence:
    """The beam of one request: committed text, candidate tree, and which KV row holds which node.

    Rows 0 .. num_committed_rows - 1 hold the text (without its last tokens if those were not run yet); after them come
    the rows of expanded nodes. The root of the tree is the last committed token.
    """

    def __init__(self, model: LanguageModel, token_ids: Sequence[int], spec: DraftSpec, *, epoch: int) -> None:
        self.spec = spec
        self.token_ids = list(token_ids)
        self.cache = CandidateCache(max_nodes=spec.max_nodes, lead=spec.lead)
        self.cache.restart(epoch)
        self._model = model
        rule = SamplingRule(spec.temperature, spec.top_k, spec.top_p, spec.min_p, spec.seed)
        self._scorer = CandidateScorer(rule, model.vocab_size, coupled=spec.coupled_noise)
        self._slot = model.open()
        self._num_committed_rows = 0
        self._row_of: dict[int, int] = {}  # expanded nodes below the root

    @property
    def root_position(self) -> int:
        """Absolute position of the root's token."""
        return len(self.token_ids) - 1

    def close(self) -> None:
        """Free the KV rows."""
        self._model.close(self._slot)

    def commit(self, token_ids: Sequence[int]) -> NewNodes | None:
        """Append committed tokens, re-root there, drop what died and widen the beam from the secondary tier.

        Returns: the nodes that came from the secondary tier; None for a miss, after which a new epoch has begun.
        """
        path = self.cache.walk(token_ids)
        path_rows = [self._row_of[node] for node in path if node in self._row_of]
        self.cache.advance(token_ids)
        revived = (
            self.cache.refill(1, -math.inf) if self.cache.pending else NewNodes.none()
        )  # was it left out of the beam?
        is_hit = not self.cache.pending
        if not is_hit:
            self.cache.restart(self.cache.epoch + 1)
        self.token_ids += token_ids
        survivors = sorted(
            (row, node)
            for node, row in self._row_of.items()
            if is_hit and self.cache.is_alive(node) and node not in path
        )
        self._model.keep(self._slot, self._num_committed_rows, path_rows + [row for row, _ in survivors])
        self._num_committed_rows += len(path_rows)
        self._row_of = {node: self._num_committed_rows + i for i, (_, node) in enumerate(survivors)}
        if not is_hit:
            return None
        return revived if revived.ids else self._widen()

    def _widen(self) -> NewNodes:
        missing = self.spec.beam_width - len(self.cache.frontier(self.spec.beam_width))
        return self.cache.refill(missing, self.spec.min_path_logprob) if missing > 0 else NewNodes.none()

    def frontier(self) -> list[int]:
        """Return the nodes that the next pass would expand; empty if there is nothing worth doing or no room."""
        depth_left = self._model.max_model_len - 1 - self.root_position  # nodes so deep have no successor position
        nodes = [n for n in self.cache.frontier(self.spec.beam_width) if self.cache.depth_of(n) < depth_left]
        num_new = len(self.token_ids) - self._num_committed_rows if self.cache.root_id in nodes else len(nodes)
        return nodes if self._model.num_rows(self._slot) + num_new <= self._model.max_rows else []

    def extension(self, frontier: Sequence[int]) -> Extension:
        """Return the tokens to run so that every node of ``frontier`` gets its logits."""
        start = self._num_committed_rows
        if self.cache.root_id in frontier:  # a root that was not run yet has no nodes below it
            chain = self.token_ids[start:]
            parents = [start + i - 1 if start + i else NO_PARENT for i in range(len(chain))]
            return Extension(self._slot, chain, parents, len(chain) - 1)
        root_row = start - 1
        parent_rows = [self._row_of.get(self.cache.parent(node), root_row) for node in frontier]
        return Extension(self._slot, [self.cache.token(node) for node in frontier], parent_rows)

    def grow(self, frontier: Sequence[int], logits: Tensor) -> NewNodes:
        """Take the logits of one pass over ``frontier`` and make the next layer."""
        if self.cache.root_id in frontier:
            self._num_committed_rows = len(self.token_ids)
        else:
            first_row = self._model.num_rows(self._slot) - len(frontier)
            self._row_of.update((node, first_row + i) for i, node in enumerate(frontier))
        positions = [self.root_position + self.cache.depth_of(node) + 1 for node in frontier]
        tokens, logprobs = self._scorer.top(logits, positions, self.spec.branch)
        return self.cache.grow(
            frontier,
            tokens.tolist(),
            logprobs.tolist(),
            width=self.spec.beam_width,
            min_path_logprob=self.spec.min_path_logprob,
        )


class BeamWriter:
    """Runs one pass of the draft model for the beams of several requests."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def open(self, token_ids: Sequence[int], spec: DraftSpec, *, epoch: int) -> BeamSequence:
        """Start the beam of a request behind its text."""
        return BeamSequence(self.model, token_ids, spec, epoch=epoch)

    def step(self, beams: Sequence[tuple[BeamSequence, Sequence[int]]]) -> list[NewNodes]:
        """Grow each beam by one layer below its frontier, in one pass; frontiers are not empty."""
        all_logits = self.model.forward([beam.extension(frontier) for beam, frontier in beams])
        return [beam.grow(frontier, logits) for (beam, frontier), logits in zip(beams, all_logits, strict=True)]
