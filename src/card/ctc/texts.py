"""The target's own texts with its hidden states, which a head learns from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from card.config import SamplingRule
from card.errors import ModelError
from card.models.features import FINAL, FeatureWish
from card.models.protocol import Extension
from card.models.torch_runner import TorchRunner
from card.tree.sampling import Sampler

HEAD_WISH = FeatureWish((FINAL,), "logits")
_BATCH = 32  # texts that are written side by side


@dataclass(frozen=True, slots=True)
class TargetTexts:
    """Answers of a target, one behind the other: M tokens in all."""

    features: Tensor  # [M, D] in the target's dtype, on the CPU: the hidden state that each token was chosen from
    token_ids: Tensor  # [M] int64
    starts: Tensor  # [texts + 1] int64: where each begins; M at the end

    def __len__(self) -> int:
        return len(self.starts) - 1

    def text(self, idx: int) -> slice:
        """Return the place of a text's tokens."""
        return slice(int(self.starts[idx]), int(self.starts[idx + 1]))

    @property
    def digest(self) -> str:
        """Return a fingerprint of all that is learnt from."""
        digest = hashlib.sha256(self.token_ids.numpy().tobytes() + self.starts.numpy().tobytes())
        digest.update(self.features.float().numpy().tobytes())
        return digest.hexdigest()[:16]

    def save(self, path: Path, facts: str) -> None:
        """Keep the texts for a training that is cut off, with facts of how they came to be."""
        tensors = {"features": self.features, "token_ids": self.token_ids, "starts": self.starts}
        part = path.with_suffix(".part")
        save_file(tensors, str(part), {"facts": facts})
        part.replace(path)

    @classmethod
    def load(cls, path: Path, facts: str) -> TargetTexts | None:
        """Return kept texts; None if there are none, or they came to be in another way."""
        if not path.is_file():
            return None
        try:
            with safe_open(str(path), "pt") as file:
                if (file.metadata() or {}).get("facts") != facts:
                    return None
                return cls(*(file.get_tensor(name) for name in ("features", "token_ids", "starts")))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is cut off or damaged; delete it to begin anew") from error


@dataclass(slots=True)
class _Text:
    """One text as the target writes it. Its last token has no row."""

    idx: int
    slot: int
    num_prompt: int
    token_ids: list[int]
    sampler: Sampler
    features: list[Tensor] = field(default_factory=list)  # [D] each


def write_texts(
    target: TorchRunner,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    seed: int,
    max_tokens: int,
    end_ids: frozenset[int],
    on_answer: Callable[[], None] = lambda: None,
) -> TargetTexts:
    """Let the target answer prompts, several at a time; it keeps its last hidden states from now on.

    Args:
        prompts: token ids, each shorter than the target's context.
        temperature: 0 is greedy.
        seed: of the first prompt, the others count on from it.
        max_tokens: new tokens after which a text is broken off.
        on_answer: called after each answer.
    """
    target.features.wish([HEAD_WISH])
    waiting = list(enumerate(prompts))[::-1]
    running: list[_Text] = []
    done: list[_Text] = []
    while waiting or running:
        while waiting and len(running) < _BATCH:
            idx, prompt = waiting.pop()
            rule = SamplingRule(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=seed + idx)
            slot = target.open(min(len(prompt) + max_tokens, target.max_model_len))
            running.append(_Text(idx, slot, len(prompt), list(prompt), Sampler(rule, target.vocab_size)))
        _write(target, running)
        for text in [text for text in running if _is_done(text, target.max_model_len, max_tokens, end_ids)]:
            running.remove(text)
            target.close(text.slot)
            done.append(text)
            on_answer()
    done.sort(key=lambda text: text.idx)
    return _joined(done)


def _write(target: TorchRunner, texts: Sequence[_Text]) -> None:
    """Add the target's next token to each text."""
    extensions = []
    for text in texts:
        start, length = target.num_rows(text.slot), len(text.token_ids)
        extensions.append(
            Extension(text.slot, text.token_ids[start:], range(start - 1, length - 1), length - start - 1)
        )
    for idx, (text, logits) in enumerate(zip(texts, target.forward(extensions), strict=True)):
        text.features.append(target.features.of(idx, HEAD_WISH)[0].cpu().clone())
        text.token_ids += text.sampler.choose(logits, [len(text.token_ids)])


def _is_done(text: _Text, max_model_len: int, max_tokens: int, end_ids: frozenset[int]) -> bool:
    length = len(text.token_ids)
    return text.token_ids[-1] in end_ids or length >= max_model_len or length - text.num_prompt >= max_tokens


def _joined(texts: Sequence[_Text]) -> TargetTexts:
    rows = [row for text in texts for row in text.features]
    token_ids = [token_id for text in texts for token_id in text.token_ids[text.num_prompt :]]
    starts = torch.tensor([0, *_lengths(texts)]).cumsum(0)
    return TargetTexts(torch.stack(rows), torch.tensor(token_ids, dtype=torch.int64), starts)


def _lengths(texts: Sequence[_Text]) -> Iterator[int]:
    return (len(text.features) for text in texts)
