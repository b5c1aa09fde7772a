"""H-RAD: its inputs are transformers' own hidden states, its data are true, and it learns what can be learnt."""

from __future__ import annotations

import copy
import itertools
import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain as chain_of
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import card
from card.api.llm import LLM
from card.backends.transformers.arrays import as_array, as_tensor
from card.backends.transformers.loading import load_model
from card.config import DraftSettings, EngineSettings, SamplingParams
from card.errors import ModelError, PromptError
from card.family.learning import target_texts
from card.family.specbranch.network import (
    ALL_ACCEPTED,
    ALL_REJECTED,
    UNDECIDED,
    Evidence,
    HRad,
    HRadFacts,
    hrad_consumers,
    log_odds,
    target_facts,
)
from card.family.specbranch.record import HRadSettings
from card.family.specbranch.rounds import RoundCollector, Rounds
from card.family.specbranch.train_hrad import HRadTrainSettings, TokenOutcomes, calibrated, evidence_of, train_hrad
from card.models.demo import SAMPLE_PROBLEMS
from card.models.facts import end_token_ids
from card.models.features import FeatureWish, SeenRows
from card.models.loading import load_tokenizer
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from card.text.prompts import encode_chat
from card.tree.sampling import CHOICE_SHARPNESS
from tests.examples import settings
from tests.hidden_states import CHAIN, VOCAB_SIZE, assert_same, chain, make_model, make_runner, own_features

NUM_LAYERS = 3
END_ID = 7


# ---- the predictor --------------------------------------------------------------------------------------------------


def facts_of(runner: RowRunner) -> HRadFacts:
    return target_facts(runner, num_layers=NUM_LAYERS, draft="tiny", num_speculative_tokens=4)


SOME_EVIDENCE = Evidence(weight=0.5, mean=0.25)


def network(
    facts: HRadFacts,
    layers: Sequence[tuple[Tensor, Tensor]],
    mean: Tensor,
    std: Tensor,
    evidence: Evidence = SOME_EVIDENCE,
) -> HRad:
    pairs = [(as_array(weight), as_array(bias)) for weight, bias in layers]
    return HRad(facts, pairs, as_array(mean), as_array(std), evidence)


def chances_of(hrad: HRad, inputs: Tensor) -> Tensor:
    return as_tensor(hrad.probabilities(as_array(inputs)))


def odds_of(chances: Tensor) -> Tensor:
    return torch.as_tensor(log_odds(as_array(chances)))


def random_hrad(facts: HRadFacts, seed: int = 0, evidence: Evidence = SOME_EVIDENCE) -> HRad:
    generator = torch.Generator().manual_seed(seed)
    widths = (facts.num_inputs, 16, 8, 3)
    layers = [
        (2 * torch.randn((out, into), generator=generator) / into**0.5, torch.zeros(out))
        for into, out in itertools.pairwise(widths)
    ]
    mean = 0.1 * torch.randn(facts.num_inputs, generator=generator)
    return network(facts, layers, mean, 0.5 + torch.rand(facts.num_inputs, generator=generator), evidence)


def logit(prob: float) -> float:
    return math.log(prob / (1 - prob))


def test_chances_are_the_softmax_of_scores_for_standardised_inputs() -> None:
    facts = replace(facts_of(make_runner("own pass")), num_layers=1, hidden_size=2)
    mean, std = torch.tensor([10.0, 0.0, 0.0, -5.0]), torch.tensor([2.0, 1.0, 1.0, 0.5])
    weight = torch.zeros(3, 4)
    weight[0, 0], weight[2, 3] = 1.0, 1.0  # scores: (x0 - 10) / 2, a half, 2 (x3 + 5)
    hrad = network(facts, [(weight, torch.tensor([0.0, 0.5, 0.0]))], mean, std)
    inputs = torch.tensor([[12.0, 9.0, 9.0, -5.0], [10.5, 9.0, 9.0, -4.5]])
    expected = torch.tensor([[1.0, 0.5, 0.0], [0.25, 0.5, 1.0]]).softmax(-1)
    assert_same(chances_of(hrad, inputs), expected)
    assert_same(chances_of(hrad, inputs[1]), expected[1])
    assert_same(odds_of(expected), torch.tensor([-1.0, 0.75]))
    assert odds_of(torch.tensor([1.0, 0.0, 0.0])) == pytest.approx(math.log(1e-4)), "nothing is ruled out"


