"""The tokenizer, the chat template and the end tokens of a GGUF file.

They are built from the file and, where the file states nothing, from llama.cpp's defaults.
Source of both: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors

from card.models.files.gguf.header import DamagedError, GgufError, Header
from card.models.files.gguf.kept_tokenizer import Pairs, Parts, read_parts, write_parts
from card.models.files.gguf.splits import RULES, UNNAMED, SplitRule
from card.text.parts.families import kept_ends
from card.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_BYTES, _SENTENCEPIECE = "gpt2", "llama"  # kinds of tokenizers: pairs of bytes, and SentencePiece
_GEMMA4 = "gemma4"  # a third kind: pairs of characters, the rest as SentencePiece
_BLANK = "▁"  # how SentencePiece writes one
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # types of tokens; unused ones pad the vocabulary
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # of files that do not say
# The marks of a text that is filled in, by part, with the keys that name them; older files have the second ones.
_FILL_KEYS = {
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "pad": ("fim_pad",),
    "repo": ("fim_rep",),
    "file": ("fim_sep",),
}
_ENDS = ("eos", "eot", "eom")  # of a text, a turn, and a message that asks for a tool
# Tokens that end a text or a turn in every model that has them.
_END_NAMES = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>"),
        *("</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "<\uff5cend▁of▁sentence\uff5c>", "<end_of_utterance>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>", "<|tool_response>", "[e~["),
    }
)
_MOST_TOKEN_CHARS = 4096  # published ones have up to some hundred
_MOST_COMPARED_CHARS = 1 << 28  # the sum of squares of all lengths; a vocabulary of 262,144 has some 20 million
# Models whose marks take the blanks behind them, by their names, and the tokens of theirs that do not: a file does not
# tell, and llama.cpp knows them so.
_PHI3, _PHI3_KEEPS = ("phi-3", "phi 3", "phi3"), frozenset({"<unk>", "<s>", "<|endoftext|>"})
_SHORT_RUNS = ("gemma", "gemma2")  # whose folders join short runs of blanks first; SentencePiece takes the longest
_MARKUP = "</s>"  # also how HTML ends a text that is struck out; only a control token ends an answer


def check_tokenizer(header: Header) -> None:
    """Check that the file has a tokenizer of a kind that is known. Raises: GgufError."""
    metadata = header.metadata
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if kind is None or not isinstance(tokens, list):
        raise GgufError("has no tokenizer; use a file that was made of a whole model folder")
    if kind not in (_BYTES, _SENTENCEPIECE, _GEMMA4):
        raise GgufError(
            f"has a tokenizer of the kind {str(kind)[:40]}, which is not known here; use the model's folder"
        )
    num_rows = header.tensors["token_embd.weight"].shape[0]
    if len(tokens) > num_rows:
        raise DamagedError(f"damaged: its tokenizer has {len(tokens)} tokens, its model {num_rows}")
    if not all(isinstance(token, str) for token in tokens):
        raise DamagedError("damaged: the tokens of its tokenizer are no texts")
    _check_lengths(tokens)
    named = [token for token in tokens if token]
    if len(set(named)) < len(named):
        raise DamagedError("damaged: its tokenizer has a token twice")
    if kind != _SENTENCEPIECE and "tokenizer.ggml.merges" not in metadata:
        raise GgufError("has a tokenizer without merges; use a file that was made of a whole model folder")


def _check_lengths(tokens: Sequence[str]) -> None:
    """Check that no token is so long that finding its halves takes longer than reading a model."""
    longest = max(map(len, tokens), default=0)
    if longest > _MOST_TOKEN_CHARS:
        raise DamagedError(
            f"damaged: its tokenizer has a token of {longest} characters, and at most {_MOST_TOKEN_CHARS} are possible"
        )
    num_compared = sum(len(token) ** 2 for token in tokens)
    if num_compared > _MOST_COMPARED_CHARS:
        raise DamagedError(
            f"damaged: too many of the {len(tokens)} tokens of its tokenizer have hundreds of characters"
        )


def special_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """Return the id of a token by its part, such as bos; None if there is none."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == _SENTENCEPIECE
    default = _SENTENCEPIECE_IDS.get(name) if is_sentencepiece else None
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    is_one = isinstance(token_id, int) and isinstance(tokens, list) and 0 <= token_id < len(tokens)
    return token_id if is_one else None


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids that end a text: those that the file names, its end of text first, then those known by name."""
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list):
        return []
    named = {token: token_id for token_id, token in enumerate(tokens) if isinstance(token, str) and token in _END_NAMES}
    for part_end in kept_ends(named):
        named.pop(part_end, None)
    markup = named.get(_MARKUP)
    if markup is not None and isinstance(types, list) and (len(types) != len(tokens) or types[markup] != _CONTROL):
        del named[_MARKUP]
    stated = [special_id(metadata, name) for name in _ENDS]
    return list(dict.fromkeys([one for one in stated if one is not None] + list(named.values())))


def tokenizer_digest(header: Header) -> str:
    """Return a name that two files share only if their tokenizers have the same tokens under the same ids."""
    entries = {name: value for name, value in header.metadata.items() if name.startswith("tokenizer.ggml.")}
    return hashlib.sha256(msgspec.json.encode(entries, order="sorted")).hexdigest()


def read_tokenizer(header: Header) -> Tokenizer:
    """Return the tokenizer of a file that `check_tokenizer` lets pass, with its chat template.

    Raises: almost anything, if the file is damaged.
    """
    return _framed(_parts(header))


def write_tokenizer(header: Header, folder: Path) -> Tokenizer:
    """Write the tokenizer to a folder for `load_tokenizer`; return it. Raises: as `read_tokenizer`, and OSError."""
    parts = _parts(header)
    write_parts(folder, parts)
    return _framed(parts)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer that was written to a folder."""
    return _framed(read_parts(folder))


