"""`card generate --method arbitrage`: two engines on one pair, and a router that chooses between them step by step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click

from card.api.llm import LLM
from card.cli.parts.chosen_models import resolve_models
from card.cli.parts.options import given
from card.cli.parts.remarks import remark
from card.cli.parts.starting import spinner
from card.config import SamplingParams
from card.errors import SettingsError
from card.labs.steps.arbitrage import Arbitrage, SteppedOutput, check_params
from card.labs.steps.named_routers import parse_router
from card.labs.steps.record import STEPWISE
from card.models.loading import load_decoder, load_tokenizer

_ROUTER = "entropy"  # it needs no training
_INSIDE = "sps"  # the method within the target's steps
_OF_THE_DRAFT = "max_model_len threads cores cache check cache_dir"  # settings shared with its own engine


def run(*, prompt: str, params: SamplingParams, router: str | None, as_json: bool, stats: bool, **options: Any) -> None:
    """Run `card generate --method arbitrage`. Raises: CardError of any kind."""
    chosen = parse_router(router or _ROUTER)
    check_params(params)
    if options["draft_address"] is not None:
        raise SettingsError(f"method {STEPWISE} lets the draft model write here; give --draft, not --draft-address")
    del options["method"]
    with open_pair(options) as (both, single):
        stepped = Arbitrage(both, single, chosen)
        output = stepped.answer([prompt], params, lambda _, step: None if as_json else _show(step.text))[0]
        click.echo(json.dumps(_facts(output, router or _ROUTER), ensure_ascii=False) if as_json else "")
        if stats and not as_json:
            click.echo(_line(output), err=True)
        remark(both, params, len(output.token_ids), output.finish_reason)


@contextmanager
def open_pair(options: dict[str, Any]) -> Iterator[tuple[LLM, LLM]]:
    """Load a pair: the target with its drafter, and the draft model alone, which is loaded once for both.

    Args:
        options: settings of the target's engine, and those of `_OF_THE_DRAFT`; None leaves the defaults.
    Raises: CardError of any kind.
    """
    target, draft = resolve_models(options, needs_draft=True)
    assert draft is not None
    names = {"dtype": options.get("draft_dtype") or options["dtype"]}
    where = {**names, "device": options.get("draft_device") or options["device"]}
    alone = {name: options.get(name) for name in _OF_THE_DRAFT.split()}
    inside = {"placement": "inline", "policy": "fixed", **given(options)}
    with spinner(f"loading {target}") as say:
        cache_dir = options.get("cache_dir") if options.get("cache", True) else ""
        model: Any = load_decoder(draft, **where, cache_dir=cache_dir)
        both = LLM(target, model, method=_INSIDE, say=say, **inside)
    with both, LLM(model, tokenizer=load_tokenizer(draft), **where, **given(alone)) as single:
        yield both, single


def _show(text: str) -> None:
    click.echo(text, nl=False)


def _facts(output: SteppedOutput, router: str) -> dict[str, Any]:
    return {**asdict(output), "method": STEPWISE, "router": router}


def _line(output: SteppedOutput) -> str:
    num_targets = sum(step.writer == "target" for step in output.steps)
    return (
        f"{STEPWISE}: {len(output.token_ids)} tokens, steps of the target {num_targets} of {len(output.steps)}, "
        f"{output.target_tokens} tokens of it in {output.target_passes} passes, {output.draft_tokens} tokens of the "
        f"draft model, exact: {str(output.exact).lower()}"
    )
