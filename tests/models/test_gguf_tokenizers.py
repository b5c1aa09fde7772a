"""Texts become the tokens of the model's own tokenizer, and answers end where the model ends them."""

from __future__ import annotations

import json
import logging
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen3_5Tokenizer

from card.api.llm import LLM
from card.config import SamplingParams
from card.errors import ModelError
from card.models.facts import sampling_defaults
from card.models.files.gguf.header import GgufError, Header, TensorPlace
from card.models.files.gguf.splits import RULES
from card.models.files.gguf.tokenizer import check_tokenizer, end_ids, read_tokenizer, write_tokenizer
from card.models.files.gguf.tokenizer import load_tokenizer as read_stored
from card.models.loading import load_decoder, load_tokenizer
from tests.gguf_files import demo_tokenizer, save_model, write_gguf

TEXTS = (
    "Anna's got 12345 apples, HELLOworld! it'S x=1;/\n\n\n  indented\tand  spaced   ",
    "naïve café 北京 가나다 かな x² 10,000.5\r\n  \n(it's) we'LL !hello …",
    " 7 77 777 7777 <|end|> Привет, мир",
    "हिन्दी में नमस्ते। 漢字helloWorld東京's don'T camelCase's/\n//x",
)
# What the models' own tokenizer.json files have.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
KIMI_K2 = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
PUBLISHED: Mapping[str, Sequence[str | pre_tokenizers.PreTokenizer]] = {
    "llama-bpe": [LLAMA3],
    "llama3": [LLAMA3],
    "falcon3": [LLAMA3],
    "smaug-bpe": [LLAMA3],
    "qwen2": [QWEN2],
    "deepseek-r1-qwen": [QWEN2],
    "qwen35": [QWEN35],
    "tekken": [TEKKEN],
    "kimi-k2": [KIMI_K2],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "deepseek-coder": [
        "[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        pre_tokenizers.Digits(individual_digits=True),
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ],
}
LOOKING_UP_WORDS = {"llama-bpe", "llama3", "falcon3", "tekken", "kimi-k2"}


def header(**entries: Any) -> Header:
    """Return a header with these entries of the tokenizer."""
    metadata = {f"tokenizer.ggml.{name}": value for name, value in entries.items()}
    rows = TensorPlace("token_embd.weight", (2048, 8), 0, 0, Path())
    return Header(metadata, {"token_embd.weight": rows}, 1)


