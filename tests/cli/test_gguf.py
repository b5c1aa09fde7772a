"""Every command that loads models takes GGUF files, and says in one line what is wrong with one."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from tests.commands import run_command
from tests.gguf_files import demo_tokenizer, save_model, write_gguf

pytestmark = pytest.mark.timeout(240)
PROMPT = "Anna has 25 apples."
WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Hiding:
    find_distributions = PathFinder.find_distributions

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
from card.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pair in folders and in files, and files that cannot be used; not to be changed."""
    root = tmp_path_factory.mktemp("files")
    save_model(root / "target", "llama", demo_tokenizer())
    save_model(root / "draft", "llama", demo_tokenizer(), noise=0.1)
    other = demo_tokenizer()
    other.add_tokens(["<|more|>"])
    save_model(root / "foreign", "llama", other)
    made = {name: write_gguf(root / name, root / f"{name}.gguf") for name in ("target", "draft", "foreign")}
    for name, share in (("cut", 0.5), ("stub", 0.01)):
        made[name] = root / f"{name}.gguf"
        made[name].write_bytes(made["target"].read_bytes()[: int(made["target"].stat().st_size * share)])
    made["small"] = write_gguf(root / "target", root / "small.gguf", kind=Kind.Q8_0)
    return {**made, "folder": root / "target"}


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command inside this process; returns its status and what it wrote."""

    def run_here(*args: str | Path) -> tuple[int, str, str]:
        ran = run_command(capfd, *map(str, args))
        return ran.status, ran.out, ran.err

    return run_here


def test_generate_writes_the_text_of_the_folder_at_each_start(run, files, tmp_path):
    common = ["--dtype", "float32", "--max-tokens", "16", "--raw", "--cache-dir", tmp_path / "cache"]
    status, expected, _ = run("generate", "--target", files["folder"], "--method", "vanilla", *common, PROMPT)
    assert status == 0
    for _ in range(2):
        pair = ["--target", files["target"], "--draft", files["draft"], "--placement", "inline"]
        status, text, said = run("generate", *pair, *common, PROMPT)
        assert (status, text) == (0, expected), said
    assert (tmp_path / "cache" / "gguf").is_dir()


def installed_with(lines: Iterable[str]) -> set[str]:
    """Return the names of the packages that these requirements bring, where they are installed."""
    found: set[str] = set()
    waiting = list(lines)
    while waiting:
        name = re.split(r"[^\w.-]", waiting.pop())[0].lower().replace("_", "-")
        with contextlib.suppress(PackageNotFoundError):
            if name not in found:
                waiting += [line for line in requires(name) or () if "extra ==" not in line]
            found.add(name)
    return found


def brought_by_extras() -> set[str]:
    """Return the modules that come with extras of this package alone."""
    lines = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    base = installed_with(lines["dependencies"])
    extras = installed_with(line for extra in lines["optional-dependencies"].values() for line in extra)
    more = extras - base - {"card-decoding"}
    owners = packages_distributions().items()
    return {module for module, names in owners if {name.lower().replace("_", "-") for name in names} <= more}


def test_no_extra_is_needed(files, tmp_path):
    assert {"PIL", "fastapi", "llguidance", "scipy"} <= brought_by_extras()
    pair = ["--target", files["small"], "--draft", files["draft"]]
    options = ["--cache-dir", tmp_path / "cache", "--max-tokens", "4", "--raw", PROMPT]
    command = [sys.executable, "-c", WITHOUT.format(hidden=brought_by_extras()), "generate", *pair, *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr


def test_a_target_alone_drafts_from_its_own_text_and_says_so_once(run, files, tmp_path):
    common = ["--dtype", "float32", "--max-tokens", "24", "--raw", "--cache-dir", tmp_path / "cache"]
    common += ["--policy", "fixed", "--threads", "1", "--target", files["target"]]
    status, expected, said = run("generate", "--method", "vanilla", *common, PROMPT)
    assert (status, said.count("\n"), "24 tokens are the most" in said) == (0, 1, True)
    status, text, said = run("generate", "--stats", *common, PROMPT)
    assert (status, text) == (0, expected)
    assert said.startswith("card: no draft model is given, so method suffix drafts from the text itself")
    assert "\nsuffix: " in said
    status, _, said = run("chat", *[one for one in common if one != "--raw"])
    assert status == 0
    assert said.count("\n") == said.count("no draft model is given") == 1
    status, _, said = run("generate", "--method", "card", *common, PROMPT)
    assert (status, said.count("\n")) == (2, 1)
    assert "needs a draft model; give --draft, or --method vanilla" in said


def test_without_a_cache_nothing_is_kept(run, files, tmp_path):
    options = ["--method", "vanilla", "--no-cache", "--cache-dir", tmp_path / "cache", "--max-tokens", "4"]
    assert run("generate", "--target", files["target"], *options, PROMPT)[0] == 0
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("target", "draft", "said"),
    [
        ("cut", "draft", "is cut off: "),
        ("stub", "draft", "is cut off or damaged: it ends inside its header"),
        ("target", "cut", "is cut off: "),
        ("target", "foreign", "the draft's has"),
        ("missing", "draft", "there is no file"),
        ("cut", None, "is cut off: "),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line_and_status_2(run, files, tmp_path, target, draft, said):
    models = ["--target", files.get(target, tmp_path / f"{target}.gguf")]
    models += [] if draft is None else ["--draft", files[draft], "--placement", "inline"]
    status, out, err = run("generate", *models, "--cache-dir", tmp_path / "cache", PROMPT)
    assert (status, out) == (2, "")
    assert err.startswith("card: error: ")
    assert err.count("\n") == 1
    assert said in err
    assert not list(tmp_path.rglob("*.unfinished"))
