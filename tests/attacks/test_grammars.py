"""Grammars made to end or to stall what compiles them, sent to real processes, with ordinary requests beside."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx2
import psutil
import pytest

from card.config import Grammar, ShapingRule
from card.drafting.messages import Close, Hello, Layer, Open
from tests.attacks.conftest import Book
from tests.attacks.health import Look, looking_at_health, told
from tests.cli.test_draft_server import draft_server
from tests.drafts import draft_spec
from tests.links.serving import RawClient
from tests.pair import Pair
from tests.server.running import PATIENCE_S, PROMPT, Command, command
from tests.waiting import until

pytest.importorskip("llguidance")
pytestmark = [pytest.mark.attacks, pytest.mark.timeout(300)]

_URL = "/v1/completions"
_MIB = 1 << 20
_MOST_HELD_S = 2.0  # that the server may compute while /health waits: a bound against hanging only
_MOST_GROWN_BYTES = 1536 * _MIB  # three children and their grammars here, and all that may be kept


def chain(length: int, link: Callable[[Any], Any]) -> dict[str, Any]:
    refs = [{"$ref": f"#/$defs/d{idx}"} for idx in range(length + 1)]
    definitions = {f"d{idx}": link(refs[idx + 1]) for idx in range(length)}
    return {**refs[0], "$defs": definitions | {f"d{length}": {"type": "integer"}}}


def takes_gigabytes(idx: int) -> dict[str, Any]:
    """Return a schema of 96 KB that takes gigabytes to compile; each ``idx`` has its own."""
    parts = [{"type": "object", "properties": {"a": {"type": "string", "pattern": f"a{part}"}}} for part in range(50)]
    return {"guided_json": {"allOf": parts, "description": f"{idx} " + "x" * 96_000}}


def takes_minutes(idx: int) -> dict[str, Any]:
    """Return a grammar of 460 KB that is read in minutes; each ``idx`` has its own."""
    lines = "".join(f'r{rule} ::= "a" r{rule + 1}\n' for rule in range(20_000))
    return {"guided_grammar": f'root ::= r0 "{idx}"\n{lines}r20000 ::= "b"'}


def rules(length: int) -> str:
    lines = "".join(f'r{idx} ::= "a" r{idx + 1}\n' for idx in reversed(range(length)))
    return f'r{length} ::= "b"\n{lines}root ::= r0'


def terminals(length: int) -> str:
    return "start: R0\n" + "".join(f'R{idx}: "a" R{idx + 1}\n' for idx in range(length)) + f'R{length}: "b"'


DEADLY: list[tuple[str, dict[str, Any]]] = [
    (_URL, {"guided_json": chain(3000, lambda ref: ref)}),
    (_URL, {"guided_json": chain(1200, lambda ref: {"anyOf": [{"type": "null"}, ref]})}),
    (_URL, {"guided_json": chain(1200, lambda ref: {"allOf": [ref]})}),
    (_URL, {"structured_outputs": {"json": chain(1200, lambda ref: {"type": "array", "items": ref})}}),
    (_URL, {"guided_grammar": rules(6000)}),
    (_URL, {"guided_grammar": terminals(6000)}),
]
_OBJECTS = chain(1200, lambda ref: {"type": "object", "properties": {"a": ref}})
_FORM = {"type": "json_schema", "name": "x", "schema": _OBJECTS}
DEADLY += [
    (_URL, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _OBJECTS}}}),
    ("/v1/responses", {"text": {"format": _FORM}}),
]


@dataclass
class Beside:
    """Ordinary clients, and the memory of the server's processes, while somebody attacks."""

    looks: list[Look]
    plain_s: list[float] = field(default_factory=list)
    most_bytes: int = 0
    faults: list[str] = field(default_factory=list)

    def told(self) -> str:
        return f"{told(self.looks)}, a plain request {max(self.plain_s):.2f} s"


def bytes_of(pid: int) -> int:
    """Return the memory of a process and of all below it."""
    total, root = 0, psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


