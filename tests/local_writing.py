"""Plain decoding helped by one local writer, in a dozen lines: what the tests of the writers play through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from card.drafting.local import writer_names
from card.drafting.local.protocol import Observation, WriterSequence
from card.tree.nodes import NO_NODES, PATH_END, ROOT, Nodes
from card.tree.verify import match

WRITERS = tuple(name for name in writer_names() if name not in ("store", "ctc"))  # those need a file
Target = Callable[[Sequence[int]], int]
"""The token that follows a text."""
TopTokens = Callable[[Sequence[int]], Sequence[int]]
"""The likeliest tokens after a text, best first."""


@dataclass(slots=True)
class Played:
    """The text that came of it, and each round's proposal with the number of its candidates that were accepted."""

    token_ids: list[int]
    rounds: list[tuple[Nodes, int]] = field(default_factory=list)


def assert_well_formed(proposal: Nodes, budget: int) -> None:
    """Check what every proposal must be: a tree of at most ``budget`` candidates, distinct below each parent."""
    count = len(proposal)
    assert count == len(proposal.parents) == len(proposal.path_logprobs) <= budget
    assert 0 <= proposal.num_probes <= count
    assert PATH_END not in proposal.parents[: proposal.num_probes]
    assert len(set(zip(proposal.parents, proposal.tokens, strict=True))) == count
    for idx, (parent, path_logprob) in enumerate(zip(proposal.parents, proposal.path_logprobs, strict=True)):
        assert PATH_END <= parent < idx
        assert path_logprob <= (proposal.path_logprobs[parent] if parent >= 0 else 0.0)


def hung(proposal: Nodes, best_path: Sequence[int]) -> Nodes:
    """Return the proposal as one tree: with the best path, as certain candidates, if it lengthens that."""
    if PATH_END not in proposal.parents:
        return proposal
    path = Nodes.chain(best_path, [0.0] * len(best_path))
    nodes = dict(zip(zip(path.parents, path.tokens, strict=True), path.path_logprobs, strict=True))
    place = {ROOT: ROOT, PATH_END: len(path) - 1}  # of each of the proposal's candidates in that tree
    rows = zip(proposal.parents, proposal.tokens, proposal.path_logprobs, strict=True)
    for idx, (parent, token, score) in enumerate(rows):
        pair = (place[parent], token)
        nodes.setdefault(pair, score)
        place[idx] = list(nodes).index(pair)
    parents, tokens = zip(*nodes, strict=True)
    return Nodes(tokens, parents, tuple(nodes.values()), num_probes=proposal.num_probes)


def play(
    sequence: WriterSequence,
    prompt_ids: Sequence[int],
    target: Target,
    *,
    num_new: int,
    budget: int = 16,
    top: TopTokens | None = None,
    best_path: Callable[[Sequence[int]], Sequence[int]] = lambda text: (),
) -> Played:
    """Decode at least ``num_new`` tokens; the writer was opened on the same prompt."""
    played = Played(list(prompt_ids))

    def observe(proposal: Nodes) -> int:
        text = list(played.token_ids)
        texts = [text]
        for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
            texts.append([*texts[parent + 1], token])
        choices = [target(one) for one in texts]
        verdict = match(proposal.tokens, proposal.parents, choices)
        new_ids = (*(proposal.tokens[i] for i in verdict.accepted), verdict.next_id)
        top_ids = [top(one) for one in texts] if top else ()
        played.token_ids += new_ids
        sequence.observe(
            Observation(new_ids, proposal.tokens, proposal.parents, tuple(choices), tuple(verdict.accepted), top_ids)
        )
        return len(verdict.accepted)

    observe(NO_NODES)  # the end of the prompt
    while len(played.token_ids) < len(prompt_ids) + num_new:
        path = best_path(played.token_ids)
        proposal = sequence.propose(path, budget)
        assert_well_formed(proposal, budget)
        proposal = hung(proposal, path)
        played.rounds.append((proposal, observe(proposal)))
    return played
