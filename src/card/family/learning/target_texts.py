"""The target's own texts with its hidden states, the training data of heads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from card.config import SamplingRule
from card.errors import ModelError
from card.machine.memory import is_shortage
from card.models.features import FINAL, FeatureWish
from card.models.files.headers import HeaderError
from card.models.files.tensor_files import MappedTensors, write_tensors
from card.models.images import ImagePrompt
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.theirs.transformers.arrays import as_array, as_tensor
from card.tree.sampling import Sampler

_LOGITS_WISH, _WHOLE_WISH = FeatureWish((FINAL,), "logits"), FeatureWish((FINAL,), "all")
BATCH = 32  # texts that are written side by side


@dataclass(frozen=True, slots=True)
class TargetTexts:
    """Concatenated answers of a target, perhaps each with its prompt: M tokens in all.

    Prompts are those of a drafter: without the places of images.
    """

    features: Tensor  # [M, D] in the target's dtype, on the CPU: the hidden state of the token before each
    token_ids: Tensor  # [M] int64
    starts: Tensor  # [texts + 1] int64: where each begins; M at the end
    answers: Tensor  # [texts] int64: where each answer begins

    def __len__(self) -> int:
        return len(self.starts) - 1

    def text(self, idx: int) -> slice:
        """Return the slice of a text's tokens."""
        return slice(int(self.starts[idx]), int(self.starts[idx + 1]))

    def answer(self, idx: int) -> int:
        """Return where a text's answer begins."""
        return int(self.answers[idx])

    @property
    def digest(self) -> str:
        """Return a fingerprint of the data."""
        numbers = self.token_ids, self.starts, self.answers
        digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in numbers))
        digest.update(self.features.float().numpy().tobytes())
        return digest.hexdigest()[:16]

    def save(self, path: Path, facts: str) -> None:
        """Write the texts, with facts of their origin, so that a training can resume."""
        arrays = {one.name: as_array(getattr(self, one.name), keeps_bits=True) for one in fields(self)}
        write_tensors(path, arrays, {"facts": facts})

    @classmethod
    def load(cls, path: Path, facts: str) -> TargetTexts | None:
        """Return the stored texts; None if there are none, or their facts differ."""
        if not path.is_file():
            return None
        try:
            file = MappedTensors(path)
            if file.facts.get("facts") != facts:
                return None
            return cls(**{one.name: as_tensor(file.arrays[one.name]) for one in fields(cls)})
        except (HeaderError, OSError, KeyError) as error:
            if is_shortage(error):
                raise
            raise ModelError(f"{path} is cut off or damaged; delete it to start again") from error


@dataclass(slots=True)
class WrittenText:
    """A text that the target is writing. Its last token has no row."""

    idx: int
    slot: int
    prompt: Sequence[int]  # an `ImagePrompt` if there are images in it
    token_ids: list[int]
    sampler: Sampler
    features: list[Tensor] = field(default_factory=list)  # [n, D] each: of the kept rows of each pass

    @property
    def num_new(self) -> int:
        """Number of tokens of the answer so far."""
        return len(self.token_ids) - len(self.prompt)

    @property
    def shown(self) -> list[int]:
        """Places of the prompt that a drafter reads."""
        places = range(len(self.prompt))
        return self.prompt.images.left_out_of(places) if isinstance(self.prompt, ImagePrompt) else list(places)


def write_texts(
    target: RowRunner,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    seed: int,
    max_tokens: int,
    end_ids: frozenset[int],
    whole: bool = False,
    on_answer: Callable[[], None] = lambda: None,
) -> TargetTexts:
    """Let the target answer prompts, several at a time, and keep its last hidden states.

    Args:
        prompts: token ids, each shorter than the target's context; with images, if it can read them.
        temperature: 0 is greedy.
        seed: of the first prompt; the next prompts have the next numbers.
        max_tokens: new tokens after which a text is cut off.
        whole: keep the prompts, too.
        on_answer: called after each answer.
    """
    wish = _WHOLE_WISH if whole else _LOGITS_WISH
    done: list[WrittenText] = []
    for text in written_texts(
        target,
        prompts,
        wish,
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        most_tokens=target.max_model_len,
        end_ids=end_ids,
    ):
        done.append(text)
        on_answer()
    done.sort(key=lambda text: text.idx)
    return _joined(done, whole=whole)


def written_texts(
    target: RowRunner,
    prompts: Sequence[Sequence[int]],
    wish: FeatureWish,
    *,
    temperature: float,
    seed: int,
    max_tokens: int,
    most_tokens: int,
    end_ids: frozenset[int],
) -> Iterator[WrittenText]:
    """Yield the target's answers when they end, with the requested hidden states.

    Args:
        most_tokens: of a text, its prompt included; other arguments as of `write_texts`.
    """
    target.features.wish([wish])
    waiting = list(enumerate(prompts))[::-1]
    running: list[WrittenText] = []
    while waiting or running:
        while waiting and len(running) < BATCH:
            idx, prompt = waiting.pop()
            rule = SamplingRule(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=seed + idx)
            slot = target.open(min(len(prompt) + max_tokens, most_tokens))
            target.show(slot, prompt.images if isinstance(prompt, ImagePrompt) else None)
            running.append(WrittenText(idx, slot, prompt, list(prompt), Sampler(rule, target.vocab_size)))
        _write(target, running, wish)
        for text in list(running):
            is_full = len(text.token_ids) >= most_tokens or text.num_new >= max_tokens
            if is_full or text.token_ids[-1] in end_ids:
                running.remove(text)
                target.close(text.slot)
                yield text


def _write(target: RowRunner, texts: Sequence[WrittenText], wish: FeatureWish) -> None:
    """Add the target's next token to each text."""
    extensions = [Extension.of_text(text.slot, text.token_ids, target.num_rows(text.slot)) for text in texts]
    for idx, (text, logits) in enumerate(zip(texts, target.forward(extensions), strict=True)):
        rows = target.features.of(idx, wish)
        if wish.rows == "all" and not text.num_new:
            rows = rows[text.shown]
        text.features.append(as_tensor(np.array(rows)))
        text.token_ids += text.sampler.choose(logits, [len(text.token_ids)])


def _joined(texts: Sequence[WrittenText], *, whole: bool) -> TargetTexts:
    features, token_ids, starts, answers = list[Tensor](), list[int](), [0], list[int]()
    for text in texts:
        if whole:
            token_ids += [text.prompt[place] for place in text.shown[1:]]
        answers.append(len(token_ids))
        token_ids += text.token_ids[len(text.prompt) :]
        features += text.features
        starts.append(len(token_ids))
    numbers = (torch.tensor(some, dtype=torch.int64) for some in (token_ids, starts, answers))
    return TargetTexts(torch.cat(features), *numbers)
