"""What do PEARL and SpecBranch roll back, and does H-RAD help? Counts on recordings, and no times.

Methods run on recordings of `card record` under the planner's clock, where a target pass takes as long as seven drafter
passes. So the same command gives the same counts. A rolled back token is a drafted one that the text ruled out; side
branches do not count. A recording holds no hidden states: with --hrad the target reads each recorded text once, and the
predictor says where SpecBranch would branch after each of its tokens, as evidence and as an order. --perfect obeys one
that is always right: what no predictor surpasses.

    python benchmarks/family/rollback.py --recording qwen-two-bits.rec --recording qwen.rec --lengths 2,4,7
    python benchmarks/family/rollback.py --recording questions.rec --lengths 4 --target demo-target --hrad demo
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import click
import numpy as np
from options import append_lines, describe_run, numbers
from rich.console import Console
from rich.table import Table

from card.engine.metrics import RequestStats
from card.family.specbranch.network import HRad
from card.kernels.number_types import Floats
from card.models.features import FINAL, FeatureWish, SeenRows
from card.models.loading import load_decoder
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.models.runners import make_runner
from card.tools.planner.profile import load_profile
from card.tools.planner.recording import RecordedText, Recording, load_recording, rows_of
from card.tools.planner.scenario import Scenario, build_stage, plan_method, replayed_texts
from card.tools.planner.simulate import decode

TARGET, DRAFT = "llama-3.1-70b-4xh100", "llama-3.2-1b-h100"  # flat passes, one as long as seven
OFF, EVIDENCE, OBEYED, PERFECT = "off", "evidence", "obeyed", "perfect"  # uses of H-RAD
COUNTS = (
    "target_passes",
    "rolled_back_tokens",
    "verified_tokens",
    "accepted_tokens",
    "drafter_layers",
    "drafter_passes",
    "drafter_dropped_nodes",
)
FIGURES = ("tokens a target pass", "rolled back a token", "drafted a token", "drafter passes a token")
NAMES = ("recording", "method", "branch_below", "hrad", "num_speculative_tokens")
Hints = Mapping[tuple[int, ...], float]  # the probability below which to branch, by the text so far


class Told:
    """Tells the drafter after each pass what a predictor said of the text so far."""

    wish = FeatureWish((FINAL,), "last")

    def __init__(self, hints: Hints) -> None:
        self._hints = hints

    def observe(self, seen: SeenRows) -> float:
        """Return the probability below which the drafter branches."""
        return self._hints[tuple(seen.token_ids)]


class Foreseen:
    """What a predictor says of a recording; the target reads each text once for it."""

    def __init__(self, target: RowRunner, name: str, recording: Recording) -> None:
        """Read the texts. Raises: ModelError if the predictor is of another target."""
        self._target, self._hrad = target, HRad.load(name)
        self._hrad.attach(target, 0.5)
        target.features.wish([FeatureWish(self._hrad.wish.layers, "logits")])
        self._texts = [(text.token_ids, self._states(text)) for text in recording.texts]

    def _states(self, text: RecordedText) -> Floats:
        """Return the states that precede each token of an answer, [n + 1, F]; the last row is of no token."""
        token_ids = [*text.prompt_ids, *text.token_ids]
        slot = self._target.open(len(token_ids))
        self._target.forward([Extension.of_text(slot, token_ids, first_logits=len(text.prompt_ids) - 1)])
        states = np.array(self._target.features.of(0, FeatureWish(self._hrad.wish.layers, "logits")))
        self._target.close(slot)
        return states

    def told(self, usual: float, use: str) -> list[list[float]]:
        """Return the probability below which to branch after each token of each answer."""
        self._hrad.attach(self._target, usual, is_obeyed=use == OBEYED)
        branch_below = self._hrad.branch_below
        return [[branch_below(*pair) for pair in zip(states, ids, strict=False)] for ids, states in self._texts]


def perfect_of(recording: Recording, length: int, usual: float) -> list[list[float]]:
    """Return what an obeyed predictor says that knows how many of the next drafts are accepted."""
    told = []
    for text in recording.texts:
        are_right = rows_of(recording, text).draft_ids[:, 0] == text.token_ids
        runs = [list(takewhile(bool, are_right[n + 1 : n + 1 + length])) for n in range(len(are_right))]
        told.append([0.0 if len(run) == length else usual if run else 1.0 for run in runs])
    return told


@click.command(help=__doc__)
@click.option("--recording", "recordings", multiple=True, required=True, type=Path, help="Of card record; several.")
@click.option("--lengths", default="2,4,7", show_default=True, help="Draft lengths.")
@click.option("--branch-below", "thresholds", default=(0.7,), multiple=True, show_default=True, help="Several.")
@click.option("--hrad", help="Predictor that `card train hrad` made for the pair; instead of other thresholds.")
@click.option("--target", help="Target of the recordings, which --hrad reads.")
@click.option("--perfect", is_flag=True, help="Also obey a predictor that is always right.")
@click.option("--out", type=Path, help="JSON lines are appended to it.")
def main(
    recordings: tuple[Path, ...],
    lengths: str,
    thresholds: tuple[float, ...],
    hrad: str | None,
    target: str | None,
    perfect: bool,
    out: Path | None,
) -> None:
    """Count what the methods roll back on recordings."""
    if (hrad is None) != (target is None):
        raise click.UsageError("--hrad and --target go together: the target reads the recorded texts for the predictor")
    uses = (OFF, *(() if hrad is None else (EVIDENCE, OBEYED)), *((PERFECT,) if perfect else ()))
    loaded = {path: load_recording(path) for path in recordings}
    longest = max(len(text.prompt_ids) + len(text.token_ids) for one in loaded.values() for text in one.texts)
    runner = None if target is None else make_runner(load_decoder(target, dtype="auto"), max_model_len=longest)

    def lines() -> Iterator[dict[str, Any]]:
        for path, recording in loaded.items():
            replay = Replay(recording)
            foreseen = Foreseen(runner, str(hrad), recording) if runner else None
            facts = {"recording": path.name, "agreement": round(recording.agreement(), 3)}
            for length in numbers(lengths):
                stats = replay.run("pearl", length)
                yield _line("pearl", length, stats, branch_below=None, hrad=OFF, **facts)
                for below in thresholds:
                    for use in uses:
                        told = foreseen.told(below, use) if foreseen and use in (EVIDENCE, OBEYED) else None
                        told = perfect_of(recording, length, below) if use == PERFECT else told
                        stats = replay.run("specbranch", length, below, told)
                        yield _line("specbranch", length, stats, branch_below=below, hrad=use, **facts)

    table = Table(*NAMES, *FIGURES)
    for line in lines():
        table.add_row(*(str(line[name]) for name in NAMES), *figures(line))
        if out is not None:
            append_lines(out, [line])
    Console().print(table)


class Replay:
    """Runs methods on one recording."""

    def __init__(self, recording: Recording) -> None:
        self._scenario = Scenario(target=load_profile(TARGET), draft=load_profile(DRAFT), recording=recording)

    def run(
        self, method: str, length: int, branch_below: float | None = None, told: Sequence[Sequence[float]] | None = None
    ) -> list[RequestStats]:
        """Return the counters of each text.

        Args:
            told: what a predictor says after each token of each text; None: nothing.
        """
        settings = {"num_speculative_tokens": length} | ({"branch_below": branch_below} if branch_below else {})
        plan = plan_method(self._scenario, method, settings)
        texts = replayed_texts(self._scenario, plan)
        hints: dict[tuple[int, ...], float] = {}
        for prompt, answer, values in zip(texts.prompts, texts.answers, told or (), strict=False):
            hints |= {(*prompt, *answer[: n + 1]): value for n, value in enumerate(values)}
        parts = build_stage(self._scenario, plan, texts, consumers=[Told(hints)] if told else [])
        idxs = range(len(texts.prompts))
        try:
            decode(parts, self._scenario, texts, idxs[:1], first_id=0)  # does not count, as in the planner
            return decode(parts, self._scenario, texts, idxs, first_id=len(idxs))
        finally:
            parts.close()


def _line(method: str, length: int, stats: Sequence[RequestStats], **facts: Any) -> dict[str, Any]:
    total = RequestStats.joined(stats)
    counts = {name: getattr(total, name) for name in COUNTS}
    tokens = total.num_new_tokens - len(stats)
    names = {"benchmark": "rollback", "method": method, "num_speculative_tokens": length}
    return {**names, **facts, "texts": len(stats), "tokens": tokens, **counts, **describe_run()}


def figures(line: dict[str, Any]) -> list[str]:
    """Return the cells of a line, in the order of FIGURES; drafted tokens are those of side branches, too."""
    drafted = line["drafter_dropped_nodes"] + line["accepted_tokens"]
    counts = (line["rolled_back_tokens"], drafted, line["drafter_passes"])
    return [f"{line['tokens'] / line['target_passes']:.2f}", *(f"{count / line['tokens']:.2f}" for count in counts)]


if __name__ == "__main__":
    main()
