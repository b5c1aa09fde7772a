"""Trace what a drafter of several tokens a pass has learnt over the processor seconds of its training.

    python benchmarks/pard_cost.py --data gsm8k_train.jsonl --prompts gsm8k_test.jsonl --out pard_cost.jsonl

Each arm adapts the draft model afresh on the first so many texts, one epoch, one thread: with conditional drop, without
it, weighted by the target's chances (PARD-2), and so weighted while it reads the target's hidden states. Every so often
its guesses are compared with what the target wrote for test questions: accepted tokens a drafter pass, from every place
of those answers, greedy. A model that reads states is compared with and without them. Comparing is left out of the
seconds, which are those of the processor and not of the clock.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from options import append_lines, describe_run

from card import LLM, SamplingParams
from card.family.learning.checkpoint import Checkpoint
from card.family.pard.folders import Adaptable, clipped, load_adaptable, read_documents
from card.family.pard.rows import Document
from card.family.pard.teacher import Teacher
from card.family.pard.training import TrainSettings, measured, train_pard
from card.models.loading import load_model
from card.models.state_input import StateInput

_NEVER = 1 << 30  # steps to a checkpoint
WEIGHTED, READING = "drop, weighted by the target", "drop, weighted by the target, reading its states"
_DROP = {"retention": 0.6, "least_retention": 0.1, "learning_rate": 1e-3}  # as the committed lines were made
ARMS = {"drop": _DROP, "no drop": {**_DROP, "retention": 1.0}, WEIGHTED: _DROP, READING: _DROP}


def answers_of(target: str, prompts: Path, limit: int, max_tokens: int) -> list[Document]:
    """Return what the target writes for test questions, greedily."""
    questions = [json.loads(line)["question"] for line in prompts.read_text("utf-8").splitlines()[:limit]]
    with LLM(target, method="vanilla", dtype="float32", max_model_len=1024, cache=False) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens).resolved()
        chats: Any = [[{"role": "user", "content": question}] for question in questions]
        prompt_ids = [list(llm.host.encode(chat)) for chat in chats]
        outputs = llm.generate(prompt_ids, params)
    answers = [list(one.outputs[0].token_ids) for one in outputs]
    return [Document([*prompt, *answer], len(prompt)) for prompt, answer in zip(prompt_ids, answers, strict=True)]


class Curve:
    """Takes points of one training, and leaves the seconds that this takes out of them."""

    def __init__(
        self,
        begun: Adaptable,
        judged: list[Document],
        settings: TrainSettings,
        num_points: int,
        reading: Teacher | None,
    ) -> None:
        self._begun, self._judged, self._settings, self._num_points = begun, judged, settings, num_points
        self._reading = reading  # the target, if its states are read
        self._started, self._aside_s = time.process_time(), 0.0
        self.points: list[dict[str, Any]] = []

    def on_step(self, step: int, num_steps: int) -> None:
        """Compare after every so many steps."""
        if step == 0 or step * self._num_points // num_steps == (step - 1) * self._num_points // num_steps:
            return
        paused = time.process_time()
        model = self._begun.model
        model.train(False)
        _, rates, _ = measured(model, self._judged, self._begun.mask_id, self._settings, self._reading)
        point = {
            "step": step,
            "cpu s": round(paused - self._started - self._aside_s, 1),
            "accepted a pass": round(sum(rates), 3),
            "accepted to depth": [round(rate, 3) for rate in rates],
        }
        if self._reading is not None:
            _, rates, _ = measured(model, self._judged, self._begun.mask_id, self._settings)
            point["accepted a pass without states"] = round(sum(rates), 3)
        model.train(True)
        self.points.append(point)
        self._aside_s += time.process_time() - paused


def measure(args: argparse.Namespace, arm: str, num_texts: int, judged: list[Document]) -> dict[str, Any]:
    """Return the curve of one arm on the first so many texts."""
    begun = load_adaptable(args.draft)
    settings = TrainSettings(seed=args.seed, checkpoint_steps=_NEVER, **ARMS[arm])
    documents = clipped(read_documents(args.data, begun.tokenizer)[:num_texts], begun.model)
    teacher = None
    if "weighted" in arm:
        target: Any = load_model(args.target)
        table: Any = begun.model.get_input_embeddings()
        state_input = StateInput.for_target(target, table.embedding_dim, seed=args.seed) if arm == READING else None
        teacher = Teacher(target.to(dtype=begun.model.dtype), state_input)
    reading = teacher if arm == READING else None
    curve = Curve(begun, judged, settings, args.points, reading)
    with TemporaryDirectory() as folder:
        checkpoint = Checkpoint(Path(folder) / "training.pt", {})
        trained = train_pard(
            begun.model,
            documents,
            begun.mask_id,
            settings,
            checkpoint=checkpoint,
            teacher=teacher,
            on_step=curve.on_step,
        )
    if args.save is not None:
        state_input = reading.state_input if reading is not None else None
        folder = args.save / arm.replace(",", "").replace(" ", "-")
        begun.save(folder, settings.num_tokens, trained.temperatures, trained.figures(), state_input)
    positions = {"positions": trained.num_trained, "positions without drop": trained.num_without_drop}
    return {"arm": arm, "texts": num_texts, "seed": args.seed, **positions, "points": curve.points}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo-target")
    parser.add_argument("--draft", default="demo-draft")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with questions and answers, to learn from")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with questions, to compare on")
    parser.add_argument("--limit", type=int, default=12, help="questions to compare on")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of an answer to compare on, at most")
    parser.add_argument("--arms", default="drop:400;no drop:400;drop, weighted by the target:400")
    parser.add_argument("--points", type=int, default=6, help="comparisons in a training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="folder that gets a folder of each adapted model")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    judged = answers_of(args.target, args.prompts, args.limit, args.max_tokens)
    for one in args.arms.split(";"):
        arm, _, num_texts = one.partition(":")
        run = describe_run()
        line = {**measure(args, arm, int(num_texts), judged), **run}
        print(json.dumps(line), flush=True)
        append_lines(args.out, [line])


if __name__ == "__main__":
    main()
