"""Words of the code: messages name nothing that only it knows, and docstrings begin with the thing or the verb."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache

import pytest

from card.cli.main import cli
from card.config import DraftSettings, SamplingParams
from card.config.fields import declared
from card.config.splitting import engine_settings
from tests.crosses.given import every_command
from tests.sources import MODULES, SOURCES

# A class of ours has the name of this header of HTTP, which `card serve` speaks of.
OTHER_MEANINGS = frozenset({"Host"})
# What `type(...).__name__` may be told of: what users, clients or other packages gave us.
FOREIGN = frozenset({"error", "content", "prompt", "text", "module", "self._tokenizer"})
_SPEAKERS = frozenset({"logger", "click", "warnings"})
_FAULTS = frozenset({"LinkStatus", "Fault", "Declined"})  # whose reasons users are shown


def _is_public(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            yield from (one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant))


@cache
def trees() -> Mapping[str, ast.Module]:
    """Return the modules of the package; to read all of them takes seconds."""
    return {name: ast.parse(source) for name, source in SOURCES.items()}


@cache
def inner_names() -> frozenset[str]:
    """Return the classes that only the code knows."""
    public = {name for tree in trees().values() for name in _is_public(tree)}
    return (
        frozenset(n.name for tree in trees().values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)) - public
    )


def spoken(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what says something to users: raised exceptions, log lines, echoes and reasons."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield node.exc
        elif isinstance(node, ast.Call):
            called = node.func
            of = called.value if isinstance(called, ast.Attribute) else called
            if isinstance(of, ast.Name) and of.id in (_SPEAKERS if of is not called else _FAULTS):
                yield node


def faults(tree: ast.AST) -> list[str]:
    """Return what users cannot know in what is said to them."""
    found = []
    for said in spoken(tree):
        for node in ast.walk(said):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += [f"{node.lineno}: {name}" for name in _own_names(node.value)]
            if isinstance(node, ast.Attribute) and node.attr == "__name__":
                of = node.value.args[0] if isinstance(node.value, ast.Call) and node.value.args else node.value
                if ast.unparse(of) not in FOREIGN:
                    found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def _own_names(text: str) -> list[str]:
    """Return the names of our classes in a text; one word at its beginning, or behind a full stop, is plain English."""
    names = [match for match in re.finditer(r"\w+", text) if match[0] in inner_names() - OTHER_MEANINGS]
    return [m[0] for m in names if re.search("[a-z][A-Z]", m[0]) or not re.search(r"(^|[.:] )$", text[: m.start()])]


def _everywhere(rule: Callable[[ast.Module], list[str]]) -> list[str]:
    return [f"{name}: {fault}" for name, tree in trees().items() for fault in rule(tree)]


def test_no_message_names_a_class_that_is_not_public() -> None:
    assert _everywhere(faults) == []


@pytest.mark.parametrize(
    "code",
    [
        'raise ModelError(f"{name} was used beside its RowRunner")',
        'raise ModelError(f"int8 is not possible for {type(model).__name__}")',
        'raise ProtocolError("a drafter takes Open and Close")',
        'logger.warning("the %s is full", type(self).__name__)',
        'logger.info("the DrafterWorker ends")',
        'self._status = LinkStatus("down", "the BeamWriter failed")',
    ],
)
def test_a_message_that_names_one_is_found(code: str) -> None:
    assert len(faults(ast.parse(code))) >= 1


@pytest.mark.parametrize(
    "code",
    [
        'raise PromptError(f"a prompt must be a string, got {type(prompt).__name__}; use card.LLM")',
        'raise SettingsError("Draft models must be folders")',
        'logger.warning("%s: %s", type(error).__name__, error)',
    ],
)
def test_plain_words_public_names_and_what_others_gave_are_not_found(code: str) -> None:
    assert faults(ast.parse(code)) == []


_QUESTIONS = re.compile(r"(What|How|Who|Whom|Whose|Whether|Where|When|Which|Why)\b")


def questions(tree: ast.Module) -> list[str]:
    """Return the docstrings, those of attributes too, that begin like a question instead of with the thing or verb."""
    docs = [node.value.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and _is_text(node.value)]
    return [doc.splitlines()[0] for doc in docs if _QUESTIONS.match(doc)]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_no_docstring_begins_like_a_question() -> None:
    assert _everywhere(questions) == []


def test_a_docstring_that_begins_like_a_question_is_found() -> None:
    assert len(questions(ast.parse('class A:\n    """How it is done."""\n    def b(self): "Whether it is."'))) == 2
    assert len(questions(ast.parse('class A:\n    count: int\n    """How many there are."""'))) == 1
    assert questions(ast.parse('"""However many."""\ndef b(): "Return what is done."')) == []


# Adverbs and prepositions say how or where something is done, not what.
_NO_VERBS = re.compile(
    "_*(above|again|ahead|alone|anew|apart|around|aside|at_once|away|before|behind|below|beside|here|inside|nowhere|"
    "outside|over|there|together|under|where)"
)


def _without_verbs(tree: ast.AST) -> list[str]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [node.name for node in functions if _NO_VERBS.fullmatch(node.name)]


def test_functions_are_named_by_verbs_and_modules_by_what_they_hold() -> None:
    assert _everywhere(_without_verbs) == []
    modules = [name.rpartition(".")[2] for name in trees() if MODULES[name].name != "__init__.py"]
    assert [name for name in modules if _NO_VERBS.fullmatch(name)] == []


def test_a_function_that_is_named_by_no_verb_is_found() -> None:
    assert _without_verbs(ast.parse("def above(): ...\ndef look_above(): ...")) == ["above"]


# Words for people that the code had for pieces of software.
_DIALECT = re.compile(
    r"\b(whoever|to whom|for whom|nobody's|nobody wants|be it|overtake him|those who look|those who draft|"
    r"who (proposes?|takes turns)|heard no longer|asks for nothing|named alike|dear score)\b",
    re.IGNORECASE,
)


def test_pieces_of_software_are_called_by_their_names() -> None:
    found = [f"{name}: {word[0]}" for name, source in SOURCES.items() for word in _DIALECT.finditer(source)]
    assert found == []


# "If it is none" makes a reader look for what "none" refers to; "there is none" does not.
_RIDDLES = re.compile(r"(?<!there )\b(?:is|are|was|were) none\b|\bso-manieth\b|\bIts config\b|\bwhat those \w+ of\b")


def test_no_sentence_is_a_riddle() -> None:
    found = [f"{name}: {words[0]}" for name, source in SOURCES.items() for words in _RIDDLES.finditer(source)]
    assert found == []
    assert _RIDDLES.search("Raises: ModelError if it is none.") and not _RIDDLES.search("None if there is none.")


# Doors whose settings are typed as Python writes them, and fields of requests that clients type so.
_AS_IN_PYTHON = re.compile(r"card\.(inside|labs\.ray|server(?!\.config))(\.|$)")


@cache
def settings() -> frozenset[str]:
    """Return what Python, and what commands take."""
    options = {one.name or "" for _, command in every_command(cli) for one in command.params}
    return frozenset(options.union(engine_settings(), declared(DraftSettings), declared(SamplingParams)))


def unnamed(tree: ast.Module) -> list[str]:
    """Return the settings that errors spell themselves, where only Python's users can type them so."""
    return [
        f"{node.lineno}: {word}"
        for raised in ast.walk(tree)
        if isinstance(raised, ast.Raise)
        for node in ast.walk(raised)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
        for word in re.findall(r"^\w+(?= must)|(?<![\w.])[a-z]+_\w+(?![\w.])", node.value)
        if word in settings()
    ]


def test_errors_leave_the_spelling_of_a_setting_to_the_door_that_it_came_by() -> None:
    rooms = {name: tree for name, tree in trees().items() if not _AS_IN_PYTHON.match(name)}
    assert [f"{name}: {fault}" for name, tree in rooms.items() for fault in unnamed(tree)] == []
    source = "raise PromptError(f\"the prompt has {many} tokens; raise max_model_len or {named('max_tokens')}\")"
    assert unnamed(ast.parse(source)) == ["1: max_model_len"]
    assert unnamed(ast.parse('raise PlanError(f"threads must be 1 or more, got {threads}")')) == ["1: threads"]
