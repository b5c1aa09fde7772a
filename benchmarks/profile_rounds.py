"""Where does the time of a target round and of a beam step go, beyond the models' own passes?

    python benchmarks/profile_rounds.py --prompts gsm8k_test.jsonl --target-cost 90M \
        --out benchmarks/results/profile_rounds.jsonl

The engine runs as it is; functions are replaced by timed ones from outside for the length of a profile. Parts do not
overlap: none of the timed functions calls another one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import options
import zmq
from rich.console import Console
from rich.table import Table

import card.workers.drafter
import card.workers.target
from card import LLM, SamplingParams
from card.bench.environment import MEASURED_START
from card.config import DraftSettings, VerifyShape
from card.engine.cores import Home, pinned
from card.errors import CardError
from card.models.loading import context_limit, load_model, load_tokenizer
from card.models.text import Detokenizer
from card.models.torch_runner import TorchRunner
from card.transport.process import ProcessLink
from card.tree.candidates import CandidateCache
from card.tree.messages import Close, Correction, DrafterMessage, DraftSpec, Layer, Open, decode, encode
from card.tree.nodes import NewNodes
from card.tree.sampling import CandidateScorer, Sampler
from card.workers.drafter import DrafterWorker
from card.workers.replica import Replica, draft_spec
from card.writers.beam import BeamSequence, BeamWriter

FORWARD = "forward"
_STEPS_PER_CORRECTION = 4  # about what a target pass takes
_TOKENS_PER_CORRECTION = 3
SHAPES: tuple[VerifyShape, ...] = ("chain", "tree")  # of CARD
_WARM_UP = 3  # rounds left out at the start of a prompt
_LONGEST_TEXT = 4096  # tokens
_SPARE_ROWS = 64

Target = tuple[Any, str, str]  # whose attribute, its name, which part it counts as

ROUND_PARTS: tuple[Target, ...] = (
    (TorchRunner, "forward", FORWARD),
    (ProcessLink, "receive", "receive: socket, decoding, watching the child"),
    (card.workers.target.TargetWorker, "receive", "receive: extend the replica"),
    (card.workers.target.TargetWorker, "best_path", "best path, for the policy"),
    (card.workers.target.TargetWorker, "query", "query"),
    (card.workers.target, "_extension", "build the extension"),
    (Sampler, "choose", "choose tokens"),
    (card.workers.target, "match", "match"),
    (TorchRunner, "keep", "keep: compact the KV rows"),
    (CandidateCache, "advance", "advance the replica"),
    (Replica, "correction", "make the correction"),
    (ProcessLink, "send", "send: encoding, socket"),
    (Detokenizer, "push", "tokens to text"),
)
STEP_PARTS: tuple[Target, ...] = (
    (TorchRunner, "forward", FORWARD),
    (BeamSequence, "frontier", "frontier"),
    (BeamSequence, "extension", "build the extension"),
    (CandidateScorer, "top", "log-softmax and top-k"),
    (CandidateCache, "grow", "grow the tree"),
    (card.workers.drafter._Drafting, "layer", "make the message"),
)
COMMIT_PARTS: tuple[Target, ...] = (
    (CandidateCache, "walk", "find the path"),
    (CandidateCache, "advance", "advance: re-root and prune"),
    (TorchRunner, "keep", "keep: compact the KV rows"),
    (CandidateCache, "frontier", "frontier: is the beam still full?"),
    (CandidateCache, "refill", "refill from the secondary tier"),
    (card.workers.drafter._Drafting, "layer", "make the message"),
)


@dataclass(slots=True)
class Stopwatch:
    """Sums the time of each part within one round, and keeps the rounds."""

    rounds: list[dict[str, float]] = field(default_factory=list)  # seconds by part, "total" among them
    _now: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, part: str, seconds: float) -> None:
        """Count time into the present round."""
        self._now[part] += seconds

    def end_round(self, total_s: float, *, counts: bool = True) -> None:
        """Close the present round; one that does not count is forgotten."""
        if counts:
            self.rounds.append({**self._now, "total": total_s})
        self._now.clear()

    @contextlib.contextmanager
    def watching(self, targets: Sequence[Target]) -> Iterator[None]:
        """Replace functions by timed ones inside the block."""
        originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in targets]
        try:
            for (owner, name, part), (_, _, original) in zip(targets, originals, strict=True):
                setattr(owner, name, self._timed(original, part))
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _timed(self, original: Any, part: str) -> Any:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._now[part] += time.perf_counter() - started

        return timed

    def line(self, kind: str, what: str) -> dict[str, Any]:
        """Return medians over rounds in microseconds; "rest" is what no part covers, overhead all but the forward."""
        assert self.rounds, f"no round of {what} was profiled"
        parts = dict.fromkeys(part for one in self.rounds for part in one if part != "total")
        for one in self.rounds:
            one["rest"] = one["total"] - sum(one.get(part, 0.0) for part in parts)
        medians = {part: _median_us([one.get(part, 0.0) for one in self.rounds]) for part in [*parts, "rest"]}
        medians = {part: medians[part] for part in sorted(medians, key=lambda part: (part != FORWARD, part == "rest"))}
        overheads = [one["total"] - one.get(FORWARD, 0.0) for one in self.rounds]
        return {
            "benchmark": "profile_rounds",
            "kind": kind,  # profiles of one kind share a table
            "what": what,
            "num_rounds": len(self.rounds),
            "parts": medians,
            "overhead_us": _median_us(overheads),
            "overhead_mean_us": round(1e6 * statistics.fmean(overheads), 1),
            "total_us": _median_us([one["total"] for one in self.rounds]),
        }


def _median_us(seconds: Sequence[float]) -> float:
    return round(1e6 * statistics.median(seconds), 1)


def profile_rounds(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, what: str) -> dict[str, Any]:
    """Profile the target's rounds from chunk to chunk; prefill and the first rounds of each prompt are left out."""
    watch = Stopwatch()
    with pinned(Home(llm.settings.cores or (), llm.settings.threads)), watch.watching(ROUND_PARTS):
        for prompt_ids in prompts:
            llm.reset_prefix_cache()
            before = time.perf_counter()
            for idx, _ in enumerate(llm.stream(list(prompt_ids), params)):
                now = time.perf_counter()
                watch.end_round(now - before, counts=idx >= _WARM_UP)
                before = now
    return watch.line("round", what)


