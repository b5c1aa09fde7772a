"""A target of the known pairs brings its draft model, by download from a stand-in of the hub."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from card.cli.parts.chosen_models import choose_models, resolve_models
from card.cli.parts.fetching import fetch_models
from card.errors import ModelError, SettingsError
from card.models.files.known_pairs import KNOWN_PAIRS
from card.models.loading import load_tokenizer
from tests.commands import run_command
from tests.gguf_files import demo_tokenizer, save_model, write_gguf
from tests.hub import Hub, serving
from tests.processes import unhurried

PAIR = KNOWN_PAIRS[0]
TARGET, DRAFT = PAIR.target.repository, PAIR.draft.name

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    files = {}
    for name, noise in ((PAIR.target.name, 0.0), (DRAFT, 0.1)):
        save_model(root / Path(name).name, "llama", demo_tokenizer(), noise=noise)
        files[name] = write_gguf(root / Path(name).name, root / f"made-{Path(name).name}")
    one = files[DRAFT]
    others = dict.fromkeys(("org/gated/a.gguf", "org/some/a-q8_0.gguf", "org/some/a-Q4_K_M.gguf"), one)
    with serving(Hub({**files, **others}, gated=frozenset({"org/gated"}))) as made:
        yield made


@pytest.fixture
def asked(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The stand-in, asked by this process, which has an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.fetched.clear()
    return hub


def options(**given: Any) -> dict[str, Any]:
    return {"method": None, "target": TARGET, "draft": None} | given


# ---- which draft model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [TARGET, PAIR.target.name])
@pytest.mark.parametrize(("method", "taken"), [(None, "card"), ("card", "card"), ("sps", "sps")])
def test_a_known_target_brings_its_draft_and_one_line_says_so(
    target: str, method: str | None, taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = choose_models(options(target=target, method=method))
    assert (chosen.method, chosen.target, chosen.draft) == (taken, target, DRAFT)
    assert capsys.readouterr().err == (
        f"card: {target} brings its draft model, {DRAFT}; both files are 1.6 GB, fetched once, and need 3.0 GB of "
        "memory; Apache-2.0; --draft none does without\n"
    )


@pytest.mark.parametrize(
    ("given", "method", "draft"),
    [
        ({"draft": "none"}, "suffix", None),
        ({"method": "vanilla"}, "vanilla", None),
        ({"method": "suffix"}, "suffix", None),
        ({"draft": "demo-draft"}, "card", "demo-draft"),
        ({"target": None, "draft": "none"}, "suffix", None),
        ({"target": None}, "card", "demo-draft"),
        ({"target": PAIR.draft.repository}, None, None),
        ({"draft_address": "tcp://127.0.0.1:1"}, "card", None),
    ],
)
def test_nothing_is_brought_where_it_is_not_wanted(
    given: dict[str, Any], method: str | None, draft: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = choose_models(options(**given))
    assert (chosen.method, chosen.draft) == (method, draft)
    assert "brings" not in capsys.readouterr().err


def test_a_method_asks_for_a_draft_where_the_known_one_is_not_wanted() -> None:
    with pytest.raises(SettingsError, match="this needs a draft model"):
        choose_models(options(method="card", draft="none"))


def test_a_folder_of_the_name_of_a_known_target_brings_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / TARGET).mkdir(parents=True)
    (tmp_path / TARGET / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    chosen = choose_models(options())
    assert (chosen.method, chosen.draft) == (None, None)


def test_commands_about_a_pair_take_the_known_one() -> None:
    assert resolve_models(options(), needs_draft=True) == (TARGET, DRAFT)


# ---- downloads ------------------------------------------------------------------------------------------------------


def test_files_are_fetched_once_and_lines_tell_how_far(asked: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        fetch_models(TARGET, DRAFT, "demo-draft", None)
    assert asked.fetched == [PAIR.target.file, PAIR.draft.file]
    lines = capsys.readouterr().err.splitlines()
    for name in (TARGET, DRAFT):
        assert f"card: fetching {name}: 100 % of 0.0 GB" in lines
    assert all(line.startswith("card: fetching ") for line in lines)
    assert load_tokenizer(TARGET).encode("hi") == load_tokenizer(DRAFT).encode("hi")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("org/gated/a.gguf", "it is gated: accept its licence there and log in"),
        ("org/missing/a.gguf", "there is no such public model"),
        ("org/some/b.gguf", "org/some has no file b.gguf; it has a-Q4_K_M.gguf, a-q8_0.gguf"),
    ],
)
def test_what_the_hub_refuses_is_one_line(asked: Hub, name: str, said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        fetch_models(name)
    assert "\n" not in str(caught.value)


def test_a_repository_of_gguf_files_that_is_not_known_says_what_to_name(asked: Hub) -> None:
    wanted = "org/some holds GGUF files and no config.json; name the file, such as org/some/a-Q4_K_M.gguf"
    with pytest.raises(ModelError, match=wanted):
        load_tokenizer("org/some")


def test_a_full_disk_and_a_dead_hub_are_one_line(asked: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.file_download, "http_get", fill)
        with pytest.raises(ModelError, match=rf"^{TARGET} cannot be fetched: .*No space left on device"):
            fetch_models(TARGET)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="neither a folder here nor in the local cache, and the hub cannot be used"):
        fetch_models(TARGET)


def test_one_command_chats_with_a_pair_of_the_table(hub: Hub, tmp_path: Path) -> None:
    places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    online = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
    words = ["chat", TARGET, "--dtype", "float32", "--max-tokens", "4", "--policy", "fixed", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "card", *words],
        env={**os.environ, **places, **online},
        input="hi\n/stats\n",
        capture_output=True,
        text=True,
        check=True,
    )
    told = unhurried(done.stderr).splitlines()
    assert told[0].startswith(f"card: {TARGET} brings its draft model, {DRAFT}")
    assert any(line.startswith("card: 4 tokens") or " tokens/s" in line for line in told)
    assert "no draft model" not in done.stderr and done.stdout


# ---- the list -------------------------------------------------------------------------------------------------------


def test_the_list_names_targets_that_can_be_pasted(capfd: pytest.CaptureFixture[str]) -> None:
    shown = run_command(capfd, "pairs", columns=80)
    for pair in KNOWN_PAIRS:
        assert any(line.startswith(f"{pair.target.repository} ") for line in shown.out.splitlines())
    wide = run_command(capfd, "pairs", "--wide").out
    assert all(licence in wide for pair in KNOWN_PAIRS for licence in pair.licences)
    facts = json.loads(run_command(capfd, "pairs", "--json").out)
    assert facts[0]["draft"]["licence"] == "Apache-2.0" and len(facts) == len(KNOWN_PAIRS)


def test_a_target_that_is_named_twice_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    ran = run_command(capfd, "chat", "demo-target", "--target", TARGET)
    assert (ran.status, ran.err) == (
        2,
        f"card: error: --target is given twice, as '{TARGET}' and as 'demo-target'; leave one out\n",
    )
