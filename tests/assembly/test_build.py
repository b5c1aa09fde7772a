"""An engine is what its plan says: its limits, its writers, its policy and what that one knows of costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import card.assembly.build as building
from card.assembly.build import Models, Parts, build, schedule_costs
from card.assembly.plan import Plan, resolve
from card.config import Schedule
from card.drafting.local.suffix import SuffixWriter
from card.engine.policy.rounds import Policy
from card.engine.policy.tuned import TunedPolicy
from card.errors import SettingsError
from card.machine.pass_cost import PassCost
from tests.assembly.test_plan import TWO_CORES, Told
from tests.decoding import inline, make_request, plain, run_all
from tests.toy import TableModel

TARGET = TableModel(1)
TWO_SCHEDULES = resolve({}, replace(TWO_CORES, spare_cores=1))


def built(plan: Plan) -> Parts:
    link = inline(TableModel(2)) if plan.placements else None
    return build(plan, Models(target=TARGET, link=link, latencies=Told()))


class Unknown(Told):
    """Latencies of a drafter that has not come yet."""

    def drafter(self, plan: Plan, schedule: Schedule) -> PassCost | None:
        return None


@pytest.mark.parametrize("method", ["vanilla", "card", "sps", "pearl"])
def test_an_engine_of_any_plan_gives_the_text_of_the_target_alone(method: str) -> None:
    parts = built(resolve({"max_num_seqs": 2}, TWO_CORES, method=method))
    requests = [make_request(number, method=method) for number in range(3)]
    for request in requests:
        parts.engine.add(parts.engine.check(request))
    parts.engine.step()
    assert (parts.engine.stats().num_running, parts.engine.stats().num_waiting) == (2, 1)
    parts.engine.abort(0)
    texts = run_all(built(parts.plan).engine, {0: requests})
    assert list(texts.values()) == [plain(TARGET)] * 3


@pytest.mark.parametrize(
    ("method", "settings", "is_tuned"),
    [
        ("card", {}, True),
        ("card", {"policy": "fixed"}, False),
        ("card", {"policy": "fixed", "schedule": "turns"}, False),
        ("vanilla", {}, False),
        ("pearl", {}, False),
    ],
)
def test_only_a_tuned_method_has_a_policy_that_tunes_itself(method: str, settings: dict, is_tuned: bool) -> None:
    plan = resolve(settings, TWO_CORES, method=method)
    policy = built(plan).policy
    assert type(policy) is (TunedPolicy if is_tuned else Policy)
    if not is_tuned:
        assert (policy.schedule, policy.cores) == (plan.first_schedule, plan.cores_of(plan.first_schedule))


def test_a_policy_that_is_given_is_taken() -> None:
    policy = Policy("off")
    assert build(TWO_SCHEDULES, Models(target=TARGET), policy=policy).policy is policy


@pytest.mark.parametrize(
    ("settings", "schedules"),
    [({}, {"beside", "turns", "off"}), ({"schedule": "turns"}, {"turns"}), ({"writers": ("suffix",)}, {"off"})],
)
def test_the_policy_may_choose_among_the_schedules_of_the_plan_and_no_drafts_unless_one_is_set(
    settings: dict, schedules: set[str]
) -> None:
    costs = schedule_costs(resolve(settings, replace(TWO_CORES, spare_cores=1)), Told())
    assert costs.keys() == schedules
    assert all((cost.drafter is None) is (schedule == "off") for schedule, cost in costs.items())


def test_a_drafter_of_which_nothing_is_known_is_taken_to_be_ten_times_as_fast() -> None:
    costs = schedule_costs(TWO_SCHEDULES, Unknown())
    assert costs["beside"].drafter is not None
    assert costs["beside"].drafter.seconds(3) == pytest.approx(0.1 * costs["beside"].target.seconds(3))


class Closing(SuffixWriter):
    """Tells when it is closed; one of them cannot be made."""

    closed: ClassVar[list[str]] = []
    cannot_be_made = False

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        if self.cannot_be_made:
            raise SettingsError("no such writer")

    def close(self) -> None:
        self.closed.append(type(self).__name__)


class Unmade(Closing):
    cannot_be_made = True


@pytest.mark.parametrize(("second", "closed"), [(Unmade, ["Closing"]), (Closing, ["Closing", "Closing"])])
def test_writers_are_closed_if_the_engine_cannot_be_made(
    second: type[Closing], closed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"suffix": Closing, "lookup": second}
    monkeypatch.setattr(Closing, "closed", [])
    monkeypatch.setattr(building, "find_writer", kinds.__getitem__)
    settings = {"writers": ("suffix", "lookup"), "policy": "fixed", "kv_offload": str(tmp_path / "missing")}
    plan = resolve(settings, replace(TWO_CORES, row_bytes=8, free_bytes=1 << 30, has_draft=False))
    with pytest.raises(SettingsError):
        built(plan)
    assert Closing.closed == closed


def test_closing_ends_the_writers_but_not_the_link_which_is_its_makers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Closing, "closed", [])
    monkeypatch.setattr(building, "find_writer", lambda name: Closing)
    parts = built(resolve({"writers": ("beam", "suffix"), "policy": "fixed"}, TWO_CORES))
    parts.close()
    assert Closing.closed == ["Closing"]
    assert parts.link is not None and parts.link.status.state != "down"
