"""Everything that can die, dies under load: no request is lost, no text changes, and no lease is left behind.

Each test sends 350 requests and more, 2,100 in all. Every text is compared with that of plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from card.links.keys import make_keys
from tests.labs.ray.clusters import (
    ALWAYS_DRAFTS,
    MODEL,
    Question,
    RayCluster,
    Traffic,
    deploy,
    figures,
    kill,
    make_questions,
    num_running,
    running_cluster,
    until,
)
from tests.pair import Pair

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200)]

REQUESTS = 350
NODE = {"targets": 1, "drafters": 1}  # at most one of each


@pytest.fixture(scope="module")
def questions(pair: Pair) -> list[Question]:
    return make_questions(pair.target, REQUESTS)


@pytest.fixture(scope="module")
def args(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two targets and two drafters, which know each other by keys; a node has room for one of each."""
    keys: Path = tmp_path_factory.mktemp("keys")
    make_keys(keys, ["targets"])
    return {
        "target": pair.target,
        "draft": pair.draft,
        "dtype": "float32",
        "served_model_names": MODEL,
        "threads": 1,
        **ALWAYS_DRAFTS,
        "draft_keys": str(keys / "targets"),
        "pool_keys": str(keys / "server"),
        "min_targets": 2,
        "max_targets": 2,
        "min_drafters": 2,
        "max_drafters": 2,
        "target_resources": {"num_cpus": 0.1, "resources": {"targets": 1}},
        "drafter_resources": {"num_cpus": 0.1, "resources": {"drafters": 1}},
    }


@pytest.fixture(scope="module")
def cluster(args: dict[str, Any]) -> Iterator[RayCluster]:
    with running_cluster({}, NODE, NODE, NODE) as cluster:
        deploy(args)
        yield cluster


def until_whole() -> None:
    """Wait until all replicas run and all drafters are known."""
    until(
        lambda: num_running("Target") == 2 and num_running("DraftPool") == 2 and figures()["drafters"] == 2,
        what="two targets and two drafters",
    )


def traffic_on(cluster: RayCluster, questions: list[Question]) -> Traffic:
    until_whole()
    return Traffic(cluster.port, questions)


def check(traffic: Traffic, *, may_ask_again: bool = False) -> None:
    """End the traffic; every request was answered as plain decoding does, and nothing is held for it."""
    traffic.end(REQUESTS)
    assert traffic.wrong == []
    assert may_ask_again or traffic.errors == []
    assert traffic.num_answered >= REQUESTS
    assert traffic.accepted_tokens > 0
    until(lambda: figures()["leases"] == 0, what="no leases")
    until(lambda: figures()["load"] == 0, what="no load, of requests that lost their answers either")


def test_all_is_well(cluster: RayCluster, questions: list[Question]) -> None:
    with traffic_on(cluster, questions) as traffic:
        until(lambda: figures()["leases"] == 2, what="a lease for each target")
        check(traffic)


def test_a_drafter_that_is_killed_costs_no_request(cluster: RayCluster, questions: list[Question]) -> None:
    with traffic_on(cluster, questions) as traffic:
        until(lambda: traffic.accepted_tokens > 0, what="accepted tokens")
        killed = min(cluster.pids("DraftPool"))
        kill(killed)
        until(lambda: killed not in cluster.pids("DraftPool"), what="the end of a drafter")
        until_whole()
        check(traffic)


def test_a_desk_that_is_killed_learns_of_drafters_and_leases_anew(
    cluster: RayCluster, questions: list[Question]
) -> None:
    with traffic_on(cluster, questions) as traffic:
        until(lambda: figures()["leases"] == 2, what="a lease for each target")
        (desk,) = cluster.pids("LeaseDesk")
        kill(desk)
        until(lambda: cluster.pids("LeaseDesk") not in ([], [desk]), what="another desk")
        until(lambda: figures()["leases"] == 2, what="the leases")
        until_whole()
        check(traffic)


def test_a_target_that_is_killed_costs_its_clients_another_attempt(
    cluster: RayCluster, questions: list[Question]
) -> None:
    with traffic_on(cluster, questions) as traffic:
        until(lambda: traffic.accepted_tokens > 0, what="accepted tokens")
        killed = min(cluster.pids("Target"))
        kill(killed)
        until(lambda: killed not in cluster.pids("Target") and num_running("Target") == 2, what="another target")
        check(traffic, may_ask_again=True)


def test_a_rolling_update_costs_no_request(
    cluster: RayCluster, questions: list[Question], args: dict[str, Any]
) -> None:
    with traffic_on(cluster, questions) as traffic:
        until(lambda: traffic.accepted_tokens > 0, what="accepted tokens")
        before = set(cluster.pids("Target") + cluster.pids("DraftPool"))
        deploy({**args, "num_speculative_tokens": 4})
        until_whole()
        assert not before & set(cluster.pids("Target") + cluster.pids("DraftPool"))
        check(traffic)


def test_a_node_that_goes_away_costs_attempts_and_no_request(cluster: RayCluster, questions: list[Question]) -> None:
    with traffic_on(cluster, questions) as traffic:
        until(lambda: traffic.accepted_tokens > 0, what="accepted tokens")
        cluster.remove_node_of(cluster.pids("Target")[0])
        until_whole()
        check(traffic, may_ask_again=True)
