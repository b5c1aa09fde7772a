"""Grammars over real tokens: texts that end parse, speculation changes nothing, and what cannot be used is refused."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer

from card.api.llm import LLM
from card.backends.transformers.loading import load_model
from card.config import Grammar, SamplingParams
from card.errors import SettingsError, TargetError
from card.machine.packages import install_command
from card.models.loading import load_tokenizer
from card.text.given_tokenizer import as_tokenizer
from card.text.grammar import BackgroundGrammars, GrammarCompiler
from card.text.matcher import MatcherState, first_line
from card.text.tokenizer import Tokenizer
from card.tree.masks import GrammarState
from tests.examples import settings
from tests.pair import Pair, own_tokenizer
from tests.reaching_in import finish, matcher_of
from tests.shaping import permits
from tests.tokenizer_kinds import KINDS
from tests.waiting import until

llguidance = pytest.importorskip("llguidance")
pytestmark = pytest.mark.timeout(180)

PROMPT = "the cat sat"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
SCHEMA = Grammar("json_schema", json.dumps(PERSON))
GRAMMARS = {
    "json_schema": SCHEMA,
    "regex": Grammar("regex", "the (cat|mat|[a-z]{2,5}é)( and (one|two)){1,3}"),
    "lark": Grammar("lark", 'start: sum\nsum: NUMBER ("+" NUMBER)~1..4 ";"\nNUMBER: /[0-9]{1,3}/'),
}
NUM_PADDING = 13  # rows of an embedding without a token
NUM_IDS = len(own_tokenizer()) + NUM_PADDING


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return own_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, NUM_IDS, (0, 1))


def fits(kind: str, text: str) -> bool:
    """Return whether a whole text is of the grammar of this kind, found by other means."""
    if kind == "regex":
        return re.fullmatch(GRAMMARS["regex"].source, text) is not None
    if kind == "lark":
        return re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3}){1,4};", text) is not None
    found = json.loads(text)
    return (
        set(found) == {"name", "age", "pets"}
        and len(found["name"]) <= 6
        and type(found["age"]) is int
        and 0 <= found["age"] <= 120
        and len(found["pets"]) <= 2
        and set(found["pets"]) <= {"cat", "dog"}
    )


# ---- one text -------------------------------------------------------------------------------------------------------


def random_walk(state: GrammarState, rng: np.random.Generator, most: int) -> list[int]:
    """Return tokens of a random text of the grammar, perhaps to its end."""
    walk: list[int] = []
    while len(walk) < most and not (walk and walk[-1] in (0, 1)):
        walk.append(int(rng.choice(np.flatnonzero(state.allowed([walk])[0]))))
    return walk


@settings(max_examples=40)
@given(kind=st.sampled_from(list(GRAMMARS)), seed=st.integers(0, 9999), num_committed=st.integers(0, 8))
def test_each_node_of_a_tree_is_as_if_its_path_were_the_text(
    compiler: GrammarCompiler, kind: str, seed: int, num_committed: int
) -> None:
    rng = np.random.default_rng(seed)
    state = compiler.compile(GRAMMARS[kind])
    walks = [random_walk(state, rng, 6) for _ in range(3)]
    committed = [token for token in random_walk(state, rng, num_committed) if token > 1]
    state.advance(committed)
    below = [random_walk(state, rng, 5) for _ in range(3)]
    paths = [walk[:end] for walk in (*walks, *below) for end in range(len(walk) + 1)]
    paths += [[*path, int(rng.integers(0, NUM_IDS))] for path in paths]
    rng.shuffle(paths)  # type: ignore[arg-type]
    permitted, rows = permits(state, paths), state.allowed(paths)
    for path, is_permitted, row in zip(paths, permitted, rows, strict=True):
        alone = compiler.compile(GRAMMARS[kind])
        alone.advance(committed)
        may_follow = True
        for idx, token in enumerate(path):
            may_follow = may_follow and bool(alone.allowed([()])[0][token]) and not {0, 1} & set(path[:idx])
            if may_follow:
                alone.advance([token])
        assert is_permitted == may_follow
        if may_follow and not {0, 1} & set(path):
            assert np.array_equal(row, alone.allowed([()])[0])
        assert row.any(), "nobody is lost"


def test_rows_without_a_token_are_never_allowed_and_every_end_token_is(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.compile(Grammar("regex", "a?"))
    first = state.allowed([()])[0]
    a = tokenizer.convert_tokens_to_ids("a")
    assert np.flatnonzero(first).tolist() == [0, 1, a]
    assert np.flatnonzero(state.allowed([[a]])[0]).tolist() == [0, 1]
    assert not first[len(tokenizer) :].any()


def test_where_nobody_goes_on_everything_is_allowed_and_unknown_tokens_are_forbidden(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.compile(Grammar("regex", "a?"))
    a = tokenizer.convert_tokens_to_ids("a")
    everything = state.allowed([[0], [a, a], [NUM_IDS + 5]])
    assert everything.shape == (3, NUM_IDS)
    assert everything.all()
    assert permits(state, [[a, 0], [0, a], [NUM_IDS + 5], [1]]) == [True, False, False, True]


def test_a_text_that_does_not_keep_to_the_grammar_is_not_gone_on_with(compiler: GrammarCompiler) -> None:
    state = compiler.compile(Grammar("regex", "a?"))
    state.advance([5])
    with pytest.raises(TargetError, match="does not keep to its grammar"):
        state.allowed([()])


class Fragile:
    """A matcher that gives up for ever on one token, as a library that meets its limits does."""

    def __init__(self, real: Any, bad: int) -> None:
        self._real, self._bad, self._has_failed = real, bad, False

    def deep_copy(self) -> Fragile:
        return Fragile(self._real.deep_copy(), self._bad)

    def is_error(self) -> bool:
        return self._has_failed or self._real.is_error()

    def get_error(self) -> str:
        return "too complex\n<state> of thousands of lines"

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self._has_failed |= self._bad in tokens
        return 0 if self._has_failed else self._real.try_consume_tokens(tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_what_may_come_first_is_found_out_once_for_all_texts(compiler: GrammarCompiler) -> None:
    state = compiler.compile(Grammar("regex", "[ab]{3}"))
    assert isinstance(state, MatcherState)

    class Counting(Fragile):
        """A matcher that counts its masks, and those of its copies."""

        num_masks = 0

        def deep_copy(self) -> Counting:
            return Counting(self._real.deep_copy(), self._bad)

        def compute_bitmask(self) -> bytes:
            Counting.num_masks += 1
            return bytes(self._real.compute_bitmask())

    first = MatcherState(Counting(matcher_of(state), -1), NUM_IDS, frozenset({0, 1}))
    rows = [first.allowed([()])] + [first.fork().allowed([()]) for _ in range(3)]
    assert all(np.array_equal(row, state.allowed([()])) for row in rows)
    assert Counting.num_masks == 1
    a = int(np.flatnonzero(rows[0][0])[0])
    first.advance([a])
    assert np.array_equal(first.allowed([()]), state.allowed([[a]]))
    assert Counting.num_masks == 2


def test_a_candidate_that_is_too_costly_to_follow_does_no_harm_to_the_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    a, b = map(tokenizer.convert_tokens_to_ids, "ab")
    real = compiler.compile(Grammar("regex", "[ab]{3,4}"))
    assert isinstance(real, MatcherState)
    state = MatcherState(Fragile(matcher_of(real), b), NUM_IDS, frozenset({0, 1}))
    state.advance([a])
    with pytest.raises(TargetError, match=r"cannot be followed: too complex; use a simpler one"):
        state.allowed([(), [b]])
    assert np.flatnonzero(state.allowed([()])[0]).tolist() == np.flatnonzero(real.allowed([[a]])[0]).tolist()


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a":1}', True),
        ('{"a": [1, 2], "b": {}}', True),
        ('{\n  "a": 1\n}', True),
        ('{\n\t"a": 1,\n\t"b": 2\n}', True),
        ('{  "a": 1}', False),
        ('{\n\n"a": 1}', False),
        ("{\n" + " " * 21 + '"a": 1}', False),
        ("[1]", False),
        ('{"a":1} ', False),
    ],
)
def test_white_space_in_json_is_a_blank_or_an_indented_line(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, fits: bool
) -> None:
    path = [*tokenizer.encode(text), 0]
    assert permits(compiler.compile(Grammar("json_object")), [path]) == [fits]


@pytest.mark.parametrize(("is_flexible", "spaced_fits"), [(False, False), (True, True)])
def test_a_schema_may_ask_for_json_without_white_space(
    compiler: GrammarCompiler, tokenizer: Tokenizer, is_flexible: bool, spaced_fits: bool
) -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": is_flexible}}
    state = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    texts = ['{"a":[1,2]}', '{"a": [1, 2]}', '{"a":  [1,2]}']
    assert permits(state, [[*tokenizer.encode(text), 0] for text in texts]) == [True, spaced_fits, False]


# ---- what is forced --------------------------------------------------------------------------------------------------


def test_what_is_forced_is_what_every_text_goes_on_with(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(Grammar("regex", "the (cat|mat) sat on;(a|b)"))
    first = tokenizer.decode(state.forced(()))
    assert first and "the ".startswith(first)
    begun = tokenizer.encode("the c")
    assert tokenizer.decode(state.forced(begun)).startswith("at sat on")
    assert not list(state.forced(tokenizer.encode("the "))), "there is a choice"
    assert not list(state.forced(tokenizer.encode("no"))), "a path that the grammar forbids"
    for end in range(len(forced := state.forced(begun))):
        (row,) = state.allowed([[*begun, *forced[:end]]])
        assert np.flatnonzero(row).tolist() == [forced[end]], "the mask leaves no other choice"
    state.advance(begun)
    assert list(state.forced(())) == list(forced)
    state.advance([*tokenizer.encode("at sat on;a"), 0])
    assert not list(state.forced(())), "the text has ended"


# ---- whole requests -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llms(pair: Pair) -> Iterator[dict[str, LLM]]:
    target, draft = load_model(pair.target, dtype="float32"), load_model(pair.draft, dtype="float32")
    tokenizer = load_tokenizer(pair.target)
    tree = {"policy": "fixed", "verify": "tree", "min_verify_prob": 0.0, "budget": 8}
    made = {
        "vanilla": LLM(target, tokenizer=tokenizer, method="vanilla"),
        "inline": LLM(target, draft, tokenizer=tokenizer, placement="inline", writers=("beam", "suffix"), **tree),
        "thread": LLM(target, draft, tokenizer=tokenizer, placement="thread", **tree),
        "suffix": LLM(target, tokenizer=tokenizer, method="suffix"),
    }
    yield made
    for llm in made.values():
        llm.close()


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_that_end_are_of_the_grammar_and_speculation_changes_nothing(
    llms: dict[str, LLM], kind: str, temperature: float
) -> None:
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=120, grammar=GRAMMARS[kind])
        for seed in range(3 if temperature else 1)
    ]
    prompts = [PROMPT] * len(params)
    wanted = [result.outputs[0] for result in llms["vanilla"].generate(prompts, params)]
    ended = [output.text for output in wanted if output.finish_reason == "stop"]
    assert all(fits(kind, text) for text in ended)
    assert len(ended) >= (temperature > 0), "nothing was tested"
    for name in ("inline", "thread", "suffix"):
        results = llms[name].generate(prompts, params)
        assert [result.outputs[0] for result in results] == wanted
    free = params[-1].replace(grammar=None)
    assert not fits_at_all(kind, llms["vanilla"].generate(PROMPT, free)[0].outputs[0].text), "the model alone does not"


def fits_at_all(kind: str, text: str) -> bool:
    try:
        return fits(kind, text)
    except ValueError:
        return False


CALL = Grammar(
    "lark",
    'start: "{\\"name\\": \\"find\\", \\"arguments\\": " arguments "}"\n'
    f"arguments: %json {json.dumps({**PERSON, 'x-guidance': {'whitespace_flexible': False}})}",
)
THOUGHTS = Grammar("lark", 'start: lead ";the answer is " ("one" | "two")\nlead[max_tokens=5]: /[a-z ]*/')


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_tools_signature_forces_takes_few_passes_and_changes_no_text(pair: Pair, temperature: float) -> None:
    target, tokenizer = load_model(pair.target, dtype="float32"), load_tokenizer(pair.target)
    grammars = [CALL, THOUGHTS, None, SCHEMA, CALL]
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=120, grammar=grammar)
        for seed, grammar in enumerate(grammars)
    ]
    results = {}
    for writers in (None, ("grammar",)):
        with LLM(target, tokenizer=tokenizer, method="vanilla", writers=writers) as llm:
            results[writers] = llm.generate([PROMPT] * len(params), params)
    plain, forced = results.values()
    assert [one.outputs[0] for one in forced] == [one.outputs[0] for one in plain]
    call = plain[0].outputs[0]
    head = '{"name": "find", "arguments": {"name":"'
    assert call.text.startswith(head)
    num_head = len(tokenizer.encode(head))
    tokens_a_pass = len(call.token_ids) / forced[0].stats.target_passes
    assert tokens_a_pass > 2 * len(call.token_ids) / plain[0].stats.target_passes
    assert forced[0].stats.accepted_by_writer["grammar"] >= num_head - 2
    assert [one.stats.verified_tokens for one in plain] == [0] * len(params)
    assert forced[1].stats.accepted_by_writer["grammar"] >= len(tokenizer.encode(";the answer is")) - 2
    assert forced[2].stats.verified_tokens == 0, "a request without a grammar"


def test_any_object_is_an_object(llms: dict[str, LLM]) -> None:
    found = []
    for seed in range(12):
        params = SamplingParams(
            temperature=1.5, seed=seed, max_tokens=150, grammar=Grammar("json_object"), logit_bias={94: 9.0}
        )
        plain, speculated = (llms[name].generate(PROMPT, params)[0].outputs[0] for name in ("vanilla", "inline"))
        assert speculated == plain
        if plain.finish_reason == "stop":
            found.append(json.loads(plain.text))
    assert found
    assert all(isinstance(one, dict) for one in found)


def test_a_drafter_that_knows_the_grammar_proposes_nothing_that_it_forbids(llms: dict[str, LLM]) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=200, grammar=SCHEMA)
    llm = llms["inline"]
    masked = llm.generate(PROMPT, params)[0]
    writer = llm.host.link.worker.writer  # type: ignore[union-attr]
    find, writer.find_grammar = writer.find_grammar, None
    try:
        unmasked = llm.generate(PROMPT, params)[0]
    finally:
        writer.find_grammar = find
    assert masked.outputs == unmasked.outputs
    assert masked.stats.mean_acceptance_length > 1.2 * unmasked.stats.mean_acceptance_length


def test_a_drafter_in_another_process_compiles_the_grammar_itself(pair: Pair, llms: dict[str, LLM]) -> None:
    params = SamplingParams(temperature=0.7, seed=2, max_tokens=200, grammar=GRAMMARS["regex"])
    settings = {"placement": "process", "policy": "fixed", "max_wait_s": 20.0, "drafter_timeout_s": 90.0}
    with LLM(pair.target, pair.draft, dtype="float32", **settings) as llm:
        results = [llm.generate(PROMPT, params)[0] for _ in range(3)]
    wanted = llms["vanilla"].generate(PROMPT, params)[0].outputs
    assert [result.outputs for result in results] == [wanted] * 3
    assert sum(result.stats.drafter_passes for result in results) > 0


def test_a_text_that_copies_what_its_grammar_forbids_is_that_of_plain_decoding() -> None:
    sentence = r"es is [0-9]+\. The number of apples is [0-9]+\."
    params = SamplingParams(temperature=0.0, max_tokens=40, grammar=Grammar("regex", sentence))
    prompt, texts = "Tom has 3 apples and buys 4 more. The number of appl", []
    for method in ("vanilla", "suffix"):
        with LLM("demo-target", method=method, policy="fixed", dtype="float32") as llm:
            texts.append(llm.generate(prompt, params)[0].outputs[0].text)
    assert texts[0] == texts[1]
    assert re.fullmatch(sentence, texts[0])


# ---- what a schema holds --------------------------------------------------------------------------------------------


def _text_fits(tokenizer: Tokenizer, compiler: GrammarCompiler, schema: object, text: str) -> bool:
    ids = [*tokenizer.encode(text, add_special_tokens=False), 0]
    state = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    return all(permits(state, [ids]))


DATE, TIME, DATE_TIME = ({"type": "string", "format": name} for name in ("date", "time", "date-time"))
BELOW_ZERO = {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}
MAP = {"type": "object", "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (BELOW_ZERO, "-0"),
        (DATE, '"2023-02-29"'),
        (DATE, '"0000-01-01"'),
        (DATE_TIME, '"2023-02-29T10:00:00Z"'),
        (TIME, '"12:59:60Z"'),
        ({"type": "integer", "minimum": 2**53 + 1}, str(2**53)),
        (MAP, '{"a": 1, "a": 2}'),
    ],
    ids=str,
)
def test_the_library_lets_through_what_the_guide_says_and_a_better_one_shortens_the_guide(
    tokenizer: Tokenizer, compiler: GrammarCompiler, schema: object, text: str
) -> None:
    assert _text_fits(tokenizer, compiler, schema, text)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (BELOW_ZERO, ["-0.5", "-0.1"], ["0", "-0.51", "0.1"]),
        ({"type": "number", "exclusiveMaximum": 0}, ["-1", "-0.5"], ["-0", "-0.0", "0", "1"]),
        ({"type": "integer", "exclusiveMaximum": 0}, ["-1"], ["-0", "0"]),
        ({"type": "number", "minimum": 0.5, "maximum": 1.5}, ["0.5", "1", "1.5"], ["0.49", "1.51", "-1"]),
        ({"type": "integer", "minimum": 1.5}, ["2"], ["1"]),
        ({"type": "number", "multipleOf": 0.1}, ["0.3", "1.0"], ["0.25"]),
        ({"type": "integer", "multipleOf": 3}, ["-3", "0", "300"], ["4"]),
        ({"enum": [1, 1.0, True]}, ["1", "true"], ["2", "false"]),
        ({"const": 1.0}, ["1"], ["2"]),
        ({"type": "string", "pattern": "^a+$"}, ['"aa"'], ['"ab"', '""']),
        ({"type": "string", "pattern": "a"}, ['"bab"'], ['"b"']),
        ({"type": "string", "minLength": 2, "maxLength": 2}, ['"\U0001f600b"', '"\\n\\n"'], ['"a"', '"abc"']),
        (DATE, ['"2024-02-29"', '"2023-02-28"'], ['"2023-04-31"', '"2023-13-01"', '"2023-02-30"']),
        (DATE_TIME, ['"2023-02-28T10:00:00Z"'], ['"2023-02-28T24:00:00Z"', '"2023-02-28T10:00:00"']),
        ({"type": "string", "format": "ipv4"}, ['"1.2.3.4"'], ['"256.1.1.1"']),
        ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123e4567"']),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["1.5", "null"]),
    ],
    ids=str,
)
def test_a_schema_holds_values_at_its_edges(
    tokenizer: Tokenizer, compiler: GrammarCompiler, schema: object, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not _text_fits(tokenizer, compiler, schema, text)] == []
    assert [text for text in bad if _text_fits(tokenizer, compiler, schema, text)] == []


# ---- what cannot be used --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar("json_schema", '{"type":'), "the json_schema of grammar cannot be used: "),
        (Grammar("json_schema", "[]"), "Expecting object schema"),
        (Grammar("json_schema", '{"type": "objekt"}'), "Invalid type: objekt"),
        (Grammar("json_schema", '{"type": "array", "uniqueItems": true}'), "Unimplemented keys"),
        (
            Grammar("json_schema", '{"oneOf": [{"type": "integer", "maximum": 0}, {"type": "integer", "minimum": 9}]}'),
            "it is not known whether the alternatives of oneOf exclude each other; use anyOf",
        ),
        (Grammar("json_schema", '{"type": "string", "format": "iri"}'), "Unknown format: iri"),
        (Grammar("json_schema", '{"not": {"const": 1}}'), "Unimplemented keys"),
        (Grammar("json_schema", '{"type": "array", "contains": {"const": 1}}'), "Unimplemented keys"),
        (Grammar("json_schema", '{"if": {"const": 1}, "then": {"const": 1}}'), "Unimplemented keys"),
        (Grammar("json_schema", '{"type": "object", "propertyNames": {"pattern": "a"}}'), "Unimplemented keys"),
        (Grammar("json_schema", '{"type": "object", "dependentRequired": {"a": ["b"]}}'), "Unimplemented keys"),
        (Grammar("regex", "(ab"), "unclosed group"),
        (Grammar("lark", "start: foo"), 'unknown name: "foo"'),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_before_anything_runs(
    llms: dict[str, LLM], grammar: Grammar, said: str
) -> None:
    for name in ("vanilla", "inline"):
        with pytest.raises(SettingsError, match=re.escape(said)) as caught:
            llms[name].stream(PROMPT, SamplingParams(grammar=grammar))
        assert "\n" not in str(caught.value)
        assert str(caught.value).endswith("; correct it or leave grammar out")
        assert not llms[name].stats().num_running


def test_a_missing_library_is_named_with_how_to_get_it(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    bare = GrammarCompiler(tokenizer, len(tokenizer), (0,))
    said = f"llguidance, which is not installed; run {install_command('grammar')}"
    with pytest.raises(SettingsError, match=re.escape(said)):
        bare.compile(Grammar("json_object"))
    assert bare.find(Grammar("json_object")) is None


def test_a_tokenizer_or_a_model_that_has_no_grammar_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(SettingsError, match="needs a model with an end token"):
        GrammarCompiler(tokenizer, len(tokenizer), ()).compile(Grammar("json_object"))

    slow = as_tokenizer(ByT5Tokenizer())
    with pytest.raises(SettingsError, match=r"cannot use the tokenizer SlowTokenizer: .*fast tokenizer"):
        GrammarCompiler(slow, len(slow), (1,)).compile(Grammar("json_object"))


@pytest.mark.parametrize(
    ("grammar", "missing"),
    [
        (Grammar("json_object"), "{"),
        (Grammar("json_schema", '{"type": "array"}'), "["),
        (Grammar("regex", "[xy]"), "xy"),
    ],
)
def test_a_model_that_cannot_write_the_beginning_of_a_grammar_is_refused(grammar: Grammar, missing: str) -> None:
    for left_out, is_refused in (("", False), (missing, True)):
        alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(left_out))
        core = tokenizers.Tokenizer(models.BPE({"</s>": 0} | {char: idx for idx, char in enumerate(alphabet, 1)}, []))
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        tokenizer = Tokenizer(core, special_tokens={"eos_token": "</s>"})
        compiler = GrammarCompiler(tokenizer, len(tokenizer), (0,))
        if is_refused:
            with pytest.raises(SettingsError, match=r"of grammar cannot be used: .*no t"):
                compiler.compile(grammar)
        else:
            compiler.compile(grammar)


# ---- in the background ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("word")])
def test_blanks_are_blanks_to_a_grammar_however_a_tokenizer_marks_them(kind: str) -> None:
    tokenizer, text = KINDS[kind], '{"a b": "ab b"}'
    schema = Grammar("json_schema", '{"properties": {"a b": {"const": "ab b"}}, "required": ["a b"]}')
    end_id = tokenizer.convert_tokens_to_ids("</s>")
    for grammar, wanted in ((Grammar("regex", "ab b a"), "ab b a"), (schema, text)):
        state = GrammarCompiler(tokenizer, len(tokenizer), (end_id,)).compile(grammar)
        token_ids: list[int] = []
        for _ in wanted:
            allowed = state.allowed([()])[0]
            fitting = (
                idx for idx in np.flatnonzero(allowed) if wanted.startswith(_written(tokenizer, [*token_ids, idx]))
            )
            if allowed[end_id] or (token_id := next(fitting, None)) is None:
                break
            token_ids.append(int(token_id))
            state.advance(token_ids[-1:])
        assert _written(tokenizer, token_ids) == wanted and state.allowed([()])[0, end_id]


def _written(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    return tokenizer.decode([tokenizer.convert_tokens_to_ids("b"), *token_ids])[1:]


def test_a_drafter_goes_on_until_its_grammar_is_compiled(compiler: GrammarCompiler) -> None:
    may_compile = threading.Event()

    class Waiting:
        def find(self, grammar: Grammar) -> GrammarState | None:
            return compiler.find(grammar) if may_compile.is_set() else None

    grammars = BackgroundGrammars(Waiting)  # type: ignore[arg-type]
    assert grammars(SCHEMA) is None
    may_compile.set()
    deadline = time.monotonic() + 60
    while (state := grammars(SCHEMA)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    state.advance(random_walk(state, np.random.default_rng(0), 3))
    assert grammars(SCHEMA).allowed([()])[0].any(), "each caller gets a state of its own"  # type: ignore[union-attr]


def test_a_grammar_that_cannot_be_compiled_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> GrammarCompiler:
        raise SettingsError("no tokenizer here")

    grammars = BackgroundGrammars(make)
    assert grammars(SCHEMA) is None
    finish(grammars)
    assert grammars(SCHEMA) is None
    assert "no tokenizer here" in caplog.text


def test_what_failed_is_compiled_again_for_the_next_request_but_not_for_a_drafter_that_asks_in_each_round(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = GrammarCompiler(tokenizer, NUM_IDS, (0, 1))
    build, num_builds = compiler.build, 0

    def fail(grammar: Grammar, num_bytes: int) -> MatcherState:
        nonlocal num_builds
        num_builds += 1
        raise MemoryError("just now")

    monkeypatch.setattr(compiler, "build", fail)
    assert compiler.find(SCHEMA) is None
    with pytest.raises(MemoryError):
        compiler.begin(SCHEMA, retries=False).future.result(60)
    for _ in range(5):
        assert compiler.find(SCHEMA) is None
    assert num_builds == 1
    until(lambda: "just now" in caplog.text)
    assert caplog.text.count("drafting goes on without a grammar: just now") == 1
    monkeypatch.setattr(compiler, "build", build)
    assert compiler.compile(SCHEMA).allowed([()])[0].any()


# ---- several at once ------------------------------------------------------------------------------------------------


def test_a_known_grammar_is_there_at_once_while_another_one_is_compiled(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, is_free, is_begun, build = Grammar("regex", "slow"), threading.Event(), threading.Event(), compiler.build
    builds: list[Grammar] = []

    def hold(grammar: Grammar, num_bytes: int) -> MatcherState:
        builds.append(grammar)
        if grammar == slow:
            is_begun.set()
            assert is_free.wait(60)
        return build(grammar, num_bytes)

    compiler.compile(SCHEMA)
    monkeypatch.setattr(compiler, "build", hold)
    found: list[GrammarState] = []
    threads = [threading.Thread(target=lambda: found.append(compiler.compile(slow))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert is_begun.wait(60)
    compiler.compile(SCHEMA)
    compiler.compile(Grammar("regex", "quick"))
    assert not found
    is_free.set()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2 and found[0] is not found[1]
    assert builds.count(slow) == 1, "two who ask for one grammar share the work"


def test_what_a_library_says_in_a_panic_is_not_told() -> None:
    said = [first_line("panic: at x.rs\n<backtrace> 0: <unknown>"), first_line("a" * 10_000), first_line("no\nway")]
    assert said == ["it is more than the library can follow", "a" * 300 + "...", "no way"]
