"""Sources of models by name: a folder, a GGUF file, a name on the hub; and errors of loaders in one clear line."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from card.errors import ModelError, in_few_words
from card.machine.folders import weights_folder
from card.models.files.gguf.header import GgufError
from card.models.files.gguf.parts import first_part, part_names
from card.models.files.gguf.source import GgufSource
from card.models.files.places import GGUF_SUFFIX, hub_file, local_model
from card.models.files.weight_files import check_counts, raw_config
from card.models.names import OWN_BLOCK

_HUB_TIMEOUT_S = 10.0
_MOST_NAMED = 8  # files of a repository in an error
_MOST_OF_GGUF = 500  # characters of an error of ours, which may list all that is read


@dataclass(frozen=True, slots=True)
class Source:
    """Source that a model is read from."""

    name: str  # as the user wrote it
    path: str  # a folder, or a name on the hub
    is_local: bool  # read from disk only: a folder, or a hub model that only the local cache can give
    hub_problem: str = ""  # why the hub cannot be asked
    is_folder: bool = False
    gguf: GgufSource | None = None  # what it is instead of a folder

    @property
    def options(self) -> dict[str, bool]:
        return {"local_files_only": self.is_local, "trust_remote_code": False}


def find_source(name: str, cache_dir: str | None) -> Source:
    """Return where ``name`` leads. Raises: ModelError if it is a path that is no model."""
    place, in_hub = local_model(name), hub_file(name)
    if place is None and in_hub is not None:
        place = fetch(name, *in_hub)
    if place is not None and place.is_file():
        try:
            gguf = GgufSource(place, weights_folder(cache_dir))
        except OSError as error:
            raise ModelError(f"{name} cannot be read: {error.strerror}") from error
        return Source(name, str(place), is_local=True, gguf=gguf)
    if place is not None:
        source = Source(name, str(place), is_local=True, is_folder=True)
        with explained(source, "the config of {} cannot be used"):
            check_counts(raw_config(place))
        return source
    if name == OWN_BLOCK:
        raise ModelError(
            f"{name} is no model of its own: it names the block that drafts in a target's checkpoint, which drafts in "
            "the target's process alone; name a draft model"
        )
    there = _ask_hub(name)
    if in_repository := there.gguf_files:
        raise ModelError(
            f"{name} holds GGUF files and no config.json; name the file, such as {name}/{in_repository[0]}"
        )
    return Source(name, name, is_local=bool(there.problem), hub_problem=there.problem)


def fetch(name: str, repository: str, file: str, bar: Callable[[str], Any] | None = None) -> Path:
    """Return a file of the hub, from the local cache if it is there; of a model in several parts the first one.

    Args:
        bar: gives, for a name to be shown, the class of the bar that shows how far a download is; None: the hub's.
    Raises: ModelError, one line, if it cannot be had.
    """
    if (first := first_part(file)) != file:
        raise ModelError(f"{name} is a later part of a model; name its first one, {repository}/{first}")
    there, parts = _ask_hub(repository), part_names(file)
    source = Source(name, name, is_local=True, hub_problem=there.problem)
    is_local = bool(there.problem)
    if there.gguf_files and (missing := [part for part in parts if part not in there.gguf_files]):
        models = [one for one in there.gguf_files if one == first_part(one)]
        raise ModelError(f"{repository} has no file {missing[0]}; it has {', '.join(models[:_MOST_NAMED])}")
    with explained(source, "{} cannot be fetched"):
        import huggingface_hub  # where it is used: it takes as long as the whole start of a model that is here

        paths = [
            huggingface_hub.hf_hub_download(
                repository,
                part,
                local_files_only=is_local,
                tqdm_class=None if bar is None else bar(name if part == file else part),
            )
            for part in parts
        ]
        return Path(paths[0])


def files_of(source: Source, names: Sequence[str]) -> Path:
    """Return a folder with the files of a model that have such names, fetched if they are on the hub alone.

    Raises: almost anything, if the hub does not give them.
    """
    if source.is_folder:
        return Path(source.path)
    import huggingface_hub

    return Path(
        huggingface_hub.snapshot_download(
            source.path, allow_patterns=list(names), local_files_only=source.is_local, etag_timeout=_HUB_TIMEOUT_S
        )
    )


@dataclass(frozen=True, slots=True)
class _OnHub:
    """Facts of a repository, by the hub."""

    problem: str = ""  # why it cannot give it, in a few words
    gguf_files: tuple[str, ...] = ()  # of a repository that holds no config.json


def _ask_hub(name: str) -> _OnHub:
    """Ask the hub about a repository, once and without retries."""
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    http_error: Any = HfHubHTTPError.__bases__[0]  # of the HTTP client that the hub's client is built on
    try:
        about = huggingface_hub.HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except GatedRepoError:
        return _OnHub("it is gated: accept its licence there and log in with `hf auth login`")
    except RepositoryNotFoundError:
        return _OnHub("there is no such public model; a private one needs `hf auth login`")
    except HFValidationError:
        return _OnHub("this is not a valid name there")
    except (OSError, http_error) as error:
        return _OnHub(in_few_words(error))
    files = [one.rfilename for one in about.siblings or ()]
    gguf_files = sorted(file for file in files if file.endswith(GGUF_SUFFIX))
    return _OnHub(gguf_files=() if "config.json" in files else tuple(sorted(gguf_files, key=_is_no_usual_kind)))


def _is_no_usual_kind(file: str) -> bool:
    return "q4_k_m" not in file.lower()


@contextlib.contextmanager
def explained(source: Source, what: str) -> Iterator[None]:
    """Turn any error of a loader into a ModelError; ``what`` has a place for the model's name."""
    try:
        yield
    except (
        Exception
    ) as error:  # transformers, safetensors, tokenizers and pickle raise almost anything, Exception itself too
        if isinstance(error, GgufError):
            raise ModelError(f"{source.name} {in_few_words(error, _MOST_OF_GGUF)}") from error
        if source.hub_problem:
            raise ModelError(
                f"{source.name} is neither a folder here nor in the local cache, and the hub cannot be used: "
                f"{source.hub_problem}; give a model folder, or check the name and the connection"
            ) from error
        raise ModelError(f"{what.format(source.name)}: {in_few_words(error)}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the loaders' logging and progress bars, which are settings of the whole process, and restore them."""
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bars: Any = sys.modules.get("transformers.utils.logging")  # None: nothing has loaded what shows bars
    had_bars = bars is not None and bars.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    if had_bars:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if had_bars:
            bars.enable_progress_bar()
