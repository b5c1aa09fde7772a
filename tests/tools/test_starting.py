"""Commands of the folders load nothing that computes before they have something to do."""

from __future__ import annotations

import pytest

from tests.cli.test_starting import modules_after

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], "check-pair"),
        (["bench", "--help-all"], "--sps-lengths"),
        (["train", "hrad", "--help"], "--gamma"),
        (["check-pair", "--help"], "--prompts"),
    ],
)
def test_help_loads_nothing_that_computes(arguments: list[str], said: str) -> None:
    got, printed, loaded = modules_after(*arguments)
    assert (got, loaded) == (0, set()), printed
    assert said in printed
