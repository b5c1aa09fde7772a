"""Forecasters: models on disk, and forecasts as sampled continuations of a series."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from card.backends.transformers.arrays import as_array, as_tensor
from card.errors import CardError, ModelError, SettingsError, named
from card.labs.series.data import Values, checked_series
from card.labs.series.decoding import ForecastPair, ForecastStats, PatchModel, sample_paths
from card.labs.series.transformer import PatchTransformer, Shape
from card.labs.series.verify import find_rule
from card.models.files.tensor_files import MappedTensors, write_tensors

_FORMAT = "card-forecaster-1"
_LEAST_CONTEXT = 2  # patches
_MOST_PATHS = 10_000


@dataclass(frozen=True, slots=True)
class Forecast:
    """Sampled continuations of a series."""

    samples: Values  # [num_samples, horizon], in the units of the series
    exact: bool  # their law is the target's, whatever the draft is
    stats: ForecastStats

    @property
    def mean(self) -> Values:
        """The mean of the samples at each step: [horizon]."""
        return np.asarray(self.samples.mean(0), np.float64)

    def quantile(self, share: float) -> Values:
        """Return the value below which a share of the samples lies at each step: [horizon]."""
        return np.asarray(np.quantile(self.samples, share, axis=0), np.float64)


def forecast(
    values: Iterable[float] | NDArray[np.floating],
    horizon: int,
    target: PatchModel,
    draft: PatchModel | None = None,
    *,
    num_samples: int = 100,
    num_speculative_patches: int = 3,
    mode: str = "exact",
    tolerance: float = 0.5,
    seed: int = 0,
) -> Forecast:
    """Draw continuations of a series from the target's law; in mode "exact" a draft only makes it faster.

    Both models see the series normalised by mean and standard deviation of the part that is read; these do not change
    during the forecast.

    Args:
        values: [T], evenly spaced; the newest values that fit are read.
        horizon: values to forecast.
        target, draft: as of `load_forecaster`; None draws from the target alone.
        num_speculative_patches: most patches that the draft proposes in a round.
        mode: one of `card.labs.series.verify.MODES`; all but "exact" change the law.
        tolerance: of mode "tolerance", in squared standard deviations.
        seed: same seed and settings, same forecast.
    Raises: SettingsError for a series or a setting that is impossible.
    """
    _check_counts(horizon=horizon, num_samples=num_samples, num_speculative_patches=num_speculative_patches)
    if num_samples > _MOST_PATHS:
        raise SettingsError(f"{named('num_samples')} must be at most {_MOST_PATHS}, got {num_samples}")
    size = target.patch_size
    if draft is not None and draft.patch_size != size:
        raise SettingsError(
            f"target and draft must have one patch size, got {size} and {draft.patch_size}; train them alike"
        )
    rule = find_rule(mode, tolerance)
    max_patches = min(model.max_patches for model in (target, draft) if model is not None)
    num_patches, most = -(-horizon // size), (max_patches - _LEAST_CONTEXT) * size
    if horizon > most:
        raise SettingsError(f"{named('horizon')} must be at most {most} for these models, got {horizon}")
    series = checked_series(np.asarray(values, np.float64), _LEAST_CONTEXT * size)
    context = series[-min(len(series) // size, max_patches - num_patches) * size :]
    level, spread = context.mean(), context.std()
    if spread <= 1e-9 * np.abs(context).max():
        raise SettingsError(f"the last {len(context)} values are constant ({level:g}); there is nothing to forecast")
    read = torch.from_numpy((context - level) / spread).float().view(-1, size)
    pair = ForecastPair(target, draft, rule, num_speculative_patches)
    drawn, stats = sample_paths(pair, read, num_patches, num_samples, torch.Generator().manual_seed(seed))
    samples = drawn.flatten(1)[:, :horizon].double().numpy() * spread + level
    return Forecast(samples, rule.is_exact or draft is None, stats)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
            raise SettingsError(f"{named(name)} must be a whole number of 1 or more, got {count!r}")


def save_forecaster(model: PatchTransformer, folder: Path) -> None:
    """Write a forecaster into a folder, which is made if needed. Raises: SettingsError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"format": _FORMAT, **asdict(model.shape)}) + "\n", "utf-8")
        arrays = {name: as_array(tensor, keeps_bits=True) for name, tensor in model.state_dict().items()}
        write_tensors(folder / "model.safetensors", arrays)
    except OSError as error:
        raise SettingsError(f"{folder} cannot be written: {error}; choose another place") from None


def load_forecaster(folder: str | Path) -> PatchTransformer:
    """Read a forecaster that `save_forecaster` wrote. Raises: ModelError if the folder holds none, or a broken one."""
    try:
        facts = json.loads((Path(folder) / "config.json").read_text("utf-8"))
        if not isinstance(facts, dict) or facts.pop("format", None) != _FORMAT:
            raise ModelError(f"{folder} holds no forecaster; make one with card train forecaster")
        model = PatchTransformer(Shape(**facts))
        arrays = MappedTensors(Path(folder) / "model.safetensors").arrays
        model.load_state_dict({name: as_tensor(array) for name, array in arrays.items()})
    except FileNotFoundError:
        raise ModelError(f"{folder} holds no forecaster; make one with card train forecaster") from None
    except ModelError:
        raise
    except (OSError, ValueError, TypeError, RuntimeError, CardError):
        raise ModelError(f"{folder} holds a broken forecaster; train it once more") from None
    return model.train(False)


def model_type(folder: Path) -> str | None:
    """Return the model type of a folder of transformers; None for a forecaster of ours, or for no folder."""
    try:
        facts = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    name = facts.get("model_type") if isinstance(facts, dict) else None
    return None if name is None else str(name)
