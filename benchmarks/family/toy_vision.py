"""Make a toy pair that speaks of pictures: a LLaVA-like target and two text drafts, trained here on drawn shapes.

python benchmarks/family/toy_vision.py OUT
card train hivis --target OUT/target --data OUT/talks.jsonl --out OUT/drafter --max-tokens 64

Pictures show a few equal shapes; captions come of templates, so most of their words follow from the words before. One
draft learns captions alone, as a text model does; the other learns them behind the places of an image. Questions about
the same pictures are written for the drafter that is fused with the target's states.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

SIDE, PATCH = 56, 7
NUM_PLACES = (SIDE // PATCH) ** 2
BATCH = 16
COLOURS = {"red": (220, 30, 30), "green": (30, 170, 60), "blue": (40, 70, 220), "yellow": (235, 205, 30)}
GROUNDS = {"white": (245, 245, 245), "black": (15, 15, 15), "grey": (128, 128, 128)}
SHAPES = ("circle", "square", "triangle")
NUMBERS = ("one", "two", "three", "four")
ASKED = ("what is in the picture ?", "describe the picture .", "say what you see .")
FORMS = (
    "the picture shows {n} {c} {ss} on a {g} ground . {n} {ss} are there , all of them are {c} , "
    "and behind the {c} {ss} all is {g} .",
    "i see {n} {ss} in the picture . they are {c} , so there are {n} {c} {ss} . the ground is {g} , "
    "and on the {g} ground stand {n} {c} {ss} .",
    "on a {g} ground there are {n} {ss} . each {s} is {c} . count the {c} {ss} : "
    "there are {n} {c} {ss} on the {g} ground .",
)
IMAGE, END, PAD = "<image>", "<end>", "<pad>"
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image> "
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %} answer :"
)


@dataclass(frozen=True, slots=True)
class Sample:
    """A picture, a question about it and what is said of it."""

    picture: Image.Image
    question: str
    answer: str


def samples(seed: int) -> Iterator[Sample]:
    """Yield samples without end, the same for each seed."""
    draw = random.Random(seed)
    while True:
        n, c, s, g = draw.choice(range(4)), draw.choice([*COLOURS]), draw.choice(SHAPES), draw.choice([*GROUNDS])
        words = {"n": NUMBERS[n], "c": c, "s": s, "ss": f"{s}s", "g": g}
        yield Sample(drawn(draw, n + 1, c, s, g), draw.choice(ASKED), draw.choice(FORMS).format(**words))


def drawn(draw: random.Random, count: int, colour: str, shape: str, ground: str) -> Image.Image:
    """Return a picture of equal shapes, each in a quarter of its own."""
    picture = Image.new("RGB", (SIDE, SIDE), GROUNDS[ground])
    pen = ImageDraw.Draw(picture)
    half = SIDE // 2
    for x, y in draw.sample(list(itertools.product((0, half), repeat=2)), count):
        size = draw.randint(14, 22)
        left, top = x + draw.randint(1, half - size - 1), y + draw.randint(1, half - size - 1)
        box = (left, top, left + size, top + size)
        if shape == "circle":
            pen.ellipse(box, COLOURS[colour])
        elif shape == "square":
            pen.rectangle(box, COLOURS[colour])
        else:
            pen.polygon([(left, top + size), (left + size, top + size), (left + size // 2, top)], COLOURS[colour])
    return picture


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    texts = [*ASKED, *FORMS, "answer :", *COLOURS, *GROUNDS, *SHAPES, *(f"{one}s" for one in SHAPES), *NUMBERS]
    words = sorted({word for text in texts for word in text.split() if "{" not in word})
    vocab = {word: idx for idx, word in enumerate((PAD, END, IMAGE, "<unk>", *words))}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=PAD, additional_special_tokens=[IMAGE]
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def processor() -> Any:
    """Return the image processor of the target."""
    side = {"height": SIDE, "width": SIDE}
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=side)


def make_target(vocab_size: int, image_id: int) -> Any:
    """Return the untrained target."""
    text = {"model_type": "llama", **_text(vocab_size, width=128, layers=4)}
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_id=image_id, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config)


def make_draft(vocab_size: int) -> Any:
    """Return an untrained text draft."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_text(vocab_size, width=64, layers=1)))


def _text(vocab_size: int, *, width: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def batch_of(
    tokenizer: PreTrainedTokenizerFast, chosen: Sequence[Sample], *, num_places: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels [B, T]; what is asked has no label."""
    image_id = tokenizer.convert_tokens_to_ids(IMAGE)
    rows, labels = [], []
    for one in chosen:
        asked = [image_id] * num_places + tokenizer(f"{one.question} answer :")["input_ids"]
        said = [*tokenizer(one.answer)["input_ids"], 1]
        rows.append(torch.tensor(asked + said))
        labels.append(torch.tensor([-100] * len(asked) + said))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad(labels, batch_first=True, padding_value=-100)


def train(
    model: Any, tokenizer: PreTrainedTokenizerFast, *, steps: int, num_places: int, sees: bool, name: str
) -> None:
    """Train a model on what is said of pictures."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 30) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    source, read = samples(1), processor()
    started = time.perf_counter()
    model.train()
    for step in range(steps):
        chosen = list(itertools.islice(source, BATCH))
        token_ids, labels = batch_of(tokenizer, chosen, num_places=num_places)
        pixels = (
            {"pixel_values": read([one.picture for one in chosen], return_tensors="pt")["pixel_values"]} if sees else {}
        )
        logits = model(input_ids=token_ids, attention_mask=(token_ids != 0).long(), **pixels).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49 or step == steps - 1:
            print(f"{name}: step {step + 1}, loss {loss.item():.3f}, {time.perf_counter() - started:.0f} s", flush=True)
    model.eval()


def talk(one: Sample) -> dict[str, Any]:
    """Return a question about a picture as `card train hivis` reads it."""
    held = io.BytesIO()
    one.picture.save(held, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(held.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": one.question}]
    return {"messages": [{"role": "user", "content": parts}]}


@click.command()
@click.argument("out", type=Path)
@click.option("--steps", default=500, show_default=True, help="Batches of 16 pictures for the target.")
@click.option("--draft-steps", default=300, show_default=True, help="Batches of 16 captions for each draft.")
@click.option("--talks", default=1200, show_default=True, help="Pictures that questions are written about.")
def main(out: Path, steps: int, draft_steps: int, talks: int) -> None:
    """Train the target, then a draft on captions alone, then one on captions behind the places of an image."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "talks.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(talk(one)) + "\n" for one in itertools.islice(samples(1), talks))
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    target = make_target(len(tokenizer), tokenizer.convert_tokens_to_ids(IMAGE))
    train(target, tokenizer, steps=steps, num_places=NUM_PLACES, sees=True, name="target")
    target.save_pretrained(out / "target")
    processor().save_pretrained(out / "target")
    tokenizer.save_pretrained(out / "target")
    for name, num_places in (("draft", 0), ("draft-with-places", NUM_PLACES)):
        draft = make_draft(len(tokenizer))
        train(draft, tokenizer, steps=draft_steps, num_places=num_places, sees=False, name=name)
        draft.save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)


if __name__ == "__main__":
    main()
