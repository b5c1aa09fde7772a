"""Grammars are tried in a child process first: what ends it, or takes too much, ends nothing here and is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

import card.text.grammar
import card.text.grammar_sandbox
from card.config import Grammar
from card.errors import CapacityError, SettingsError
from card.text.compiling import MOST_CHARS, is_gbnf
from card.text.grammar import MOST_IN_LINE, BackgroundGrammars, GrammarCompiler
from card.text.grammar_sandbox import GivenUpError, GrammarSandbox, Passed, TooSlowError, child_stack_bytes
from card.text.tokenizer import Tokenizer
from tests.pair import own_tokenizer
from tests.reaching_in import let_grammar_children_run
from tests.shaping import permits
from tests.waiting import until

pytest.importorskip("llguidance")
pytestmark = pytest.mark.timeout(180)

PLAIN = Grammar("regex", "the (cat|mat)")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return own_tokenizer()


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, len(tokenizer), (0, 1), limit_s=60.0)  # as long as a busy machine takes
    yield compiler
    compiler.close()


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    """One of its own, with a single child."""
    compiler = GrammarCompiler(tokenizer, len(tokenizer), (0, 1), num_threads=1)
    yield compiler
    compiler.close()


Children = Callable[[], list[psutil.Process]]


@pytest.fixture
def children() -> Children:
    """Return the processes begun in this test, those that have ended and were not waited for included."""
    before = psutil.Process().children()
    return lambda: [process for process in psutil.Process().children() if process not in before]


def schema(**keys: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(keys))


def chain(length: int, link: Any) -> Grammar:
    """Return a schema of definitions each of which refers to the next."""
    refs = [{"$ref": f"#/$defs/d{idx}"} for idx in range(length + 1)]
    definitions = {f"d{idx}": link(refs[idx + 1]) for idx in range(length)}
    return schema(**refs[0], **{"$defs": definitions | {f"d{length}": {"type": "integer"}}})


# Read in a time that grows with the square of its rules; memory stays small.
TAKES_MINUTES = Grammar(
    "gbnf", "root ::= r0\n" + "".join(f'r{idx} ::= "a" r{idx + 1}\n' for idx in range(20_000)) + 'r20000 ::= "b"'
)

# ---- what no process survives ---------------------------------------------------------------------------------------


def steps(length: int, name: str) -> str:
    return "\n".join(f'{name}{idx}: "a" {name}{idx + 1}' for idx in range(length)) + f'\n{name}{length}: "b"'


@pytest.mark.parametrize(
    "grammar",
    [
        chain(3000, lambda ref: ref),
        chain(1200, lambda ref: {"anyOf": [{"type": "null"}, ref]}),
        chain(1200, lambda ref: {"allOf": [ref]}),
        chain(1200, lambda ref: {"type": "object", "properties": {"a": ref}, "required": ["a"]}),
        Grammar("lark", f"start: r0\n{steps(3000, 'r')}"),
        Grammar("lark", f"start: R0\n{steps(6000, 'R')}"),
    ],
    ids=["ref", "anyOf", "allOf", "properties", "rules", "terminals"],
)
def test_a_chain_that_overflows_the_compiler_s_stack_is_refused_in_one_line(
    shared: GrammarCompiler, grammar: Grammar
) -> None:
    with pytest.raises(SettingsError) as refused:
        shared.compile(grammar)
    assert str(refused.value) == (
        f"the {grammar.kind} grammar cannot be used: it is more than the compiler takes (ended by SIGSEGV); use a "
        "simpler one"
    )
    assert shared.compile(PLAIN).allowed([()]).any()


def test_what_passes_in_a_child_has_at_least_twice_the_stack_wherever_it_is_used_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = threading.stack_size()
    try:
        for num_bytes in (1 << 19, 1 << 20, 1 << 23, 1 << 26):
            threading.stack_size(num_bytes)
            assert child_stack_bytes() <= num_bytes // 2
        threading.stack_size(0)
        for soft, least in ((1 << 20, 1 << 19), (8 << 20, 4 << 20), (-1, 1 << 20)):
            monkeypatch.setattr("resource.getrlimit", lambda _, soft=soft: (soft, -1))
            assert child_stack_bytes() == least
    finally:
        threading.stack_size(before)


def test_memory_without_end_is_refused_with_the_limit(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card.text.grammar_sandbox, "MEMORY_BYTES", 16 << 20)
    with pytest.raises(SettingsError, match=r"takes \(needs more than 16 MiB\); use a simpler one"):
        compiler.compile(Grammar("regex", "a" * 100_000))
    assert compiler.compile(PLAIN).allowed([()]).any()


# What a child has had is then counted from its own start, as macOS does; Linux begins with what its parent had.
WITHOUT_STATM = """
import re
from pathlib import Path
import card.text.grammar_child as child
child.__dict__["_statm"] = lambda field: 0
told = lambda: Path("/proc/self/status").read_text()
child.__dict__["_peak_bytes"] = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", told())[1]) << 10
"""


def test_memory_is_bounded_where_the_system_does_not_say_how_much_a_process_has(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_grammar_children_run(monkeypatch, WITHOUT_STATM)
    monkeypatch.setattr(card.text.grammar_sandbox, "MEMORY_BYTES", 16 << 20)
    with pytest.raises(SettingsError, match=r"takes \(needs more than 16 MiB\); use a simpler one"):
        compiler.compile(Grammar("regex", "a" * 1_000_000))
    assert compiler.compile(PLAIN).allowed([()]).any()


def test_time_without_end_is_refused_with_the_limit(compiler: GrammarCompiler) -> None:
    with pytest.raises(TooSlowError, match=r"cannot be used: it takes more than 0\.5 s to compile; use a simpler one"):
        compiler.begin(TAKES_MINUTES, limit_s=1.0).future.result(60)
    assert compiler.compile(PLAIN).allowed([()]).any()


def test_a_grammar_of_megabytes_reaches_no_child(compiler: GrammarCompiler, children: Children) -> None:
    with pytest.raises(SettingsError, match=rf"has 1,048,577 characters, at most {MOST_CHARS:,} may be compiled"):
        compiler.compile(Grammar("regex", "a" * (MOST_CHARS + 1)))
    assert not children()


def test_a_schema_nested_too_deeply_is_refused(shared: GrammarCompiler) -> None:
    deep = '{"type": "array", "items": ' * 5000 + "{}" + "}" * 5000
    with pytest.raises(SettingsError, match=r"recursion limit exceeded .*; correct it or leave grammar out"):
        shared.compile(Grammar("json_schema", deep))


def test_schemas_of_200_kb_pass(shared: GrammarCompiler) -> None:
    kinds = [
        {"type": "string", "pattern": "^[a-z]{2,40}@[a-z]{1,20}\\.com$"},
        {"type": "string", "format": "date-time"},
    ]
    kinds += [{"type": "integer", "minimum": 3, "maximum": 4000}, {"enum": [f"value {idx}" for idx in range(20)]}]
    properties = {f"property {idx}": kinds[idx % len(kinds)] for idx in range(2000)}
    wide = schema(type="object", properties=properties, required=list(properties), additionalProperties=False)
    assert len(wide.source) > 200_000
    assert shared.compile(wide).allowed([()]).any()


def test_gbnf_is_read_in_the_child(
    shared: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("card.text.compiling.as_lark", lambda source: pytest.fail("converted here"))
    state = shared.compile(Grammar("gbnf", 'root ::= "a" word\nword ::= "b" | "c"'))
    a, b, c, d = map(tokenizer.convert_tokens_to_ids, "abcd")
    assert permits(state, [[a, b], [a, c], [a, d]]) == [True, True, False]
    for source in ('root ::= "a" (', "root ::= " + "(" * 20_000, "root ::= nothing"):
        with pytest.raises(SettingsError, match=r"^the gbnf of grammar cannot be used: it [^\n]*; correct it or leave"):
            shared.compile(Grammar("gbnf", source))


@pytest.mark.parametrize(
    ("source", "is_one"),
    [
        ('root ::= "a"', True),
        ('item::="b"\n\troot::= item', True),
        ('start: "root ::= a"', False),
        ("\n" * 50_000 + "start: A", False),
    ],
)
def test_gbnf_is_known_by_its_root(source: str, is_one: bool) -> None:
    assert is_gbnf(source) == is_one


# ---- the child ------------------------------------------------------------------------------------------------------


def test_the_child_loads_nothing_heavy() -> None:
    code = "import sys; sys.path += sys.argv[1:]; import card.text.grammar_child; print(*sys.modules)"
    paths = [path for path in sys.path if path]
    loaded = subprocess.check_output([sys.executable, "-I", "-S", "-c", code, *paths], text=True).split()
    assert not {"torch", "transformers", "tokenizers", "numpy", "msgspec", "llguidance"} & set(loaded)
    assert {name for name in loaded if name.startswith("card.")} == {
        "card.text",
        "card.text.compiling",
        "card.text.grammar_child",
    }


def test_what_has_passed_is_not_tried_again(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    try_out = GrammarSandbox.try_out

    def note(self: GrammarSandbox, kind: str, source: str, seconds: float) -> Passed:
        tried.append(source)
        return try_out(self, kind, source, seconds)

    monkeypatch.setattr(GrammarSandbox, "try_out", note)
    monkeypatch.setattr(card.text.grammar, "MOST_KEPT", 2)
    sources = ["a", "b", "c", "d"]
    for _ in range(3):
        for source in sources:
            compiler.compile(Grammar("regex", source))
    assert tried == sources


def test_a_child_that_was_killed_is_replaced_and_none_is_left(compiler: GrammarCompiler, children: Children) -> None:
    compiler.compile(PLAIN)
    (first,) = children()
    assert os.getpgid(first.pid) == first.pid, "Ctrl-C in the terminal does not reach it"
    first.kill()
    until(lambda: not children())  # nor is it left as a zombie until the next grammar
    compiler.compile(Grammar("regex", "another"))
    (second,) = children()
    assert second.pid != first.pid
    compiler.close()
    assert not children()
    with pytest.raises(CapacityError, match="is being closed"):
        compiler.compile(Grammar("regex", "a third"))
    assert compiler.compile(PLAIN).allowed([()]).any(), "what is kept needs no child"
    compiler.close()


def test_where_no_process_can_be_started_a_grammar_is_refused_and_may_be_asked_for_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        with pytest.raises(CapacityError, match="Too many open files; ask again soon"):
            compiler.compile(PLAIN)
    assert compiler.compile(PLAIN).allowed([()]).any()


def test_where_no_thread_can_be_started_a_grammar_is_refused_and_may_be_asked_for_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(CapacityError, match=r"no thread can be started .*; ask again soon"):
            compiler.compile(PLAIN)
    assert compiler.compile(PLAIN).allowed([()]).any()


def test_an_answer_that_was_not_waited_for_is_not_taken_for_the_next_one(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile(PLAIN)
    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", lambda _: (_ for _ in ()).throw(MemoryError("just now")))
        with pytest.raises(MemoryError):
            compiler.compile(Grammar("regex", "a"))
    with pytest.raises(SettingsError, match="cannot be used"):
        compiler.compile(Grammar("regex", "("))
    assert compiler.compile(Grammar("regex", "a")).allowed([()]).any()


_PARENT = """
import psutil, sys
from card.config import Grammar
from card.text.grammar import MOST_IN_LINE, BackgroundGrammars, GrammarCompiler
from card.text.tokenizer import Tokenizer
from tests.pair import own_tokenizer
from tests.text.test_grammar_trials import TAKES_MINUTES
tokenizer = own_tokenizer()
compiler = GrammarCompiler(tokenizer, len(tokenizer), (0, 1), limit_s=7200.0)  # no limit ends the child, but the kill
compiler.compile(Grammar("regex", "a"))
print(*(process.pid for process in psutil.Process().children()), flush=True)
if "busy" in sys.argv:
    compiler.compile(TAKES_MINUTES)
sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_a_child_ends_with_a_parent_that_is_killed(state: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_with_tests()
    )
    assert parent.stdout is not None and parent.stdin is not None
    (child,) = (psutil.Process(int(pid)) for pid in parent.stdout.readline().split())
    if state == "busy":
        begun = child.cpu_times().user
        until(lambda: child.cpu_times().user > begun + 0.05)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    parent.stdin.close()
    parent.stdout.close()


def _with_tests() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


# ---- those who wait -------------------------------------------------------------------------------------------------


def test_work_that_nobody_waits_for_any_more_is_ended_and_work_that_somebody_waits_for_is_not(
    compiler: GrammarCompiler,
) -> None:
    compiler.compile(PLAIN)
    first, second = (compiler.begin(TAKES_MINUTES, limit_s=120.0) for _ in range(2))
    waiting = compiler.begin(Grammar("regex", "behind it"))
    assert first is second
    until(first.future.running)
    compiler.leave(first)
    assert not first.is_given_up
    compiler.leave(second)
    with pytest.raises(GivenUpError):
        second.future.result(60)
    assert waiting.future.result(60).allowed([()]).any()
    compiler.leave(waiting)
    unbegun = [compiler.begin(TAKES_MINUTES), compiler.begin(Grammar("regex", "never begun"))]
    for work in reversed(unbegun):
        compiler.leave(work)
    assert unbegun[1].future.cancelled()
    assert compiler.compile(Grammar("regex", "never begun")).allowed([()]).any()


