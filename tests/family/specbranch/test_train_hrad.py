"""`card train hrad`: what it writes and says, and that whatever is wrong with its input is one line and status 2."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from card.backends.transformers.loading import load_model
from card.family.specbranch.network import CLASSES, HRad
from card.models.facts import parameter_count
from card.models.runners import plain_runner
from tests.commands import Ran, run_command
from tests.pair import Pair

PROMPTS = [
    f"{first} {second} sat on the mat" for first in ("one", "two", "the") for second in ("cat", "seven", "other")
]
FEW = ("--layers", "1", "--max-tokens", "24", "--epochs", "2", "--dtype", "float32")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command inside this process."""
    return partial(run_command, capfd, "train", "hrad")


@pytest.fixture
def models(pair: Pair) -> tuple[str, ...]:
    return "--target", pair.target, "--draft", pair.draft


@pytest.fixture
def prompts_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(PROMPTS) + "\n", encoding="utf-8")
    return str(path)


def test_a_tiny_pair_gets_a_predictor_that_loads_and_classifies(run, pair, models, prompts_file, tmp_path):
    out = tmp_path / "hrad.safetensors"
    ran = run(*models, "--prompts", prompts_file, "--out", str(out), "--gamma", "3", *FEW)
    assert (ran.status, ran.err) == (0, "")
    for said in ("by prediction", "undecided", "accuracy", "always naming the commonest class", str(out)):
        assert said in ran.out
    target = load_model(pair.target, dtype="float32")
    num_parameters = parameter_count(target)
    runner = plain_runner(target, max_model_len=64)
    hrad = HRad.load(out)
    hrad.attach(runner, 0.5)
    facts = hrad.facts
    assert (facts.num_layers, facts.num_speculative_tokens, facts.draft) == (1, 3, "draft")
    assert (facts.hidden_size, facts.num_parameters) == (32, num_parameters)
    assert 0.0 < hrad.branch_below(np.zeros(32, np.float32), 9) < 1.0
    with safe_open(str(out), "pt") as file:
        metadata = file.metadata()
    assert len(metadata["test_recalls"].split()) == len(metadata["test_precisions"].split()) == len(CLASSES)
    assert "log loss" in ran.out


def test_the_same_seed_gives_the_same_predictor_and_json_lines_the_same_prompts(run, models, prompts_file, tmp_path):
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"question": one, "answer": "no"}) + "\n" for one in PROMPTS), encoding="utf-8")
    written = []
    for i, (file, seed) in enumerate(((prompts_file, "1"), (str(rows), "1"), (str(rows), "2"))):
        out = tmp_path / f"{i}.safetensors"
        assert run(*models, "--prompts", file, "--out", str(out), "--seed", seed, *FEW).status == 0
        written.append(HRad.load(out).layers[0][0])
    assert np.array_equal(written[0], written[1])
    assert not np.array_equal(written[0], written[2])


def test_the_built_in_prompts_do_and_only_the_first_are_taken_where_that_is_asked(run, models, tmp_path):
    out = tmp_path / "hrad.safetensors"
    counts = []
    for limit in ((), ("--max-prompts", "4")):
        ran = run(*models, "--out", str(out), *FEW, *limit)
        assert ran.status == 0
        counts.append(int(re.search(r"trained on ([\d,]+) rounds", ran.out)[1].replace(",", "")))
    assert counts[0] > 3 * counts[1]


def test_test_prompts_are_what_it_is_judged_by(run, models, prompts_file, tmp_path):
    test_file = tmp_path / "test.txt"
    test_file.write_text(PROMPTS[0] + "\n", encoding="utf-8")
    judged = []
    for extra in ((), ("--test-prompts", prompts_file), ("--test-prompts", str(test_file))):
        ran = run(*models, "--prompts", prompts_file, "--out", str(tmp_path / "hrad.safetensors"), *FEW, *extra)
        judged.append(int(re.search(r"of ([\d,]+) rounds", ran.out)[1].replace(",", "")))
    assert judged[1] > 4 * judged[2]
    assert judged[2] < 24, "a round gives one token or more"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--out", "{folder}/hrad"], "give --draft"),
        (["--target", "{missing}", "--draft", "{draft}", "--out", "{folder}/hrad"], "there is no folder"),
        (["--target", "{target}", "--draft", "{foreign_draft}", "--out", "{folder}/hrad"], "share one tokenizer"),
        (["PAIR"], "Missing option '--out'"),
        (["PAIR", "--out", "{folder}/no/where"], "to write where into; make it first"),
        (["PAIR", "--out", "{folder}"], "is a directory"),
        (["PAIR", "--out", "{folder}/hrad", "--layers", "2"], "the last 1 to 1 layers of this model, got 2"),
        (["PAIR", "--out", "{folder}/hrad", "--layers", "0"], "not in the range"),
        (["PAIR", "--out", "{folder}/hrad", "--gamma", "0"], "not in the range"),
        (["PAIR", "--out", "{folder}/hrad", "--prompts", "{folder}/none"], "does not exist"),
        (["PAIR", "--out", "{folder}/hrad", "--prompts", "{folder}/blank"], "holds no prompts"),
        (["PAIR", "--out", "{folder}/hrad", "--prompts", "{folder}/latin"], "not valid UTF-8"),
        (["PAIR", "--out", "{folder}/hrad", "--prompts", "{folder}/rows"], 'line 3: must .*with "question"'),
        (
            ["PAIR", "--out", "{folder}/hrad", "--layers", "1", "--prompts", "{folder}/long"],
            "begins 'the cat the cat .*leave it out",
        ),
        (["PAIR", "--out", "{folder}/hrad", "--layers", "1", "--max-prompts", "2"], "2 prompts have answers long"),
        (["PAIR", "--out", "{folder}/hrad", "--dtype", "int4"], "'int4' is not one of 'auto'"),
        (["PAIR", "--out", "{folder}/hrad", "--device", "toaster"], "device 'toaster' is not available"),
    ],
    ids=lambda value: None if isinstance(value, list) else value[:30],
)
def test_wrong_input_is_one_line_and_status_2(run, pair, tmp_path, args, said):
    (tmp_path / "blank").write_text("\n \n")
    (tmp_path / "latin").write_bytes("café".encode("latin-1"))
    (tmp_path / "rows").write_text('{"question": "one?"}\n\n{"answer": "two"}\n')
    (tmp_path / "long").write_text("the cat " * 4000)
    names = ("target", "draft", "foreign_draft", "missing")
    folders = {name: getattr(pair, name) for name in names} | {"folder": str(tmp_path)}
    if args[0] == "PAIR":
        args = ["--target", "{target}", "--draft", "{draft}", *args[1:]]
    elif "--target" not in args:
        args = ["--target", "{target}", *args]
    ran = run(*(arg.format(**folders) for arg in args))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("card: error: ")
    assert ran.err.count("\n") == 1, ran.err
    assert re.search(said, ran.err), ran.err
    assert not (tmp_path / "hrad").exists()
