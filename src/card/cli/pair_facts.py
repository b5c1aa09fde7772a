"""What `card check-pair` measures of a pair of models, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from torch import nn
from transformers import PreTrainedModel

from card.api.llm import LLM
from card.config import INT8, DraftSettings, SamplingParams
from card.errors import PromptError
from card.models.fused import can_pack
from card.models.loading import parameter_count
from card.models.torch_runner import TorchRunner
from card.policy.cost import PassCost, ScheduleCost
from card.policy.rounds import Schedule
from card.policy.tuned import TunedPolicy
from card.workers.metrics import RequestStats

LEAST_SPEED_UP = 1.05  # below it, noise and speed are hard to tell apart
_TIMED_RUNS = 3  # after one in which the policy finds its feet
_SHOWN_TOKENS = (1, 2, 4, 8, 16)
_GOOD_AGREEMENT, _GOOD_DRAFTER_SHARE = 0.9, 0.05  # what the reason for a no compares with
_VERIFIED_TOKENS = 8  # of the pass whose price tells how dear verification is


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What one model takes, in bytes; a token is one KV row."""

    num_parameters: int
    weight_bytes: int
    packed_bytes: int  # a second copy of the weights, in the order that the CPU computes fastest with
    kv_bytes_per_token: int
    max_model_len: int
    kv_bytes_per_request: int  # of max_model_len tokens
    num_copies: int  # a drafter beside the target and one that takes turns with it hold a copy each
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of one model's passes under one schedule, by the number of tokens."""

    model: str  # target or draft
    schedule: Schedule
    threads: int | None  # of the target; None: as torch has them
    pass_ms: dict[int, float]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the target follows the draft model's own greedy tokens; speed decides nothing here."""

    num_prompts: int
    num_tokens: int
    share: float  # in [0, 1], of drafted tokens that the target takes where it took those before them
    tokens_per_pass: float
    taken_by_depth: tuple[float, ...]  # [d] share of the chains offered whose token d + 1 was taken


@dataclass(frozen=True, slots=True)
class Speeds:
    """Decoding rates of one request at a time: tokens after the first one, per second."""

    predicted_tokens_per_s: dict[Schedule, float]
    plain_tokens_per_s: float  # median of the timed runs
    card_tokens_per_s: float
    speed_up: float  # median over the pairs of runs
    speed_up_of_runs: tuple[float, ...]
    schedule: Schedule  # at the end
    schedule_reason: str
    is_same_text: bool


@dataclass(frozen=True, slots=True)
class PairReport:
    """All there is to say about a pair; no measurements where the tokenizers differ."""

    target: str
    draft: str
    is_worth_it: bool
    reason: str  # the measured speed-up; for a no, what stands in the way
    target_cost: str | None = None  # for an inflated target
    memory: tuple[ModelMemory, ModelMemory] | None = None  # target, draft
    latencies: tuple[Latency, ...] | None = None
    agreement: Agreement | None = None
    speeds: Speeds | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    token_ids: tuple[int, ...]
    chains: tuple[tuple[int, int], ...]  # of each pass, how many candidates were offered, and taken
    stats: RequestStats


def memory_of(model: PreTrainedModel, runner: TorchRunner, num_copies: int) -> ModelMemory:
    """Return what a model takes under its runner."""
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    linears = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    is_packed = runner.is_fused and can_pack(linears[0], weight_bytes)
    packed_bytes = sum(weight.numel() * weight.element_size() for weight in linears) if is_packed else 0
    if runner.precision == INT8:
        packed_bytes = sum(weight.numel() for weight in linears)
    kv_bytes = runner.max_model_len * runner.row_bytes
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
    """Return what passes cost under each schedule: the target's first, by tokens, then the drafter's, by width.

    A target that runs alike with and without a drafter in turns is listed once.
    """

    def pass_ms(cost: PassCost) -> dict[int, float]:
        return {size: 1e3 * cost.seconds(size) for size in _SHOWN_TOKENS}

    alone = costs["off"]
    distinct = [(schedule, one) for schedule, one in costs.items() if schedule == "off" or one.target != alone.target]
    targets = [Latency("target", schedule, one.cores.threads, pass_ms(one.target)) for schedule, one in distinct]
    drafters = [(schedule, one.drafter) for schedule, one in costs.items() if one.drafter is not None]
    return (*targets, *(Latency("draft", schedule, None, pass_ms(cost)) for schedule, cost in drafters))


def measure_agreement(llm: LLM, prompts: Sequence[str], max_tokens: int) -> Agreement:
    """Decode the prompts with a chain drafted before each verification, so that time and tuning decide nothing.

    Args:
        llm: of the method sps.
    Raises: PromptError if the answers are too short to compare anything.
    """
    answers = [_decode(llm, prompt, max_tokens) for prompt in prompts]
    chains = [(offered, taken) for answer in answers for offered, taken in answer.chains if offered]
    if not chains:
        raise _too_short()
    depths = range(max(offered for offered, _ in chains))
    num_taken = sum(taken for _, taken in chains)
    return Agreement(
        num_prompts=len(prompts),
        num_tokens=sum(len(answer.token_ids) for answer in answers),
        share=num_taken / sum(min(offered, taken + 1) for offered, taken in chains),
        tokens_per_pass=1 + num_taken / len(chains),
        taken_by_depth=tuple(
            sum(taken > depth for _, taken in chains) / sum(offered > depth for offered, _ in chains)
            for depth in depths
        ),
    )


