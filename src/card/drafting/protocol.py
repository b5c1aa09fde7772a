"""The contract of a drafter: a `DraftWriter`, which drafts for several texts step by step.

Other packages do not depend on how a drafter drafts, or on how many tokens a step makes. A local writer
(`card.drafting.local`) has its own contract.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from card.drafting.draft_shaping import DraftShaping, FindGrammar
from card.drafting.draft_tree import DraftTree
from card.drafting.growth import RULES, Found, GrowingTree
from card.drafting.messages import DraftSpec
from card.errors import CardError
from card.kernels.likeliest import prepare as prepare_ranking
from card.models.candidate_scorer import CandidateScorer
from card.models.features import FeatureWish
from card.tree.logits import FloatArray, Logits, as_array
from card.tree.nodes import NewNodes


class DraftSequence:
    """One text to draft for: its committed tokens, and the tree of candidates below the last of them, the root.

    A step of the writer takes the `frontier` and passes the logits after these nodes to `grow`, once for each layer.
    This class handles node ids, epochs, both tiers, limits, noise and shaping.
    """

    num_rows: int = 0
    """KV rows that it has room for."""
    num_reused: int = 0
    """Tokens of the text that need not be run, as their rows are reused."""
    num_dropped: int
    """Nodes that commits have dropped so far."""
    num_rolled_back: int
    """Of these, the nodes on the most probable path of their tree."""

    def __init__(self, writer: DraftWriter, token_ids: Sequence[int], spec: DraftSpec, *, epoch: int) -> None:
        """Begin after a text, with an empty tree."""
        self.spec = spec
        self.num_dropped = self.num_rolled_back = 0
        self.token_ids = list(token_ids)
        self.cache = DraftTree(max_nodes=spec.shape.max_nodes, lead=spec.shape.lead)
        self.cache.restart(epoch)
        self._text_limit = writer.text_limit(spec)
        self._vocab_size = min(spec.vocab_size or writer.vocab_size, writer.vocab_size)  # tokens that both models have
        self._scorer = CandidateScorer(spec.sampling, self._vocab_size, coupled=spec.shape.coupled_noise)
        self._shaping: DraftShaping | None = None
        if spec.shaping is not None:
            self._shaping = DraftShaping(spec.shaping, self.token_ids, self._vocab_size, writer.find_grammar)
        self._growth = RULES[spec.shape.growth]
        self._frontier: list[int] | None = None  # kept until something changes, as finding it visits every node

    @property
    def root_position(self) -> int:
        """Absolute position of the root's token."""
        return len(self.token_ids) - 1

    @property
    def num_layers(self) -> int:
        """Depth from which nodes are not expanded: the lead, or where no further position exists."""
        return min(self.cache.lead, self._text_limit - 1 - self.root_position)

    @property
    def growing(self) -> GrowingTree:
        """The tree as the growth rules see it."""
        return GrowingTree(self.cache, self.spec.shape, self.num_layers)

    def close(self) -> None:
        """Free its resources: the request is over, or makes room for another."""

    def discard(self) -> None:
        """Free its resources after a failed step; they must not be reused."""
        self.close()

    def read(self, first: int, states: FloatArray) -> None:
        """Read hidden states of the target, if its writer needs them. They may come late, again, or never.

        Args:
            first: position of the first row in the text.
            states: [rows, layers * D], of committed tokens; of tokens that it knows, or of later ones.
        """

    def reshape(self, *, beam_width: int | None = None, branch_below: float | None = None) -> None:
        """Change the width of layers and the threshold of uncertain tokens; None keeps a value.

        The next frontier has the new shape at once. The next commit or step adds the nodes that it needs from the
        secondary tier: a new shape always comes with committed tokens, which change the tree anyway.
        """
        stated = {"beam_width": beam_width, "branch_below": branch_below}
        changes: dict[str, Any] = {name: value for name, value in stated.items() if value is not None}
        self.spec = msgspec.structs.replace(self.spec, shape=replace(self.spec.shape, **changes))
        self._frontier = None

    def commit(self, token_ids: Sequence[int]) -> NewNodes | None:
        """Append committed tokens, re-root there, drop dead nodes and widen the tree from the secondary tier.

        Returns: the nodes that came from the secondary tier; None for a miss, which begins a new epoch.
        """
        self._frontier = None
        cache = self.cache
        num_left = cache.num_nodes - len(cache.walk(token_ids))
        self.num_rolled_back += cache.num_rolled_back(token_ids)
        cache.advance(token_ids)
        self.num_dropped += num_left - cache.num_nodes
        self.token_ids += token_ids
        if self._shaping is not None:
            self._shaping.commit(token_ids)
        if not cache.pending:
            return self._growth.widen(self.growing)
        revived = cache.refill(1, -math.inf)  # the token may be in the secondary tier
        if not cache.pending:
            return revived
        cache.restart(cache.epoch + 1)
        return None

    def frontier(self) -> list[int]:
        """Return the nodes that the next step expands; empty if none is worth it or there is no room."""
        if self._frontier is None:
            self._frontier = self._growth.frontier(self.growing)
        return self._frontier

    def num_tokens_to_run(self) -> int:
        """Return how many tokens the next step runs without a limit; 0: it would do nothing."""
        return len(self.frontier())

    @property
    def best_end(self) -> tuple[int, float]:
        """Depth and path score of the best node that the next step would expand; those of the root if there is none."""
        frontier = self.frontier()
        return (self.cache.depth_of(frontier[0]), self.cache.path_logprob(frontier[0])) if frontier else (0, 0.0)

    def grow(self, nodes: Sequence[int], logits: Logits) -> NewNodes:
        """Expand nodes: make candidates from the draft model's logits after each of them.

        Args:
            logits: [len(nodes), V] float.
        Returns: the new nodes. The next layer of the same step begins at the new `frontier`.
        Raises: ProtocolError if the logits are not numbers under this spec.
        """
        self._frontier = None
        first = self.root_position + self.spec.num_hidden + 1  # noise depends on the target's positions
        positions = [first + self.cache.depth_of(node) for node in nodes]
        shaped: Logits = as_array(logits)[:, : self._vocab_size]
        if self._shaping is not None:
            shaped = self._shaping.apply(shaped, [self.cache.path_tokens(node) for node in nodes])
        tokens, logprobs = self._scorer.top(shaped, positions, self.spec.shape.branch)
        return self._growth.grow(self.growing, Found(nodes, tokens, logprobs))


