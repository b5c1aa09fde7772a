"""Target passes over any tree below a text: what the tests of local writers show them, step by step or shaken."""

from __future__ import annotations

import random
from collections.abc import Sequence

from card.drafting.local.protocol import Observation, WriterSequence
from card.tree.nodes import NO_NODES, Nodes
from card.tree.verify import match
from tests.local_writing import Target, TopTokens, assert_well_formed, hung


def random_target(seed: int, vocab_size: int, order: int) -> Target:
    """Return a target whose next token depends on the last ``order`` tokens only."""
    return lambda text: hash((seed, *text[-order:])) % vocab_size


def ranked_tokens(target: Target, vocab_size: int) -> TopTokens:
    """Return a list of all tokens that begins with the target's choice; the rest depends on the last token."""

    def top(text: Sequence[int]) -> list[int]:
        first = target(text)
        others = [token for token in range(vocab_size) if token != first]
        random.Random(text[-1]).shuffle(others)
        return [first, *others]

    return top


def plain(prompt_ids: Sequence[int], target: Target, count: int) -> list[int]:
    """Return the prompt and ``count`` tokens of plain decoding."""
    text = list(prompt_ids)
    for _ in range(count):
        text.append(target(text))
    return text


def tree(*nodes: tuple[int, int]) -> Nodes:
    """Return the candidates of these (parent, token)."""
    return Nodes(tuple(n[1] for n in nodes), tuple(n[0] for n in nodes), tuple(0.0 for _ in nodes))


def paths_of(proposal: Nodes) -> list[tuple[int, ...]]:
    """Return the tokens from below the root down to each candidate."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def scores_of(proposal: Nodes) -> dict[tuple[int, ...], float]:
    """Return the path score of each candidate by its path."""
    return dict(zip(paths_of(proposal), proposal.path_logprobs, strict=True))


def run(proposal: Nodes, text: Sequence[int], target: Target, top: TopTokens | None = None) -> Observation:
    """Run the candidates below the last token of ``text``."""
    texts = [list(text), *([*text, *path] for path in paths_of(proposal))]
    choices = tuple(target(one) for one in texts)
    verdict = match(proposal.tokens, proposal.parents, choices)
    new_ids = (*(proposal.tokens[i] for i in verdict.accepted), verdict.next_id)
    top_ids = [top(one) for one in texts] if top else ()
    return Observation(new_ids, proposal.tokens, proposal.parents, choices, verdict.accepted, top_ids)


def shaken(proposal: Nodes, rng: random.Random, *, vocab_size: int, keep: float = 0.8, num_foreign: int = 4) -> Nodes:
    """Return what an engine may run in the proposal's place: a part of it among others' candidates, in another order.

    Args:
        keep: chance that a candidate is left in if its parent is.
        num_foreign: candidates of others; those that are in the proposal too make no second node.
    """
    paths: set[tuple[int, ...]] = set()
    for path in paths_of(proposal):
        if (len(path) == 1 or path[:-1] in paths) and rng.random() < keep:
            paths.add(path)
    for _ in range(num_foreign):
        paths.add((*rng.choice([(), *sorted(paths)]), rng.randrange(vocab_size)))
    order = sorted(paths)
    rng.shuffle(order)
    order.sort(key=len)  # parents first
    place = {path: idx for idx, path in enumerate(order)}
    return tree(*((place.get(path[:-1], -1), path[-1]) for path in order))


def play_shaken(
    sequence: WriterSequence,
    prompt_ids: Sequence[int],
    target: Target,
    *,
    seed: int,
    vocab_size: int,
    budget: int,
    num_rounds: int = 12,
    top: TopTokens | None = None,
) -> list[int]:
    """Decode while every pass runs another tree than was proposed, and return the text.

    Some proposals are thrown away before the pass, some passes come without one.
    """
    rng = random.Random(seed)
    text = list(prompt_ids)
    proposal = NO_NODES
    for _ in range(num_rounds):
        seen = run(shaken(proposal, rng, vocab_size=vocab_size), text, target, top)
        text += seen.new_ids
        sequence.observe(seen)
        proposal = NO_NODES
        for _ in range(rng.randrange(3)):
            best_path = [rng.randrange(vocab_size) for _ in range(rng.randrange(5))]
            proposal = sequence.propose(best_path, budget)
            assert_well_formed(proposal, budget)
            proposal = hung(proposal, best_path)
    return text
