"""Tokenizers are those that transformers' AutoTokenizer reads in the same folder, and need no part of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
)

from card.errors import ModelError, PromptError
from card.machine.packages import install_command
from card.models import loading
from card.models.demo import demo_folder
from card.models.loading import load_tokenizer
from card.text.given_tokenizer import SlowTokenizer, as_tokenizer
from card.text.tokenizer import Tokenizer
from card.text.tokenizer_classes import AS_IT_IS, CLASSES, MISDECLARED, REGISTERED
from card.text.tokenizer_files import read_tokenizer
from tests.examples import settings
from tests.pair import make_tokenizer
from tests.same_tokenizer import CONVERSATIONS, check_chats, check_facts, check_ids, check_text
from tests.tokenizer_kinds import KINDS

CORPUS = [
    "the cat sat on the mat, and the other cat sat there too. Don't they?",
    "one two three 12345 4.5 six;  seven\n\n\tdef f(x): return x",
    "Ünïcödé für élèves, e\u0301 你好。世界 안녕 مرحبا 🌍👩‍👩‍👧",
] * 4
SPECIALS = ("<unk>", "<s>", "</s>", "<pad>")
PLAIN_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
TEXTS = st.lists(
    st.text(max_size=6)
    | st.sampled_from(
        [
            "the",
            " cat",
            "  ",
            "\n",
            "12",
            "don't",
            "é",
            "e\u0301",
            "你好",
            "🌍",
            "</s>",
            "<s>",
            "▁",
            " .",
            "[CLS]",
            "<t>",
        ]
    ),
    max_size=8,
).map("".join)

# ---- the kinds, trained here ----------------------------------------------------------------------------------------


def byte_level() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=list(SPECIALS), initial_alphabet=alphabet)
    core.train_from_iterator(CORPUS, trainer)
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    return core


def metaspace_bpe() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*SPECIALS, *bytes_of])
    core.train_from_iterator(CORPUS, trainer)
    parts = json.loads(core.to_str())
    parts["added_tokens"] = parts["added_tokens"][: len(SPECIALS)]
    core = tokenizers.Tokenizer.from_str(json.dumps(parts))
    begins = [("<s>", core.token_to_id("<s>"))]
    core.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=begins)
    return core


def unigram() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.Unigram())
    core.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=list(SPECIALS), unk_token="<unk>")
    core.train_from_iterator(CORPUS, trainer)
    return core


def word_pieces() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]", "[SEP]", *SPECIALS])
    core.train_from_iterator(CORPUS, trainer)
    ends = [(token, core.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    core.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return core


TRAINED: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": byte_level,
    "metaspace": metaspace_bpe,
    "unigram": unigram,
    "word pieces": word_pieces,
}
SPECIAL_PARTS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def write(folder: Path, core: tokenizers.Tokenizer, config: Mapping[str, Any], **files: Any) -> Path:
    """Write a folder with a tokenizer; a file's name has two underscores for its point."""
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    for name, content in {"tokenizer_config__json": config, **files}.items():
        text = content if isinstance(content, str) else json.dumps(content)
        file = folder / name.replace("__", ".")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, "utf-8")
    return folder


def both(folder: Path) -> tuple[Tokenizer, Any]:
    own = read_tokenizer(folder)
    assert own is not None
    return own, AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    """Each kind, read by us and by transformers, and the demo pair's tokenizer."""
    root = tmp_path_factory.mktemp("kinds")
    found = {
        kind: both(write(root / kind, make(), {**SPECIAL_PARTS, "clean_up_tokenization_spaces": True}))
        for kind, make in TRAINED.items()
    }
    return {**found, "demo": both(demo_folder("target"))}


@pytest.mark.parametrize("kind", [*TRAINED, "demo"])
@settings(max_examples=40)
@given(data=st.data())
def test_any_text_becomes_the_ids_and_any_ids_the_text_of_transformers(
    trained: dict[str, tuple[Tokenizer, Any]], kind: str, data: st.DataObject
) -> None:
    own, theirs = trained[kind]
    check_text(own, theirs, data.draw(TEXTS))
    check_ids(own, theirs, data.draw(st.lists(st.integers(0, len(own) - 1), max_size=12)))


@pytest.mark.parametrize("kind", [*TRAINED, "demo"])
def test_vocabulary_special_tokens_and_templates_are_those_of_transformers(
    trained: dict[str, tuple[Tokenizer, Any]], kind: str
) -> None:
    own, theirs = trained[kind]
    check_facts(own, theirs)
    if own.chat_template:
        assert check_chats(own, theirs) == 4 * len(CONVERSATIONS)


