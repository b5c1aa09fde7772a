"""States that have no room end a start before the weights are read, in one line that says what would work."""

from __future__ import annotations

from typing import NoReturn

import pytest

from card.api import target as card_target
from card.api.llm import LLM
from card.errors import CardError, SettingsError, ShortageError
from card.models.loading import load_decoder, state_bytes_of
from card.models.runners import plain_runner
from tests.gguf_files import demo_tokenizer, save_model, write_gguf


@pytest.fixture(scope="module", params=["folder", "file"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model with short convolutions."""
    folder = tmp_path_factory.mktemp("lfm2")
    save_model(folder, "lfm2", demo_tokenizer())
    return str(folder if request.param == "folder" else write_gguf(folder, folder / "model.gguf"))


def refused(target: str, monkeypatch: pytest.MonkeyPatch, of: type[CardError], **settings: str) -> str:
    """Return the one line that a start ends with, which may not read weights."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(card_target, "load_decoder", refuse)
    with pytest.raises(of) as caught:
        LLM(target, method="vanilla", cache=False, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_least_that_states_take_is_told_by_the_config_alone(target: str) -> None:
    least = state_bytes_of(target, cache_dir="")
    assert 0 < least <= plain_runner(load_decoder(target, cache_dir=""), max_model_len=64, max_tree_rows=1).state_bytes
    assert least == 2 * 3 * 64 * 4  # two convolutions of three taps, 64 channels in 32 bits


def test_states_beyond_the_memory_that_is_left_are_refused(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_target, "free_memory", lambda: 1000)
    said = refused(target, monkeypatch, ShortageError)
    assert said.startswith(f"the states of one request take 0.00 GB or more with {target}, and ")
    assert said.endswith("; take a smaller model, or allow more memory")


def test_states_beyond_the_memory_that_is_allowed_are_refused(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused(target, monkeypatch, SettingsError, kv_cache_memory="1K")
    assert said.startswith("kv_cache_memory 1K has no room for the states of one request, which take 0.0M or more with")
