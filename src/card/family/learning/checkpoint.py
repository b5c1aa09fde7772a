"""Checkpoints, from which a training resumes."""

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

_LONGEST_VALUE = 100  # characters of a fact; a longer one, such as the data, is stored as its digest


@dataclass(slots=True)
class RunState:
    """Progress of a training."""

    step: int = 0
    num_trained: int = 0  # positions
    num_without_drop: int = 0  # positions of the same steps without conditional drop


class Checkpoint:
    """A file with the weights and the optimizer of an unfinished training."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Use this file; ``facts`` of the run are added to those of the training."""
        self.path = path
        self._facts = facts

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]) -> RunState:
        """Restore model and optimizer from the file; without a file they stay unchanged.

        Raises: ModelError if the file is damaged, or of a run with other facts.
        """
        if not self.path.is_file():
            return RunState()
        try:
            saved = torch.load(self.path, map_location=next(model.parameters()).device, weights_only=True)
            recorded, state = json.loads(saved["facts"]), RunState(**saved["state"])
            weights, moments = saved["weights"], saved["optimizer"]
        except Exception as error:  # of zip files, pickles and their contents: many types
            if is_shortage(error):
                raise
            raise ModelError(f"{self.path} is cut off or damaged; delete it to start again") from error
        for name, value in self._all(facts).items():
            if recorded.get(name) != value:
                raise ModelError(
                    f"{self.path} is of another run: its {name} is {recorded.get(name)}, not {value}; give the options"
                    " and files of that run, or delete it to start again"
                )
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        return state

    def save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any], state: RunState
    ) -> None:
        """Write the state; a file is complete or absent."""
        saved = {"weights": model.state_dict(), "optimizer": optimizer.state_dict(), "state": asdict(state)}
        with replaced(self.path) as part:
            torch.save({**saved, "facts": json.dumps(self._all(facts))}, part)

    def delete(self) -> None:
        """Remove the file when the training is complete."""
        self.path.unlink(missing_ok=True)

    def _all(self, facts: Mapping[str, Any]) -> dict[str, str]:
        return {name: _in_short(value) for name, value in {**self._facts, **facts}.items()}


def _in_short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else hashlib.sha256(text.encode()).hexdigest()[:16]
