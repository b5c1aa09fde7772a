"""`card train hrad`: a predictor for method specbranch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from card.cli.parts.tables import progress_bar, table
from card.family.learning.driver import advancing, check_out, encode_questions, load_training_pair, questions_in, say
from card.family.specbranch.network import target_facts
from card.family.specbranch.rounds import RoundCollector, Rounds
from card.family.specbranch.train_hrad import HRadTrainSettings, TrainedHRad, train_hrad

_CLASS_NAMES = ("all rejected", "undecided", "all accepted")


def run(*, prompts: Path | None, test_prompts: Path | None, max_prompts: int | None, out: Path, **options: Any) -> None:
    """Run `card train hrad`. Raises: CardError of any kind."""
    check_out(out)
    settings = HRadTrainSettings(**{name: options[name] for name in ("epochs", "balance", "seed")})
    questions = questions_in(prompts, max_prompts)
    test_questions = () if test_prompts is None else questions_in(test_prompts, None)
    pair = load_training_pair(options)
    shape = {name: options[name] for name in ("num_layers", "num_speculative_tokens")}
    collector = RoundCollector(pair.runner, pair.draft, max_tokens=options["max_tokens"], end_ids=pair.end_ids, **shape)
    facts = target_facts(pair.runner, draft=pair.draft_name, **shape)
    prompt_ids, test_ids = (
        encode_questions(pair.tokenizer, some, collector.max_prompt_tokens) for some in (questions, test_questions)
    )
    with progress_bar() as progress:

        def collect(what: str, ids: Sequence[Sequence[int]]) -> Rounds:
            return collector.collect(ids, advancing(progress, what, len(ids)))

        rounds = collect("answering prompts", prompt_ids)
        test_rounds = collect("answering test prompts", test_ids) if test_ids else None
        on_epoch = advancing(progress, "training", settings.epochs)
        trained = train_hrad(rounds, facts, settings, test_rounds=test_rounds, on_epoch=on_epoch)
    trained.hrad.save(out, trained.figures())
    _print(Console(), trained, out)


def _print(console: Console, trained: TrainedHRad, out: Path) -> None:
    shown = table("rounds, by prediction", numbers=(*_CLASS_NAMES, "predicted"))
    for name, row, recall in zip(_CLASS_NAMES, trained.confusion, trained.recalls, strict=True):
        shown.add_row(name, *(f"{count:,}" for count in row), f"{recall:.0%}")
    shown.add_row("right", *(f"{precision:.0%}" for precision in trained.precisions), "")
    console.print(shown)
    console.print(
        f"accuracy {trained.accuracy:.1%} of {trained.num_test_rounds:,} rounds that it never saw; always naming the"
        f" commonest class: {trained.majority_share:.1%}. Mean over the classes: {trained.balanced_accuracy:.1%}."
    )
    evidence = trained.hrad.evidence
    console.print(
        f"whether a drafted token is accepted: log loss {trained.confidence_loss:.4f} by the drafter's own confidence,"
        f" {trained.predicted_loss:.4f} with the prediction. "
        + (
            f"It moves the branch point, with {evidence.weight:.0%} of the weight of independent evidence."
            if evidence.weight > 0.0
            else "That is nothing new: method specbranch will go by the confidence alone."
        )
    )
    say(f"trained on {trained.num_train_rounds:,} rounds for {trained.num_epochs} epochs; written to {out}")