@settings(max_examples=50)
@given(
    row=st.integers(0, 11),
    token_id=st.integers(0, 60),
    usual=st.floats(0.01, 0.99),
    weight=st.floats(0.0, 2.0),
    mean=st.floats(-3.0, 3.0),
)
def test_the_branch_point_moves_by_the_predicted_odds_beyond_their_mean(
    row: int, token_id: int, usual: float, weight: float, mean: float
) -> None:
    runner = make_runner("own pass")
    hrad = random_hrad(facts_of(runner), evidence=Evidence(weight, mean))
    hrad.attach(runner, usual)
    features = own_features(CHAIN, NUM_LAYERS)[row]
    chances = chances_of(hrad, torch.cat((features, as_tensor(runner.embeddings([token_id])[0])))).tolist()
    predicted = math.log(max(chances[ALL_ACCEPTED], 1e-4) / max(chances[ALL_REJECTED], 1e-4))
    expected = logit(usual) - weight * (predicted - mean)
    assert logit(hrad.branch_below(as_array(features), token_id)) == pytest.approx(expected, abs=1e-3)
    for fixed in (0.0, 1.0):
        hrad.attach(runner, fixed)
        assert hrad.branch_below(as_array(features), token_id) == fixed


def test_what_weighs_nothing_leaves_the_drafters_confidence_alone() -> None:
    runner = make_runner("own pass")
    hrad = random_hrad(facts_of(runner), evidence=Evidence())
    hrad.attach(runner, 0.625)
    assert hrad.branch_below(as_array(own_features(CHAIN, NUM_LAYERS)[3]), 5) == pytest.approx(0.625)


def test_a_predictor_that_is_obeyed_branches_at_once_as_usual_or_nowhere_by_the_likeliest_outcome(
    tmp_path: Path,
) -> None:
    runner = make_runner("own pass")
    path = tmp_path / "hrad.safetensors"
    random_hrad(facts_of(runner), seed=2, evidence=Evidence()).save(path)
    usual = DraftSettings(branch_below=0.625)
    (obeyed,) = hrad_consumers(EngineSettings(own={"hrad": f"obey:{path}"}), runner, usual)
    wanted, told = [], []
    for idx, features in enumerate(own_features(CHAIN, NUM_LAYERS)):
        for token_id in range(20):
            embedding = as_tensor(runner.embeddings([token_id])[0])
            outcome = int(chances_of(HRad.load(path), torch.cat((features, embedding))).argmax())
            wanted.append({ALL_REJECTED: 1.0, UNDECIDED: 0.625, ALL_ACCEPTED: 0.0}[outcome])
            row = as_array(features[None])
            told.append(obeyed.observe(SeenRows(0, (*CHAIN[:idx], token_id), idx, row, has_drafter=True)))
    assert told == wanted and set(told) == {0.0, 0.625, 1.0}
    assert hrad_consumers(EngineSettings(own={"hrad": str(path)}), runner, usual) == [], "as evidence it weighs nothing"


def test_a_saved_predictor_is_the_same_one(tmp_path: Path) -> None:
    hrad = random_hrad(facts_of(make_runner("own pass")))
    hrad.save(tmp_path / "one.safetensors", {"test_accuracy": "0.5"})
    loaded = HRad.load(tmp_path / "one.safetensors")
    assert (loaded.facts, loaded.evidence) == (hrad.facts, hrad.evidence)
    with safe_open(str(tmp_path / "one.safetensors"), "pt") as file:
        assert file.metadata()["test_accuracy"] == "0.5"
    inputs = torch.randn((200, hrad.facts.num_inputs), generator=torch.Generator().manual_seed(1))
    chances = chances_of(hrad, inputs)
    assert len(set(chances.argmax(-1).tolist())) == 3
    assert torch.equal(chances_of(loaded, inputs), chances)
    assert all(
        np.array_equal(*pair)
        for layers in zip(loaded.layers, hrad.layers, strict=True)
        for pair in zip(*layers, strict=True)
    )
    assert load_file(tmp_path / "one.safetensors")["0.weight"].dtype == torch.float16


