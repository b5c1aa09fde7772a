"""A bench file is believed only if what it promises is there, once, in its order, and all texts are the same."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from card.errors import BenchError
from card.tools.bench.records import Run, Sample, TextDifference, planned, row_order
from card.tools.bench.results import ResultsWriter, load, read_unchecked
from tests.tools.bench.bench_files import make_run, write_run

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run(num_prompts=2, repeats=2)


def lines_of(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def write_lines(path: Path, lines: Lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def samples(lines: Lines, **wanted: Any) -> Lines:
    """Return the sample lines with these values."""
    return [one for one in lines if one["kind"] == "sample" and wanted.items() <= one.items()]


def without(lines: Lines, gone: dict[str, Any]) -> Lines:
    return [line for line in lines if line is not gone]


def test_what_was_written_is_read_back(run: Run, tmp_path: Path) -> None:
    (found,) = load(write_run(tmp_path / "a.jsonl", run))
    assert replace(found, samples=(), checks=()) == replace(run, samples=(), checks=())
    assert found.checks == run.checks and len(found.samples) == len(run.samples)
    for own, other in zip(found.samples, run.samples, strict=True):
        assert (own.key, own.token_ids, own.stats) == (other.key, other.token_ids, other.stats)
        assert own.decode_s == pytest.approx(other.decode_s, abs=1e-6)


def test_a_packed_file_is_read_like_the_file_in_it_and_a_broken_one_is_refused(run: Run, tmp_path: Path) -> None:
    file, packed = write_run(tmp_path / "a.jsonl", run), tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert load(packed) == load(file)
    for broken in (packed.read_bytes()[:-20], b"{}", packed.read_bytes()[:40] + b"xxxx" + packed.read_bytes()[44:]):
        packed.write_bytes(broken)
        with pytest.raises(BenchError, match="cannot be read"):
            load(packed)


def test_a_file_that_holds_states_and_reasons_in_one_text_is_read_as_one_that_says_them_apart(
    run: Run, tmp_path: Path
) -> None:
    lines = lines_of(write_run(tmp_path / "a.jsonl", run))
    for one in samples(lines, row="card"):
        one["stats"].update(drafter_state="down: it was killed", speculation="turns: 2.1 times plain decoding")
    for one in samples(lines):
        for name in ("drafter", "drafter_reason", "schedule", "schedule_reason"):
            del one["stats"][name]
    (found,) = load(write_lines(tmp_path / "b.jsonl", lines))
    stats = {sample.row: sample.stats for sample in found.samples}
    tuned, plain = stats["card"], stats[run.baseline]
    assert tuned is not None and plain is not None
    assert (tuned.drafter, tuned.drafter_reason) == ("down", "it was killed")
    assert (tuned.schedule, tuned.schedule_reason) == ("turns", "2.1 times plain decoding")
    assert (plain.drafter, plain.schedule, plain.schedule_reason) == ("none", "off", "no drafter")


def test_every_row_is_first_equally_often_and_repeats_are_outermost(run: Run) -> None:
    keys = list(planned(make_run(num_prompts=4, repeats=4)))
    firsts = keys[:: len(run.rows)]
    assert [key.repeat for key in keys] == sorted(key.repeat for key in keys)
    assert Counter(key.row for key in firsts) == {row.name: 4 for row in run.rows}
    for i in range(0, len(keys), len(run.rows)):
        block = keys[i : i + len(run.rows)]
        assert len({(key.prompt, key.repeat) for key in block}) == 1 and len({key.row for key in block}) == 4
    assert row_order(3, 4) == [1, 2, 0]


def test_all_rows_finish_a_turn_before_the_next_one(run: Run) -> None:
    two_turns = replace(run, workloads=(replace(run.workloads[0], turns=(2, 1)),))
    keys = [key for key in planned(two_turns) if key.repeat == 0]
    assert [(key.prompt, key.turn) for key in keys] == [(0, 0)] * 4 + [(0, 1)] * 4 + [(1, 0)] * 4
    assert [key.row for key in keys[:4]] == [key.row for key in keys[4:8]]


def drop_a_row(lines: Lines) -> Lines:
    return [one for one in lines if one not in samples(lines, row="card")]


def drop_one_sample(lines: Lines) -> Lines:
    return without(lines, samples(lines, row="sps", prompt=1)[0])


def drop_the_last_sample(lines: Lines) -> Lines:
    return without(lines, samples(lines)[-1])


def double_one_sample(lines: Lines) -> Lines:
    place = lines.index(samples(lines)[3])
    return [*lines[:place], lines[place], *lines[place:]]


def swap_outputs(lines: Lines) -> Lines:
    one, other = samples(lines, row="card", repeat=0)
    one["token_ids"], other["token_ids"] = other["token_ids"], one["token_ids"]
    return lines


def swap_samples(lines: Lines) -> Lines:
    one, other = (lines.index(sample) for sample in samples(lines, row="card", repeat=0))
    lines[one], lines[other] = lines[other], lines[one]
    return lines


def emit_other_text(lines: Lines) -> Lines:
    samples(lines, row="sps", prompt=1, repeat=1)[0]["token_ids"][7] = 3
    return lines


def emit_other_text_with_a_check_that_lies(lines: Lines) -> Lines:
    (check,) = (one for one in lines if one["kind"] == "check" and one["row"] == "sps")
    check["num_equal"] -= 1
    check["near_ties"] = [{"prompt": 1, "turn": 0, "position": 7, "gap": 0.01}]
    return emit_other_text(lines)


def drop_tokens(lines: Lines) -> Lines:
    samples(lines, row="card")[0]["token_ids"].pop()
    return lines


def count_other_tokens(lines: Lines) -> Lines:
    samples(lines, row="card")[0]["stats"]["num_new_tokens"] += 1
    return lines


def speed_up(lines: Lines) -> Lines:
    samples(lines, row="card")[0]["decode_s"] /= 2
    return lines


def turn_time_back(lines: Lines) -> Lines:
    samples(lines, row="card")[0]["token_times"][3][0] = 0.0
    return lines


def drop_a_check(lines: Lines) -> Lines:
    return without(lines, next(one for one in lines if one["kind"] == "check" and one["row"] == "card"))


def fail_a_check(lines: Lines) -> Lines:
    next(one for one in lines if one["kind"] == "check" and one["row"] == "card")["is_same"] = False
    return lines


def lose_a_field(lines: Lines) -> Lines:
    del samples(lines)[0]["prefill_s"]
    return lines


def lose_the_run_line(lines: Lines) -> Lines:
    return lines[1:]


def be_of_another_version(lines: Lines) -> Lines:
    lines[0]["version"] = 7
    return lines


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (drop_a_row, r"line \d+: sample of .*; expected .*row card: one is missing"),
        (drop_one_sample, r"line \d+: sample of .*; expected .*prompt 1.*row sps: one is missing"),
        (drop_the_last_sample, r"line \d+: the run says it is complete, but has no sample of"),
        (double_one_sample, r"line 6: sample of .*doubled"),
        (
            swap_outputs,
            r"line \d+: .*row card differs from vanilla-all-cores at token 0, which is no recorded near-tie",
        ),
        (swap_samples, r"out of its place"),
        (emit_other_text, r"row sps differs from vanilla-all-cores at token 7, which is no recorded near-tie"),
        (emit_other_text_with_a_check_that_lies, r"row sps differs .* no recorded near-tie"),
        (drop_tokens, r"40 new tokens, 39 token ids"),
        (count_other_tokens, r"40 new tokens, the engine counted 41"),
        (speed_up, r"prefill_s .* and decode_s .* are not those of token_times"),
        (turn_time_back, r"token_times run backwards"),
        (drop_a_check, r"row card.*texts were not compared; card bench --resume"),
        (fail_a_check, r"row card.*its check says that the texts are not those of plain decoding"),
        (lose_a_field, r"line 2: .*prefill_s"),
        (lose_the_run_line, r"line 1: sample of run run-1, which has no run line before it"),
        (be_of_another_version, r"line 1: version 7; this release reads 1"),
    ],
)
def test_a_file_that_was_tampered_with_is_refused_with_its_line(
    run: Run, tmp_path: Path, spoil: Callable[[Lines], Lines], reason: str
) -> None:
    path = write_run(tmp_path / "a.jsonl", run)
    write_lines(path, spoil(lines_of(path)))
    with pytest.raises(BenchError, match=reason) as error:
        load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "no JSON\n", "[1]\n", "{}\n", '{"kind": "run"}\n'])
def test_a_file_that_is_no_bench_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match=str(path)):
        load(path)
    with pytest.raises(BenchError, match="cannot be read"):
        load(tmp_path / "none.jsonl")


def half_precision(run: Run, position: int) -> Run:
    """Return the run in bfloat16, with a text that parts from the baseline's at the token 7."""
    near_tie = TextDifference(prompt=1, turn=0, position=position, gap=0.01)
    checks = [
        replace(one, num_equal=one.num_texts - 1, near_ties=(near_tie,)) if one.row == "sps" else one
        for one in run.checks
    ]
    changed = [
        replace(one, token_ids=(*one.token_ids[:7], 3, *one.token_ids[8:]))
        if (one.row, one.prompt, one.repeat) == ("sps", 1, 1)
        else one
        for one in run.samples
    ]
    return replace(run, dtype="bfloat16", checks=tuple(checks), samples=tuple(changed))


