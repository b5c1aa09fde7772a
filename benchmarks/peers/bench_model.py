"""Measure one model: bring rows up, choose their options, and let them decode prompt by prompt in shuffled order."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import catalog
import environments
import peer_models
import peer_results
from catalog import RowKey
from environments import BuildError
from peer_models import Files, Pair
from worker_process import Option, PeerError, WorkerProcess, Workers, free_memory_bytes

from card.errors import CardError

PromptSets = Mapping[str, Sequence[Sequence[int]]]  # token ids by name of the set

_HERE = Path(__file__).parent
_CHOOSING_PROMPTS = 2  # options are chosen on the first prompts, as `card bench` does
_BYTES_OVER_FILES = 2.0  # what a worker takes in memory, over the size of its files
_WORKER_BYTES = 1 << 30  # and what comes on top
_LEAST_CONTEXT = 2048  # unless the model has fewer
_SETTLE_S = 0.25  # idle threads of some libraries spin for up to 0.2 s, on cores that the next row uses


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What is alike for all rows."""

    max_tokens: int
    repeats: int
    cores: tuple[int, ...]
    folder: Path  # of environments, models and logs
    timeout_s: float
    ik: Path | None = None  # the build of ik_llama.cpp, if its rows are asked for


class ModelBench:
    """The rows of one model. A row that fails is reported in one line and left out; the others go on."""

    def __init__(
        self, pair: Pair, rows: Sequence[RowKey], prompts: PromptSets, settings: RunSettings, say: Callable[[str], None]
    ) -> None:
        """Build what the rows need."""
        self._pair, self._prompts, self._settings, self._say = pair, prompts, settings, say
        self._longest = max(len(prompt) for of_set in prompts.values() for prompt in of_set)
        self._files: dict[RowKey, Files] = {}
        self._versions: dict[RowKey, str] = {}
        self.rows: list[RowKey] = []
        # What starts keep is made in this run: thread counts kept from a busy hour would be taken without another look.
        self._cache = tempfile.TemporaryDirectory(prefix="card-peers-")
        broken: dict[str, str] = {}
        for row in rows:
            subject = f"{row.peer}:{row.quantisation}"
            if subject not in broken:
                try:
                    self._files[row] = self._build(row)
                    self.rows.append(row)
                    continue
                except (BuildError, CardError, OSError) as error:
                    broken[subject] = " ".join(str(error).split())
                    say(f"{pair.spec.name}: {subject} left out: {broken[subject]}")
        self.workers = Workers(self._start, self._needed_bytes, free_memory_bytes, self._first_prompts())

    def _build(self, row: RowKey) -> Files:
        folder = self._settings.folder
        with environments.building(folder):
            builder = "llama.cpp" if row.peer in catalog.LLAMAS else row.peer  # which makes the files of both
            if builder in environments.BUILDERS:
                environments.ensure(folder, builder)
            return peer_models.files_for(self._pair, row, folder)

    def _needed_bytes(self, row: RowKey) -> int:
        return int(self._files[row].num_bytes * _BYTES_OVER_FILES) + _WORKER_BYTES

    def _first_prompts(self) -> list[Sequence[int]]:
        """Return the prompts that options are chosen on: the first ones of all sets."""
        return [prompt for prompts in self._prompts.values() for prompt in prompts[:_CHOOSING_PROMPTS]]

    def _start(self, row: RowKey, known: Mapping[str, Option]) -> WorkerProcess:
        """Start a row's worker and tell it what to run."""
        settings, pair = self._settings, self._pair
        python = environments.python_of(settings.folder, row.spec.environment)
        log = settings.folder / "logs" / f"{pair.spec.name}-{row.peer}-{row.quantisation}.log"
        env = {"OMP_NUM_THREADS": str(len(settings.cores)), "TOKENIZERS_PARALLELISM": "false"}
        env["XDG_CACHE_HOME"] = self._cache.name
        env["VLLM_CACHE_ROOT"] = str(settings.folder / "vllm-cache")  # what it compiles; else in the home folder
        worker = WorkerProcess([python, _HERE / row.spec.worker], env, log, settings.timeout_s)
        job = {
            "peer": row.peer,
            "target": str(self._files[row].target),
            "draft": str(self._files[row].draft),
            "dtype": row.quantisation if row.quantisation == "int8" else "auto",
            "cores": list(settings.cores),
            "context": min(pair.max_model_len, max(_LEAST_CONTEXT, self._longest + settings.max_tokens)),
            "end_ids": list(pair.end_ids),
            "methods": [
                one.method for one in self.rows if (one.peer, one.quantisation) == (row.peer, row.quantisation)
            ],
            "known": dict(known),
            "server": str(environments.llama_program(settings.folder, "llama-server")),
            "version": f"llama-cpp-python {environments.LLAMA_VERSION}",
        }
        if row.peer == catalog.IK and settings.ik is not None:
            job["server"] = str(environments.ik_program(settings.ik, "llama-server"))
            job["version"] = environments.ik_version(settings.ik)
        try:
            self._versions[row.reference] = worker.ask("load", **job)["version"]
        except PeerError:
            worker.close()
            raise
        return worker

    def decode(self, common: peer_results.Line, order: random.Random) -> Iterator[list[peer_results.Line]]:
        """Yield the lines of each prompt and repeat."""
        options = self._choose(self.rows, {})
        for repeat in range(self._settings.repeats):
            for name, prompts in self._prompts.items():
                for idx, prompt_ids in enumerate(prompts):
                    asked = {"prompt_ids": list(prompt_ids), "max_tokens": self._settings.max_tokens}
                    answers = self._round("generate", options, asked, order)
                    where = {"model": self._pair.spec.name, "prompts": name, "prompt": idx, "repeat": repeat}
                    where["prompt_tokens"] = len(prompt_ids)
                    facts = self._facts(options)
                    yield peer_results.decode_lines(answers, facts, {**common, **where}, self._pair.end_ids)

    def decode_at_once(
        self, at_once: int, common: peer_results.Line, order: random.Random
    ) -> Iterator[list[peer_results.Line]]:
        """Yield the lines of each set and repeat, several requests at once."""
        rows = [row for row in self.rows if row.method in row.spec.batched]
        options = self._choose(rows, {"at_once": at_once})
        for repeat in range(self._settings.repeats):
            for name, prompts in self._prompts.items():
                many = [list(prompts[i % len(prompts)]) for i in range(2 * at_once)]
                asked = {"prompts": many, "max_tokens": self._settings.max_tokens, "at_once": at_once}
                answers = self._round("generate_many", options, asked, order)
                where = {"model": self._pair.spec.name, "prompts": name, "repeat": repeat, "at_once": at_once}
                yield peer_results.batch_lines(answers, self._facts(options), {**common, **where}, self._pair.end_ids)

    def close(self) -> None:
        """End all workers."""
        self.workers.close()
        self._cache.cleanup()

    def _round(
        self, do: str, options: dict[RowKey, Option], asked: Mapping[str, Any], order: random.Random
    ) -> dict[RowKey, dict[str, Any]]:
        """Let every row do the same, in shuffled order; return the answers, references first."""
        rows = list(options)
        order.shuffle(rows)
        answers: dict[RowKey, dict[str, Any]] = {}
        for row in rows:
            time.sleep(_SETTLE_S)
            try:
                answers[row] = self.workers.ask(do, row, options[row], **asked)
            except PeerError as error:
                self._give_up(row, error)
                del options[row]
        return {row: answers[row] for row in self.rows if row in answers}

    def _facts(self, options: Mapping[RowKey, Option]) -> dict[RowKey, peer_results.Line]:
        return {row: {"version": self._versions[row.reference], "settings": self._settled[row]} for row in options}

    def _choose(self, rows: Sequence[RowKey], changes: Option) -> dict[RowKey, Option]:
        """Return each row's fastest option on the first prompts; rows that do not come up are left out."""
        chosen: dict[RowKey, Option] = {}
        self._settled: dict[RowKey, Option] = {}
        for row in rows:
            self._say(f"{self._pair.spec.name}: preparing {row}")
            options = [{**option, **changes} for option in row.spec.options[row.method]]
            try:
                rates = [self._rate(row, option) for option in options] if len(options) > 1 else [0.0]
                best = options[rates.index(max(rates))]
                for option in options:
                    if option is not best:
                        self.workers.release(row, option)
                self._settled[row] = self.workers.prepare(row, best)
                chosen[row] = best
            except PeerError as error:
                self._give_up(row, error)
        return chosen

    def _rate(self, row: RowKey, option: Option) -> float:
        """Return tokens/s on the first prompts."""
        prompts, max_tokens = list(map(list, self._first_prompts())), self._settings.max_tokens
        if at_once := option.get("at_once"):
            batch = [prompts[i % len(prompts)] for i in range(at_once)]
            done = self.workers.ask("generate_many", row, option, prompts=batch, max_tokens=max_tokens, at_once=at_once)
            return float(sum(map(len, done["token_ids"])) / done["wall_s"])
        tokens, seconds = 0, 0.0
        for prompt_ids in prompts:
            done = self.workers.ask("generate", row, option, prompt_ids=prompt_ids, max_tokens=max_tokens)
            tokens, seconds = tokens + done["decode_tokens"], seconds + done["decode_s"]
        return tokens / seconds if seconds > 0 else 0.0

    def _give_up(self, row: RowKey, error: PeerError) -> None:
        self._say(f"{self._pair.spec.name}: {row} left out: {error}")
