"""Draft with a model of several tokens a pass: several layers of candidates a pass, on its KV cache.

A pass runs the text and the paths to the nodes that it expands, where they have no rows yet. After each such node it
runs masks. The node's logits make its children, the first mask's logits the next layer, and so on. A mask sees its node
but not the tokens between, so all nodes of a layer below that node share their logits. The rows of masks are dropped
after the pass: no later token sees them.

Source: PARD, arXiv:2504.18583. Ours: a whole tree is made of the guesses, also beside the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from card.drafting.beam import BeamSequence, BeamWriter
from card.drafting.draft_shaping import FindGrammar
from card.drafting.messages import DraftSpec
from card.drafting.protocol import DraftSequence, DraftWriter
from card.errors import ModelError
from card.kernels.number_types import Floats
from card.machine.importing import load_place
from card.models.parallel_draft import ParallelDraft
from card.models.protocol import NO_PARENT, Extension, LanguageModel
from card.models.runner import RowRunner
from card.tree.logits import FloatArray, Logits, as_array
from card.tree.nodes import NewNodes

if TYPE_CHECKING:
    from card.family.pard.state_input import StateInput


@dataclass(frozen=True, slots=True)
class _Pass:
    """Tokens of one pass over a sequence: text, then nodes, then the masks of each expanded node."""

    num_text: int  # tokens of the text
    run: tuple[int, ...]  # nodes that get a row
    expanded: tuple[int, ...]  # of these, or the root: the nodes that get children
    num_masks: tuple[int, ...]  # after each of them


class ParallelSequence(BeamSequence):
    """The tree of one request. A node has a row only if a later node was run; most nodes have none."""

    reads_whole_texts = True

    def __init__(self, writer: ParallelWriter, token_ids: Sequence[int], spec: DraftSpec, *, epoch: int) -> None:
        """Take a sequence of the writer's pool. Raises: CapacityError if it has no room."""
        super().__init__(writer, token_ids, spec, epoch=epoch)
        self._facts = writer.facts
        self._pass: _Pass | None = None
        self._state_input = writer.state_input
        self._added: dict[int, Floats] = {}  # addition to the embedding of a token without a row, [D], by place
        # The states of a prompt come with the first commit; before, it would be read without them.
        self._waits = self._state_input is not None

    def read(self, first: int, states: FloatArray) -> None:
        """Read the target's states of rows that became text, each with the token that followed."""
        if self._state_input is None or self.spec.num_hidden:  # places differ if images are left out
            return
        added = self._state_input.added_by(states)
        self._added.update(
            (place, row) for place, row in enumerate(added, first + 1) if place >= self.num_committed_rows
        )

    def commit(self, token_ids: Sequence[int]) -> NewNodes | None:
        """Commit tokens as `BeamSequence.commit` does."""
        self._waits = False
        return super().commit(token_ids)

    def frontier(self) -> list[int]:
        """Return the nodes that the next pass would expand; empty if none is worth a pass, or without room."""
        if self._waits:
            return []
        if self._frontier is None:
            nodes = self._growth.frontier(self.growing)
            while nodes and self._num_tokens(nodes) > self._room:
                nodes = [] if self._growth.is_run_whole else nodes[:-1]
            self._frontier = nodes
        return self._frontier

    def num_tokens_to_run(self) -> int:
        """Return how many tokens must be run to expand the whole frontier, masks included."""
        nodes = self.frontier()
        return self._num_tokens(nodes) + sum(self._masks_of(nodes, self._room)) if nodes else 0

    def extension(self, frontier: Sequence[int], max_tokens: int) -> Extension:
        """Return at most ``max_tokens`` tokens to run: tokens without rows, the first nodes of ``frontier``, and masks.

        Its logits are the ones for `grow`.
        """
        most = min(max_tokens, self._room)
        nodes = list(frontier)
        while len(nodes) > 1 and self._num_tokens(nodes) > most:
            nodes.pop()
        text = self.token_ids[self.num_committed_rows :]
        run = self._without_rows(nodes)
        if len(text) + len(run) > most:  # start with the tokens above the node
            text, run, nodes = text[:most], run[: max(0, most - len(text))], []
        made = _Pass(len(text), tuple(run), tuple(nodes), tuple(self._masks_of(nodes, most)))
        self._pass = made
        return replace(self._extension_of(made, text), inputs=self._inputs_of(text))

    def grow(self, frontier: Sequence[int], logits: Logits) -> NewNodes:
        """Process the logits of a pass, keep its rows except masks, and make a layer of each guess.

        Returns: the new nodes, layer by layer; none if the pass expanded no node.
        Raises: ProtocolError if the logits are not finite under this spec.
        """
        made, self._pass, self._frontier = self._pass, None, None
        assert made is not None, "a pass was run"
        first = self.num_committed_rows + len(self.row_of)
        for place in range(self.num_committed_rows, self.num_committed_rows + made.num_text):
            self._added.pop(place, None)
        self.num_committed_rows += made.num_text
        self.row_of.update((node, first + made.num_text + i) for i, node in enumerate(made.run))
        rows = range(self.num_committed_rows, self.num_committed_rows + len(self.row_of))
        self._model.keep(self.slot, self.num_committed_rows, rows)
        if self.num_committed_rows == len(self.token_ids) and not self._is_shared:
            self._is_shared = True
            self._pool.note(self.slot, self.token_ids)
        return self._layers(made, logits)

    # ---- inside -----------------------------------------------------------------------------------------------------

    @property
    def _room(self) -> int:
        return self._model.capacity(self.slot) - self._model.num_rows(self.slot)

    def _num_tokens(self, frontier: Sequence[int]) -> int:
        return len(self.token_ids) - self.num_committed_rows + len(self._without_rows(frontier))

    def _without_rows(self, nodes: Sequence[int]) -> list[int]:
        """Return nodes without a row on the paths to some nodes, these included, each after its parent."""
        found: dict[int, None] = {}
        for node in nodes:
            path, above = list[int](), node
            while above != self.cache.root_id and above not in self.row_of and above not in found:
                path.append(above)
                above = self.cache.parent(above)
            found.update(dict.fromkeys(reversed(path)))
        return list(found)

    def _masks_of(self, nodes: Sequence[int], most: int) -> list[int]:
        """Return each node's number of masks in a pass of ``most`` tokens: an equal share, or as many as it needs."""
        share = (most - self._num_tokens(nodes)) // max(1, len(nodes))
        useful = (min(self._facts.num_tokens, self.num_layers - self.cache.depth_of(node)) - 1 for node in nodes)
        return [max(0, min(count, share)) for count in useful]

    def _extension_of(self, made: _Pass, text: Sequence[int]) -> Extension:
        start, cache = self._model.num_rows(self.slot), self.cache
        row_of = {cache.root_id: self.num_committed_rows + made.num_text - 1, **self.row_of}
        token_ids, parents = list(text), [start + i - 1 if start + i else NO_PARENT for i in range(len(text))]
        for node in made.run:
            row_of[node] = start + len(token_ids)
            token_ids.append(cache.token(node))
            parents.append(row_of[cache.parent(node)])
        for node, count in zip(made.expanded, made.num_masks, strict=True):
            above = row_of[node]
            for _ in range(count):
                parents.append(above)
                above = start + len(token_ids)
                token_ids.append(self._facts.mask_id)
        first = made.num_text - 1 if cache.root_id in made.expanded else made.num_text
        return Extension(self.slot, token_ids, parents, first if made.expanded else len(token_ids))

    def _inputs_of(self, text: Sequence[int]) -> Floats | None:
        """Return the embeddings of the text's next tokens with their additions; None if nothing is added to any."""
        known = [self._added.get(place) for place, _ in enumerate(text, self.num_committed_rows)]
        none = next((np.zeros_like(row) for row in known if row is not None), None)
        if none is None:
            return None
        embeddings = cast(RowRunner, self._model).embeddings(text)
        return embeddings + np.stack([none if row is None else row for row in known])

    def _layers(self, made: _Pass, logits: Logits) -> NewNodes:
        """Make children of the expanded nodes, then their children, one layer for each mask."""
        place = {self.cache.root_id: 0} if self.cache.root_id in made.expanded else {}
        place |= {node: i for i, node in enumerate(made.run)}
        guesses: dict[int, list[tuple[int, int]]] = {}  # by node: rows of logits, and the number of the guess
        array = as_array(logits)
        num_before = len(array) - sum(made.num_masks)
        for node, count in zip(made.expanded, made.num_masks, strict=True):
            of_masks = range(num_before, num_before + count)
            guesses[node] = [(row, offset) for offset, row in enumerate((place[node], *of_masks))]
            num_before += count
        layers: list[NewNodes] = []
        nodes = list(made.expanded)
        while nodes and len(layers) < self._facts.num_tokens:
            guessed = [guesses.pop(node) for node in nodes]
            heat = np.array([self._facts.temperatures[offset] for (_, offset), *_ in guessed], array.dtype)
            rows = array[[row for (row, _), *_ in guessed]] / heat[:, None]
            layers.append(DraftSequence.grow(self, nodes, rows))
            rest = {node: after for node, (_, *after) in zip(nodes, guessed, strict=True) if after}
            new = zip(layers[-1].ids, layers[-1].parents, strict=True)
            guesses |= {node: rest[parent] for node, parent in new if parent in rest}
            nodes = [node for node in self._growth.frontier(self.growing) if node in guesses]
        self._frontier = None
        return NewNodes.joined(layers)


