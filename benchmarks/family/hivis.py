"""What does a drafter gain, and pay, that is not told of the places of images?

Rows of one toy pair (toy_vision.py): plain decoding; the text draft with the places hidden, which is the
default; the same draft with the places in its prompt; a draft that was trained with them; and the drafter that reads
text and the target's hidden states. All texts are compared. Processor times are of this
process, which is all there is of a row: they hardly depend on what else the machine does.

python benchmarks/family/toy_vision.py toy
card train hivis --target toy/target --data toy/talks.jsonl --out toy/drafter --max-tokens 64
python benchmarks/family/hivis.py toy --out benchmarks/results/hivis.jsonl
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import click
import toy_vision
from options import append_lines, describe_run
from rich.console import Console
from rich.table import Table

from card.api.llm import LLM
from card.api.outputs import RequestOutput
from card.config import SamplingParams
from card.engine.metrics import RequestStats
from card.errors import BenchError

HELD_OUT_SEED = 77
ROWS: dict[str, tuple[str, str | None, bool]] = {  # method, draft, whether places are hidden
    "plain": ("vanilla", None, True),
    "hidden": ("sps", "draft", True),
    "kept": ("sps", "draft", False),
    "kept, trained so": ("sps", "draft-with-places", False),
    "hidden, card": ("card", "draft", True),
    "kept, card": ("card", "draft", False),
    "fused": ("sps", "drafter", True),
    "fused, kept": ("sps", "drafter", False),
}


@click.command()
@click.argument("pair", type=Path)
@click.option("--pictures", default=24, show_default=True, help="Held-out pictures.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each row; times are the least ones.")
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--max-tokens", default=64, show_default=True, help="Most tokens of an answer.")
@click.option("--out", type=Path, help="JSON lines are appended to it.")
def main(pair: Path, pictures: int, repeats: int, temperature: float, max_tokens: int, out: Path | None) -> None:
    """Print prompt lengths, acceptance and times of each row."""
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0).resolved()
    shown = list(itertools.islice(toy_vision.samples(HELD_OUT_SEED), pictures))
    llms = {name: _opened(pair, *row) for name, row in ROWS.items()}
    runs: dict[str, list[list[RequestOutput]]] = {name: [] for name in ROWS}
    cpu_s: dict[str, list[float]] = {name: [] for name in ROWS}
    for _, (name, llm) in itertools.product(range(repeats), llms.items()):
        started = time.process_time()
        runs[name].append([_answered(llm, one, params) for one in shown])
        cpu_s[name].append(time.process_time() - started)
    texts = [one.outputs[0].token_ids for one in runs["plain"][0]]
    for name, row in runs.items():
        if any([one.outputs[0].token_ids for one in run] != texts for run in row):
            raise BenchError(f"row {name} writes another text than plain decoding")
    right = sum(_is_right(one, said) for one, said in zip(shown, runs["plain"][0], strict=True))
    lines = [{"row": name, **_line(name, row), "temperature": temperature} for name, row in runs.items()]
    for line in lines:
        line["cpu_ms"] = 1000 * min(cpu_s[line["row"]]) / pictures
    table = Table("row", "prompt", "of it drafted from", "acceptance", "tokens a pass", "processor ms", "tokens/s")
    for line in lines:
        table.add_row(
            line["row"],
            *(f"{line[name]:.1f}" for name in ("prompt_tokens", "drafter_prompt_tokens")),
            f"{line['acceptance_rate']:.3f}",
            f"{line['tokens_a_pass']:.2f}",
            f"{line['cpu_ms']:.0f}",
            f"{line['tokens_per_s']:.0f}",
        )
    Console().print(table)
    print(f"{right} of {pictures} pictures are described rightly; all rows write the same text")
    if out is not None:
        facts = {"pictures": pictures, "repeats": repeats, "described_rightly": right, **describe_run()}
        append_lines(out, ({"benchmark": "hivis", **_rounded(line), **facts} for line in lines))


def _opened(pair: Path, method: str, draft: str | None, hides: bool) -> LLM:
    return LLM(
        str(pair / "target"),
        None if draft is None else str(pair / draft),
        method=method,
        placement=None if draft is None else "inline",
        dtype="float32",
        policy="fixed",
        hide_images=hides,
        max_images=1,
        threads=1,
        cache=False,
    )


def _answered(llm: LLM, one: toy_vision.Sample, params: SamplingParams) -> RequestOutput:
    llm.reset_prefix_cache()
    parts = [{"type": "image", "image": one.picture}, {"type": "text", "text": one.question}]
    return llm.chat([{"role": "user", "content": parts}], params)[0]


def _line(name: str, runs: list[list[RequestOutput]]) -> dict[str, float]:
    """Return the figures of a row: counts of one run, and the least times of several."""
    speculates = ROWS[name][0] != "vanilla"
    stats = [one.stats for one in runs[0]]
    num_new, passes = sum(one.num_new_tokens for one in stats), sum(one.target_passes for one in stats)
    verified, accepted = sum(one.verified_tokens for one in stats), sum(one.accepted_tokens for one in stats)
    return {
        "prompt_tokens": sum(one.num_prompt_tokens for one in stats) / len(stats),
        "drafter_prompt_tokens": speculates * sum(_read_by_drafter(one) for one in stats) / len(stats),
        "acceptance_rate": accepted / verified if verified else 0.0,
        "tokens_a_pass": (num_new - len(stats)) / passes,
        "verified_a_pass": verified / passes,
        "drafter_passes": sum(one.drafter_passes for one in stats) / len(stats),
        "drafter_ms": 1000 * min(sum(one.stats.drafter_busy_s for one in run) for run in runs) / len(stats),
        "prefill_ms": 1000 * min(sum(one.stats.prefill_s for one in run) for run in runs) / len(stats),
        "tokens_per_s": num_new / min(sum(one.stats.wall_s for one in run) for run in runs),
    }


def _read_by_drafter(stats: RequestStats) -> int:
    return stats.num_prompt_tokens - stats.hidden_prompt_tokens


def _is_right(one: toy_vision.Sample, said: RequestOutput) -> bool:
    """Return whether an answer has number, colour, shape and ground of the picture, and no other ones."""
    kinds = (toy_vision.NUMBERS, toy_vision.COLOURS, toy_vision.SHAPES, toy_vision.GROUNDS)
    said_words = toy_vision.make_tokenizer().convert_ids_to_tokens(list(said.outputs[0].token_ids))
    told, shown = ({word.removesuffix("s") for word in words} for words in (said_words, one.answer.split()))
    return all(told & set(kind) == shown & set(kind) for kind in kinds)


def _rounded(line: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in line.items()}


if __name__ == "__main__":
    main()
