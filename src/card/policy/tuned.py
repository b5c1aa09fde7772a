"""The policy that tunes itself: every choice is the one that promises most committed tokens per second.

Within a round it weighs tokens against seconds at the rate that the engine reaches (`card.policy.choice`). Between
rounds it chooses the schedule (`card.policy.schedule`). What passes cost, and what is accepted, it learns in every
round (`card.policy.cost`, `card.policy.acceptance`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from card.config import DraftSettings
from card.policy.acceptance import DEEPEST, Acceptance
from card.policy.choice import best_by_depth, choose, further_gains, is_worth_drafting, next_budget
from card.policy.cost import REQUEST_S, Costs, ScheduleCost
from card.policy.retry import Retry
from card.policy.rounds import Draft, Outcome, Policy, RoundView, Schedule, Wait
from card.policy.schedule import REVIEW_ROUNDS, Schedules
from card.tree.nodes import NO_NODES, Nodes
from card.workers.offers import DRAFTER_BIT
from card.workers.request import Request


class TunedPolicy(Policy):
    """Chooses schedule, beam and candidates by expected committed tokens per second; obeys what was set."""

    def __init__(
        self, schedules: Mapping[Schedule, ScheduleCost], draft: DraftSettings, *, pinned: frozenset[str] = frozenset()
    ) -> None:
        """Start with predictions.

        Args:
            schedules: those to choose from, one or more.
            draft: the settings that serve as bounds.
            pinned: names of those that the user set: they are obeyed as they are.
        """
        self._draft = draft
        self._pinned = pinned
        self._costs = Costs(schedules)
        self._acceptance = Acceptance()
        self._schedules = Schedules(schedules, self.predicted)
        self._retry = Retry()
        # Passes on all cores may have been measured while something else took one of them. Beside a drafter nobody
        # would find out, so a few rounds are in turns first, as they are until a drafter in a process is up.
        runs_elsewhere = {"beside", "turns"} <= schedules.keys() and (
            schedules["beside"].target != schedules["turns"].target
        )
        self._rounds_to_sound = 2 * REVIEW_ROUNDS if runs_elsewhere else 0
        self._is_sounding = False
        self._known: dict[int, tuple[Nodes, list[float]]] = {}  # by id, what was calibrated in this round
        self._writer_budgets: dict[int, int] = {}  # by request id, as of the last round
        self._has_new_text = False
        self._follow()
        self._is_resting = False  # in turns: the last round had no use for the drafter
        self._depth_before_draft = -1

    @property
    def costs(self) -> Mapping[Schedule, ScheduleCost]:
        """The schedules to choose from, with latencies as they were measured at start."""
        return self._costs.at_start

    def predicted(self, schedule: Schedule, num_requests: int = 1, agreement: float | None = None) -> float:
        """Return the tokens/s expected of a schedule at its best depth, whatever it was measured to reach.

        The draft model and other writers are taken to be right independently of each other.

        Args:
            agreement: chance in [0, 1] that a candidate below an accepted one is accepted; None: as learnt so far.
        """
        costs, (chances, num_rows) = self._costs, self._acceptance.other_writers
        agreement = self._acceptance.agreement if agreement is None else agreement
        alone = tokens = 1 + sum(chances)
        around_s = costs.around_s(schedule, num_requests)
        draft_s = costs.draft_s(schedule, num_requests, self._width(schedule))
        start_s = costs.first_draft_s(schedule, num_requests, self._width(schedule)) - draft_s
        alone_s = around_s + costs.pass_s(schedule, num_requests * (1 + num_rows), num_requests)
        best, reached = alone / alone_s, 1.0
        for depth in range(1, 1 + DEEPEST if costs.drafts(schedule) else 1):
            reached *= agreement
            tokens += (1 - chances[depth - 1]) * reached
            seconds = around_s + costs.pass_s(schedule, num_requests * (1 + num_rows + depth), num_requests)
            if schedule == "turns":  # where others are right at once, the drafter is not asked
                best = max(best, tokens / (seconds + (1 - chances[0]) * (start_s + depth * draft_s)))
                continue
            # Beside, a path that ends is as unlikely to go on elsewhere in the tree as a candidate is to be wrong. Then
            # the drafter begins anew: the next round has others' candidates only, and what it drafted is in vain.
            lost = (1 - reached) * (1 - agreement)
            cycle_s = seconds + lost * alone_s
            token_s = draft_s + (1 - agreement) ** 2 * seconds
            best = max(best, min(tokens + lost * alone, max(alone, cycle_s / max(token_s, 1e-9))) / cycle_s)
        return num_requests * best

    def begin(self, num_requests: int, available: frozenset[Schedule]) -> None:
        """Choose the schedule of a round."""
        self._known.clear()
        self._depth_before_draft = -1
        if drafting := available & self.costs.keys() - {"off"}:
            self._retry.begin(num_requests, max(self._reading_rounds(schedule, num_requests) for schedule in drafting))
        tried: frozenset[Schedule] = drafting if self._retry.is_on else frozenset()
        begins_beside = self._is_sounding or self.schedule == "beside"
        self._is_sounding = self._rounds_to_sound > 0 and begins_beside and "turns" in available
        if self._is_sounding:
            tried = frozenset({"turns"})
        self._schedules.begin(num_requests, available, has_new_text=self._has_new_text, tried=tried)
        self._follow()
        self._has_new_text = False

    def beam_width(self) -> int:
        """Return the width of the present schedule's beams."""
        return self._width(self.schedule)

    def writer_budget(self, request: Request) -> int:
        """Return what follows from what the last rounds verified of such writers' candidates of the request."""
        return min(request.draft.budget, self._writer_budgets.get(request.request_id, request.draft.budget))

    def prepare(self, view: RoundView) -> Draft | Wait | None:
        """Draft one more layer where that brings more than its time is worth; wait for nothing unless told to."""
        if not view.requests:  # who takes turns reads prompts in the prefill, as who runs beside does
            is_to_read = view.takes_turns and view.num_prompt_tokens and view.num_passes == 0
            return Draft(1) if is_to_read and not self._is_resting else None
        if view.takes_turns:
            return self._prepare_turn(view)
        return super().prepare(view) if "max_wait_s" in self._pinned and view.is_up else None

    def choose(self, view: RoundView, offers: Sequence[Nodes]) -> Sequence[Nodes]:
        """Verify what promises more tokens than its seconds are worth at the present rate."""
        if "min_verify_prob" in self._pinned:
            return super().choose(view, offers)
        ranked = [self._ranked(*pair) for pair in zip(view.requests, offers, strict=True)]
        counts = choose(
            [probs for _, probs in ranked],
            seconds=self._costs.pass_of(self.schedule, view),
            rate=self._schedules.rate,
            num_prefill_tokens=view.num_prompt_tokens + sum(offer.num_probes for offer in offers),
            max_per_request=self._draft.budget,
        )
        taken, budgets = [], {}
        for request, offer, (order, _), count in zip(view.requests, offers, ranked, counts, strict=True):
            size, num_probes = offer.num_probes + count, offer.num_probes
            taken.append(offer.take(order[:size], num_probes=num_probes) if offer.writers else offer.leading(size))
            budget, num_verified = self.writer_budget(request), _num_others(taken[-1])
            all_are_worth_it = 0 < num_verified == _num_others(offer)  # such as where a long copy begins
            budgets[request.request_id] = (
                request.draft.budget if all_are_worth_it else next_budget(num_verified, budget)
            )
        self._writer_budgets = budgets
        return taken

    def observe(self, outcome: Outcome) -> None:
        """Learn acceptance, costs and the speed of the schedule from a round."""
        view, result = outcome.view, outcome.result
        if not view.requests:
            return
        new_text = self._acceptance.begin(request.request_id for request in view.requests)
        self._has_new_text = new_text or self._has_new_text
        self._acceptance.observe(result.verified)
        self._costs.observe(self.schedule, self.beam_width(), outcome)
        self._is_resting = view.takes_turns and not view.num_passes
        self._rounds_to_sound -= self.schedule != "beside"
        self._retry.observe(has_drafted=view.num_passes > 0 or any(one.num_compared for one in result.verified))
        pass_of = self._costs.pass_of(self.schedule, view)
        prompts_s = pass_of(result.num_tokens) - pass_of(max(1, result.num_tokens - view.num_prompt_tokens))
        self._schedules.observe(len(view.requests), outcome.num_committed, outcome.seconds - prompts_s)

    def _reading_rounds(self, schedule: Schedule, num_requests: int) -> float:
        """Return the rounds that pass while the drafter reads the texts from their beginning and the target waits."""
        reading_s = self._costs.reading_s(schedule, num_requests) if schedule == "turns" else 0.0
        return reading_s * self._schedules.rate / num_requests

    def _prepare_turn(self, view: RoundView) -> Draft | None:
        """Draft another layer where the next ones bring more than others have and than their time is worth."""
        depth = sum(depth for depth, _ in view.best_paths)
        if depth == self._depth_before_draft and view.num_passes > 1:
            return None  # the last pass made nothing deeper
        self._depth_before_draft = depth
        num_requests, rate, agreement = len(view.requests), self._schedules.rate, self._acceptance.agreement
        if self._retry.is_on and not view.num_passes:
            rate /= 2  # a first layer is drafted that would pay at half the costs that are believed
        draft_s = self._costs.draft_s(self.schedule, num_requests, self.beam_width())
        seconds, num_tokens = self._costs.pass_of(self.schedule, view), num_requests + depth + view.num_prompt_tokens
        price = rate * (seconds(num_tokens + num_requests) - seconds(num_tokens)) / num_requests  # of one candidate
        layers = []
        undrafted = view.undrafted or [NO_NODES] * num_requests
        for request, offer, (depth, path_logprob) in zip(view.requests, undrafted, view.best_paths, strict=True):
            if not request.uses_drafter:
                continue
            probs = self._probabilities(request, offer)
            further = further_gains(
                self._acceptance.chance(depth, path_logprob, is_greedy=_is_greedy(request)),
                range(depth, min(depth + DEEPEST, self._draft.budget)),
                agreement=agreement,
                price=price,
                present=best_by_depth(offer, probs),
                num_verified=sum(prob > price for prob in probs),
            )
            layers.append(further)
        start_s = 0.0
        if not view.num_passes:  # a round that drafts has more around its passes, and the first one takes longer
            first_s = self._costs.first_draft_s(self.schedule, num_requests, self.beam_width())
            start_s = REQUEST_S * len(layers) + first_s - draft_s
        gains = map(sum, zip_longest(*layers, fillvalue=0.0))
        is_worth = is_worth_drafting(
            gains, start_s=start_s, seconds=draft_s, rate=rate, layers_per_pass=view.layers_per_pass
        )
        return Draft(1) if is_worth else None

    def _follow(self) -> None:
        """Take schedule and cores from what was chosen; long prompts are read on all cores."""
        self.schedule, self.reason = self._schedules.schedule, self._schedules.reason
        self.cores = self.costs[self.schedule].cores
        self.reading_cores = self.costs["off"].cores if "off" in self.costs else self.cores

    def _width(self, schedule: Schedule) -> int:
        """Return the width of beams: in turns the target waits for every node."""
        return 1 if schedule == "turns" and "beam_width" not in self._pinned else self._draft.beam_width

    def _ranked(self, request: Request, offer: Nodes) -> tuple[Sequence[int], list[float]]:
        """Return the offer's indices, the likeliest candidates first behind its probes, and the chances of these."""
        probs, num_probes = self._probabilities(request, offer), offer.num_probes
        if not offer.writers:
            return range(len(offer)), probs  # those of one drafter are in a good order: `choose` sees to the rest
        order = sorted(range(num_probes, len(offer)), key=lambda idx: (-probs[idx], idx))
        return [*range(num_probes), *order], [probs[idx] for idx in order]

    def _probabilities(self, request: Request, offer: Nodes) -> list[float]:
        """Return the chance of each candidate; the same offer is often looked at two or three times in a round."""
        known = self._known.get(id(offer))
        if known is None:
            probs = self._acceptance.probabilities(offer, is_greedy=_is_greedy(request))
            known = self._known[id(offer)] = offer, probs
        return known[1]


def _num_others(offer: Nodes) -> int:
    """Return how many candidates are those of other writers than the draft model, whoever else proposed them."""
    return sum(writers > DRAFTER_BIT for writers in offer.writers)


def _is_greedy(request: Request) -> bool:
    return request.params.temperature == 0.0