class DrafterProfile:
    """Drives a drafter in this thread as a target would that accepts its best chain, and times steps and commits."""

    def __init__(self, runner: TorchRunner, spec: DraftSpec) -> None:
        self.steps, self.commits = Stopwatch(), Stopwatch()
        self._worker = DrafterWorker(BeamWriter(runner), clock=time.perf_counter)
        self._spec = spec
        self._context = zmq.Context()
        self._folder = tempfile.TemporaryDirectory(prefix="card-profile-")
        self._near, self._far = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._near.bind(f"ipc://{self._folder.name}/link")
        self._far.connect(f"ipc://{self._folder.name}/link")
        self._near.send(b"")  # waits until the two are connected
        self._far.recv()

    def run(self, request_id: int, prompt_ids: Sequence[int], max_tokens: int) -> None:
        """Draft about ``max_tokens`` behind one prompt."""
        replica = CandidateCache(max_nodes=self._spec.max_nodes, lead=self._spec.lead)
        known_len = len(prompt_ids)
        _take(replica, self._worker.receive(Open(request_id, tuple(prompt_ids), self._spec)))
        for idx in range(max_tokens // _TOKENS_PER_CORRECTION):
            for _ in range(_STEPS_PER_CORRECTION):
                _take(replica, self._step(counts=idx >= _WARM_UP))
            chain = replica.query(_TOKENS_PER_CORRECTION, "chain").tokens
            replica.advance(chain)
            correction = Correction(
                request_id, idx, known_len, chain, wants_snapshot=False, beam_width=0, lead=0, branch_below=-1.0
            )
            _take(replica, self._commit(correction, counts=idx >= _WARM_UP))
            known_len += len(chain)
        self._worker.receive(Close(request_id))

    def close(self) -> None:
        """Close the sockets."""
        self._near.close(linger=0)
        self._far.close(linger=0)
        self._context.term()
        self._folder.cleanup()

    def _step(self, *, counts: bool) -> list[DrafterMessage]:
        """Do what the drafter's process does between two looks at its socket."""
        with self.steps.watching(STEP_PARTS):
            started = time.perf_counter()
            messages = [] if self._worker.is_idle else self._worker.step()
            for message in messages:
                before = time.perf_counter()
                frame = encode(message, 1)
                encoded = time.perf_counter()
                self._near.send(frame, zmq.NOBLOCK)
                self.steps.add("encode the message", encoded - before)
                self.steps.add("send it", time.perf_counter() - encoded)
            self.steps.end_round(time.perf_counter() - started, counts=counts and bool(messages))
        for _ in messages:
            self._far.recv()
        return messages

    def _commit(self, correction: Correction, *, counts: bool) -> list[DrafterMessage]:
        frame = encode(correction, 1)
        with self.commits.watching(COMMIT_PARTS):
            started = time.perf_counter()
            _, message = decode(frame)
            decoded = time.perf_counter()
            replies = self._worker.receive(message)  # type: ignore[arg-type]
            self.commits.add("decode the message", decoded - started)
            self.commits.end_round(time.perf_counter() - started, counts=counts)
        return replies


def _take(replica: CandidateCache, messages: Sequence[DrafterMessage]) -> None:
    """Bring a replica up to date, as the target does."""
    for message in messages:
        if isinstance(message, Layer):
            if message.is_reset:
                replica.restart(message.epoch, message.root_id)
            replica.extend(message.epoch, NewNodes(message.ids, message.parents, message.token_ids, message.logprobs))


def profile_drafter(
    args: argparse.Namespace, core: int, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[dict[str, Any]]:
    """Profile the steps of a drafter for each beam width, and its commits for the last one."""
    model = load_model(args.draft, dtype=args.dtype)
    lines = []
    for width in args.beam_widths:
        draft = DraftSettings(beam_width=width)
        rows = min(2 * draft.lead * width, draft.max_nodes) + _SPARE_ROWS
        runner = TorchRunner(model, max_model_len=min(_LONGEST_TEXT, context_limit(model)), max_tree_rows=rows)
        profile = DrafterProfile(runner, draft_spec(draft, params, max_len=runner.max_model_len))
        try:
            with pinned(Home((core,), 1)):
                for request_id, prompt_ids in enumerate(prompts):
                    profile.run(request_id, prompt_ids, params.max_tokens)
        finally:
            profile.close()
        lines.append(profile.steps.line("step", f"beam step, width {width}"))
    lines.append(profile.commits.line("commit", f"drafter's commit, width {width}"))
    facts = {"dtype": str(model.dtype).removeprefix("torch."), "target_cost": None}
    return [{**line, **facts} for line in lines]


def profile_target(
    args: argparse.Namespace, cores: tuple[int, int], prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[dict[str, Any]]:
    """Profile rounds of plain decoding and of CARD with each shape; the drafter is in a process of its own."""
    tokenizer = load_tokenizer(args.target)
    model = options.load_target(args.target, args.dtype, args.target_cost)
    settings: dict[str, Any] = {"tokenizer": tokenizer, "policy": "fixed", "cores": cores[:1], "threads": 1}
    settings["dtype"] = args.dtype
    with LLM(model, method="vanilla", **settings) as llm:
        lines = [profile_rounds(llm, prompts, params, "plain round")]
    with LLM(model, args.draft, method="card", draft_cores=cores[1:], **MEASURED_START, **settings) as llm:
        for shape in SHAPES:
            llm.draft_settings = llm.draft_settings.replace(verify=shape)
            lines.append(profile_rounds(llm, prompts, params, f"card round, {shape}"))
    facts = {"dtype": str(model.dtype).removeprefix("torch."), "target_cost": llm.target_cost}
    return [{**line, **facts} for line in lines]


def print_table(console: Console, lines: Sequence[dict[str, Any]]) -> None:
    """Print each profile as a table of its own."""
    for line in lines:
        table = Table(title=f"{line['what']} ({line['num_rounds']} of them)")
        table.add_column("part")
        table.add_column("median, µs", justify="right")
        for part, median_us in line["parts"].items():
            table.add_row(part, f"{median_us:.0f}", style="dim" if part == FORWARD else None)
        table.add_row("overhead: all but the forward", f"{line['overhead_us']:.0f}", style="bold")
        table.add_row("total", f"{line['total_us']:.0f}", style="bold")
        console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the profiles. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_common_options(parser)
    parser.add_argument("--beam-widths", type=options.numbers, default=[1, 8, 16], help="such as 1,8,16")
    parser.set_defaults(limit=4)
    args = parser.parse_args(argv)
    cores = options.two_cores(args.cores)
    run = options.describe_run()
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=args.max_tokens, ignore_eos=True)
    tokenizer = load_tokenizer(args.target)
    prompts = options.encode_prompts(args.prompts, args.limit, tokenizer)
    lines = profile_target(args, cores, prompts, params)
    lines += profile_drafter(args, cores[1], prompts, params)
    facts = {"target": args.target, "draft": args.draft, **run}
    options.append_lines(args.out, [{**line, **facts} for line in lines])
    print_table(Console(), lines)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CardError as error:
        sys.exit(f"profile_rounds.py: error: {error}")