@contextlib.contextmanager
def beside(server: Command) -> Iterator[Beside]:
    """Have ordinary requests answered meanwhile; each must be."""
    is_over, address = threading.Event(), "127.0.0.3"
    with looking_at_health(server, address) as looks:
        seen = Beside(looks)

        def ask() -> None:
            elsewhere = httpx2.HTTPTransport(local_address=address)
            with httpx2.Client(base_url=server.url, transport=elsewhere, timeout=PATIENCE_S) as client:
                while not is_over.is_set() or not seen.plain_s:
                    begun_at = time.monotonic()
                    answer = client.post(_URL, json={"prompt": PROMPT, "max_tokens": 4})
                    seen.plain_s.append(time.monotonic() - begun_at)
                    if answer.status_code != 200:
                        seen.faults.append(answer.text)
                    is_over.wait(0.3)

        def weigh() -> None:
            while not is_over.is_set():
                seen.most_bytes = max(seen.most_bytes, bytes_of(server.process.pid))
                is_over.wait(0.1)

        threads = [threading.Thread(target=one) for one in (ask, weigh)]
        for thread in threads:
            thread.start()
        try:
            yield seen
        finally:
            is_over.set()
            for thread in threads:
                thread.join(PATIENCE_S)
    assert not seen.faults
    assert server.process.poll() is None
    assert max(look.held_s for look in looks) < _MOST_HELD_S


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    models = ("demo-target", "--draft", "demo-draft", "--dtype", "float32", "--policy", "fixed")
    with command(tmp_path_factory.mktemp("server"), *models) as running:
        ask(running, _URL, {"guided_json": {"type": "object"}})
        yield running


def ask(server: Command, path: str, form: dict[str, Any], **options: Any) -> httpx2.Response:
    fields = {"input": PROMPT} if path == "/v1/responses" else {"prompt": PROMPT, "max_tokens": 4}
    transport = httpx2.HTTPTransport(local_address=options.pop("address", "127.0.0.1"))
    with httpx2.Client(base_url=server.url, transport=transport, timeout=options.pop("timeout", PATIENCE_S)) as client:
        return client.post(path, json={**fields, **form})


def message(answer: httpx2.Response, *statuses: int) -> str:
    assert answer.status_code in statuses, answer.text
    said = str(answer.json()["error"]["message"])
    assert "\n" not in said and len(said) < 500
    return said


def test_chains_that_overflow_a_stack(server: Command, book: Book) -> None:
    begun_at = time.monotonic()
    with beside(server) as seen:
        for path, form in DEADLY:
            assert "ended by SIGSEGV" in message(ask(server, path, form), 400), form.keys()
    mean_s = (time.monotonic() - begun_at) / len(DEADLY)
    book("a grammar whose chain of references overflows a stack", len(DEADLY), f"400 in {mean_s:.2f} s; {seen.told()}")


def test_grammars_that_take_minutes_and_gigabytes(server: Command, book: Book) -> None:
    before = bytes_of(server.process.pid)
    count, begun_at = 12, time.monotonic()
    forms = [takes_minutes(idx) if idx % 2 else takes_gigabytes(idx) for idx in range(count)]
    with beside(server) as seen, ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(ask, server, _URL, form) for form in forms]
        until(lambda: seen.plain_s)
        quick_s = []
        while not all(answer.done() for answer in asked):
            quick_at = time.monotonic()
            form = {"guided_json": {"enum": [f"another client's {len(quick_s)}"]}}
            assert ask(server, _URL, form, address="127.0.0.2").status_code == 200
            quick_s.append(time.monotonic() - quick_at)
        for answer in asked:
            message(answer.result(), 400, 503)
    assert time.monotonic() - begun_at < 60
    grown = seen.most_bytes - before
    assert grown < _MOST_GROWN_BYTES
    told = f"400 or 503 within {time.monotonic() - begun_at:.0f} s; another's schema at most {max(quick_s):.2f} s"
    book(
        "grammars of 96 to 460 KB for minutes or gigabytes, at once",
        count,
        f"{told}; {seen.told()}; +{grown // _MIB} MiB",
    )


def test_clients_that_hang_up_leave_no_work_behind(server: Command, book: Book) -> None:
    count = 30

    def hang_up(idx: int) -> None:
        with contextlib.suppress(httpx2.ReadTimeout):
            ask(server, _URL, takes_minutes(idx), timeout=httpx2.Timeout(PATIENCE_S, read=0.3))

    with beside(server) as seen, ThreadPoolExecutor(10) as pool:
        list(pool.map(hang_up, range(count)))
        begun_at = time.monotonic()
        assert ask(server, _URL, {"guided_json": {"enum": ["the next one"]}}).status_code == 200
        next_s = time.monotonic() - begun_at
    children = psutil.Process(server.process.pid).children(recursive=True)
    triers = [one for one in children if "grammar_child" in " ".join(one.cmdline())]
    assert len(triers) <= 3 and not any(one.status() == psutil.STATUS_ZOMBIE for one in children)
    used = sum(one.cpu_times().user for one in triers)
    time.sleep(1.0)
    assert sum(one.cpu_times().user for one in triers) - used < 0.2, "nobody works for those who have gone"
    book("clients that hang up on a grammar of minutes", count, f"the next schema in {next_s:.2f} s; {seen.told()}")


