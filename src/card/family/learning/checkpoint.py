"""Checkpoints of a training, from which it goes on after it was cut off."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from card.errors import ModelError
from card.machine.folders import replaced
from card.machine.memory import is_shortage

_LONGEST_VALUE = 100  # characters of a fact; a longer one, such as the data, is kept as its digest


@dataclass(slots=True)
class RunState:
    """Progress of a training."""

    step: int = 0
    num_trained: int = 0  # positions
    num_without_drop: int = 0  # positions that the same steps would have run if conditional drop left out none


class Checkpoint:
    """One file with the weights and the optimizer of a training that is under way."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Take a place for the file, and facts of the run besides those that the training knows."""
        self.path = path
        self._facts = facts

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]) -> RunState:
        """Put model and optimizer where the last run left them; without a file they stay as they are.

        Raises: ModelError if the file is damaged, or of a run with other facts.
        """
        if not self.path.is_file():
            return RunState()
        try:
            saved = torch.load(self.path, map_location=next(model.parameters()).device, weights_only=True)
            found, state = json.loads(saved["facts"]), RunState(**saved["state"])
            weights, moments = saved["weights"], saved["optimizer"]
        except Exception as error:  # of zip files, pickles and what is in them: almost anything
            if is_shortage(error):
                raise
            raise ModelError(f"{self.path} is cut off or damaged; delete it to begin anew") from error
        for name, value in self._all(facts).items():
            if found.get(name) != value:
                raise ModelError(
                    f"{self.path} is of another run: its {name} is {found.get(name)}, not {value}; give the options and"
                    " files of that run, or delete it to begin anew"
                )
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        return state

    def save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any], state: RunState
    ) -> None:
        """Keep the state; a file is whole or not there."""
        kept = {"weights": model.state_dict(), "optimizer": optimizer.state_dict(), "state": asdict(state)}
        with replaced(self.path) as part:
            torch.save({**kept, "facts": json.dumps(self._all(facts))}, part)

    def delete(self) -> None:
        """Remove the file; the training is over."""
        self.path.unlink(missing_ok=True)

    def _all(self, facts: Mapping[str, Any]) -> dict[str, str]:
        return {name: _in_short(value) for name, value in {**self._facts, **facts}.items()}


def _in_short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else hashlib.sha256(text.encode()).hexdigest()[:16]