@pytest.mark.parametrize("kind", ["own pass", "generic", "inflated", "inflated twice"])
def test_a_predictor_of_the_plain_target_fits_the_inflated_one(kind: str, tmp_path: Path) -> None:
    plain = make_runner("own pass")
    random_hrad(facts_of(plain)).save(tmp_path / "hrad.safetensors")
    runner = make_runner(kind)
    hrad = HRad.load(tmp_path / "hrad.safetensors")
    hrad.attach(runner, 0.5)
    runner.features.wish([hrad.wish])
    runner.forward([chain(runner.open(), CHAIN)])
    found, expected = [], []
    for row, own in zip(runner.features.of(0, hrad.wish), own_features(CHAIN, NUM_LAYERS), strict=True):
        for token_id in range(5):
            found.append(logit(hrad.branch_below(row, token_id)))
            predicted = float(odds_of(chances_of(hrad, torch.cat((own, as_tensor(plain.embeddings([token_id])[0]))))))
            expected.append(-hrad.evidence.weight * (predicted - hrad.evidence.mean))
    assert found == pytest.approx(expected, abs=1e-3)
    assert max(found) - min(found) > 0.1


def test_a_predictor_of_another_target_is_refused(tmp_path: Path) -> None:
    runner = make_runner("own pass")
    facts = facts_of(runner)
    changes = {"num_parameters": (5, "5 parameters"), "vocab_size": (60, "60 tokens"), "hidden_size": (31, "width 31")}
    for name, (value, said) in changes.items():
        path = tmp_path / f"{name}.safetensors"
        random_hrad(replace(facts, **{name: value})).save(path)
        with pytest.raises(ModelError, match=rf"trained for another target: its .* {said}, this one .*card train hrad"):
            HRad.load(path).attach(runner, 0.7)
    random_hrad(replace(facts, num_layers=5)).save(tmp_path / "deep.safetensors")
    with pytest.raises(ModelError, match="the last 1 to 4 layers of this model, got 5"):
        HRad.load(tmp_path / "deep.safetensors").attach(runner, 0.7)


def test_the_engine_is_told_where_to_branch_by_a_predictor_that_was_asked_for(tmp_path: Path) -> None:
    assert EngineSettings().of(HRadSettings).hrad == "off"
    runner = make_runner("own pass")
    hrad = random_hrad(facts_of(runner))
    hrad.save(tmp_path / "hrad.safetensors")
    assert hrad_consumers(EngineSettings(own={"hrad": "off"}), runner, DraftSettings(branch_below=0.7)) == []
    (consumer,) = hrad_consumers(
        EngineSettings(own={"hrad": str(tmp_path / "hrad.safetensors")}), runner, DraftSettings(branch_below=0.7)
    )
    assert consumer.wish == FeatureWish((-3, -2, -1), "last")
    features = own_features(CHAIN, NUM_LAYERS)[3:4]
    seen = SeenRows(request_id=7, token_ids=(*CHAIN[:4], 5), first=3, features=features, has_drafter=True)
    hrad.attach(runner, 0.7)
    assert consumer.observe(seen) == hrad.branch_below(features[0], 5)
    assert consumer.observe(replace(seen, has_drafter=False)) is None
    random_hrad(facts_of(runner), evidence=Evidence()).save(tmp_path / "deaf.safetensors")
    assert (
        hrad_consumers(
            EngineSettings(own={"hrad": str(tmp_path / "deaf.safetensors")}), runner, DraftSettings(branch_below=0.7)
        )
        == []
    ), "it never moves the branch point"


