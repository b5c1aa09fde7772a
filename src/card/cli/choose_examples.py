"""`card choose-examples`: in-context examples chosen by the target's loss, most sets left out by the draft model's."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import torch
from rich.console import Console
from rich.text import Text

from card.assembly.plan import DEFAULT_MODEL_LEN
from card.cascade.examples import ExampleLoss, Examples, SolvedProblem, draw_example_sets
from card.cascade.search import CascadeChoice, cascade_argmin
from card.cli.files import read_records
from card.cli.options import resolve_models
from card.cli.starting import Say, spinner
from card.cli.tables import table
from card.errors import PromptError
from card.models.facts import context_limit
from card.models.loading import load_decoder, load_tokenizer
from card.models.runners import make_runner

_NEEDS = "question", "answer"


@dataclass(frozen=True, slots=True)
class ChosenExamples:
    """The examples that were chosen, and what that took."""

    examples: Examples
    target: str
    draft: str
    loss: float  # of the target with them, nats per token of the held-out answers
    mean_loss: float  # the same over the sets of the probe, which were drawn at random
    correlation: float | None
    sets: int
    target_sets: int  # how many of them the target scored
    target_passes: int
    draft_passes: int
    regret: float | None  # loss above that of the best set; None: not measured


def run(*, data: Path, shots: int, candidates: int, held_out: int, seed: int, as_json: bool, **options: Any) -> None:
    """Do what `card choose-examples` was asked for. Raises: CardError of any kind."""
    target, draft = resolve_models(options, needs_draft=True)
    assert draft is not None
    problems = [SolvedProblem(*(one[key] for key in _NEEDS)) for one in read_records(data, *_NEEDS)]
    random.Random(seed).shuffle(problems)
    judges, pool = problems[:held_out], problems[held_out:]
    sets = draw_example_sets(pool, shots=shots, count=candidates, seed=seed)
    measures_regret = options.pop("regret")
    torch.set_num_threads(options.pop("threads") or torch.get_num_threads())
    with spinner("loading the models") as say:
        exact, cheap = (_load(name, judges, options) for name in (target, draft))
        choice = cascade_argmin(
            sets, _told(cheap, say, draft), _told(exact, say, target), seed=seed, measures_regret=measures_regret
        )
    if choice.best_score == float("inf"):
        raise PromptError(f"no set of {shots} examples fits into the context of {target}; give fewer --shots")
    found = _found(choice, target, draft, exact, cheap)
    if as_json:
        click.echo(json.dumps(asdict(found), ensure_ascii=False))
    else:
        _print(Console(), found)


def _load(name: str, judges: Sequence[SolvedProblem], where: dict[str, Any]) -> ExampleLoss:
    model = load_decoder(name, **where)
    runner = make_runner(model, max_model_len=min(DEFAULT_MODEL_LEN, context_limit(model)))
    return ExampleLoss(runner, load_tokenizer(name), judges)


def _told(loss: ExampleLoss, say: Say, name: str) -> Any:
    """Return the score; each call tells the spinner what is scored."""

    def score(examples: Examples) -> float:
        say(f"scoring sets with {name}, {loss.num_passes} passes so far")
        return loss(examples)

    return score


def _found(
    choice: CascadeChoice[Examples], target: str, draft: str, exact: ExampleLoss, cheap: ExampleLoss
) -> ChosenExamples:
    return ChosenExamples(
        examples=choice.best,
        target=target,
        draft=draft,
        loss=choice.best_score,
        mean_loss=fmean(choice.exact_scores[idx] for idx in choice.probe),
        correlation=choice.correlation,
        sets=choice.num_cheap,
        target_sets=choice.num_exact,
        target_passes=exact.num_passes,
        draft_passes=cheap.num_passes,
        regret=choice.regret,
    )


def _print(console: Console, found: ChosenExamples) -> None:
    for one in found.examples:
        console.print(Text(json.dumps(asdict(one), ensure_ascii=False)), soft_wrap=True)
    agreement = "undefined, so all were kept" if found.correlation is None else f"{found.correlation:.2f}"
    shown = table("", numbers=("",))
    shown.add_row("loss of the target with these, nats per token", f"{found.loss:.4f}")
    shown.add_row("mean over random sets", f"{found.mean_loss:.4f}")
    shown.add_row("rank correlation with the draft model's loss", agreement)
    shown.add_row("sets scored by the target", f"{found.target_sets} of {found.sets}")
    if found.regret is not None:
        shown.add_row("loss above that of the best set", f"{found.regret:.4f}")
    console.print(shown)
