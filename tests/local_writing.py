"""Plain decoding helped by one local writer, in a dozen lines: what the tests of the writers play through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from card.verify import match
from card.writers.local.protocol import Observation, Proposal, WriterSequence

Target = Callable[[Sequence[int]], int]
"""The token that follows a text."""
TopTokens = Callable[[Sequence[int]], Sequence[int]]
"""The likeliest tokens after a text, best first."""


@dataclass(slots=True)
class Played:
    """The text that came of it, and each round's proposal with the number of its candidates that were accepted."""

    token_ids: list[int]
    rounds: list[tuple[Proposal, int]] = field(default_factory=list)


def assert_well_formed(proposal: Proposal, budget: int) -> None:
    """Check what every proposal must be: a tree of at most ``budget`` candidates, distinct below each parent."""
    count = len(proposal)
    assert count == len(proposal.parents) == len(proposal.path_logprobs) <= budget
    assert 0 <= proposal.num_probes <= (0 if proposal.path_length else count)
    assert len(set(zip(proposal.parents, proposal.tokens, strict=True))) == count
    for idx, (parent, path_logprob) in enumerate(zip(proposal.parents, proposal.path_logprobs, strict=True)):
        assert -1 <= parent < idx
        assert path_logprob <= (proposal.path_logprobs[parent] if parent >= 0 else 0.0)


def hung(proposal: Proposal, best_path: Sequence[int]) -> Proposal:
    """Return the proposal with the path that it hangs below, as far as it does, as certain candidates."""
    length = proposal.path_length
    return Proposal(
        (*best_path[:length], *proposal.tokens),
        (*range(-1, length - 1), *(parent + length for parent in proposal.parents)),
        (*(0.0,) * length, *proposal.path_logprobs),
        proposal.num_probes,
    )


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

    def observe(proposal: Proposal) -> int:
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

    observe(Proposal.none())  # the end of the prompt
    while len(played.token_ids) < len(prompt_ids) + num_new:
        path = best_path(played.token_ids)
        proposal = sequence.propose(path, budget)
        assert_well_formed(proposal, budget)
        proposal = hung(proposal, path)
        played.rounds.append((proposal, observe(proposal)))
    return played
