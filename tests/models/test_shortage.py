"""Too little memory is called that: with what is needed, what there is and what would do, and never damage."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from card.cli.main import cli, main
from card.errors import ModelError, ShortageError
from card.machine.memory import is_shortage
from card.models.demo import demo_folder
from card.models.files.kept_weights import KeptWeights
from card.models.loading import load_decoder
from card.models.shortage import telling_shortage
from card.text.kept_lines import KeptLines
from tests.gguf_files import write_gguf
from tests.pair import Pair
from tests.processes import unhurried

# Lets a process that has imported so much take so many bytes of addresses more, and answer a prompt.
LIMITED = """
import resource, sys
from card.__main__ import main
for name in sys.argv[2].split():
    __import__(name)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (size, size))
sys.argv[1:] = ["generate", "hi", "--max-tokens", "2", "--dtype", "float32", "--no-cache"]
main()
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("imported", "num_bytes", "needs"), [("card", 300 << 20, ""), ("card.api.llm", 30 << 20, "demo-target has 0.03 GB")]
)
def test_a_process_with_too_few_addresses_ends_in_one_line(imported: str, num_bytes: int, needs: str) -> None:
    arguments = [sys.executable, "-c", LIMITED, str(num_bytes), imported]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    lines = unhurried(done.stderr).splitlines()
    assert (done.returncode, len(lines)) == (2, 1), done.stderr
    assert lines[0].startswith(f"card: error: there is not enough memory: {needs}")
    assert "under ulimit -v were left; take a smaller model" in lines[0] and "lower --max-model-len" in lines[0]
    assert "damage" not in lines[0] and "delete" not in lines[0]


def no_memory(*_: object, **__: object) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_converted_weights_that_cannot_be_mapped_are_not_called_damaged_and_stay(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = tmp_path / "model.gguf", tmp_path / "cache"
    write_gguf(demo_folder("draft"), file)
    load_decoder(str(file), dtype="float32", cache_dir=str(cache))
    kept = sorted(cache.rglob("*"))
    assert any(path.name == "model.safetensors" for path in kept)
    monkeypatch.setattr("card.models.files.mapped_weights.mmap.mmap", no_memory)
    said = r"not enough memory: .*model.gguf has .* of weights.*smaller model"
    with pytest.raises(ShortageError, match=said), telling_shortage(str(file)):
        load_decoder(str(file), dtype="float32", cache_dir=str(cache))
    assert sorted(cache.rglob("*")) == kept


def test_kept_weights_that_cannot_be_looked_at_for_want_of_memory_are_not_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KeptWeights(tmp_path / "kept")
    made = store.make("one", 4, lambda folder: (folder / "file").write_bytes(b"text") and None)
    assert made is not None
    with monkeypatch.context() as patch:
        patch.setattr("card.models.files.checksums.read_kept", no_memory)
        with pytest.raises(OSError, match="Cannot allocate"):
            store.make("one", 4, lambda _: pytest.fail("they are there"))
    assert store.find("one") == made


def test_finds_that_cannot_be_read_for_want_of_memory_are_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    KeptLines(tmp_path / "finds", {}).add("key", 1)
    monkeypatch.setattr(Path, "read_bytes", no_memory)
    with pytest.raises(OSError, match="Cannot allocate"):
        KeptLines(tmp_path / "finds", {})


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("std::bad_alloc"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("LLVM ERROR: Unable to allocate section memory!"),
    ],
    ids=str,
)
def test_shortages_are_known_by_what_raised_them(error: Exception) -> None:
    assert is_shortage(error)
    try:
        raise ModelError("damaged") from error
    except ModelError as wrapped:
        assert is_shortage(wrapped)


def test_other_errors_and_words_of_users_are_no_shortages() -> None:
    for error in (OSError(errno.ENOENT, "No such file"), ValueError("cut off"), ModelError("out of memory"), None):
        assert not is_shortage(error)
    with pytest.raises(ModelError, match=r"^damaged$"), telling_shortage("demo-target"):
        raise ModelError("damaged")


def test_the_command_says_memory_where_a_message_of_ours_says_damage(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ModelError("model is damaged; delete it") from MemoryError()

    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(SystemExit, match="2"):
        main()
    said = capfd.readouterr().err
    assert "not enough memory" in said and "damaged" not in said


@pytest.mark.timeout(20)
def test_a_chain_of_errors_that_leads_back_to_itself_ends() -> None:
    first, second = ModelError("damaged"), ValueError("cut off")
    first.__cause__, second.__cause__ = second, first
    assert not is_shortage(first)
