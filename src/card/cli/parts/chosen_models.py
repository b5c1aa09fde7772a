"""The method and the models that options name, and an `LLM` of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from card.cli.parts.fetching import fetch_models
from card.cli.parts.options import DEMO_DRAFT, DEMO_TARGET, NO_DRAFT, given
from card.cli.parts.starting import load, spinner, start_drafter_child, tell
from card.config.method import default_method
from card.config.registry import find_method
from card.errors import SettingsError, named, spelled
from card.models.files.known_pairs import KnownPair, gigabytes, known_pair
from card.models.files.places import local_model

if TYPE_CHECKING:  # loaded when a command runs
    from card.api.llm import LLM

DRAFTER = "beam"  # the writer that is the draft model
_OF_A_DRAFT = ("draft_dtype", "draft_vocab", "draft_device", "placement", "schedule", "draft_keys")


def resolve_models(options: dict[str, Any], *, needs_draft: bool) -> tuple[str, str | None]:
    """Remove target and draft from ``options``; built-in and known targets have a default draft.

    Raises: ModelError for a path that is not a model, the target's first; SettingsError if the draft is missing.
    """
    target, draft = options.pop("target") or DEMO_TARGET, options.pop("draft")
    local_model(target)
    if draft is None and needs_draft:
        draft = DEMO_DRAFT if target == DEMO_TARGET else _known_draft(target)
    if draft in (None, NO_DRAFT) and needs_draft:
        context = click.get_current_context(silent=True)
        has_method = context is not None and any(one.name == "method" for one in context.command.params)
        without = f", or {named('method')} vanilla to do without" if has_method else ""
        raise SettingsError(f"this needs a draft model: give {named('draft')}{without}")
    if draft == NO_DRAFT:
        draft = None
    if draft is not None and needs_draft:
        local_model(draft)
    return target, draft


def _pair_of(target: str) -> KnownPair | None:
    """Return the known pair of a target on the hub; a local folder of that name is not such a target."""
    pair = known_pair(target)
    return pair if pair is not None and local_model(target) is None else None


def _known_draft(target: str) -> str | None:
    """Return the draft model of a known target, and tell the user about it."""
    pair = _pair_of(target)
    if pair is None:
        return None
    click.echo(
        f"card: {target} brings its draft model, {pair.draft.name}; both files are {gigabytes(pair.num_bytes)}, "
        f"fetched once, and need {gigabytes(pair.memory_bytes)} of memory; {', '.join(pair.licences)}; "
        f"--draft {NO_DRAFT} does without",
        err=True,
    )
    return pair.draft.name


@dataclass(frozen=True, slots=True)
class ChosenModels:
    """A method and its models."""

    method: str | None  # None: what `LLM` takes where no draft model is named
    target: str
    draft: str | None  # None also for a remote draft model, and where the target may have one


def choose_models(options: dict[str, Any]) -> ChosenModels:
    """Remove method, target and draft from ``options``. A target alone may draft with a part of its own.

    Raises: ModelError and SettingsError as in `resolve_models`.
    """
    asked = options.pop("method")
    has_sibling = options["target"] in (None, DEMO_TARGET) or _pair_of(options["target"]) is not None
    has_draft = has_sibling if options["draft"] is None else options["draft"] != NO_DRAFT
    has_server = options.get("draft_address") is not None
    wants_draft = options["draft"] != NO_DRAFT and (
        DRAFTER in (options.get("writers") or ()) or any(options.get(name) is not None for name in _OF_A_DRAFT)
    )
    goes_alone = not (asked or has_draft or has_server or wants_draft)
    method = asked or default_method(has_draft=not goes_alone)
    is_open = options["draft"] is None and not has_sibling and not has_server
    may_have_block = is_open and not find_method(method).needs_parallel_draft
    names, is_named = options.get("writers"), options["draft"] not in (None, NO_DRAFT)
    needs_draft = find_method(method).needs_draft and not has_server and (names is None or DRAFTER in names)
    if find_method(method).needs_parallel_draft and options["draft"] is None:
        options["draft"] = NO_DRAFT  # a sibling of the target is not a draft model
    if may_have_block and local_model(options["target"]) is not None:
        needs_draft = False  # loading it tells
    target, draft = resolve_models(options, needs_draft=needs_draft)
    draft = draft if needs_draft or is_named else None  # one that was named must be read, or is refused
    return ChosenModels(None if goes_alone and may_have_block else method, target, draft)


def make_llm(options: dict[str, Any]) -> LLM:
    """Load the models that the options name, with a spinner. Raises: CardError of any kind."""
    chosen = choose_models(options)
    spare = start_drafter_child(chosen.method, chosen.draft, options)
    make: type[LLM] = load("card.api.llm").LLM
    fetch_models(chosen.target, chosen.draft)
    with spinner(f"loading {chosen.target}") as say:
        llm = make(chosen.target, chosen.draft, method=chosen.method, spare=spare, say=say, **given(options))
    if note := llm.host.draft_note:  # after loading, so that a failed load prints one line
        tell(spelled(note, lambda setting: f"--{setting}"))
    return llm
