"""A config.json that is no object, or nested too deeply, is refused by the name of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from card import LLM
from card.errors import ModelError
from card.models.files.sources import find_source


def folder_with(path: Path, levels: int) -> str:
    """Return a folder whose config.json has so many objects and lists inside each other."""
    nested = '{"a":[' * (levels // 2) + "]}" * (levels // 2)
    (path / "config.json").write_text(nested if levels % 2 == 0 else f"[{nested}]")
    return str(path)


@pytest.mark.parametrize("levels", [101, 900, 100_000])  # what can be decoded, hardly copied, and not even decoded
def test_a_config_that_is_nested_too_deeply_is_refused_by_the_name_of_the_file(tmp_path: Path, levels: int) -> None:
    folder = folder_with(tmp_path, levels)
    with pytest.raises(ModelError) as refused:
        find_source(folder, None)
    assert str(refused.value) == (
        f"the config of {folder} cannot be used: "
        "its config.json is no JSON object of at most 100 levels; download it again"
    )


def test_a_config_with_as_many_levels_as_are_possible_is_left_to_what_reads_it(tmp_path: Path) -> None:
    assert find_source(folder_with(tmp_path, 100), None).is_folder


@pytest.mark.parametrize("content", ["{", "[]", '"x"', '{"a":[' * 450 + "]}" * 450])
def test_a_draft_with_no_usable_config_is_refused_like_a_target(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    for models in ((str(tmp_path),), ("demo-target", str(tmp_path))):
        with pytest.raises(ModelError, match="is no JSON object of at most 100 levels"):
            LLM(*models)
