"""Train the demo pair that ships with CARD: a tokenizer, a target model and a distilled draft model.

The steps run one after another and each writes into ``--work``; a step that was cut off resumes from its
last checkpoint, a finished one is skipped:

    python scripts/train_demo_pair.py all --data gsm8k_train.jsonl --heldout gsm8k_test.jsonl --work build/pair

``tokenizer``  byte-level BPE with 4,096 tokens, digits kept apart, chat template and end token
``target``     Llama architecture, about 16 M parameters, next-token loss on the problems
``sample``     the target invents problems and answers them, half of them greedily
``draft``      a small Llama learns the target's distribution on the problems and on the sampled text
``export``     bfloat16 safetensors, tokenizer, model card and figures into ``--out``

``draft-small``, which ``all`` leaves out, makes a second draft of some layers of the first. With ``--pair FOLDER`` the
steps from ``sample`` on learn from an exported pair instead of the checkpoints of the steps before.

On a GPU pass ``--device cuda``. Everything is seeded by ``--seed``; floating-point order still depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from card.models.protocol import Extension
from card.models.runners import plain_runner

VOCAB_SIZE = 4096
EOS, USER, ASSISTANT, END = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"
EOS_ID, USER_ID, ASSISTANT_ID, END_ID = range(4)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_POSITIONS = 1024
PACKED_ROW_TOKENS = 768  # rows of the packed phase, so that later positions and several turns are trained too
IGNORED = -100  # label of padding
LOSS_ROWS = 256  # whose distributions are compared at once: small blocks stay in a CPU's caches
SAMPLE_BATCH = 64
NUM_HELDOUT_WRITTEN = 100  # held-out questions that the target answers, to measure agreement on


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One training run: how long, how fast, on what."""

    name: str
    epochs: int
    packed_epochs: int  # of these, at the end, rows hold several problems one after another
    tokens_per_step: int
    muon_lr: float  # for the matrices inside the layers
    adam_lr: float  # for embeddings and norms
    weight_decay: float = 0.05
    warmup_share: float = 0.02
    decay_share: float = 0.35


TARGET_PHASE = Phase(name="target", epochs=6, packed_epochs=1, tokens_per_step=6144, muon_lr=0.02, adam_lr=2e-3)
DRAFT_PHASE = Phase(name="draft", epochs=2, packed_epochs=1, tokens_per_step=6144, muon_lr=0.02, adam_lr=2e-3)
DRAFT_SMALL_PHASE = replace(DRAFT_PHASE, name="draft-small", epochs=1, tokens_per_step=1536)


def model_config(*, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int) -> LlamaConfig:
    """Return a Llama config on the demo vocabulary."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[END_ID, EOS_ID],
        pad_token_id=EOS_ID,
    )


TARGET_CONFIG = model_config(hidden=384, layers=8, heads=6, kv_heads=2, mlp=1152)
DRAFT_CONFIG = model_config(hidden=256, layers=4, heads=4, kv_heads=2, mlp=768)
DRAFT_SMALL_CONFIG = model_config(hidden=256, layers=2, heads=4, kv_heads=2, mlp=768)
DRAFT_SMALL_LAYERS = (0, 3)  # of the draft, where its training begins
CONFIGS = {"target": TARGET_CONFIG, "draft": DRAFT_CONFIG, "draft-small": DRAFT_SMALL_CONFIG}


# --- tokenizer and data -------------------------------------------------------------------------


def read_problems(path: Path) -> list[tuple[str, str]]:
    """Return (question, answer) of each line of a GSM8K file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [(row["question"].strip(), row["answer"].strip()) for row in rows]


