"""What starts a server elsewhere starts one here: the image's command, the compose file, the unit; proxies fit it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from card.machine.folders import cache_folder
from card.server.config import ServerSettings
from tests.commands import run_command
from tests.machine_code import is_kept, lent
from tests.server.running import PATIENCE_S, command

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
SERVICE: dict[str, Any] = COMPOSE["services"]["card"]
UNIT = [line.partition("=") for line in (DEPLOY / "card.service").read_text("utf-8").splitlines() if "=" in line]
KEY = "secret"


@dataclass(frozen=True, slots=True)
class Start:
    """A command that serves, what it sets in the environment, and where it keeps what a later start uses."""

    words: list[str]
    env: dict[str, str]
    home: str = ""  # of the user; empty: the environment says where the cache is


def of_image(instruction: str) -> Any:
    (found,) = re.findall(rf"^{instruction} (.*)$", DOCKERFILE, re.MULTILINE)
    return json.loads(found) if found.startswith("[") else found


def of_unit(name: str) -> str:
    return " ".join(value for key, _, value in UNIT if key == name)


def starts() -> Iterator[tuple[str, Start]]:
    (shown,) = re.findall(r"^# .*(docker run .*)$", DOCKERFILE, re.MULTILINE)
    words = shlex.split(shown)
    given = dict(words[at + 1].split("=", 1) for at, word in enumerate(words) if word == "-e")
    image, home = of_image("ENTRYPOINT"), of_image("WORKDIR")
    yield "image", Start([*image, *of_image("CMD")], given, home)
    composed = {name: re.sub(r"\$\{\w+:\?[^}]*\}", KEY, value) for name, value in SERVICE["environment"].items()}
    yield "compose", Start([*image, *SERVICE["command"]], composed, home)
    unit = dict(word.split("=", 1) for word in of_unit("Environment").split())
    yield "unit", Start(["card", *shlex.split(of_unit("ExecStart"))[1:]], unit)


STARTS = dict(starts())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what is kept; before the first start of this module it holds no more than is lent."""
    cache = tmp_path_factory.mktemp("cache")
    lent(cache / "card")
    return cache


@pytest.mark.parametrize("name", STARTS)
def test_what_is_deployed_starts_answers_keeps_what_it_compiled_and_ends_by_itself(
    name: str, cache: Path, tmp_path: Path
) -> None:
    start = STARTS[name]
    assert start.words[:2] == ["card", "serve"]
    env = {**start.env, "XDG_CACHE_HOME": str(cache)}
    with command(tmp_path, *start.words[2:], "--policy", "fixed", "--threads", "1", env=env) as server:
        url = re.sub(r"//0\.0\.0\.0:", "//127.0.0.1:", server.url)
        names = ["127.0.0.1", *start.env.get("CARD_ALLOWED_HOST", "").split()]
        with httpx2.Client(base_url=url, timeout=PATIENCE_S) as client:
            for host in names:
                body = {"prompt": "Tom has 3 apples.", "max_tokens": 4}
                asked = {"json": body, "headers": {"Host": host, "Authorization": f"Bearer {KEY}"}}
                assert client.post("/v1/completions", **asked).status_code == 200
            if "CARD_API_KEY" in start.env:
                assert client.post("/v1/completions", json=body).status_code == 401
        assert is_kept(cache / "card"), "machine code is there for the next start"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0


def test_what_a_container_keeps_lies_on_its_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", STARTS["image"].home)
    volume = Path(of_image("VOLUME"))
    assert cache_folder(None).is_relative_to(volume)
    (mounted,) = SERVICE["volumes"]
    name, _, place = mounted.partition(":")
    assert Path(place) == volume and name in COMPOSE["volumes"]


def test_a_unit_of_systemd_keeps_what_it_compiled_in_its_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", STARTS["unit"].env["XDG_CACHE_HOME"])
    assert cache_folder(None) == Path("/var/cache") / of_unit("CacheDirectory")


def test_the_image_without_a_key_says_in_one_line_what_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_command(capsys, *STARTS["image"].words[1:])
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert "CARD_API_KEY" in ran.err


def test_answers_may_end_before_the_server_is_killed() -> None:
    seconds = ServerSettings().shutdown_timeout_s
    for told in (SERVICE["stop_grace_period"].removesuffix("s"), of_unit("TimeoutStopSec")):
        assert float(told) > seconds


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    assert of_unit("Restart") == SERVICE["restart"] == "on-failure"
    program = shlex.split(of_unit("ExecStart"))[0]
    unit = (DEPLOY / "card.service").read_text("utf-8").replace(program, "/bin/sh")  # a program that is there
    (tmp_path / "card.service").write_text(unit, "utf-8")
    if shutil.which("systemd-analyze"):
        ran = subprocess.run(
            ["systemd-analyze", "verify", tmp_path / "card.service"], capture_output=True, text=True, check=False
        )
        assert (ran.returncode, ran.stderr) == (0, "")


def directives(source: str) -> dict[str, str]:
    """Return the directives of nginx by name, with `proxy_set_header Host` as one."""
    lines = [line.partition("#")[0].strip() for line in source.splitlines()]
    found = [re.fullmatch(r"(proxy_set_header \S+|\S+)\s+(.*);", line) for line in lines]
    return {one[1]: one[2].strip('"') for one in found if one}


def test_nginx_passes_names_and_pieces_on_and_waits_as_long_as_the_server(tmp_path: Path) -> None:
    source, settings = (DEPLOY / "nginx.conf").read_text("utf-8"), ServerSettings()
    told = directives(source)
    assert told["proxy_pass"] == f"http://{settings.host}:{settings.port}"
    assert (told["proxy_set_header Host"], told["proxy_buffering"]) == ("$host", "off")
    assert (
        float(told["proxy_read_timeout"].removesuffix("s"))
        > settings.first_token_timeout_s + settings.request_timeout_s
    )
    assert int(told["client_max_body_size"].removesuffix("m")) << 20 == settings.max_request_bytes
    if shutil.which("nginx"):
        plain = re.sub(r" +ssl_certificate.*\n", "", source).replace("443 ssl", "127.0.0.1:8443")
        (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{\n{plain}}}\n", "utf-8")
        ran = subprocess.run(
            ["nginx", "-t", "-c", tmp_path / "nginx.conf"], capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr


def test_caddy_passes_pieces_on_as_they_come(tmp_path: Path) -> None:
    source, settings = (DEPLOY / "Caddyfile").read_text("utf-8"), ServerSettings()
    assert f"reverse_proxy {settings.host}:{settings.port} {{" in source and "flush_interval -1" in source
    (size,) = re.findall(r"max_size (\d+)MiB", source)
    assert int(size) << 20 == settings.max_request_bytes
    if shutil.which("caddy"):
        checked = ["caddy", "validate", "--adapter", "caddyfile", "--config", str(DEPLOY / "Caddyfile")]
        ran = subprocess.run(
            checked, env={"HOME": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