# ---- classes that change a tokenizer.json ---------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "with a prefix": {"add_prefix_space": True},
    "without a prefix": {"add_prefix_space": False},
    "older": {"legacy": True, "add_bos_token": False, "add_eos_token": True},
    "with fewer added tokens": {"added_tokens_decoder": {"2": {"content": "</s>", "special": True}}},
    "named": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": None, "mask_token": "<t>"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_makes_of_a_file_what_it_makes_in_transformers(
    tmp_path: Path, name: str, kind: str, options: str
) -> None:
    own, theirs = both(write(tmp_path, TRAINED[kind](), {"tokenizer_class": name, **OPTIONS[options]}))
    check_facts(own, theirs)
    for text in (*CORPUS[:3], "", " ", "<s> the</s>cat <pad>a", "a  b", " ' s'", "12345"):
        check_text(own, theirs, text)


def test_a_class_leaves_a_model_of_another_kind_as_its_file_says(tmp_path: Path) -> None:
    folder = write(tmp_path, unigram(), {"tokenizer_class": "LlamaTokenizer", **SPECIAL_PARTS})
    own = read_tokenizer(folder)
    assert own is not None
    for text in CORPUS[:3]:  # of which AutoTokenizer would make a tokenizer without merges
        check_text(own, PreTrainedTokenizerFast.from_pretrained(folder), text)


DECLARED = ("", "LlamaTokenizerFast", "Qwen2Tokenizer", "PreTrainedTokenizerFast", "GPT2Tokenizer", "Unheard")


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "gpt_neox", "gemma2", "phi3", "cohere2"])
def test_the_class_follows_from_the_model_type_and_what_the_files_declare(tmp_path: Path, model_type: str) -> None:
    for kind in ("byte level", "metaspace"):
        core = TRAINED[kind]()
        for declared in DECLARED:
            stated = {"tokenizer_class": declared} if declared else {}
            folder = write(
                tmp_path / kind / declared, core, {**stated, **SPECIAL_PARTS}, config__json={"model_type": model_type}
            )
            own, theirs = both(folder)
            check_facts(own, theirs)
            check_text(own, theirs, CORPUS[0] + CORPUS[2])


def test_the_table_of_classes_is_that_of_transformers_for_models_that_continue_text() -> None:
    types = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    as_they_are = {"TokenizersBackend": AS_IT_IS, "MistralCommonBackend": AS_IT_IS}
    theirs = {one: (TOKENIZER_MAPPING_NAMES.get(one) or "").removesuffix("Fast") for one in types}
    known = {one: as_they_are.get(name, name) for one, name in theirs.items() if name in {*as_they_are, *CLASSES}}
    assert known == REGISTERED
    assert types & MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS == MISDECLARED


# ---- what the other files say ---------------------------------------------------------------------------------------

MARK = {"content": "<t>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
FOLDERS: dict[str, dict[str, Any]] = {
    "added tokens in tokenizer_config.json": {
        "tokenizer_config__json": {
            "eos_token": "</s>",
            "added_tokens_decoder": {
                "401": {**MARK, "special": False},
                "400": {**MARK, "content": "<u>", "special": False},
                "2": {**MARK, "content": "</s>", "special": True},
            },
            "additional_special_tokens": ["<extra>"],
        },
        "special_tokens_map__json": {"eos_token": "<s>"},
    },
    "older files": {
        "tokenizer_config__json": {"bos_token": {"__type": "AddedToken", **MARK, "content": "<s>"}},
        "special_tokens_map__json": {
            "eos_token": {**MARK, "content": "</s>"},
            "pad_token": "<more>",
            "additional_special_tokens": ["<extra>", "<s>"],
        },
        "added_tokens__json": {"<t>": 400, "<extra>": 401},
    },
    "tokens of a model's own": {
        "tokenizer_config__json": {
            "image_token": "<image>",
            "boi_token": {"__type": "AddedToken", **MARK},
            "extra_special_tokens": {"sound_token": "<sound>"},
        }
    },
    "special tokens that are split": {"tokenizer_config__json": {**SPECIAL_PARTS, "split_special_tokens": True}},
    "a template beside it": {
        "tokenizer_config__json": {**SPECIAL_PARTS, "chat_template": "older"},
        "chat_template__jinja": PLAIN_TEMPLATE,
    },
    "several templates": {
        "tokenizer_config__json": SPECIAL_PARTS,
        "chat_template__jinja": PLAIN_TEMPLATE,
        "additional_chat_templates/tool_use__jinja": PLAIN_TEMPLATE + "{{ tools | tojson(indent=1, sort_keys=True) }}",
    },
    "several templates in one file": {
        "tokenizer_config__json": {
            **SPECIAL_PARTS,
            "chat_template": [
                {"name": "default", "template": PLAIN_TEMPLATE},
                {"name": "rag", "template": "{{ documents }}"},
            ],
        }
    },
    "only the tokenizer": {"tokenizer_config__json": {}},
}


@pytest.mark.parametrize("kind", ["byte level", "word pieces"])
@pytest.mark.parametrize("name", FOLDERS)
def test_other_files_say_what_they_say_to_transformers(tmp_path: Path, name: str, kind: str) -> None:
    files = dict(FOLDERS[name])
    own, theirs = both(write(tmp_path, TRAINED[kind](), files.pop("tokenizer_config__json"), **files))
    check_facts(own, theirs)
    for text in (*CORPUS[:3], "<s> a <t> b<image></s><extra> <sound><more>", "a . b , c"):
        check_text(own, theirs, text)
    if own.chat_template:
        assert check_chats(own, theirs) == 4 * len(CONVERSATIONS)


def test_a_template_that_only_the_processor_has_is_found(tmp_path: Path) -> None:
    template = {"chat_template": PLAIN_TEMPLATE}
    own = read_tokenizer(write(tmp_path, byte_level(), SPECIAL_PARTS, chat_template__json=template))
    assert own is not None and own.chat_template == PLAIN_TEMPLATE


def test_templates_without_a_default_one_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(), {}, **{"additional_chat_templates/tool_use__jinja": "tools"})
    own = read_tokenizer(folder)
    assert own is not None and own.get_chat_template(tools=[]) == "tools"
    with pytest.raises(PromptError, match="has the chat templates tool_use and no default one"):
        own.get_chat_template()


