"""Folders beside the core can be added and taken away, and nothing else is edited."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from card.models.files.gguf.header import read_header
from tests.commands import Ran
from tests.gguf_files import demo_tokenizer, save_model, write_gguf
from tests.server.running import command
from tests.sources import CORE_TESTS, PACKAGE

Env = dict[str, str] | None
PROMPT = "3 + 4 + 3 + 4 + 3 + 4"
KEPT = {"classic"}  # methods that are settings of the core
FILES = {
    "drafting/local/last_seen.py": """
        from collections.abc import Sequence
        from itertools import pairwise

        from card.drafting.local.protocol import LocalWriter, Observation, WriterSequence
        from card.tree.nodes import Nodes


        class LastSeenSequence(WriterSequence):
            def __init__(self, prompt_ids: Sequence[int]) -> None:
                self._next, self._last = dict(pairwise(prompt_ids)), prompt_ids[-1]

            def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
                token = self._next.get(self._last)
                return Nodes.chain([], []) if token is None else Nodes.chain([token], [-0.5])

            def observe(self, seen: Observation) -> None:
                self._next.update(pairwise((self._last, *seen.new_ids)))
                self._last = seen.new_ids[-1]


        class LastSeenWriter(LocalWriter):
            sequence = LastSeenSequence


        WRITER = LastSeenWriter
    """,
    "family/added/__init__.py": "",
    "family/added/record.py": """
        from dataclasses import dataclass

        from card.config.fields import Checked, setting
        from card.config.method import BenchRow, Method
        from card.config.record import Command, Record


        @dataclass(frozen=True, slots=True, kw_only=True)
        class AddedSettings(Checked):
            added: str | None = setting(None, "Head for added.", section="Models")
            kept: float | None = setting(None, "Judge: tokens as likely as this stay; not exact.", section="Method")


        RECORD = Record(
            methods=(
                Method(
                    name="added",
                    summary="a learned method",
                    needs_draft=False,
                    needs_head=True,
                    writers=("added",),
                    is_tuned=True,
                    reads=("added",),
                    rows=(
                        BenchRow(name="added", is_tuned=True),
                        BenchRow(name="added-plain", has_twin=True, draft={"budget": 3}),
                    ),
                ),
            ),
            settings=AddedSettings,
            writers={"added": "card.family.added.parts:AddedWriter"},
            verifier="card.family.added.parts:choose_verifier",
            draft_writer="card.family.added.parts:make_writer",
            commands=(Command("greet", "Say hello.", "card.family.added.parts:greet"),),
        )
    """,
    "family/added/parts.py": """
        import os
        from pathlib import Path

        import click

        from card.drafting.beam import BeamWriter
        from card.drafting.local.last_seen import LastSeenSequence
        from card.drafting.local.protocol import LocalWriter
        from card.errors import SettingsError
        from card.family.added.record import AddedSettings
        from card.tree.logits import as_array, softmax
        from card.tree.nodes import ROOT
        from card.tree.verify import Verdict


        class AddedWriter(LocalWriter):
            sequence = LastSeenSequence

            def __init__(self, settings, vocab_size, tokenizer="") -> None:
                super().__init__(settings, vocab_size, tokenizer)
                if settings.of(AddedSettings).added is None:
                    raise SettingsError("the writer added needs --added FILE")
                Path(settings.of(AddedSettings).added).read_bytes()


        class LikelyEnough:
            is_exact = False

            def __init__(self, least: float) -> None:
                self._least = least

            def decide(self, seen):
                probs, node, accepted = softmax(as_array(seen.logits)), ROOT, []
                while True:
                    below = [i for i, parent in enumerate(seen.offer.parents) if parent == node]
                    likely = [i for i in below if probs[node + 1, seen.offer.tokens[i]] >= self._least]
                    if not likely:
                        return Verdict(tuple(accepted), seen.choices[node + 1])
                    node = likely[0]
                    accepted.append(node)


        def choose_verifier(settings, given):
            least = settings.of(AddedSettings).kept
            return None if least is None else (LikelyEnough(least), f"kept {least}")


        class AddedDrafter(BeamWriter):
            def step(self, work):
                Path(os.environ["MARK"]).touch()
                return super().step(work)


        def make_writer(model, kv_cache_bytes=None, **asked):
            if "MARK" not in os.environ:
                return None
            return AddedDrafter(model, kv_cache_bytes, find_grammar=asked["find_grammar"])


        @click.command()
        def greet():
            click.echo("hello")
    """,
    "models/architectures/added_arch.py": """
        from card.models.architectures.architecture import (Architecture)
        from card.models.decoder_config import ConfigRule

        ARCHITECTURE = Architecture(model_class="AddedForCausalLM", config=ConfigRule(defaults={"vocab_size": 99}))
    """,
    "kernels/formats/added_blocks.py": """
        from card.kernels.formats.block_format import BlockFormat, Blocks, BlockShape, nibbles


        def split(raw):
            return Blocks(nibbles(raw[..., :16]), raw[..., 16:])


        SHAPE = BlockShape(part=32, bits=4, zero=8, scale="half")
        FORMATS = (BlockFormat(99, "ADDED_4", 32, 18, slice(16, 18), SHAPE, split),)
    """,
}


def copied(folder: Path, *, without: tuple[str, ...] = ()) -> Path:
    """Copy the package, but for folders named "group/folder"; returns the folder to import it from."""
    skipped = {PACKAGE / name for name in without}

    def ignore(place: str, names: list[str]) -> list[str]:
        if Path(place).name == "__pycache__":  # compiled modules go along, what another process is writing does not
            return [name for name in names if not name.endswith(".pyc")]
        return [name for name in names if Path(place) / name in skipped]

    shutil.copytree(PACKAGE, folder / "card", ignore=ignore, copy_function=os.link)
    return folder


# Runs commands one after the other in one process, and writes what each gave. For each it hides a folder, if it is told
# one, and then loads the package anew.
IN_TURN = """
    import contextlib, importlib, io, json, pathlib, sys, traceback

    place, told = pathlib.Path(sys.argv[1], "card"), []
    for words, hidden in json.loads(sys.argv[2]):
        if hidden is not None:
            (place / hidden).rename(place / "hidden")
            for name in [one for one in sys.modules if one.partition(".")[0] == "card"]:
                del sys.modules[name]
            importlib.invalidate_caches()
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        sys.argv = ["card", *words]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                importlib.import_module("card.cli.main").main()
            except SystemExit as ended:
                status = ended.code or 0
            except Exception:
                status = traceback.print_exc() or 1
            out.flush(), err.flush()
        told.append((status, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()))
        if hidden is not None:
            (place / "hidden").rename(place / hidden)
    print(json.dumps(told))