class DraftWriter:
    """Drafts for any number of texts at once; a subclass defines at least `step`.

    The defaults suit a writer that holds only texts and trees.
    """

    layers_per_pass: int = 1
    """Most layers that a step adds to a tree: more than 1 for a drafter of several tokens a pass."""
    wanted_states: FeatureWish | None = None
    """Target states that its sequences read; None costs nothing. Drafters in other processes get none."""
    find_grammar: FindGrammar | None
    """Finds the grammars of requests; None ignores grammars."""

    def __init__(self, vocab_size: int, max_model_len: int, *, find_grammar: FindGrammar | None = None) -> None:
        """Make a writer that proposes tokens 0 to ``vocab_size`` - 1 and follows texts below ``max_model_len``."""
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.find_grammar = find_grammar
        prepare_ranking()

    def text_limit(self, spec: DraftSpec) -> int:
        """Return the length at which drafting for a text of this spec ends: its own limit, or the model's."""
        return min(spec.max_len, self.max_model_len)

    def rows_of(self, spec: DraftSpec) -> int:
        """Return the most KV rows that a text of this spec takes."""
        return 0

    def has_room(self, spec: DraftSpec, *, num_lent: int = 0) -> bool:
        """Return whether `open` would find room for a request of this spec now.

        Args:
            num_lent: rows that others would lend it, of `CapacityError`.
        """
        return True

    def can_ever_hold(self, spec: DraftSpec) -> bool:
        """Return whether a request of this spec fits into the memory on its own."""
        return True

    def warm_up(self, spec: DraftSpec, num_rows: int) -> None:
        """Prepare steps of this spec for sequences of up to ``num_rows`` rows, so that no request waits for that."""

    def check(self) -> None:
        """Try to draft some text. Raises: any error of `step`."""

    def open(self, token_ids: Sequence[int], spec: DraftSpec, *, epoch: int) -> DraftSequence:
        """Begin after a text, with a tree of this epoch. Raises: CapacityError if there is no room."""
        return DraftSequence(self, token_ids, spec, epoch=epoch)

    def step(self, work: Sequence[tuple[Any, int]]) -> list[NewNodes | CardError]:
        """Make one drafter pass, which adds one or several layers to each tree.

        Args:
            work: open sequences with tokens to run, each with its limit for this pass, 1 or more.
        Returns: the new nodes of each sequence, layer by layer; an error for a sequence with unusable scores, such as
            NaN. The other sequences are not affected.
        Raises: any error of the model; no sequence has changed then.
        """
        raise NotImplementedError