def train_tokenizer(problems: list[tuple[str, str]], folder: Path) -> None:
    """Train the byte-level BPE tokenizer and save it with its chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS, USER, ASSISTANT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for problem in problems for text in problem), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=EOS,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=[USER, ASSISTANT],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def encode_problems(tokenizer: PreTrainedTokenizerFast, problems: list[tuple[str, str]]) -> list[list[int]]:
    """Return each problem as one conversation of token ids."""
    questions = tokenizer([question for question, _ in problems], add_special_tokens=False)["input_ids"]
    answers = tokenizer([answer for _, answer in problems], add_special_tokens=False)["input_ids"]
    pairs = zip(questions, answers, strict=True)
    return [[USER_ID, *q, END_ID, ASSISTANT_ID, *a, END_ID][:MAX_POSITIONS] for q, a in pairs]


def plan_rows(documents: list[list[int]], *, packed: bool, rng: random.Random) -> list[list[int]]:
    """Return training rows: one document each, or several up to PACKED_ROW_TOKENS."""
    order = rng.sample(documents, len(documents))
    if not packed:
        return order
    rows: list[list[int]] = [[]]
    for document in order:
        if rows[-1] and len(rows[-1]) + len(document) > PACKED_ROW_TOKENS:
            rows.append([])
        rows[-1] = rows[-1] + document
    return rows


def plan_batches(rows: list[list[int]], tokens_per_step: int, rng: random.Random) -> list[list[list[int]]]:
    """Group rows of similar length into batches of about ``tokens_per_step`` tokens, in random order."""
    by_length = sorted(rows, key=lambda row: len(row) + rng.random() * 8)
    batches: list[list[list[int]]] = [[]]
    for row in by_length:
        if batches[-1] and len(row) * (len(batches[-1]) + 1) > tokens_per_step * 1.1:
            batches.append([])
        batches[-1].append(row)
    rng.shuffle(batches)
    return batches


def to_tensors(batch: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ``input_ids`` and ``labels``, both [B, T] int64, padded on the right."""
    width = max(len(row) for row in batch)
    ids = torch.full((len(batch), width), EOS_ID)
    labels = torch.full((len(batch), width), IGNORED)
    for i, row in enumerate(batch):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, : len(row) - 1] = torch.tensor(row[1:])
    return ids.to(device), labels.to(device)


def layers_of(model: LlamaForCausalLM, layers: Sequence[int]) -> dict[str, Tensor]:
    """Return the weights of a model that has only these layers of another one."""
    weights = {name: weight for name, weight in model.state_dict().items() if ".layers." not in name}
    for to, layer in enumerate(layers):
        own = model.model.layers[layer].state_dict()
        weights |= {f"model.layers.{to}.{name}": weight for name, weight in own.items()}
    return weights


# --- training loop ------------------------------------------------------------------------------


