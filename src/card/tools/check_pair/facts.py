"""Measurements of a pair of models by `card check-pair`, and the verdict that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from card.config import DraftSettings, Schedule
from card.engine.policy.rounds import ScheduleCost
from card.engine.policy.tuned import TunedPolicy
from card.machine.pass_cost import PassCost
from card.models.draft_vocab import kept_ids
from card.models.drafter_facts import DrafterFacts, head_size, running_bytes
from card.models.facts import num_bytes, parameter_count
from card.models.loaded_model import LoadedModel
from card.models.own.decoder_model import DecoderModel
from card.models.own.draft_block import DraftBlock
from card.models.protocol import sequence_bytes
from card.models.runner import RowRunner

LEAST_SPEED_UP = 1.05  # a smaller gain may be noise
_SHOWN_TOKENS = (1, 2, 4, 8, 16)
_GOOD_AGREEMENT, _GOOD_DRAFTER_SHARE = 0.9, 0.05  # that the reason for a no compares with
_VERIFIED_TOKENS = 8  # of the pass whose price measures the cost of verification


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory of one model, in bytes; a token is one KV row."""

    num_parameters: int
    weight_bytes: int
    packed_bytes: int  # a second copy of the weights, in the layout that is fastest on the CPU
    kv_bytes_per_token: int
    max_model_len: int
    kv_bytes_per_request: int  # of max_model_len tokens
    num_copies: int  # a drafter beside the target and one in turns hold a copy each
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of one model's passes under one schedule, by the number of tokens."""

    model: str  # target or draft
    schedule: Schedule
    threads: int | None  # of the target; None: the default number
    pass_ms: dict[int, float]


@dataclass(frozen=True, slots=True)
class MeasuredAgreement:
    """Share of the draft model's greedy tokens that the target accepts, independent of speed."""

    num_prompts: int  # answered, the last one perhaps in part
    num_tokens: int
    is_cut: bool  # time was up before all prompts were answered
    share: float  # in [0, 1]: accepted drafted tokens, of those whose predecessors were accepted
    tokens_per_pass: float
    taken_by_depth: tuple[float, ...]  # [d] share of the offered chains whose token d + 1 was accepted


@dataclass(frozen=True, slots=True)
class Speeds:
    """Decoding rates of one request at a time: tokens after the first one, per second."""

    plain_tokens_per_s: float  # median of the timed runs
    card_tokens_per_s: float
    speed_up: float  # median over the pairs of runs
    speed_up_of_runs: tuple[float, ...]
    num_prompts: int  # answered by each timed run, the last one perhaps in part
    is_cut: bool  # time was up before everything was decoded and timed
    schedule: Schedule  # at the end
    schedule_reason: str
    is_same_text: bool
    shape: str  # of what the draft model wrote in card's timed runs: chain or tree; empty: nothing
    shape_in_words: str
    num_accepted: int  # candidates kept in these runs
    drafted_share: float  # of these, those that the draft model wrote, alone or with other writers, in [0, 1]
    accepted_shares: dict[str, float]  # by writer; together 1, or none
    accepted_in_words: str


@dataclass(frozen=True, slots=True)
class PairReport:
    """The report on a pair; without measurements if the tokenizers differ, without speeds if time was up."""

    target: str
    draft: str
    is_worth_it: bool
    reason: str  # the speed-up; for a no, the obstacle
    target_cost: str | None = None  # for an inflated target
    how_run: tuple[str, str] | None = None  # path and limits of target and draft
    drafter: DrafterFacts | None = None  # None also for one that does not run in our own pass
    memory: tuple[ModelMemory, ModelMemory] | None = None  # target, draft
    latencies: tuple[Latency, ...] | None = None
    agreement: MeasuredAgreement | None = None
    predicted_tokens_per_s: dict[Schedule, float] | None = None  # from latencies and agreement
    speeds: Speeds | None = None
    left_out: tuple[str, ...] = ()  # measurements that there was no time for
    command: str = ""  # for a shell: runs the target in the way that is fastest here


def memory_of(model: LoadedModel, runner: RowRunner, num_copies: int) -> ModelMemory:
    """Return the memory that a model takes under its runner."""
    weight_bytes, packed_bytes = num_bytes(model), 0
    if isinstance(model, DecoderModel):
        lent = model.lm_head if isinstance(model, DraftBlock) else None  # but for a part of it
        packed = [one for one in model.linears if one is not lent and not one.has_blocks]
        packed_bytes = sum(running_bytes(one.weight, model) for one in packed)
        if lent is not None and kept_ids(model) is not None:
            packed_bytes += head_size(model)[1]
    kv_bytes = sequence_bytes(runner, runner.max_model_len)
    total = num_copies * (weight_bytes + packed_bytes + kv_bytes)
    return ModelMemory(
        parameter_count(model),
        weight_bytes,
        packed_bytes,
        runner.row_bytes,
        runner.max_model_len,
        kv_bytes,
        num_copies,
        total,
    )


