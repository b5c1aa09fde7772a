"""`card train`: small models that help one pair of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from card.assembly.plan import DEFAULT_MODEL_LEN
from card.cli.files import check_can_write, read_prompts
from card.cli.options import resolve_models
from card.cli.starting import spinner
from card.cli.tables import progress_bar, table
from card.errors import PromptError, SettingsError
from card.family.specbranch.network import HRadFacts, target_facts
from card.family.specbranch.rounds import RoundCollector, Rounds
from card.family.specbranch.training import Trained, TrainSettings, train_hrad
from card.models.demo import SAMPLE_PROBLEMS
from card.models.facts import context_limit, end_token_ids
from card.models.loading import check_pair, load_decoder, load_tokenizer
from card.models.runners import make_runner
from card.models.torch_runner import TorchRunner
from card.tools.bench.datasets import Question

_Prompts = Sequence[Sequence[int]]
_CLASS_NAMES = ("all rejected", "undecided", "all accepted")


@dataclass(frozen=True, slots=True)
class TrainingPair:
    """A pair whose texts something is to be learnt from."""

    tokenizer: PreTrainedTokenizerBase
    target: TorchRunner
    draft: TorchRunner
    draft_name: str  # its own alone, not the folders that it lies in here
    end_ids: frozenset[int]


def run(*, prompts: Path | None, test_prompts: Path | None, max_prompts: int | None, out: Path, **options: Any) -> None:
    """Do what `card train hrad` was asked for. Raises: CardError of any kind."""
    check_folder(out)
    check_can_write(out)
    settings = TrainSettings(**{name: options[name] for name in ("epochs", "balance", "seed")})
    questions = (SAMPLE_PROBLEMS if prompts is None else read_prompts(prompts))[:max_prompts]
    test_questions = () if test_prompts is None else read_prompts(test_prompts)
    pair = load_training_pair(options)
    shape = {name: options[name] for name in ("num_layers", "num_speculative_tokens")}
    collector = RoundCollector(pair.target, pair.draft, max_tokens=options["max_tokens"], end_ids=pair.end_ids, **shape)
    facts = target_facts(pair.target, draft=pair.draft_name, **shape)
    prompt_ids, test_ids = (
        encode_questions(pair.tokenizer, some, collector.max_prompt_tokens) for some in (questions, test_questions)
    )
    trained = _train(collector, prompt_ids, test_ids, facts, settings)
    trained.hrad.save(out, trained.figures())
    _print(Console(), trained, out)


def check_folder(out: Path) -> None:
    """Refuse a file to write in a folder that is not there. Raises: SettingsError."""
    if not out.absolute().parent.is_dir():
        raise SettingsError(f"there is no folder {out.absolute().parent} to write {out.name} into; make it first")


def load_training_pair(options: dict[str, Any]) -> TrainingPair:
    """Load the models that the options name. Raises: CardError of any kind."""
    target_name, draft_name = resolve_models(options, needs_draft=True)
    assert draft_name is not None
    torch.set_num_threads(options.get("threads") or torch.get_num_threads())
    with spinner("loading the models"):
        tokenizer, where = load_tokenizer(target_name), {"dtype": options["dtype"], "device": options["device"]}
        check_pair(tokenizer, target_name, draft_name)
        target_model = load_decoder(target_name, **where)
        draft_model = load_decoder(draft_name, **where)
    max_model_len = min(DEFAULT_MODEL_LEN, context_limit(target_model), context_limit(draft_model))
    target, draft = (make_runner(model, max_model_len=max_model_len) for model in (target_model, draft_model))
    folder = Path(draft_name)
    name = folder.resolve().name if folder.is_dir() else draft_name
    return TrainingPair(tokenizer, target, draft, name, end_token_ids(target_model, tokenizer))


def _train(
    collector: RoundCollector, prompt_ids: _Prompts, test_ids: _Prompts, facts: HRadFacts, settings: TrainSettings
) -> Trained:
    """Collect rounds and train on them, with a bar that shows how far it is."""
    with progress_bar() as progress:

        def collect(what: str, ids: _Prompts) -> Rounds:
            task = progress.add_task(what, total=len(ids))
            return collector.collect(ids, lambda: progress.advance(task))

        rounds = collect("answering prompts", prompt_ids)
        test_rounds = collect("answering test prompts", test_ids) if test_ids else None
        task = progress.add_task("training", total=settings.epochs)
        return train_hrad(rounds, facts, settings, test_rounds=test_rounds, on_epoch=lambda: progress.advance(task))


def encode_questions(tokenizer: PreTrainedTokenizerBase, questions: Sequence[str], most: int) -> list[list[int]]:
    """Return the token ids of each question, as a chat turn where the model has a template. Raises: PromptError."""
    encoded = []
    for question in questions:
        ids = Question((question,), is_raw=not tokenizer.chat_template).encode(tokenizer)
        if len(ids) > most:
            raise PromptError(
                f"the prompt that begins {question[:40]!r} has {len(ids)} tokens, and the models' context leaves room"
                f" for {most}; leave it out"
            )
        encoded.append(ids)
    return encoded


def _print(console: Console, trained: Trained, out: Path) -> None:
    shown = table("rounds, by what was foreseen", numbers=(*_CLASS_NAMES, "foreseen"))
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
        f" {trained.foreseen_loss:.4f} with what is foreseen besides. "
        + (
            f"It moves the branch point, with {evidence.weight:.0%} of the weight of independent evidence."
            if evidence.weight > 0.0
            else "That is nothing new: method specbranch will go by the confidence alone."
        )
    )
    console.print(
        f"trained on {trained.num_train_rounds:,} rounds for {trained.num_epochs} epochs; written to {out}",
        soft_wrap=True,
    )
