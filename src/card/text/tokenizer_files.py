"""Read the tokenizer of a model's folder: what transformers' AutoTokenizer makes of it, without transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken

from card.text.tokenizer import NAMED_TOKENS, Tokenizer
from card.text.tokenizer_classes import TokenizerClass, find_class

TOKENIZER_NAME = "tokenizer.json"
_TEMPLATES = "additional_chat_templates"  # a folder
# What a tokenizer is read from, as patterns of names.
FILE_NAMES = (
    "config.json",
    TOKENIZER_NAME,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    f"{_TEMPLATES}/*.jinja",
)
_PLAIN_FRAME = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}


class _File(msgspec.Struct):
    """A tokenizer.json; what may be large stays as it is written."""

    model: dict[str, msgspec.Raw]
    version: str = "1.0"
    truncation: Any = None
    padding: Any = None
    added_tokens: list[dict[str, Any]] = []
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer in a folder; None if it has no tokenizer.json.

    Raises: OSError, and almost anything if the files are damaged.
    """
    source = folder / TOKENIZER_NAME
    if not source.is_file():
        return None
    model, config = _read(folder / "config.json"), _read(folder / "tokenizer_config.json")
    data = source.read_bytes()
    declared = str(config.get("tokenizer_class") or model.get("tokenizer_class") or "")
    kind = find_class(str(model.get("model_type") or ""), declared, is_byte_level=b'"ByteLevel"' in data)
    file = msgspec.json.decode(data, type=_File)
    if msgspec.json.decode(file.model.get("type", b"null")) != "BPE":
        kind = None  # the classes that set something are all of this model
    stated = _stated(folder, config)
    added = _added_tokens(folder, config, file, stated)
    special, others = _special_tokens(stated, kind)
    backend = tokenizers.Tokenizer.from_buffer(data if kind is None else _remade(file, kind, config, special))
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    _add(backend, added, special, others)
    return Tokenizer(
        backend,
        special_tokens={name: str(token) for name, token in special.items()},
        extra_special_tokens=[str(token) for token in others],
        chat_template=_chat_template(folder, config),
        cleans_up_spaces=bool(config.get("clean_up_tokenization_spaces", False)),
    )


def _read(file: Path) -> dict[str, Any]:
    facts = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    if not isinstance(facts, dict):
        raise ValueError(f"{file.name} is no JSON object")
    return facts


def _remade(file: _File, kind: TokenizerClass, config: Mapping[str, Any], special: Mapping[str, Any]) -> bytes:
    """Return the tokenizer.json that a class makes of another one; added tokens follow when it is read."""
    parts = kind.parts(config)
    file.normalizer, file.pre_tokenizer, file.decoder = (
        parts[name] for name in ("normalizer", "pre_tokenizer", "decoder")
    )
    flags = dict(kind.flags)
    if kind.has_unknown:
        flags["unk_token"] = str(special["unk_token"]) if "unk_token" in special else None
    file.model |= {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in flags.items()}
    file.added_tokens = []
    if not kind.keeps_frame:
        file.post_processor = _PLAIN_FRAME
    return msgspec.json.encode(file)


# ---- added and special tokens ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stated:
    """The special tokens as a folder's files state them: a text, or an object with its flags."""

    parts: dict[str, Any]  # by part; None: there is none
    others: list[Any]  # without a part
    late: list[Any]  # the same, which added_tokens.json does not count as special


def _stated(folder: Path, config: Mapping[str, Any]) -> _Stated:
    """Return what tokenizer_config.json states; without a list of added tokens there, special_tokens_map.json too."""
    others = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    parts = {name: token for name, token in config.items() if name.endswith("_token") and not isinstance(token, bool)}
    parts = {
        name: parts[name] for name in sorted(parts, key=lambda name: isinstance(parts[name], str))
    }  # objects first
    if isinstance(others, dict):
        parts, others = {**parts, **others}, []
    late: list[Any] = []
    older = {} if "added_tokens_decoder" in config else _read(folder / "special_tokens_map.json")
    for name, value in older.items():
        if name == "additional_special_tokens":
            late = [] if {name, "extra_special_tokens"} & config.keys() else list(value)
        elif name != "extra_special_tokens":
            parts[name] = {**value, "special": True} if isinstance(value, dict) else value
        elif isinstance(value, dict):
            parts |= value
        else:
            others = [*others, *(one for one in value if one not in others)]
    return _Stated(parts, list(others), late)


def _added_tokens(folder: Path, config: Mapping[str, Any], file: _File, stated: _Stated) -> dict[int, AddedToken]:
    """Return the tokens that are added to the vocabulary, by id."""
    listed = config.get("added_tokens_decoder")
    if listed is not None:
        return {int(token_id): _token(token) for token_id, token in listed.items()}
    named = {str(_token(token)) for token in (*stated.parts.values(), *stated.others) if token}
    added = {
        token_id: AddedToken(token, normalized=token not in named, special=token in named)
        for token, token_id in _read(folder / "added_tokens.json").items()
    }
    added.update({one["id"]: _token({key: one[key] for key in one if key != "id"}) for one in file.added_tokens})
    return added


def _special_tokens(stated: _Stated, kind: TokenizerClass | None) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Return the special tokens by their parts, and those without a part."""
    parts = {**({} if kind is None else kind.special_tokens), **stated.parts}
    names = [*NAMED_TOKENS, *(name for name in parts if name not in NAMED_TOKENS)]
    special = {name: _token(parts[name]) for name in names if parts.get(name) is not None}
    return special, [_token(token) for token in (*stated.others, *stated.late)]


def _token(given: Any) -> AddedToken:
    """Return an added token as a file states it. Raises: TypeError if that is neither a text nor an object."""
    if isinstance(given, str):
        return AddedToken(given, special=True)
    if not isinstance(given, dict):
        raise TypeError(f"a token must be a text or an object, got {str(given)[:40]}")
    return AddedToken(**{name: value for name, value in given.items() if name != "__type"})


def _add(
    backend: tokenizers.Tokenizer,
    added: Mapping[int, AddedToken],
    special: Mapping[str, AddedToken],
    others: Sequence[AddedToken],
) -> None:
    """Let the backend know all added tokens in the order of their ids, then the special tokens that it lacks."""
    tokens = [added[token_id] for token_id in sorted(added)]
    names = {str(token) for token in (*backend.get_added_tokens_decoder().values(), *tokens)}
    for token in (*special.values(), *others):
        if str(token) not in names:
            names.add(str(token))
            tokens.append(token)
    with_a_part = {str(token) for token in special.values()}
    for token in tokens:
        if str(token) in with_a_part:
            token.special = True
    backend.add_tokens(tokens)


# ---- chat templates --------------------------------------------------------------------------------------------------


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, or several by name: files of their own come before tokenizer_config.json."""
    templates = dict(_template_files(folder))
    if templates:
        return templates["default"] if list(templates) == ["default"] else templates
    stated = config.get("chat_template")
    if isinstance(stated, list):
        return {one["name"]: one["template"] for one in stated}
    if stated is None:  # older models for images have it beside their processor
        stated = _read(folder / "chat_template.json").get("chat_template")
    return stated


def _template_files(folder: Path) -> Iterator[tuple[str, str]]:
    if (file := folder / "chat_template.jinja").is_file():
        yield "default", file.read_text("utf-8")
    for file in sorted((folder / _TEMPLATES).glob("*.jinja")):
        yield file.stem, file.read_text("utf-8")
