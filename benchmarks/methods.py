"""How fast is each decoding method on the same weights, dtype and prompts, in one run?

    python benchmarks/methods.py --prompts gsm8k_test.jsonl --limit 20 --max-tokens 128 --target-cost 90M \
        --out benchmarks/results/methods.jsonl

Every method decodes every prompt, one method after the other, before the next prompt comes: what drifts on the machine
hits all alike. Texts are compared with plain decoding before any time is shown. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import environment
import report
from compare import TextJudge, TokenIds
from rich.console import Console
from rich.progress import Progress
from rows import AssistantSettings, CardRow, Decoded, Row, TransformersRow
from transformers.utils import logging as transformers_logging

from card import LLM, SamplingParams
from card.config import DraftSettings
from card.engine.cores import Home, pinned
from card.errors import CardError, SettingsError
from card.models.loading import end_token_ids, load_model, load_tokenizer

OURS = (
    "vanilla",
    "vanilla-all-cores",
    "sps",
    "sps-all-cores",
    "card-chain",
    "card-tree",
    "card-turns-all-cores",
    "card",
)
THEIRS = (
    "transformers",
    "transformers-all-cores",
    "transformers-assisted",
    "transformers-assisted-all-cores",
)
UNCOUPLED = ("sps-uncoupled", "card-chain-uncoupled", "card-tree-uncoupled")
BASELINE, BASELINE_ALL_CORES = OURS[:2]
_WARM_UP_TOKENS = 16
_CHOOSING_PROMPTS = 2  # draft lengths are chosen on the first prompts

PromptIds = list[list[int]]


@dataclass(frozen=True, slots=True)
class Cell:
    """All rows on one prompt, once: either all of them are there or the cell is dropped."""

    repeat: int
    prompt_idx: int
    decoded: dict[str, Decoded]  # by row


class Bench:
    """The models, loaded once, and the rows made of them."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self._args = args
        self._console = console
        self._stack = contextlib.ExitStack()
        self._llms: dict[tuple[str, str, bool], LLM] = {}
        self.cores = environment.choose_cores(args.cores)
        self.tokenizer = load_tokenizer(args.target)
        self.target = environment.load_target(args.target, args.dtype, args.target_cost)
        self.draft = load_model(args.draft, dtype=args.dtype)
        self.target_cost: str | None = None
        self.params = SamplingParams(temperature=args.temperature, seed=args.seed, max_tokens=args.max_tokens)

    def close(self) -> None:
        """End the drafters."""
        self._stack.close()

    def make_rows(self, names: Sequence[str], prompts: PromptIds) -> list[Row]:
        """Return the rows, each warmed up; where a draft length is to be chosen, the fastest on the first prompts."""
        rows: list[Row] = []
        chosen: dict[str, Row] = {}  # uncoupled rows take the draft length of their coupled twin
        for name in names:
            self._console.print(f"preparing {name}")
            twin = chosen.get(name.removesuffix("-uncoupled"))
            options = self._options(name, twin)
            for option in options:
                option.decode(prompts[0], self.params.replace(max_tokens=_WARM_UP_TOKENS))
            chosen[name] = fastest(options, prompts[:_CHOOSING_PROMPTS], self.params)
            rows.append(chosen[name])
        return rows

    def _options(self, name: str, twin: Row | None) -> list[Row]:
        """Return the row of this name, or one for each draft length to choose from."""
        on_all_cores = name.endswith("all-cores")
        lengths: list[int] = self._args.sps_lengths
        if name.startswith("transformers"):
            make = self._transformers_row
            if "assisted" not in name:
                return [make(name, on_all_cores, None)]
            settings = [AssistantSettings(), *(AssistantSettings(num_assistant_tokens=n) for n in lengths)]
            return [make(name, on_all_cores, one) for one in settings]
        if name == "card":
            return [CardRow(name, self._llm("card", "auto", True), self.cores, None)]
        cores = self.cores if on_all_cores else self.cores[:1]
        is_coupled = not name.endswith("-uncoupled")
        if name.startswith("sps"):
            llm = self._llm("sps", "inline", on_all_cores)
            if twin is not None and not is_coupled:
                lengths = [twin.settings["num_speculative_tokens"]]
            drafts = [DraftSettings(num_speculative_tokens=n, coupled_noise=is_coupled) for n in lengths]
        elif name.startswith("card-turns"):
            llm = self._llm("card", "inline", on_all_cores)
            drafts = [self._draft_settings(verify="tree", num_speculative_tokens=n) for n in lengths]
        elif name.startswith("card"):
            llm = self._llm("card", "process", on_all_cores)
            drafts = [self._draft_settings(verify="chain" if "chain" in name else "tree", coupled_noise=is_coupled)]
        else:
            llm, drafts = self._llm("vanilla", "inline", on_all_cores), [DraftSettings()]
        return [CardRow(name, llm, cores, draft) for draft in drafts]

    def _draft_settings(self, **changes: Any) -> DraftSettings:
        asked = {name: getattr(self._args, name) for name in report.DRAFT_OPTIONS}
        return DraftSettings(**{name: value for name, value in asked.items() if value is not None}, **changes)

    def _llm(self, method: str, placement: str, on_all_cores: bool) -> LLM:
        """Return the LLM that runs ``method`` there, loaded once; placement "auto" leaves all to the tuned policy."""
        key = method, placement, on_all_cores
        if key not in self._llms:
            settings: dict[str, Any] = {"dtype": self._args.dtype, "start_timeout_s": environment.START_TIMEOUT_S}
            draft: Any = None
            if placement != "auto":
                cores = self.cores if on_all_cores else self.cores[:1]
                settings |= {"policy": "fixed", "placement": placement, "cores": cores, "threads": len(cores)}
            if method == "sps":  # in the target's own thread, so it may be the very object that transformers uses
                draft, settings["num_speculative_tokens"] = self.draft, max(self._args.sps_lengths)
            elif method == "card":
                draft = self.draft if placement == "inline" else self._args.draft
            if method == "card" and placement != "auto":
                largest = self._draft_settings()
                settings |= {n: getattr(largest, n) for n in report.DRAFT_OPTIONS}
            if placement == "process":
                settings["draft_cores"] = self.cores[1:]
            with pinned(Home(self.cores)):  # who chooses cores by itself has these
                llm = LLM(self.target, draft, tokenizer=self.tokenizer, method=method, **settings)
            self._llms[key] = self._stack.enter_context(llm)
            self.target_cost = llm.target_cost
        return self._llms[key]

    def _transformers_row(self, name: str, on_all_cores: bool, assistant: AssistantSettings | None) -> Row:
        return TransformersRow(
            name,
            self.target,
            end_token_ids(self.target, self.tokenizer),
            self.cores if on_all_cores else self.cores[:1],
            is_comparable=self.params.temperature == 0.0,
            assistant=self.draft if assistant else None,
            assistant_settings=assistant,
        )


