"""Who gets which drafter: the rules hold whatever happens in whatever order, and nothing is held for ever."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from card.labs.ray.allocation import LEASE_S, SETTLE_S, SILENCE_S, Allocation, DrafterReport, Wish
from card.links.leases import Lease, NoLease

HOLDERS = ("ann", "bob", "cid", "dot", "eve")
HOSTS = ("here", "there")


def drafter(incarnation: int, *, max_targets: int = 16, host: str = "", tokenizer: str = "abc") -> DrafterReport:
    return DrafterReport(
        address=f"tcp://10.0.0.{incarnation}:5555",
        incarnation=incarnation,
        tokenizer=tokenizer,
        host=host,
        max_targets=max_targets,
    )


def wish(load: int = 1, *, tokenizer: str = "abc", host: str = "here", avoid: int = 0) -> Wish:
    return Wish(tokenizer=tokenizer, load=load, host=host, avoid=avoid)


def pool_of(*reports: DrafterReport, now: float = 0.0) -> Allocation:
    pool = Allocation()
    for report in reports:
        pool.report(report, now)
    return pool


def incarnation_of(answer: Lease | NoLease) -> int:
    assert isinstance(answer, Lease), answer
    return answer.incarnation


# ---- one rule at a time ---------------------------------------------------------------------------------------------


def test_a_lease_names_the_drafter_that_reported_itself() -> None:
    assert pool_of(drafter(7)).lease("ann", wish(), 0.0) == Lease("tcp://10.0.0.7:5555", 7)


def test_targets_are_spread_by_the_requests_that_they_have() -> None:
    pool = pool_of(drafter(1), drafter(2))
    given_to = [incarnation_of(pool.lease(holder, wish(load), 0.0)) for holder, load in (("ann", 5), ("bob", 1))]
    assert given_to == [1, 2]
    assert incarnation_of(pool.lease("cid", wish(1), 0.0)) == 2
    assert incarnation_of(pool.lease("dot", wish(1), 0.0)) == 2
    assert incarnation_of(pool.lease("eve", wish(1), 0.0)) == 1


def test_targets_without_requests_are_spread_too() -> None:
    pool = pool_of(drafter(1), drafter(2))
    assert {incarnation_of(pool.lease(holder, wish(0), 0.0)) for holder in ("ann", "bob")} == {1, 2}


@pytest.mark.parametrize(
    ("report", "asked", "reason"),
    [
        (drafter(1, tokenizer="xyz"), wish(), "another tokenizer"),
        (drafter(1, host="there"), wish(), "other hosts only"),
        (drafter(1, max_targets=1), wish(), "as many targets as they take"),
    ],
)
def test_a_drafter_that_does_not_fit_is_not_leased_and_the_reason_is_said(
    report: DrafterReport, asked: Wish, reason: str
) -> None:
    pool = pool_of(report)
    pool.lease("bob", wish(host=report.host), 0.0)
    answer = pool.lease("ann", asked, 0.0)
    assert isinstance(answer, NoLease)
    assert reason in answer.reason
    assert "tcp://" not in answer.reason


def test_a_drafter_that_failed_its_target_is_the_last_choice() -> None:
    pool = pool_of(drafter(1), drafter(2))
    assert incarnation_of(pool.lease("ann", wish(avoid=1), 0.0)) == 2
    assert incarnation_of(pool.lease("bob", wish(avoid=2), 0.0)) == 1
    pool.retire(2)
    assert incarnation_of(pool.lease("ann", wish(avoid=1), 0.0)) == 1


def test_a_new_life_of_a_drafter_ends_the_leases_on_the_old_one() -> None:
    pool = pool_of(drafter(1))
    pool.lease("ann", wish(), 0.0)
    old, new = (
        drafter(1),
        DrafterReport(address=drafter(1).address, incarnation=2, tokenizer="abc", host="", max_targets=16),
    )
    pool.report(new, 1.0)
    assert isinstance(pool.renew("ann", old.incarnation, wish(), 1.0), NoLease)
    assert pool.figures(1.0).leases == 0
    assert pool.figures(1.0).drafters == 1


def test_a_lease_survives_the_loss_of_the_table() -> None:
    lease = pool_of(drafter(1)).lease("ann", wish(3), 0.0)
    after = pool_of(drafter(1))
    assert after.renew("ann", incarnation_of(lease), wish(3), 0.0) == lease
    assert (after.figures(0.0).leases, after.figures(0.0).load) == (1, 3)


def test_a_table_that_knows_no_drafter_ends_the_lease() -> None:
    assert isinstance(Allocation().renew("ann", 1, wish(), 0.0), NoLease)


def test_a_new_drafter_takes_leases_over_once_they_have_settled() -> None:
    pool = pool_of(drafter(1))
    for holder in ("ann", "bob"):
        pool.lease(holder, wish(4), 0.0)
    pool.report(drafter(2), 1.0)
    pool.report(drafter(1), 1.0)
    assert incarnation_of(pool.renew("ann", 1, wish(4), 1.0)) == 1
    later = SETTLE_S / 2
    assert incarnation_of(pool.renew("ann", 1, wish(4), later)) == 1
    assert incarnation_of(pool.renew("bob", 1, wish(4), later)) == 1
    pool.report(drafter(1), SETTLE_S)
    pool.report(drafter(2), SETTLE_S)
    assert incarnation_of(pool.renew("ann", 1, wish(4), SETTLE_S)) == 2
    assert incarnation_of(pool.renew("bob", 1, wish(4), SETTLE_S)) == 1
    assert pool.figures(SETTLE_S).moved == 1


def test_what_is_not_renewed_expires_and_a_silent_drafter_is_forgotten() -> None:
    pool = pool_of(drafter(1), drafter(2))
    pool.lease("ann", wish(), 0.0)
    pool.report(drafter(1), 0.9 * SILENCE_S)
    assert pool.figures(LEASE_S).leases == 1
    figures = pool.figures(max(LEASE_S, SILENCE_S) + 0.1)
    assert (figures.leases, figures.expired, figures.drafters) == (0, 1, 1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 4))
def test_moves_come_to_an_end_and_leave_no_drafter_that_one_more_move_would_relieve(
    loads: list[int], num_drafters: int
) -> None:
    pool = pool_of(drafter(1))
    held = {f"t{i}": (incarnation_of(pool.lease(f"t{i}", wish(load), 0.0)), load) for i, load in enumerate(loads)}
    now, num_moved = 0.0, -1
    for _ in range(100):
        now += SETTLE_S
        for incarnation in range(1, num_drafters + 1):
            pool.report(drafter(incarnation), now)
        moved_before = num_moved
        for holder, (incarnation, load) in held.items():
            held[holder] = (incarnation_of(pool.renew(holder, incarnation, wish(load), now)), load)
        num_moved = pool.figures(now).moved
        if num_moved == moved_before:
            break
    assert num_moved == moved_before, "it never ends"
    weights = Counter({incarnation: 0 for incarnation in range(1, num_drafters + 1)})
    for incarnation, load in held.values():
        weights[incarnation] += 1 + load
    for incarnation, load in held.values():
        assert weights[incarnation] <= min(weights.values()) + 1 + load


# ---- all rules together, against a plain list -----------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Drafters come, fall silent and go; targets lease, renew, crash and give back; time passes."""

    @initialize()
    def begin(self) -> None:
        self.pool = Allocation()
        self.now = 0.0
        self.heard: dict[int, tuple[DrafterReport, float]] = {}
        self.leases: dict[str, tuple[int, int, float]] = {}  # incarnation, load, renewed at
        self.next_incarnation = 1

    def forget(self) -> None:
        self.heard = {i: (r, at) for i, (r, at) in self.heard.items() if self.now - at <= SILENCE_S}
        self.leases = {
            holder: (incarnation, load, at)
            for holder, (incarnation, load, at) in self.leases.items()
            if incarnation in self.heard and self.now - at <= LEASE_S
        }

    def take(self, holder: str, answer: Lease | NoLease, load: int) -> None:
        self.leases.pop(holder, None)
        if isinstance(answer, Lease):
            assert answer.address == self.heard[answer.incarnation][0].address
            self.leases[holder] = (answer.incarnation, load, self.now)

    def able(self, asked: Wish, holder: str) -> dict[int, int]:
        """The drafters that may be leased to the holder, with what others weigh on them."""
        weights = {}
        for incarnation, (report, _) in self.heard.items():
            others = [load for h, (i, load, _) in self.leases.items() if i == incarnation and h != holder]
            fits = report.tokenizer == asked.tokenizer and report.host in ("", asked.host)
            if fits and len(others) < report.max_targets:
                weights[incarnation] = len(others) + sum(others)
        return weights

    @rule(host=st.sampled_from(("", *HOSTS)), tokenizer=st.sampled_from(("abc", "abc", "xyz")), most=st.integers(1, 3))
    def a_drafter_comes(self, host: str, tokenizer: str, most: int) -> None:
        report = drafter(self.next_incarnation, max_targets=most, host=host, tokenizer=tokenizer)
        self.next_incarnation += 1
        self.forget()
        self.pool.report(report, self.now)
        self.heard[report.incarnation] = (report, self.now)

    @precondition(lambda self: self.heard)
    @rule(data=st.data())
    def a_drafter_starts_anew_at_its_address(self, data: st.DataObject) -> None:
        self.forget()
        if not self.heard:
            return
        old = data.draw(st.sampled_from(sorted(self.heard)))
        report = self.heard.pop(old)[0]
        new = DrafterReport(
            address=report.address,
            incarnation=self.next_incarnation,
            tokenizer=report.tokenizer,
            host=report.host,
            max_targets=report.max_targets,
        )
        self.next_incarnation += 1
        self.pool.report(new, self.now)
        self.heard[new.incarnation] = (new, self.now)
        self.forget()

    @precondition(lambda self: self.heard)
    @rule(data=st.data())
    def a_drafter_reports_or_retires(self, data: st.DataObject) -> None:
        self.forget()
        if not self.heard:
            return
        incarnation = data.draw(st.sampled_from(sorted(self.heard)))
        if data.draw(st.booleans()):
            self.pool.report(self.heard[incarnation][0], self.now)
            self.heard[incarnation] = (self.heard[incarnation][0], self.now)
        else:
            self.pool.retire(incarnation)
            del self.heard[incarnation]
            self.forget()

    @rule(
        holder=st.sampled_from(HOLDERS),
        load=st.integers(0, 8),
        host=st.sampled_from(HOSTS),
        tokenizer=st.sampled_from(("abc", "xyz")),
        avoid=st.integers(0, 4),
    )
    def a_target_asks(self, holder: str, load: int, host: str, tokenizer: str, avoid: int) -> None:
        self.forget()
        asked = Wish(tokenizer=tokenizer, load=load, host=host, avoid=avoid)
        able = self.able(asked, holder)
        answer = self.pool.lease(holder, asked, self.now)
        assert isinstance(answer, Lease) == bool(able)
        if isinstance(answer, Lease):
            better = {i: weight for i, weight in able.items() if i != avoid} or able
            assert better[answer.incarnation] == min(better.values())
        self.take(holder, answer, load)

    @rule(
        holder=st.sampled_from(HOLDERS),
        load=st.integers(0, 8),
        incarnation=st.integers(0, 6),
        is_own=st.booleans(),
        host=st.sampled_from(HOSTS),
    )
    def a_target_renews(self, holder: str, load: int, incarnation: int, is_own: bool, host: str) -> None:
        self.forget()
        if is_own and holder in self.leases:
            incarnation = self.leases[holder][0]
        asked = Wish(tokenizer="abc", load=load, host=host)
        able = self.able(asked, holder)
        answer = self.pool.renew(holder, incarnation, asked, self.now)
        assert isinstance(answer, Lease) == (incarnation in able)
        if isinstance(answer, Lease) and answer.incarnation != incarnation:
            assert able[answer.incarnation] == min(able.values()) < able[incarnation]
        self.take(holder, answer, load)

    @rule(holder=st.sampled_from(HOLDERS))
    def a_target_gives_back(self, holder: str) -> None:
        self.forget()
        self.pool.give_back(holder)
        self.leases.pop(holder, None)

    @rule(seconds=st.sampled_from((0.5, 2.0, 4.0, LEASE_S + 0.5)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.forget()

    @rule()
    def everybody_gives_back(self) -> None:
        for holder in HOLDERS:
            self.pool.give_back(holder)
        self.leases.clear()
        figures = self.pool.figures(self.now)
        assert (figures.leases, figures.load) == (0, 0)

    @invariant()
    def the_figures_are_those_of_a_plain_list(self) -> None:
        self.forget()
        figures = self.pool.figures(self.now)
        assert figures.drafters == len(self.heard)
        assert figures.leases == len(self.leases)
        assert figures.load == sum(load for _, load, _ in self.leases.values())
        held = Counter(incarnation for incarnation, _, _ in self.leases.values())
        assert all(num <= self.heard[incarnation][0].max_targets for incarnation, num in held.items())

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.figures(self.now + LEASE_S + SILENCE_S + 1.0).leases == 0


TestPool = PoolMachine.TestCase
