"""Load forecasters from folders: of `card train forecaster`, and models of transformers with laws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TimeSeriesTransformerForPrediction, TimesFm2_5ModelForPrediction, TimesFmModelForPrediction

from card.errors import ModelError, in_few_words
from card.labs.series.decoding import PatchModel
from card.labs.series.forecaster import load_forecaster, model_type
from card.labs.series.hf import TimeSeriesModel
from card.labs.series.timesfm import TimesFmForecaster
from card.models.files.sources import quiet

_FAMILIES = ("time_series_transformer", "timesfm", "timesfm2_5")  # model types of transformers


def open_forecaster(folder: str | Path) -> PatchModel:
    """Read the forecaster of a folder, of any known family; nothing is fetched.

    Raises: ModelError if there is none, or it is broken or of another family; SettingsError for a model without laws of
        patches, see `TimeSeriesModel` and `TimesFmForecaster`.
    """
    family = model_type(Path(folder))
    if family is None:
        return load_forecaster(folder)
    if family not in _FAMILIES:
        raise ModelError(
            f"{folder} holds a model of type {family}; a forecaster is one of card train forecaster, or of type"
            f" {', '.join(_FAMILIES)}"
        )
    if family == "time_series_transformer":
        return TimeSeriesModel(_read(TimeSeriesTransformerForPrediction, folder))
    return TimesFmForecaster(
        _read(TimesFmModelForPrediction if family == "timesfm" else TimesFm2_5ModelForPrediction, folder)
    )


def _read(kind: Any, folder: str | Path) -> Any:
    try:
        with quiet():
            model, report = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    except Exception as error:  # transformers and safetensors raise many types
        raise ModelError(f"the forecaster in {folder} cannot be read: {in_few_words(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"the weights in {folder} are incomplete: {len(missing)} tensors are missing, the first is {missing[0]};"
            " copy the model again"
        )
    return model.float()
