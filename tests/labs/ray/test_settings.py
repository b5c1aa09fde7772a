"""What applications on Ray Serve are asked for, from a command line and from a file. Needs no Ray."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import card.ray
from card.errors import SettingsError
from card.labs.ray.allocation import LOAD, ByTargets
from card.labs.ray.settings import API_KEY_VARIABLE, AppSettings
from card.machine.packages import install_command

EXAMPLE = Path(__file__).parents[3] / "examples" / "ray_pool.yaml"


def test_settings_go_to_whom_they_are_for() -> None:
    settings = AppSettings.of(
        {"target": "a", "draft": "b", "max_drafters": 3, "max_num_seqs": 4, "log_level": "debug", "beam_width": 2}
    )
    assert (settings.pool.max_drafters, settings.draft) == (3, "b")
    assert settings.engine == {"target": "a", "max_num_seqs": 4, "beam_width": 2}
    assert settings.server == {"log_level": "debug", "served_model_names": ("a",)}


def test_a_command_line_says_the_same_in_text() -> None:
    given = {"target": "a", "draft": "b", "max_drafters": 3, "scale_up_s": 2.5, "drafter_resources": {"num_gpus": 0.25}}
    text = {**given, "max_drafters": "3", "scale_up_s": "2.5", "drafter_resources": "{num_gpus: 0.25}"}
    assert AppSettings.of(text) == AppSettings.of(given)


def test_without_a_word_the_demo_pair_is_served() -> None:
    settings = AppSettings.of({})
    assert (settings.engine["target"], settings.draft) == ("demo-target", "demo-draft")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"port": 1}, "Serve has the socket"),
        ({"api_keys": ["k"]}, API_KEY_VARIABLE),
        ({"draft_address": "tcp://127.0.0.1:1"}, "the pool says where a drafter is"),
        ({"target": "mine"}, "give draft"),
        ({"min_drafters": 2}, "max_drafters must be at least min_drafters"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"no_such_thing": 1}, "no_such_thing"),
        ({"drafter_resources": "{num_cpus"}, "drafter_resources cannot be read"),
        ({"drafter_kv_cache_memory": "much"}, "much"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(args: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason) as error:
        AppSettings.of(args)
    assert "\n" not in str(error.value)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("card.machine.doors.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=re.escape(f"not installed; run {install_command('ray')}")):
        card.ray.app  # noqa: B018


def test_keys_are_for_both_sides_or_for_none() -> None:
    with pytest.raises(SettingsError, match="give both"):
        AppSettings.of({"pool_keys": "folder"}).check_keys()


def test_nobody_gets_in_from_elsewhere_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    settings = AppSettings.of({})
    assert settings.server_settings("127.0.0.1").api_keys == ()
    with pytest.raises(SettingsError, match=API_KEY_VARIABLE):
        settings.server_settings("0.0.0.0")
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")
    assert settings.server_settings("0.0.0.0").api_keys == ("secret",)
    monkeypatch.delenv(API_KEY_VARIABLE)
    assert AppSettings.of({"no_key": True}).server_settings("0.0.0.0").no_key


def test_the_example_is_one_that_would_be_deployed() -> None:
    example = yaml.safe_load(EXAMPLE.read_text("utf-8"))
    (application,) = example["applications"]
    assert application["import_path"] == "card.ray:app"
    assert example["http_options"]["host"] == "127.0.0.1"
    settings = AppSettings.of(application["args"])
    settings.check_keys()
    assert settings.pool.min_drafters == 2


@pytest.mark.parametrize(("by_replica", "wanted"), [({}, 1), ({"a": 4}, 1), ({"a": 4, "b": 1}, 2), ({"a": 16}, 4)])
def test_drafters_are_as_many_as_busy_targets_need(by_replica: dict[str, float], wanted: int) -> None:
    metrics = {LOAD: by_replica} if by_replica else None
    assert ByTargets(4.0)(SimpleNamespace(aggregated_metrics=metrics)) == (wanted, {})
