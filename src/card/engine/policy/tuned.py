"""The self-tuning policy: every choice is the one with the most expected tokens per second.

Within a round it weighs tokens against seconds at the rate that the engine reaches (`card.engine.policy.choice`).
Between rounds it chooses the schedule (`card.engine.policy.modes`). It learns the cost of passes and the acceptance of
candidates in every round (`card.engine.policy.cost`, `card.engine.policy.acceptance`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, starmap, zip_longest
from operator import sub

from card.config import DraftSettings, Schedule
from card.drafting.drafter_pass import TurnEnd
from card.engine.policy.acceptance import DEEPEST, LASTING_COUNT, Acceptance
from card.engine.policy.asking import Asking
from card.engine.policy.choice import best_by_depth, choose
from card.engine.policy.copied import Copied
from card.engine.policy.cost import REQUEST_S, Costs
from card.engine.policy.modes import REVIEW_ROUNDS, Modes
from card.engine.policy.rounds import Draft, Outcome, Policy, RoundView, ScheduleCost, Wait
from card.engine.policy.unread import Reading, Unread
from card.engine.request import Request
from card.tree.nodes import Nodes


class TunedPolicy(Policy):
    """Chooses schedule, draft length and candidates by expected tokens per second; obeys pinned settings."""

    def __init__(
        self, schedules: Mapping[Schedule, ScheduleCost], draft: DraftSettings, *, pinned: frozenset[str] = frozenset()
    ) -> None:
        """Start with predictions.

        Args:
            schedules: to choose from, one or more.
            draft: the settings that serve as bounds.
            pinned: names of settings that the user set; they are followed exactly.
        """
        self._draft = draft
        self._pinned = pinned
        self._costs = Costs(schedules)
        self._acceptance = Acceptance()
        self._asking = Asking()
        self._copied = Copied()
        self._unread = Unread(lambda num_tokens: self._costs.reading_s("turns", num_tokens))
        self._is_reading = False  # the drafter reads a text in this turn
        self._num_running, self._num_drafting = 1, 0  # requests of this round, and those that draft in it
        self._modes = self._new_modes()
        self._has_new_text = False
        self._round = self._num_plain = 0  # plain rounds since one was observed
        self._follow()

    @property
    def costs(self) -> Mapping[Schedule, ScheduleCost]:
        """The schedules to choose from, with latencies as measured at start."""
        return self._costs.at_start

    def recall(self, agreement: float) -> None:
        """Begin with the share of the draft model's tokens that were the target's in earlier runs."""
        self._acceptance.pair.recall(agreement)
        self._modes = self._new_modes()
        self._follow()

    @property
    def agreement(self) -> float | None:
        """Share of the draft model's tokens that were the target's, over all texts; None after too few rounds."""
        pair = self._acceptance.pair
        return pair.lasting if pair.num_compared >= LASTING_COUNT else None

    def predicted(self, schedule: Schedule, num_requests: int = 1, agreement: float | None = None) -> float:
        """Return the tokens/s predicted for a schedule, without its measured speed; arguments as in `round_of`."""
        tokens, seconds = self.round_of(schedule, num_requests, agreement)
        return num_requests * tokens / max(seconds, 1e-9)

    def round_of(
        self,
        schedule: Schedule,
        num_requests: int = 1,
        agreement: float | None = None,
        num_drafted: int | None = None,
    ) -> tuple[float, float]:
        """Return the tokens of a request in a round of a schedule at its best depth, and the seconds of that round.

        Args:
            agreement: chance in [0, 1] that a candidate below an accepted one is accepted; None: as learnt so far.
            num_drafted: requests that get drafts; None: all for which other writers have nothing.
        """
        costs, copied = self._costs, self._copied.mean
        agreement = self._acceptance.pair.value if agreement is None else agreement
        copies = 1 - (1 - copied.offered) ** num_requests
        around_s = costs.around_s(schedule, num_requests, num_requests * copied.offered)

        def pass_s(num_rows: float) -> float:
            # With copies in some rounds only. Passes have steps, so the mean number of rows would mislead.
            rare_s = costs.pass_s(schedule, num_rows, num_requests)
            if copies <= 0.0:
                return rare_s
            more = num_requests * copied.num_verified / copies
            return (1 - copies) * rare_s + copies * costs.pass_s(schedule, num_rows + more, num_requests)

        plain_s = around_s + pass_s(num_requests)
        alone = 1.0 + copied.num_right
        if not costs.drafts(schedule):
            return alone, plain_s
        share = 1 - copied.hits if num_drafted is None else num_drafted / num_requests
        has_turn = 1 - copied.hits**num_requests if num_drafted is None else 1.0
        num_drafted = max(1, round(share * num_requests))
        draft_s = costs.draft_s(schedule, num_drafted, self._width(schedule))
        start_s = costs.first_draft_s(schedule, num_drafted) - draft_s
        best, gained, reached = (0.0, 1.0), 0.0, 1.0
        for depth in range(1, 1 + DEEPEST):
            reached *= agreement
            gained += share * reached
            seconds = around_s + pass_s(num_requests * (1 + share * depth))
            if schedule == "turns":
                here = alone + gained, seconds + has_turn * (start_s + depth * draft_s)
            else:  # if the tree lacks the token after a path's end, the next round is a plain one
                lost = (1 - reached) * (1 - agreement)
                cycle_s = seconds + lost * plain_s
                most = max(alone, cycle_s / max(draft_s, 1e-9))  # each token of a text takes the drafter a layer
                here = min(alone + gained + lost * alone, most) / (1 + lost), cycle_s / (1 + lost)
            if here[0] * best[1] > best[0] * here[1]:
                best = here
        return best

    def begin(self, num_requests: int, available: frozenset[Schedule]) -> None:
        """Choose the schedule of a round."""
        self._asking.begin()
        self._num_running = num_requests
        self._modes.begin(num_requests, available, has_new_text=self._has_new_text)
        self._has_new_text = False
        if self.reason is not self._modes.reason or self.schedule != self._modes.schedule:
            self._follow()

    def beam_width(self) -> int:
        """Return the width of the present schedule's beams."""
        return self._width(self.schedule)

    def writer_budget(self, request: Request) -> int:
        """Return the budget that follows from recent acceptance of such writers' candidates in this request."""
        return self._asking.budget(request.request_id, request.draft.budget)

    def prepare(self, view: RoundView) -> Draft | Wait | None:
        """Draft as far as paths are likely enough; wait only if the settings say so."""
        self.undrafted = {}
        if view.requests:  # the last round may have been one of longer texts
            self._costs.rows = view.num_context_rows / len(view.requests)
        if not view.takes_turns:
            return super().prepare(view) if "max_wait_s" in self._pinned else None
        if not view.requests:
            return None
        resting = self._well_offered(view) if any(view.undrafted) else set()
        wanted = [one for one in view.requests if one.uses_drafter and one.request_id not in resting]
        reading = self._joined(wanted)
        self.undrafted = {**self.undrafted, **dict.fromkeys(resting, "copied")}
        self._num_drafting, self._is_reading = len(reading.requests), reading.num_tokens > 0
        if not reading.requests:
            return None
        resting = {one.request_id for one in view.requests} - {one.request_id for one in reading.requests}
        if reading.leaves_rest:
            most = reading.num_tokens + len(reading.requests)
            return Draft(1, TurnEnd(resting=frozenset(resting), max_tokens=most))
        most = min(DEEPEST, self._draft.budget)
        return Draft(math.ceil(most / view.layers_per_pass), self._turn_end(len(reading.requests), frozenset(resting)))

    def _joined(self, requests: Sequence[Request]) -> Reading:
        """Return those of the requests that draft in this round, and what is read of their texts.

        Drafts have to bring more than reading takes, and a round with them more than a plain one. A trial
        reads the text with the least to read, if none was read before. Two plain rounds' time may go by meanwhile.
        """
        modes = self._modes
        if "off" not in self.costs:
            return Reading(list(requests))
        if modes.is_trial:
            read = [one for one in requests if not self._unread.reading_s(one)]
            worth = read or sorted(requests, key=self._unread.reading_s)[:1]
        else:
            worth = self._unread.worth(requests, modes.saved_s(self.schedule))
            worth = worth if worth and modes.rate_of(self.schedule, len(worth)) > modes.rate_of("off") else []
        reading = self._unread.begin(worth, 2 * self.round_of("off", self._num_running)[1])
        why = dict.fromkeys((one.request_id for one in requests), "waits" if modes.is_trial else "costly")
        why |= dict.fromkeys((one.request_id for one in worth), "waits")
        for one in reading.requests:
            del why[one.request_id]
        if reading.leaves_rest:
            why[reading.requests[-1].request_id] = "reads"
        self.undrafted = why
        return reading

    def choose(self, view: RoundView, offers: Sequence[Nodes]) -> Sequence[Nodes]:
        """Verify the candidates whose expected tokens are worth their seconds at the present rate."""
        if "min_verify_prob" in self._pinned:
            return super().choose(view, offers)
        num_requests, has_experts = len(view.requests), self._costs.has_experts
        if view.takes_turns and not has_experts and not any(offer.writers for offer in offers):
            num_rows = num_requests + view.num_prompt_tokens + sum(map(len, offers))
            price = self._modes.rate * self._costs.row_s(self.schedule, num_rows, num_requests)
            return [self._worth(offer, price) for offer in offers]
        ranked = [self._ranked(*pair) for pair in zip(view.requests, offers, strict=True)]
        if not has_experts:  # with experts a candidate alone does not say what it brings: others bring the same
            ranked = [(order, probs if self._pays(view, probs) else []) for order, probs in ranked]
        num_rows = view.num_prompt_tokens + sum(offer.num_probes for offer in offers)
        counts = choose(
            [probs for _, probs in ranked],
            seconds=self._costs.pass_of(self.schedule, view),
            rate=self._modes.rate,
            num_prefill_tokens=num_rows,
            max_per_request=self._draft.budget,
        )
        taken = []
        for offer, (order, _), count in zip(offers, ranked, counts, strict=True):
            size, num_probes = offer.num_probes + count, offer.num_probes
            taken.append(offer.take(order[:size], num_probes=num_probes) if offer.writers else offer.leading(size))
        return taken

    def observe(self, outcome: Outcome) -> None:
        """Learn acceptance, costs and the speed of the schedule from a round."""
        view, result = outcome.view, outcome.result
        if self._asking.was_asked and view.requests:
            row_s = self._costs.row_s(self.schedule, result.num_tokens, len(view.requests))
            self._asking.observe(result.verified, outcome.seconds, rate=self._modes.rate, row_s=row_s)
        self._round += 1
        self._unread.observe(view.requests, result.updates)
        if not view.requests:
            self._costs.observe_prompts(self.schedule, outcome)
            return
        is_plain = self.schedule == "off" and not any(one.offer for one in result.verified)
        if is_plain and self._round % REVIEW_ROUNDS:  # teaches nothing, and must cost no more than plain decoding
            self._num_plain += 1
            self._modes.observe(len(view.requests), outcome.num_committed, outcome.seconds, num_drafting=0)
            return
        self._has_new_text |= self._acceptance.begin(request.request_id for request in view.requests)
        self._acceptance.observe(result.verified)
        ended = {one.request_id for one in result.updates if one.finish_reason}
        self._copied.observe(result.verified, ended, num_plain=self._num_plain)
        self._num_plain = 0
        is_reading = self._is_reading and view.takes_turns
        self._costs.observe(self.schedule, self.beam_width(), outcome, is_reading=is_reading)
        self._modes.observe(
            len(view.requests),
            outcome.num_committed,
            outcome.seconds,
            num_drafting=(self._num_drafting if view.passes else 0) if view.takes_turns else None,
            is_reading=is_reading,
            reads_prompts=view.num_prompt_tokens > 0,
        )

    def _pays(self, view: RoundView, probs: Sequence[float]) -> bool:
        """Return whether candidates of these chances bring more than their rows and their Python time cost."""
        row_s = self._costs.row_s(self.schedule, len(view.requests), len(view.requests))
        spare = sum(max(0.0, prob - self._modes.rate * row_s) for prob in probs)
        return spare > self._modes.rate * REQUEST_S

    def _worth(self, chain: Nodes, price: float) -> Nodes:
        """Return the leading candidates of a draft model's chain that bring more than this price."""
        chances = map(self._acceptance.pair.calibration.chance, chain.depths, chain.path_logprobs)
        return chain.leading(sum(chance > price for chance in chances))

    def _turn_end(self, num_requests: int, resting: frozenset[int]) -> TurnEnd:
        """Return the end of a turn for so many requests: where a layer brings less than its time is worth."""
        costs, schedule = self._costs, self.schedule
        layer_s = costs.draft_s(schedule, num_requests)
        further_s = (costs.draft_s(schedule, 2 * num_requests) - layer_s) / num_requests  # for one more request
        worth = self._modes.rate / self._acceptance.pair.value  # chance that a second of a turn must bring
        layer = worth * (layer_s - num_requests * further_s)
        rows_s = (costs.row_s(schedule, num_requests * (1 + depth), num_requests) for depth in range(1, DEEPEST))
        floors = [max(0.0, worth * (row_s + further_s)) for row_s in rows_s]
        # The schedule already decided to draft, unless the user set it.
        first = min(0.0, 1.0 - layer) if "off" in self.costs else 0.0
        return TurnEnd((first, *floors), layer, self._acceptance.pair.calibration, resting)

    def _well_offered(self, view: RoundView) -> set[int]:
        """Return the requests with candidates of other writers so likely that a draft is not worth its time."""
        costs, num_requests, rate = self._costs, len(view.requests), self._modes.rate
        layer_s = costs.draft_s(self.schedule, num_requests) / num_requests
        start = rate * (costs.first_draft_s(self.schedule, num_requests) / num_requests - layer_s)
        row = rate * costs.row_s(self.schedule, 4 * num_requests, num_requests)  # tokens that a row has to bring
        reached = [self._acceptance.pair.value**depth for depth in range(1, 1 + DEEPEST)]
        resting = set()
        for request, offer in zip(view.requests, view.undrafted, strict=True):
            if not offer:
                continue
            probs = self._acceptance.probabilities(offer, is_greedy=_is_greedy(request))
            free = sum(prob > row for prob in probs)  # rows that are verified anyway
            gains = starmap(sub, zip_longest(reached, best_by_depth(offer, probs)[:DEEPEST], fillvalue=0.0))
            values = (max(0.0, gain) - rate * layer_s - row * (idx >= free) for idx, gain in enumerate(gains))
            if max(accumulate(values)) <= start:  # later layers may pay for the first ones
                resting.add(request.request_id)
        return resting

    def _new_modes(self) -> Modes:
        def predict(schedule: Schedule, num_requests: int, num_drafted: int | None, hopes: bool) -> tuple[float, float]:
            agreement = self._acceptance.pair.hoped if hopes else None
            return self.round_of(schedule, num_requests, agreement, num_drafted)

        return Modes(self.costs, predict, reading_s=self._unread.least_s)

    def _follow(self) -> None:
        """Adopt the chosen schedule and its cores; long prompts are read on all cores."""
        self.schedule, self.reason = self._modes.schedule, self._modes.reason
        self.cores = self.costs[self.schedule].cores
        self.reading_cores = self.costs["off"].cores if "off" in self.costs else self.cores

    def _width(self, schedule: Schedule) -> int:
        """Return the width of beams: in turns the target waits for every node."""
        return 1 if schedule == "turns" and "beam_width" not in self._pinned else self._draft.beam_width

    def _ranked(self, request: Request, offer: Nodes) -> tuple[Sequence[int], list[float]]:
        """Return the offer's indices, probes first, then the likeliest candidates, and the chances of these."""
        num_probes = offer.num_probes
        probs = self._acceptance.probabilities(offer, is_greedy=_is_greedy(request))
        if not offer.writers:
            return range(len(offer)), probs  # one drafter's candidates are sorted well enough; `choose` does the rest
        order = sorted(range(num_probes, len(offer)), key=lambda idx: (-probs[idx], idx))
        return [*range(num_probes), *order], [probs[idx] for idx in order]


def _is_greedy(request: Request) -> bool:
    return request.params.temperature == 0.0
