"""Step-wise routing writes plain decoding's text with a knob of 0, and else what its router lets stay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from card import LLM, SamplingParams
from card.errors import SettingsError, VocabularyError
from card.steps import (
    Arbitrage,
    EntropyRouter,
    OracleRouter,
    RandomRouter,
    RewardRouter,
    Step,
    WrittenStep,
    equations_hold,
    parse_router,
)
from tests.pair import Pair

QUESTIONS = ["the cat sat", "one two three", "and the other"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
SAMPLED = GREEDY.replace(temperature=1.0, seed=4)


def plain(llm: LLM, params: SamplingParams) -> list[tuple[int, ...]]:
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    encoded = [llm.host.encode(prompt) for prompt in prompts]
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(encoded, params)]


@pytest.fixture(scope="module")
def delimiter(llms: tuple[LLM, LLM]) -> str:
    """A character that both models write often."""
    texts = [llms[0].host.tokenizer.decode(ids) for llm in llms for ids in plain(llm, GREEDY)]
    common = Counter(char for text in texts for char in text if char.isascii() and char.isprintable())
    return common.most_common(1)[0][0]


def longest(question: str, answer: str) -> float:
    return min(1.0, len(answer) / 100)


ROUTERS = {
    "entropy": EntropyRouter,
    "random": RandomRouter,
    "reward": lambda knob: RewardRouter(knob, longest),
    "oracle": lambda knob: OracleRouter(knob, longest),
}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("router", ROUTERS)
def test_a_knob_of_0_writes_the_text_of_plain_decoding_step_by_step(
    llms: tuple[LLM, LLM], delimiter: str, router: str, params: SamplingParams
) -> None:
    outputs = Arbitrage(*llms, ROUTERS[router](0.0), delimiter=delimiter).answer(QUESTIONS, params)
    assert [output.token_ids for output in outputs] == plain(llms[0], params)
    for output in outputs:
        assert output.exact and output.draft_tokens == 0 and output.target_tokens == len(output.token_ids)
        assert output.target_passes < output.target_tokens  # its method speculates inside its steps
        assert output.text == "".join(step.text for step in output.steps)
    assert max(len(output.steps) for output in outputs) > 1


def test_where_every_step_stays_the_draft_model_writes_alone(llms: tuple[LLM, LLM], delimiter: str) -> None:
    outputs = Arbitrage(*llms, RandomRouter(1.0), delimiter=delimiter).answer(QUESTIONS, GREEDY)
    assert [output.token_ids for output in outputs] == plain(llms[1], GREEDY)
    assert all(not output.exact and output.target_tokens == 0 for output in outputs)
    assert {step.writer for output in outputs for step in output.steps} == {"draft"}


MADE_ROUTERS = {
    "random": RandomRouter(0.5, seed=1),
    "entropy": EntropyRouter(1.5),
    "oracle": OracleRouter(1.0, longest),
}


@pytest.mark.parametrize("router", MADE_ROUTERS.values(), ids=MADE_ROUTERS)
def test_each_step_has_a_writer_and_every_result_says_that_it_is_not_exact(
    llms: tuple[LLM, LLM], delimiter: str, router: Any
) -> None:
    outputs = Arbitrage(*llms, router, delimiter=delimiter).answer(QUESTIONS, GREEDY)
    for output in outputs:
        assert not output.exact and len(output.token_ids) <= GREEDY.max_tokens
        kept = {
            writer: sum(len(s.token_ids) for s in output.steps if s.writer == writer) for writer in ("draft", "target")
        }
        assert output.draft_tokens >= kept["draft"] and output.target_tokens >= kept["target"]
        if router.needs_target:
            assert output.draft_tokens and output.target_tokens


def test_max_steps_breaks_an_answer_off(llms: tuple[LLM, LLM], delimiter: str) -> None:
    outputs = Arbitrage(*llms, RandomRouter(0.5), delimiter=delimiter, max_steps=1).answer(QUESTIONS, GREEDY)
    assert [len(output.steps) for output in outputs] == [1, 1, 1]
    assert {output.finish_reason for output in outputs} == {"length"}


def test_each_step_is_told_as_it_stands_with_its_question(llms: tuple[LLM, LLM], delimiter: str) -> None:
    told: list[list[WrittenStep]] = [[], [], []]
    stepped = Arbitrage(*llms, RandomRouter(0.5, seed=2), delimiter=delimiter)
    outputs = stepped.answer(QUESTIONS, GREEDY, lambda idx, step: told[idx].append(step))
    assert told == [list(output.steps) for output in outputs]


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_is_found_by_its_name_with_the_usual_knob_or_a_given_one(name: str) -> None:
    assert parse_router(name).knob > 0.0 and parse_router(f"{name}:0").knob == 0.0
    assert type(parse_router(name)) is type(ROUTERS[name](0.5))


def step(text: str = "3*4=12\n", before: str = "", entropy: float = 0.0) -> Step:
    return Step("How many?", before, text, entropy)


def test_each_router_keeps_what_its_rule_says() -> None:
    assert EntropyRouter(0.5).keeps(step(entropy=0.4), None) and not EntropyRouter(0.5).keeps(step(entropy=0.5), None)
    reward = RewardRouter(0.3, equations_hold)
    assert reward.keeps(step(), None) and not reward.keeps(step("3*4=13\n"), None)
    assert not RewardRouter(0.3, equations_hold).keeps(step("3*4=13\n", before="1+1=2\n"), None)
    oracle = OracleRouter(1.0, equations_hold)
    assert oracle.keeps(step("3*4=13\n"), step("3*4=14\n")) and oracle.keeps(step(), step("3*4=13\n"))
    assert not oracle.keeps(step("3*4=13\n"), step()) and OracleRouter(2.0, equations_hold).keeps(
        step("3*4=13\n"), step()
    )
    rates = RandomRouter(0.25, seed=3)
    assert 200 < sum(rates.keeps(step(), None) for _ in range(1000)) < 300


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("Anna has 25-3=<<25-3=22>>22 apples.", 1.0),
        ("<<3*4=12>>12 and <<12/5=2.4>>2.4, 7 - 5 = 3", 2 / 3),
        ("10/3=3.33", 1.0),
        ("1/0=0", 0.0),
        ("<<(1+2)*3=9>>9", 1.0),
        ("no equation", 1.0),
    ],
)
def test_equations_are_checked(answer: str, share: float) -> None:
    assert equations_hold("", answer) == pytest.approx(share)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda llms: EntropyRouter(-1.0), "the knob of a router must be 0 or more, got -1.0"),
        (lambda llms: RandomRouter(1.5), "the knob of a router must be from 0 to 1; 0 is exact, got 1.5"),
        (lambda llms: Arbitrage(*llms, RandomRouter(1.0), delimiter=""), "delimiter of steps must be a string"),
        (lambda llms: Arbitrage(*llms, RandomRouter(1.0), max_steps=0), "max_steps must be 1 or more, got 0"),
        (
            lambda llms: Arbitrage(*llms, RandomRouter(1.0)).answer(["x"], GREEDY.replace(repetition_penalty=1.1)),
            "repetition_penalty looks back to where an answer begins",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(llms: tuple[LLM, LLM], make: Any, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        make(llms)


def test_models_of_other_tokens_are_refused(llms: tuple[LLM, LLM], pair: Pair) -> None:
    with LLM(pair.foreign_draft) as foreign, pytest.raises(VocabularyError, match="have different tokens"):
        Arbitrage(llms[0], foreign, RandomRouter(1.0))
