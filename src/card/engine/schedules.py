"""Which schedule to use: as predicted, once it was tried as measured, and now and then another one on trial."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from card.engine.forecast import Forecast
from card.transport.switch import Arm

_KEPT = 0.995  # of a schedule's tokens, promised and committed, after each of its rounds
_REMEMBERED = 0.98  # of those of all schedules at each review: what was measured long ago counts less
_RECENT = 0.97  # of the present rate's tokens and seconds after each round
_PREDICTED_EVERY = 4  # rounds, as long as it is not measured
_KNOWN_ROUNDS = 7.0  # of the present texts and schedule, fading likewise, from which the present rate is measured
_PRIOR_ROUNDS = 80.0  # rounds that the bias of the other schedules counts for, against one that may be chance
_ROUND_NOISE = 0.7  # of the tokens of one round, relative to what is promised: it gives 4 tokens, or 1, or 12
SETTLING = 4  # rounds after a switch that say nothing
REVIEW_EVERY = 16  # rounds
_NEW_TEXT = 6  # rounds of a new text before the schedule is reviewed for it
_FIRST_LOOK, _PLAIN_AT_ONCE = 2, 1.12  # rounds of a new text after which a schedule that promises so much more is taken
_SECOND_LOOK, _LOOK_EVERY, _PLAIN_TO_SEE = 2, 8, 1.08  # the same once more so many rounds later, then now and then
_DWELL = 8  # rounds of another batch size before the schedule is reviewed for it: it may pass
_FIRST_TRIAL, _LAST_TRIAL = 96, 4096  # rounds until another schedule is tried: four times as many each time in vain
_UNTRIED_TRIAL = 32  # the same for one that never was tried: predictions are only as good as start-up was quiet
_TRIAL_ROUNDS, _LONG_TRIAL_ROUNDS = 16, 48
_LOOK_AFTER, _HOPELESS = 12, 0.85  # rounds of a trial after which it ends if it is so much slower
_CLOSE = 0.8  # of the present rate: a rival as good as this gets a long trial, which costs little then
# Of the present rate, that a schedule must promise to be tried, if it never was anywhere, and if it was at some batch
# size. With other writers, who write on meanwhile, each is tried once whatever it promises, and later if it promises as
# much as the last: a slow moment in its first trial is not the end of it. To rest is left for a trial whatever was
# measured.
_WORTH_A_FIRST_TRIAL, _WORTH_A_TRIAL, _WORTH_ANOTHER_TRIAL = 0.6, 0.85, 0.75
_SWITCH_ROUNDS = 2.0  # that a switch costs: the drafter that takes over reads the texts first, and is behind


@dataclass(slots=True)
class _Rate:
    """Something per something else, fading; committed tokens per second above all."""

    kept: float
    tokens: float = 0.0
    seconds: float = 0.0
    count: float = 0.0  # of what was added

    def add(self, tokens: float, seconds: float) -> None:
        self.fade(self.kept)
        self.tokens += tokens
        self.seconds += seconds
        self.count += 1

    def fade(self, kept: float) -> None:
        self.tokens *= kept
        self.seconds *= kept
        self.count *= kept

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class _Account:
    """What one schedule promised at one batch size, and what it kept of it."""

    promised: float = 0.0  # tokens, fading
    committed: float = 0.0  # in the same seconds
    rounds: float = 0.0  # fading likewise
    used_at: int = 0  # round in which it was closed last

    def add(self, promised: float, committed: float, rounds: float) -> None:
        kept = _KEPT**rounds
        self.promised = self.promised * kept + promised
        self.committed = self.committed * kept + committed
        self.rounds = self.rounds * kept + rounds

    def fade(self) -> None:
        self.promised *= _REMEMBERED
        self.committed *= _REMEMBERED
        self.rounds *= _REMEMBERED

    def bias(self, prior: float) -> float:
        """Return committed / promised, as if more rounds had had the prior bias: fewer where chance explains less.

        They are `_PRIOR_ROUNDS` for a bias that is the prior one, half as many for one that is a standard error away.
        """
        if self.promised <= 0:
            return prior
        ratio = max(self.committed / self.promised, 1e-9)
        standard_errors = math.log(ratio / max(prior, 1e-9)) * math.sqrt(self.rounds) / _ROUND_NOISE
        more = _PRIOR_ROUNDS / (1 + standard_errors**2) * self.promised / self.rounds
        return (self.committed + prior * more) / (self.promised + more)


@dataclass(slots=True)
class _Belief:
    """What was believed of the rate of texts, and what they gave from then on.

    Writers learn from a text, and one that begins slowly seldom stays as slow.
    """

    held: _Rate = field(default_factory=lambda: _Rate(1.0))  # of beliefs about the present texts, each for a second
    account: _Account = field(default_factory=_Account)

    def compare(self, tokens: float, seconds: float) -> None:
        """Take a round of these texts that came later than the beliefs."""
        if self.held.count >= 1:  # else they are too old
            self.account.add(seconds * self.held.value, tokens, 1)
        self.held.fade(_RECENT)


@dataclass(slots=True)
class _Patience:
    """How long one batch size goes on with its schedule before another one is tried."""

    rounds: int = 0  # since the last trial
    until_trial: int = _FIRST_TRIAL


@dataclass(slots=True)
class _Learnt:
    """What was learnt about one schedule."""

    trials: int = 0
    was_used: bool = False
    everywhere: _Account = field(default_factory=_Account)
    accounts: dict[int, _Account] = field(default_factory=dict)  # by batch bucket


class Schedules:
    """Chooses the schedule of each round.

    What is measured of a schedule is kept as its ratio to what was predicted then, its bias. Predictions follow the
    text, so a bias still tells something when other text is written; and they know more than a few rounds can show.
    """

    def __init__(self, forecast: Forecast) -> None:
        """Begin with the schedule that is predicted to be the fastest for one request."""
        self._forecast = forecast
        self._learnt: dict[Arm, _Learnt] = {arm: _Learnt() for arm in forecast.stations}
        self._prompt_share = _Rate(_KEPT)  # prompt tokens read, in rounds that decode, for each committed one
        self._recent = _Rate(_RECENT)  # of the present schedule at this batch size
        self._unaccounted = _Rate(1.0)  # what was committed since the last review
        self._predicted: float | None = None  # rate of the present schedule, once it was asked for
        self._predicted_at = 0  # rounds here
        self._beliefs = (_Belief(), _Belief())  # predicted and measured ones
        self._num_requests = 1
        self._num_texts = 0
        self._num_rounds = 0
        self.rounds_here = 0  # since the last switch
        self._until_review = 0
        self._until_look, self._is_first_look = _LOOK_EVERY, False
        self._regret = 0.0  # rounds that the best other schedule would have saved, as reviews saw it
        self._trial_rounds = 0
        self._is_first_trial = False
        self._patiences: dict[int, _Patience] = {}  # by batch bucket
        self.arm: Arm = max(forecast.stations, key=lambda arm: forecast.tokens_per_s(arm, 1))
        self.reason = "predicted"

    @property
    def _patience(self) -> _Patience:
        return self._patiences.setdefault(bucket(self._num_requests), _Patience())

    def begin(self, num_requests: int, available: frozenset[Arm]) -> None:
        """Review the schedule where the batch has changed, now and then, and when its drafter is gone."""
        if self.rounds_here - self._predicted_at >= _PREDICTED_EVERY:
            self._predicted = None
        has_new_bucket = bucket(num_requests) != bucket(self._num_requests)
        if has_new_bucket:
            self._close_account()
            self._recent = _Rate(_RECENT)
        self._num_requests = num_requests
        self._until_review = min(self._until_review - 1, _DWELL if has_new_bucket else REVIEW_EVERY)
        if num_new := self._forecast.num_texts - self._num_texts:
            self._num_texts = self._forecast.num_texts
            self._until_review = min(self._until_review, _NEW_TEXT)
            self._until_look, self._is_first_look = _FIRST_LOOK, True
            for of_present_texts in (self._recent, *(belief.held for belief in self._beliefs)):
                of_present_texts.fade(max(0.0, 1 - num_new / num_requests))
            self._predicted = None
        possible = [arm for arm in self._learnt if arm in available]
        if self._forecast.has_writers and "turns" in possible and "off" in possible:
            possible.remove("off")  # other writers have candidates in turns, too, and who has some drafts no more
        is_gone = self.arm not in possible
        self._until_look -= 1
        is_worse = self._until_look <= 0 and not is_gone and self._look(possible)
        if (self._until_review <= 0 or is_gone or is_worse) and (possible or len(self._learnt) > 1):
            self._until_review = REVIEW_EVERY
            if not self._trial_rounds:  # else it is to last
                self._until_look = _LOOK_EVERY
            self._review(possible, is_gone or is_worse)

    def rate(self) -> float:
        """Return the tokens/s that the present texts will go on with.

        As measured, or as predicted until it was, and corrected by what texts gave after such beliefs.
        """
        is_measured, rate = self._believed()
        return rate * self._beliefs[is_measured].account.bias(1.0)

    def _believed(self) -> tuple[bool, float]:
        """Return the tokens/s of the present schedule, and whether they were measured."""
        if self._recent.count >= _KNOWN_ROUNDS and self._recent.seconds > 0:
            return True, self._recent.value
        return False, self._decoding_rate(self.arm) if self._predicted is None else self._predicted

    def observe(self, num_committed: int, num_tokens: int, num_prompt_tokens: int, seconds: float) -> None:
        """Count a round of the present schedule.

        Args:
            num_committed: tokens of the decoding requests.
            num_tokens: of the pass, with those of prompts.
            num_prompt_tokens: of the pass.
            seconds: of the round.
        """
        self._num_rounds += 1
        self.rounds_here += 1
        self._patience.rounds += 1
        if num_prompt_tokens < num_tokens:  # read alone, long ones cost the same under any schedule, short ones little
            self._prompt_share.add(num_prompt_tokens, num_committed)
        is_mostly_prompts = 2 * num_prompt_tokens > num_tokens
        if self.rounds_here > SETTLING and not is_mostly_prompts:
            decoding_s = max(seconds - num_prompt_tokens * self._forecast.prompt_token_s(self.arm), 0.0)
            is_measured, rate = self._believed()
            for belief in self._beliefs:
                belief.compare(num_committed, decoding_s)
            self._beliefs[is_measured].held.add(rate, 1.0)
            self._recent.add(num_committed, decoding_s)
            self._unaccounted.add(num_committed, decoding_s)

    def _look(self, possible: Sequence[Arm]) -> bool:
        """Return whether another schedule promises plainly more, and say when to look next.

        On its first trial a schedule stays: that is to show how much the promises are worth.
        """
        is_first, self._is_first_look = self._is_first_look, False
        self._until_look = _SECOND_LOOK if is_first else _LOOK_EVERY
        rivals = [arm for arm in possible if arm != self.arm]
        if not rivals or (self._trial_rounds and self._is_first_trial):
            return False
        best, here = max(map(self._score, rivals)), self._score(self.arm)
        return best > (_PLAIN_AT_ONCE if is_first else _PLAIN_TO_SEE) * here

    def _review(self, possible: Sequence[Arm], is_over: bool) -> None:
        if not possible:
            self.reason = "no drafter is up"
            return
        self._close_account()
        for learnt in self._learnt.values():
            for account in (learnt.everywhere, *learnt.accounts.values()):
                account.fade()
        scores = {arm: self._score(arm) for arm in possible}
        best = max(scores, key=lambda arm: scores[arm])
        here = scores.get(self.arm, 0.0)
        if is_over:
            self._switch(best)
        elif self._trial_rounds:
            is_hopeless = self.rounds_here >= _LOOK_AFTER and here < _HOPELESS * scores[best]
            if self.rounds_here >= self._trial_rounds or is_hopeless:
                self._end_trial(best)
        else:
            self._count_regret(scores)
            if self._regret > _SWITCH_ROUNDS and self.rounds_here >= SETTLING:
                self._switch(best)
            else:
                self._consider_trial(possible, scores)
        self.reason = self._explain(scores)

    def _count_regret(self, scores: Mapping[Arm, float]) -> None:
        """Add what the best other schedule promises to save until the next review, or to lose."""
        here = max(scores[self.arm], 1e-9)
        rival = max((score for arm, score in scores.items() if arm != self.arm), default=0.0)
        self._regret = max(0.0, self._regret + REVIEW_EVERY * (rival - here) / here)

    def _consider_trial(self, possible: Sequence[Arm], scores: Mapping[Arm, float]) -> None:
        here = scores[self.arm]
        rivals = [arm for arm in possible if arm != self.arm and not self._is_known(arm)]
        rivals = [arm for arm in rivals if self.arm == "off" or scores[arm] > self._worth_a_trial(arm) * here]
        untried = [arm for arm in rivals if not self._learnt[arm].was_used]
        rivals = untried or rivals
        if rivals and self._patience.rounds >= (_UNTRIED_TRIAL if untried else self._patience.until_trial):
            self._patience.rounds = 0
            rival = min(rivals, key=lambda arm: self._learnt[arm].trials)
            self._begin_trial(rival, _LONG_TRIAL_ROUNDS if scores[rival] > _CLOSE * here else _TRIAL_ROUNDS)

    def _is_known(self, arm: Arm) -> bool:
        """Return whether a schedule was in use at this batch size not long ago: a trial would tell nothing more."""
        account = self._learnt[arm].accounts.get(bucket(self._num_requests))
        return account is not None and self._num_rounds - account.used_at < self._patience.until_trial

    def _worth_a_trial(self, arm: Arm) -> float:
        learnt = self._learnt[arm]
        if self._forecast.has_writers:
            return _WORTH_ANOTHER_TRIAL if learnt.trials else 0.0
        return _WORTH_A_TRIAL if learnt.was_used else _WORTH_A_FIRST_TRIAL

    def _begin_trial(self, arm: Arm, num_rounds: int) -> None:
        """Run another schedule for some rounds."""
        learnt = self._learnt[arm]
        learnt.trials += 1
        self._is_first_trial = not learnt.was_used
        self._switch(arm)
        self._trial_rounds, self._until_review = num_rounds, _LOOK_AFTER
        self._until_look = num_rounds  # unless a new text begins

    def _end_trial(self, best: Arm) -> None:
        if best == self.arm:
            self._trial_rounds, self._patience.until_trial = 0, _FIRST_TRIAL
            return
        self._switch(best)
        if not self._is_first_trial:
            self._patience.until_trial = min(4 * self._patience.until_trial, _LAST_TRIAL)

    def _switch(self, arm: Arm) -> None:
        if arm != self.arm:
            self.arm = arm
            self.rounds_here = 0
            self._predicted = None
            self._recent = _Rate(_RECENT)
        self._trial_rounds = 0
        self._regret = 0.0

    def _close_account(self) -> None:
        """Compare what the present schedule gave since the last time with what is predicted of it on such text."""
        seen = self._forecast.take_lately()
        learnt, given = self._learnt[self.arm], self._unaccounted
        self._unaccounted = _Rate(1.0)
        if not given.count:
            return
        learnt.was_used = True
        promised = given.seconds * self._forecast.tokens_per_s(self.arm, self._num_requests, seen=seen)
        for account in (learnt.everywhere, learnt.accounts.setdefault(bucket(self._num_requests), _Account())):
            account.add(promised, given.tokens, given.count)
            account.used_at = self._num_rounds

    def _score(self, arm: Arm) -> float:
        """Return the tokens/s of a schedule with the reading of prompts, which takes longer on fewer cores.

        All schedules read the share of prompts that was seen under any: how many prompts fall into the short time of a
        trial does not decide.
        """
        rate = self._decoding_rate(arm)
        return rate / (1 + rate * self._prompt_share.value * self._forecast.prompt_token_s(arm))

    def _decoding_rate(self, arm: Arm) -> float:
        """Return the tokens/s of decoding: as predicted, corrected by the schedule's bias."""
        here = bucket(self._num_requests)
        accounts = [learnt.accounts[here] for learnt in self._learnt.values() if here in learnt.accounts]
        promised = sum(account.promised for account in accounts)
        prior = sum(account.committed for account in accounts) / promised if promised else 1.0
        learnt = self._learnt[arm]
        prior = learnt.everywhere.bias(prior)  # what delays one schedule delays another, too
        bias = learnt.accounts[here].bias(prior) if here in learnt.accounts else prior
        rate = self._forecast.tokens_per_s(arm, self._num_requests) * bias
        if arm == self.arm:
            self._predicted, self._predicted_at = rate, self.rounds_here
        return rate

    def _explain(self, scores: Mapping[Arm, float]) -> str:
        parts = [f"{score:.0f} tokens/s {'in ' if arm == 'turns' else ''}{arm}" for arm, score in scores.items()]
        return f"expected of {self._num_requests} at once: {', '.join(parts)}"


def bucket(num_requests: int) -> int:
    """Return the class of batch sizes: 1, 2, 3-4, 5-8, 9-16, ..."""
    return max(num_requests - 1, 0).bit_length()
