"""`card demo`: plain decoding, sequential speculation and CARD on the same problems, side by side."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import click
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from card.api.llm import LLM
from card.assembly.plan import readable
from card.cli.parts.chosen_models import resolve_models
from card.cli.parts.options import DEMO_TARGET, given
from card.cli.parts.remarks import demo_note, hint_at_int8
from card.cli.parts.starting import spinner
from card.cli.parts.tables import show
from card.config import SamplingParams, parse_parameter_count
from card.config.registry import methods
from card.engine.metrics import RequestStats
from card.errors import SettingsError
from card.models.demo import DEMO_PROBLEMS
from card.models.inflation import inflate
from card.models.loading import load_decoder, load_tokenizer

_METHODS = ("vanilla", "sps", "card")
_FRAMES_PER_S = 5.0  # drawing takes time from the target; the same for every method
_DEFAULT_COST = "90M"  # the demo target alone is too cheap for drafting to pay


@dataclass(slots=True)
class Racer:
    """One method's column."""

    method: str
    llm: LLM
    text: str = ""
    note: str = "waiting"
    token_ids: list[list[int]] = field(default_factory=list)  # per problem
    stats: list[RequestStats] = field(default_factory=list)

    def panel(self, width: int) -> Panel:
        return Panel(Text(self.text), title=self.method, subtitle=self.note, width=width, height=14)


def run(problems: int, max_tokens: int, temperature: float, seed: int, wide: bool, **options: Any) -> None:
    """Run `card demo`."""
    if not 1 <= problems <= len(DEMO_PROBLEMS):
        raise SettingsError(f"--problems must be from 1 to {len(DEMO_PROBLEMS)}, got {problems}")
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens).resolved()
    console = Console()
    racers = _load(options, console)
    try:
        for prompt in DEMO_PROBLEMS[:problems]:
            _race(console, racers, prompt, params)
    finally:
        for racer in racers:
            racer.llm.close()
    console.print()
    show(console, closing_table(racers), spare=("hit rate", "drafter layers/s", "share of ceiling"), is_wide=wide)
    console.print("All have the same cores; card drafts while that is faster, and as far as its draft model is sure.")
    if differing := ", ".join(racer.method for racer in racers if racer.token_ids != racers[0].token_ids):
        console.print(f"Text differs from plain decoding: {differing}. In bfloat16 two tokens may tie; see README.")
    else:
        console.print("All methods wrote the same text, token for token.")


def _load(options: dict[str, Any], console: Console) -> list[Racer]:
    """Load the target once and every method on it."""
    target, draft = resolve_models(options, needs_draft=True)
    cost = options.pop("target_cost") or (_DEFAULT_COST if target == DEMO_TARGET else None)
    with spinner("loading the models"):
        tokenizer = load_tokenizer(target)
        model = load_decoder(target, dtype=options["dtype"], device=options["device"])
        if cost is not None:
            model = inflate(model, parse_parameter_count(cost))
        racers = []
        settings = given(options) | {"wait_for_drafter": True, "cache": False}
        for method in _METHODS:
            has_draft = methods()[method].needs_draft
            llm = LLM(
                model, draft if has_draft else None, tokenizer=tokenizer, method=method, **readable(settings, method)
            )
            racers.append(Racer(method, llm))
    if note := demo_note(target):
        click.echo(f"{note}.", err=True)
    hint_at_int8(racers[0].llm.host.could_run_int8)
    console.print(f"target {target}, draft {draft}")
    if racers[0].llm.target_cost:
        console.print(f"target costs {racers[0].llm.target_cost}: inflated to the cost of a larger model")
    return racers


def _race(console: Console, racers: list[Racer], prompt: str, params: SamplingParams) -> None:
    """Let the methods answer one after the other; each has the whole machine."""
    for racer in racers:
        racer.text, racer.note = "", "waiting"
    width = max(20, console.width // len(racers) - 1)

    def picture() -> Group:
        return Group(Text(f"\n{prompt}", style="bold"), Columns([racer.panel(width) for racer in racers]))

    with Live(picture(), console=console, auto_refresh=False) as live:
        for racer in racers:
            token_ids: list[int] = []
            drawn_at = 0.0
            for chunk in racer.llm.stream([{"role": "user", "content": prompt}], params):
                token_ids += chunk.token_ids
                racer.text += chunk.text
                if chunk.finish_reason or time.monotonic() - drawn_at > 1 / _FRAMES_PER_S:
                    racer.note = f"{chunk.stats.decode_tokens_per_s:.0f} tokens/s"
                    live.update(picture(), refresh=console.is_terminal)
                    drawn_at = time.monotonic()
            racer.token_ids.append(token_ids)
            racer.stats.append(chunk.stats)
        live.refresh()


def closing_table(racers: list[Racer]) -> Table:
    """Return a table of the totals of each method over all problems."""
    shown = Table("method", title="over all problems")
    for column in ("tokens/s", "speed-up", "tokens a pass", "hit rate", "drafter layers/s", "share of ceiling"):
        shown.add_column(column, justify="right")
    plain = _tokens_per_s(racers[0].stats)
    for racer in racers:
        speed, total = _tokens_per_s(racer.stats), RequestStats.joined(racer.stats)
        row = [racer.method, f"{speed:.1f}", f"{speed / plain:.2f}x" if plain else ""]
        if total.drafter_passes:
            row += [f"{total.mean_acceptance_length:.2f}", f"{total.hit_rate:.0%}"]
            row += [f"{total.drafter_layers_per_s:.0f}", f"{total.ceiling_share:.0%}"]
        shown.add_row(*row)
    return shown


def _tokens_per_s(stats: list[RequestStats]) -> float:
    decode_s = sum(one.decode_s for one in stats)
    return sum(one.num_new_tokens - 1 for one in stats) / decode_s if decode_s > 0 else 0.0