def make_optimizers(model: LlamaForCausalLM, phase: Phase) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers and AdamW for the rest."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "layers" in n)]
    return [
        torch.optim.Muon(matrices, lr=phase.muon_lr, momentum=0.95, weight_decay=phase.weight_decay),
        torch.optim.AdamW(rest, lr=phase.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def lr_scale(step: int, total: int, phase: Phase) -> float:
    """Return the share of the peak learning rate at ``step``: linear warm-up, plateau, linear decay to 2 %."""
    warmup, decay = max(1, int(total * phase.warmup_share)), max(1, int(total * phase.decay_share))
    return min(1.0, (step + 1) / warmup, max(0.02, (total - step) / decay))


def plan_steps(documents: list[list[int]], phase: Phase, seed: int) -> list[list[list[int]]]:
    """Return every batch of the whole run; a pure function of its arguments, so that a resumed run continues it."""
    steps: list[list[list[int]]] = []
    for epoch in range(phase.epochs):
        rng = random.Random(f"{seed}/{phase.name}/{epoch}")
        rows = plan_rows(documents, packed=epoch >= phase.epochs - phase.packed_epochs, rng=rng)
        steps += plan_batches(rows, phase.tokens_per_step, rng)
    return steps


def train(
    model: LlamaForCausalLM,
    steps: list[list[list[int]]],
    phase: Phase,
    loss_of: Callable[[LlamaForCausalLM, Tensor, Tensor], Tensor],
    evaluate: Callable[[], dict[str, float]],
    folder: Path,
) -> None:
    """Run the phase, with a checkpoint every 200 steps and an evaluation every 400; resumes from ``folder``."""
    device = model.device
    optimizers = make_optimizers(model, phase)
    peaks = [group["lr"] for o in optimizers for group in o.param_groups]
    checkpoint, start = folder / f"{phase.name}.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        start = saved["step"]

    def save(step: int) -> None:
        state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step}
        torch.save(state, checkpoint.with_suffix(".part"))
        checkpoint.with_suffix(".part").replace(checkpoint)

    progress = tqdm(total=len(steps), initial=start, desc=phase.name, unit="step", smoothing=0.02)
    running = 0.0
    for step in range(start, len(steps)):
        ids, labels = to_tensors(steps[step], device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model, ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = lr_scale(step, len(steps), phase)
        for group, peak in zip((g for o in optimizers for g in o.param_groups), peaks, strict=True):
            group["lr"] = peak * scale
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        running = loss.item() if step == start else 0.98 * running + 0.02 * loss.item()
        progress.set_postfix(loss=f"{running:.3f}")
        progress.update()
        if (step + 1) % 200 == 0:
            save(step + 1)
        if (step + 1) % 400 == 0:
            figures = {k: round(v, 4) for k, v in evaluate().items()}
            progress.write(
                json.dumps({"phase": phase.name, "step": step + 1, "train_loss": round(running, 4), **figures})
            )
    progress.close()
    save(len(steps))
    (folder / f"{phase.name}.json").write_text(json.dumps({**evaluate(), "steps": len(steps)}, indent=1))


def next_token_loss(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats per token, over the positions that are not padding."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[labels != IGNORED]
    return functional.cross_entropy(model.lm_head(hidden).float(), labels[labels != IGNORED])


def distillation_loss(teacher: LlamaForCausalLM) -> Callable[[LlamaForCausalLM, Tensor, Tensor], Tensor]:
    """Return a loss: cross-entropy of the draft against the teacher's whole distribution, 10 % of it sharpened.

    The sharpened part (temperature 0.25) weighs the teacher's first choice, which is what greedy acceptance counts.
    """

    def summed(model: LlamaForCausalLM, hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_logits = teacher.lm_head(teacher_hidden).float()
            wanted = 0.9 * teacher_logits.softmax(-1) + 0.1 * (4.0 * teacher_logits).softmax(-1)
        return -(wanted * model.lm_head(hidden).float().log_softmax(-1)).sum()

    def loss_of(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
        kept = labels != IGNORED
        with torch.no_grad():
            teacher_hidden = teacher.model(input_ids=ids, use_cache=False).last_hidden_state[kept]
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[kept]
        parts = zip(hidden.split(LOSS_ROWS), teacher_hidden.split(LOSS_ROWS), strict=True)
        return torch.stack([summed(model, *part) for part in parts]).sum() / len(hidden)

    return loss_of


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, documents: list[list[int]]) -> float:
    """Return the held-out loss in nats per token."""
    total, count = 0.0, 0
    for batch in plan_batches(documents, 8192, random.Random(0)):
        ids, labels = to_tensors(batch, model.device)
        with torch.autocast(model.device.type, torch.bfloat16):
            loss = next_token_loss(model, ids, labels)
        total, count = total + loss.item() * int((labels != IGNORED).sum()), count + int((labels != IGNORED).sum())
    return total / count


@torch.no_grad()
def agreement(draft: LlamaForCausalLM, target: LlamaForCausalLM, documents: list[list[int]]) -> dict[str, float]:
    """Return how often the target's first choice is among the draft's first 1, 2, 4 and 8, inside answers."""
    hits, count = {k: 0 for k in (1, 2, 4, 8)}, 0
    for batch in plan_batches(documents, 8192, random.Random(0)):
        ids, labels = to_tensors(batch, draft.device)
        inside_answer = ((ids == ASSISTANT_ID).cumsum(1) > 0) & (labels != IGNORED)
        with torch.autocast(draft.device.type, torch.bfloat16):
            wanted = target(input_ids=ids).logits[inside_answer].argmax(-1)
            ranked = draft(input_ids=ids).logits[inside_answer].topk(8).indices
        found = ranked == wanted[:, None]
        count += len(wanted)
        for k in hits:
            hits[k] += int(found[:, :k].any(1).sum())
    return {f"agreement_top{k}": hit / count for k, hit in hits.items()}


# --- text that the target writes ----------------------------------------------------------------


def write_texts(
    model: LlamaForCausalLM, jobs: list[tuple[list[int], float]], max_new_tokens: int, generator: torch.Generator
) -> list[list[int]]:
    """Continue prompts up to the end token of their answer, SAMPLE_BATCH at a time; a free place takes the next job.

    Args:
        jobs: (prompt, temperature of the answer); questions are sampled at temperature 1, and 0 is greedy.
    Returns: the finished texts, in the order in which they ended.
    """
    runner = plain_runner(model, max_model_len=MAX_POSITIONS, max_tree_rows=0)
    waiting, texts = list(reversed(jobs)), []
    running: dict[int, tuple[list[int], float, int]] = {}  # slot -> text, temperature, most tokens
    progress = tqdm(total=len(jobs), desc="sample", unit="text")
    while waiting or running:
        while waiting and len(running) < SAMPLE_BATCH:
            prompt, temperature = waiting.pop()
            running[runner.open()] = (list(prompt), temperature, len(prompt) + max_new_tokens)
        extensions = []
        for slot, (text, _, _) in running.items():
            start = runner.num_rows(slot)
            parents = range(start - 1, len(text) - 1)
            extensions.append(Extension(slot, text[start:], parents, len(text) - start - 1))
        logits = torch.cat(runner.forward(extensions)).float()
        heat = [temperature if ASSISTANT_ID in text else 1.0 for text, temperature, _ in running.values()]
        noise = -torch.empty(logits.shape).exponential_(generator=generator).log()
        chosen = (logits + torch.tensor(heat)[:, None] * noise).argmax(-1).tolist()  # Gumbel-max, 0 included
        for (slot, (text, _, limit)), token_id in zip(list(running.items()), chosen, strict=True):
            is_question = ASSISTANT_ID not in text
            text.append(ASSISTANT_ID if is_question and text[-1] == END_ID else token_id)
            is_done = not is_question and token_id == END_ID
            if is_done or len(text) >= limit:
                texts += [text] if is_done else []
                runner.close(slot)
                del running[slot]
                progress.update()
    progress.close()
    return texts


# --- steps --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """What a step needs: the command line and the folders."""

    args: argparse.Namespace

    @property
    def work(self) -> Path:
        return Path(self.args.work)

    @property
    def device(self) -> torch.device:
        return torch.device(self.args.device)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        folder = self.args.pair / "target" if self.args.pair else self.work / "tokenizer"
        return PreTrainedTokenizerFast.from_pretrained(folder)

    def documents(self, path: Path, limit: int | None = None) -> list[list[int]]:
        return encode_problems(self.tokenizer(), read_problems(path)[:limit])

    def model(self, name: str) -> LlamaForCausalLM:
        model = LlamaForCausalLM(CONFIGS[name])
        state = torch.load(self.work / f"{name}.pt", map_location="cpu", weights_only=True)["model"]
        model.load_state_dict(state)
        return model.to(self.device).eval()

    def learnt(self, name: str) -> LlamaForCausalLM:
        """Return a model that others learn from, in bfloat16."""
        if not self.args.pair:
            return self.model(name).to(torch.bfloat16)
        return LlamaForCausalLM.from_pretrained(self.args.pair / name, dtype=torch.bfloat16).to(self.device).eval()


def run_tokenizer(step: Step) -> None:
    if not (step.work / "tokenizer" / "tokenizer.json").exists():
        train_tokenizer(read_problems(step.args.data), step.work / "tokenizer")


def run_target(step: Step) -> None:
    if (step.work / "target.json").exists():
        return
    torch.manual_seed(step.args.seed)
    model = LlamaForCausalLM(TARGET_CONFIG).to(step.device)
    heldout = step.documents(step.args.heldout, 200)
    steps = plan_steps(step.documents(step.args.data), TARGET_PHASE, step.args.seed)
    train(model, steps, TARGET_PHASE, next_token_loss, lambda: {"heldout_loss": mean_loss(model, heldout)}, step.work)


def run_sample(step: Step) -> None:
    path = step.work / "sampled.jsonl"
    if path.exists():
        return
    generator = torch.Generator().manual_seed(step.args.seed)
    target = step.learnt("target")
    own = [([USER_ID], (0.0, 1.0)[i % 2]) for i in range(step.args.own_problems)]  # half are answered greedily
    heldout = [d[: d.index(ASSISTANT_ID) + 1] for d in step.documents(step.args.heldout, NUM_HELDOUT_WRITTEN)]
    for file, jobs in (("sampled_heldout.jsonl", [(prompt, 0.0) for prompt in heldout]), ("sampled.jsonl", own)):
        texts = write_texts(target, jobs, 384, generator)
        (step.work / file).write_text("".join(json.dumps(text) + "\n" for text in texts))


def read_rows(path: Path) -> list[list[int]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_draft(step: Step, phase: Phase = DRAFT_PHASE) -> None:
    if (step.work / f"{phase.name}.json").exists():
        return
    torch.manual_seed(step.args.seed + 1)
    target = step.learnt("target")
    model = LlamaForCausalLM(CONFIGS[phase.name]).to(step.device)
    if phase is DRAFT_SMALL_PHASE:
        model.load_state_dict(layers_of(step.learnt("draft"), DRAFT_SMALL_LAYERS))
    documents = step.documents(step.args.data) + read_rows(step.work / "sampled.jsonl")
    heldout_written = read_rows(step.work / "sampled_heldout.jsonl")
    heldout = step.documents(step.args.heldout, 200)

    def evaluate() -> dict[str, float]:
        return {"heldout_loss": mean_loss(model, heldout), **agreement(model, target, heldout_written)}

    steps = plan_steps(documents, phase, step.args.seed)
    train(model, steps, phase, distillation_loss(target), evaluate, step.work)


def run_export(step: Step) -> None:
    out = Path(step.args.out)
    for name in [name for name in CONFIGS if (step.work / f"{name}.json").exists()]:
        model = step.model(name).to(torch.bfloat16)
        model.generation_config.eos_token_id = [END_ID, EOS_ID]
        model.generation_config.pad_token_id = EOS_ID
        model.save_pretrained(out / name)
        step.tokenizer().save_pretrained(out / name)
        parameters = sum(p.numel() for p in model.parameters())
        figures = json.loads((step.work / f"{name}.json").read_text())
        (out / name / "training.json").write_text(json.dumps({"parameters": parameters, **figures}, indent=1) + "\n")


STEPS = {
    "tokenizer": run_tokenizer,
    "target": run_target,
    "sample": run_sample,
    "draft": run_draft,
    "export": run_export,
    "draft-small": partial(run_draft, phase=DRAFT_SMALL_PHASE),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=[*STEPS, "all"])
    parser.add_argument("--data", type=Path, required=True, help="GSM8K training file (JSON lines: question, answer)")
    parser.add_argument("--heldout", type=Path, required=True, help="GSM8K test file, only for the figures")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=Path("src/card/models/demo_pair"), help="where export writes")
    parser.add_argument("--pair", type=Path, help="exported pair whose target and tokenizer the steps use")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 keeps torch's choice")
    parser.add_argument("--seed", type=int, default=20261120)
    parser.add_argument("--own-problems", type=int, default=8192, help="problems that the target invents for the draft")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.threads:
        torch.set_num_threads(args.threads)
    for name in [name for name in STEPS if name != "draft-small"] if args.step == "all" else [args.step]:
        started = time.monotonic()
        STEPS[name](Step(args))
        print(f"{name}: done in {math.ceil(time.monotonic() - started)} s")


if __name__ == "__main__":
    main()
