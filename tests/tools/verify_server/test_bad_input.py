"""Whatever is wrong with the input or the server is one line and exit status 2, and no key is ever printed."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.tools.verify_server.conftest import Ran, Verify
from tests.tools.verify_server.fake import lying

KEY = "sk-very-secret"


def assert_one_line(ran: Ran, said: str) -> None:
    assert ran.status == 2, ran
    assert ran.out == ""
    assert ran.err.startswith("card: error: ") and ran.err.count("\n") == 1, ran.err
    assert said in ran.err
    assert ran.report == {}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["127.0.0.1:8000"], "is no URL of a server; give one such as http://127.0.0.1:8000"),
        (["ftp://host"], "is no URL of a server"),
        (["http://"], "is no URL of a server"),
        (["http://host:99999"], "is no URL"),
        (["http://[::1"], "is no URL"),
        (["http://host/v1?x=1"], "has a query or a fragment"),
        ([f"http://user:{KEY}@host"], "give keys by --api-key"),
        (["http://host", "--only", "gredy"], "unknown check 'gredy'; known: plain-again"),
        (["http://host", "--only", "greedy", "--skip", "greedy"], "leave no check"),
        (["http://host", "--concurrency", "1"], "concurrency must be 2 or more"),
        (["http://host", "--temperature", "0"], "temperature must be above 0"),
        (["http://host", "--max-tokens", "0"], "--max-tokens must be 1 or more"),
        (["http://host", "--timeout", "nan"], "--timeout must be above 0 seconds"),
        (["http://host", "--logprob-tolerance", "-1"], "--logprob-tolerance must be 0 or more"),
        (["http://host", "--api", "responses"], "api must be one of auto, chat, completions"),
        (["http://host", "--plain-fields", "off"], "must be a JSON object"),
        (["http://host", "--plain-fields", "[]"], "must be a JSON object"),
        (["http://host", "--plain-fields", "{}", "--reference", "http://other"], "exclude each other"),
        (["http://host", "--reference-model", "m"], "--reference-model is for --reference"),
        (["http://host", "--api-key", f"{KEY} {KEY}"], "an API key must be printable ASCII without blanks"),
        (["http://host", "--prompts", "{missing}"], "does not exist"),
    ],
)
def test_wrong_input_is_one_line(verify: Verify, args: list[str], said: str, tmp_path: Path) -> None:
    ran = verify(*(arg.replace("{missing}", str(tmp_path / "missing")) for arg in args))
    assert_one_line(ran, said)
    assert KEY not in ran.err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.txt", b"one\n\n", "gives 1 prompts; 2 different ones or more"),
        ("p.txt", b"one\none\n", "gives 1 prompts"),
        ("p.txt", b"\xff\xfe", "is not valid UTF-8"),
        ("p.jsonl", b"one\ntwo\n", "line 1: must be a JSON object with"),
        ("p.jsonl", b'{"question": "one"}\n{"text": "two"}\n', 'line 2: must be a JSON object with "question"'),
    ],
)
def test_prompts_that_are_none_are_one_line(
    verify: Verify, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert_one_line(verify("http://host", "--prompts", str(path)), said)


def test_own_prompts_are_asked(verify: Verify, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"question": f"what is {n}?"}) + "\n" for n in range(9)), "utf-8")
    with lying() as fake:
        ran = verify(fake.url, "--prompts", str(path), "--only", "greedy")
        asked = {body["messages"][0]["content"] for body in fake.requests}
    assert (ran.status, asked) == (0, {"what is 0?", "what is 1?", "what is 2?"})


def test_no_server_is_one_line(verify: Verify) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and listens to nobody
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert_one_line(verify(url), "cannot be reached")


@pytest.mark.parametrize(
    ("lie", "args", "said"),
    [
        ("hang", ["--timeout", "0.2"], "did not answer within 0.2 seconds"),
        ("html", [], "the answer is no JSON: '<html><body> [31mWelcome</body></html>'"),
        ("redirect", [], "leads to https://elsewhere.example/v1/models (status 307)"),
        ("no-models", [], "lists no models; name the model"),
        ("no-chat", [], "status 400: this model has no chat template"),
        ("honest", ["--model", "other"], "has no model 'other'; it has: fake"),
    ],
)
def test_a_server_that_cannot_be_used_is_one_line(verify: Verify, lie: str, args: list[str], said: str) -> None:
    with lying(lie) as fake:
        assert_one_line(verify(fake.url, *args), said)


def test_another_path_than_that_of_the_api_is_one_line(verify: Verify) -> None:
    with lying() as fake:
        ran = verify(f"{fake.url}/api")
    assert_one_line(ran, "/api/models answers status 404")
    assert "is this the address of OpenAI's API?" in ran.err


def test_a_server_that_closes_the_connection_is_one_line(verify: Verify) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert_one_line(verify(url, "--timeout", "0.2"), "did not answer within 0.2 seconds")


def test_keys_open_the_door_and_are_never_printed(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    with lying(key=KEY) as fake:
        without = verify(fake.url)
        wrong = verify(fake.url, "--api-key", "sk-another")
        right = verify(fake.url, "--api-key", KEY, "--only", "greedy")
        monkeypatch.setenv("CARD_API_KEY", KEY)
        by_variable = verify(fake.url, "--only", "greedy")
        for_reference = verify(fake.url, "--reference", fake.url)
    assert_one_line(without, "wants an API key (status 401)")
    assert_one_line(wrong, "refuses the API key (status 401): wrong key ***")
    assert (right.status, by_variable.status) == (0, 0)
    assert_one_line(for_reference, "wants an API key")  # a server never gets the key of another one
    for ran in (without, wrong, right, by_variable, for_reference):
        assert not {KEY, "sk-another"}.intersection((ran.out + ran.err + json.dumps(ran.report)).split())
        assert KEY not in ran.out + ran.err + json.dumps(ran.report)
        assert "sk-another" not in ran.out + ran.err
