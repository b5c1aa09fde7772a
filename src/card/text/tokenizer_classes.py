"""The classes of transformers' tokenizers: which one a model's files mean, and how it changes a tokenizer.json.

Some classes of transformers 5 take vocabulary, merges and post-processor from the file alone, and set all else by
themselves. Many files were made by older versions and say something else, so texts would get other ids by the file as
it is. The facts here are those of transformers 5.23 for families that continue text; a test compares them with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

AS_IT_IS = ""  # the class of a tokenizer that is what its tokenizer.json says
_BLANK = "▁"  # how SentencePiece writes one
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}| ?[^\s{no_marks}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Config = Mapping[str, Any]  # of tokenizer_config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerClass:
    """A class that sets parts of a tokenizer.json by itself."""

    parts: Callable[[Config], Mapping[str, Any]]  # entries of tokenizer.json to replace, from tokenizer_config.json
    flags: Mapping[str, Any]  # of the BPE model
    special_tokens: Mapping[str, str]  # those that tokenizer_config.json may leave out
    has_unknown: bool = False  # the model has a token for text that it cannot encode
    keeps_frame: bool = True  # the file's post-processor stays


def find_class(model_type: str, declared: str, *, is_byte_level: bool) -> TokenizerClass | None:
    """Return the class that a tokenizer is made by; None for one that is as its tokenizer.json says.

    Args:
        model_type: of config.json.
        declared: class that tokenizer_config.json or config.json names; empty: none.
        is_byte_level: whether tokenizer.json names ByteLevel anywhere.
    """
    return CLASSES.get(class_name(model_type, declared, is_byte_level=is_byte_level))


def class_name(model_type: str, declared: str, *, is_byte_level: bool) -> str:
    """Return the name of the class; `AS_IT_IS` for one that changes nothing. Arguments as of `find_class`."""
    declared = declared.removesuffix("Fast")
    is_misdeclared = model_type in MISDECLARED
    if declared == "LlamaTokenizer" and is_byte_level and not is_misdeclared:
        return AS_IT_IS
    registered = REGISTERED.get(model_type)
    if declared and registered is not None and registered != declared and (is_misdeclared or not registered):
        return registered
    return declared or registered or AS_IT_IS


def _metaspace(config: Config) -> Mapping[str, Any]:
    has_prefix = config.get("add_prefix_space") in (None, True)
    scheme = "never" if not has_prefix else "always" if config.get("legacy", False) else "first"
    steps = [_replaced(_BLANK, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    stripped = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": _BLANK, "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": [*steps, *stripped]},
    }


def _marked_blanks(config: Config) -> Mapping[str, Any]:
    return {
        "normalizer": _replaced(" ", _BLANK),
        "pre_tokenizer": _split({"String": " "}, "MergedWithPrevious"),
        "decoder": {
            "type": "Sequence",
            "decoders": [_replaced(_BLANK, " "), {"type": "ByteFallback"}, {"type": "Fuse"}],
        },
    }


def _words(pattern: str) -> Callable[[Config], Mapping[str, Any]]:
    return lambda config: {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": _sequence(_split({"Regex": pattern}, "Isolated"), _bytes(config, use_regex=False)),
        "decoder": _bytes({"add_prefix_space": True}),
    }


def _gpt2(config: Config) -> Mapping[str, Any]:
    return {"normalizer": None, "pre_tokenizer": _bytes(config), "decoder": _bytes({"add_prefix_space": True})}


def _gpt_neox(config: Config) -> Mapping[str, Any]:
    return {**_gpt2(config), "normalizer": {"type": "NFC"}}


def _cohere(config: Config) -> Mapping[str, Any]:
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": _sequence({"type": "Digits", "individual_digits": True}, _bytes(config)),
        "decoder": _bytes(config),
    }


def _replaced(what: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": what}, "content": by}


def _split(pattern: Mapping[str, str], behavior: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": dict(pattern), "behavior": behavior, "invert": False}


def _bytes(config: Config, *, use_regex: bool = True) -> dict[str, Any]:
    has_prefix = bool(config.get("add_prefix_space"))
    return {"type": "ByteLevel", "add_prefix_space": has_prefix, "trim_offsets": True, "use_regex": use_regex}


def _sequence(*steps: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


_UNSET: Mapping[str, Any] = {"dropout": None, "unk_token": None, "byte_fallback": False, "ignore_merges": False}
_WHOLE: Mapping[str, Any] = {"continuing_subword_prefix": None, "end_of_word_suffix": None}
_NO_MARKS: Mapping[str, Any] = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
_BYTES: Mapping[str, Any] = {**_UNSET, **_NO_MARKS, "fuse_unk": False}
_SENTENCEPIECE: Mapping[str, Any] = {**_UNSET, **_WHOLE, "fuse_unk": True, "byte_fallback": True}
_END = "<|endoftext|>"
_QWEN: Mapping[str, str] = {"unk_token": _END, "eos_token": _END, "pad_token": _END}

CLASSES: Mapping[str, TokenizerClass] = {
    "LlamaTokenizer": TokenizerClass(
        parts=_metaspace,
        flags=_SENTENCEPIECE,
        special_tokens={"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    ),
    "GemmaTokenizer": TokenizerClass(
        parts=_marked_blanks,
        flags=_SENTENCEPIECE,
        has_unknown=True,
        special_tokens={
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    ),
    "Qwen2Tokenizer": TokenizerClass(
        parts=_words(_WORDS.format(letters=r"\p{L}", no_marks=r"\p{L}")),
        flags=_BYTES,
        special_tokens=_QWEN,
    ),
    "Qwen3_5Tokenizer": TokenizerClass(
        parts=_words(_WORDS.format(letters=r"[\p{L}\p{M}]", no_marks=r"\p{L}\p{M}")),
        flags=_BYTES,
        special_tokens=_QWEN,
    ),
    "GPT2Tokenizer": TokenizerClass(
        parts=_gpt2,
        flags=_BYTES,
        special_tokens={"unk_token": _END, "bos_token": _END, "eos_token": _END},
    ),
    "GPTNeoXTokenizer": TokenizerClass(
        parts=_gpt_neox,
        flags=_BYTES,
        special_tokens={"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": "<|padding|>"},
        keeps_frame=False,
    ),
    "CohereTokenizer": TokenizerClass(
        parts=_cohere,
        flags=_BYTES,
        special_tokens={
            "unk_token": "<UNK>",
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "sep_token": "<SEP>",
            "mask_token": "<MASK_TOKEN>",
        },
    ),
}

# The model types that transformers has a class for. Other types belong to the class that their files name.
_TYPES: Mapping[str, str] = {
    "Qwen2Tokenizer": """
        cosmos3_omni dots3_note hunyuan_vl internvl lighton_ocr moss_transcribe_diarize ovis2 qianfan_ocr qwen2
        qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe
    """,
    "Qwen3_5Tokenizer": """
        qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp
    """,
    "GemmaTokenizer": """
        diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 zaya
    """,
    "GPT2Tokenizer": """
        blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip instructblipvideo jais2 opt
        phi starcoder2
    """,
    "GPTNeoXTokenizer": """
        falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm
    """,
    "CohereTokenizer": """
        aya_vision cohere cohere2
    """,
    "LlamaTokenizer": """
        idefics idefics2
    """,
    AS_IT_IS: """
        aria beam bigbird_pegasus ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v
        glm4v_moe got_ocr2 gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared hyperclovax internlm3
        iquestcoder jamba kimi_k25 kimi_linear kosmos-2 llava llava_next mimo_v2_flash minicpm3 minicpm_ocr
        minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3 mistral mistral3 mistral_large4 mixtral
        modernbert-decoder molmo2 nemotron olmo2 olmo3 olmo_hybrid paddleocr_vl persimmon phi3 phimoe pix2struct
        smolvlm stablelm vipllava xlm-roberta-xl
    """,
}
REGISTERED: Mapping[str, str] = {one: name for name, types in _TYPES.items() for one in types.split()}
_MISDECLARED = """
    ernie4_5 ernie4_5_moe fuyu hyperclovax hyperclovax_vision_v2 internlm3 iquestcoder jamba llava llava_next
    minicpm3 minimax_m2 modernbert-decoder molmo2 nemotron paddleocr_vl phi3 phimoe qwen2 qwen3_5 qwen3_5_moe
    qwen3_5_moe_text qwen4_exp smolvlm vipllava
"""
MISDECLARED = frozenset(_MISDECLARED.split())  # model types whose published files name a wrong class
