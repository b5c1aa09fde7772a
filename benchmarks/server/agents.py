"""How does one server live through a day with a coding agent? Beside llama.cpp's server, on the same requests.

A day is a chat of 12 short turns, an agent of 7 turns whose prompt grows from 4,900 to 11,000 tokens and is edited
once in its middle, three copies of a file with an edit, and ten answers held to a schema. One server answers all of
it, one request after another; a second day has the copies last. Each turn sends back what the server has said.

    python benchmarks/server/agents.py --target TARGET.gguf --draft DRAFT.gguf --llama-server PATH/llama-server

Each server is started anew for each day: `card serve` as typed, and llama-server in each of `--rows` on the same files
with one slot, as one client asks (`peers/environments.py` builds one). A line is written as soon as its day is over.
Answers are compared before any speed is shown. On two cores a day of a 1.5 B model takes about a quarter of an
hour with `--rows plain --day "as listed" --copied-tokens 700 --max-tokens 48`, and ours alone three minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).parents[1]))
import options
import served

import card
from card.errors import CardError
from card.models.loading import load_tokenizer
from card.text.tokenizer import Tokenizer
from card.tools.bench.datasets import parse_spec, read_datasets
from card.tools.bench.environment import allowed_cores

_RESULTS = Path(__file__).parents[1] / "results" / "agents.jsonl"
_TIMEOUT_S = 3600.0  # of one answer
_LEAST_CONTEXT = 4096  # of llama-server, for the chat
CHAT, AGENT, COPIES, STRUCTURED = KINDS = ("chat", "agent", "copy-edits", "structured")
DAYS: Mapping[str, tuple[str, ...]] = {
    "as listed": KINDS,
    "copies last": (STRUCTURED, AGENT, CHAT, COPIES),
}
CARD = "card serve"
ROWS = ("plain", "ngram", "draft", "both")  # of llama-server: what it speculates with
NUM_CHAT, NUM_TURNS, NUM_COPIES, NUM_STRUCTURED = 12, 7, 3, 10
EDITED_TURN = 4  # of the agent, before which a line in the middle of its first prompt is another one
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}, "unit": {"type": "string", "enum": ["dollars", "things", "other"]}},
    "required": ["answer", "unit"],
    "additionalProperties": False,
}
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of prompts and answers."""

    first: int  # of the agent's first prompt
    last: int  # and of its last one
    copied: int  # of the file that is copied with an edit
    answer: int  # most of each answer that is no copy


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request took."""

    text: str
    first_token_s: float
    seconds: float
    num_tokens: int
    num_prompt: int | None  # None: the server does not tell, as for the next
    num_cached: int | None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second behind the first one; None for an answer that came at once."""
        rest_s = self.seconds - self.first_token_s
        return (self.num_tokens - 1) / rest_s if self.num_tokens > 1 and rest_s > 0 else None


@dataclass(frozen=True, slots=True)
class Place:
    """A server that runs."""

    url: str
    pid: int  # whose memory, with that of the processes below it, is the server's

    def memory_bytes(self) -> int:
        """Return its memory, of shared pages its part."""
        own = psutil.Process(self.pid)
        told = [one.memory_full_info() for one in (own, *own.children(recursive=True))]
        return sum(getattr(one, "pss", one.rss) for one in told)


class Texts:
    """The files that an agent reads: this package's own source, cut by the target's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read it."""
        files = sorted(Path(card.__file__).parent.joinpath("config").glob("*.py"))
        files += sorted(Path(card.__file__).parent.joinpath("engine").glob("*.py"))
        self._tokenizer = tokenizer
        self._lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
        self._sizes = [len(tokenizer.encode(line + "\n", add_special_tokens=False)) for line in self._lines]
        self._place = 0

    def of(self, num_tokens: int) -> str:
        """Return the next lines, of about so many tokens."""
        taken: list[str] = []
        while num_tokens > 0:
            at = self._place % len(self._lines)
            taken.append(self._lines[at])
            num_tokens -= self._sizes[at]
            self._place += 1
        return "\n".join(taken)


