"""Count which tokens texts use, for drafting with a part of a vocabulary (`src/card/models/token_ranks.bin`).

    python scripts/count_tokens.py --data ../shared/data --tokenizers qwen3 llama3.1 gpt-oss gemma3 deepseek-v3

Texts: GSM8K (MIT), MBPP (CC BY 4.0), the first problems of MGSM (CC BY-SA 4.0), and modules and help of Python's
standard library (PSF-2.0), of which no text is kept: only how often each token occurs in them. Held out, to show what
the counts are worth: the last rows of GSM8K's test split, HumanEval (MIT), MT-Bench's questions (Apache-2.0), other
problems of MGSM, and some modules.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from card.models.draft_vocab import first_used
from card.models.token_ranks import FILE, is_byte_level, piece_of, write_ranks

_SIZES = (8192, 16384, 32768)
_OTHER_MODULES = ("asyncio", "email", "json", "unittest")  # held out
_LEAST = 2  # of all tokenizers together: what occurs once is chance
_MOST_BYTES = 200_000  # of one module: some are tables


def main() -> None:
    """Count, write the file and print the share of tokens of other texts that are among the first ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data files")
    parser.add_argument("--tokenizers", type=Path, nargs="+", required=True, help="folders or tokenizer.json files")
    asked = parser.parse_args()
    counted, held_out = list(_counted(asked.data)), list(_held_out(asked.data))
    totals: Counter[bytes] = Counter()
    tokenizers = {path: Tokenizer.from_file(str(_file(path))) for path in asked.tokenizers}
    for tokenizer in tokenizers.values():
        totals += _counts(tokenizer, counted)
    write_ranks([one for one, count in totals.most_common() if count >= _LEAST])
    print(f"{FILE}: {FILE.stat().st_size} bytes, of {sum(map(len, counted))} characters")
    for path, tokenizer in tokenizers.items():
        _report(path, tokenizer, held_out)


def _report(path: Path, tokenizer: Tokenizer, texts: list[str]) -> None:
    used = Counter(i for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False) for i in one.ids)
    total, vocabulary = used.total(), tokenizer.get_vocab()
    for size in _SIZES:
        first = sum(count for i, count in used.items() if i < size) / total
        ranked = set(first_used(vocabulary, size))
        print(
            f"{path.name}: {size} tokens are {first:.4f} of other texts by ids, "
            f"{sum(count for i, count in used.items() if i in ranked) / total:.4f} by counts"
        )


def _file(path: Path) -> Path:
    return path / "tokenizer.json" if path.is_dir() else path


def _counts(tokenizer: Tokenizer, texts: list[str]) -> Counter[bytes]:
    ids = Counter(i for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False) for i in one.ids)
    in_bytes = is_byte_level(tokenizer.get_vocab())
    found: Counter[bytes] = Counter()
    for i, count in ids.items():
        found[piece_of(tokenizer.id_to_token(i), in_bytes=in_bytes)] += count
    return found


def _rows(file: Path) -> list[str]:
    """Return all texts of each row of a file."""
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return ["\n".join(_texts(row)) for row in rows]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)


def _modules(*, held_out: bool) -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.rglob("*.py")):
        place = file.relative_to(library).parts
        if "site-packages" in place or "test" in place or "tests" in place:
            continue
        if (place[0] in _OTHER_MODULES) == held_out and file.stat().st_size <= 4 * _MOST_BYTES:
            yield file.read_text("utf-8", "ignore")[:_MOST_BYTES]


def _counted(data: Path) -> Iterator[str]:
    for name in ("gsm8k_train.jsonl", "mbpp.jsonl"):
        yield from _rows(data / name)
    yield from _rows(data / "mgsm.jsonl")[::2]
    yield from _modules(held_out=False)


def _held_out(data: Path) -> Iterator[str]:
    for name in ("humaneval.jsonl", "mt_bench.jsonl"):
        yield from _rows(data / name)
    yield from _rows(data / "gsm8k_test.jsonl")[-200:]
    yield from _rows(data / "mgsm.jsonl")[1::2]
    yield from list(_modules(held_out=True))[:40]


if __name__ == "__main__":
    main()
