"""What does a draft server cost against a drafter in a process of one's own, next door and at a distance?

    python benchmarks/draft_server.py --prompts gsm8k_test.jsonl --limit 8 --target-cost 90M \
        --out draft_server.jsonl

The target has one core, the drafter the other, whoever runs it. Distance is a proxy on the drafter's core that hands
bytes on after a delay. Order, times, the comparison of texts and the file are those of `card bench`.
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

import options
from rich.console import Console
from transformers.utils import logging as transformers_logging

from card import LLM, SamplingParams
from card.assembly.plan import readable
from card.config import DraftSettings, PolicyName, VerifyShape
from card.errors import CardError, SettingsError, WorkerError
from card.machine.threads import CoreSet, pinned
from card.models.facts import context_limit, parameter_count
from card.models.inflation import inflated_from
from card.models.loading import load_tokenizer
from card.theirs.transformers.loading import load_model
from card.tools.bench.compare import TextJudge
from card.tools.bench.environment import MEASURED_START, describe_run, weights_fingerprint
from card.tools.bench.lineup import BenchPlan
from card.tools.bench.records import ModelPair, RowFacts
from card.tools.bench.rows import CardRow, PromptIds
from card.tools.bench.runner import run_bench
from card.tools.bench.tables import rich_tables

BASELINE = "vanilla"
PROCESS, SERVER = "process", "server"
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
_WARM_UP_TOKENS = 16
_MAX_MODEL_LEN = 4096
_INTERRUPTED = 130


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


class Places:
    """The target, loaded once, and a row for each place that the drafter can be in."""

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._args, self._say = args, say
        self._stack = contextlib.ExitStack()
        self._cores = options.two_cores(args.cores)
        self._rows: list[CardRow] = []
        self.tokenizer = load_tokenizer(args.target)
        self._target = options.load_target(args.target, args.dtype, args.target_cost)
        self.dtype = str(self._target.dtype).removeprefix("torch.")
        self.max_model_len = min(context_limit(self._target), _MAX_MODEL_LEN)
        self.judge = TextJudge(self._target, params_of(args))

    def close(self) -> None:
        """End drafters, proxies and the server."""
        self._stack.close()

    def pair_facts(self) -> ModelPair:
        """Return what the run says of the pair."""
        draft = load_model(self._args.draft, dtype=self._args.dtype)
        original = inflated_from(self._target)
        cost = f"{parameter_count(self._target) / 1e6:.0f}M (inflated from {(original or 0) / 1e6:.1f}M, same outputs)"
        return ModelPair(
            name=pair_name(self._args),
            target=self._args.target,
            draft=self._args.draft,
            target_cost=cost if original else None,
            target_parameters=parameter_count(self._target),
            draft_parameters=parameter_count(draft),
            fingerprint=weights_fingerprint(self._target, draft),
        )

    def make_rows(self, prompts: PromptIds, chosen: Mapping[str, Mapping[str, Any]]) -> list[CardRow]:
        """Return the rows, each warmed up on a prompt; nothing is chosen here."""
        del chosen
        args, draft_core = self._args, self._cores[1]
        server_options = ["--listen", "tcp://127.0.0.1:0", "--draft", args.draft, "--dtype", args.dtype]
        server = serving(_SERVER, ["draft-server", *server_options, "--cores", str(draft_core)], draft_core)
        address = self._stack.enter_context(server)
        rows = [
            self._row(BASELINE, None, method="vanilla"),
            self._row(PROCESS, args.draft, placement="process", draft_cores=(draft_core,)),
            self._row(SERVER, None, draft_address=address),
        ]
        port = address.rpartition(":")[2]
        for delay_ms in args.delays_ms:
            proxy = serving(_PROXY, [str(Path(__file__).parent), port, str(1e-3 * delay_ms)], draft_core)
            distant = self._stack.enter_context(proxy)
            rows.append(self._row(distant_name(delay_ms), None, draft_address=distant))
        for row in rows:
            row.decode(prompts[0], params_of(args).replace(max_tokens=_WARM_UP_TOKENS))
        return rows

    def _row(self, name: str, draft: str | None, **settings: Any) -> CardRow:
        self._say(f"preparing {name}")
        args, cores = self._args, self._cores[:1]
        is_fixed = args.policy == "fixed" or name == BASELINE
        start = readable(MEASURED_START, settings.get("method", "card"))
        common: dict[str, Any] = {"dtype": args.dtype, **start}
        common |= {"policy": "fixed" if is_fixed else "auto", "cores": cores, "threads": 1}
        llm = self._stack.enter_context(LLM(self._target, draft, tokenizer=self.tokenizer, **common, **settings))
        return CardRow(name, llm, cores, DraftSettings(verify=args.verify) if is_fixed else None)


def params_of(args: argparse.Namespace) -> SamplingParams:
    """Return how everything is decoded: greedily."""
    return SamplingParams(temperature=0.0, seed=0, max_tokens=args.max_tokens).resolved()


def distant_name(delay_ms: int) -> str:
    """Return the name of the row whose server is so far away."""
    return f"{SERVER}, {delay_ms} ms away"


def pair_name(args: argparse.Namespace) -> str:
    """Return the name of the pair, its price included."""
    name = f"{Path(args.target).name}+{Path(args.draft).name}"
    return f"{name}@{args.target_cost}" if args.target_cost else name


def row_facts(args: argparse.Namespace) -> tuple[RowFacts, ...]:
    """Return what the run promises of its rows."""
    cores = options.two_cores(args.cores)
    names = [BASELINE, PROCESS, SERVER, *(distant_name(delay_ms) for delay_ms in args.delays_ms)]
    return tuple(
        RowFacts(
            name=name,
            method="vanilla" if name == BASELINE else "card",
            cores=cores[:1] if name == BASELINE else cores,
            threads=1,
            is_exact=True,
            is_comparable=True,
            settings={"policy": args.policy, "verify": args.verify},
        )
        for name in names
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns: 0, or 130 if it was interrupted."""
    args = parse_arguments(argv)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    plan = BenchPlan(
        rows=row_facts(args),
        baseline=BASELINE,
        pairs={pair_name(args): partial(Places, args)},
        datasets=(options.prompt_set(args.prompts, args.limit),),
        params=params_of(args),
        repeats=args.repeats,
    )
    run = run_bench(plan, describe_run(), args.out, Console(stderr=True))
    for table in rich_tables(run):
        Console().print(table)
    return 0 if run.status == "complete" else _INTERRUPTED


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options. Raises: SettingsError for a value that makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_common_options(parser)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each prompt and row (default: %(default)s)")
    parser.add_argument("--delays-ms", type=options.numbers, default=[5, 20, 50], help="one way, such as 5,20,50")
    parser.add_argument(
        "--policy", choices=get_args(PolicyName), default="fixed", help="how candidates are used (default: %(default)s)"
    )
    parser.add_argument(
        "--verify", choices=get_args(VerifyShape), default="tree", help="under the fixed policy (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if min(args.repeats, args.limit, args.max_tokens - 1) < 1 or min(args.delays_ms, default=0) < 0:
        raise SettingsError("--repeats and --limit must be 1 or more, --max-tokens 2 or more, --delays-ms 0 or more")
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CardError as error:
        sys.exit(f"draft_server.py: error: {error}")
