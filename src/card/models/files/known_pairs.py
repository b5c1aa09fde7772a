"""Pairs of published GGUF files that work together: a target, and a small draft model of the same tokenizer.

Names and sizes of files are those of the hub; a file of other size is of a later revision, and no fault.
"""

from __future__ import annotations

from dataclasses import dataclass

_APACHE = "Apache-2.0"
_LLAMA_3_2 = "Llama 3.2 Community License"


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file on the hub."""

    model: str
    repository: str
    file: str
    num_bytes: int
    quantisation: str
    licence: str

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


_CODER_DRAFT = HubFile(
    "Qwen2.5-Coder 0.5B",
    "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    491_400_064,
    "Q4_K_M",
    _APACHE,
)
_QWEN2_DRAFT = HubFile(
    "Qwen2.5 0.5B",
    "Qwen/Qwen2.5-0.5B-Instruct-GGUF",
    "qwen2.5-0.5b-instruct-q4_k_m.gguf",
    491_400_032,
    "Q4_K_M",
    _APACHE,
)
_QWEN3_DRAFT = HubFile("Qwen3 0.6B", "Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf", 639_446_688, "Q8_0", _APACHE)
_LLAMA_DRAFT = HubFile(
    "Llama 3.2 1B",
    "bartowski/Llama-3.2-1B-Instruct-GGUF",
    "Llama-3.2-1B-Instruct-Q4_K_M.gguf",
    807_694_464,
    "Q4_K_M",
    _LLAMA_3_2,
)

KNOWN_PAIRS = (
    KnownPair(
        HubFile(
            "Qwen2.5-Coder 1.5B",
            "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            1_117_320_768,
            "Q4_K_M",
            _APACHE,
        ),
        _CODER_DRAFT,
        3_000_000_000,
    ),
    KnownPair(
        HubFile(
            "Qwen2.5-Coder 7B",
            "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF",
            "qwen2.5-coder-7b-instruct-q4_k_m.gguf",
            4_683_073_536,
            "Q4_K_M",
            _APACHE,
        ),
        _CODER_DRAFT,
        7_000_000_000,
    ),
    KnownPair(
        HubFile(
            "Qwen2.5 1.5B",
            "Qwen/Qwen2.5-1.5B-Instruct-GGUF",
            "qwen2.5-1.5b-instruct-q4_k_m.gguf",
            1_117_320_736,
            "Q4_K_M",
            _APACHE,
        ),
        _QWEN2_DRAFT,
        3_000_000_000,
    ),
    KnownPair(
        HubFile(
            "Qwen2.5 7B",
            "bartowski/Qwen2.5-7B-Instruct-GGUF",
            "Qwen2.5-7B-Instruct-Q4_K_M.gguf",
            4_683_074_240,
            "Q4_K_M",
            _APACHE,
        ),
        _QWEN2_DRAFT,
        7_000_000_000,
    ),
    KnownPair(
        HubFile("Qwen3 4B", "Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf", 2_497_280_256, "Q4_K_M", _APACHE),
        _QWEN3_DRAFT,
        6_300_000_000,
    ),
    KnownPair(
        HubFile("Qwen3 8B", "Qwen/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf", 5_027_783_488, "Q4_K_M", _APACHE),
        _QWEN3_DRAFT,
        8_800_000_000,
    ),
    KnownPair(
        HubFile(
            "Llama 3.2 3B",
            "bartowski/Llama-3.2-3B-Instruct-GGUF",
            "Llama-3.2-3B-Instruct-Q4_K_M.gguf",
            2_019_377_696,
            "Q4_K_M",
            _LLAMA_3_2,
        ),
        _LLAMA_DRAFT,
        5_000_000_000,
    ),
    KnownPair(
        HubFile(
            "Llama 3.1 8B",
            "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
            "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf",
            4_920_739_232,
            "Q4_K_M",
            "Llama 3.1 Community License",
        ),
        _LLAMA_DRAFT,
        8_100_000_000,
    ),
    KnownPair(
        HubFile(
            "SmolLM2 1.7B",
            "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF",
            "smollm2-1.7b-instruct-q4_k_m.gguf",
            1_055_609_536,
            "Q4_K_M",
            _APACHE,
        ),
        HubFile(
            "SmolLM2 360M",
            "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF",
            "smollm2-360m-instruct-q8_0.gguf",
            386_404_992,
            "Q8_0",
            _APACHE,
        ),
        4_400_000_000,
    ),
)


def known_file(repository: str) -> HubFile | None:
    """Return the file that is meant where a repository is named alone; None if it is not of the table."""
    files = (file for pair in KNOWN_PAIRS for file in (pair.target, pair.draft))
    return next((file for file in files if file.repository == repository), None)


def known_pair(target: str) -> KnownPair | None:
    """Return the pair of a target that is named by its repository or file; None if it is not of the table."""
    return next((pair for pair in KNOWN_PAIRS if target in (pair.target.repository, pair.target.name)), None)
