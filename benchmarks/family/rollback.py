"""What do PEARL and SpecBranch roll back, and does H-RAD help if it is obeyed? Counts, and no times.

`replay` runs both methods on recordings under the planner's clock, where a target pass takes as long as seven drafter
passes. So the same command gives the same counts. `hrad` runs the engine itself, as a recording holds no hidden states.
A rolled back token is a drafted one that the text ruled out; side branches do not count.

    python benchmarks/family/rollback.py replay --recording qwen-two-bits.rec --recording qwen.rec --lengths 2,4,7
    python benchmarks/family/rollback.py hrad --draft demo-draft --hrad demo --prompts heldout.jsonl --limit 30
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import click
from options import append_lines, describe_run, numbers, questions_of
from rich.console import Console
from rich.table import Table

from card.api.llm import LLM
from card.config import SamplingParams
from card.engine.metrics import RequestStats
from card.models.loading import load_tokenizer
from card.text.prompts import encode_chat
from card.tools.planner.profile import load_profile
from card.tools.planner.recording import load_recording
from card.tools.planner.scene import Scene
from card.tools.planner.simulate import Simulator

TARGET, DRAFT = "llama-3.1-70b-4xh100", "llama-3.2-1b-h100"  # flat passes, one as long as seven
COUNTS = (
    "target_passes",
    "rolled_back_tokens",
    "verified_tokens",
    "accepted_tokens",
    "drafter_layers",
    "drafter_passes",
)
FIGURES = ("tokens a target pass", "rolled back a token", "of the drafted path", "drafter passes a token")


@click.group(help=__doc__)
def main() -> None:
    """Group the two questions."""


@main.command()
@click.option("--recording", "recordings", multiple=True, required=True, type=Path, help="Of card record; several.")
@click.option("--lengths", default="2,4,7", show_default=True, help="Draft lengths.")
@click.option("--branch-below", "thresholds", default=(0.7,), multiple=True, show_default=True, help="Several.")
@click.option("--out", type=Path, help="JSON lines are appended to it.")
def replay(recordings: tuple[Path, ...], lengths: str, thresholds: tuple[float, ...], out: Path | None) -> None:
    """Count what both methods roll back on recordings."""

    def lines() -> Iterator[dict[str, Any]]:
        for path in recordings:
            recording = load_recording(path)
            simulator = Simulator(Scene(target=load_profile(TARGET), draft=load_profile(DRAFT), recording=recording))
            facts = {"recording": path.name, "agreement": round(recording.agreement(), 3)}
            for length in numbers(lengths):
                for method, below in (("pearl", None), *(("specbranch", one) for one in thresholds)):
                    settings = {"num_speculative_tokens": length} | ({"branch_below": below} if below else {})
                    run = simulator.run(method, settings)
                    yield _line("replay", method, length, run.stats, branch_below=below, **facts)

    _show(lines(), ("recording", "method", "branch_below", "num_speculative_tokens"), out)


@main.command()
@click.option("--target", default="demo-target", show_default=True)
@click.option("--draft", default="demo-draft", show_default=True)
@click.option("--hrad", required=True, help="Predictor that `card train hrad` made for the pair.")
@click.option("--prompts", type=Path, required=True, help="JSON lines with a question each.")
@click.option("--limit", default=30, show_default=True)
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--length", default=4, show_default=True, help="Draft length.")
@click.option("--out", type=Path, help="JSON lines are appended to it.")
def hrad(
    target: str, draft: str, hrad: str, prompts: Path, limit: int, max_tokens: int, length: int, **kw: Any
) -> None:
    """Count what SpecBranch rolls back without H-RAD, with it as evidence, and with it as an order."""
    tokenizer = load_tokenizer(target)
    asked = [encode_chat(tokenizer, [{"role": "user", "content": one}]) for one in questions_of(prompts, limit)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    rows = [("pearl", "off"), ("specbranch", "off"), ("specbranch", hrad), ("specbranch", f"obey:{hrad}")]
    told = ("–", "off", "evidence", "obeyed")

    def lines() -> Iterator[dict[str, Any]]:
        for (method, name), use in zip(rows, told, strict=True):
            settings = {"num_speculative_tokens": length, "policy": "fixed"}
            settings |= {"hrad": name} if name != "off" else {}
            with LLM(target, draft, method=method, **settings) as llm:
                stats = [llm.generate([one], params)[0].stats for one in asked]
            yield _line("hrad", method, length, stats, draft=draft, hrad=use)

    _show(lines(), ("draft", "method", "hrad"), kw["out"])


def _line(question: str, method: str, length: int, stats: Sequence[RequestStats], **facts: Any) -> dict[str, Any]:
    total = RequestStats.joined(stats)
    counts = {name: getattr(total, name) for name in COUNTS}
    tokens = total.num_new_tokens - len(stats)
    names = {"benchmark": "rollback", "question": question, "method": method, "num_speculative_tokens": length}
    return {**names, **facts, "texts": len(stats), "tokens": tokens, **counts, **describe_run()}


def figures(line: dict[str, Any]) -> list[str]:
    """Return the cells of a line, in the order of FIGURES."""
    tokens, rolled_back = line["tokens"], line["rolled_back_tokens"]
    return [
        f"{tokens / line['target_passes']:.2f}",
        f"{rolled_back / tokens:.2f}",
        f"{rolled_back / (rolled_back + line['accepted_tokens']):.0%}".replace("%", " %"),
        f"{line['drafter_passes'] / tokens:.2f}",
    ]


def _show(lines: Iterator[dict[str, Any]], names: Sequence[str], out: Path | None) -> None:
    table = Table(*names, *FIGURES)
    for line in lines:
        table.add_row(*(str(line[name]) for name in names), *figures(line))
        if out is not None:
            append_lines(out, [line])
    Console().print(table)


if __name__ == "__main__":
    main()
