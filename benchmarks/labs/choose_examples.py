"""How many scores of the target does the draft model save when in-context examples are chosen, and at what loss?

Both models score all sets once. Then the choice is played with many probes, and told from the scores.

python benchmarks/labs/choose_examples.py --data gsm8k_train.jsonl --out benchmarks/results/choose_examples.jsonl
python benchmarks/labs/choose_examples.py --data gsm8k_train.jsonl \\
    --instructions benchmarks/data/instructions.txt --trials 6
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

sys.path.append(str(Path(__file__).parents[1]))
import click
from options import append_lines, describe_run
from rich.console import Console
from rich.table import Table

from card.cascade import cascade_argmin, spearman
from card.cli.parts.files import read_prompts, read_records
from card.labs.cascade.examples import Beginning, PromptLoss, SolvedProblem, draw_example_sets
from card.models.facts import context_limit
from card.models.loading import load_decoder, load_tokenizer
from card.models.runners import make_runner

REDUCTIONS = (1.0, 2.0, 4.0, 8.0, 16.0)
PROBES = 200  # probes drawn for each trial and reduction


@click.command()
@click.option("--data", type=Path, required=True, help="JSON lines with question and answer.")
@click.option("--trials", default=4, show_default=True, help="Times that held-out problems and sets are drawn.")
@click.option("--candidates", default=32, show_default=True, help="Sets of a trial.")
@click.option("--instructions", type=Path, help="One a line; they are chosen from instead of sets, all of them.")
@click.option("--shots", default=2, show_default=True, help="Examples of a set.")
@click.option("--held-out", default=8, show_default=True, help="Problems that judge the sets.")
@click.option("--target", default="demo-target", show_default=True)
@click.option("--draft", default="demo-draft", show_default=True)
@click.option("--out", type=Path, help="JSON lines are appended to it.")
def main(
    data: Path,
    trials: int,
    candidates: int,
    instructions: Path | None,
    shots: int,
    held_out: int,
    target: str,
    draft: str,
    out: Path | None,
) -> None:
    """Print how much is scored and lost, for several reductions."""
    problems = [SolvedProblem(one["question"], one["answer"]) for one in read_records(data, "question", "answer")]
    given = read_prompts(instructions, "instruction") if instructions else None
    scores = []
    for seed in range(trials):
        random.Random(seed).shuffle(problems)
        asked: Sequence[Beginning] = given or draw_example_sets(
            problems[held_out:], shots=shots, count=candidates, seed=seed
        )
        scores.append([_scores(name, problems[:held_out], asked) for name in (draft, target)])
        print(f"trial {seed}: rank correlation {spearman(*scores[-1]):.3f}", flush=True)
    table = Table("reduction", "scored by the target", "the best one found", "regret", "of the spread", "random sets")
    for reduction in REDUCTIONS:
        line = _played(scores, reduction)
        table.add_row(f"{reduction:g}", *(f"{value:.3g}" for value in line.values()))
        if out is not None:
            kind = {"instructions": instructions.name} if instructions else {"shots": shots}
            facts = {"reduction": reduction, "trials": trials, "candidates": len(asked), **kind}
            line = {**facts, **line, "draft_alone_over_spread": _draft_alone(scores)}
            append_lines(out, [{**_rounded(line), **describe_run()}])
    Console().print(table)
    print(f"the draft model's best set alone: {_draft_alone(scores):.3g} of the spread")


def _scores(name: str, judges: list[SolvedProblem], asked: Sequence[Beginning]) -> list[float]:
    model = load_decoder(name)
    loss = PromptLoss(make_runner(model, max_model_len=context_limit(model)), load_tokenizer(name), judges)
    return [loss(one) for one in asked]


def _played(scores: list[list[list[float]]], reduction: float) -> dict[str, float]:
    """Return means: the share scored exactly, how often the best was found, the regret in nats per token.

    The last two are regrets over the spread, which is the mean set's: that of the cascade, and that of as many exact
    scores of sets that were drawn.
    """
    shares, regrets, relative, drawn = [], [], [], []
    for cheap, exact in scores:
        spread = fmean(exact) - min(exact)
        for seed in range(PROBES):
            choice = cascade_argmin(
                range(len(exact)),
                cheap.__getitem__,
                exact.__getitem__,
                reduction=reduction,
                seed=seed,
                measures_regret=True,
            )
            assert choice.regret is not None
            shares.append(choice.num_exact / len(exact))
            regrets.append(choice.regret)
            relative.append(choice.regret / spread)
            drawn.append((min(random.Random(seed).sample(exact, choice.num_exact)) - min(exact)) / spread)
    return {
        "share_scored": fmean(shares),
        "best_found": fmean(regret == 0.0 for regret in regrets),
        "regret": fmean(regrets),
        "regret_over_spread": fmean(relative),
        "random_over_spread": fmean(drawn),
    }


def _draft_alone(scores: list[list[list[float]]]) -> float:
    """Return the mean regret over the spread of the set that the draft model likes best."""
    lost = [(exact[cheap.index(min(cheap))] - min(exact)) / (fmean(exact) - min(exact)) for cheap, exact in scores]
    return fmean(lost)


def _rounded(line: dict[str, float | str]) -> dict[str, float | str]:
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in line.items()}


if __name__ == "__main__":
    main()