def test_one_client_s_grammars_never_keep_all_children_busy(shared: GrammarCompiler) -> None:
    greedy = [shared.begin(Grammar("gbnf", TAKES_MINUTES.source + " " * idx), client="greedy") for idx in range(6)]
    quick = shared.begin(Grammar("regex", "quick"), client="modest")
    assert quick.future.result(60).allowed([()]).any()
    assert sum(work.future.running() for work in greedy) == 2
    wanted = Grammar("regex", "wanted by both")
    last = shared.begin(wanted, client="greedy")
    assert shared.begin(wanted, client="modest") is last
    assert last.future.result(60).allowed([()]).any(), "the modest client's turn has come"
    for work in (*greedy, last, last, quick):
        shared.leave(work)


def test_grammars_in_use_take_no_more_memory_than_they_may(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card.text.grammar, "MOST_BYTES", 24 << 20)
    large = [Grammar("regex", f"{char}" * 20_000) for char in "abcdef"]
    for grammar in large:
        compiler.compile(grammar)  # nobody uses it: it makes place for the next
    used = []
    with pytest.raises(CapacityError, match="all the memory that they may; ask again soon"):
        for grammar in large:
            used.append(compiler.compile(grammar))
    assert 1 <= len(used) < len(large)
    used.clear()
    assert compiler.compile(large[-1]).allowed([()]).any()