def measure_speeds(
    plain: LLM, tuned: LLM, prompts: Sequence[str], max_tokens: int, predicted: dict[Schedule, float]
) -> Speeds:
    """Decode the prompts plainly and with card in alternation; the first round of the two is not timed.

    Raises: PromptError if the answers are too short to time anything.
    """
    rates: dict[LLM, list[float]] = {plain: [], tuned: []}
    texts: dict[LLM, list[tuple[int, ...]]] = {plain: [], tuned: []}
    for run in range(1 + _TIMED_RUNS):
        for llm in (plain, tuned):
            answers = [_decode(llm, prompt, max_tokens) for prompt in prompts]
            texts[llm] += [answer.token_ids for answer in answers]
            num_tokens = sum(len(answer.token_ids) - 1 for answer in answers)
            if not num_tokens:
                raise _too_short()
            if run:
                rates[llm].append(num_tokens / sum(answer.stats.decode_s for answer in answers))
    speed_ups = tuple(fast / slow for fast, slow in zip(rates[tuned], rates[plain], strict=True))
    return Speeds(
        predicted_tokens_per_s=predicted,
        plain_tokens_per_s=median(rates[plain]),
        card_tokens_per_s=median(rates[tuned]),
        speed_up=median(speed_ups),
        speed_up_of_runs=speed_ups,
        schedule=tuned.host.policy.schedule,
        schedule_reason=tuned.stats().schedule_reason,
        is_same_text=texts[plain] == texts[tuned],
    )


def verdict(
    costs: Mapping[Schedule, ScheduleCost], agreement: float, speed_up: float, draft: DraftSettings
) -> tuple[bool, str]:
    """Return whether the pair is worth it, and the reason in words.

    Args:
        costs: the schedules as measured, "off" among them.
        agreement: share in [0, 1] of `Agreement`.
        speed_up: measured.
    """
    longest = 1 / (1 - agreement) if agreement < 1 else float("inf")  # tokens a pass that the pair can reach
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
    """Return what stands in the way: that without which the prediction would be best."""
    fastest = min((one for one in costs.values() if one.drafter is not None), key=_drafter_share)
    share, target = _drafter_share(fastest), fastest.target
    dearness = target.seconds(_VERIFIED_TOKENS) / target.seconds(1)
    cheap_drafter = {schedule: _with_good_drafter(one) for schedule, one in costs.items()}
    cheap_tokens = {schedule: _with_flat_target(one) for schedule, one in costs.items()}
    rates = {
        f"agreement is too low: the target takes {agreement:.0%} of the drafted tokens; at {_GOOD_AGREEMENT:.0%}": (
            _predicted_speed_up(costs, max(agreement, _GOOD_AGREEMENT), draft)
        ),
        f"the drafter is too slow: its pass takes {share:.0%} of the target's; at {_GOOD_DRAFTER_SHARE:.0%}": (
            _predicted_speed_up(cheap_drafter, agreement, draft)
        ),
        f"tokens of verification are too dear: a target pass of {_VERIFIED_TOKENS} takes {dearness:.1f} times as long "
        "as one of 1; at the same time": _predicted_speed_up(cheap_tokens, agreement, draft),
    }
    words, best = max(rates.items(), key=lambda pair: pair[1])
    if best >= LEAST_SPEED_UP:
        return f"{words}, {best:.1f}x would be expected"
    return (
        f"no single thing stands in the way: the target takes {agreement:.0%} of the drafted tokens, a drafter pass "
        f"takes {share:.0%} of the target's, and a target pass of {_VERIFIED_TOKENS} tokens {dearness:.1f} times as "
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


def _decode(llm: LLM, prompt: str, max_tokens: int) -> _Answer:
    """Answer a prompt greedily: as a chat turn where the model has a template, else as text to be continued."""
    messages = [{"role": "user", "content": prompt}]
    token_ids: list[int] = []
    chains: list[tuple[int, int]] = []
    verified = accepted = 0
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0)
    for chunk in llm.stream(messages if llm.host.tokenizer.chat_template else prompt, params):
        token_ids += chunk.token_ids
        taken = chunk.stats.accepted_tokens - accepted
        is_cut = len(chunk.token_ids) == taken  # the text ended within the chain: nobody knows of the rest
        chains.append((taken if is_cut else chunk.stats.verified_tokens - verified, taken))
        verified, accepted = chunk.stats.verified_tokens, chunk.stats.accepted_tokens
    return _Answer(tuple(token_ids), tuple(chains), chunk.stats)


def _too_short() -> PromptError:
    return PromptError(
        "the answers to the sample prompts are too short to measure anything; give other prompts with --prompts"
    )
