"""A web page of a stranger gets nothing from the server and sets nothing to work, by whatever name it calls it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from card.errors import SettingsError
from card.server.admission import AllowedHosts, host_of
from card.server.config import ServerSettings
from tests.browser import chromium
from tests.server.running import PROMPT, Running, serving

pytestmark = pytest.mark.timeout(240)

EVIL = "http://evil.example"
APP = "https://app.example"
_PAGE = "/stranger.html"
_ASK = """async ([url, options]) => {
  try {
    const answer = await fetch(url, options);
    return { status: answer.status, type: answer.type, text: await answer.text() };
  } catch (error) {
    return { failed: String(error) };
  }
}"""
_STRANGER = (
    "--host-resolver-rules=MAP evil.example 127.0.0.1",
    "--disable-features=LocalNetworkAccessChecks",  # newer browsers defend us as well, others do not
)
_BODY = json.dumps({"prompt": PROMPT, "max_tokens": 2})


@pytest.fixture(scope="module")
def shut(shared_server: Running) -> Iterator[Running]:
    """A server that lets nobody in by another name than those of this machine, and pages of one origin."""
    with serving(shared_server.llm, cors_origins=(APP,), allowed_hosts=("Card.Example",)) as server:
        yield server


def exchange(server: Running, data: bytes) -> bytes:
    """Send bytes on a connection of their own and return all that comes back until it is closed."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def asked_under(server: Running, *hosts: str, path: str = "/v1/models", version: str = "1.1") -> tuple[int, str]:
    """Return status and body of a request with these `Host` headers."""
    lines = [f"GET {path} HTTP/{version}", *(f"Host: {host}" for host in hosts), "Connection: close", "", ""]
    head, _, body = exchange(server, "\r\n".join(lines).encode()).partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


def num_texts(server: Running) -> int:
    """Return how many texts were asked of a server that nobody else asks."""
    return server.service.gate.num_requests + sum(server.service.ledger.finished.values())


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8123", "LOCALHOST:1", "localhost.", "localhost.:80", "localhost:"),
        *(
            "127.0.0.1",
            "127.0.0.1:8123",
            "127.8.9.1",
            "[::1]",
            "[::1]:8123",
            "[0:0:0:0:0:0:0:1]:1",
            "[::FFFF:127.0.0.1]",
        ),
        *("card.example", "CARD.example.:443"),
    ],
)
def test_a_server_is_asked_under_names_of_this_machine_and_those_that_were_allowed(shut: Running, host: str) -> None:
    assert asked_under(shut, host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "evil.example.", "xlocalhost", "localhost.."),
        *("192.168.1.5", "8.8.8.8:80", "0.0.0.0", "[::]", "[2001:db8::1]:80", "[::ffff:8.8.8.8]", "[fe80::1]"),
        *("::1", "[::1", "::1]", "localhost@evil.example", "localhost:80:80", "localhost:x", "a b", "-", "\u00e9", ""),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/", "/metrics", "/health", "/nothing"])
def test_under_any_other_name_there_is_no_answer_to_anything(shut: Running, host: str, path: str) -> None:
    status, body = asked_under(shut, host, path=path)
    assert status == 421
    error = json.loads(body)["error"]
    assert error["code"] == "host_not_allowed" and "--allowed-host" in error["message"]


@pytest.mark.parametrize("hosts", [(), ("localhost", "localhost"), ("localhost", "evil.example")])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_request_names_its_host_once(shut: Running, hosts: tuple[str, ...], version: str) -> None:
    status, body = asked_under(shut, *hosts, version=version)
    assert (status, json.loads(body)["error"]["code"]) == (400, "bad_host")


def test_what_is_listened_on_is_a_name_and_all_addresses_are_if_all_are_listened_on() -> None:
    def allows(listened_on: str, host: str, *named: str) -> bool:
        return AllowedHosts(listened_on, named).is_allowed(host_of(host))

    assert allows("192.168.1.5", "192.168.1.5:80") and not allows("192.168.1.5", "192.168.1.6")
    assert allows("Box.lan", "box.LAN:8000") and not allows("box.lan", "box.lan.evil.example")
    assert allows("fe80::1%eth0", "[fe80::1]:8000")
    for everywhere in ("0.0.0.0", "::"):
        assert allows(everywhere, "192.168.1.6:80") and allows(everywhere, "[2001:db8::1]")
        assert not allows(everywhere, "evil.example") and allows(everywhere, "box.lan", "box.lan")
    assert allows("127.0.0.1", "10.0.0.1", "10.0.0.1") and allows("127.0.0.1", "[2001:db8::1]", "2001:DB8:0::1")


def test_all_names_are_allowed_only_if_that_is_said(shared_server: Running) -> None:
    with serving(shared_server.llm, allowed_hosts=("*",)) as server:
        assert asked_under(server, "evil.example")[0] == 200