def test_a_grammar_that_a_request_was_prepared_with_is_kept_as_long_as_the_request(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card.text.grammar, "MOST_KEPT", 2)
    work = compiler.begin(PLAIN)
    work.future.result(60)
    compiler.leave(work)
    for source in "abcd":
        compiler.compile(Grammar("regex", source))
    monkeypatch.setattr(compiler, "build", lambda *_: pytest.fail("compiled again"))
    assert compiler.compile(PLAIN).allowed([()]).any()


def test_a_drafter_keeps_no_more_in_line_than_it_may(compiler: GrammarCompiler) -> None:
    compiler.compile(PLAIN)
    busy = compiler.begin(TAKES_MINUTES)
    until(busy.future.running)
    began_at = time.monotonic()
    for idx in range(100):
        assert compiler.find(Grammar("regex", f"number {idx}")) is None
    assert compiler.num_waiting == MOST_IN_LINE
    assert compiler.find(PLAIN) is not None
    assert time.monotonic() < began_at + 60
    compiler.leave(busy)


def test_a_drafter_survives_a_grammar_that_no_process_survives_and_goes_on_without(
    compiler: GrammarCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    grammars = BackgroundGrammars(lambda: compiler)
    deadly = chain(3000, lambda ref: ref)
    until(lambda: grammars(deadly) is None and "ended by SIGSEGV" in caplog.text)
    until(lambda: grammars(PLAIN) is not None)
    for _ in range(5):
        assert grammars(deadly) is None
    assert caplog.text.count("ended by SIGSEGV") == 1, "it is neither tried nor spoken of again"
