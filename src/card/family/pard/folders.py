"""Folders of a training: the draft model, loaded with a row for the mask token, and the adapted model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from card.backends.transformers.loading import load_model
from card.cli.parts.files import holds_json, parse_json_line
from card.errors import ModelError
from card.family.pard.rows import Document, Drop, batch_of, kept_origins, packed_row
from card.family.pard.state_input import StateInput
from card.models.facts import context_limit, vocab_size
from card.models.files.sources import quiet
from card.models.layer_kinds import has_state
from card.models.loading import load_tokenizer
from card.models.names import model_name
from card.models.parallel_draft import MASK_KEY, STATES_FILE, ParallelDraft, parallel_draft_of
from card.text.chat_template import render_chat
from card.text.lines import numbered_lines
from card.text.prompts import encode_chat, encode_prompt, encode_rendered
from card.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_TOKENS = 1024  # of a training text; longer ones are cut
_CHECKED_TOKENS, _CHECKED_LOGITS = 9, 1e-2  # of a trial text; largest difference in logits, relative to their spread


@dataclass(frozen=True, slots=True)
class Adaptable:
    """A draft model that can be adapted."""

    model: PreTrainedModel  # in float32
    tokenizer: Tokenizer
    mask_id: int
    dtype: torch.dtype  # as stored before and after

    def save(
        self,
        folder: Path,
        num_tokens: int,
        temperatures: tuple[float, ...],
        figures: Mapping[str, Any],
        state_input: StateInput | None = None,
    ) -> None:
        """Write the adapted model as an ordinary model folder; the facts that make it a drafter come last.

        Args:
            state_input: its layer for the states of one target; None: it is for any target of its vocabulary.
        """
        model: Any = self.model
        setattr(model.config, MASK_KEY, self.mask_id)  # other engines read it there
        with quiet():
            model.to(self.dtype).save_pretrained(folder)
            self.tokenizer.save(folder)
        if state_input is not None:
            state_input.save(folder / STATES_FILE)
        facts = ParallelDraft(
            mask_id=self.mask_id,
            num_tokens=num_tokens,
            temperatures=temperatures,
            vocab_size=vocab_size(self.model),
            states_file=None if state_input is None else folder / STATES_FILE,
        )
        facts.save(folder, figures)


def load_adaptable(name: str, *, device: str = "cpu") -> Adaptable:
    """Load a draft model and give it a mask token: the first row that its tokenizer does not use, else a new one.

    An adapted model keeps its mask token and weights.

    Raises: ModelError if it cannot be loaded, or does not follow attention masks.
    """
    model: Any = load_model(name, device=device)
    tokenizer = load_tokenizer(name)
    if has_state(model):
        raise ModelError(f"{model_name(model)} keeps a recurrent state, so that masks cannot share a row; give another")
    dtype = model.dtype
    model.float()
    known = parallel_draft_of(model)
    mask_id = known.mask_id if known is not None else _new_token(model, max(tokenizer.get_vocab().values()) + 1)
    _check_masks_are_apart(model, mask_id)
    return Adaptable(model, tokenizer, mask_id, dtype)


def _new_token(model: Any, token_id: int) -> int:
    """Give the model a token of this id, initialised with the mean of the tokens before it; return the id."""
    if token_id == vocab_size(model):
        model.resize_token_embeddings(token_id + 1, mean_resizing=False)
    with torch.no_grad():
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight[token_id] = table.weight[:token_id].mean(0)
    return token_id


def _check_masks_are_apart(model: PreTrainedModel, mask_id: int) -> None:
    """Compare masks in one row with the same masks alone. Raises: ModelError if they see each other."""
    document = Document(range(_CHECKED_TOKENS))
    origins = kept_origins(document, Drop(num_tokens=3, retention=1.0), torch.Generator())
    batch = batch_of([packed_row(document, origins, mask_id)])
    try:
        with torch.no_grad():
            place = model.device
            packed = model(
                input_ids=batch.token_ids.to(place),
                attention_mask=batch.attention.to(place),
                position_ids=batch.positions.to(place),
            ).logits[0]
            alone = model(torch.tensor([[*range(_CHECKED_TOKENS - 4), mask_id, mask_id]], device=place)).logits[0]
    except Exception as error:  # an architecture's code may raise any type
        raise ModelError(f"{model_name(model)} cannot be adapted: it takes no attention mask of ours") from error
    origin = _CHECKED_TOKENS - 5
    rows = (batch.origins[0] == origin).nonzero()[:, 0]
    difference = (packed[rows] - alone[-len(rows) :]).abs().max() / alone.std()
    if not difference <= _CHECKED_LOGITS:
        raise ModelError(f"{model_name(model)} cannot be adapted: its attention does not follow a mask of ours")


# ---- texts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """A training text."""

    text: str
    question: str | None = None  # answered by the text; None: the whole text is learnt

    def encode(self, tokenizer: Tokenizer) -> Document:
        """Return its tokens. Raises: PromptError."""
        if self.question is None:
            return Document(encode_prompt(tokenizer, self.text))
        return _answered(tokenizer, self.question, self.text)


def read_texts(path: Path) -> list[Text]:
    """Return the texts of a UTF-8 file: of JSON lines with "question" and "answer" or with "text", else plain lines.

    Raises: PromptError, with the line.
    """
    numbered = numbered_lines(path, "texts")
    if not holds_json(path, numbered):
        return [Text(line) for _, line in numbered]
    wanted = '"question" and "answer", or with "text"'
    return [parse_json_line(path, number, line, _text_of, wanted) for number, line in numbered]


def clipped(documents: list[Document], model: PreTrainedModel) -> list[Document]:
    """Return the texts, cut to the model's context and to `_MOST_TOKENS`."""
    most = min(_MOST_TOKENS, context_limit(model))
    return [Document(document.token_ids[:most], document.first) for document in documents]


def _text_of(row: Any) -> Text | None:
    question, answer, text = (row.get(name) for name in ("question", "answer", "text"))
    if isinstance(question, str) and isinstance(answer, str) and question.strip():
        return Text(answer, question)
    return Text(text) if isinstance(text, str) and text else None


def _answered(tokenizer: Tokenizer, question: str, answer: str) -> Document:
    """Return a question and its answer, in the chat template if there is one; only the answer is learnt."""
    if not tokenizer.chat_template:
        asked = encode_prompt(tokenizer, question + "\n")
        return Document(encode_prompt(tokenizer, f"{question}\n{answer}"), len(asked))
    turns = [{"role": "user", "content": question}]
    asked = encode_chat(tokenizer, turns)
    whole = render_chat(tokenizer, [*turns, {"role": "assistant", "content": answer}])
    token_ids = encode_rendered(tokenizer, whole)
    pairs = enumerate(zip(asked, token_ids, strict=False))
    return Document(token_ids, max(1, next((i for i, (one, other) in pairs if one != other), len(asked))))