def latencies(costs: Mapping[Schedule, ScheduleCost]) -> tuple[Latency, ...]:
    """Return the cost of passes under each schedule: the target's by tokens, then the drafter's by width.

    A target that runs alike with and without a drafter in turns is listed once.
    """

    def pass_ms(cost: PassCost) -> dict[int, float]:
        return {size: 1e3 * cost.seconds(size) for size in _SHOWN_TOKENS}

    alone = costs["off"]
    distinct = [(schedule, one) for schedule, one in costs.items() if schedule == "off" or one.target != alone.target]
    targets = [Latency("target", schedule, one.cores.threads, pass_ms(one.target)) for schedule, one in distinct]
    drafters = [(schedule, one.drafter) for schedule, one in costs.items() if one.drafter is not None]
    return (*targets, *(Latency("draft", schedule, None, pass_ms(cost)) for schedule, cost in drafters))


def verdict(
    costs: Mapping[Schedule, ScheduleCost], agreement: float, speed_up: float | None, draft: DraftSettings
) -> tuple[bool, str]:
    """Return whether the pair is faster than plain decoding, and the reason in words.

    Args:
        costs: the schedules as measured, "off" among them.
        agreement: share in [0, 1] of `MeasuredAgreement`.
        speed_up: measured; None: there was no time, and the prediction decides.
    """
    longest = 1 / (1 - agreement) if agreement < 1 else float("inf")  # most tokens per pass of the pair
    if speed_up is None:
        predicted = _predicted_speed_up(costs, agreement, draft)
        words = f"{predicted:.2f}x the speed of plain decoding is predicted, and there was no time to measure it"
        is_worth_it = min(predicted, longest) >= LEAST_SPEED_UP
        return is_worth_it, words if is_worth_it else f"{words}: {_obstacle(costs, agreement, draft)}"
    if min(speed_up, longest) >= LEAST_SPEED_UP:
        return True, f"{speed_up:.2f}x the speed of plain decoding"
    predicted = _predicted_speed_up(costs, agreement, draft)
    if speed_up < LEAST_SPEED_UP <= min(predicted, longest):
        return False, (
            f"{speed_up:.2f}x, though {predicted:.2f}x was predicted from each model's own passes: together, or beside "
            "what else this machine does, they take longer; run it again on an idle machine"
        )
    return False, f"{speed_up:.2f}x: {_obstacle(costs, agreement, draft)}"


def _obstacle(costs: Mapping[Schedule, ScheduleCost], agreement: float, draft: DraftSettings) -> str:
    """Return the obstacle: the factor whose improvement would raise the predicted speed most."""
    fastest = min((one for one in costs.values() if one.drafter is not None), key=_drafter_share)
    share, target = _drafter_share(fastest), fastest.target
    cost_ratio = target.seconds(_VERIFIED_TOKENS) / target.seconds(1)
    cause = "" if target.experts is None else ", as each token brings experts of its own"
    cheap_drafter = {schedule: _with_good_drafter(one) for schedule, one in costs.items()}
    cheap_tokens = {schedule: _with_flat_target(one) for schedule, one in costs.items()}
    rates = {
        f"agreement is too low: the target takes {agreement:.0%} of the drafted tokens; at {_GOOD_AGREEMENT:.0%}": (
            _predicted_speed_up(costs, max(agreement, _GOOD_AGREEMENT), draft)
        ),
        f"the drafter is too slow: its pass takes {share:.0%} of the target's; at {_GOOD_DRAFTER_SHARE:.0%}": (
            _predicted_speed_up(cheap_drafter, agreement, draft)
        ),
        f"verification costs too much: a target pass of {_VERIFIED_TOKENS} takes {cost_ratio:.1f} times as long "
        f"as one of 1{cause}; at the same time": _predicted_speed_up(cheap_tokens, agreement, draft),
    }
    words, best = max(rates.items(), key=lambda pair: pair[1])
    if best >= LEAST_SPEED_UP:
        return f"{words}, {best:.1f}x would be expected"
    return (
        f"there is no single obstacle: the target takes {agreement:.0%} of the drafted tokens, a drafter pass "
        f"takes {share:.0%} of the target's, and a target pass of {_VERIFIED_TOKENS} tokens {cost_ratio:.1f} times as "
        "long as one of 1"
    )


def _predicted_speed_up(costs: Mapping[Schedule, ScheduleCost], agreement: float, draft: DraftSettings) -> float:
    policy = TunedPolicy(costs, draft)
    fastest = max(policy.predicted(schedule, 1, agreement) for schedule in costs if schedule != "off")
    return fastest / policy.predicted("off")


def _drafter_share(cost: ScheduleCost) -> float:
    assert cost.drafter is not None
    return cost.drafter.seconds(1) / cost.target.seconds(1)


def _with_good_drafter(cost: ScheduleCost) -> ScheduleCost:
    if cost.drafter is None:
        return cost
    return replace(cost, drafter=cost.drafter.scaled(min(1.0, _GOOD_DRAFTER_SHARE / _drafter_share(cost))))


def _with_flat_target(cost: ScheduleCost) -> ScheduleCost:
    seconds = cost.target.seconds(1)
    return replace(cost, target=PassCost(((1, seconds), (2, seconds))))