def test_what_is_no_predictor_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    with pytest.raises(ModelError, match=r"there is no file .*train a predictor with card train hrad, or name demo"):
        HRad.load(path)
    path.write_bytes(b"not a tensor in sight")
    with pytest.raises(ModelError, match="is cut off or damaged"):
        HRad.load(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ModelError, match="is no predictor"):
        HRad.load(path)
    random_hrad(facts_of(make_runner("own pass"))).save(path)
    tensors = load_file(path)
    metadata = {"format": "card-hrad-2", "num_layers": "3", "hidden_size": "32", "vocab_size": "61"}
    save_file(tensors, path, metadata)
    with pytest.raises(ModelError, match="is damaged"):
        HRad.load(path)
    with pytest.raises(ModelError, match="cannot be written to"):
        random_hrad(facts_of(make_runner("own pass"))).save(tmp_path / "nowhere" / "file.safetensors")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("evidence_weight", "nan", "weight=nan"),
        ("evidence_weight", "-1", "weight=-1"),
        ("evidence_mean", "inf", "mean=inf"),
        ("std", torch.zeros(128), "deviation, 0, is out of range"),
        ("mean", torch.full((128,), math.nan), "its mean has NaN or infinity"),
        ("0.bias", torch.zeros(16, 1), "no network from 128 inputs to 3 scores"),
    ],
)
def test_a_predictor_with_numbers_that_make_no_sense_is_refused(
    name: str, value: str | Tensor, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.safetensors"
    random_hrad(facts_of(make_runner("own pass"))).save(path)
    with safe_open(path, "pt") as file:
        facts, tensors = file.metadata(), load_file(path)
    if isinstance(value, str):
        facts[name] = value
    else:
        tensors[name] = value
    save_file(tensors, path, facts)
    with pytest.raises(ModelError, match=f"file.safetensors is damaged: .*{reason}"):
        HRad.load(path)


def test_evidence_of_any_size_moves_the_branch_point_and_fails_no_pass() -> None:
    runner = make_runner("own pass")
    hrad = random_hrad(facts_of(runner), evidence=Evidence(weight=1e6))
    hrad.attach(runner, 0.7)
    assert hrad.branch_below(own_features(CHAIN, NUM_LAYERS)[3], 5) in (0.0, 1.0)


def test_layers_that_do_not_fit_are_refused() -> None:
    facts = facts_of(make_runner("own pass"))
    ones = torch.ones(facts.num_inputs)
    with pytest.raises(ModelError, match="no network from 128 inputs to 3 scores"):
        network(facts, [(torch.zeros(3, 127), torch.zeros(3))], ones, ones)
    with pytest.raises(ModelError, match="no network from 128 inputs to 3 scores"):
        network(facts, [(torch.zeros(4, 128), torch.zeros(4))], ones, ones)


# ---- rounds ---------------------------------------------------------------------------------------------------------


def next_id(model: PreTrainedModel, ids: Sequence[int]) -> int:
    with torch.no_grad():
        return int(model(torch.tensor([list(ids)])).logits[0, -1].argmax())


def confidence(model: PreTrainedModel, ids: Sequence[int]) -> float:
    """Return the probability of the likeliest token as a drafter scores it."""
    with torch.no_grad():
        return float((model(torch.tensor([list(ids)])).logits[0, -1] * CHOICE_SHARPNESS).softmax(-1).max())


def plain_rounds(
    target: PreTrainedModel, draft: PreTrainedModel, prompt: Sequence[int], count: int, max_tokens: int, longest: int
) -> list[tuple[Tensor, int, int, list[float]]]:
    """Return features, newest token, number of accepted tokens and confidences of each round, by transformers."""
    text = [*prompt, next_id(target, prompt)]
    rounds = []
    while len(text) - len(prompt) < max_tokens and END_ID not in text[len(prompt) :] and len(text) <= longest:
        drafted: list[int] = []
        confidences: list[float] = []
        for _ in range(count):
            confidences.append(confidence(draft, [*text, *drafted]))
            drafted.append(next_id(draft, [*text, *drafted]))
        accepted: list[int] = []
        while len(accepted) < count and next_id(target, [*text, *accepted]) == drafted[len(accepted)]:
            accepted.append(drafted[len(accepted)])
        if END_ID not in accepted:
            rounds.append((own_features(text[:-1], NUM_LAYERS, target)[-1], text[-1], len(accepted), confidences))
        text += [*accepted, next_id(target, [*text, *accepted])]
    return rounds


@settings(max_examples=5)
@given(seed=st.integers(0, 2**31), num_prompts=st.integers(1, 4), count=st.integers(1, 4))
def test_rounds_are_those_of_plain_speculation_whatever_shares_their_batch(
    seed: int, num_prompts: int, count: int
) -> None:
    chance = random.Random(seed)
    target, draft = make_model(seed=seed % 5), make_model(seed=seed % 5, noise=0.15)
    prompts = [[chance.randrange(8, VOCAB_SIZE) for _ in range(chance.randint(1, 9))] for _ in range(num_prompts)]
    runners = [plain_runner(copy.deepcopy(model), max_model_len=32) for model in (target, draft)]
    collector = RoundCollector(
        runners[0],
        runners[1],
        num_layers=NUM_LAYERS,
        num_speculative_tokens=count,
        max_tokens=14,
        end_ids=frozenset({END_ID}),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_texts, "BATCH", 2)  # so that texts join others that run already
        answers: list[int] = []
        rounds = collector.collect(prompts, lambda: answers.append(1))
    assert len(answers) == num_prompts
    for i, prompt in enumerate(prompts):
        expected = plain_rounds(target, draft, prompt, count, 14, collector.max_prompt_tokens)
        got = rounds.of_prompts(torch.tensor([i]))
        assert got.num_accepted.tolist() == [num_accepted for _, _, num_accepted, _ in expected]
        assert got.num_drafted == count
        for found, (_, _, num_accepted, confidences) in zip(got.confidences, expected, strict=True):
            assert_same(found[: num_accepted + 1], torch.tensor(confidences)[: num_accepted + 1])
        embeddings = target.get_input_embeddings().weight
        for row, (features, token_id, _, _) in zip(got.inputs, expected, strict=True):
            assert_same(row, torch.cat((features, embeddings[token_id])))


def test_the_class_of_a_round_says_whether_none_some_or_all_of_its_tokens_were_accepted() -> None:
    rounds = Rounds(torch.zeros(4, 2), torch.tensor([0, 1, 2, 3]), torch.full((4, 3), 0.5), torch.zeros(4).long())
    assert rounds.labels.tolist() == [ALL_REJECTED, UNDECIDED, UNDECIDED, ALL_ACCEPTED]


# ---- training -------------------------------------------------------------------------------------------------------

TOY_FACTS = HRadFacts(
    num_layers=2, hidden_size=8, vocab_size=9, num_parameters=1, draft="toy", num_speculative_tokens=4
)


def rounds_of(inputs: Tensor, labels: Tensor) -> Rounds:
    """Return rounds of four tokens with these outcomes, twenty of each prompt, in which the drafter is never sure."""
    num_accepted = torch.tensor([0, 2, 4])[labels]
    return Rounds(inputs, num_accepted, torch.full((len(labels), 4), 0.5), torch.arange(len(labels)) // 20)


def separable_rounds(num_prompts: int, seed: int) -> Rounds:
    """Return rounds whose class shows in the sign of two inputs, on scales that differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    count = 20 * num_prompts
    labels = torch.randint(0, 4, (count,), generator=generator).clamp_max(2)  # the last class is the commonest
    inputs = torch.randn((count, TOY_FACTS.num_inputs), generator=generator)
    inputs[:, 0] = torch.where(labels == 0, -1.0, 1.0) + 0.1 * inputs[:, 0]
    inputs[:, 1] = torch.where(labels == 2, 1.0, -1.0) + 0.1 * inputs[:, 1]
    inputs[:, 0] = 1000 + 200 * inputs[:, 0]
    inputs[:, 1] = 0.02 * inputs[:, 1]
    return rounds_of(inputs, labels)


def test_it_learns_a_separable_problem_better_than_always_naming_the_commonest_class() -> None:
    epochs: list[int] = []
    settings = HRadTrainSettings(epochs=20, batch_size=32)
    trained = train_hrad(separable_rounds(60, 0), TOY_FACTS, settings, on_epoch=lambda: epochs.append(1))
    assert trained.num_test_rounds == 120
    assert trained.num_train_rounds == 960
    assert trained.majority_share < 0.65
    assert trained.accuracy > 0.95
    assert trained.balanced_accuracy > 0.95
    assert 1 <= trained.num_epochs <= len(epochs) <= 20
    fresh = separable_rounds(10, 1)
    assert (chances_of(trained.hrad, fresh.inputs).argmax(-1) == fresh.labels).float().mean() > 0.95
    assert trained.hrad.evidence.weight > 0
    assert trained.predicted_loss < 0.7 * trained.confidence_loss, "the drafter knew nothing, the predictor does"
    figures = trained.figures()
    assert figures["test_rounds"] == "120"
    assert [float(share) for share in figures["test_recalls"].split()] == pytest.approx(trained.recalls, abs=1e-4)


def test_training_is_a_function_of_its_seed_and_leaves_the_global_one_alone() -> None:
    rounds = separable_rounds(20, 0)
    before = torch.get_rng_state()
    inputs = torch.randn((50, TOY_FACTS.num_inputs), generator=torch.Generator().manual_seed(2))
    results = [train_hrad(rounds, TOY_FACTS, HRadTrainSettings(epochs=3, seed=seed)) for seed in (4, 4, 5)]
    weights = [one.hrad.layers[0][0] for one in results]
    assert np.array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])
    assert torch.equal(chances_of(results[0].hrad, inputs), chances_of(results[1].hrad, inputs))
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_is_given_up_on_early() -> None:
    rounds = separable_rounds(30, 0)
    shuffled = rounds.num_accepted[torch.randperm(len(rounds), generator=torch.Generator().manual_seed(0))]
    epochs: list[int] = []
    settings = HRadTrainSettings(epochs=50, patience=3, batch_size=32)
    trained = train_hrad(replace(rounds, num_accepted=shuffled), TOY_FACTS, settings, on_epoch=lambda: epochs.append(1))
    assert len(epochs) == trained.num_epochs + 3 < 50
    assert trained.hrad.evidence.weight < 0.2


def hardly_separable_rounds(count: int, seed: int) -> Rounds:
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(count, generator=generator) < 0.8).long() * 2
    inputs = torch.randn((count, TOY_FACTS.num_inputs), generator=generator)
    inputs[:, 0] += 0.4 * labels
    return rounds_of(inputs, labels)


@pytest.mark.parametrize("balance", [0.0, 1.0])
def test_chances_are_true_however_the_classes_were_weighed(balance: float) -> None:
    rounds, fresh = hardly_separable_rounds(4000, 0), hardly_separable_rounds(4000, 1)
    trained = train_hrad(
        rounds, TOY_FACTS, HRadTrainSettings(epochs=4, batch_size=32, balance=balance), test_rounds=fresh
    )
    chances = chances_of(trained.hrad, fresh.inputs)[:, ALL_REJECTED]
    was = (fresh.labels == ALL_REJECTED).float()
    assert float(chances.mean()) == pytest.approx(float(was.mean()), abs=0.05)
    lowest, *_, highest = chances.argsort().chunk(4)
    assert was[lowest].mean() + 0.1 < was[highest].mean()


# ---- what it is worth -----------------------------------------------------------------------------------------------


def test_calibration_undoes_scores_that_are_too_sure_and_classes_that_were_moved() -> None:
    generator = torch.Generator().manual_seed(3)
    true_scores = torch.randn((20000, 3), generator=generator)
    labels = torch.multinomial(true_scores.softmax(-1), 1, generator=generator)[:, 0]
    distorted = 3.0 * true_scores + torch.tensor([0.0, 2.0, -1.0])
    (weight, bias), *rest = calibrated([(torch.eye(3), torch.tensor([0.0, 2.0, -1.0]))], distorted, labels)
    assert not rest
    mended = (distorted - torch.tensor([0.0, 2.0, -1.0])) @ weight.T + bias
    torch.testing.assert_close(mended.softmax(-1), true_scores.softmax(-1), atol=0.03, rtol=0)


def drafted_rounds(own: float, predicted: float, seed: int, count: int = 6000) -> tuple[Rounds, Tensor]:
    """Return rounds of three tokens, and log odds: acceptance follows the drafter's and these with such weights."""
    generator = torch.Generator().manual_seed(seed)
    confidence_odds = 1.5 * torch.randn((count, 3), generator=generator)
    predicted_odds = 2.0 * torch.randn(count, generator=generator)
    chances = (own * confidence_odds + predicted * predicted_odds[:, None]).sigmoid()
    accepted = torch.rand((count, 3), generator=generator) < chances
    num_accepted = accepted.long().cumprod(-1).sum(-1)
    rounds = Rounds(torch.zeros(count, 1), num_accepted, confidence_odds.sigmoid(), torch.zeros(count).long())
    return rounds, predicted_odds


@pytest.mark.parametrize(("own", "predicted"), [(1.0, 0.5), (1.5, 0.3), (0.5, 0.5)])
def test_evidence_weighs_as_much_beside_the_drafters_confidence_as_it_tells(own: float, predicted: float) -> None:
    evidence = evidence_of(TokenOutcomes(*drafted_rounds(own, predicted, 0)), 0.25)
    assert evidence.mean == 0.25
    assert evidence.weight == pytest.approx(predicted / own, rel=0.2)


@pytest.mark.parametrize("predicted", [0.0, -0.5])
def test_evidence_that_tells_nothing_or_the_contrary_weighs_nothing(predicted: float) -> None:
    weights = [evidence_of(TokenOutcomes(*drafted_rounds(1.0, predicted, seed)), 0.0).weight for seed in range(6)]
    assert sorted(weights)[:5] == [0.0] * 5, "chance deceives once in twenty"


def test_no_token_behind_a_rejected_one_counts() -> None:
    confidences = torch.tensor([[0.5, 0.9, 0.9], [0.5, 0.5, 0.9]])
    rounds = Rounds(torch.zeros(2, 1), torch.tensor([0, 3]), confidences, torch.zeros(2).long())
    tokens = TokenOutcomes(rounds, torch.zeros(2))
    assert len(tokens) == 4
    loss = tokens.loss(torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    assert loss == pytest.approx(-(3 * math.log(0.5) + math.log(0.9)) / 4)


def test_rounds_to_judge_by_may_be_given_and_too_few_prompts_are_refused() -> None:
    rounds, test_rounds = separable_rounds(10, 0), separable_rounds(3, 1)
    trained = train_hrad(rounds, TOY_FACTS, HRadTrainSettings(epochs=1), test_rounds=test_rounds)
    assert (trained.num_test_rounds, trained.num_train_rounds) == (60, 180)
    two = rounds.of_prompts(torch.tensor([0, 1]))
    train_hrad(two, TOY_FACTS, HRadTrainSettings(epochs=1), test_rounds=test_rounds)
    with pytest.raises(PromptError, match="2 prompts have answers long enough to learn from; give at least 3"):
        train_hrad(two, TOY_FACTS, HRadTrainSettings(epochs=1))
    empty = test_rounds.of_prompts(torch.tensor([99]))
    with pytest.raises(PromptError, match="and 0 rounds to judge by"):
        train_hrad(rounds, TOY_FACTS, HRadTrainSettings(epochs=1), test_rounds=empty)


# ---- the one that is shipped ----------------------------------------------------------------------------------------


def test_the_shipped_predictor_predicts_the_demo_pairs_rounds() -> None:
    models = [load_model(name, dtype="float32") for name in ("demo-target", "demo-draft")]
    tokenizer = load_tokenizer("demo-target")
    target, draft = (plain_runner(model, max_model_len=512) for model in models)
    hrad = HRad.load("demo")
    hrad.attach(target, 0.7)
    assert hrad.facts.draft == "demo-draft"
    collector = RoundCollector(
        target,
        draft,
        num_layers=hrad.facts.num_layers,
        num_speculative_tokens=hrad.facts.num_speculative_tokens,
        max_tokens=128,
        end_ids=end_token_ids(models[0], tokenizer),
    )
    prompts = [encode_chat(tokenizer, [{"role": "user", "content": problem}]) for problem in SAMPLE_PROBLEMS]
    rounds = collector.collect(prompts)
    chances = chances_of(hrad, rounds.inputs.float())
    assert len(rounds) > 200
    for outcome, least in ((ALL_REJECTED, 1.5), (UNDECIDED, 1.2), (ALL_ACCEPTED, 1.15)):
        was, likeliest = (rounds.labels == outcome).float(), chances[:, outcome].topk(len(rounds) // 4).indices
        assert was[likeliest].mean() > least * was.mean(), f"predicting {outcome} says something"
        assert float(chances[:, outcome].mean()) == pytest.approx(float(was.mean()), abs=0.08)


def test_the_rest_of_the_house_does_not_know_it() -> None:
    package = Path(card.__file__).parent
    naming = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path.parent.name != "specbranch" and re.search(r"\bh-?rad\b", path.read_text("utf-8"), re.IGNORECASE)
    }
    assert not naming


def test_the_demo_pair_branches_by_its_predictor_and_writes_the_text_of_plain_decoding() -> None:
    problems = [[{"role": "user", "content": problem}] for problem in SAMPLE_PROBLEMS[:3]]
    every = [SamplingParams(temperature=temperature, seed=3, max_tokens=48) for temperature in (0.0, 1.0)]
    with LLM("demo-target", method="vanilla", dtype="float32") as plain:
        wanted = [plain.chat(problems, params) for params in every]
    settings: dict[str, Any] = {"dtype": "float32", "placement": "inline", "policy": "fixed", "hrad": "demo"}
    with LLM("demo-target", "demo-draft", method="specbranch", **settings) as fast:
        got = [fast.chat(problems, params) for params in every]
    for mine, theirs in zip(chain_of(*got), chain_of(*wanted), strict=True):
        assert mine.outputs == theirs.outputs
        assert mine.stats.mean_acceptance_length > 1.5
