"""Tokenizers of models on the hub: their own files are fetched, once, and read again without the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from transformers import ByT5Tokenizer

from card.errors import ModelError
from card.models.demo import demo_folder
from card.models.loading import load_tokenizer
from card.text.given_tokenizer import SlowTokenizer
from card.text.tokenizer_files import read_tokenizer
from tests.hub import Hub, serving


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a model whose tokenizer.json is there, and one without; asked by this process, with an empty cache."""
    files = {f"org/fast/{file.name}": file for file in demo_folder("target").iterdir()}
    slow = tmp_path / "slow"
    ByT5Tokenizer().save_pretrained(slow)
    (slow / "config.json").write_text('{"model_type": "llama", "vocab_size": 384}')
    files |= {f"org/slow/{file.name}": file for file in slow.iterdir()}
    with serving(Hub(files)) as made:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", made.url)
        template = made.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield made


def test_only_the_files_of_a_tokenizer_are_fetched_and_only_once(
    hub: Hub, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, again = load_tokenizer("org/fast"), load_tokenizer("org/fast")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody answers
    alone = load_tokenizer("org/fast")
    known = read_tokenizer(demo_folder("target"))
    assert known is not None
    for one in (own, again, alone):
        assert one.get_vocab() == known.get_vocab() and one.chat_template == known.chat_template
    assert "tokenizer.json" in hub.fetched and not any("safetensors" in file for file in hub.fetched)
    assert len(set(hub.fetched)) == len(hub.fetched)
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_that_is_a_program_is_read_through_transformers(hub: Hub) -> None:
    own = load_tokenizer("org/slow")
    assert isinstance(own, SlowTokenizer) and own.encode("hi") == ByT5Tokenizer().encode("hi")


def test_a_model_that_is_not_there_is_one_line(hub: Hub) -> None:
    with pytest.raises(ModelError, match="there is no such public model") as refused:
        load_tokenizer("org/none")
    assert "\n" not in str(refused.value)