def _framed(parts: Parts) -> Tokenizer:
    """Return the tokenizer of its parts; a token with a part of its own is special, whatever its type says."""
    core, frame = parts.core, parts.frame
    special = {role: frame[role] for role in _ROLES if role in frame}
    known = {token.content for token in core.get_added_tokens_decoder().values()}
    core.add_tokens([AddedToken(token, special=True) for token in special.values() if token not in known])
    return Tokenizer(core, special_tokens=special, fill_marks=frame["fill_marks"], chat_template=frame["chat_template"])


def _parts(header: Header) -> Parts:
    metadata = header.metadata
    tokens, types = _without_padding(metadata)
    special = {
        role: tokens[token_id]
        for role, name in _ROLES.items()
        if (token_id := special_id(metadata, name)) is not None and token_id < len(tokens)
    }
    if metadata["tokenizer.ggml.model"] == _BYTES:
        rule = _split_rule(metadata)
        core, pairs = _byte_level(tokens, metadata["tokenizer.ggml.merges"], rule)
        begins = rule.begins_with_bos
    else:
        runs = [
            kind == _USER_DEFINED and len(token) > 1 and not token.strip(" ")
            for token, kind in zip(tokens, types, strict=True)
        ]
        tokens = [_BLANK * len(token) if is_run else token for token, is_run in zip(tokens, runs, strict=True)]
        types = [0 if is_run else kind for kind, is_run in zip(types, runs, strict=True)]
        core, pairs = _sentencepiece(tokens, metadata, special.get("unk_token"), runs)
        begins = True
    is_gemma4 = metadata["tokenizer.ggml.model"] == _GEMMA4  # whose first files say that texts begin with nothing
    name = metadata.get("general.name")
    takes_blanks = isinstance(name, str) and any(mark in name.lower() for mark in _PHI3)
    ends = {token_id for token_id in end_ids(metadata) if token_id < len(tokens)}
    core.add_tokens(
        [
            AddedToken(
                token,
                normalized=False,
                special=kind != _USER_DEFINED or token_id in ends,
                rstrip=takes_blanks and kind in (_CONTROL, _USER_DEFINED) and token not in _PHI3_KEEPS,
            )
            for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or token_id in ends
        ]
    )
    begins = is_gemma4 or metadata.get("tokenizer.ggml.add_bos_token", begins)
    before = [special.get("bos_token")] if begins else []
    after = [special.get("eos_token")] if metadata.get("tokenizer.ggml.add_eos_token", False) else []
    _set_frame(core, [one for one in before if one], [one for one in after if one])
    fill_marks = _fill_marks(metadata, tokens)
    return Parts(core, pairs, {"chat_template": _chat_templates(metadata), "fill_marks": fill_marks, **special})


