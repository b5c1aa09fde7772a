"""How fast is CARD beside other engines, on the same machine, models, token ids and cores?

    make bench-peers                                              # builds what is missing, then runs everything
    python benchmarks/peers/run.py --models demo-90M --only card,llama.cpp --limit 2 --repeats 1 --max-tokens 32

Greedy decoding. Each engine runs in a worker process and an environment of its own; one works at a time. Texts are
compared with plain decoding of the same engine and quantisation. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import environments
import peer_models
import peer_results
import peer_table
from bench_model import ModelBench, RunSettings
from catalog import MODELS, chosen_rows
from environments import BuildError
from peer_results import BENCHMARK, Line

from card.errors import CardError
from card.models.loading import load_tokenizer
from card.tools.bench.datasets import parse_spec, read_datasets
from card.tools.bench.environment import allowed_cores, choose_cores, describe_run

_HERE = Path(__file__).parent
_MODEL_NAMES = ",".join(MODELS)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=_names, default=list(MODELS), help=f"with commas (default: {_MODEL_NAMES})")
    parser.add_argument(
        "--only",
        type=_names,
        default=[],
        help="rows, with commas: PEER, PEER:QUANTISATION or PEER:QUANTISATION:METHOD, where a part may be empty",
    )
    parser.add_argument(
        "--prompts",
        action="append",
        help="what to decode, may be given several times, as --data of card bench: NAME of shipped prompts, NAME=FILE "
        "(default: by model)",
    )
    parser.add_argument(
        "--prompt-lengths",
        type=_numbers,
        default=[],
        help="also a prompt of so many tokens each, such as 64,512,2048: text of all prompts, one behind the other",
    )
    parser.add_argument("--limit", type=int, default=6, help="prompts of each set (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each prompt and row (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="most new tokens (default: %(default)s)")
    parser.add_argument("--at-once", type=_numbers, default=[], help="also that many requests at once, such as 4,16")
    parser.add_argument("--only-at-once", action="store_true", help="leave out single requests; needs --at-once")
    parser.add_argument(
        "--isa",
        choices=[*environments.LIMITS],
        help="let no engine use more instructions than that; those that cannot be limited are left out",
    )
    parser.add_argument("--cores", type=_numbers, help="cores that each engine may use, such as 0,1 (default: all)")
    parser.add_argument("--build-only", action="store_true", help="make environments and models, and measure nothing")
    parser.add_argument("--seed", type=int, default=0, help="of the order of rows (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one answer (default: %(default)s)")
    parser.add_argument(
        "--envs", type=Path, default=environments.default_folder(), help="folder of environments and models"
    )
    parser.add_argument("--ik", type=Path, metavar="FOLDER", help="a build of ik_llama.cpp, whose rows are run too")
    weights = os.environ.get("CARD_WEIGHTS")
    parser.add_argument(
        "--weights", type=Path, default=weights, help="folder of scripts/fetch_weights.py [$CARD_WEIGHTS]"
    )
    parser.add_argument(
        "--out", type=Path, default=_HERE.parent / "results" / "peers.jsonl", help="default: %(default)s"
    )
    args = parser.parse_args(argv)
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"unknown model {min(unknown)!r}; known: {_MODEL_NAMES}")
    if min(args.limit, args.repeats) < 1 or args.max_tokens < 2:
        parser.error("--limit and --repeats must be 1 or more, --max-tokens 2 or more")
    if args.isa:
        args.envs = args.envs / args.isa  # llama.cpp is built for it
        args.only = args.only or [*environments.LIMITED_PEERS]
        os.environ |= environments.LIMITS[args.isa]  # workers inherit it
    return args


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _numbers(text: str) -> list[int]:
    return sorted({int(part) for part in text.split(",")})


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _common(args: argparse.Namespace) -> Line:
    """Return what all lines of this run hold."""
    facts = describe_run()
    return {
        "benchmark": BENCHMARK,
        "run": secrets.token_hex(6),
        "started": facts.date,
        "command": facts.command,
        "commit": facts.commit,
        "machine": {**facts.machine, "cores_used": len(args.cores), "isa": args.isa or "all"},
        "max_tokens": args.max_tokens,
    }


def _bench_model(name: str, args: argparse.Namespace, common: Line) -> Iterator[list[Line]]:
    """Measure one model; yield lines as they come. Raises: BuildError, CardError, OSError if nothing can be run."""
    spec, folder = MODELS[name], args.envs.absolute()
    rows = chosen_rows(spec, args.only, has_ik=args.ik is not None)
    with environments.building(folder):
        pair = peer_models.find_pair(spec, folder, args.weights)
    datasets = read_datasets([parse_spec(text) for text in args.prompts or spec.prompts], limit=args.limit)
    tokenizer = load_tokenizer(str(pair.target))
    prompts = {one.name: [question.encode(tokenizer) for question in one.questions] for one in datasets}
    joined = list(itertools.chain.from_iterable(itertools.chain.from_iterable(prompts.values())))
    for length in args.prompt_lengths:
        if length + args.max_tokens <= pair.max_model_len:
            prompts[peer_results.prompts_of(length)] = [list(itertools.islice(itertools.cycle(joined), length))]
    settings = RunSettings(
        max_tokens=args.max_tokens,
        repeats=args.repeats,
        cores=tuple(args.cores),
        folder=folder,
        timeout_s=args.timeout,
        ik=args.ik,
    )
    order = random.Random(args.seed)
    bench = ModelBench(pair, rows, prompts, settings, _say)
    try:
        if args.build_only:
            _say(f"{name}: ready: {', '.join(map(str, bench.rows))}")
            return
        if not args.only_at_once:
            yield from bench.decode(common, order)
        for at_once in args.at_once:
            yield from bench.decode_at_once(at_once, common, order)
    finally:
        bench.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line says. Returns the exit status."""
    args = parse(argv)
    num_lines = 0
    try:
        if args.ik is not None:
            environments.ik_version(args.ik)
        signal.signal(signal.SIGTERM, _interrupt)  # workers are ended then, too
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.cores = choose_cores(tuple(args.cores) if args.cores else allowed_cores())
        os.sched_setaffinity(0, args.cores)  # workers inherit it
        common = _common(args)
        with args.out.open("a", encoding="utf-8") as out:
            for name in args.models:
                try:
                    for lines in _bench_model(name, args, common):
                        out.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
                        out.flush()
                        num_lines += len(lines)
                except (BuildError, CardError, OSError) as error:
                    _say(f"{name} left out: {error}")
    except (BuildError, CardError) as error:
        _say(f"run.py: error: {error}")
        return 2
    except KeyboardInterrupt:
        _say("interrupted; what was measured is kept")
    if args.build_only:
        return 0
    if not num_lines:
        return 1
    print(peer_table.tables(peer_results.read_lines(args.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