def fastest(options: list[Row], prompts: PromptIds, params: SamplingParams) -> Row:
    """Return the option that decodes the prompts fastest; prompts are the outer loop."""
    if len(options) == 1:
        return options[0]
    runs: list[list[Decoded]] = [[] for _ in options]
    for prompt_ids in prompts:
        for option, done in zip(options, runs, strict=True):
            done.append(option.decode(prompt_ids, params))
    rates = [report.tokens_per_s(done) for done in runs]
    best = options[rates.index(max(rates))]
    varying = "num_speculative_tokens" if "num_speculative_tokens" in best.settings else "assistant"
    tried = {str(option.settings[varying]): round(rate, 2) for option, rate in zip(options, rates, strict=True)}
    best.settings = {**best.settings, "chosen_among": tried}  # tokens/s of each on those prompts
    return best


def measure(
    rows: Sequence[Row], prompts: PromptIds, params: SamplingParams, repeats: int, console: Console
) -> list[Cell]:
    """Return the finished cells: repeat by repeat, prompt by prompt, all rows in turn. Ctrl-C keeps what is done."""
    cells: list[Cell] = []
    jobs = list(itertools.product(range(repeats), range(len(prompts))))
    with Progress(console=console, transient=True, auto_refresh=False) as progress:  # no thread beside the decoding
        task = progress.add_task("decoding", total=len(jobs) * len(rows))
        try:
            for repeat, prompt_idx in jobs:
                decoded: dict[str, Decoded] = {}
                for row in rows:
                    what = f"repeat {repeat + 1}, prompt {prompt_idx + 1}, {row.name}"
                    progress.update(task, description=what, refresh=True)
                    decoded[row.name] = row.decode(prompts[prompt_idx], params)
                    progress.advance(task)
                cells.append(Cell(repeat, prompt_idx, decoded))
        except KeyboardInterrupt:
            console.print(f"interrupted: {len(cells)} of {len(jobs)} rounds over all methods are done")
    return whole_repeats(cells, len(prompts))


def whole_repeats(cells: list[Cell], num_prompts: int) -> list[Cell]:
    """Drop the last repeat if it lacks prompts, unless it is the only one."""
    num_whole = len(cells) // num_prompts
    return [cell for cell in cells if cell.repeat < num_whole] if num_whole else cells


