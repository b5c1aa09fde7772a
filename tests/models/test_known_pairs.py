"""The table of known pairs: what it says of a name, and that its pages say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from card.models.files.known_pairs import KNOWN_PAIRS, KnownPair, gigabytes, known_file, known_pair
from card.models.files.places import hub_file, local_model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize("pair", KNOWN_PAIRS, ids=lambda pair: pair.target.model)
def test_a_repository_of_the_table_stands_for_its_file(pair: KnownPair) -> None:
    for file in (pair.target, pair.draft):
        assert hub_file(file.repository) == hub_file(file.name) == (file.repository, file.file)
        assert local_model(file.repository) is None is local_model(file.name)
        assert known_file(file.repository) == file
        assert file.quantisation.lower() in file.file.lower()


@pytest.mark.parametrize("pair", KNOWN_PAIRS, ids=lambda pair: pair.target.model)
def test_a_target_of_the_table_has_a_smaller_draft_and_a_draft_has_none(pair: KnownPair) -> None:
    assert known_pair(pair.target.repository) is pair is known_pair(pair.target.name)
    assert known_pair(pair.draft.repository) is None
    assert pair.draft.num_bytes < 0.5 * pair.target.num_bytes
    assert pair.memory_bytes > pair.num_bytes + 1e9


def test_what_the_table_does_not_know_is_named_as_before() -> None:
    other = KNOWN_PAIRS[0].target.repository + "/another-q8_0.gguf"
    assert hub_file(other) == (KNOWN_PAIRS[0].target.repository, "another-q8_0.gguf")
    assert known_pair(other) is None
    assert hub_file("org/model") is known_pair("org/model") is known_pair("demo-target") is None


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / KNOWN_PAIRS[0].target.repository
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert local_model(KNOWN_PAIRS[0].target.repository) == Path(KNOWN_PAIRS[0].target.repository)


def test_the_page_shows_the_table() -> None:
    rows = [
        f"| `{pair.target.repository}` | {pair.draft.model} | {gigabytes(pair.num_bytes)} | "
        f"{gigabytes(pair.memory_bytes)} | {', '.join(pair.licences)} |"
        for pair in KNOWN_PAIRS
    ]
    assert [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")] == rows
