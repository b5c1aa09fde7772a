"""Phrases: continuations that the target wrote, or would have written, extend a drafter's best path for free."""

from __future__ import annotations

from collections.abc import Sequence

from card.config import EngineSettings
from card.drafting.local.protocol import LocalWriter, Observation, WriterSequence
from card.family.copying.guesses import NgramPool, children_of, guess_rates, merged, nodes_along
from card.tree.nodes import NO_NODES, PATH_END, ROOT, MergedNodes, Nodes

_NGRAM, _PER_KEY = 6, 8  # tokens of a phrase, its key included; phrases kept for one key
_MAX_KEYS = 1 << 14  # keys with phrases: about 4 MB
_NUM_PHRASES = 3  # most phrases proposed at once (K)


def new_pool() -> NgramPool:
    """Return an empty pool of phrases for many requests."""
    return NgramPool(_NGRAM, _PER_KEY, max_keys=_MAX_KEYS)


class PhraseSequence(WriterSequence):
    """One of the requests that share phrases, with its latest proposal until that is verified."""

    pool: NgramPool
    """The phrases, by the token that they follow."""

    def __init__(self, prompt_ids: Sequence[int], pool: NgramPool, *, num_phrases: int = _NUM_PHRASES) -> None:
        """Begin with the shared phrases; phrases of the prompt are the newest."""
        self.pool = pool
        self.pool.learn_text(prompt_ids)
        self._ngram = ngram = pool.length
        self._num_phrases = num_phrases
        self._tail = list(prompt_ids[1 - ngram :])
        self._phrase_rates = guess_rates(num_phrases)
        self._path: tuple[int, ...] = ()
        self._phrases: list[tuple[int, ...]] = []

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        """Return the newest phrases as branches below the best path's end; the path counts towards the budget."""
        self._path = tuple(best_path)
        key = best_path[-1] if best_path else self._tail[-1]
        self._phrases = self.pool.newest(key, self._num_phrases) if len(best_path) < budget else []
        if not self._phrases:
            return NO_NODES
        tree = MergedNodes()
        self._phrase_rates.add_guesses(tree, PATH_END, merged(self._phrases), 0.0, budget - len(best_path))
        return tree.nodes()

    def observe(self, seen: Observation) -> None:
        """Learn phrases from branches of candidates, from the proposed phrases and from the text, the best last."""
        self._learn_rates(seen.new_ids)
        self._learn_branches(seen)
        self._correct(seen)
        text = [*self._tail, *seen.new_ids]
        self.pool.learn_text(text)
        self._tail = text[1 - self._ngram :]
        self._path, self._phrases = (), []

    def _learn_rates(self, new_ids: Sequence[int]) -> None:
        """Count the success of the phrases if the path before them was right."""
        if tuple(new_ids[: len(self._path)]) == self._path:
            self._phrase_rates.learn(merged(self._phrases), new_ids[len(self._path) :])

    def _learn_branches(self, seen: Observation) -> None:
        """Learn whole phrases from chains of candidates, rejected or not, on which the target agrees.

        A phrase that was accepted is also part of the text, and is learnt once more with it.
        """
        goes_on: dict[int, int] = {}  # from a candidate to its child that is the target's choice
        for idx, (token, parent) in enumerate(zip(seen.tokens, seen.parents, strict=True)):
            if token == seen.choices[parent + 1]:
                goes_on[parent] = idx
        for start, key in enumerate(seen.tokens):
            phrase = [seen.choices[start + 1]]
            node = goes_on.get(start)
            while node is not None and len(phrase) < self._ngram - 1:
                phrase.append(seen.choices[node + 1])
                node = goes_on.get(node)
            if len(phrase) == self._ngram - 1:
                self.pool.insert(key, tuple(phrase))

    def _correct(self, seen: Observation) -> None:
        """Replace each proposed phrase that was run by the target's choices along it, even if it was not reached."""
        if not self._phrases:
            return
        key = self._path[-1] if self._path else self._tail[-1]
        child_of = children_of(seen)
        path_nodes = nodes_along(child_of, ROOT, self._path)
        if len(path_nodes) <= len(self._path):
            return
        for phrase in reversed(self._phrases):  # so that the newest stays the newest
            nodes = nodes_along(child_of, path_nodes[-1], phrase[:-1])
            if len(nodes) == len(phrase):
                self.pool.replace(key, phrase, tuple([seen.choices[node + 1] for node in nodes]))


class PhraseWriter(LocalWriter):
    """Extends the best path of all earlier writers by phrases that followed its last token.

    Phrases come from the text, from the agreeing ends of rejected candidates, and from proposed phrases as corrected by
    the target. They are kept across requests. `card.family.copying.phrase_drafting` drafts with phrases, too.

    Source: Ouroboros, arXiv:2402.13720.
    """

    def __init__(self, settings: EngineSettings, vocab_size: int, tokenizer: str = "") -> None:
        super().__init__(settings, vocab_size, tokenizer)
        self._pool = new_pool()

    def open(self, prompt_ids: Sequence[int]) -> PhraseSequence:
        """Begin a request; all requests share their phrases."""
        return PhraseSequence(prompt_ids, self._pool)