def test_megabytes_of_grammar_hold_nobody_up(server: Command, book: Book) -> None:
    forms: list[dict[str, Any]] = [
        {"guided_grammar": "root ::= " + "a " * 1_900_000},
        {"guided_grammar": "root ::= " + '"a" ' * 130_000},
        {"guided_grammar": "\n" * 1_900_000 + "a"},
        {"guided_json": json.dumps({"enum": ["a" * 100] * 20_000})},
        {"guided_json": '{"a": [' + "[]," * 1_300_000 + "[]]}"},
        {"guided_json": '{"a": [' + "[]," * 300_000 + "[]]}"},
        {"guided_json": {"enum": ["a" * 100] * 30_000}},
        {"guided_choice": ["a" * 900 + str(idx) for idx in range(4096)]},
        {"guided_choice": [f"{idx} " + "a" * 200 for idx in range(4096)]},
        {"guided_regex": "a" * 3_900_000},
    ]
    with beside(server) as seen:
        answers = [ask(server, _URL, form) for form in forms]
    outcomes = [answer.status_code for answer in answers]
    assert set(outcomes) <= {200, 400}
    told = f"{outcomes.count(400)} refused with 400; {seen.told()}"
    book("grammars of 1 to 4 MB in each field", len(forms), told)


def test_grammars_that_cost_more_with_each_token(server: Command, book: Book) -> None:
    slow = {"guided_grammar": 'start: a\na: a a | a a a | /[a-z ]/ | ""\n', "max_tokens": 200, "temperature": 0.9}
    with beside(server) as seen, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, server, _URL, {**slow, "seed": seed}, timeout=PATIENCE_S) for seed in range(4)]
        answers = [one.result() for one in asked]
    for answer in answers:
        assert answer.status_code == 200 or any(
            words in message(answer, 400) for words in ("for one t", "no mask within")
        )
    book("grammars that cost more with each token, at once", len(answers), seen.told())


def test_grammars_that_are_given_up_while_they_are_followed(server: Command, book: Book) -> None:
    literal = {"guided_grammar": "start: " + json.dumps("abc " * 175_000), "max_tokens": 400}
    forbidden = {  # its words come earlier in the prompt, but followed by what the grammar forbids
        "prompt": "Tom has 3 apples and buys 4 more. The number of appl",
        "guided_regex": r"es is [0-9]+\. The number of apples is [0-9]+\.",
        "max_tokens": 40,
    }
    with beside(server) as seen:
        ends = [ask(server, _URL, form, timeout=PATIENCE_S).status_code for form in [literal] * 5 + [forbidden] * 20]
    assert set(ends) <= {200, 400}
    assert ends[5:] == [200] * 20
    book("grammars given up on the way, candidates that one forbids", len(ends), seen.told())


def test_a_draft_server_survives_grammars_that_no_process_survives(pair: Pair, book: Book) -> None:
    grammars = [Grammar("json_schema", json.dumps(form["guided_json"])) for _, form in DEADLY if "guided_json" in form]
    grammars += [Grammar("lark", terminals(6000)), Grammar("gbnf", rules(6000))]
    grammars += [Grammar("json_schema", json.dumps(takes_gigabytes(idx)["guided_json"])) for idx in range(30)]
    grammars_left = [*grammars]
    with (
        draft_server("--draft", pair.draft, "--dtype", "float32", "--listen", "tcp://127.0.0.1:0") as (
            process,
            address,
        ),
        RawClient(address, incarnation=1) as hostile,
        RawClient(address, incarnation=2) as honest,
    ):
        before = most = bytes_of(process.pid)
        hostile.say(Hello())
        honest.say(Hello())
        num_drafted, until_s = 0, time.monotonic() + 20
        while grammars_left or time.monotonic() < until_s:
            if grammars_left:
                shaping = ShapingRule(num_prompt_tokens=1, grammar=grammars_left.pop())
                hostile.say(Open(len(grammars_left), (5, 6, 7), draft_spec(shaping=shaping)))
            honest.say(Open(1000 + num_drafted, (8, 9), draft_spec()))
            honest.hear(Layer)
            honest.say(Close(1000 + num_drafted))
            num_drafted += 1
            most = max(most, bytes_of(process.pid))
            time.sleep(0.05)
        assert process.poll() is None
        assert most - before < _MOST_GROWN_BYTES
        told = f"drafts {num_drafted} texts for others meanwhile; +{(most - before) // _MIB} MiB"
        book("deadly grammars in Open messages to a draft server", len(grammars), told)