def _fill_marks(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    """Return the marks of a text that is filled in, by part, as far as the file names them."""
    marks = {}
    for part, keys in _FILL_KEYS.items():
        ids = (special_id(metadata, key) for key in keys)
        mark = next((tokens[one] for one in ids if one is not None and one < len(tokens)), None)
        if mark is not None:
            marks[part] = mark
    return marks


def _chat_templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, or several by name."""
    default, names = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.chat_templates") or []
    if not isinstance(names, list) or not names:
        return default
    stated = {str(name): metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    named = {name: template for name, template in stated.items() if isinstance(template, str)}
    return {**({} if default is None else {"default": default}), **named} if named else default


def _without_padding(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Return the tokens and their types, without those at the end that only pad the vocabulary."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type") or []
    if len(types) != len(tokens):
        types = [0] * len(tokens)
    num_tokens = len(tokens)
    while num_tokens > 1 and types[num_tokens - 1] == _UNUSED:
        num_tokens -= 1
    return [token or f"[EMPTY_{idx}]" for idx, token in enumerate(tokens[:num_tokens])], types[:num_tokens]


def _split_rule(metadata: Mapping[str, Any]) -> SplitRule:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        logger.warning("the file does not say how its tokenizer splits text: llama.cpp's default stands in")
    elif not isinstance(name, str) or name not in RULES:
        logger.warning(
            "the tokenizer splits text by the rule %s, which is not known here: GPT-2's stands in", str(name)[:40]
        )
        return RULES["gpt-2"]
    return RULES[name or UNNAMED]


def _byte_level(tokens: Sequence[str], merges: Sequence[str], rule: SplitRule) -> tuple[tokenizers.Tokenizer, Pairs]:
    pairs = Pairs(tokens, [_pair(merge) for merge in merges], {"ignore_merges": rule.looks_up_words})
    core = tokenizers.Tokenizer(pairs.model())
    if (normalizer := rule.normalizer()) is not None:
        core.normalizer = normalizer
    core.pre_tokenizer = rule.pre_tokenizer()
    core.decoder = decoders.ByteLevel()
    return core, pairs


def _pair(merge: str) -> tuple[str, str]:
    """Return the halves of a merge, which a blank parts; the first half may itself begin with one."""
    cut = merge.index(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece(
    tokens: Sequence[str], metadata: Mapping[str, Any], unknown: str | None, runs: Sequence[bool]
) -> tuple[tokenizers.Tokenizer, Pairs]:
    """Return a tokenizer of SentencePiece.

    Args:
        runs: whether each token is blanks that the model has as they are: transformers joins those before all others.
    """
    stated = metadata.get("tokenizer.ggml.merges")
    if stated is None:
        scores = list(metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens))
        is_short_first = metadata.get("general.architecture") in _SHORT_RUNS
        for token_id, (token, is_run) in enumerate(zip(tokens, runs, strict=True)):
            if is_run:
                scores[token_id] = 1 / len(token) if is_short_first else 1.0
        merges = _pairs_by_score(tokens, scores)
    else:
        merges = [_pair(merge) for merge in stated]
    pairs = Pairs(tokens, merges, {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True})
    core = tokenizers.Tokenizer(pairs.model())
    is_plain = metadata["tokenizer.ggml.model"] == _SENTENCEPIECE
    adds_blank = is_plain and metadata.get("tokenizer.ggml.add_space_prefix", True)
    if adds_blank:  # before the text and behind each special token, also where a blank stands there already
        core.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), normalizers.Replace(" ", _BLANK)])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_BLANK, prepend_scheme="never", split=False)
    steps = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_blank else steps)
    return core, pairs


def _pairs_by_score(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return which pairs SentencePiece joins, the best first: the score of a token is that of joining its halves."""
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [
        (token[:cut], token[cut:])
        for token in vocab
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    return sorted(pairs, key=lambda pair: (-scores[vocab[pair[0] + pair[1]]], -len(pair[0])))


def _set_frame(core: tokenizers.Tokenizer, before: Sequence[str], after: Sequence[str]) -> None:
    """Let each text stand between these tokens."""
    if not before and not after:
        return
    one, other = ([*before, text, *after] for text in ("$A", "$B"))
    special = [(token, core.token_to_id(token)) for token in dict.fromkeys([*before, *after])]
    core.post_processor = processors.TemplateProcessing(single=one, pair=[*one, *other], special_tokens=special)
