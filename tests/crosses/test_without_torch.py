"""Each command and each method where PyTorch cannot be imported: it runs, or one line says which extra it needs."""

from __future__ import annotations

from pathlib import Path

from card.cli.parts.options import DEMO_DRAFT, DEMO_TARGET
from card.config.registry import all_methods, records
from card.tools.bench.row_names import THEIRS
from tests.crosses.typing import commands, needed, without_torch

NEEDS = "needs PyTorch and transformers, which are not installed; run "
# Commands that take long: the others' tests run them, and those of the core do so without PyTorch.
LONG = {"serve", "draft-server", "chat", "demo", "bench", "check-pair", "verify-machine", "profile", "record"}


def test_a_command_needs_the_extra_that_its_record_names_and_no_other_one_does(tmp_path: Path) -> None:
    extras = {one.name: one.extra for found in records() for one in found.record.commands}
    lines = [[*words, *needed(command, tmp_path)] for words, command in commands() if words[0] not in LONG]
    for line, (status, _, err) in zip(lines, without_torch(lines, tmp_path), strict=True):
        name = next((name for name in extras if name.split() == line[: len(name.split())] and name != "train"), "")
        if extras.get(name):
            assert status == 2 and err.startswith(f"card: error: card {name} {NEEDS}") and err.count("\n") == 1, line
            assert f"[{extras[name]}]" in err
        else:
            assert NEEDS not in err, line


def test_a_method_that_needs_an_extra_says_so(tmp_path: Path) -> None:
    """The others answer: test_doors.py asks them where PyTorch is not installed."""
    needing = {name: method for name, method in all_methods().items() if method.extra}
    drafts = {name: ["--draft", DEMO_DRAFT] if method.needs_draft else [] for name, method in needing.items()}
    heads = {name: [f"--{method.reads[0]}", "head"] for name, method in needing.items() if method.needs_head}
    lines = [["generate", "3 + 4", *drafts[name], "--method", name, *heads.get(name, ())] for name in needing]
    lines += [["generate", "3 + 4", "--writers", name] for name in needing if needing[name].writers]
    lines += [["bench", "--methods", f"vanilla,{name}", "--out", str(tmp_path / "out")] for name in THEIRS]
    for line, (status, _, err) in zip(lines, without_torch(lines, tmp_path), strict=True):
        assert status == 2 and err.count("\n") == 1 and NEEDS in err, (line, err)


def test_a_pair_with_our_own_pass_is_profiled_recorded_and_planned(tmp_path: Path) -> None:
    target, draft, texts = (str(tmp_path / name) for name in ("target.json", "draft.json", "texts"))
    lines = [
        ["profile", DEMO_TARGET, "--out", target, "--threads", "1"],
        ["profile", DEMO_DRAFT, "--out", draft, "--threads", "1"],
        ["record", "--out", texts, "--limit", "1", "--max-tokens", "12", "--methods", "sparsespec"],
        ["plan", "--target", target, "--draft", draft, "--recording", texts, "--methods", "vanilla,sps", "--no-search"],
    ]
    for line, (status, _, err) in zip(lines, without_torch(lines, tmp_path), strict=True):
        assert status == 0, (line, err)
