"""The tokenizer of a model: text to token ids and back, its special tokens and its chat templates.

It works as the fast tokenizers of transformers do, and has their names for what it can do, so that either can be given.
Light on imports: no model, and no template engine before a template is rendered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from card.errors import PromptError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DEFAULT, _TOOL_USE = "default", "tool_use"  # names of chat templates
# Blanks that a word-piece decoder puts before marks and endings of words.
_SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class Tokenizer:
    """Turns text into token ids and ids into text, by a tokenizer of the library tokenizers.

    Attributes:
        special_tokens_map: the tokens with a part of their own, by its name, such as "eos_token".
        extra_special_tokens: further special tokens.
        fill_marks: the marks of a text that is filled in, by part, where the model's file names them.
        chat_template: a Jinja template, several by name, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        extra_special_tokens: Sequence[str] = (),
        fill_marks: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        cleans_up_spaces: bool = False,
    ) -> None:
        """Take the backend, which from now on neither cuts nor pads a text.

        Args:
            special_tokens: by part; all of them are tokens of the backend.
            fill_marks: see `card.text.infill`.
            cleans_up_spaces: `decode` takes away blanks before punctuation, unless it is told something else.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._cleans_up_spaces = cleans_up_spaces
        self.special_tokens_map = dict(special_tokens or {})
        self.extra_special_tokens = tuple(extra_special_tokens)
        self.fill_marks = dict(fill_marks or {})
        self.chat_template = chat_template

    # ---- text and ids -----------------------------------------------------------------------------------------------

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer | None:
        """The tokenizer of the library tokenizers; None if another program makes the ids."""
        return self._backend

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Args:
            add_special_tokens: with those that the tokenizer puts before and behind each text.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Return the text of ids.

        Args:
            skip_special_tokens: leave out `skipped_tokens`.
            clean_up_tokenization_spaces: take away blanks before punctuation; None: as the model's files say. It is
                never done for BPE, whose blanks are the text's own.
        """
        text = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        is_wanted = self._cleans_up_spaces if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        if is_wanted and not isinstance(self._backend.model, tokenizers.models.BPE):
            for spaced in _SPACED:
                text = text.replace(spaced, spaced.strip())
        return text

    # ---- the vocabulary ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        """Return True, also for an empty vocabulary."""
        return True

    def get_vocab(self) -> dict[str, int]:
        """Return all ids by the names of their tokens."""
        return self._backend.get_vocab(with_added_tokens=True)

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """Return the name of a token; None if there is no such id."""
        return self._backend.id_to_token(token_id)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token by its name; None if there is no such token."""
        return self._backend.token_to_id(token)

    # ---- special tokens ---------------------------------------------------------------------------------------------

    @property
    def added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        """The tokens that are found in a text before it is cut into pieces, by id."""
        return self._backend.get_added_tokens_decoder()

    @property
    def skipped_tokens(self) -> dict[int, str]:
        """The tokens that `decode` can leave out, by id."""
        return {token_id: token.content for token_id, token in self.added_tokens_decoder.items() if token.special}

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the special tokens that the model's files name, with or without a part."""
        named = dict.fromkeys((*self.special_tokens_map.values(), *self.extra_special_tokens))
        ids = (self.convert_tokens_to_ids(token) for token in named)
        return [token_id for token_id in ids if token_id is not None]

    @property
    def bos_token(self) -> str | None:
        """The token that begins a text."""
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text."""
        return self.special_tokens_map.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a text."""
        return None if self.eos_token is None else self.convert_tokens_to_ids(self.eos_token)

    # ---- chat templates and files -----------------------------------------------------------------------------------

    def get_chat_template(self, tools: Sequence[Any] | None = None) -> str:
        """Return the chat template.

        Args:
            tools: that the model may call; a model may have a template for conversations with any.
        Raises: PromptError if there is none for this conversation.
        """
        if not self.chat_template:
            raise PromptError("the tokenizer has no chat template; give a plain prompt, or use a model made for chat")
        if isinstance(self.chat_template, str):
            return self.chat_template
        names = [_TOOL_USE, _DEFAULT] if tools is not None else [_DEFAULT]
        template = next((self.chat_template[name] for name in names if name in self.chat_template), None)
        if template is None:
            raise PromptError(
                f"the tokenizer has the chat templates {', '.join(sorted(self.chat_template))} and no default one; "
                "give a plain prompt, or name the one to be used default"
            )
        return template

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `read_tokenizer` and transformers read."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        config = {
            **self.special_tokens_map,
            "extra_special_tokens": list(self.extra_special_tokens),
            "clean_up_tokenization_spaces": self._cleans_up_spaces,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        if isinstance(self.chat_template, Mapping):
            templates = self.chat_template.items()
            config["chat_template"] = [{"name": name, "template": template} for name, template in templates]
        elif self.chat_template is not None:
            config["chat_template"] = self.chat_template
        self._backend.save(str(place / "tokenizer.json"))
        (place / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2), "utf-8")