def test_a_text_is_neither_cut_nor_padded_whatever_the_file_says(tmp_path: Path) -> None:
    core = byte_level()
    core.enable_truncation(3)
    core.enable_padding(length=50)
    own = read_tokenizer(write(tmp_path, core, SPECIAL_PARTS))
    assert own is not None and own.decode(own.encode(CORPUS[0])) == CORPUS[0]


def test_what_is_saved_is_read_again_by_both(tmp_path: Path, trained: dict[str, tuple[Tokenizer, Any]]) -> None:
    for kind, (own, _) in trained.items():
        own.save(tmp_path / kind)
        again, theirs = both(tmp_path / kind)
        check_facts(again, theirs)
        assert again.get_vocab() == own.get_vocab() and again.special_tokens_map == own.special_tokens_map
        assert again.chat_template == own.chat_template
        check_text(again, theirs, CORPUS[2])


# ---- tokenizers that are given, and those that only transformers reads ----------------------------------------------


def test_a_fast_tokenizer_that_is_given_does_what_it_did_and_later_changes_are_its_own() -> None:
    theirs = make_tokenizer()
    own = as_tokenizer(theirs)
    check_facts(own, theirs)
    check_chats(own, theirs)
    for text in (*CORPUS[:3], "the<|turn|> cat"):
        check_text(own, theirs, text)
    assert as_tokenizer(own) is own
    theirs.add_tokens(["the cat"])
    theirs("the cat", truncation=True, max_length=1)
    assert own.decode(own.encode("the cat")) == "the cat" and "the cat" not in own.get_vocab()


def test_a_slow_tokenizer_that_is_given_has_the_contract_of_ours(tmp_path: Path) -> None:
    theirs = ByT5Tokenizer()
    theirs.chat_template = PLAIN_TEMPLATE
    own = as_tokenizer(theirs)
    assert isinstance(own, SlowTokenizer) and own.backend_tokenizer is None
    assert len(own) == len(theirs) and own.get_vocab() == theirs.get_vocab()
    assert own.special_tokens_map == theirs.special_tokens_map and own.eos_token_id == theirs.eos_token_id
    assert set(own.skipped_tokens) == set(theirs.all_special_ids)
    for text in (*CORPUS[:3], "", "a</s>b"):
        ids = theirs(text)["input_ids"]
        assert own.encode(text) == ids
        assert own.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        check_ids(own, theirs, ids)
    own.save(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("hé")["input_ids"] == own.encode("hé")


@pytest.fixture
def slow_folder(tmp_path: Path) -> Path:
    ByT5Tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 384}')
    assert not (tmp_path / "tokenizer.json").exists()
    return tmp_path


def test_a_folder_without_a_tokenizer_json_is_read_through_transformers(slow_folder: Path) -> None:
    own = load_tokenizer(slow_folder)
    assert isinstance(own, SlowTokenizer) and own.encode("hé") == ByT5Tokenizer()("hé")["input_ids"]


def test_without_transformers_such_a_folder_is_one_line_with_what_to_install(
    slow_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(place: str) -> None:
        raise ImportError(f"no module for {place}")

    monkeypatch.setattr(loading, "load_place", missing)
    with pytest.raises(ModelError, match=r"it has no tokenizer\.json, and another tokenizer needs") as refused:
        load_tokenizer(slow_folder)
    assert install_command("torch") in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_that_a_text_leaves_out_are_those_that_decoding_skips(kind: str) -> None:
    own = KINDS[kind]
    silent = {i for i in range(len(own)) if own.decode([i]) and not own.decode([i], skip_special_tokens=True)}
    assert set(own.skipped_tokens) == silent and silent


# ---- imports --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("tokenizer, tokenizer_files, given_tokenizer, tokens", ("torch", "transformers", "numpy", "jinja2")),
        ("chat_template, prompts, fit, token_bytes, stops, grammar_tokens, compiling", ("torch", "transformers")),
    ],
)
def test_text_needs_no_model_library(modules: str, unwanted: tuple[str, ...]) -> None:
    code = f"import sys; from card.text import {modules}; print(*(one for one in {unwanted!r} if one in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
