"""The toy pair that speaks of pictures is made of seeds alone, and each row of the run on it is compared with plain."""

from __future__ import annotations

import itertools

import numpy as np

from tests.benchmarks.scripts import lines_of
from tests.commands import run_command


def test_samples_are_the_same_for_a_seed_and_every_word_is_a_token(bench):
    toy = bench["toy_vision"]
    one, again, other = (list(itertools.islice(toy.samples(seed), 20)) for seed in (5, 5, 6))
    assert [np.asarray(s.picture).tobytes() for s in one] == [np.asarray(s.picture).tobytes() for s in again]
    assert [s.answer for s in one] == [s.answer for s in again] != [s.answer for s in other]
    tokenizer = toy.make_tokenizer()
    for sample in one:
        assert tokenizer.unk_token_id not in tokenizer(f"{sample.question} {sample.answer}")["input_ids"]
        assert tokenizer.convert_tokens_to_ids("<unk>") not in tokenizer(sample.answer)["input_ids"]


def test_a_run_has_a_line_for_each_row_with_its_prompt_lengths(bench, tmp_path, capfd):
    sizes = ["--steps", "1", "--draft-steps", "1", "--talks", "4"]
    bench["toy_vision"].main([str(tmp_path), *sizes], standalone_mode=False)
    talks, drafter = str(tmp_path / "talks.jsonl"), str(tmp_path / "drafter")
    of = ["--target", str(tmp_path / "target"), "--data", talks, "--out", drafter]
    assert run_command(capfd, "train", "hivis", *of, "--max-tokens", "6", "--epochs", "1").status == 0
    out = tmp_path / "out.jsonl"
    short = ["--pictures", "1", "--repeats", "1", "--max-tokens", "8"]
    bench["hivis"].main([str(tmp_path), *short, "--out", str(out)], standalone_mode=False)
    lines = {line["row"]: line for line in lines_of(out)}
    assert list(lines) == list(bench["hivis"].ROWS)
    num_places = bench["toy_vision"].NUM_PLACES
    assert lines["kept"]["drafter_prompt_tokens"] == lines["kept"]["prompt_tokens"]
    for row in ("hidden", "fused"):
        assert lines[row]["drafter_prompt_tokens"] == lines[row]["prompt_tokens"] - num_places
