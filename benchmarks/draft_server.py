"""What does a draft server cost against a drafter in a process of one's own, next door and at a distance?

    python benchmarks/draft_server.py --prompts gsm8k_test.jsonl --limit 8 --target-cost 90M \
        --out benchmarks/results/draft_server.jsonl

The target has one core, the drafter the other, whoever runs it. Distance is a proxy on the drafter's core that hands
bytes on after a delay. Order, times and the comparison of texts are those of `methods.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import environment
import lineup
import methods
import report
from compare import TextJudge
from rich.console import Console
from rows import CardRow
from transformers.utils import logging as transformers_logging

from card import LLM, SamplingParams
from card.config import DraftSettings, PolicyName, VerifyShape
from card.engine.cores import Home, pinned
from card.errors import CardError, SettingsError, WorkerError
from card.models.loading import load_tokenizer

PROCESS = "process"
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


@contextlib.contextmanager
def serving(program: str, options: Sequence[str], core: int) -> Iterator[str]:
    """Run a Python program beside this one, on one core, and give the address that the line it prints ends with.

    Raises: WorkerError if it ends without one.
    """
    with pinned(Home((core,))):
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


class Bench:
    """The target, loaded once, and a row for each place that the drafter can be in."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._stack = contextlib.ExitStack()
        self._cores = environment.choose_cores(args.cores)
        self.tokenizer = load_tokenizer(args.target)
        self.target = environment.load_target(args.target, args.dtype, args.target_cost)
        self.params = SamplingParams(temperature=0.0, seed=0, max_tokens=args.max_tokens)
        self.target_cost: str | None = None

    def close(self) -> None:
        """End drafters, proxies and the server."""
        self._stack.close()

    def make_rows(self, prompt_ids: list[int]) -> list[CardRow]:
        """Return the rows, each warmed up on a prompt."""
        args, draft_core = self._args, self._cores[1]
        options = ["--listen", "tcp://127.0.0.1:0", "--draft", args.draft, "--dtype", args.dtype]
        server = serving(_SERVER, ["draft-server", *options, "--cores", str(draft_core)], draft_core)
        address = self._stack.enter_context(server)
        rows = [
            self._row(lineup.BASELINE, None, method="vanilla"),
            self._row(PROCESS, args.draft, placement="process", draft_cores=(draft_core,)),
            self._row("server", None, draft_address=address),
        ]
        port = address.rpartition(":")[2]
        for delay_ms in args.delays_ms:
            proxy = serving(_PROXY, [str(Path(__file__).parent), port, str(1e-3 * delay_ms)], draft_core)
            distant = self._stack.enter_context(proxy)
            rows.append(self._row(f"server, {delay_ms} ms away", None, draft_address=distant))
        for row in rows:
            row.decode(prompt_ids, self.params.replace(max_tokens=_WARM_UP_TOKENS))
        return rows

    def _row(self, name: str, draft: str | None, **settings: Any) -> CardRow:
        args, cores = self._args, self._cores[:1]
        is_fixed = args.policy == "fixed" or name == lineup.BASELINE
        common: dict[str, Any] = {"dtype": args.dtype, "start_timeout_s": environment.START_TIMEOUT_S}
        common |= {"policy": "fixed" if is_fixed else "auto", "cores": cores, "threads": 1}
        llm = self._stack.enter_context(LLM(self.target, draft, tokenizer=self.tokenizer, **common, **settings))
        self.target_cost = llm.target_cost
        return CardRow(name, llm, cores, DraftSettings(verify=args.verify) if is_fixed else None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns: 0, or 1 if a text differs from plain decoding other than at a near-tie."""
    args = parse_arguments(argv)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    run = environment.describe_run()
    with contextlib.ExitStack() as stack:
        bench = Bench(args)
        stack.callback(bench.close)
        prompts = environment.encode_questions(args.prompts, args.limit, bench.tokenizer)
        rows = bench.make_rows(prompts[0])
        cells = methods.measure(rows, prompts, bench.params, args.repeats, Console(stderr=True))
        if not cells:
            return 1
        facts = {
            "benchmark": "draft_server",
            "dtype": str(bench.target.dtype).removeprefix("torch."),
            "target": args.target,
            "draft": args.draft,
            "target_cost": bench.target_cost,
            "temperature": 0.0,
            "seed": 0,
            "num_prompts": len({cell.prompt_idx for cell in cells}),
            "repeats": len({cell.repeat for cell in cells}),
            "max_tokens": args.max_tokens,
            "stop": "an end token, or max_tokens",
        }
        process_runs = methods.by_repeat(cells, PROCESS)
        lines = [
            {
                **line,
                "speedup_process": methods.ratio(methods.by_repeat(cells, line["method"]), process_runs),
                **facts,
                **run,
            }
            for line in methods.make_lines(rows, cells, prompts, TextJudge(bench.target, bench.params))
        ]
    environment.append_lines(args.out, lines)
    Console().print(report.rich_table(lines, report.server_cells))
    return int(any(line["differences_are_near_ties"] is False for line in lines))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options. Raises: SettingsError for a value that makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    environment.add_common_options(parser)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each prompt and row (default: %(default)s)")
    parser.add_argument("--delays-ms", type=environment.numbers, default=[5, 20, 50], help="one way, such as 5,20,50")
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
