"""Lookahead: Jacobi iterations in each target pass fill a pool of n-grams, from which candidates are proposed."""

from __future__ import annotations

from collections.abc import Sequence

from card.drafting.local.protocol import LocalWriter, Observation, WriterSequence
from card.family.copying.guesses import Guesses, NgramPool, children_of, guess_rates, merged, nodes_along
from card.tree.nodes import ROOT, MergedNodes, Nodes

_PROBE_LOGPROB = -6.0  # score of every node of the window, as it is accepted by chance now and then


class LookaheadSequence(WriterSequence):
    """The window and the n-grams of one request.

    The window has W columns of N - 1 tokens: a head, then the target's choices after it in the latest passes. Column
    0's head is the last committed token; the other heads follow it in a chain, and the rest of each column hangs below
    its head. So the window is a tree below the last token, with each token at its own position. A pass gives every
    column one more token. The N tokens are then an n-gram, and the head is dropped.
    """

    pool: NgramPool
    """The n-grams that guesses come from."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        *,
        window: int = 5,
        ngram: int = 4,
        guesses: int = 8,
        learns_text: bool = True,
        pool: NgramPool | None = None,
    ) -> None:
        """Begin with evenly spaced parts of the prompt as columns.

        Args:
            window: columns of the window (W), 1 or more.
            ngram: tokens of an n-gram (N), its key included; 2 or more.
            guesses: most n-grams kept for one token (G), 1 or more.
            learns_text: whether n-grams of prompt and generated text are guesses, too.
            pool: n-grams of ``ngram`` tokens, shared with other sequences; None: a new one for this request.
        """
        self.pool = NgramPool(ngram, guesses) if pool is None else pool
        self._ngram = ngram
        self._learns_text = learns_text
        self._rates = guess_rates(guesses)
        self._guesses: Guesses = {}  # of the latest proposal, until its pass was observed
        self._tail = list(prompt_ids[1 - ngram :])
        if learns_text:
            self.pool.learn_text(prompt_ids)
        length = len(prompt_ids)
        starts = [column * length // window for column in range(window)]
        # The window: for each column its head, then what followed it, oldest choice first.
        self.columns = [tuple([prompt_ids[(start + i) % length] for i in range(ngram - 1)]) for start in starts]
        self._put_head()

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        """Return the window, in at most half of the budget, and guesses. ``best_path`` is ignored."""
        tree = MergedNodes()
        self._add_window(tree, budget // 2)
        num_probes = len(tree)
        self._guesses = merged(self.pool.newest(self._tail[-1]))
        self._rates.add_guesses(tree, ROOT, self._guesses, 0.0, budget)
        return tree.nodes(num_probes)

    def move_to(self, text_ids: Sequence[int]) -> None:
        """Continue after a text that other writers drafted, given by its last tokens; the window stays."""
        self._tail = list(text_ids[1 - self._ngram :])
        self._put_head()

    def _add_window(self, tree: MergedNodes, max_nodes: int) -> None:
        """Add the leading columns, whole ones only: a column's next token is the choice after its last."""
        above = ROOT
        for idx, column in enumerate(self.columns):
            path = column[1:] if idx == 0 else column
            if len(tree) + _num_missing(tree, above, path) > max_nodes:
                return
            node = above
            for depth, token in enumerate(path):
                node = tree.add(node, token, _PROBE_LOGPROB)
                if idx and depth == 0:
                    above = node

    def observe(self, seen: Observation) -> None:
        """Learn the n-grams of all columns that were run, then those of the text, and advance the window by one."""
        for idx, token in self._next_tokens(seen).items():
            head, *rest = self.columns[idx]
            self.pool.insert(head, (*rest, token))
            self.columns[idx] = (*rest, token)
        self._rates.learn(self._guesses, seen.new_ids)
        self._guesses = {}
        text = [*self._tail, *seen.new_ids]
        if self._learns_text:
            self.pool.learn_text(text)  # last, hence newest: the text itself is the better guess
        self._tail = text[1 - self._ngram :]
        self._put_head()

    def _next_tokens(self, seen: Observation) -> dict[int, int]:
        """Return the target's choice after each column of the window whose nodes were all run."""
        child_of = children_of(seen)
        found: dict[int, int] = {}
        above = ROOT
        for idx, column in enumerate(self.columns):
            path = column if idx else column[1:]
            nodes = nodes_along(child_of, above, path)
            if len(nodes) > len(path):
                found[idx] = seen.choices[nodes[-1] + 1]
            if idx and len(nodes) == 1:
                break  # this column's head was not run, and all later heads hang below it
            above = nodes[1] if idx else ROOT
        return found

    def _put_head(self) -> None:
        self.columns[0] = (self._tail[-1], *self.columns[0][1:])


def _num_missing(tree: MergedNodes, parent: int, path: Sequence[int]) -> int:
    """Return how many nodes of ``path`` are missing below ``parent``."""
    for depth, token in enumerate(path):
        node = tree.child(parent, token)
        if node is None:
            return len(path) - depth
        parent = node
    return 0


class LookaheadWriter(LocalWriter):
    """Proposes n-grams that begin with the last token: from Jacobi iterations of the target, and from the text.

    The window costs (W - 1) + W (N - 2) candidates in every pass, less where columns share tokens. Like the published
    method it advances by one token a pass, however many are committed. There are two differences. It begins with parts
    of the prompt instead of filling level by level, so that the first pass gives n-grams. If the budget is too small,
    the leading columns run and the others wait.

    Source: Fu et al. 2024, arXiv:2402.02057.
    """

    sequence = LookaheadSequence