class ParallelWriter(BeamWriter):
    """Runs passes for several requests on a draft model of several tokens a pass: each request gets several layers."""

    def __init__(
        self,
        model: LanguageModel,
        facts: ParallelDraft,
        kv_cache_bytes: int | None = None,
        *,
        find_grammar: FindGrammar | None = None,
        state_input: StateInput | None = None,
    ) -> None:
        """Make a writer of ``model`` with the settings of its folder; other arguments as of `BeamWriter`.

        Args:
            state_input: the model's layer for the target's hidden states; None: it reads none.
        """
        super().__init__(model, kv_cache_bytes, find_grammar=find_grammar)
        self.state_input = state_input
        self.wanted_states = None if state_input is None else state_input.wish
        self.facts = facts
        self.layers_per_pass = facts.num_tokens

    def open(self, token_ids: Sequence[int], spec: DraftSpec, *, epoch: int) -> ParallelSequence:
        """Start the tree of a request after its text. Raises: CapacityError if there is no room."""
        return ParallelSequence(self, token_ids, spec, epoch=epoch)


def make_writer(model: LanguageModel, kv_cache_bytes: int | None = None, **asked: Any) -> DraftWriter | None:
    """Return the writer of a model of several tokens a pass; None for any other model.

    Args:
        asked: as of `card.drafting.draft_writers.make_writer`, with its errors.
    """
    parallel: ParallelDraft | None = asked["parallel"]
    if parallel is None:
        return None
    state_input = _state_input(model, parallel, asked["target"])
    return ParallelWriter(model, parallel, kv_cache_bytes, find_grammar=asked["find_grammar"], state_input=state_input)


def _state_input(model: LanguageModel, parallel: ParallelDraft, target: RowRunner | None) -> StateInput | None:
    path = parallel.states_file
    if path is None:
        return None
    if target is None:
        raise ModelError(
            f"{path.parent} reads its target's hidden states, which reach no drafter in another process, on a "
            "server or in another engine; run it with LLM or card generate, or adapt one without --target-features"
        )
    assert isinstance(model, RowRunner), "a folder has the facts of its inputs"
    kind = load_place("card.family.pard.state_input:StateInput")  # needs torch, like its training
    state_input: StateInput = kind.load(path)
    state_input.check(target, model.original.hidden_size, str(path))
    return state_input
