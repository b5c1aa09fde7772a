"""The documents: lines that fit, links that lead somewhere, examples that run, files that exist."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import unicodedata
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import card.drafting.local
import card.family
import card.models.architectures
from card.cli.main import cli
from card.config import registry
from card.config.method import Method
from card.drafting.local import find_writer, writer_names
from card.models.architectures import find_architecture
from card.models.own.decoder_model import read_decoder
from tests.tiny import tiny

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "card"
FOLDERS = (ROOT, ROOT / "docs", ROOT / "benchmarks", ROOT / "benchmarks" / "paper")
README_PAGES = sorted((ROOT / "src" / "card").rglob("README.md"))
PAGES = sorted(page for folder in FOLDERS for page in folder.glob("*.md")) + README_PAGES
MAX_COLUMNS = 110
MAX_RESULTS_BYTES = 4_000_000  # of the committed lines; benchmarks/README.md says how large files are packed
MAX_README_LINES = 110  # a screen and a half
MAX_PAGES, MAX_WORDS = 16, 28_300  # of docs/, about the core; what is beside it has a README.md next to its code
MAX_CHANGELOG_WORDS = 600
MAX_TABLE_CELLS = 8  # of a row; wider tables are for scripts to print
LINK = re.compile(r"\]\(([^)\s]+)\)")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of the lines outside of code blocks."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line


def _long_lines(text: str) -> list[int]:
    """Return the lines that are too long and could be folded: no table, no code, no heading, not one long word."""
    return [
        number
        for number, line in _prose(text)
        if len(line) > MAX_COLUMNS
        and not line.lstrip().startswith(("|", "#", "!["))
        and max(map(len, line.split())) < MAX_COLUMNS - 10
    ]


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    anchors = set()
    for _, line in _prose(page.read_text("utf-8")):
        if heading := re.match(r"#+ (.*)", line):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            kept = "".join(c for c in words if c in " -_" or unicodedata.category(c)[0] in "LN")
            anchors.add(kept.replace(" ", "-"))
    return anchors


def _broken_links(page: Path) -> list[str]:
    broken = []
    for _, line in _prose(page.read_text("utf-8")):
        for link in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            if link.startswith(("https://", "http://", "mailto:")):
                continue
            path, _, anchor = link.partition("#")
            place = (page.parent / path).resolve() if path else page
            if not place.exists() or (anchor and place.suffix == ".md" and anchor not in _anchors(place)):
                broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_lines_of_a_page_fit(page: Path) -> None:
    assert _long_lines(page.read_text("utf-8")) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "paper"], ids=_name)
def test_tables_of_a_page_are_narrow_enough_to_read(page: Path) -> None:
    rows = [line.strip().replace("\\|", "") for _, line in _prose(page.read_text("utf-8"))]
    assert [row for row in rows if row.startswith("|") and row.count("|") - 1 > MAX_TABLE_CELLS] == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert _broken_links(page) == []


def test_the_readme_is_short_and_the_list_of_pages_leads_to_every_one() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= MAX_README_LINES
    pages = ROOT / "docs"
    links = LINK.findall((pages / "README.md").read_text("utf-8"))
    listed = {(pages / link.partition("#")[0]).resolve() for link in links}
    assert {*pages.glob("*.md"), *README_PAGES} - {pages / "README.md"} - listed == set()


def test_the_pages_of_the_core_are_few_and_short_enough_to_read() -> None:
    pages = sorted((ROOT / "docs").glob("*.md"))
    words = {page.name: len(page.read_text("utf-8").split()) for page in pages}
    assert len(pages) <= MAX_PAGES, sorted(words)
    assert sum(words.values()) <= MAX_WORDS, words


def test_the_changelog_says_what_a_user_gets_in_few_words() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text("utf-8").split()) <= MAX_CHANGELOG_WORDS


def test_every_committed_result_is_named_by_a_page_and_all_together_stay_small() -> None:
    files = list((ROOT / "benchmarks" / "results").glob("*.jsonl*"))
    text = "".join(page.read_text("utf-8") for page in PAGES)
    assert [file.name for file in files if not re.search(rf"\b{re.escape(file.name)}(?!\.gz)", text)] == []
    assert sum(file.stat().st_size for file in files) <= MAX_RESULTS_BYTES


def test_the_rule_of_lines_exempts_what_cannot_be_folded() -> None:
    words, link = "word " * 30, "[a](https://example.org/" + "a" * MAX_COLUMNS + ")"
    assert _long_lines(f"{words}\n| {words} |\n```\n{words}\n```\n{link}\n{words}") == [1, 7]


def _code(text: str) -> list[str]:
    """Return the lines of blocks and the spans of code."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [" ".join(one.split(" #")[0].split()) for one in (*lines, *spans)]