"""


def run_in_turn(root: Path, *commands: Sequence[str], env: Env = None) -> list[Ran]:
    """Run several commands with the package at ``root``: to start a process for each takes longer than many do."""
    return _in_turn(root, [(words, None) for words in commands], env)


def _in_turn(root: Path, commands: Sequence[tuple[Sequence[str], str | None]], env: Env = None) -> list[Ran]:
    ran = run(root, "-c", textwrap.dedent(IN_TURN), str(root), json.dumps(commands), env=env)
    assert ran.returncode == 0, ran.stderr
    return [Ran(*one) for one in json.loads(ran.stdout)]


def run(root: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `card`, or a Python program after "-c", with the package at ``root``."""
    words = arguments if arguments[0] == "-c" else ("-m", "card", *arguments)
    path = {"PYTHONPATH": str(root)}
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env={**os.environ, **path, **(env or {})},
        stdin=subprocess.DEVNULL,
        check=False,
    )


def generating(*options: str) -> list[str]:
    """Return the words of a command whose answer is in JSON."""
    usual = ("--max-tokens", "12", "--temperature", "0", "--policy", "fixed", "--json", "--dtype", "float32")
    return ["generate", PROMPT, *usual, *options]


def answer_of(ran: Ran) -> dict[str, Any]:
    """Return what such a command has answered."""
    assert ran.status == 0, ran.err
    answer: dict[str, Any] = json.loads(ran.out)
    return answer


