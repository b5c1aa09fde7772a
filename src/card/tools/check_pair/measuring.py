"""Measuring a pair by decoding, for `card check-pair`, in a limited time."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import cast

from card.api.llm import LLM
from card.api.outputs import StreamChunk
from card.cli.parts.stats_line import accepted_in_words, shape_in_words
from card.config import SamplingParams
from card.engine.metrics import RequestStats
from card.errors import PromptError
from card.tools.check_pair.facts import MeasuredAgreement, Speeds

TIMED_RUNS = 3  # of each kind, after a warm-up in which the policy learns
_WARMING_SHARE = 0.25  # of the time left: the most for the warm-up
_LEAST_TIMED_TOKENS = 8  # of a run that was cut: fewer measure a speed too badly. Chosen, not measured
_LEAST_CHUNKS = 2  # of an answer before it is cut: its first token, and the tokens of one verification


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """A deadline after which no further token is requested."""

    until: float  # by the clock
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def of(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> TimeLimit:
        """Return the limit this many seconds from now."""
        return cls(clock() + seconds, clock)

    @property
    def left_s(self) -> float:
        """Seconds that are left; below 0 if none are."""
        return self.until - self.clock()

    def part(self, share: float) -> TimeLimit:
        """Return the limit of the next ``share`` of what is left."""
        return TimeLimit(self.until - (1 - share) * max(0.0, self.left_s), self.clock)


@dataclass(frozen=True, slots=True)
class _MeasuredAnswer:
    token_ids: tuple[int, ...]
    chains: tuple[tuple[int, int], ...]  # of each pass: candidates offered, candidates accepted
    decode_s: float  # from the first token to the last
    stats: RequestStats
    is_cut: bool  # time was up


def measure_agreement(llm: LLM, prompts: Sequence[str], max_tokens: int, limit: TimeLimit) -> MeasuredAgreement:
    """Decode the prompts with a chain drafted before each verification, so that timing and tuning have no influence.

    Args:
        llm: of the method sps.
        limit: one pass is measured in any case.
    Raises: PromptError if the answers are too short to compare anything.
    """
    answers: list[_MeasuredAnswer] = []
    chains: list[tuple[int, int]] = []
    for prompt in prompts:
        answers.append(_decode(llm, prompt, max_tokens, limit))
        chains += [(offered, taken) for offered, taken in answers[-1].chains if offered]
        if chains and limit.left_s <= 0:
            break
    if not chains:
        raise _too_short()
    depths = range(max(offered for offered, _ in chains))
    num_taken = sum(taken for _, taken in chains)
    return MeasuredAgreement(
        num_prompts=len(answers),
        num_tokens=sum(len(answer.token_ids) for answer in answers),
        is_cut=answers[-1].is_cut or len(answers) < len(prompts),
        share=num_taken / sum(min(offered, taken + 1) for offered, taken in chains),
        tokens_per_pass=1 + num_taken / len(chains),
        taken_by_depth=tuple(
            sum(taken > depth for _, taken in chains) / sum(offered > depth for offered, _ in chains)
            for depth in depths
        ),
    )


def measure_speeds(
    plain: LLM,
    tuned: LLM,
    prompts: Sequence[str],
    max_tokens: int,
    limit: TimeLimit,
    tell: Callable[[str], None] = lambda _: None,
) -> Speeds | None:
    """Decode the prompts plainly and with card in alternation; the first round of the two is not timed.

    If time is short, runs end early, and there are fewer of them. Card decodes only as far as plain decoding came, so
    that both write the same text.

    Args:
        tell: called with a line about each run.
    Returns: None if time was up before a first pair of runs could be timed.
    Raises: PromptError if the answers are too short to time anything.
    """
    rates: list[tuple[float, float]] = []  # of the timed pairs: plain, tuned
    timed: list[_MeasuredAnswer] = []  # of card
    num_prompts, is_same_text, is_cut = len(prompts), True, False
    pair_s = 0.0
    for run in range(1 + TIMED_RUNS):
        if limit.left_s <= (pair_s if rates else 0.0):
            is_cut = True
            break
        tell(f"decoding the sample prompts plainly and with card: run {run + 1} of {1 + TIMED_RUNS}")
        of_pair = limit.part(1.0 if run else _WARMING_SHARE)
        began_left_s = limit.left_s
        slow = _answers(plain, prompts, [max_tokens] * len(prompts), of_pair.part(0.5))
        most = [len(answer.token_ids) if answer.is_cut else max_tokens for answer in slow]
        fast = _answers(tuned, prompts, most, of_pair)
        pair_s = began_left_s - limit.left_s
        is_same_text &= all(_agree(*pair) for pair in zip(slow, fast, strict=False))
        was_cut = slow[-1].is_cut or fast[-1].is_cut or min(len(slow), len(fast)) < len(prompts)
        if run:
            is_cut |= was_cut
            if was_cut and min(_num_timed(slow), _num_timed(fast)) < _LEAST_TIMED_TOKENS:
                break
            rates.append((_rate(slow), _rate(fast)))
            timed += fast
            num_prompts = min(num_prompts, len(slow), len(fast))
    if not rates:
        return None
    stats = RequestStats.joined(answer.stats for answer in timed)
    speed_ups = tuple(fast_rate / slow_rate for slow_rate, fast_rate in rates)
    return Speeds(
        plain_tokens_per_s=median(slow_rate for slow_rate, _ in rates),
        card_tokens_per_s=median(fast_rate for _, fast_rate in rates),
        speed_up=median(speed_ups),
        speed_up_of_runs=speed_ups,
        num_prompts=num_prompts,
        is_cut=is_cut,
        schedule=tuned.host.policy.schedule,
        schedule_reason=tuned.stats().schedule_reason,
        is_same_text=is_same_text,
        shape=stats.draft_shape,
        shape_in_words=shape_in_words(stats),
        num_accepted=stats.accepted_tokens,
        drafted_share=stats.drafted_share,
        accepted_shares=stats.accepted_shares,
        accepted_in_words=accepted_in_words(stats),
    )


def _answers(llm: LLM, prompts: Sequence[str], most: Sequence[int], limit: TimeLimit) -> list[_MeasuredAnswer]:
    """Decode prompts, each to its own length, until time is up: at least the beginning of the first."""
    answers: list[_MeasuredAnswer] = []
    for prompt, max_tokens in zip(prompts, most, strict=False):
        answers.append(_decode(llm, prompt, max_tokens, limit))
        if limit.left_s <= 0:
            break
    return answers


def _rate(answers: Sequence[_MeasuredAnswer]) -> float:
    """Return tokens after the first ones, per second. Raises: PromptError if there are none."""
    if not _num_timed(answers):
        raise _too_short()
    return _num_timed(answers) / sum(answer.decode_s for answer in answers)


def _num_timed(answers: Sequence[_MeasuredAnswer]) -> int:
    return sum(len(answer.token_ids) - 1 for answer in answers)


def _agree(one: _MeasuredAnswer, other: _MeasuredAnswer) -> bool:
    """Return whether two texts agree over the length that both were decoded to."""
    shorter = min(len(one.token_ids), len(other.token_ids))
    has_end = len(one.token_ids) == len(other.token_ids) or one.is_cut or other.is_cut
    return has_end and one.token_ids[:shorter] == other.token_ids[:shorter]


def _decode(llm: LLM, prompt: str, max_tokens: int, limit: TimeLimit) -> _MeasuredAnswer:
    """Answer a prompt greedily: as a chat turn where the model has a template, else as text to be continued."""
    messages = [{"role": "user", "content": prompt}]
    token_ids: list[int] = []
    chains: list[tuple[int, int]] = []
    verified = accepted = 0
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0).resolved()
    chunks = llm.stream(messages if llm.host.tokenizer.chat_template else prompt, params)
    first_at = last_at = 0.0
    stats, is_cut = RequestStats(), False
    with closing(cast("Generator[StreamChunk, None, None]", chunks)):  # which drops the rest of the request
        for chunk in chunks:
            last_at = limit.clock()
            first_at = last_at if not token_ids else first_at
            token_ids += chunk.token_ids
            taken = chunk.stats.accepted_tokens - accepted
            is_end_in_chain = len(chunk.token_ids) == taken  # the rest of the chain is unknown
            chains.append((taken if is_end_in_chain else chunk.stats.verified_tokens - verified, taken))
            stats = chunk.stats
            verified, accepted = stats.verified_tokens, stats.accepted_tokens
            if last_at >= limit.until and len(chains) >= _LEAST_CHUNKS:
                is_cut = chunk.finish_reason is None
                break
    return _MeasuredAnswer(tuple(token_ids), tuple(chains), last_at - first_at, stats, is_cut)


def _too_short() -> PromptError:
    return PromptError(
        "the answers to the sample prompts are too short to measure anything; give other prompts with --prompts"
    )
