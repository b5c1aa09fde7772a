"""Targets and a pool of drafters on one node of Ray: they find each other, share, and let go of each other."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from card.labs.ray.allocation import Wish
from card.labs.ray.desk import as_text
from card.labs.ray.target import DESK
from card.links.keys import make_keys
from card.models.loading import load_tokenizer
from card.text.fit import tokenizer_fingerprint
from tests.labs.ray.clusters import (
    ALWAYS_DRAFTS,
    MODEL,
    Question,
    RayCluster,
    Traffic,
    deploy,
    figures,
    make_questions,
    num_running,
    running_cluster,
    until,
)
from tests.pair import Pair

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200)]

EXAMPLE = Path(__file__).parents[3] / "examples" / "ray_pool.yaml"
API_KEY = "key-of-the-endpoint"
SMALL = {
    "dtype": "float32",
    "served_model_names": MODEL,
    "threads": 1,
    **ALWAYS_DRAFTS,
    "target_resources": {"num_cpus": 0.25},
    "drafter_resources": {"num_cpus": 0.25},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARD_API_KEY", API_KEY)
        with running_cluster({}) as cluster:
            yield cluster


@pytest.fixture(autouse=True)
def clean(cluster: RayCluster) -> Iterator[None]:
    yield
    for name in list(serve.status().applications):
        serve.delete(name)


def until_helped(cluster: RayCluster, questions: list[Question], **how: Any) -> None:
    """Ask until drafters have helped and all was asked once; all texts are those of plain decoding."""
    with Traffic(cluster.port, questions, key=API_KEY, **how) as traffic:
        until(
            lambda: traffic.accepted_tokens > 0 and traffic.num_answered >= len(questions),
            what=f"accepted tokens; {traffic.errors[:3]}",
        )
    assert (traffic.wrong, traffic.errors) == ([], [])


def test_the_demo_pair_is_served_as_plain_decoding_does_and_leases_are_given_back(cluster: RayCluster) -> None:
    deploy({**SMALL, "target": "demo-target", "draft": "demo-draft", "min_drafters": 2, "max_drafters": 2})
    until(lambda: figures()["drafters"] == 2, what="two drafters")
    until_helped(cluster, make_questions("demo-target", 24))
    assert figures()["granted"] >= 1
    until(lambda: figures()["leases"] == 0, what="no leases")
    assert figures()["load"] == 0


def test_only_ports_that_serve_binds_for_its_replicas_listen_to_other_machines(cluster: RayCluster, pair: Pair) -> None:
    """Serve has no setting for these; Ray's, those of the proxy and those of drafters are on 127.0.0.1."""
    deploy({**SMALL, "target": pair.target, "draft": pair.draft})
    until(lambda: figures()["drafters"] == 1, what="a drafter")
    listening = Counter(
        process.name().split(".")[0]  # behind the dot is what it runs at this moment
        for process in psutil.Process().children(recursive=True)
        for one in process.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.ip not in ("127.0.0.1", "::ffff:127.0.0.1", "::1")
    )
    assert listening == {f"ray::ServeReplica:default:{name}": 1 for name in ("Target", "DraftPool", "LeaseDesk")}


def test_logs_hold_no_key_no_prompt_and_no_address_of_a_drafter(
    cluster: RayCluster, pair: Pair, tmp_path: Path
) -> None:
    make_keys(tmp_path, ["targets"])
    keys = {"draft_keys": str(tmp_path / "targets"), "pool_keys": str(tmp_path / "server")}
    deploy({**SMALL, **keys, "target": pair.target, "draft": pair.draft, "log_level": "debug"})
    questions = make_questions(pair.target, 24)
    until_helped(cluster, questions)
    wish = Wish(tokenizer=tokenizer_fingerprint(load_tokenizer(pair.target)), load=0, host="127.0.0.1")
    desk = serve.get_deployment_handle(DESK, "default")
    lease = json.loads(desk.lease.remote("test", as_text(wish)).result(timeout_s=20.0))
    secrets = [line for path in tmp_path.rglob("*") if path.is_file() for line in _quoted(path.read_text())]
    assert len(secrets) >= 3
    told = b"".join(path.read_bytes() for path in cluster.logs())
    assert b'"event":"request"' in told
    hidden = [
        API_KEY,
        os.environ["RAY_AUTH_TOKEN"],
        lease["address"].removeprefix("tcp://"),
        *secrets,
        *(one.prompt for one in questions),
    ]
    assert [text for text in hidden if text.encode() in told] == []


def _quoted(certificate: str) -> list[str]:
    """Return the keys in a certificate file of ZeroMQ."""
    return [line.split('"')[1] for line in certificate.splitlines() if "-key = " in line]


def test_one_pool_serves_different_targets_of_a_family(cluster: RayCluster, pair: Pair) -> None:
    deploy({**SMALL, "target": pair.target, "draft": pair.draft, "min_drafters": 2, "max_drafters": 2})
    deploy({**SMALL, "target": pair.draft, "draft": pair.draft, "pool": "default"}, name="other", route="/other")
    until(lambda: figures()["drafters"] == 2, what="two drafters")
    assert cluster.pids("DraftPool", "other") == []
    until_helped(cluster, make_questions(pair.target, 24))
    until_helped(cluster, make_questions(pair.draft, 24), path="/other/v1/completions")
    assert figures()["granted"] >= 2
    until(lambda: figures()["leases"] == 0, what="no leases")


def test_targets_and_drafters_are_scaled_apart(cluster: RayCluster, pair: Pair) -> None:
    scaling = {"scale_up_s": 1, "scale_down_s": 3, "min_drafters": 1, "max_drafters": 2, "targets_per_drafter": 0.5}
    deploy({**SMALL, **scaling, "target": pair.target, "draft": pair.draft, "max_targets": 2, "requests_per_target": 4})
    with Traffic(cluster.port, make_questions(pair.target, 24), key=API_KEY, num_clients=2) as traffic:
        until(lambda: num_running("DraftPool") == 2, what="another drafter for a busy target")
        assert num_running("Target") == 1
    until(lambda: num_running("DraftPool") == 1, what="a drafter less without targets")
    with Traffic(cluster.port, traffic.questions, key=API_KEY, num_clients=12) as more:
        until(lambda: num_running("Target") == 2, what="another target for many requests")
    assert (traffic.wrong, more.wrong, more.errors) == ([], [], [])


def test_the_example_is_deployed_as_it_stands(cluster: RayCluster) -> None:
    example = yaml.safe_load(EXAMPLE.read_text("utf-8"))
    (application,) = example["applications"]
    application["args"] |= SMALL | {"max_targets": 1, "max_drafters": 2}
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(example), _blocking=True)
    until(lambda: figures("card")["drafters"] == 2, what="two drafters")
    until_helped(cluster, make_questions("demo-target", 8))