def generate(root: Path, *options: str) -> dict[str, Any]:
    """Return what `card generate --json` answers with these options."""
    ran = run(root, *generating(*options))
    return answer_of(Ran(ran.returncode, ran.stdout, ran.stderr))


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with all that `FILES` adds."""
    root = copied(tmp_path_factory.mktemp("added"))
    for name, text in FILES.items():
        (root / "card" / name).parent.mkdir(exist_ok=True)
        (root / "card" / name).write_text(textwrap.dedent(text).lstrip(), "utf-8")
    (root / "head").touch()
    return root


def test_what_is_added_in_files_of_its_own_runs_from_the_command_line(added: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    *answers, greeting, methods, told, refused = run_in_turn(
        added,
        generating("--method", "vanilla"),
        generating("--method", "vanilla", "--writers", "last_seen"),
        generating("--method", "added", "--added", str(added / "head")),
        generating("--method", "sps"),
        generating("--method", "sps", "--kept", "0.01"),
        ["greet"],
        ["methods"],
        ["generate", "--help-all"],
        ["generate", PROMPT, "--method", "added"],
        env={"MARK": str(mark)},
    )
    *exact, inexact = map(answer_of, answers)
    assert len({answer["text"] for answer in exact}) == 1
    assert inexact["exact"] is False
    assert mark.exists(), "the drafter that was added has drafted"
    assert greeting.out == "hello\n"
    assert "family/added" in methods.out and "--added" in told.out
    assert "needs --added FILE" in refused.err


def test_what_is_added_runs_from_python(added: Path) -> None:
    code = f"""
        from card import LLM, SamplingParams
        from card.models.architectures import find_architecture
        params, same = SamplingParams(max_tokens=8, temperature=0.0), dict(dtype="float32", policy="fixed")
        texts = []
        for method, own in (("vanilla", {{}}), ("added", {{"added": {str(added / "head")!r}}})):
            with LLM("demo-target", method=method, **same, **own) as llm:
                texts.append(llm.generate([{PROMPT!r}], params)[0].outputs[0].text)
        assert texts[0] == texts[1], texts
        assert find_architecture("added_arch").make_config().vocab_size == 99
        from card.tools.bench.row_names import OURS, PRESETS, names_of
        rows = ["added", "added-plain", "added-plain-all-cores"]
        assert [name for name, row in OURS.items() if row.method == "added"] == rows
        assert set(names_of(["added-plain"])) == {{*rows[1:], "vanilla-all-cores"}}
        assert OURS["added-plain"].draft == {{"budget": 3}} and set(rows) < set(PRESETS["learned"])
    """
    ran = run(added, "-c", textwrap.dedent(code))
    assert ran.returncode == 0, ran.stderr


def rewritten(file: Path, to: Path) -> Path:
    """Write a file of Q4_0 in the blocks of type 99, which have their scale behind the numbers."""
    content = bytearray(file.read_bytes())
    for place in read_header(file).tensors.values():
        if place.type_id != Kind.Q4_0:
            continue
        name = place.name.encode()
        entry = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
        struct.pack_into("<I", content, entry + 4 + 8 * len(place.shape), 99)
        stop = place.offset + math.prod(place.shape) // 32 * 18
        blocks = np.frombuffer(content[place.offset : stop], np.uint8).reshape(-1, 18)
        content[place.offset : stop] = np.roll(blocks, -2, axis=1).tobytes()
    to.write_bytes(content)
    return to


def test_a_block_format_that_is_added_is_read_and_multiplied_by(added: Path, tmp_path: Path) -> None:
    save_model(tmp_path, "llama, other heads", demo_tokenizer())
    known = write_gguf(tmp_path, tmp_path / "known.gguf", kind=Kind.Q4_0)
    own = rewritten(known, tmp_path / "own.gguf")
    cells = [(file, dtype) for dtype in ("auto", "float32") for file in (known, own)]
    usual = generating("--method", "vanilla")
    ran = run_in_turn(
        added,
        *([*usual, "--target", str(file), "--dtype", dtype, "--cache-dir", str(tmp_path / f"{file.stem} {dtype}")]
          for file, dtype in cells),
    )  # fmt: skip
    texts = {cell: answer_of(one)["text"] for cell, one in zip(cells, ran, strict=True)}
    for dtype in ("auto", "float32"):
        assert texts[known, dtype] == texts[own, dtype] != ""
        assert bool([*(tmp_path / f"own {dtype}").rglob("blocks.json")]) == (dtype == "auto"), "as it is, or unpacked"
    without = run(PACKAGE.parent, "generate", PROMPT, "--target", str(own), "--method", "vanilla")
    assert without.returncode == 2 and "quantised as type 99" in without.stderr


def posted(url: str, path: str, body: dict[str, Any]) -> Any:
    """Return the answer of a server."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def asked(url: str) -> str:
    """Return the answer of a server to a completion."""
    body = {"model": "card", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    text: str = posted(url, "/v1/completions", body)["choices"][0]["text"]
    return text


def test_what_is_added_runs_over_http_and_from_a_file_of_settings(added: Path, tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(f"method: added\nadded: {added / 'head'}\ndtype: float32\nserved-model-name: card\n", "utf-8")
    with command(tmp_path, "--config", str(config), root=added) as server:
        told = asked(server.url)
    plain = generate(added, "--method", "vanilla", "--raw", "--max-tokens", "8")
    assert told == plain["text"]


def folders() -> list[str]:
    """Return all folders of satellites that may be deleted, as "group/folder"."""
    groups = ("family", "inside", "tools", "labs")
    places = (place for group in groups for place in sorted((PACKAGE / group).iterdir()))
    return [
        f"{place.parent.name}/{place.name}"
        for place in places
        if (place / "__init__.py").is_file() and place.name not in KEPT
    ]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package without any of the folders that may be deleted."""
    return copied(tmp_path_factory.mktemp("core"), without=tuple(folders()))


def test_without_the_folders_beside_it_the_core_writes_the_same(core: Path, tmp_path: Path) -> None:
    *answers, told, missing = run_in_turn(
        core,
        *(generating("--method", method) for method in ("vanilla", "card", "sps", "suffix")),
        ["--help"],
        ["generate", PROMPT, "--method", "pard"],
    )
    assert len({answer_of(one)["text"] for one in answers}) == 1
    assert told.status == 0
    assert missing.status == 2 and "unknown method 'pard'" in missing.err
    with command(tmp_path, "--dtype", "float32", "--served-model-name", "card", root=core) as server:
        assert asked(server.url)


def test_without_one_folder_all_others_are_found(tmp_path: Path) -> None:
    listing = ["methods", "--json"]
    all_there, *rest = _in_turn(copied(tmp_path), [(listing, None), *((listing, name) for name in folders())])
    places = {method["from"] for method in answer_of(all_there)}
    for name, ran in zip(folders(), rest, strict=True):
        assert ran.status == 0, f"without {name}: {ran.err}"
        assert {method["from"] for method in json.loads(ran.out)} == places - {name}


@pytest.mark.slow
@pytest.mark.timeout(14_400)  # it runs thousands of tests, an hour and more on a busy machine
def test_the_tests_of_the_core_pass_without_the_folders_beside_it(core: Path) -> None:
    root = PACKAGE.parents[1]
    places = [str(root / "tests" / name) for name in CORE_TESTS]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", *places],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(core)},
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]


# ---- a setting of a text ---------------------------------------------------------------------------------------------

EDITS = {  # file: pairs of a text in it, and what takes its place
    "config/sampling.py": (
        (
            '    SECTION: ClassVar[str] = "Text"\n',
            '    SECTION: ClassVar[str] = "Text"\n'
            '    never: int = setting(-1, "Token never written.", least=-1, most=999, in_request=EVERYWHERE)\n',
        ),
        ("    num_prompt_tokens: int\n", "    num_prompt_tokens: int\n    never: int = -1\n"),
        ("            min_tokens=params", "            never=params.never,\n            min_tokens=params"),
    ),
    "tree/shaping.py": (
        (
            "and not is_early.any():\n            return",
            "and not is_early.any() and self.rule.never < 0:\n            return",
        ),
        (
            "        if len(self._biases):\n",
            "        if self.rule.never >= 0:\n            shaped[:, self.rule.never] = -np.inf\n"
            "        if len(self._biases):\n",
        ),
    ),
}


@pytest.fixture(scope="module")
def with_a_setting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with one more sampling parameter: a token that is never written."""
    root = copied(tmp_path_factory.mktemp("setting"))
    for name, pairs in EDITS.items():
        file = root / "card" / name
        text = file.read_text("utf-8")
        for old, new in pairs:
            assert text.count(old) == 1, f"{name} has changed: {old}"
            text = text.replace(old, new)
        file.unlink()  # it is a link to the file of the package
        file.write_text(text, "utf-8")
    return root


def test_a_sampling_parameter_costs_its_declaration_and_its_effect(with_a_setting: Path, tmp_path: Path) -> None:
    root = with_a_setting
    plain = generate(root, "--method", "vanilla", "--raw")
    never = next(one for one in plain["token_ids"] if one)
    *answers, told, refused = run_in_turn(
        root,
        *(generating("--method", method, "--raw", "--never", str(never)) for method in ("vanilla", "sps")),
        ["generate", "--help-all"],
        ["generate", PROMPT, "--never", "1000"],
    )
    texts = {answer_of(one)["text"] for one in answers}
    assert len(texts) == 1 and texts != {plain["text"]}
    help_of_text = told.out.partition("\nText:")[2].partition("\n\n")[0]
    assert "--never INTEGER" in help_of_text and "[default: -1]" in help_of_text
    assert refused.status == 2 and "--never must be from -1 to 999, got 1000" in refused.err
    with command(tmp_path, "--dtype", "float32", "--served-model-name", "card", root=root) as server:
        body = {"model": "card", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "never": never}
        assert {posted(server.url, "/v1/completions", body)["choices"][0]["text"]} == texts
        options = {"num_predict": 12, "temperature": 0, "never": never}
        asked = {"model": "card", "prompt": PROMPT, "raw": True, "stream": False, "options": options}
        assert {posted(server.url, "/api/generate", asked)["response"]} == texts
        with pytest.raises(urllib.error.HTTPError) as caught:
            posted(server.url, "/v1/completions", {**body, "never": 1000})
        assert json.load(caught.value)["error"]["param"] == "never"
        with urllib.request.urlopen(f"{server.url}/openapi.json") as answer:
            schemas = json.load(answer)["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest"):
        field = schemas[name]["properties"]["never"]
        bounds = field["anyOf"][0]  # beside null
        assert (bounds["minimum"], bounds["maximum"], field["description"]) == (-1, 999, "Token never written.")


def test_the_page_of_commands_follows_from_a_declaration(with_a_setting: Path) -> None:
    script = PACKAGE.parents[1] / "scripts" / "make_cli_page.py"
    code = f"import runpy; print(runpy.run_path({str(script)!r})['cli_page']())"
    page = run(with_a_setting, "-c", code).stdout
    assert re.search(r"^--never=INTEGER +Token never written. \[-1\]$", page.partition("### Text\n")[2], re.MULTILINE)
