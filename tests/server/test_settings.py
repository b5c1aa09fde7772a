"""Where settings come from: the command line, then the environment, then the file; what is wrong is one clear line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from card.api.async_llm import AsyncLLM
from card.cli.main import cli
from card.config.sampling import derived_seed
from card.errors import CardError, SettingsError
from card.machine.packages import install_command
from card.server import serving
from card.server.config import ServerSettings, is_loopback
from card.server.listening import bind
from card.server.params import sampling_params
from card.server.schemas import CompletionRequest


class Started:
    """What the command would have served."""

    def __init__(self) -> None:
        self.settings: ServerSettings = ServerSettings()
        self.model: tuple[Any, ...] = ()
        self.engine: dict[str, Any] = {}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """Let the command stop short of loading models."""
    found = Started()

    def fake_llm(target: str, draft: str | None, **settings: Any) -> AsyncLLM:
        found.model, found.engine = (target, draft), settings
        raise SettingsError("enough")

    def fake_serve(make_llm: Callable[[], AsyncLLM], settings: ServerSettings, *_: Any, **__: Any) -> int:
        found.settings = settings
        with pytest.raises(SettingsError, match="enough"):
            make_llm()
        return 0

    monkeypatch.setattr("card.cli.commands.serve.start_drafter_child", lambda *_: None)  # tests/cli/test_ahead.py
    monkeypatch.setattr("card.api.async_llm.AsyncLLM", fake_llm)
    monkeypatch.setattr(serving, "serve", fake_serve)
    monkeypatch.setattr("card.cli.commands.serve.bind", lambda settings: nullcontext())
    monkeypatch.setattr("card.server.logs.set_up", lambda level: None)
    yield found


def invoke(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(cli, ["serve", *arguments], env=env)


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(
    started: Started, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("port: 1\nmax-num-seqs: 1\nmax_model_len: 100\nserved-model-name: [a, b]\ncores: [0]\n", "utf-8")
    done = invoke("--config", str(path), "--port", "3", CARD_PORT="2", CARD_MAX_NUM_SEQS="2")
    assert done.exit_code == 0, (done.output, done.exception)
    assert started.settings.port == 3
    assert started.engine["max_num_seqs"] == 2
    assert started.engine["max_model_len"] == 100
    assert started.engine["cores"] == (0,)
    assert started.settings.served_model_names == ("a", "b")


def test_keys_come_from_the_environment_or_the_file_as_well(started: Started, tmp_path: Path) -> None:
    assert invoke(CARD_API_KEY="one two").exit_code == 0
    assert started.settings.api_keys == ("one", "two")
    path = tmp_path / "config.yaml"
    path.write_text("api-key: three\n", "utf-8")
    assert invoke(CARD_CONFIG=str(path)).exit_code == 0
    assert started.settings.api_keys == ("three",)


@pytest.mark.parametrize(
    ("arguments", "model", "method"),
    [
        ((), ("demo-target", "demo-draft"), "card"),
        (("big", "--draft-model", "small"), ("big", "small"), "card"),
        (("--model", "big", "--draft", "small"), ("big", "small"), "card"),
        (("--target", "big", "--speculative-model", "small", "--method", "sps"), ("big", "small"), "sps"),
        (("big", "--method", "vanilla"), ("big", None), "vanilla"),
        (("big", "--draft-address", "tcp://127.0.0.1:5"), ("big", None), "card"),
        (("big",), ("big", None), None),
        (("big", "--draft", "none"), ("big", None), "suffix"),
        (("big", "--writers", "recycling"), ("big", None), None),
    ],
)
def test_the_models_may_be_named_in_the_usual_ways(
    started: Started,
    arguments: tuple[str, ...],
    model: tuple[str, str | None],
    method: str | None,
) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    assert (started.model, started.engine["method"]) == (model, method)
    assert started.settings.served_model_names == (model[0],)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("prot: 1\n", r"unknown name 'prot'; did you mean port\?$"),
        ("max_num_seq: 1\n", r"unknown name 'max_num_seq'; did you mean max-num-seqs\?$"),
        ("colour: 1\n", "unknown name 'colour'; known: .*max-num-seqs"),
        ("- 1\n", "must map names of flags to values"),
        ("a: [\n", "is not YAML"),
        ("port: {a: 1}\n", "one value or a list"),
        ("api-key: [null]\n", "one value or a list"),
        ("config: x\n", "unknown name 'config'"),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused(started: Started, tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content, "utf-8")
    with pytest.raises(SettingsError, match=reason):
        CliRunner().invoke(cli, ["serve", "--config", str(path)], catch_exceptions=False)


@pytest.mark.parametrize(("value", "told"), [("true", "True"), ("1.5", "1.5"), (".inf", "inf"), ("''", "")])
def test_a_value_in_a_file_is_read_as_if_it_were_typed(started: Started, tmp_path: Path, value: str, told: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"port: {value}\n", "utf-8")
    done = invoke("--config", str(path))
    assert done.exit_code == 2 and f"{told!r} is not a valid integer" in done.output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--port", "70000"), "port must be from 0 to 65535, got 70000"),
        (("--request-timeout", "0"), "--request-timeout must be above 0"),
        (("--max-request-bytes", "5"), "--max-request-bytes must be 1024 or more"),
        (("--api-key", "ключ"), "ASCII"),
        (("--served-model-name", "one\ntwo"), "must be names of printable characters"),
        (("big", "--target", "other", "--draft", "x"), "target is given twice"),
        (("big", "--method", "card"), "needs a draft model"),
        (("big", "--writers", "beam,suffix"), "needs a draft model"),
        (("big", "--placement", "inline"), "needs a draft model"),
    ],
)
def test_settings_that_cannot_be_are_refused(started: Started, arguments: tuple[str, ...], reason: str) -> None:
    done = invoke(*arguments)
    assert isinstance(done.exception, CardError), done.output
    assert reason in str(done.exception)


def test_a_server_open_to_the_network_without_a_key_is_refused_unless_that_is_said(started: Started) -> None:
    refused = invoke("--host", "0.0.0.0").exception
    assert isinstance(refused, SettingsError) and "set --api-key" in str(refused) and "--no-key" in str(refused)
    for arguments in (("--api-key", "k"), ("--no-key",)):
        assert invoke("--host", "0.0.0.0", *arguments).exit_code == 0
    assert invoke("--host", "0.0.0.0", CARD_NO_KEY="1").exit_code == 0
    assert invoke("--host", "localhost").exit_code == 0
    assert [is_loopback(host) for host in ("127.0.0.9", "::1", "localhost", "0.0.0.0", "::", "example.org")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_allowed_hosts_and_origins_come_from_everywhere_as_well(started: Started, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("allowed-host: [a.example, b.example]\ncors-origin: https://app.example\nno-key: true\n", "utf-8")
    for done in (
        invoke("--config", str(path)),
        invoke(CARD_ALLOWED_HOST="a.example b.example", CARD_CORS_ORIGIN="https://app.example", CARD_NO_KEY="1"),
        invoke(
            *("--allowed-host", "a.example", "--allowed-host", "b.example"),
            *("--cors-origin", "https://app.example", "--no-key"),
        ),
    ):
        assert done.exit_code == 0, (done.output, done.exception)
        assert started.settings.allowed_hosts == ("a.example", "b.example")
        assert started.settings.cors_origins == ("https://app.example",)
        assert started.settings.no_key


def test_without_the_optional_packages_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("card.cli.commands.serve.find_spec", lambda name: None if name == "uvicorn" else object())
    done = invoke()
    assert isinstance(done.exception, SettingsError)
    assert f"not installed: uvicorn; run {install_command('serve')}" in str(done.exception)


def test_an_address_that_is_taken_is_refused_before_models_are_loaded() -> None:
    with bind(ServerSettings(port=0)) as taken:  # by a server that still loads its model
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1 port {port}"):
            bind(ServerSettings(port=port))
        done = invoke("--port", str(port))
        assert isinstance(done.exception, SettingsError)
        assert f"cannot listen on 127.0.0.1 port {port}" in str(done.exception)
    bind(ServerSettings(port=port)).close()


def test_a_request_comes_before_the_models_defaults_and_these_before_neutral_values() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    for given, wanted in (({}, (0.6, 20, 1.0)), ({"temperature": 0.0, "top_k": -1, "top_p": 0.5}, (0.0, 0, 0.5))):
        fields = CompletionRequest.model_validate({"prompt": "a", **given})
        params = sampling_params(fields, max_tokens=5, logprobs=None, vocab_size=10).resolved(defaults)
        assert (params.temperature, params.top_k, params.top_p) == wanted


def test_choices_have_seeds_of_their_own_and_the_first_one_the_requests() -> None:
    seeds = {derived_seed(7, idx) for idx in range(128)}
    assert len(seeds) == 128
    assert derived_seed(7, 0) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derived_seed(8, 1) not in seeds