def test_in_half_precision_a_text_may_part_at_a_recorded_near_tie_and_nowhere_else(run: Run, tmp_path: Path) -> None:
    (found,) = load(write_run(tmp_path / "a.jsonl", half_precision(run, 7)))
    check = found.check_of(("demo-90M", "sps", "gsm8k"))
    assert check is not None and check.num_equal == check.num_texts - 1
    with pytest.raises(BenchError, match="differs from vanilla-all-cores at token 7"):
        load(write_run(tmp_path / "b.jsonl", half_precision(run, 6)))


def test_after_a_near_tie_later_turns_may_differ_and_earlier_ones_may_not(tmp_path: Path) -> None:
    run = make_run(num_prompts=1, repeats=1)
    two_turns = replace(run, dtype="bfloat16", workloads=(replace(run.workloads[0], turns=(2,)),))
    by_row = {sample.row: sample for sample in run.samples}

    def written(path: Path, *, parted_at: int) -> Path:
        taken = []
        for key in planned(two_turns):
            sample = replace(by_row[key.row], turn=key.turn)
            if key.row == "card" and key.turn >= parted_at:
                sample = replace(sample, token_ids=(sample.token_ids[0], 3 + key.turn, *sample.token_ids[2:]))
            taken.append(sample)
        near_tie = TextDifference(prompt=0, turn=0, position=1, gap=0.0)
        checks = [
            replace(one, num_texts=2, num_equal=parted_at if one.row == "card" else 2, near_ties=(near_tie,))
            for one in run.checks
        ]
        return write_run(path, replace(two_turns, samples=tuple(taken), checks=tuple(checks)))

    load(written(tmp_path / "a.jsonl", parted_at=0))
    with pytest.raises(BenchError, match=r"turn 1.*row card differs"):
        load(written(tmp_path / "b.jsonl", parted_at=1))


