"""The target's own texts with its hidden states, the training data of heads."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from card.backends.transformers.arrays import as_array, as_tensor
from card.config import SamplingRule
from card.errors import ModelError
from card.machine.memory import is_shortage
from card.models.features import FINAL, FeatureWish
from card.models.files.headers import HeaderError
from card.models.files.tensor_files import MappedTensors, bytes_of, write_tensors
from card.models.images import ImagePrompt
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.tree.sampling import Sampler

BATCH = 32  # texts that are written side by side, and kept in a file


@dataclass(frozen=True, slots=True)
class TargetTexts:
    """Concatenated answers of a target, perhaps each with its prompt: M tokens in all.

    Prompts are those of a drafter: without the places of images.
    """

    features: Tensor  # [M, layers * D] on the CPU: the hidden states of the token before each
    token_ids: Tensor  # [M] int64
    starts: Tensor  # [texts + 1] int64: where each begins; M at the end
    answers: Tensor  # [texts] int64: where each answer begins
    prompts: Tensor  # [texts] int64: `prompt_key` of what each answers

    def __len__(self) -> int:
        return len(self.starts) - 1

    def text(self, idx: int) -> slice:
        """Return the slice of a text's tokens."""
        return slice(int(self.starts[idx]), int(self.starts[idx + 1]))

    def answer(self, idx: int) -> int:
        """Return where a text's answer begins."""
        return int(self.answers[idx])

    def num_learnt(self, idx: int) -> int:
        """Return how many tokens of a text are learnt: those of the answer, but for a text's first."""
        text = self.text(idx)
        return int(text.stop) - max(self.answer(idx), int(text.start) + 1)

    @property
    def digest(self) -> str:
        """Return a fingerprint of the data."""
        numbers = self.token_ids, self.starts, self.answers
        digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in numbers))
        digest.update(bytes_of(as_array(self.features, keeps_bits=True)))
        return digest.hexdigest()[:16]

    @classmethod
    def joined(cls, parts: Sequence[TargetTexts], keys: Sequence[int]) -> TargetTexts:
        """Return the texts of some parts that answer prompts with these keys, in their order."""
        place_of = {int(key): (part, idx) for part in parts for idx, key in enumerate(part.prompts)}
        chosen = [place_of[key] for key in keys]
        starts, answers = [0], list[int]()
        for part, idx in chosen:
            text = part.text(idx)
            answers.append(starts[-1] + part.answer(idx) - text.start)
            starts.append(starts[-1] + text.stop - text.start)
        features, token_ids = (
            torch.cat([getattr(part, name)[part.text(idx)] for part, idx in chosen])
            for name in ("features", "token_ids")
        )
        numbers = (torch.tensor(some, dtype=torch.int64) for some in (starts, answers, keys))
        return cls(features, token_ids, *numbers)


def prompt_key(prompt: Sequence[int]) -> int:
    """Return a number that tells a prompt from others, images in it included."""
    keys = prompt.images.keyed(prompt).tolist() if isinstance(prompt, ImagePrompt) else list(prompt)
    digest = hashlib.sha256(json.dumps(keys).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


class KeptTexts:
    """Texts in the files of a folder, a few in each, so that a run that was cut off goes on behind them."""

    def __init__(self, folder: Path, facts: str) -> None:
        """Use this folder; ``facts`` say how the texts come to be."""
        self._folder, self._facts = folder, facts

    def load(self) -> list[TargetTexts]:
        """Return what is kept. Texts that came to be otherwise are deleted. Raises: ModelError for a damaged file."""
        return [self._read(file) for file in sorted(self._folder.glob("*.safetensors")) if self._is_of_this_run(file)]

    def add(self, texts: TargetTexts) -> None:
        """Keep some more."""
        self._folder.mkdir(exist_ok=True)
        arrays = {one.name: as_array(getattr(texts, one.name), keeps_bits=True) for one in fields(texts)}
        write_tensors(self._folder / f"{texts.digest}.safetensors", arrays, {"facts": self._facts})

    def delete(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_of_this_run(self, file: Path) -> bool:
        with self._explained(file):
            is_so = MappedTensors(file).facts.get("facts") == self._facts
        if not is_so:
            file.unlink()
        return is_so

    def _read(self, file: Path) -> TargetTexts:
        with self._explained(file):
            arrays = MappedTensors(file).arrays
            return TargetTexts(**{one.name: as_tensor(arrays[one.name]) for one in fields(TargetTexts)})

    @staticmethod
    @contextlib.contextmanager
    def _explained(file: Path) -> Iterator[None]:
        try:
            yield
        except (HeaderError, OSError, KeyError) as error:
            if is_shortage(error):
                raise
            raise ModelError(f"{file} is cut off or damaged; delete it to start again") from error


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
    layers: tuple[int, ...] = (FINAL,),
    dtype: torch.dtype = torch.float32,
    whole: bool = False,
    kept: KeptTexts | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> TargetTexts:
    """Let the target answer prompts, several at a time, and keep its hidden states.

    Args:
        prompts: token ids, each shorter than the target's context; with images, if it can read them.
        temperature: 0 is greedy.
        seed: of the first prompt; the next prompts have the next numbers.
        max_tokens: new tokens after which a text is cut off.
        layers: as of `FeatureWish`.
        dtype: of the states that are kept.
        whole: keep the prompts, too.
        kept: texts of an earlier run, which are not written again; those of this one are added.
        on_answer: called after each answer.
    """
    keys = [prompt_key(prompt) for prompt in prompts]
    parts = [] if kept is None else kept.load()
    answered = {int(key) for part in parts for key in part.prompts}
    for _ in filter(answered.__contains__, keys):
        on_answer()
    done: list[WrittenText] = []

    def keep() -> None:
        parts.append(_joined(done, whole=whole, dtype=dtype))
        if kept is not None:
            kept.add(parts[-1])
        done.clear()

    for text in written_texts(
        target,
        prompts,
        FeatureWish(layers, "all" if whole else "logits"),
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        most_tokens=target.max_model_len,
        end_ids=end_ids,
        is_left_out=[key in answered for key in keys],
    ):
        done.append(text)
        on_answer()
        if len(done) == BATCH:
            keep()
    if done:
        keep()
    return TargetTexts.joined(parts, keys)


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
    is_left_out: Sequence[bool] = (),
) -> Iterator[WrittenText]:
    """Yield the target's answers when they end, with the requested hidden states.

    Args:
        most_tokens: of a text, its prompt included; other arguments as of `write_texts`.
        is_left_out: of each prompt, whether it is not answered; empty: all are.
    """
    target.features.wish([wish])
    left_out = is_left_out or [False] * len(prompts)
    waiting = [one for one, is_out in zip(enumerate(prompts), left_out, strict=True) if not is_out][::-1]
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


def _joined(texts: Sequence[WrittenText], *, whole: bool, dtype: torch.dtype) -> TargetTexts:
    features, token_ids, starts, answers = list[Tensor](), list[int](), [0], list[int]()
    for text in texts:
        if whole:
            token_ids += [text.prompt[place] for place in text.shown[1:]]
        answers.append(len(token_ids))
        token_ids += text.token_ids[len(text.prompt) :]
        features += [one.to(dtype) for one in text.features]
        starts.append(len(token_ids))
    keys = [prompt_key(text.prompt) for text in texts]
    numbers = (torch.tensor(some, dtype=torch.int64) for some in (token_ids, starts, answers, keys))
    return TargetTexts(torch.cat(features), *numbers)
