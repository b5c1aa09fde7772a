"""`card train pard`: a draft model that makes several tokens in one pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from card.backends.transformers.loading import load_model
from card.cli.parts.files import check_can_write
from card.cli.parts.starting import spinner
from card.cli.parts.tables import progress_bar, table
from card.errors import SettingsError
from card.family.learning.checkpoint import Checkpoint
from card.family.learning.driver import say, stepping
from card.family.pard.folders import Adaptable, clipped, load_adaptable, read_texts
from card.family.pard.state_input import StateInput
from card.family.pard.teacher import Teacher
from card.family.pard.train_pard import PardTrainSettings, TrainedDrafter, train_pard
from card.models.files.places import local_model
from card.models.loading import check_pair, load_tokenizer
from card.models.parallel_draft import is_parallel_draft

CHECKPOINT = "training.pt"
_SETTINGS = ("num_tokens", "retention", "least_retention", "learning_rate", "epochs", "seed")


def run(*, target: str | None, draft: str | None, data: Path, out: Path, target_features: bool, **options: Any) -> None:
    """Run `card train pard`. Raises: CardError of any kind."""
    if draft is None:
        raise SettingsError("give --draft, the model to adapt")
    if target_features and target is None:
        raise SettingsError("--target-features are those of a target; give --target too")
    if is_parallel_draft(out) and not (out / CHECKPOINT).exists():
        raise SettingsError(f"{out} holds a finished drafter already; choose another folder, or delete that one")
    settings = PardTrainSettings(**{name: options[name] for name in _SETTINGS})
    check_can_write(out / CHECKPOINT)
    for name in (draft, target):
        if name is not None:
            local_model(name)
    texts = read_texts(data)
    with spinner("loading the model"):
        begun = load_adaptable(draft, device=options["device"])
        documents = clipped([text.encode(begun.tokenizer) for text in texts], begun.model)
        teacher = None
        if target is not None:
            teacher = _teacher(target, draft, begun, settings.seed if target_features else None, options["device"])
    _make_folder(out)
    checkpoint = Checkpoint(out / CHECKPOINT, {"draft": Path(draft).name, "target": target and Path(target).name})
    with progress_bar() as progress:
        on_step = stepping(progress)
        trained = train_pard(
            begun.model, documents, begun.mask_id, settings, checkpoint=checkpoint, teacher=teacher, on_step=on_step
        )
    state_input = None if teacher is None else teacher.state_input
    begun.save(out, settings.num_tokens, trained.temperatures, trained.figures(), state_input)
    checkpoint.delete()
    _print(trained, out)


def _teacher(target: str, draft: str, begun: Adaptable, state_seed: int | None, device: str) -> Teacher:
    """Return the target as a teacher; ``state_seed``, if any, is that of the layer that reads its states."""
    check_pair(load_tokenizer(target), target, draft)
    model: Any = load_model(target, device=device)
    model.to(dtype=begun.model.dtype)
    if state_seed is None:
        return Teacher(model)
    table: Any = begun.model.get_input_embeddings()
    return Teacher(model, StateInput.for_target(model, table.embedding_dim, seed=state_seed).to(device))


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{out} cannot be made: {error.strerror}; choose another place") from None


def _print(trained: TrainedDrafter, out: Path) -> None:
    shown = table("guess", numbers=("right, and all before it", "log loss"))
    for idx, (rate, loss) in enumerate(zip(trained.hit_rates, trained.losses, strict=True), 1):
        shown.add_row(str(idx), f"{rate:.1%}", f"{loss:.3f}")
    Console().print(shown)
    say(
        f"{trained.mean_guesses:.2f} tokens a pass are right, on texts that it did not learn from. Trained"
        f" {trained.num_trained:,} positions in {trained.num_steps} steps; without conditional drop it would have been"
        f" {trained.num_without_drop:,}. Written to {out}."
    )