@pytest.fixture(scope="module")
def trained() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges that cross every border between words, so that each wrong split shows."""
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [part for text in TEXTS for part in (text, text[7:], text[3:50])] * 3,
        trainers.BpeTrainer(vocab_size=900, initial_alphabet=sorted(alphabet), show_progress=False),
    )
    core.pre_tokenizer = None
    by_id = {token_id: token for token, token_id in core.get_vocab().items()}
    model = json.loads(core.to_str())["model"]
    return [by_id[idx] for idx in range(len(by_id))], [tuple(merge) for merge in model["merges"]]


def entries_of(trained: tuple[list[str], list[tuple[str, str]]], **more: Any) -> dict[str, Any]:
    tokens, merges = trained
    return {"model": "gpt2", "tokens": tokens, "merges": [" ".join(merge) for merge in merges], **more}


# ---- pairs of bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", PUBLISHED)
def test_text_is_split_as_the_published_tokenizer_splits_it(trained, rule):
    tokens, merges = trained
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    core = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=rule in LOOKING_UP_WORDS))
    steps = [pre_tokenizers.Split(Regex(one), "isolated") if isinstance(one, str) else one for one in PUBLISHED[rule]]
    if not isinstance(PUBLISHED[rule][-1], pre_tokenizers.ByteLevel):
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    if rule in ("qwen2", "qwen35"):
        core.normalizer = normalizers.NFC()
    theirs = PreTrainedTokenizerFast(tokenizer_object=core)
    own = read_tokenizer(header(**entries_of(trained, pre=rule)))
    for text in TEXTS:
        ids = own.encode(text)
        assert ids == theirs.encode(text)
        assert own.decode(ids) == text


@pytest.mark.parametrize("rule", PUBLISHED)
def test_whole_words_are_looked_up_before_merges_where_the_model_does_so(trained, rule):
    tokens, merges = trained
    entries = entries_of(([*tokens, "Ġxyz"], merges), pre=rule)
    ids = read_tokenizer(header(**entries)).encode("abc xyz")
    assert (ids[-1] == len(tokens)) == (rule in LOOKING_UP_WORDS)
    assert ids != [len(tokens)]


@pytest.mark.parametrize("rule", ["qwen2", "qwen35"])
def test_qwen_composes_accents_as_its_own_tokenizer_does(trained, rule):
    own = read_tokenizer(header(**entries_of(trained, pre=rule)))
    apart = unicodedata.normalize("NFD", "café")
    assert own.encode(apart) == own.encode("café")
    other = read_tokenizer(header(**entries_of(trained, pre="llama-bpe")))
    assert other.decode(other.encode(apart)) == apart


def test_qwen35_is_the_tokenizer_of_transformers(trained):
    tokens, merges = trained
    theirs = Qwen3_5Tokenizer(vocab={token: token_id for token_id, token in enumerate(tokens)}, merges=merges)
    own = read_tokenizer(header(**entries_of(trained, pre="qwen35")))
    other = read_tokenizer(header(**entries_of(trained, pre="qwen2")))
    for text in TEXTS:
        assert own.encode(text) == theirs.encode(text)
    assert other.encode(TEXTS[-1]) != own.encode(TEXTS[-1])  # it cuts words where accents stand alone


@pytest.mark.parametrize(
    ("rule", "text", "pieces"),
    [
        ("kimi-k2", "漢字helloWorld東京don'T 12345", ["漢字", "hello", "World", "東京", "don'T", " ", "123", "45"]),
        ("kimi-k2", "x //\n/y", ["x", " //\n", "/y"]),
        ("qwen35", "हिन्दी x1 ि!", ["हिन्दी", " x", "1", " ि", "!"]),
        ("qwen2", "हिन्दी", ["ह", "िन", "्द", "ी"]),
    ],
)
def test_a_text_is_cut_into_these_pieces(rule, text, pieces):
    cuts = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(one), "isolated") for one in RULES[rule].patterns])
    assert [piece for piece, _ in cuts.pre_tokenize_str(text)] == pieces


def test_control_tokens_outside_the_alphabet_of_bytes_stay_whole_and_where_they_are(trained):
    tokens, merges = trained
    more = ["<\uff5cUser\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<think>"]
    types = [1] * len(tokens) + [3, 3, 4]
    entries = entries_of(([*tokens, *more], merges), token_type=types, eos_token_id=len(tokens) + 1)
    own = read_tokenizer(header(**entries, pre="deepseek-r1-qwen"))
    ids = own.encode(f"{more[0]}hello{more[2]}{more[1]}")
    assert (ids[0], *ids[-2:]) == (len(tokens), len(tokens) + 2, len(tokens) + 1)
    assert len(own) == len(tokens) + 3
    assert own.decode(ids, skip_special_tokens=True) == "hello<think>"


def test_a_rule_that_is_not_known_is_named(trained, caplog):
    with caplog.at_level(logging.WARNING):
        own = read_tokenizer(header(**entries_of(trained, pre="gpt-99")))
    assert "by the rule gpt-99, which is not known here: GPT-2's stands in" in caplog.text
    assert own.encode(TEXTS[0]) == read_tokenizer(header(**entries_of(trained, pre="gpt-2"))).encode(TEXTS[0])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        unsaid = read_tokenizer(header(**entries_of(trained)))
    assert "does not say how its tokenizer splits text" in caplog.text
    stated = read_tokenizer(header(**entries_of(trained, pre="default")))
    assert unsaid.encode(TEXTS[0]) == stated.encode(TEXTS[0])


# ---- SentencePiece --------------------------------------------------------------------------------------------------

PIECES = ["▁", "H", "i", "t", "h", "e", "r", "Hi", "▁Hi", "th", "the", "▁the", "re", "▁t", "here", "er", "▁there"]
JOINED = [  # by falling score of what they make, the longer first half first
    *[("H", "i"), ("▁", "Hi"), ("t", "h"), ("th", "e"), ("▁", "the"), ("r", "e"), ("▁", "t"), ("e", "r")],
    *[("▁the", "re"), ("▁t", "here")],
]


def sentencepiece(**more: Any) -> Header:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    types = [2, 3, 3] + [6] * 256 + [1] * len(PIECES)
    scores = [0.0] * 259 + [-float(idx) for idx in range(len(PIECES))]
    return header(model="llama", tokens=tokens, token_type=types, scores=scores, **more)


@pytest.mark.parametrize("stated", [{}, {"add_space_prefix": True}, {"add_space_prefix": False}])
def test_sentencepiece_joins_and_begins_as_its_own_tokenizer_does(stated):
    file = sentencepiece(**stated)
    vocab = {token: token_id for token_id, token in enumerate(file.metadata["tokenizer.ggml.tokens"])}
    theirs = LlamaTokenizer(vocab=vocab, merges=JOINED, add_prefix_space=stated.get("add_space_prefix", True))
    if stated.get("add_space_prefix", True):  # as Llama 2's own tokenizer.json has it, and llama.cpp
        backend = theirs.backend_tokenizer
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = None
    own = read_tokenizer(file)
    for text in ("Hi", " Hi", "  Hi", "Hi there  Hi", "é</s>Hi", "<s>Hi", "<s> Hi", "thethe\n", "there her", ""):
        expected = theirs.encode(text, add_special_tokens=False)
        assert own.encode(text, add_special_tokens=False) == expected
        assert own.encode(text) == [1, *expected]
        assert own.decode(expected) == theirs.decode(expected)


def test_a_text_keeps_its_first_blank_and_one_behind_a_mark_has_the_prefix_too():
    own = read_tokenizer(sentencepiece())
    for text, tokens in ((" Hi", ["▁", "▁Hi"]), ("<s>Hi", ["<s>", "▁Hi"])):
        assert [*map(own.convert_ids_to_tokens, own.encode(text, add_special_tokens=False))] == tokens
        assert own.decode(own.encode(text, add_special_tokens=False), skip_special_tokens=True) == text[-3:].lstrip(
            ">s"
        )
    chat, plain = own.encode("<s>Hi", add_special_tokens=False), own.encode("Hi")
    assert chat == plain, "a template that writes the first token gives what completions have"


@pytest.mark.parametrize("kind", [3, 4])  # a control token, and one that the user defined, as its `</s>` is
@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("Phi-3 mini", ["<|user|>", "▁Hi"]),
        ("Phi 3 Mini", ["<|user|>", "▁Hi"]),  # as the converter writes the name of a folder
        ("Llama", ["<|user|>", "▁", "▁Hi"]),
    ],
)
def test_marks_take_the_blanks_behind_them_in_the_models_whose_tokenizer_does_so(name, tokens, kind):
    file = sentencepiece()
    marked = file.metadata["tokenizer.ggml.tokens"] + ["<|user|>"]
    file.metadata.update({"general.name": name, "tokenizer.ggml.tokens": marked})
    file.metadata["tokenizer.ggml.token_type"].append(kind)
    file.metadata["tokenizer.ggml.scores"].append(0.0)
    own = read_tokenizer(file)
    assert [*map(own.convert_ids_to_tokens, own.encode("<|user|> Hi", add_special_tokens=False))] == tokens


def test_blanks_that_a_file_has_as_they_are_are_joined_before_all_else_as_in_its_folder():
    file = sentencepiece(add_space_prefix=False, add_bos_token=False)
    file.metadata["tokenizer.ggml.tokens"] = file.metadata["tokenizer.ggml.tokens"] + ["  ", "   "]
    file.metadata["tokenizer.ggml.token_type"] += [4, 4]
    file.metadata["tokenizer.ggml.scores"] += [-1000.0, -1000.0]
    own = read_tokenizer(file)
    for text, tokens in (("   Hi", ["▁▁▁", "Hi"]), (" \u2581Hi", ["▁▁", "Hi"]), (" Hi", ["▁Hi"])):
        assert [*map(own.convert_ids_to_tokens, own.encode(text))] == tokens
        assert own.decode(own.encode(text)) == text.replace("▁", " ")


@pytest.mark.parametrize(("architecture", "lengths"), [("gemma", [2, 2]), ("gemma2", [2, 2]), ("gemma3", [3, 1])])
def test_a_long_run_of_blanks_is_cut_as_in_the_folders_of_its_architecture(architecture, lengths):
    file = sentencepiece(add_space_prefix=False, add_bos_token=False)
    file.metadata["general.architecture"] = architecture
    file.metadata["tokenizer.ggml.tokens"] = file.metadata["tokenizer.ggml.tokens"] + ["  ", "   "]
    file.metadata["tokenizer.ggml.token_type"] += [4, 4]
    file.metadata["tokenizer.ggml.scores"] += [-1000.0, -1000.0]
    own = read_tokenizer(file)
    assert [len(own.convert_ids_to_tokens(token)) for token in own.encode(" " * 4)] == lengths


def test_chat_templates_by_name_are_read(tmp_path: Path):
    file = sentencepiece()
    named: dict[str, Any] = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ["tool_use", "rag"],
        "tokenizer.chat_template.tool_use": "with tools",
        "tokenizer.chat_template.rag": "with documents",
    }
    file.metadata.update(named)
    write_tokenizer(file, tmp_path)
    for own in (read_tokenizer(file), read_stored(tmp_path)):
        assert own.get_chat_template() == "plain"
        assert own.get_chat_template(tools=[{}]) == "with tools"


def test_without_a_prefix_a_text_begins_with_its_own_first_letter():
    own = read_tokenizer(sentencepiece(add_space_prefix=False, add_bos_token=False))
    assert list(map(own.convert_ids_to_tokens, own.encode("Hi"))) == ["Hi"]
    assert list(map(own.convert_ids_to_tokens, own.encode(" Hi"))) == ["▁Hi"]
    assert own.decode(own.encode(" Hi")) == " Hi"


# ---- Gemma 4 --------------------------------------------------------------------------------------------------------

LINES = ["\n", "\n\n", "\n\n\n", "▁▁", "a", "▁a"]


def gemma4(**more: Any) -> Header:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [3] * 5 + [6] * 256 + [1] * (len(PIECES) + len(LINES))
    joined = [("\n", "\n"), ("\n\n", "\n"), ("▁", "▁"), *JOINED, ("▁", "a")]
    ids = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0}
    merges = [" ".join(pair) for pair in joined]
    return header(model="gemma4", tokens=[*tokens, *PIECES, *LINES], token_type=types, merges=merges, **{**ids, **more})


@pytest.mark.parametrize("stated", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_space_prefix": True}])
def test_gemma4_is_the_tokenizer_of_transformers(stated):
    file = gemma4(**stated)
    check_tokenizer(file)
    vocab = {token: token_id for token_id, token in enumerate(file.metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    theirs, own = GemmaTokenizer(vocab=vocab, merges=merges), read_tokenizer(file)
    for text in ("Hi", " Hi", "Hi there  Hi", "é the\n\n\n\n a", "\n", "thethe\n \n", "▁a a", "漢 re", ""):
        expected = theirs.encode(text, add_special_tokens=False)
        assert own.encode(text, add_special_tokens=False) == expected
        assert own.encode(text) == [2, *expected]  # llama.cpp puts it there too, whatever the file says
        assert own.decode(expected) == theirs.decode(expected)
    assert end_ids(file.metadata) == [1, 4]
    assert own.convert_ids_to_tokens(own.encode("\n\n")[1]) == "\n\n"


# ---- where a text begins and ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "frame"),
    [
        ({"pre": "llama-bpe"}, ("bos", "")),
        ({"pre": "tekken"}, ("bos", "")),
        ({"pre": "qwen2"}, ("", "")),
        ({"pre": "llama-bpe", "add_bos_token": False}, ("", "")),
        ({"pre": "qwen2", "add_bos_token": True}, ("bos", "")),
        ({"pre": "qwen2", "add_eos_token": True}, ("", "eos")),
        ({"pre": "llama-bpe", "add_eos_token": True, "add_sep_token": True}, ("bos", "eos")),
    ],
)
def test_a_text_stands_between_the_tokens_that_the_file_asks_for(trained, stated, frame):
    tokens, merges = trained
    ids = {"bos": len(tokens), "eos": len(tokens) + 1}
    entries = entries_of(
        ([*tokens, "<bos>", "<eos>"], merges),
        token_type=[1] * len(tokens) + [3, 3],
        **{f"{name}_token_id": token_id for name, token_id in ids.items()},
    )
    own = read_tokenizer(header(**entries, **stated))
    inside = own.encode("Anna", add_special_tokens=False)
    before, after = ([ids[one]] if one else [] for one in frame)
    assert own.encode("Anna") == [*before, *inside, *after]


@pytest.mark.parametrize(
    ("tokens", "stated", "expected"),
    [
        (["a", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], {"eos_token_id": 1}, [1, 2, 3]),
        (["a", "<|endoftext|>", "<|im_end|>"], {"eos_token_id": 2}, [2, 1]),
        (["<eos>", "a", "<end_of_turn>"], {"eos_token_id": 0}, [0, 2]),
        (["a", "b", "c"], {"eos_token_id": 1, "eot_token_id": 2, "eom_token_id": 1}, [1, 2]),
        (["a", "<\uff5cend\u2581of\u2581sentence\uff5c>"], {}, [1]),
        (["<EOT>", "_<EOT>", "a"], {}, [0, 1]),
        (["a", "b"], {"eos_token_id": 7}, []),
        (["<|end|>", "<|return|>", "<|call|>"], {"eos_token_id": 1}, [1, 2]),
        (["<|end|>", "a"], {"eos_token_id": 1}, [1, 0]),
        (["</s>", "a"], {"eos_token_id": 1, "token_type": [3, 1]}, [1, 0]),
        (["</s>", "a"], {"eos_token_id": 1, "token_type": [1, 1]}, [1]),
        (["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "a"], {"eos_token_id": 3}, [3]),
    ],
)
def test_a_text_ends_at_what_the_file_names_and_at_what_is_known_by_name(tokens, stated, expected):
    assert end_ids(header(model="gpt2", tokens=tokens, **stated).metadata) == expected


def test_sentencepiece_files_that_name_no_special_tokens_have_the_usual_ones():
    file = sentencepiece()
    own = read_tokenizer(file)
    assert own.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert end_ids(file.metadata) == [2]


def test_a_turn_ends_at_a_token_that_is_known_by_name_alone(tmp_path: Path):
    tokenizer = demo_tokenizer()
    tokenizer.add_tokens([AddedToken("<|eot_id|>", special=True, normalized=False)])
    save_model(tmp_path / "model", "llama", tokenizer)
    file = write_gguf(tmp_path / "model", tmp_path / "model.gguf", pre="llama-bpe")
    end_id = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    for cache in (str(tmp_path / "cache"), ""):
        assert end_id in load_decoder(file, cache_dir=cache).generation_config.eos_token_id
        with LLM(str(file), dtype="float32", cache_dir=cache or None, cache=bool(cache)) as llm:
            params = SamplingParams(max_tokens=8, temperature=0.0, logit_bias={end_id: 100.0})
            output = llm.generate(["Anna has 25 apples."], params)[0].outputs[0]
        assert (output.finish_reason, output.text) == ("stop", "")


def test_a_file_samples_as_the_folder_that_it_was_made_of(tmp_path: Path):
    save_model(tmp_path / "model", "llama", demo_tokenizer())
    stated = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "do_sample": True}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(stated), "utf-8")
    keys = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "penalty_repeat": 1.05}
    general = {f"general.sampling.{name}": value for name, value in keys.items()}
    file = write_gguf(tmp_path / "model", tmp_path / "model.gguf", pre="qwen2", general=general)
    for cache in (str(tmp_path / "cache"), ""):
        found = sampling_defaults(load_decoder(file, cache_dir=cache))
        assert found == sampling_defaults(load_decoder(tmp_path / "model")) != {}


def test_what_is_kept_begins_and_ends_texts_as_the_file_does(tmp_path: Path):
    save_model(tmp_path / "model", "llama", demo_tokenizer())
    general = {"tokenizer.ggml.add_eos_token": True}
    file = write_gguf(tmp_path / "model", tmp_path / "model.gguf", pre="qwen2", general=general)
    found = [load_tokenizer(file, cache_dir=cache).encode("Anna's 25") for cache in ("", *[str(tmp_path)] * 2)]
    assert found[0][-1] == demo_tokenizer().eos_token_id
    assert found[0] == found[1] == found[2]


def test_a_tokenizer_that_was_written_and_read_is_the_same_in_all_parts(trained, tmp_path: Path):
    framed = {"token_type": [3, *[1] * (len(trained[0]) - 1)], "add_bos_token": True, "bos_token_id": 0}
    gemma4 = {"model": "gemma4", "tokens": ["<bos>", "a", " ", "\n", "a ", "a"], "merges": ["a  "], "bos_token_id": 0}
    files = [
        header(**entries_of(trained, pre="qwen2", **framed)),
        header(**entries_of(trained, pre="llama-bpe", unknown_token_id=3)),
        header(**gemma4),
        sentencepiece(add_eos_token=True),
    ]
    for idx, file in enumerate(files):
        (folder := tmp_path / str(idx)).mkdir()
        for made in (write_tokenizer(file, folder), read_stored(folder)):
            core = made.backend_tokenizer
            assert core is not None
            assert json.loads(core.to_str()) == json.loads(read_tokenizer(file).backend_tokenizer.to_str())


# ---- what is wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"model": "gpt2", "tokens": ["a", "b", "a"], "merges": []}, "a token twice"),
        ({"model": "gpt2", "tokens": ["a"]}, "without merges"),
        ({"model": "gemma4", "tokens": ["a"]}, "without merges"),
        ({"model": "bert", "tokens": ["a"]}, "of the kind bert"),
        ({"tokens": ["a"]}, "has no tokenizer"),
        ({"model": "llama", "tokens": 5}, "has no tokenizer"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(entries, said):
    with pytest.raises(GgufError, match=said):
        check_tokenizer(header(**entries))


def test_merges_of_tokens_that_are_not_there_are_one_line(tmp_path: Path):
    save_model(tmp_path / "model", "llama", demo_tokenizer())
    file = write_gguf(tmp_path / "model", tmp_path / "model.gguf", merges=["no such", "merge"])
    with pytest.raises(ModelError, match=r"has a tokenizer that cannot be used: [^\n]*$"):
        load_tokenizer(file, cache_dir="")