def _commands(text: str) -> list[str]:
    """Return what is called in code: `card ...` and scripts of this repository."""
    return [one for one in _code(text) if re.match(r"(card [a-z][a-z-]*(?=\s|$)|python (benchmarks|scripts)/)", one)]


def _unknown_options(command: str) -> list[str]:
    """Return the long options of a command that it does not have."""
    words = command.split()
    asked = re.findall(r"(?<=\s)(--[a-z][\w-]*)", command)
    if words[0] == "python":
        script = ROOT / words[1]
        source = script.read_text("utf-8") if script.exists() else ""
        shared = [*script.parent.glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
        source += "".join(path.read_text("utf-8") for path in sorted(shared))
        return [words[1]] * (not script.exists()) + [option for option in asked if f'"{option}"' not in source]
    known = {"--help", "--version", "--help-all", "--verbose"}
    found: click.Command = cli
    for word in words[1:]:
        if not isinstance(found, click.Group):
            break
        if word not in found.commands:
            return [word]
        found = found.commands[word]
    known |= {option for param in found.params for option in (*param.opts, *param.secondary_opts)}
    return [option for option in asked if option not in known]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_of_a_page_exist_with_their_options(page: Path) -> None:
    unknown = {command: _unknown_options(command) for command in _commands(page.read_text("utf-8"))}
    assert {command: options for command, options in unknown.items() if options} == {}


def test_a_command_or_an_option_that_does_not_exist_is_found() -> None:
    text = "`card bench --data code`, `card bunch`\n```sh\ncard bench \\\n    --daten code  # --not-this\n```"
    assert [_unknown_options(command) for command in _commands(text)] == [["--daten"], [], ["bunch"]]
    assert _unknown_options("python benchmarks/engine/day.py --tables x") == ["--tables"]


def _wrong_installs(text: str) -> list[str]:
    """Return the commands of pip that take CARD from an index, where it is not, or name an extra that it lacks."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    wrong = []
    for command in re.findall(r"pip install\s[^`\n#]*(?:\n[^`\n#]*`)?", text):
        named = [extra for found in re.findall(r"\[([\w,]+)\]", command) for extra in found.split(",")]
        if "card-decoding" in command or not set(named) <= set(extras):
            wrong.append(" ".join(command.split()))
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_installs_of_a_page_work_from_a_checkout(page: Path) -> None:
    assert _wrong_installs(page.read_text("utf-8")) == []


def test_an_install_that_cannot_work_is_found() -> None:
    text = "```\npip install 'card-decoding[serve]'  # x\npip install \".[serve,grammar]\"\n```\n`pip install\n'.[no]'`"
    assert _wrong_installs(text) == ["pip install 'card-decoding[serve]'", "pip install '.[no]'"]


def test_targets_of_make_that_a_page_names_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    code = [one for page in PAGES for one in _code(page.read_text("utf-8"))]
    named = {found[1] for one in code if (found := re.match(r"make ([a-z-]+)", one))}
    assert "demo" in named
    assert named - targets == set()


def _places(path: str) -> list[Path]:
    """Return where a file may be that a page names: by its path, or by its name if it lies in a package."""
    return [ROOT / path, PACKAGE / path, *(PACKAGE.rglob(path) if "/" not in path else ())]


@pytest.mark.parametrize("page", [*sorted((ROOT / "docs").glob("*.md")), *README_PAGES], ids=_name)
def test_python_files_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"`([\w/]+\.py)`(?!\s+at [0-9a-f]{7})", page.read_text("utf-8")))  # here, at no old commit
    assert sorted(path for path in named if not any(place.exists() for place in _places(path))) == []


def test_files_that_the_life_of_a_request_names_exist() -> None:
    text = (ROOT / "docs" / "life-of-a-request.md").read_text("utf-8")
    named = set(re.findall(r"[`(]([\w/]+(?:\.py|/))[`)]", text))
    assert len(named) > 20
    assert sorted(path for path in named if not (PACKAGE / path).exists()) == []


def _blocks() -> list[str]:
    text = (ROOT / "docs" / "extending.md").read_text("utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_examples_of_extending_run() -> None:
    shared: dict[str, object] = {"__name__": "extending"}
    for block in _blocks():
        exec(compile(block, "docs/extending.md", "exec", dont_inherit=True), shared)


def test_the_files_that_extending_shows_are_found_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    files = {found[1]: block for block in _blocks() if (found := re.match(r"# src/card/(\S+)\n", block))}
    for path, block in files.items():
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(block, "utf-8")
        (place.parent / "__init__.py").touch()
    monkeypatch.setattr(
        card.drafting.local, "__path__", [*card.drafting.local.__path__, str(tmp_path / "drafting" / "local")]
    )
    monkeypatch.setattr(card.family, "__path__", [*card.family.__path__, str(tmp_path / "family")])
    for remembered in (registry.records, registry.methods):
        remembered.cache_clear()
    request.addfinalizer(lambda: [remembered.cache_clear() for remembered in (registry.records, registry.methods)])
    monkeypatch.setattr(
        card.models.architectures,
        "__path__",
        [*card.models.architectures.__path__, str(tmp_path / "models" / "architectures")],
    )
    assert "last_seen" in writer_names()
    assert find_writer("last_seen").top_k == 0
    assert runpy.run_path(str(tmp_path / "drafting" / "table.py"))["TableWriter"].layers_per_pass == 3
    methods = registry.methods()
    assert all(isinstance(methods[name], Method) for name in ("last_seen", "pairs"))
    assert methods["last_seen"].writers == ("last_seen",)
    entry, theirs = find_architecture("seed_oss"), CONFIG_MAPPING["seed_oss"]
    assert entry is not None
    defaults = entry.config_fields.defaults
    own = theirs.__annotations__.keys()  # without the fields that every config of transformers has
    assert {one.name: one.default for one in fields(theirs) if one.name in own}.items() <= defaults.items()
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    config = theirs(**tiny(32, **small, num_attention_heads=2, num_key_value_heads=1))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    assert read_decoder(tmp_path / "model", dtype="auto") is not None


def test_the_package_that_extending_shows_gives_a_method_that_is_listed_benched_and_exact(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "extending.md").read_text("utf-8")
    (module,) = re.findall(r"```python\n# card_thrice\.py\n(.*?)```", text, re.DOTALL)
    (project,) = re.findall(r"```toml\n# pyproject\.toml\n(.*?)```", text, re.DOTALL)
    told = tomllib.loads(project)["project"]
    (tmp_path / "card_thrice.py").write_text(module, "utf-8")
    made = tmp_path / f"card_thrice-{told['version']}.dist-info"  # what an installer makes of the two
    made.mkdir()
    (made / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {told['name']}\nVersion: {told['version']}\n", "utf-8"
    )
    ((group, points),) = told["entry-points"].items()
    lines = [f"{name} = {place}\n" for name, place in points.items()]
    (made / "entry_points.txt").write_text(f"[{group}]\n{''.join(lines)}", "utf-8")

    def said(*options: str) -> str:
        path = os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])
        command = [sys.executable, "-m", "card", *options]
        ran = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert {"method": "thrice", "summary": "draft three, verify", "from": "card-thrice"} in json.loads(
        said("methods", "--json")
    )
    told_rows = said("bench", "--methods", "thrice", "--data", "questions", "--limit", "1", "--repeats", "1",
                     "--max-tokens", "12", "--dtype", "float32", "--out", "out.jsonl", "--wide")  # fmt: skip
    assert "thrice-all-cores" in told_rows
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    checks = {one["row"]: one for one in records if one["kind"] == "check"}
    assert {"thrice", "thrice-all-cores"} <= checks.keys()
    assert all(one["num_equal"] == one["num_texts"] for one in checks.values())