@pytest.mark.parametrize("changes", [
    *({"allowed_hosts": (one,)} for one in ("", "http://a.example", "a.example:80", "a.example/", "*.example", "a b")),
    *({"cors_origins": (one,)} for one in ("", "a.example", "https://a.example/", "null", "https://*", "https://")),
])  # fmt: skip
def test_a_name_or_an_origin_that_is_none_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="must"):
        ServerSettings(**changes)


# ---- pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", [EVIL, "null", "http://localhost:1", "https://app.example.evil.example", "x"])
def test_a_page_of_a_stranger_sets_nothing_to_work(shut: Running, origin: str) -> None:
    before = num_texts(shut)
    for answer in (
        shut.post("/v1/completions", {"prompt": PROMPT}, headers={"Origin": origin}),
        shut.client.get("/metrics", headers={"Origin": origin}),
        shut.client.options("/v1/completions", headers={"Origin": origin, "Access-Control-Request-Method": "POST"}),
    ):
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "origin_not_allowed"
        assert "access-control-allow-origin" not in answer.headers
    assert num_texts(shut) == before


def test_its_own_page_and_a_page_that_was_named_may_ask(shut: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    assert shut.post("/v1/completions", body, headers={"Origin": shut.url}).status_code == 200
    answer = shut.post("/v1/completions", body, headers={"Origin": APP})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == APP
    assert "Origin" in answer.headers["vary"]
    wrong = shut.post("/v1/completions", {}, headers={"Origin": APP})
    assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (400, APP)
    assert "x-request-id" in wrong.headers["access-control-expose-headers"]


def test_a_preflight_is_answered_without_a_key_and_an_answer_about_keys_can_be_read(shared_server: Running) -> None:
    with serving(shared_server.llm, cors_origins=(APP,), api_keys=("sesame",)) as server:
        wanted = {
            "Origin": APP,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
            "Access-Control-Request-Private-Network": "true",
        }
        answer = server.client.options("/v1/chat/completions", headers=wanted)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == APP
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == wanted["Access-Control-Request-Headers"]
        assert answer.headers["access-control-allow-private-network"] == "true"
        assert "access-control-allow-credentials" not in answer.headers
        refused = server.client.options("/v1/chat/completions", headers={**wanted, "Origin": EVIL})
        assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
        keyless = server.client.get("/v1/models", headers={"Origin": APP})
        assert (keyless.status_code, keyless.headers["access-control-allow-origin"]) == (401, APP)
        keyed = server.client.get("/v1/models", headers={"Origin": APP, "Authorization": "Bearer sesame"})
        assert keyed.status_code == 200


def test_in_a_browser_a_stranger_who_takes_this_machines_address_gets_nothing(shared_server: Running) -> None:
    with serving(shared_server.llm) as server, chromium(*_STRANGER) as browser:
        port = server.url.rpartition(":")[2]
        page = browser.new_page()
        page.route(f"**{_PAGE}", lambda route: route.fulfill(body="<p>hello</p>", content_type="text/html"))
        as_json = {"method": "POST", "headers": {"Content-Type": "application/json"}, "body": _BODY}
        as_text = {"method": "POST", "headers": {"Content-Type": "text/plain"}, "body": _BODY}

        page.goto(f"{EVIL}:{port}{_PAGE}")
        for path, options in (("/v1/models", {}), ("/", {}), ("/metrics", {}), ("/v1/completions", as_json)):
            got = page.evaluate(_ASK, [path, options])
            assert got["status"] == 421 and "demo-target" not in got["text"]
        for options in (as_json, as_text, {**as_text, "mode": "no-cors"}, {"mode": "no-cors"}):
            path = "/v1/completions" if "method" in options else "/v1/models"
            got = page.evaluate(_ASK, [server.url + path, options])
            assert "failed" in got or (got["type"], got["text"]) == ("opaque", "")
        assert page.evaluate(
            "([url, body]) => navigator.sendBeacon(url, body)", [f"{server.url}/v1/completions", _BODY]
        )
        document = page.goto(f"{EVIL}:{port}/")
        assert document is not None and document.status == 421
        assert server.service.ledger.errors.keys() <= {403, 421}
        assert num_texts(server) == 0

        page.goto(f"http://localhost:{port}{_PAGE}")  # the same questions from a page of the server's own
        assert "demo-target" in page.evaluate(_ASK, ["/v1/models", {}])["text"]
        assert page.evaluate(_ASK, ["/v1/completions", as_json])["status"] == 200
        assert num_texts(server) == 1


# ---- without a key --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.lan"])
def test_other_machines_need_a_key_unless_it_is_said_that_they_do_not(host: str) -> None:
    with pytest.raises(SettingsError, match="--no-key"):
        ServerSettings(host=host)
    ServerSettings(host=host, no_key=True)
    ServerSettings(host=host, api_keys=("k",))
    with pytest.raises(SettingsError, match="leave one out"):
        ServerSettings(host=host, no_key=True, api_keys=("k",))
