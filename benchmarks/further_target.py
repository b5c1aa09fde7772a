"""Train a model a little further on texts, so that a family has one target more.

    python benchmarks/further_target.py --model demo-target --data texts.jsonl --out further-target

One epoch of plain cross-entropy on the answers, one thread; the same seed and data give the same weights. Says how far
the new model's choices are from the old one's: the share of places in held-out answers at which both choose the same
token.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from card.family.pard.folders import clipped, read_documents
from card.family.pard.rows import Document
from card.models.loading import load_model, load_tokenizer

_ROWS, _HELD_OUT = 8, 16  # texts of a step; texts to compare on


def logits_and_labels(model: Any, document: Document) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits [n, V] before each learnt token of a text, and these tokens [n]."""
    ids = torch.tensor(document.token_ids)
    return model(ids[None]).logits[0, document.first - 1 : -1].float(), ids[document.first :]


def train(model: Any, documents: list[Document], rate: float, seed: int) -> None:
    """Train all weights on the texts, once, at a rate that falls to nothing."""
    order = random.Random(seed).sample(documents, len(documents))
    steps = [order[start : start + _ROWS] for start in range(0, len(order), _ROWS)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    model.requires_grad_(True)
    for step, texts in enumerate(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / len(steps))
        for text in texts:
            (functional.cross_entropy(*logits_and_labels(model, text)) / len(texts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.requires_grad_(False)


def choices(model: Any, documents: list[Document]) -> torch.Tensor:
    """Return the model's choices at all learnt places."""
    with torch.no_grad():
        return torch.cat([logits_and_labels(model, one)[0].argmax(-1) for one in documents])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo-target")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with questions and answers")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate, at its peak")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model: Any = load_model(args.model)
    tokenizer, dtype = load_tokenizer(args.model), model.dtype
    model.float()
    documents = clipped(read_documents(args.data, tokenizer), model)
    learnt, held_out = documents[:-_HELD_OUT], documents[-_HELD_OUT:]
    before = choices(model, held_out)
    train(model, learnt, args.rate, args.seed)
    agreed = (choices(model, held_out) == before).float().mean()
    model.to(dtype).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(json.dumps({"texts": len(learnt), "places where both choose alike": round(float(agreed), 3)}))


if __name__ == "__main__":
    main()
