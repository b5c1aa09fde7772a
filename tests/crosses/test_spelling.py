"""An error names a setting as its reader gives it: as an option, as an argument in Python, as a field of an API."""

from __future__ import annotations

import pickle
from functools import partial

import click
import pytest

from card.cli.main import cli
from card.cli.parts.chosen_models import resolve_models
from card.cli.parts.command import CardCommand
from card.cli.parts.spelling import spelled_for
from card.errors import SettingsError, named
from card.server.errors import as_api_error, bad_request
from card.server.response_schemas import ResponsesRequest
from card.server.schemas import ChatRequest, CompletionRequest
from tests.commands import run_command
from tests.crosses.given import every_command

ERROR = SettingsError(f"{named('max_tokens')} is at odds with {named('grammar')}; shorten the prompt")


def test_in_python_a_setting_has_its_own_name() -> None:
    assert (
        str(ERROR) == str(pickle.loads(pickle.dumps(ERROR))) == "max_tokens is at odds with grammar; shorten the prompt"
    )
    assert ERROR.settings == ("max_tokens", "grammar")


@pytest.mark.parametrize(
    ("body", "length", "form", "prompt"),
    [
        (CompletionRequest, "max_tokens", "response_format", "prompt"),
        (ChatRequest, "max_tokens", "response_format", "messages"),
        (ResponsesRequest, "max_output_tokens", "text.format", "input"),
    ],
)
def test_each_api_names_its_own_fields(body: type, length: str, form: str, prompt: str) -> None:
    told = as_api_error(ERROR, body.spelling)
    assert (str(told), told.param) == (f"{length} is at odds with {form}; shorten the prompt", length)
    told = as_api_error(bad_request("too long", named("prompt")), body.spelling)
    assert told.param == prompt
    assert {length, prompt} <= body.model_fields.keys()


@pytest.mark.parametrize(("path", "command"), every_command(cli))
def test_a_command_without_a_draft_model_names_only_what_can_be_typed_there(path: str, command: CardCommand) -> None:
    names = {one.name for one in command.params}
    if not {"target", "draft"} <= names or command.name == "bench":
        return
    with click.Context(command), pytest.raises(SettingsError) as caught:
        resolve_models({"target": "demo-target", "draft": "none"}, needs_draft=True)
    told = caught.value.spelled(partial(spelled_for, command))
    flags = {flag for one in command.params for flag in one.opts} | {
        one.human_readable_name.upper() for one in command.params
    }
    assert [word.strip(",") for word in told.split() if word.startswith("--") and word.strip(",") not in flags] == []
    assert ("--method vanilla" in told) == ("method" in names), told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("generate", "hi", "--beam-width", "0"), "--beam-width must be from 1 to 256, got 0"),
        (
            ("generate", "hi", "--min-tokens", "9", "--max-tokens", "2"),
            "--min-tokens must be from 0 to --max-tokens (2)",
        ),
        (
            ("generate", "hi", "--method", "card", "--draft-dtype", "int8", "--draft-address", "tcp://a:1"),
            "--draft-dtype",
        ),
        (("generate", "hi", "--writers", "beam,store"), "set --suffix-store to its path"),
        (("generate", "hi", "--method", "ctc"), "give --ctc a file"),
        (("serve", "--method", "vanilla", "--fan-out", "4"), "--fan-out would do nothing"),
        (("generate", "hi", "--method", "cards"), "did you mean card?"),
        (("generate", "hi", "--method", "nothing"), "known: arbitrage, card"),
        (("generate", "hi", "--method", ""), "--method must be a string that is not empty, got ''"),
    ],
    ids=str,
)
def test_a_command_names_its_options(arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_command(capsys, *arguments)
    assert ran.status == 2 and ran.err.count("\n") == 1, ran.err
    assert told in ran.err


def test_an_error_that_does_not_end_a_command_names_its_options_too(capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_command(capsys, "chat", "demo-target", "--method", "vanilla", stdin=b"word " * 2000)
    assert ran.status == 0 and "raise --max-model-len if the model allows it" in ran.err
