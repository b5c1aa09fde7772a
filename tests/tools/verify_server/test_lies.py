"""Every lie of a server is found by the check that is about it; an honest server passes all."""

from __future__ import annotations

import json

import pytest

from card.tools.verify_server.checks import CHECKS
from tests.tools.verify_server.conftest import Ran, Verify
from tests.tools.verify_server.fake import lying

NEEDS_PLAIN = {"plain-again", "plain-batch", "greedy", "seeded", "seeded-choices"}


def test_an_honest_server_passes_every_check(verify: Verify) -> None:
    with lying() as fake:
        ran = verify(fake.url)
        assert any(body.get("speculation") == "off" for body in fake.requests)
    assert {one["name"]: one["outcome"] for one in ran.report["results"]} == dict.fromkeys(CHECKS, "equal")
    assert (ran.status, ran.err) == (0, "")
    assert ran.report["compares_ids"] is True
    assert f"nothing differs: {len(CHECKS)} checks, {len(CHECKS)} equal" in ran.out


@pytest.mark.parametrize(
    ("lie", "check"),
    [
        ("speculation", "greedy"),
        ("batch", "greedy-batch"),
        ("batch", "stream-batch"),
        ("seeded", "seeded"),
        ("seeded", "seeded-batch"),
        ("seeded", "seeded-stream"),
        ("seeded", "seeded-choices"),
        ("again", "again"),
        ("extended", "extended"),
        ("schema", "schema"),
        ("schema", "schema-batch"),
        ("stop", "stop"),
        ("stop", "stop-stream"),
        ("with-logprobs", "logprobs"),
        ("logprob-token", "logprobs"),
        ("logprob-value", "logprobs"),
        ("unlikely", "likeliest"),
        ("stream", "stream"),
        ("finish", "stream"),
        ("n", "choices"),
        ("ids", "greedy"),
    ],
)
def test_a_lie_is_found(verify: Verify, lie: str, check: str) -> None:
    with lying(lie) as fake:
        ran = verify(fake.url, "--only", check)
    assert (ran.status, ran.outcome(check)) == (1, "differs"), ran
    assert "answers differ: 1 checks, 1 differs" in ran.out


def test_a_difference_says_where_and_how_near_a_tie_it_is(verify: Verify) -> None:
    with lying("speculation") as fake:
        ran = verify(fake.url, "--only", "greedy")
    first, *others = ran.result("greedy")["differences"]
    assert len(others) == 2
    assert (first["what"], first["prompt_idx"], first["token_idx"]) == ("text", 0, 5)
    assert first["got"].lstrip().startswith("pear"[first["got"].startswith("ear") :])
    assert first["gap"] == pytest.approx(0.02)
    assert "a near tie: the two tokens are 0.02 apart in log-probability" in ran.out
    assert "text of prompt 1 from token 6" in ran.out
    assert "and 2 more; --json FILE has them all" in ran.out


def test_texts_are_compared_where_ids_are_not_told(verify: Verify) -> None:
    with lying("speculation", "no-ids") as fake:
        ran = verify(fake.url, "--only", "greedy")
    first = ran.result("greedy")["differences"][0]
    assert ran.report["compares_ids"] is False
    assert "compared: texts; not both servers report token ids" in ran.out
    assert (first["token_idx"], first["gap"]) == (None, pytest.approx(0.02))


@pytest.mark.parametrize(
    ("lie", "check", "said"),
    [
        ("no-seeds", "seeded", "seeds do not repeat: 3 of 3 plain answers differ when asked again"),
        ("no-seeds", "seeded-batch", "seeds do not repeat"),
        ("no-schema", "schema", "response_format is not heeded"),
        ("no-stop", "stop", "stop strings are not heeded"),
        ("no-n", "choices", "n is not heeded: 2 choices were asked for, 1 came"),
        ("no-logprobs", "logprobs", "status 400: no [31mlogprobs here"),
        ("no-stream", "stream", "it answers stream: true with one answer of type application/json"),
    ],
)
def test_what_a_server_cannot_do_is_told_apart_from_what_differs(
    verify: Verify, lie: str, check: str, said: str
) -> None:
    with lying(lie) as fake:
        ran = verify(fake.url, "--only", f"greedy,{check}")
    assert ran.outcome(check) == "not supported"
    assert said in ran.result(check)["reason"]
    assert ran.outcome("greedy") == "equal"
    assert ran.status == 0


@pytest.mark.parametrize(
    ("lie", "check", "said"),
    [
        ("cut", "stream", "cut off"),
        ("no-done", "stream", "before [DONE]"),
        ("error-stream", "stream", "the engine died"),
        ("hang-stream", "stream", "did not answer within 1.5 seconds"),
        ("broken-n", "choices", "the answer is no JSON: 'oh no'"),
        ("broken-schema", "schema", "status 500: the grammar crashed"),
    ],
)
def test_an_answer_that_breaks_fails_its_check_with_one_line(verify: Verify, lie: str, check: str, said: str) -> None:
    timeout = ["--timeout", "1.5"] if lie.startswith("hang") else []
    with lying(lie) as fake:
        ran = verify(fake.url, "--only", f"greedy,{check}", *timeout)
    assert (ran.status, ran.outcome("greedy"), ran.outcome(check)) == (2, "equal", "failed")
    assert said in ran.result(check)["reason"]
    assert ran.err.startswith("card: error: ") and ran.err.count("\n") == 1
    assert said in ran.err


def test_what_follows_a_server_that_is_lost_is_not_asked(verify: Verify) -> None:
    with lying("hang-stream", "n") as fake:
        ran = verify(fake.url, "--only", "stream,stream-batch,choices", "--timeout", "1.5")
    assert [one["outcome"] for one in ran.report["results"]] == ["failed"] * 3
    assert ran.result("choices")["reason"] == "not asked: the server was lost"


def test_a_server_without_a_switch_is_compared_with_itself_and_says_so(verify: Verify) -> None:
    with lying("no-switch") as fake:
        ran = verify(fake.url)
        assert not any("speculation" in body for body in fake.requests)
    outcomes = {one["name"]: one["outcome"] for one in ran.report["results"]}
    assert {name for name, outcome in outcomes.items() if outcome == "not supported"} == NEEDS_PLAIN
    assert ran.status == 0
    assert ran.result("greedy")["reason"] == "it was not asked without speculation"
    assert "give --reference, or --plain-fields" in ran.out


def test_fields_that_switch_speculation_off_may_be_given(verify: Verify) -> None:
    with lying("no-switch", "speculation") as fake:
        ran = verify(fake.url, "--only", "greedy", "--plain-fields", json.dumps({"speculation": "off"}))
    assert (ran.status, ran.outcome("greedy")) == (1, "differs")


def test_a_reference_server_is_compared_with(verify: Verify) -> None:
    with lying("no-switch", "speculation") as fake, lying("no-switch") as honest:
        ran = verify(fake.url, "--reference", honest.url, "--only", "greedy,greedy-batch")
        same = verify(honest.url, "--reference", honest.url, "--only", "greedy")
    assert (ran.status, ran.outcome("greedy"), ran.outcome("greedy-batch")) == (1, "differs", "differs")
    assert same.status == 0
    assert ran.report["reference"] == f"{honest.url}/v1"


def test_control_characters_of_a_server_never_reach_the_terminal(verify: Verify) -> None:
    with lying("no-logprobs") as fake:
        ran: Ran = verify(fake.url, "--only", "greedy,logprobs")
    assert "\x1b[31mlogprobs" not in ran.out
