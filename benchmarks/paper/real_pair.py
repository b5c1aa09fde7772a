"""Make the tables of a real pair from a file of `card bench`: what each method is worth, with intervals over prompts.

    python benchmarks/paper/real_pair.py benchmarks/results/paper_qwen.jsonl.gz

Each figure is of all prompts together: tokens over passes, tokens over seconds. Its 95 % interval comes from drawing
prompts anew, with replacement, a thousand times. So it says what other prompts would give, not what other runs would.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from pages import markdown

from card.engine.metrics import RequestStats
from card.tools.bench.records import Sample
from card.tools.bench.results import load
from card.tools.bench.row_names import BASELINE

DRAWS = 1000
TITLES = {
    "gsm8k": "GSM8K",
    "humaneval": "HumanEval",
    "mbpp": "MBPP",
    "mgsm": "MGSM",
    "mt-bench": "MT-bench",
}
Key = tuple[str, int, int, int]  # of a decode: data set, prompt, turn and repeat
Figure = Callable[[Sequence[Sample], Sequence[Sample]], float]  # of a row's samples and of plain decoding's


def tokens_a_pass(samples: Sequence[Sample], _: Sequence[Sample]) -> float:
    """Return the tokens of a target pass, its own one included."""
    return sum(one.decode_tokens for one in samples) / sum(one.target_passes for one in samples)


def hit_rate(samples: Sequence[Sample], _: Sequence[Sample]) -> float:
    """Return the share of verifications whose next token was a candidate already."""
    total = RequestStats.joined([one.stats for one in samples if one.stats is not None])
    return total.hit_rate


def tokens_per_s(samples: Sequence[Sample], _: Sequence[Sample]) -> float:
    """Return the tokens of a second of decoding."""
    return sum(one.decode_tokens for one in samples) / sum(one.decode_s for one in samples)


def over_plain(samples: Sequence[Sample], plain: Sequence[Sample]) -> float:
    """Return the speed over that of plain decoding of the same prompts on all cores."""
    return tokens_per_s(samples, plain) / tokens_per_s(plain, plain)


def cell(figure: Figure, row: Mapping[Key, Sample], plain: Mapping[Key, Sample], keys: Sequence[Key]) -> str:
    """Return a figure with its interval over prompts; a dash for the hits of a row that has no drafter beside."""
    if figure is hit_rate and not figure(list(row.values()), []):
        return "–"
    rng = np.random.default_rng(0)
    prompts = sorted({key[:2] for key in keys})
    of = {prompt: [key for key in keys if key[:2] == prompt] for prompt in prompts}
    drawn = []
    for _ in range(DRAWS):
        chosen = [key for i in rng.integers(len(prompts), size=len(prompts)) for key in of[prompts[i]]]
        drawn.append(figure([row[key] for key in chosen], [plain[key] for key in chosen]))
    low, high = np.percentile(drawn, (2.5, 97.5))
    digits = 0 if figure is tokens_per_s else 2
    value = figure([row[key] for key in keys], [plain[key] for key in keys])
    return f"{value:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def tables_of(path: Path) -> str:
    """Return all tables of a file as Markdown, two for each of its runs. Raises: BenchError."""
    parts = []
    for run in load(path):
        by_row: dict[str, dict[Key, Sample]] = {}
        for one in run.samples:
            by_row.setdefault(one.row, {})[one.workload, one.prompt, one.turn, one.repeat] = one
        plain = by_row[BASELINE]
        names = [name for name in TITLES if any(key[0] == name for key in plain)]
        head = ["method", "tokens a pass", "hit rate", "tokens/s", "over plain"]
        figures = (tokens_a_pass, hit_rate, tokens_per_s, over_plain)
        rows = [[name, *(cell(one, row, plain, list(plain)) for one in figures)] for name, row in by_row.items()]
        each = [
            [name, *(cell(over_plain, row, plain, [key for key in plain if key[0] == data]) for data in names)]
            for name, row in by_row.items()
            if name != BASELINE
        ]
        title = f"Temperature {run.sampling.temperature:g}, {len({key[:2] for key in plain})} prompts"
        parts.append(f"{title}:\n\n{markdown(head, rows)}")
        parts.append(f"{title}, over plain:\n\n{markdown(['method', *(TITLES[name] for name in names)], each)}")
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="lines of card bench, packed or not")
    args = parser.parse_args(argv)
    print(tables_of(args.file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
