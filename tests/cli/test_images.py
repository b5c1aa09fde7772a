"""`card generate --image`: the text of the Python API, and one line for what cannot be shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from card.api.llm import LLM
from card.config import SamplingParams
from tests.commands import run_command
from tests.seeing import asked, picture, save_seeing


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("seeing")
    save_seeing("llava", folder)
    return str(folder)


def test_an_answer_about_images_is_that_of_the_python_api(seeing, tmp_path, monkeypatch, capfd):
    for seed in (1, 2):
        picture(seed).save(tmp_path / f"{seed}.png")
    monkeypatch.chdir(tmp_path)  # one is named from here, one from the root
    images = ["--image", "1.png", "--image", str(tmp_path / "2.png")]
    models = ["--target", seeing, "--dtype", "float32", "--method", "vanilla"]
    how = ["--temperature", "0", "--max-tokens", "12", "--json"]
    ran = run_command(capfd, "generate", "the cat", *models, *images, *how)
    assert ran.status == 0, ran.err
    with LLM(seeing, method="vanilla", dtype="float32", max_images=2) as llm:
        wanted = llm.chat(asked("the cat", picture(1), picture(2)), SamplingParams(temperature=0.0, max_tokens=12))[0]
    assert json.loads(ran.out)["token_ids"] == list(wanted.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--image", "{folder}/cut.png"], "image 0 is cut off or damaged"),
        (["--image", "{folder}/text.png"], "image 0 is no picture in PNG"),
        (["--image", "{folder}/none.png"], "none.png"),
        (["--image", "{folder}/whole.png", "--raw"], "--image needs the chat template"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(seeing, tmp_path, capfd, args, said):
    picture(1).save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no picture", encoding="utf-8")
    named = [arg.format(folder=tmp_path) for arg in args]
    ran = run_command(capfd, "generate", "the cat", "--target", seeing, "--dtype", "float32", *named)
    assert ran.status == 2
    assert said in ran.err and "Traceback" not in ran.err


def test_a_target_without_eyes_says_so(pair, tmp_path: Path, capfd):
    picture(1).save(tmp_path / "whole.png")
    ran = run_command(capfd, "generate", "hi", "--target", pair.target, "--image", str(tmp_path / "whole.png"))
    assert ran.status == 2
    assert "take no images here" in ran.err and "Traceback" not in ran.err
