"""A judge in a whole engine: exact with a knob of 0, said so everywhere with another one, absent unless it is named."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from card import LLM, AsyncLLM, SamplingParams
from card.errors import SettingsError
from card.family.judges.choosing import verifier_of
from card.family.judges.knobs import KNOBS
from card.tools.bench.lineup import LineupSettings
from card.tools.bench.row_names import BASELINE, names_of, needs_draft
from card.tree.verify import MATCH
from tests.pair import Pair
from tests.server.running import serving

PROMPTS = ["the cat sat", "one two three", "and the other"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = GREEDY.replace(temperature=1.0, seed=5)


def texts(pair: Pair, params: SamplingParams, **settings: Any) -> list[tuple[int, ...]]:
    """Return the tokens of all prompts in one batch, then of the first one alone."""
    with LLM(pair.target, pair.draft, dtype="float32", placement="inline", policy="fixed", **settings) as llm:
        outputs = [*llm.generate(PROMPTS, params), *llm.generate(PROMPTS[0], params)]
    assert all(output.exact == output.stats.is_exact for output in outputs)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def plain(pair: Pair) -> dict[str, list[tuple[int, ...]]]:
    with LLM(pair.target, dtype="float32", method="vanilla") as llm:
        return {
            name: [tuple(o.outputs[0].token_ids) for o in (*llm.generate(PROMPTS, p), *llm.generate(PROMPTS[0], p))]
            for name, p in (("greedy", GREEDY), ("sampled", SAMPLED))
        }


@pytest.mark.parametrize("method", ["sps", "card"])
@pytest.mark.parametrize("kind", KNOBS)
def test_a_knob_of_0_writes_the_text_of_plain_decoding(
    pair: Pair, plain: dict[str, list[tuple[int, ...]]], kind: str, method: str
) -> None:
    for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
        assert texts(pair, params, method=method, judge=f"{kind}:0") == plain[name]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_judge_keeps_more_and_every_result_says_that_it_is_not_exact(pair: Pair, params: SamplingParams) -> None:
    models = {"target": pair.target, "draft": pair.draft, "method": "sps", "dtype": "float32", "policy": "fixed"}
    with LLM(**models) as exact, LLM(**models, judge="typical:1e6") as lenient:
        ours, theirs = exact.generate(PROMPTS, params), lenient.generate(PROMPTS, params)
        last = list(lenient.stream(PROMPTS[0], params))[-1]
    assert not lenient.is_exact and not last.stats.is_exact
    for strict, loose in zip(ours, theirs, strict=True):
        assert strict.exact and not loose.exact and not loose.stats.as_dict()["is_exact"]
        assert loose.stats.lenient_tokens > 0
        assert loose.stats.mean_acceptance_length > strict.stats.mean_acceptance_length


def test_answers_of_a_server_with_a_judge_say_that_they_are_not_exact(pair: Pair) -> None:
    llm = AsyncLLM(pair.target, pair.draft, method="sps", placement="thread", policy="fixed", judge="typical")
    with serving(llm) as server:
        answer = server.complete(prompt=PROMPTS[0], max_tokens=4)
        assert answer["exact"] is False
    asyncio.run(llm.shutdown())


def test_without_a_judge_an_engine_has_the_exact_verifier_and_its_passes_keep_no_states(pair: Pair) -> None:
    with LLM(pair.target, pair.draft, method="sps") as llm:
        assert llm.is_exact and llm.host.plan.verifier is MATCH
        assert not llm.host.runner.features.layers


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"judge": "fair"}, "unknown judge 'fair'; known: typical, relaxed, kl, fly"),
        ({"judge": "relaxed:2"}, "the knob of judge relaxed must be a number from 0 to 1, got '2'; 0 is exact"),
        ({"judge": "typical:much"}, "the knob of judge typical must be a number from 0 to 1e"),
        ({"judge": "kl:nan"}, "the knob of judge kl must be a number"),
        ({"judge": "relaxed:"}, "the knob of judge relaxed must be a number"),
        ({"judge": "fly", "method": "vanilla"}, "judge fly has nothing to judge: method vanilla has no candidates"),
        (
            {"judge": "fly", "verifier": verifier_of("relaxed:0")},
            "judge fly and a verifier of your own both decide what stays",
        ),
    ],
)
def test_a_judge_that_cannot_be_is_refused_before_anything_is_loaded(settings: dict[str, Any], reason: str) -> None:
    models = ("/nowhere/target", "/nowhere/draft")[: 1 if "method" in settings else 2]
    with pytest.raises(SettingsError, match=reason):
        LLM(*models, **{"method": "sps", **settings})


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_a_judge_of_another_kind_is_refused_by_its_name(kind: Any) -> None:
    with pytest.raises(SettingsError, match="judge must be a string or None, got 3"):
        kind("demo-target", judge=3)


def test_a_row_of_the_benchmark_may_have_a_judge_and_says_that_it_is_not_exact() -> None:
    rows = names_of(["sps/relaxed:0.5", "card/fly:0"])
    assert rows == [BASELINE, "sps/relaxed:0.5", "card/fly:0"] and needs_draft("sps/relaxed:0.5")
    settings = LineupSettings(params=GREEDY.resolved(), cores=(0, 1))
    facts = settings.facts_of("sps/relaxed:0.5")
    assert not facts.is_exact and facts.settings["judge"] == "relaxed:0.5"
    assert settings.facts_of("card/fly:0").is_exact


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("vanilla/fly", "'vanilla' has no candidates to judge; rows that have: sps, "),
        ("magic/fly", "'magic' has no candidates to judge"),
        ("sps/fair", "unknown judge 'fair'"),
    ],
)
def test_a_row_with_a_judge_that_cannot_be_is_refused(row: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        names_of([row])
