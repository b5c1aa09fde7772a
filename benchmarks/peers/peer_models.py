"""Make the model files that the peers read: the same weights as a plain folder, as GGUF and in OpenVINO's format.

A model that the peers cannot read as it is, such as an inflated demo target, is saved as an ordinary Llama folder.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import catalog
import environments
from catalog import ModelSpec
from environments import BuildError
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from card.backends.transformers.loading import load_model
from card.config import parse_parameter_count
from card.models.facts import context_limit, end_token_ids
from card.models.inflation import inflate
from card.models.loading import load_tokenizer

_FIRST_GGUF = "bf16"  # the others are made from it
_DEMO_PRE_TOKENIZER = "smollm"  # llama.cpp's name for what splits text just as the demo tokenizer does
_CONVERT = Path(__file__).parent / "convert_gguf.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target and a draft model as ordinary folders, and what all peers must know of them."""

    spec: ModelSpec
    target: Path
    draft: Path
    end_ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    """What a folder says of its model, without the weights."""

    config: PreTrainedConfig
    generation_config: GenerationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What a peer loads."""

    target: Path
    draft: Path

    @property
    def num_bytes(self) -> int:
        """Size of both."""
        found = [
            path for place in (self.target, self.draft) for path in ([place] if place.is_file() else place.iterdir())
        ]
        return sum(path.stat().st_size for path in found)


def find_pair(spec: ModelSpec, folder: Path, weights: Path | None) -> Pair:
    """Return the pair as ordinary folders, made if they are not there.

    Args:
        weights: where `scripts/fetch_weights.py` put its models.
    Raises: BuildError if a model was not fetched; CardError, OSError.
    """
    places = {}
    for role, name in (("target", spec.target), ("draft", spec.draft)):
        if name.startswith("demo-"):
            cost = spec.cost if role == "target" else None
            places[role] = _save_demo(name, cost, folder / "models" / spec.name / role)
            continue
        if weights is None or not (weights / f"{name}-bfloat16" / "config.json").is_file():
            where = "no folder of weights is given" if weights is None else f"{name} is not in {weights}"
            raise BuildError(
                f"{where}; run scripts/fetch_weights.py {name} --gguf and once more without --gguf, then give --weights"
            )
        places[role] = weights / f"{name}-bfloat16"
    described: Any = _Described(
        config=AutoConfig.from_pretrained(places["target"]),
        generation_config=GenerationConfig.from_pretrained(places["target"]),
    )
    return Pair(
        spec=spec,
        target=places["target"],
        draft=places["draft"],
        end_ids=tuple(sorted(end_token_ids(described, load_tokenizer(places["target"])))),
        max_model_len=context_limit(described),
    )


def files_for(pair: Pair, row: catalog.RowKey, folder: Path) -> Files:
    """Return what a row's peer loads, made if it is not there. Raises: BuildError, OSError."""
    own = folder / "models" / pair.spec.name
    if row.peer in catalog.LLAMAS or row.quantisation == pair.spec.ggufs[-1]:
        return Files(
            target=_gguf(pair, "target", row.quantisation, folder), draft=_gguf(pair, "draft", row.quantisation, folder)
        )
    if row.peer == catalog.OPENVINO:
        return Files(
            target=_openvino(pair.target, own / "openvino-target", folder),
            draft=_openvino(pair.draft, own / "openvino-draft", folder),
        )
    return Files(target=pair.target, draft=pair.draft)


def _save_demo(name: str, cost: str | None, place: Path) -> Path:
    """Save a model of the demo pair, perhaps inflated, as an ordinary folder."""
    if not (place / "config.json").is_file():
        model = load_model(name)
        if cost:
            model = inflate(model, parse_parameter_count(cost))
        unfinished = _unfinished(place)
        model.save_pretrained(unfinished)
        load_tokenizer(name).save(unfinished)
        unfinished.rename(place)
    return place


def _gguf(pair: Pair, role: str, quantisation: str, folder: Path) -> Path:
    source: Path = getattr(pair, role)
    if quantisation == pair.spec.stored_gguf:
        stored = source.parent / f"{source.name.removesuffix('-bfloat16')}.gguf"
        if not stored.is_file():
            raise BuildError(f"{stored} is not there; run scripts/fetch_weights.py with --gguf")
        return stored
    place = folder / "models" / pair.spec.name / f"{role}-{quantisation}.gguf"
    if place.is_file():
        return place
    log, unfinished = folder / "logs" / f"{pair.spec.name}-{place.name}.log", place.with_suffix(".unfinished")
    if quantisation == _FIRST_GGUF:
        place.parent.mkdir(parents=True, exist_ok=True)
        pre = _DEMO_PRE_TOKENIZER if getattr(pair.spec, role).startswith("demo-") else "as-it-is"
        script: list[str | Path] = [
            sys.executable,
            _CONVERT,
            environments.llama_source(folder),
            pre,
            source,
            unfinished,
        ]
        environments.run_logged(script, log)
    else:
        first = _gguf(pair, role, _FIRST_GGUF, folder)
        quantize = environments.llama_program(folder, "llama-quantize")
        environments.run_logged([quantize, first, unfinished, quantisation, "2"], log)
    unfinished.rename(place)
    return place


def _openvino(source: Path, place: Path, folder: Path) -> Path:
    if not (place / "openvino_model.xml").is_file():
        unfinished = _unfinished(place)
        export = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--weight-format", "int8"]
        export += ["--task", "text-generation-with-past"]
        python = environments.python_of(folder, "openvino")
        log = folder / "logs" / f"{place.parent.name}-{place.name}.log"
        environments.run_logged([python, *export, "--model", source, unfinished], log, env={"HF_HUB_OFFLINE": "1"})
        unfinished.rename(place)
    return place


def _unfinished(place: Path) -> Path:
    """Return an empty place beside the one that is to be filled, so that half of a model is never taken for a whole."""
    unfinished = place.with_name(f"{place.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    return unfinished
