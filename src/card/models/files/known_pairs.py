"""Pairs of published GGUF files that work together: a target, and a small draft model of the same tokenizer.

Names and sizes of files are those of the hub; a file of other size is of a later revision, and no fault.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file on the hub."""

    model: str
    repository: str
    file: str
    num_bytes: int
    licence: str

    @property
    def quantisation(self) -> str:
        """The kind of most of its blocks, which files are named by."""
        return self.file.removesuffix(".gguf").rpartition("-")[2].upper()

    @property
    def name(self) -> str:
        """The name by which commands take it."""
        return f"{self.repository}/{self.file}"


@dataclass(frozen=True, slots=True)
class KnownPair:
    """A target with its draft model."""

    target: HubFile
    draft: HubFile
    memory_bytes: int  # both files, KV rows of one text of 4096 tokens in float32, and 1 GB for the programs

    @property
    def num_bytes(self) -> int:
        """Bytes of both files."""
        return self.target.num_bytes + self.draft.num_bytes

    @property
    def licences(self) -> tuple[str, ...]:
        """Licences of both, each once."""
        return tuple(dict.fromkeys((self.target.licence, self.draft.licence)))


def gigabytes(num_bytes: int) -> str:
    """Return a size as downloads show it, such as 1.6 GB."""
    return f"{num_bytes / 1e9:.1f} GB"


# By licence: the model, bytes, and the name by which commands take the file.
_FILES = {
    "Apache-2.0": """
    Qwen2.5-Coder 1.5B 1_117_320_768 Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf
    Qwen2.5-Coder 0.5B   491_400_064 Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf
    Qwen2.5-Coder 7B   4_683_073_536 Qwen/Qwen2.5-Coder-7B-Instruct-GGUF/qwen2.5-coder-7b-instruct-q4_k_m.gguf
    Qwen2.5 1.5B       1_117_320_736 Qwen/Qwen2.5-1.5B-Instruct-GGUF/qwen2.5-1.5b-instruct-q4_k_m.gguf
    Qwen2.5 0.5B         491_400_032 Qwen/Qwen2.5-0.5B-Instruct-GGUF/qwen2.5-0.5b-instruct-q4_k_m.gguf
    Qwen2.5 7B         4_683_074_240 bartowski/Qwen2.5-7B-Instruct-GGUF/Qwen2.5-7B-Instruct-Q4_K_M.gguf
    Qwen3 4B           2_497_280_256 Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q4_K_M.gguf
    Qwen3 0.6B           639_446_688 Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf
    Qwen3 8B           5_027_783_488 Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf
    SmolLM2 1.7B       1_055_609_536 HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF/smollm2-1.7b-instruct-q4_k_m.gguf
    SmolLM2 360M         386_404_992 HuggingFaceTB/SmolLM2-360M-Instruct-GGUF/smollm2-360m-instruct-q8_0.gguf
    """,
    "Llama 3.2 Community License": """
    Llama 3.2 3B       2_019_377_696 bartowski/Llama-3.2-3B-Instruct-GGUF/Llama-3.2-3B-Instruct-Q4_K_M.gguf
    Llama 3.2 1B         807_694_464 bartowski/Llama-3.2-1B-Instruct-GGUF/Llama-3.2-1B-Instruct-Q4_K_M.gguf
    """,
    "Llama 3.1 Community License": """
    Llama 3.1 8B       4_920_739_232 bartowski/Meta-Llama-3.1-8B-Instruct-GGUF/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf
    """,
}


def _file(licence: str, line: str) -> HubFile:
    model, num_bytes, name = line.rsplit(maxsplit=2)
    repository, _, file = name.rpartition("/")
    return HubFile(model.strip(), repository, file, int(num_bytes), licence)


_BY_MODEL = {
    file.model: file
    for licence, lines in _FILES.items()
    for file in (_file(licence, line) for line in lines.strip().splitlines())
}
KNOWN_PAIRS = tuple(
    KnownPair(_BY_MODEL[target], _BY_MODEL[draft], memory_bytes)
    for target, draft, memory_bytes in (
        ("Qwen2.5-Coder 1.5B", "Qwen2.5-Coder 0.5B", 3_000_000_000),
        ("Qwen2.5-Coder 7B", "Qwen2.5-Coder 0.5B", 7_000_000_000),
        ("Qwen2.5 1.5B", "Qwen2.5 0.5B", 3_000_000_000),
        ("Qwen2.5 7B", "Qwen2.5 0.5B", 7_000_000_000),
        ("Qwen3 4B", "Qwen3 0.6B", 6_300_000_000),
        ("Qwen3 8B", "Qwen3 0.6B", 8_800_000_000),
        ("Llama 3.2 3B", "Llama 3.2 1B", 5_000_000_000),
        ("Llama 3.1 8B", "Llama 3.2 1B", 8_100_000_000),
        ("SmolLM2 1.7B", "SmolLM2 360M", 4_400_000_000),
    )
)


def known_file(repository: str) -> HubFile | None:
    """Return the file that is meant where a repository is named alone; None if it is not of the table."""
    files = (file for pair in KNOWN_PAIRS for file in (pair.target, pair.draft))
    return next((file for file in files if file.repository == repository), None)


def known_pair(target: str) -> KnownPair | None:
    """Return the pair of a target that is named by its repository or file; None if it is not of the table."""
    return next((pair for pair in KNOWN_PAIRS if target in (pair.target.repository, pair.target.name)), None)
