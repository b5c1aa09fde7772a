"""Are several writers at once ever slower than the best of them alone? On a clock that no neighbour disturbs.

The policy's choices depend on measured times, and machines drift by more than the few percent in question. So each
recording is replayed by the real workers and the real policy under the planner's clock.

python benchmarks/family/writers_in_virtual_time.py --target target.json --draft draft.json --recording gsm8k.rec
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import click
from options import append_lines, describe_run
from rich.console import Console
from rich.table import Table

from card.tools.planner.profile import load_profile
from card.tools.planner.recording import load_recording
from card.tools.planner.scenario import Scenario
from card.tools.planner.simulate import Simulator

SINGLE = ("beam", "suffix", "recycling")
SEVERAL = ("beam,suffix", "beam,suffix,recycling")  # the first ones are those by default


@click.command()
@click.option("--target", required=True, help="Profile of the target.")
@click.option("--draft", required=True, help="Profile of the draft model.")
@click.option("--recording", "recordings", multiple=True, required=True, type=Path, help="What the pair does; several.")
@click.option("--repeats", default=3, show_default=True, help="How often all texts are gone through.")
@click.option("--out", type=Path, help="JSON lines are appended to it.")
def main(target: str, draft: str, recordings: tuple[Path, ...], repeats: int, out: Path | None) -> None:
    """Print tokens/s of each writer alone and of several together, for each recording."""
    profiles = load_profile(target), load_profile(draft)
    table = Table("recording", *SINGLE, *(heading for name in SEVERAL for heading in (name, "/ best")))
    for path in recordings:
        recording = load_recording(path)
        simulator = Simulator(Scenario(target=profiles[0], draft=profiles[1], recording=recording))
        texts = list(range(len(recording.texts))) * repeats
        speeds = {
            name: simulator.run("card", {"writers": tuple(name.split(","))}, text_idxs=texts).tokens_per_s
            for name in (*SINGLE, *SEVERAL)
        }
        best = max(speeds[name] for name in SINGLE)
        over_best = {name: round(speeds[name] / best, 4) for name in SEVERAL}
        several = [cell for name in SEVERAL for cell in (f"{speeds[name]:.1f}", f"{over_best[name]:.3f}")]
        table.add_row(path.stem, *(f"{speeds[name]:.1f}" for name in SINGLE), *several)
        if out is not None:
            line = {
                "recording": path.name,
                "texts": len(recording.texts),
                "repeats": repeats,
                "target": profiles[0].name,
                "draft": profiles[1].name,
                "tokens_per_s": {name: round(speed, 2) for name, speed in speeds.items()},
                "over_best": over_best,
                **describe_run(),
            }
            append_lines(out, [line])
    Console().print(table)


if __name__ == "__main__":
    main()
