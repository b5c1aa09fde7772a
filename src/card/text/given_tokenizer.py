"""Tokenizers of transformers that are given to us, as our own; nothing of transformers is imported."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from card.text.tokenizer import Tokenizer


def as_tokenizer(given: Any) -> Tokenizer:
    """Return a tokenizer of transformers as one of ours; ours are returned as they are.

    A fast one is copied: what is changed in it later on changes nothing here.
    """
    if isinstance(given, Tokenizer):
        return given
    return Tokenizer(copy.deepcopy(given.backend_tokenizer), **_facts(given)) if given.is_fast else SlowTokenizer(given)


def _facts(given: Any) -> dict[str, Any]:
    return {
        "special_tokens": given.special_tokens_map,
        "extra_special_tokens": given.extra_special_tokens,
        "chat_template": given.chat_template,
        "cleans_up_spaces": given.clean_up_tokenization_spaces,
    }


class SlowTokenizer(Tokenizer):
    """A tokenizer that is a program in Python, with the contract of `Tokenizer`."""

    def __init__(self, given: Any) -> None:
        """Take a tokenizer of transformers that is not fast."""
        self._given = given
        facts = _facts(given)
        self.special_tokens_map = dict(facts["special_tokens"])
        self.extra_special_tokens = tuple(facts["extra_special_tokens"])
        self.fill_marks = {}
        self.chat_template = facts["chat_template"]

    @property
    def backend_tokenizer(self) -> None:
        """None: what makes the ids is a program."""
        return None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        return [
            int(one) for one in self._given(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        ]

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Return the text of ids."""
        more = {"clean_up_tokenization_spaces": clean_up_tokenization_spaces}
        return str(self._given.decode(list(token_ids), skip_special_tokens=skip_special_tokens, **more))

    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""
        return len(self._given)

    def get_vocab(self) -> dict[str, int]:
        """Return all ids by the names of their tokens."""
        return dict(self._given.get_vocab())

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """Return the name of a token; None if there is no such id."""
        piece: str | None = self._given.convert_ids_to_tokens(token_id)
        return piece

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token by its name; None if there is no such token."""
        return self.get_vocab().get(token)

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The tokens that are found in a text before it is cut into pieces, by id."""
        return dict(self._given.added_tokens_decoder)

    @property
    def skipped_tokens(self) -> dict[int, str]:
        """The tokens that `decode` can leave out, by id."""
        return {token_id: self.convert_ids_to_tokens(token_id) or "" for token_id in self.all_special_ids}

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the special tokens that the model's files name, with or without a part."""
        return list(self._given.all_special_ids)

    def save(self, folder: str | Path) -> None:
        """Write the files that transformers reads."""
        self._given.save_pretrained(folder)
