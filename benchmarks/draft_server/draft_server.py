"""What does a second machine for the draft model bring, by its distance?

    python benchmarks/draft_server/draft_server.py --prompts gsm8k_test.jsonl --limit 4 --target-cost 90M \
        --out draft_server.jsonl

Two processes stand for two machines of one core each: the target's, and a draft server. Distance is a proxy on the
server's core that hands bytes on after a delay. Rows: plain decoding and turns with a draft model on the target's core
(the second machine has nothing to do), CARD with fixed settings, and the default, which also has the draft model at
home and chooses. Order, times, the comparison of texts and the file are those of `card bench`.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

sys.path.append(str(Path(__file__).parents[1]))
import options
from loaded_pair import BASELINE, WARM_UP_TOKENS, LoadedPair, greedy, measure, shown
from rich.console import Console

from card.config import DraftSettings, VerifyShape, parse_parameter_count
from card.errors import CardError, SettingsError, WorkerError
from card.machine.threads import CoreSet, pinned
from card.models.inflation import inflate
from card.models.loading import load_decoder
from card.tools.bench.environment import choose_cores, describe_run
from card.tools.bench.records import RowFacts
from card.tools.bench.rows import CardRow, PromptIds

TURNS, FIXED, DEFAULT = "turns", "fixed", "default"
_SERVER = "from card.cli import main; main()"  # as the command `card` does
_PROXY = """
import sys
sys.path.insert(0, sys.argv[1])
from delay_proxy import DelayProxy
with DelayProxy(int(sys.argv[2]), one_way_s=float(sys.argv[3])) as proxy:
    print(proxy.address, flush=True)
    sys.stdin.read()
"""  # in a process of its own: a busy thread in this one would hold the target up in every round
_END_TIMEOUT_S = 10.0


@contextlib.contextmanager
def serving(program: str, options: Sequence[str], core: int) -> Iterator[str]:
    """Run a Python program beside this one, on one core, and give the address that the line it prints ends with.

    Raises: WorkerError if it ends without one.
    """
    with pinned(CoreSet((core,))):
        command = [sys.executable, "-c", program, *options]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline().split()
            if not said:
                raise WorkerError(f"the process with {' '.join(options)} did not come up; standard error says why")
            yield said[-1]
        finally:
            server.terminate()
            try:
                server.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()


class Places(LoadedPair):
    """Target and draft model, loaded once, and a row for each way of drafting and each distance."""

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._say, self._cores = say, two_cores(args.cores)
        target = load_decoder(args.target, dtype=args.dtype)
        if args.target_cost:
            target = inflate(target, parse_parameter_count(args.target_cost))
        super().__init__(args, pair_name(args), target, load_decoder(args.draft, dtype=args.dtype))

    def make_rows(self, prompts: PromptIds, chosen: Mapping[str, Mapping[str, Any]]) -> list[CardRow]:
        """Return the rows, each warmed up on a prompt; nothing is chosen here."""
        del chosen
        args, draft_core = self._args, self._cores[1]
        server_options = ["--listen", "tcp://127.0.0.1:0", "--draft", args.draft, "--dtype", args.dtype]
        server = serving(_SERVER, ["draft-server", *server_options, "--cores", str(draft_core)], draft_core)
        port = self._stack.enter_context(server).rpartition(":")[2]
        rows = [
            self._row(BASELINE, has_draft=False, method="vanilla"),
            self._row(TURNS, has_draft=True, schedule="turns"),
        ]
        for delay_ms in args.delays_ms:
            proxy = serving(_PROXY, [str(Path(__file__).parent), port, str(1e-3 * delay_ms)], draft_core)
            address = self._stack.enter_context(proxy)
            fixed = DraftSettings(verify=args.verify)
            rows.append(self._row(distant(FIXED, delay_ms), fixed, has_draft=False, draft_address=address))
            rows.append(self._row(distant(DEFAULT, delay_ms), has_draft=True, draft_address=address))
        for row in rows:
            row.decode(prompts[0], greedy(WARM_UP_TOKENS))
        return rows

    def _row(self, name: str, fixed: DraftSettings | None = None, *, has_draft: bool, **settings: Any) -> CardRow:
        """Return a row on the target's core; without ``fixed`` settings it tunes them."""
        self._say(f"preparing {name}")
        cores = self._cores[:1]
        settings |= {"policy": "auto" if fixed is None else "fixed", "cores": cores, "threads": 1}
        llm = self.make_llm(self._draft if has_draft else None, dtype=self._args.dtype, **settings)
        return CardRow(name, llm, cores, fixed)


def two_cores(text: str | None) -> tuple[int, int]:
    """Return the target's core and the drafter's: "0,1" as asked for, or the first and last that may be used.

    Raises: SettingsError if these are not two cores of this process.
    """
    cores = choose_cores(tuple(options.numbers(text)) if text else None)
    if len(cores) != 2:
        raise SettingsError(f"cores must be two, the target's and the drafter's, such as 0,1, got {text}")
    return cores[0], cores[1]


def distant(kind: str, delay_ms: float) -> str:
    """Return the name of a row of this kind whose server is so far away."""
    return f"{kind}, {delay_ms:g} ms away"


def pair_name(args: argparse.Namespace) -> str:
    """Return the name of the pair, its price included."""
    name = f"{Path(args.target).name}+{Path(args.draft).name}"
    return f"{name}@{args.target_cost}" if args.target_cost else name


def row_facts(args: argparse.Namespace) -> tuple[RowFacts, ...]:
    """Return what the run promises of its rows."""
    cores = two_cores(args.cores)
    names = [BASELINE, TURNS, *(distant(kind, delay) for delay in args.delays_ms for kind in (FIXED, DEFAULT))]
    return tuple(
        RowFacts(
            name=name,
            method="vanilla" if name == BASELINE else "card",
            cores=cores[:1] if name in (BASELINE, TURNS) else cores,
            threads=1,
            is_exact=True,
            is_comparable=True,
            settings={"verify": args.verify} if name.startswith(FIXED) else {},
        )
        for name in names
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns: 0, or 130 if it was interrupted."""
    args = parse_arguments(argv)
    pairs = {pair_name(args): partial(Places, args)}
    return shown(measure(args, pairs, row_facts(args), describe_run(), Console(stderr=True)))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options. Raises: SettingsError for a value that makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_model_options(parser)
    parser.add_argument("--limit", type=int, default=8, help="how many prompts (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to this file")
    parser.add_argument("--target-cost", help="inflate the target to the price of so many parameters, such as 300M")
    parser.add_argument("--cores", help="the target's core and the drafter's, such as 0,1 (default: first and last)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each prompt and row (default: %(default)s)")
    parser.add_argument("--delays-ms", type=_milliseconds, default=[0.2, 5.0, 20.0], help="one way, such as 0.2,5,20")
    parser.add_argument(
        "--verify", choices=get_args(VerifyShape), default="tree", help="with fixed settings (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if min(args.repeats, args.limit, args.max_tokens - 1) < 1 or min(args.delays_ms, default=0) < 0:
        raise SettingsError("--repeats and --limit must be 1 or more, --max-tokens 2 or more, --delays-ms 0 or more")
    return args


def _milliseconds(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CardError as error:
        sys.exit(f"draft_server.py: error: {error}")