def make_lines(rows: Sequence[Row], cells: list[Cell], prompts: PromptIds, judge: TextJudge) -> list[dict[str, Any]]:
    """Return one result per row. Texts are compared before any figure is made of the times."""
    differences = {}
    for row in rows:
        pairs: list[tuple[int, TokenIds, TokenIds]] = [
            (c.prompt_idx, c.decoded[row.name].token_ids, c.decoded[BASELINE].token_ids) for c in cells
        ]
        differences[row.name] = judge.first_differences(prompts, pairs) if row.is_comparable else None
    lines = []
    for row in rows:
        runs = by_repeat(cells, row.name)
        line = {
            "benchmark": "methods",
            "method": row.name,
            **report.comparison_fields(differences[row.name]),
            **report.speed_fields(runs),
            "speedup_same_core": ratio(runs, by_repeat(cells, BASELINE)),
            "speedup_all_cores": None,
            **report.cost_fields(list(itertools.chain(*runs))),
            "settings": dict(row.settings),
        }
        if any(other.name == BASELINE_ALL_CORES for other in rows):
            line["speedup_all_cores"] = ratio(runs, by_repeat(cells, BASELINE_ALL_CORES))
        lines.append(line)
    return lines


def by_repeat(cells: list[Cell], name: str) -> list[list[Decoded]]:
    """Return a row's runs, one list per repeat."""
    return [[c.decoded[name] for c in group] for _, group in itertools.groupby(cells, lambda cell: cell.repeat)]


def ratio(runs: list[list[Decoded]], baseline: list[list[Decoded]]) -> float:
    """Return the median over repeats of the speed against the baseline's in the same repeat."""
    rates = zip(map(report.tokens_per_s, runs), map(report.tokens_per_s, baseline), strict=True)
    return round(statistics.median(own / plain if plain else 0.0 for own, plain in rates), 3)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns: 0, or 1 if a text differs from plain decoding other than at a near-tie."""
    args = parse_arguments(argv)
    console = Console(stderr=True)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    run = environment.describe_run()
    with contextlib.ExitStack() as stack:
        bench = Bench(args, console)
        stack.callback(bench.close)
        prompts = environment.encode_questions(args.prompts, args.limit, bench.tokenizer)
        rows = bench.make_rows(args.methods, prompts)
        cells = measure(rows, prompts, bench.params, args.repeats, console)
        if not cells:
            return 1
        judge = TextJudge(bench.target, bench.params)
        lines = [
            {
                **line,
                "dtype": str(bench.target.dtype).removeprefix("torch."),
                "target": args.target,
                "draft": args.draft,
                "target_cost": bench.target_cost,
                "temperature": args.temperature,
                "seed": args.seed,
                "num_prompts": len({cell.prompt_idx for cell in cells}),
                "repeats": len({cell.repeat for cell in cells}),
                "max_tokens": args.max_tokens,
                "stop": "an end token, or max_tokens",
                **run,
            }
            for line in make_lines(rows, cells, prompts, judge)
        ]
    environment.append_lines(args.out, lines)
    Console().print(report.rich_table(lines))
    return int(any(line["differences_are_near_ties"] is False for line in lines))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options. Raises: SettingsError for a value that makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    environment.add_common_options(parser)
    known = OURS + THEIRS + UNCOUPLED
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each prompt and method (default: %(default)s)")
    parser.add_argument(
        "--sps-lengths", type=environment.numbers, default=[2, 3, 4, 5, 6, 8, 10, 12], help="to choose from"
    )
    for name, kind in report.DRAFT_OPTIONS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help="of card, fixed (default: the library's)")
    parser.add_argument(
        "--methods", type=lambda text: text.split(","), help=f"some of {','.join(known)} (default: all)"
    )
    parser.add_argument("--coupling-report", action="store_true", help="add rows without coupled noise")
    args = parser.parse_args(argv)
    wanted = args.methods or [*OURS, *THEIRS]
    if args.coupling_report:
        if args.temperature == 0:
            raise SettingsError("--coupling-report needs a temperature above 0, got 0; add --temperature 1")
        wanted = [*wanted, *(name for name in UNCOUPLED if name.removesuffix("-uncoupled") in wanted)]
    if unknown := [name for name in wanted if name not in known]:
        raise SettingsError(f"unknown method {unknown[0]!r}; known: {', '.join(known)}")
    if min(args.repeats, args.limit, args.max_tokens - 1, *args.sps_lengths) < 1:
        raise SettingsError("--repeats, --limit and --sps-lengths must be 1 or more, --max-tokens 2 or more")
    args.methods = [name for name in known if name in wanted or name == BASELINE]  # in our order; plain always
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CardError as error:
        sys.exit(f"methods.py: error: {error}")
