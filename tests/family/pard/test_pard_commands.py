"""`card train pard`: what it writes and says, that it goes on where it was cut off, and what it refuses in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from card.cli.parts.chosen_models import choose_models
from card.errors import SettingsError
from card.family.pard import command as train_pard
from card.models.files.known_pairs import KNOWN_PAIRS
from card.models.parallel_draft import FILE, STATES_FILE
from tests.commands import Ran, run_command
from tests.pair import Pair
from tests.trainings import cut_off_at_the_end, write_lines

TEXTS = [{"question": f"how many {what}?", "answer": f"the {what} sat on the mat"} for what in ("cat", "mat", "dog")]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command inside this process."""
    return partial(run_command, capfd, "train", "pard")


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write_lines(tmp_path / "texts.jsonl", TEXTS * 4)


def test_a_draft_model_becomes_a_folder_with_pard_json_and_a_cut_off_training_ends_alike(run, pair, data, tmp_path):
    out = tmp_path / "whole"
    ran = run("--draft", pair.draft, "--data", data, "--out", str(out), "--num-tokens", "3", "--epochs", "2")
    assert (ran.status, ran.err) == (0, "")
    assert re.search(r"[\d.]+ tokens a pass are right, .* without conditional drop it would have been", ran.out)
    facts = json.loads((out / FILE).read_text())
    assert (facts["num_tokens"], len(facts["training"]["hit_rates"])) == (3, 3)
    assert not (out / train_pard.CHECKPOINT).exists()

    again = tmp_path / "again"
    args = ("--draft", pair.draft, "--data", data, "--out", str(again), "--num-tokens", "3", "--epochs", "2")
    with cut_off_at_the_end(train_pard, "train_pard"):
        assert run(*args).status == 130
    assert (again / train_pard.CHECKPOINT).exists() and not (again / FILE).exists()
    other = run(*args[:-1], "1")
    assert (other.status, "is of another run: its epochs is 2, not 1" in other.err) == (2, True)
    assert run(*args).status == 0
    weights = [load_file(folder / "model.safetensors") for folder in (out, again)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


def test_a_target_teaches_and_one_of_another_vocabulary_is_refused(run, pair, data, tmp_path):
    out = tmp_path / "taught"
    args = ("--draft", pair.draft, "--data", data, "--out", str(out), "--num-tokens", "2")
    ran = run(*args, "--target", pair.target)
    assert (ran.status, ran.err) == (0, "")
    assert (out / FILE).exists()
    foreign = run(*args[:-3], str(tmp_path / "no"), "--target", pair.foreign_draft)
    assert (foreign.status, "does not fit the target" in foreign.err) == (2, True)


def test_a_drafter_of_a_target_reads_its_states_and_a_cut_off_training_ends_alike(run, pair, data, tmp_path):
    files = []
    for name in ("whole", "again"):
        out = tmp_path / name
        args = ("--draft", pair.draft, "--target", pair.target, "--target-features", "--data", data, "--out", str(out))
        if name == "again":
            with cut_off_at_the_end(train_pard, "train_pard"):
                assert run(*args, "--num-tokens", "2").status == 130
        ran = run(*args, "--num-tokens", "2")
        assert (ran.status, ran.err) == (0, "")
        files.append([load_file(out / file) for file in ("model.safetensors", STATES_FILE)])
    assert json.loads((out / FILE).read_text())["target_features"] == STATES_FILE
    assert all((one[name] == two[name]).all() for one, two in zip(*files, strict=True) for name in one)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--data", "{data}", "--out", "{folder}/out"], "give --draft, the model to adapt"),
        (
            ["--draft", "{draft}", "--target-features", "--data", "{data}", "--out", "{folder}/out"],
            "--target-features are those of a target; give --target too",
        ),
        (["--draft", "{missing}", "--data", "{data}", "--out", "{folder}/out"], "missing"),
        (["--draft", "{draft}", "--out", "{folder}/out"], "Missing option '--data'"),
        (["--draft", "{draft}", "--data", "{folder}/none", "--out", "{folder}/out"], "does not exist"),
        (["--draft", "{draft}", "--data", "{data}", "--out", "{data}"], "is a file"),
        (
            ["--draft", "{draft}", "--data", "{data}", "--out", "{data}/out"],
            "cannot be written: .*choose another place",
        ),
        (["--draft", "{draft}", "--data", "{data}", "--out", "{folder}/done"], "holds a finished drafter already"),
        (["--draft", "{draft}", "--data", "{data}", "--out", "{folder}/out", "--num-tokens", "65"], "must be 2 to 64"),
        (["--draft", "{draft}", "--data", "{data}", "--out", "{folder}/out", "--retention", "2"], "not in the range"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(run, pair: Pair, data, tmp_path, args, said):
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / FILE).write_text("{}")
    names = {"draft": pair.draft, "missing": pair.missing, "data": data, "folder": str(tmp_path)}
    ran = run(*(arg.format(**names) for arg in args))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("card: error: ") and ran.err.count("\n") == 1, ran.err
    assert re.search(said, ran.err), ran.err
    assert not (tmp_path / "out" / FILE).exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"--data": "broken.jsonl"}, "broken.jsonl, line 1: must be a JSON object"),
        ({"--out": "file/folder"}, "cannot be written"),
        ({"--target": "./nowhere"}, "there is no folder ./nowhere"),
    ],
)
def test_what_is_wrong_is_told_before_a_model_is_loaded(run, pair, data, tmp_path, monkeypatch, change, said):
    monkeypatch.setattr(train_pard, "load_adaptable", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "broken.jsonl").write_text("{}\n")
    (tmp_path / "file").touch()
    args = {"--draft": pair.draft, "--data": data, "--out": str(tmp_path / "out")}
    args |= {flag: value if value.startswith("./") else str(tmp_path / value) for flag, value in change.items()}
    ran = run(*(word for pair in args.items() for word in pair))
    assert (ran.status, said in ran.err) == (2, True), ran.err
    assert not (tmp_path / "out").exists()


def test_the_draft_model_of_a_known_pair_is_none_for_it() -> None:
    with pytest.raises(SettingsError, match="this needs a draft model"):
        choose_models({"method": "pard", "target": KNOWN_PAIRS[0].target.repository, "draft": None})
