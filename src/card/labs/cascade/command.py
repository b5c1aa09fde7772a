"""`card choose-examples`: in-context examples, or an instruction, chosen by the target's loss."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import torch
from rich.console import Console
from rich.text import Text

from card.assembly.plan import DEFAULT_MODEL_LEN
from card.cli.parts.chosen_models import resolve_models
from card.cli.parts.files import read_prompts, read_records
from card.cli.parts.starting import spinner
from card.cli.parts.tables import table
from card.errors import PromptError, SettingsError
from card.labs.cascade.examples import Beginning, PromptLoss, SolvedProblem, draw_example_sets
from card.labs.cascade.search import CascadeChoice, cascade_argmin
from card.models.facts import context_limit
from card.models.loading import load_decoder, load_tokenizer
from card.models.runners import make_runner

_NEEDS = "question", "answer"
_SHOTS = 2  # examples of a set


@dataclass(frozen=True, slots=True)
class ChosenBeginning:
    """The best beginning of a prompt, and the work it took to find it."""

    instruction: str | None  # None: examples were chosen
    examples: tuple[SolvedProblem, ...]
    target: str
    draft: str
    loss: float  # of the target after it, nats per token of the held-out answers
    mean_loss: float  # the same over the probe, which was drawn at random
    correlation: float | None
    candidates: int
    target_candidates: int  # how many of them the target scored
    target_passes: int
    draft_passes: int
    regret: float | None  # loss above that of the best candidate; None: not measured


def run(
    *,
    data: Path,
    instructions: Path | None,
    shots: int | None,
    candidates: int,
    held_out: int,
    seed: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Run `card choose-examples`. Raises: CardError of any kind."""
    target, draft = resolve_models(options, needs_draft=True)
    assert draft is not None
    problems = [SolvedProblem(*(one[key] for key in _NEEDS)) for one in read_records(data, *_NEEDS)]
    random.Random(seed).shuffle(problems)
    judges, pool = problems[:held_out], problems[held_out:]
    asked = _candidates(pool, instructions, shots=shots, count=candidates, seed=seed)
    measures_regret = options.pop("regret")
    torch.set_num_threads(options.pop("threads") or torch.get_num_threads())
    with spinner("loading the models") as say:
        exact, cheap = (_load(name, judges, options) for name in (target, draft))

        def tell() -> None:
            passes = f"{exact.num_passes} with {target}, {cheap.num_passes} with {draft}"
            say(f"scoring candidates, passes so far: {passes}")

        choice = cascade_argmin(
            asked, _with_progress(cheap, tell), _with_progress(exact, tell), seed=seed, measures_regret=measures_regret
        )
    if choice.best_score == float("inf"):
        kind = "instruction" if shots is None and instructions else f"set of {shots or _SHOTS} examples"
        raise PromptError(f"no {kind} fits into the context of {target} with the problems; give shorter ones")
    result = _found(choice, target, draft, exact, cheap)
    if as_json:
        click.echo(json.dumps(asdict(result), ensure_ascii=False))
    else:
        _print(Console(), result)


def _candidates(
    pool: Sequence[SolvedProblem], instructions: Path | None, *, shots: int | None, count: int, seed: int
) -> Sequence[Beginning]:
    """Return ``count`` different beginnings of a prompt, or all there are. Raises: PromptError, SettingsError."""
    if instructions is None:
        return draw_example_sets(pool, shots=shots or _SHOTS, count=count, seed=seed)
    if shots is not None:
        raise SettingsError("--instructions are chosen without examples; leave --shots out")
    texts = list(dict.fromkeys(read_prompts(instructions, "instruction")))
    return texts if len(texts) <= count else random.Random(seed).sample(texts, count)


def _load(name: str, judges: Sequence[SolvedProblem], where: dict[str, Any]) -> PromptLoss:
    model = load_decoder(name, **where)
    runner = make_runner(model, max_model_len=min(DEFAULT_MODEL_LEN, context_limit(model)))
    return PromptLoss(runner, load_tokenizer(name), judges)


def _with_progress(loss: PromptLoss, tell: Callable[[], None]) -> Callable[[Beginning], float]:
    """Return the score; each call shows the progress in the spinner."""

    def score(beginning: Beginning) -> float:
        tell()
        return loss(beginning)

    return score


def _found(
    choice: CascadeChoice[Beginning], target: str, draft: str, exact: PromptLoss, cheap: PromptLoss
) -> ChosenBeginning:
    return ChosenBeginning(
        instruction=choice.best if isinstance(choice.best, str) else None,
        examples=() if isinstance(choice.best, str) else choice.best,
        target=target,
        draft=draft,
        loss=choice.best_score,
        mean_loss=fmean(choice.exact_scores[idx] for idx in choice.probe),
        correlation=choice.correlation,
        candidates=choice.num_cheap,
        target_candidates=choice.num_exact,
        target_passes=exact.num_passes,
        draft_passes=cheap.num_passes,
        regret=choice.regret,
    )


def _print(console: Console, beginning: ChosenBeginning) -> None:
    lines = [asdict(one) for one in beginning.examples] or [{"instruction": beginning.instruction}]
    for line in lines:
        console.print(Text(json.dumps(line, ensure_ascii=False)), soft_wrap=True)
    agreement = "undefined, so all were kept" if beginning.correlation is None else f"{beginning.correlation:.2f}"
    shown = table("", numbers=("",))
    shown.add_row("loss of the target after this, nats per token", f"{beginning.loss:.4f}")
    shown.add_row("mean over the random probe", f"{beginning.mean_loss:.4f}")
    shown.add_row("rank correlation with the draft model's loss", agreement)
    shown.add_row("scored by the target", f"{beginning.target_candidates} of {beginning.candidates}")
    if beginning.regret is not None:
        shown.add_row("loss above that of the best one", f"{beginning.regret:.4f}")
    console.print(shown)