class Day:
    """The requests of a day, each made when those before it are answered."""

    def __init__(self, texts: Texts, questions: Sequence[str], sizes: Sizes) -> None:
        """Write what the clients say."""
        self._sizes, self._questions = sizes, questions
        step = max(1, (sizes.last - sizes.first) // (NUM_TURNS - 1) - sizes.answer)
        self._first = texts.of(sizes.first)
        self._results = [texts.of(step) for _ in range(NUM_TURNS - 1)]
        self._copied = [texts.of(sizes.copied) for _ in range(NUM_COPIES)]

    def answer(self, kind: str, place: Place) -> list[Answer]:
        """Let a server answer all requests of a kind."""
        if kind in (CHAT, AGENT):
            return self._conversation(place, self._chat() if kind == CHAT else self._agent())
        bodies = self._copies() if kind == COPIES else self._structured()
        return [ask(place, body) for body in bodies]

    def _conversation(self, place: Place, turns: Sequence[tuple[str, str]]) -> list[Answer]:
        """Answer turns, each with the text that its conversation begins with."""
        answers: list[Answer] = []
        for idx, (beginning, _) in enumerate(turns):
            messages = [{"role": "system", "content": beginning}]
            for (_, said), one in itertools.zip_longest(turns[: idx + 1], answers):
                messages.append({"role": "user", "content": said})
                if one is not None:
                    messages.append({"role": "assistant", "content": one.text})
            answers.append(ask(place, {"messages": messages, "max_tokens": self._sizes.answer}))
        return answers

    def _chat(self) -> list[tuple[str, str]]:
        return [("Be brief.", self._questions[idx % len(self._questions)]) for idx in range(NUM_CHAT)]

    def _agent(self) -> list[tuple[str, str]]:
        lines = self._first.split("\n")
        lines[len(lines) // 2] = "# This line was edited."
        edited = "\n".join(lines)
        said = ["What is in these files?", *(f"The tool's result:\n{one}\nGo on." for one in self._results)]
        told = [self._first if idx + 1 < EDITED_TURN else edited for idx in range(NUM_TURNS)]
        return [
            (f"You are a coding agent. These are the files:\n{one}", text) for one, text in zip(told, said, strict=True)
        ]

    def _copies(self) -> Iterator[Body]:
        for text in self._copied:
            told = f"Write this file again, with every `self` replaced by `this`, and nothing else:\n```\n{text}\n```"
            yield {"messages": [{"role": "user", "content": told}], "max_tokens": self._sizes.copied}

    def _structured(self) -> Iterator[Body]:
        form: Body = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
        for idx in range(NUM_STRUCTURED):
            question = self._questions[-1 - idx % len(self._questions)]
            messages = [{"role": "user", "content": f"{question} Answer in JSON."}]
            yield {"messages": messages, "max_tokens": self._sizes.answer, "response_format": form}


def ask(place: Place, body: Body) -> Answer:
    """Return a streamed answer. Raises: SystemExit if the server refuses."""
    fixed = {"model": served.NAME, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps({**fixed, **body}).encode()
    request = urllib.request.Request(f"{place.url}/v1/chat/completions", data, {"Content-Type": "application/json"})
    text, num_pieces, usage, first_token_s = "", 0, {}, None
    began = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    delta = choice["delta"]
                    if said := (delta.get("content") or "") + (delta.get("reasoning_content") or ""):
                        text += said
                        num_pieces += 1
                        first_token_s = first_token_s or time.perf_counter() - began
    except urllib.error.HTTPError as error:
        raise SystemExit(f"agents.py: {place.url} has refused a request: {error.read().decode()[:300]}") from None
    except OSError as error:
        raise SystemExit(f"agents.py: {place.url} does not answer: {error}") from None
    seconds = time.perf_counter() - began
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    num_tokens = usage.get("completion_tokens") or num_pieces  # without usage a piece counts as a token
    return Answer(text, first_token_s or seconds, seconds, num_tokens, usage.get("prompt_tokens"), cached)


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return what starts each server, but for its port; llama-server's rows with a context for the longest prompt."""
    found = {}
    if args.llama_server:
        threads = str(len(allowed_cores()))
        theirs = [args.llama_server, "-m", args.target, "-t", threads, "-tb", threads, "-np", "1", "-ngl", "0"]
        theirs += ["-c", str(max(_LEAST_CONTEXT, args.sizes.last + args.sizes.first)), "--no-webui"]
        drafting = ["-md", args.draft, "-td", threads, "-tbd", threads, "--spec-type"]
        speculating = {
            "plain": [],
            "ngram": ["--spec-type", "ngram-simple"],
            "draft": [*drafting, "draft-simple"],
            "both": [*drafting, "draft-simple,ngram-simple"],
        }
        found = {f"llama-server {row}": [*theirs, *speculating[row]] for row in args.rows}
    ours = served.own_commands(args)[CARD]
    ours += ["--kv-cache-memory", args.kv_cache_memory] if args.kv_cache_memory else []
    return {**found, CARD: ours}


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[Place]:
    """Run a server in the block. Raises: SystemExit if it does not come up."""
    with tempfile.TemporaryDirectory(prefix="card-agents-") as cache:
        before = {one.pid for one in psutil.Process().children()}
        with served.serving(command, cache) as port:
            (pid,) = {one.pid for one in psutil.Process().children()} - before
            yield Place(f"http://127.0.0.1:{port}", pid)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Let each server live each day; yield a line for each. Raises: CardError, SystemExit."""
    questions = [one.turns[0] for one in read_datasets([parse_spec(args.prompts)], limit=None)[0].questions]
    tokenizer, facts = load_tokenizer(args.target), options.describe_run()
    for name in args.days:
        first_texts: list[str] = []
        for server, command in commands(args).items():
            day = Day(Texts(tokenizer), questions, args.sizes)
            with started(command) as place:
                started_bytes = place.memory_bytes()
                answers = {kind: day.answer(kind, place) for kind in DAYS[name]}
                memory_bytes = place.memory_bytes()
            texts = [one.text for kind in DAYS[name] for one in answers[kind]]
            first_texts = first_texts or texts
            yield {
                "benchmark": "agents",
                "server": server,
                "day": name,
                "target": args.target,
                "draft": args.draft,
                "dtype": args.dtype,
                "target_cost": args.target_cost,
                "kv_cache_memory": args.kv_cache_memory,
                "sizes": asdict(args.sizes),
                "seconds": sum(one.seconds for each in answers.values() for one in each),
                "memory_bytes": memory_bytes,
                "started_bytes": started_bytes,
                "num_texts": len(texts),
                "num_texts_differing": sum(a != b for a, b in zip(texts, first_texts, strict=True)),
                "kinds": {kind: summary(each) for kind, each in answers.items()},
                **facts,
            }


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the figures of the requests of one kind: medians, and each request's own."""
    rates = [rate for one in answers if (rate := one.tokens_per_s) is not None]
    each = [{name: value for name, value in asdict(one).items() if name != "text"} for one in answers]
    return {
        "first_token_s": statistics.median(one.first_token_s for one in answers),
        "tokens_per_s": statistics.median(rates) if rates else None,
        "seconds": sum(one.seconds for one in answers),
        "num_prompt": _sum_of(one.num_prompt for one in answers),
        "num_cached": _sum_of(one.num_cached for one in answers),
        "requests": each,
    }


def _sum_of(numbers: Iterator[int | None]) -> int | None:
    told = list(numbers)
    return None if None in told else sum(one for one in told if one is not None)


def rows(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table of all days."""
    yield "| day | server | requests | first token, s | tokens/s | cached of prompt tokens | seconds |"
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: |"
    for line in lines:
        head = f"| {line['day']} | {line['server']} |"
        for kind, one in line["kinds"].items():
            rate = "" if one["tokens_per_s"] is None else f"{one['tokens_per_s']:.1f}"
            cached = "" if one["num_cached"] is None else f"{one['num_cached']:,} of {one['num_prompt']:,}"
            yield f"{head} {kind} | {one['first_token_s']:.2f} | {rate} | {cached} | {one['seconds']:.1f} |"
        memory = f", {line['memory_bytes'] / 1e6:,.0f} MB after it"
        differing = f"{line['num_texts_differing']} of {line['num_texts']} texts differ"
        yield f"{head} all: {differing}{memory} | | | | {line['seconds']:.1f} |"


def make_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo-target", help="of ours (default: %(default)s)")
    parser.add_argument("--draft", default="demo-draft", help="of ours (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="of ours (default: %(default)s)")
    parser.add_argument("--target-cost", help="inflate our target to the price of so many parameters, such as 90M")
    parser.add_argument("--kv-cache-memory", help="of ours, such as 512M: rows of finished texts stay within it")
    parser.add_argument("--llama-server", help="program (default: without llama.cpp)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="of llama-server (default: all)")
    parser.add_argument("--prompts", default="questions", help="NAME of shipped prompts or NAME=FILE [questions]")
    parser.add_argument("--day", dest="days", action="append", choices=list(DAYS), help="orders (default: all)")
    parser.add_argument("--first-tokens", type=int, default=4_900, help="of the agent's first prompt [%(default)s]")
    parser.add_argument("--last-tokens", type=int, default=11_000, help="of its last prompt [%(default)s]")
    parser.add_argument("--copied-tokens", type=int, default=1_500, help="of a file to be copied [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each answer but copies [%(default)s]")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="default: %(default)s")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    args = make_parser().parse_args(arguments)
    args.days = args.days or list(DAYS)
    args.sizes = Sizes(args.first_tokens, args.last_tokens, args.copied_tokens, args.max_tokens)
    try:
        lines = []
        for line in measure(args):
            options.append_lines(args.out, [line])
            lines.append(line)
    except CardError as error:
        print(f"agents.py: error: {error}", file=sys.stderr)
        return 2
    print(*rows(lines), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
