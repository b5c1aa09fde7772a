"""Training rows of a drafter of K tokens a pass, the training itself, and the folders it begins with and ends in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from card.errors import ModelError, PromptError, SettingsError
from card.family.learning.checkpoint import Checkpoint
from card.family.pard.folders import clipped, load_adaptable, read_texts
from card.family.pard.rows import IGNORED, Document, Drop, batch_of, kept_origins, packed_row
from card.family.pard.state_input import StateInput
from card.family.pard.teacher import Teacher
from card.family.pard.train_pard import PardTrainSettings, TrainedDrafter, added_to, loss_of, shown_in_step, train_pard
from card.models.loading import load_decoder
from card.models.parallel_draft import FILE, STATES_FILE, ParallelDraft, parallel_draft_of, wants_states
from tests.examples import settings
from tests.pair import Pair
from tests.tiny import tiny_llama
from tests.trainings import stopping

MASK = 29
TEXTS = [Document([(start + step * i) % MASK for i in range(9)]) for start in range(4) for step in (1, 2, 3)]
documents = st.builds(
    lambda ids, first: Document(ids, min(first, len(ids) - 1)),
    st.lists(st.integers(0, MASK - 1), min_size=2, max_size=12),
    st.integers(1, 12),
)
drops = st.builds(
    lambda k, r, least: Drop(num_tokens=k, retention=r, least=least),
    st.integers(2, 6),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def settings_of(**changes: Any) -> PardTrainSettings:
    values = {"num_tokens": 3, "epochs": 4, "tokens_per_step": 48, "learning_rate": 1e-2, "checkpoint_steps": 2}
    return PardTrainSettings(**values | changes)


def reading_teacher() -> Teacher:
    target = tiny_llama(MASK, seed=1)
    return Teacher(target, StateInput.for_target(target, 32))


def trained(
    folder: Path, *, stop_after: int | None = None, teacher: Teacher | None = None, **changes: Any
) -> tuple[dict[str, Tensor], TrainedDrafter]:
    model = tiny_llama(MASK + 1)
    checkpoint = Checkpoint(folder / "training.pt", {"draft": changes.pop("draft", "tiny")})
    found = train_pard(
        model,
        TEXTS,
        MASK,
        settings_of(**changes),
        checkpoint=checkpoint,
        teacher=teacher,
        on_step=stopping(stop_after),
    )
    return model.state_dict(), found


# ---- rows -----------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(document=documents, drop=drops, seed=st.integers(0, 99))
def test_masks_between_an_origin_and_a_kept_mask_are_kept(document: Document, drop: Drop, seed: int) -> None:
    kept = kept_origins(document, drop, seeded(seed))
    assert len(kept) == drop.num_tokens - 1
    last = len(document.token_ids) - 2
    before = set(range(document.first - 1, last + 1))
    num_all = len(before)
    for offset, origins in enumerate(kept, 1):
        own = origins.tolist()
        assert own == sorted(set(own)) and set(own) <= before, "none is kept twice, or without the one before it"
        possible = [origin for origin in before if origin + offset <= last]
        assert len(own) == min(len(possible), round(num_all * max(drop.retention**offset, drop.least)))
        before = set(own)


@settings(max_examples=30, deadline=None)
@given(document=documents, drop=drops, seed=st.integers(0, 99))
def test_a_packed_row_gives_each_mask_the_logits_that_it_has_alone(document: Document, drop: Drop, seed: int) -> None:
    model, ids = tiny_llama(MASK + 1), list(document.token_ids)
    row = packed_row(document, kept_origins(document, drop, seeded(seed)), MASK)
    longer = packed_row(TEXTS[0], kept_origins(TEXTS[0], drop, seeded(seed)), MASK)
    batch = batch_of([row, longer])  # one of them is filled up
    with torch.no_grad():
        packed = model(input_ids=batch.token_ids, attention_mask=batch.attention, position_ids=batch.positions).logits[
            0
        ]
        for i in range(row.num_trained):
            origin, position = int(row.origins[i]), int(row.positions[i])
            alone = model(torch.tensor([ids[: origin + 1] + [MASK] * (position - origin)])).logits[0, -1]
            torch.testing.assert_close(packed[i], alone, atol=1e-4, rtol=1e-4)
            is_learnt = document.first - 1 <= position < len(ids) - 1
            assert int(row.labels[i]) == (ids[position + 1] if is_learnt else IGNORED)


def test_conditional_drop_runs_less_than_half_of_the_positions_that_none_does() -> None:
    text = Document(range(200))
    counts = []
    for retention in (PardTrainSettings().retention, 1.0):
        drop = PardTrainSettings(retention=retention).drop
        counts.append(packed_row(text, kept_origins(text, drop, seeded(0)), MASK).num_trained)
    assert counts[1] > 2.0 * counts[0]


# ---- training -------------------------------------------------------------------------------------------------------


def test_a_training_lowers_the_loss_of_masks_and_counts_what_it_ran(tmp_path: Path) -> None:
    weights, found = trained(tmp_path, epochs=12)
    batch = batch_of([packed_row(TEXTS[0], kept_origins(TEXTS[0], settings_of().drop, seeded(0)), MASK)])
    before = tiny_llama(MASK + 1)
    after = tiny_llama(MASK + 1)
    after.load_state_dict(weights)
    with torch.no_grad():
        assert loss_of(after, batch) < 0.5 * loss_of(before, batch)
    assert found.num_trained < found.num_without_drop
    assert list(found.hit_rates) == sorted(found.hit_rates, reverse=True), "a guess counts if all before it are right"
    assert found.mean_guesses == pytest.approx(sum(found.hit_rates))
    assert len(found.temperatures) == len(found.losses) == 3


@pytest.mark.parametrize("stop_after", [1, 5])
def test_a_training_that_goes_on_from_a_checkpoint_ends_with_the_weights_of_one_run(
    tmp_path: Path, stop_after: int
) -> None:
    whole, figures = trained(tmp_path)
    (tmp_path / "training.pt").unlink()
    with pytest.raises(InterruptedError):
        trained(tmp_path, stop_after=stop_after)
    resumed, again = trained(tmp_path)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert again == figures


def test_other_seeds_and_no_drop_give_other_weights(tmp_path: Path) -> None:
    found = []
    for i, changes in enumerate(({}, {"seed": 1}, {"retention": 1.0})):
        (tmp_path / str(i)).mkdir()
        found.append(trained(tmp_path / str(i), epochs=1, **changes)[0]["lm_head.weight"])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_checkpoint_of_another_run_or_a_damaged_one_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        trained(tmp_path, stop_after=3)
    for changes, name in (({"retention": 0.5}, "retention"), ({"draft": "other"}, "draft"), ({"seed": 2}, "seed")):
        with pytest.raises(ModelError, match=rf"training.pt is of another run: its {name} is "):
            trained(tmp_path, **changes)
    path = tmp_path / "training.pt"
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ModelError, match="cut off or damaged; delete it"):
        trained(tmp_path)


@settings(max_examples=20, deadline=None)
@given(some=st.lists(documents, min_size=1, max_size=3), drop=drops, seed=st.integers(0, 99))
def test_a_lesson_weighs_a_guess_by_the_targets_chances_of_the_tokens_before_it(
    some: list[Document], drop: Drop, seed: int
) -> None:
    target = tiny_llama(MASK, seed=1)  # has no mask token
    rows = [packed_row(one, kept_origins(one, drop, seeded(seed)), MASK) for one in some]
    batch = batch_of(rows)
    lesson = Teacher(target).lesson(batch)
    drafted = torch.randn(len(lesson.weights), MASK + 1)
    labels, expected_loss, i = batch.labels[batch.labels != IGNORED], 0.0, 0
    for document, row in zip(some, rows, strict=True):
        with torch.no_grad():
            logits = target(torch.tensor([document.token_ids])).logits[0]
        probs = logits.softmax(-1)
        for position, origin, label in zip(
            row.positions.tolist(), row.origins.tolist(), row.labels.tolist(), strict=True
        ):
            if label == IGNORED:
                continue
            weight = 1.0
            for before in range(origin, position):
                weight *= float(probs[before, document.token_ids[before + 1]])
            assert float(lesson.weights[i]) == pytest.approx(weight, rel=1e-3, abs=1e-6)
            torch.testing.assert_close(lesson.logits[i], logits[position], atol=1e-4, rtol=1e-4)
            own = drafted[i].log_softmax(-1)
            divergence = float((probs[position] * (probs[position].log() - own[:MASK])).sum())
            expected_loss += weight * (divergence - 0.1 * float(own[label]))
            i += 1
    assert i == len(labels) == len(lesson.weights)
    assert float(lesson.loss(drafted, labels, slice(None))) == pytest.approx(expected_loss, rel=1e-3, abs=1e-3)


def test_a_training_with_a_target_learns_what_the_target_would_choose(tmp_path: Path) -> None:
    target = tiny_llama(MASK, seed=1)
    batch = batch_of([packed_row(TEXTS[0], kept_origins(TEXTS[0], settings_of().drop, seeded(0)), MASK)])
    lesson = Teacher(target).lesson(batch)
    losses = []
    for folder, teacher in (("alone", None), ("taught", Teacher(target))):
        model = tiny_llama(MASK + 1)
        (tmp_path / folder).mkdir()
        checkpoint = Checkpoint(tmp_path / folder / "training.pt", {})
        train_pard(model, TEXTS, MASK, settings_of(epochs=12), checkpoint=checkpoint, teacher=teacher)
        with torch.no_grad():
            logits = model(
                input_ids=batch.token_ids, attention_mask=batch.attention, position_ids=batch.positions
            ).logits[batch.labels != IGNORED]
        losses.append(float(lesson.loss(logits.float(), batch.labels[batch.labels != IGNORED], slice(None))))
    assert losses[1] < 0.7 * losses[0]


@settings(max_examples=20, deadline=None)
@given(some=st.lists(st.tuples(documents, st.booleans()), min_size=1, max_size=3), drop=drops, seed=st.integers(0, 99))
def test_each_token_is_read_with_the_states_that_it_was_chosen_from_and_masks_with_none(
    some: list[tuple[Document, bool]], drop: Drop, seed: int
) -> None:
    teacher = reading_teacher()
    model, layer = tiny_llama(MASK, seed=1), teacher.state_input
    assert layer is not None
    rows = [packed_row(one, kept_origins(one, drop, seeded(seed)), MASK) for one, _ in some]
    batch = batch_of(rows)
    added = added_to(batch, teacher.lesson(batch), teacher, torch.tensor([shown for _, shown in some]))
    assert added is not None and added.shape == (*batch.token_ids.shape, 32)
    for idx, (document, shown) in enumerate(some):
        expected = torch.zeros(batch.token_ids.shape[1], 32)
        with torch.no_grad():
            states = model(torch.tensor([document.token_ids]), output_hidden_states=True).hidden_states
            for place in range(1, len(document.token_ids)) if shown else ():
                before = torch.cat([states[number][0, place - 1] for number in layer.layers])
                expected[place] = layer(before)
        torch.testing.assert_close(added[idx], expected, atol=1e-4, rtol=1e-3)


def test_about_as_many_texts_are_read_without_states_as_was_set_and_the_same_in_each_run() -> None:
    with_some = settings_of(state_drop=0.15)
    shown = [shown_in_step(20, step, with_some) for step in range(40)]
    assert 0.10 < 1 - float(torch.stack(shown).float().mean()) < 0.20
    assert all(torch.equal(one, shown_in_step(20, step, with_some)) for step, one in enumerate(shown))
    assert not torch.equal(shown[0], shown_in_step(20, 0, settings_of(seed=1)))
    assert shown_in_step(20, 0, settings_of(state_drop=0.0)).all()


def test_a_drafter_that_reads_states_learns_from_them(tmp_path: Path) -> None:
    teacher = reading_teacher()
    first = StateInput.for_target(tiny_llama(MASK, seed=1), 32).state_dict()
    weights, _ = trained(tmp_path, teacher=teacher, epochs=12)
    model = tiny_llama(MASK + 1)
    model.load_state_dict(weights)
    assert teacher.state_input is not None
    assert not torch.equal(teacher.state_input.fuse.weight, first["fuse.weight"])
    batch = batch_of([packed_row(one, kept_origins(one, settings_of().drop, seeded(0)), MASK) for one in TEXTS])
    with torch.no_grad():
        none = torch.zeros(len(TEXTS), dtype=torch.bool)
        assert loss_of(model, batch, teacher) < loss_of(model, batch, teacher, none)


def test_a_training_with_states_that_goes_on_from_a_checkpoint_ends_with_the_weights_of_one_run(
    tmp_path: Path,
) -> None:
    teachers = [reading_teacher() for _ in range(3)]
    whole, figures = trained(tmp_path, teacher=teachers[0])
    (tmp_path / "training.pt").unlink()
    with pytest.raises(InterruptedError):
        trained(tmp_path, stop_after=5, teacher=teachers[1])
    with pytest.raises(ModelError, match=r"training.pt is of another run: its layers of the target is \[-1, -2\], not"):
        trained(tmp_path, teacher=Teacher(tiny_llama(MASK, seed=1)))
    resumed, again = trained(tmp_path, teacher=teachers[2])
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    layers = [one.state_input for one in teachers]
    assert layers[0] is not None and layers[2] is not None
    assert torch.equal(layers[0].fuse.weight, layers[2].fuse.weight)
    assert again == figures


def test_conditional_drop_keeps_the_published_shares_of_masks_unless_others_are_asked_for() -> None:
    assert [round(PardTrainSettings().drop.share(i), 4) for i in range(1, 6)] == [0.7, 0.49, 0.343, 0.2401, 0.2]
    assert PardTrainSettings(retention=0.5, least_retention=0.3).drop.share(2) == 0.3


def test_the_learning_rate_is_what_was_set_and_else_the_published_one_for_all_but_tiny_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    make = torch.optim.AdamW

    def noted(parameters: Any, *, lr: float, **rest: Any) -> torch.optim.Optimizer:
        asked.append(lr)
        return make(parameters, lr=lr, **rest)

    monkeypatch.setattr(torch.optim, "AdamW", noted)
    for i, rate in enumerate((3e-4, None)):
        (tmp_path / str(i)).mkdir()
        trained(tmp_path / str(i), learning_rate=rate, epochs=1)
    monkeypatch.setattr("card.family.pard.train_pard.TINY_SIZE", 100)  # so that the model is no tiny one
    (tmp_path / "large").mkdir()
    trained(tmp_path / "large", learning_rate=None, epochs=1)
    assert asked == [3e-4, 1e-3, 1e-5]


def test_a_published_drafter_is_adapted_further_with_its_own_mask_token(pair: Pair, tmp_path: Path) -> None:
    shutil.copytree(pair.draft, tmp_path / "published")
    config = tmp_path / "published" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "pard_token": 3}))
    assert load_adaptable(str(tmp_path / "published")).mask_id == 3


def test_settings_and_texts_that_cannot_be_trained_with_are_refused(tmp_path: Path) -> None:
    for changes, said in (
        ({"num_tokens": 1}, "num_tokens must be 2 to 64, got 1"),
        ({"epochs": 0}, "epochs must be"),
        ({"retention": 1.5}, "retention must be a share"),
        ({"state_drop": -0.5}, "state_drop must be a share"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
    ):
        with pytest.raises(SettingsError, match=said):
            settings_of(**changes)
    checkpoint = Checkpoint(tmp_path / "training.pt", {})
    with pytest.raises(PromptError, match="1 texts have two tokens or more; give at least 2"):
        train_pard(tiny_llama(MASK + 1), [TEXTS[0], Document([3])], MASK, settings_of(), checkpoint=checkpoint)


# ---- folders --------------------------------------------------------------------------------------------------------


def test_an_adapted_folder_loads_as_any_model_and_says_what_it_is(pair: Pair, tmp_path: Path) -> None:
    begun = load_adaptable(pair.draft)
    num_tokens = len(begun.tokenizer)
    assert begun.mask_id == num_tokens, "the tokenizer has no token to spare, so a row was added"
    with torch.no_grad():
        begun.model.get_input_embeddings().weight[num_tokens] = 0.5  # as if it had learnt
    begun.save(tmp_path, 3, (1.0, 1.1, 1.2), {"steps": 1})
    model = load_decoder(tmp_path)
    facts = parallel_draft_of(model)
    assert facts is not None
    assert (facts.mask_id, facts.num_tokens, facts.vocab_size) == (num_tokens, 3, num_tokens + 1)
    assert parallel_draft_of(load_decoder(pair.draft)) is None
    again = load_adaptable(str(tmp_path))
    assert again.mask_id == num_tokens, "what is adapted again keeps its mask token"
    weights = (one.model.get_input_embeddings().weight[num_tokens] for one in (begun, again))
    torch.testing.assert_close(*weights)


def test_a_folder_says_that_its_model_reads_a_targets_states(pair: Pair, tmp_path: Path) -> None:
    begun, target = load_adaptable(pair.draft), load_decoder(pair.target)
    begun.save(tmp_path / "reads", 2, (1.0, 1.0), {}, StateInput.for_target(target, 32))
    begun.save(tmp_path / "reads not", 2, (1.0, 1.0), {})
    for name, reads in (("reads", True), ("reads not", False)):
        assert wants_states(str(tmp_path / name)) is reads
        assert wants_states(load_decoder(tmp_path / name)) is reads
        assert (tmp_path / name / STATES_FILE).exists() is reads
    assert not wants_states(pair.draft)


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: "",
        lambda facts: json.dumps({**facts, "target_features": "../elsewhere"}),
        lambda facts: json.dumps(facts)[:-5],
        lambda facts: json.dumps([]),
        lambda facts: json.dumps({**facts, "format": 2}),
        lambda facts: json.dumps({**facts, "mask_id": 999_999}),
        lambda facts: json.dumps({**facts, "num_tokens": 0}),
        lambda facts: json.dumps({**facts, "temperatures": [1.0]}),
        lambda facts: json.dumps({**facts, "temperatures": [1.0, "warm", 0.0]}),
    ],
)
def test_a_damaged_file_is_refused_by_name(pair: Pair, tmp_path: Path, change: Any) -> None:
    load_adaptable(pair.draft).save(tmp_path, 3, (1.0, 1.0, 1.0), {})
    facts = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(change(facts))
    with pytest.raises(ModelError, match=f"{FILE} is cut off, damaged or of another format"):
        load_decoder(tmp_path)


def test_a_file_of_another_model_is_refused_by_name(pair: Pair, tmp_path: Path) -> None:
    load_adaptable(pair.draft).save(tmp_path, 2, (1.0, 1.0), {})
    ParallelDraft(mask_id=5, num_tokens=2, temperatures=(1.0, 1.0), vocab_size=17).save(tmp_path, {})
    with pytest.raises(ModelError, match=f"{FILE} belongs to another model: it states 17 embedding rows"):
        load_decoder(tmp_path)


def test_texts_are_questions_with_answers_json_texts_or_plain_lines(pair: Pair, tmp_path: Path) -> None:
    begun = load_adaptable(pair.draft)
    path = tmp_path / "texts.jsonl"
    path.write_text('{"question": "one?", "answer": "the cat"}\n\n{"text": "the mat"}\n')
    asked, plain = (text.encode(begun.tokenizer) for text in read_texts(path))
    said = begun.tokenizer.decode(asked.token_ids[asked.first :])
    assert said.split("<|turn|>")[0].strip() == "the cat" and "<|turn|>" in said, (
        "the answer and the end of its turn are learnt"
    )
    assert (begun.tokenizer.decode(plain.token_ids), plain.first) == ("the mat", 1)
    lines = tmp_path / "texts.txt"
    lines.write_text("the cat\nthe mat sat\n")
    assert [text.text for text in read_texts(lines)] == ["the cat", "the mat sat"]
    long = Document(range(5000))
    assert len(clipped([long], begun.model)[0].token_ids) == 1024
    path.write_text('{"text": "one"}\n{"question": "two?"}\n')
    with pytest.raises(PromptError, match=r'texts.jsonl, line 2: must be a JSON object with "question" and "answer"'):
        read_texts(path)
    path.write_text("\n")
    with pytest.raises(PromptError, match="holds no texts"):
        read_texts(path)
