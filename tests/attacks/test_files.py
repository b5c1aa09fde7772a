"""Files of models that a stranger wrote: each loads or is refused in one line, in bounded time and memory."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from card.errors import CardError
from card.models.files.gguf.header import GgufError
from card.models.files.gguf.model import open_gguf
from card.models.files.gguf.tokenizer import check_tokenizer
from card.text.chat_template import render_chat
from tests.attacks.conftest import Book
from tests.gguf_files import demo_tokenizer, save_model, write_gguf
from tests.hostile_headers import HEADERS, hostile
from tests.hostile_templates import ENDLESS, HUGE
from tests.models.test_gguf_headers import header_of
from tests.models.test_odd_configs import changed_once, fault_of
from tests.pair import make_tokenizer
from tests.tiny import NO_ENDS, SIZES
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.attacks, pytest.mark.timeout(300)]

_MOST_BYTES = 3 << 30  # of a child's memory
_NUM_HEADERS = 3000
_ROOT = Path(__file__).parents[2]


def _in_child(name: str) -> dict[str, Any]:
    """Run a function of this file in a process with little memory; return what it tells."""
    command = f"import tests.attacks.test_files as here; here.tell(here.{name})"
    limit = (_MOST_BYTES, _MOST_BYTES)
    ran = subprocess.run(
        [sys.executable, "-c", command],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told


def tell(attack: Callable[[], Iterable[tuple[str, Callable[[], object]]]]) -> None:
    """Run each case of an attack, and print how many ended how, and what the slowest and all of them took."""
    count, num_refused, slowest_s, slowest, faults = 0, 0, 0.0, "", []
    least = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, case in attack():
        start = time.perf_counter()
        try:
            case()
        except (CardError, GgufError) as error:
            num_refused += 1
            if len(str(error).splitlines()) != 1:
                faults.append(f"{name}: not one line")
        except Exception as error:
            faults.append(f"{name}: {type(error).__name__} {error}"[:200])
        took_s = time.perf_counter() - start
        count, (slowest_s, slowest) = count + 1, max((slowest_s, slowest), (took_s, name))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - least
    told = {"count": count, "refused": num_refused, "slowest_s": slowest_s, "slowest": slowest, "faults": faults[:9]}
    print(json.dumps({**told, "grown_mib": grown >> 10}))


def _booked(book: Book, what: str, told: dict[str, Any]) -> None:
    assert not told["faults"]
    refused, slowest = f"{told['refused']:,} refused in one line", f"the slowest {told['slowest_s']:.2f} s"
    book(what, told["count"], f"{refused}, others load; {slowest}; {told['grown_mib']} MiB")


class _Templated:
    def __init__(self, template: str) -> None:
        self._template = template
        self.special_tokens_map: dict[str, str] = {}

    def get_chat_template(self, tools: object = None) -> str:
        return self._template


def templates() -> Iterable[tuple[str, Callable[[], object]]]:
    for name, template in (ENDLESS | HUGE).items():
        tokenizer: Any = _Templated(template)
        yield name, lambda tokenizer=tokenizer: render_chat(tokenizer, [{"role": "user", "content": "hi"}])


def _open(path: Path) -> None:
    check_tokenizer(open_gguf(path).header)


def headers() -> Iterable[tuple[str, Callable[[], object]]]:
    with tempfile.TemporaryDirectory() as folder:
        for name in HEADERS:
            file = hostile(Path(folder, "one.gguf"), name)
            yield name, lambda file=file: _open(file)


def damaged_headers() -> Iterable[tuple[str, Callable[[], object]]]:
    choose = random.Random(7)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder, "model"), "llama", demo_tokenizer())
        good = write_gguf(Path(folder, "model"), Path(folder, "good.gguf")).read_bytes()
        file = Path(folder, "one.gguf")
        for idx in range(_NUM_HEADERS):
            content = bytearray(good)
            for _ in range(choose.randint(1, 4)):
                place = choose.randrange(choose.choice((64, 2000, 20_000)))
                odd = choose.choice((0, 1, 255, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, choose.getrandbits(64)))
                size = choose.choice((1, 4, 8))
                content[place : place + size] = (odd % 256**size).to_bytes(size, "little")
            file.write_bytes(content)
            yield f"header {idx}", lambda: _open(file)


def configs() -> Iterable[tuple[str, Callable[[], object]]]:
    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory() as made:
        torch.manual_seed(1)
        sizes = {**SIZES, **NO_ENDS, "head_dim": 8, "max_position_embeddings": 256}
        for kind in ("Glm4", "Gemma2", "Mixtral"):
            folder = Path(made, kind)
            config = getattr(transformers, f"{kind}Config")(vocab_size=len(tokenizer), **sizes)
            getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            good = json.loads((folder / "config.json").read_text())
            for what, document in changed_once(good):
                yield f"{kind} {what}", lambda d=document, f=folder: _checked(fault_of(f, d, tokenizer))


def _checked(fault: str) -> None:
    if fault:
        raise AssertionError(fault)


def test_templates_without_an_end_are_refused(book: Book) -> None:
    told = _in_child("templates")
    assert told["refused"] == told["count"] and told["grown_mib"] < 1500
    _booked(book, "chat templates that loop for ever or fill the memory", told)


def test_headers_that_ask_for_the_memory_are_refused(book: Book) -> None:
    told = _in_child("headers")
    assert told["refused"] == told["count"] and told["grown_mib"] < 300
    _booked(book, "GGUF headers with arrays of 1.5 GB, counts near 2**63, tensors in one place", told)


def test_damaged_headers_load_or_are_refused(book: Book) -> None:
    told = _in_child("damaged_headers")
    assert told["grown_mib"] < 1000
    _booked(book, "GGUF headers with odd numbers anywhere", told)


def test_odd_configs_load_or_are_refused(book: Book) -> None:
    told = _in_child("configs")
    assert not told["faults"]
    what = "config.json with each field of another type or gone, three families"
    book(what, told["count"], f"each loads or is refused in one line; the slowest {told['slowest_s']:.2f} s")


def test_a_token_of_400_kb_is_refused(book: Book) -> None:
    told = _in_child("long_token")
    assert told["refused"] == told["count"]
    _booked(book, "a SentencePiece token of 400 KB", told)


def long_token() -> Iterable[tuple[str, Callable[[], object]]]:
    header = header_of(["a", "b" * 400_000])
    yield "token", lambda: check_tokenizer(header)