def interrupted(path: Path, run: Run, num_samples: int, *, torn: str = "") -> Path:
    """Write the first samples of a run, then perhaps a line that was cut off."""
    with ResultsWriter(path, run.run_id) as out:
        out.run(run)
        for sample in run.samples[:num_samples]:
            out.write(sample)
    with path.open("a", encoding="utf-8") as file:
        file.write(torn)
    return path


def test_a_run_that_was_killed_is_read_for_going_on_and_not_believed_before_its_texts_were_compared(
    run: Run, tmp_path: Path
) -> None:
    path = interrupted(tmp_path / "a.jsonl", run, 7, torn='{"kind":"sample","run_')
    found = read_unchecked(path)
    assert found.status == "interrupted" and len(found.samples) == 7
    with pytest.raises(BenchError, match=r"texts were not compared; card bench --resume"):
        load(path)


def test_a_resumed_run_is_one_run_and_another_one_under_its_name_is_refused(run: Run, tmp_path: Path) -> None:
    path = interrupted(tmp_path / "a.jsonl", run, 7, torn='{"kind":"sample","run_')

    def go_on(resumed: Run, rest: tuple[Sample, ...]) -> None:
        with ResultsWriter(path, run.run_id) as out:
            out.run(replace(resumed, resumed=True))
            for item in (*rest, *run.checks):
                out.write(item)
            out.end("complete")

    go_on(run, run.samples[7:])
    (found,) = load(path)
    assert found.status == "complete" and [one.key for one in found.samples] == list(planned(run))
    path.unlink()
    interrupted(path, run, 7)
    go_on(replace(run, max_tokens=99), run.samples[7:])
    with pytest.raises(BenchError, match="the resumed run has other max_tokens"):
        load(path)


def test_two_runs_in_one_file_are_two(run: Run, tmp_path: Path) -> None:
    path = write_run(write_run(tmp_path / "a.jsonl", run), replace(run, run_id="run-2"))
    assert [one.run_id for one in load([path])] == ["run-1", "run-2"]
    assert read_unchecked(path).run_id == "run-2" and read_unchecked(path, "run-1").run_id == "run-1"
