"""Passes of the drafter of a folder have the numbers of the module that was trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from card.backends.transformers.arrays import as_tensor
from card.family.hivis.head import FusedModule
from card.family.hivis.train_hivis import unrolled
from card.family.learning.bound_module import round_weights, scaled
from card.models.block_loading import load_fused
from card.models.fingerprint import embedding_probe, sizes_of
from card.models.loading import load_decoder
from card.models.own.decoder_model import DecoderModel
from card.models.own.fused_head import FusedFacts, FusedHead
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from tests.own_block import Checkpoint, random_checkpoint
from tests.state_drafting import Drafting, assert_nodes_have_states_of_their_parents, assert_rounds_are_right


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return random_checkpoint("qwen2, of MiMo")


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint.save(Path(tmp_path_factory.mktemp("target")))


class Reference:
    """The target of a checkpoint, and a drafter as it is trained: each row unrolled with its own candidates."""

    def __init__(self, checkpoint: Checkpoint, module: FusedModule, target: RowRunner) -> None:
        self.states, self.module, self.target = checkpoint.states, module, target

    def draft(self, text: Sequence[int], candidates: Sequence[int], first: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Return logits [V], and the normed numbers [d] from which states are guessed; see `state_drafting`."""
        del first  # the first token has no row, wherever it is
        whole, normed = [*text, *candidates], list[Tensor]()
        self.module.norm.register_forward_hook(lambda _, __, rows: normed.append(rows))
        known = scaled(self.states(text)[:-1])
        truth = torch.cat([known, torch.full((len(candidates), known.shape[1]), 9.0)])  # which no step may read
        embeddings = scaled(as_tensor(self.target.embeddings(whole[1:])))
        found = []
        with torch.no_grad():
            steps = unrolled(self.module, truth[None], embeddings[None], 1 + len(candidates))
            for step, (_, logits) in enumerate(steps):
                all_logits = torch.full((self.target.vocab_size,), -torch.inf)
                all_logits[self.module.token_ids] = logits[0, len(known) - 1 + step]
                found.append((all_logits, normed[-1][0, len(known) - 1 + step]))
        return found


def drafting_of(folder: str, checkpoint: Checkpoint, path: Path, *, num_layers: int, num_steps: int, width: int):
    target = plain_runner(load_decoder(folder, dtype="float32"), max_model_len=64)
    facts = FusedFacts(num_steps=num_steps, width=width, num_layers=num_layers, **sizes_of(target))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        ids = torch.arange(1, target.vocab_size, 2)
        module = FusedModule(facts, ids, as_tensor(embedding_probe(target)))
        torch.nn.init.normal_(module.steps)
    round_weights(module)
    module.save(path)
    module.attach(target)

    def load(runner: RowRunner, model: DecoderModel) -> FusedHead:
        return load_fused(str(path), runner, dtype="float32")

    return Drafting(folder, load, Reference(checkpoint, module.requires_grad_(False), target))


@pytest.mark.parametrize(("num_layers", "num_steps", "width"), [(1, 5, 64), (2, 3, 128), (3, 1, 32)])
def test_rounds_and_trees_have_the_numbers_of_the_module(
    folder: str, checkpoint: Checkpoint, tmp_path: Path, num_layers: int, num_steps: int, width: int
) -> None:
    sizes = {"num_layers": num_layers, "num_steps": num_steps, "width": width}
    drafting = drafting_of(folder, checkpoint, tmp_path / "drafter", **sizes)
    for num_accepted in range(4):
        assert_rounds_are_right(drafting, num_accepted)
    assert_nodes_have_states_of_their_parents(drafting)
