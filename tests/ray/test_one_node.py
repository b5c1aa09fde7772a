"""Targets and a pool of drafters on one node of Ray: they find each other, and let go of each other."""

from __future__ import annotations

import pytest

from tests.ray.clusters import MODEL, Traffic, deploy, figures, make_questions, running_cluster, until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]


def test_texts_are_those_of_plain_decoding_and_leases_are_given_back() -> None:
    questions = make_questions("demo-target", 24)
    args = {
        "target": "demo-target",
        "draft": "demo-draft",
        "dtype": "float32",
        "served_model_names": MODEL,
        "threads": 1,
        "target_resources": {"num_cpus": 0.5},
        "drafter_resources": {"num_cpus": 0.25},
        "min_drafters": 2,
        "max_drafters": 2,
    }
    with running_cluster({}) as cluster:
        deploy(args)
        until(lambda: figures()["drafters"] == 2, what="two drafters")
        with Traffic(cluster.port, questions) as traffic:
            until(lambda: traffic.accepted_tokens > 0 and traffic.num_answered >= 24, what="accepted tokens")
            assert figures()["leases"] == 1
        assert (traffic.wrong, traffic.errors) == ([], [])
        until(lambda: figures()["leases"] == 0, what="no leases")
        assert figures()["load"] == 0
