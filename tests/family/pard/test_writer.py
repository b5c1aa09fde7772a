"""A drafter that guesses several tokens in one pass: its rows and layers; its texts are those of plain decoding."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaForCausalLM

from card import LLM
from card.backends.transformers.arrays import as_array, as_tensor
from card.backends.transformers.loading import load_model
from card.config import DraftSettings, SamplingParams
from card.drafting.draft_writers import make_writer
from card.drafting.drafter import DrafterWorker
from card.drafting.messages import DraftSpec, Open, TargetStates
from card.engine.queue import Limits
from card.errors import ModelError, SettingsError, VocabularyError
from card.family.pard import writer
from card.family.pard.folders import load_adaptable
from card.family.pard.state_input import StateInput
from card.family.pard.writer import ParallelSequence, ParallelWriter
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import Floats
from card.links.in_process import InlineLink, ThreadLink
from card.models.loading import load_decoder
from card.models.parallel_draft import STATES_FILE, ParallelDraft, parallel_draft_of
from card.models.protocol import NO_PARENT, Extension
from card.models.runners import plain_runner
from card.tree.logits import log_softmax
from card.tree.nodes import NewNodes
from tests.decoding import (
    assert_plain_in_turns,
    assert_plain_under_any_order,
    decode,
    make_engine,
    make_request,
    plain,
    run_all,
    toy_draft,
    toy_target,
    unhurried,
)
from tests.drafting.test_drafter import TEXT, Clock, Replica, correction, layers_of, specs, tokens_to_commit, toy, turns
from tests.drafts import draft_spec
from tests.engine.test_exactness import agreements, faults, sampling, shapes
from tests.examples import settings
from tests.pair import Pair
from tests.tiny import tiny_llama
from tests.toy import TableModel
from tests.unreliable_link import FakeLink, Faults

K = 4
TEMPERATURES = (1.0, 1.5, 2.0, 0.5)


class Guessing(TableModel):
    """A toy model that reads masks: behind each it goes on as if its own first choices had stood there."""

    def __init__(self, model: TableModel) -> None:
        super().__init__(
            model.seed,
            model.vocab_size + 1,
            model.max_model_len,
            max_model_len=model.max_model_len,
            num_tree_rows=model.max_rows - model.max_model_len,
        )
        self.mask_id = model.vocab_size
        self._model = model

    def embeddings(self, token_ids: Sequence[int]) -> Floats:
        """Return rows that tell tokens apart."""
        return np.outer(np.float32(token_ids), np.ones(32, np.float32))

    def _make_logits(self, context: tuple[int, ...]) -> Floats:
        ids = [token for token in context if token != self.mask_id]
        for _ in range(len(context) - len(ids)):
            ids.append(int(self._model.logits_after(ids).argmax()))
        return np.append(self._model.logits_after(ids), np.float32(-1e9))


def writer_of(model: TableModel) -> ParallelWriter:
    guessing = Guessing(model)
    facts = ParallelDraft(mask_id=guessing.mask_id, num_tokens=K, temperatures=TEMPERATURES, vocab_size=0)
    return ParallelWriter(guessing, facts)


def worker_of(model: TableModel, **settings: int) -> DrafterWorker:
    return DrafterWorker(writer_of(model), clock=Clock(), **settings)


def sequence_of(worker: DrafterWorker) -> ParallelSequence:
    sequence = worker.drafting[7].sequence
    assert isinstance(sequence, ParallelSequence)
    return sequence


def assert_rows_are_those_of_text_and_nodes(worker: DrafterWorker) -> None:
    """Check that no mask is left, and that the rows are the text's and, below it, those of nodes with their parents."""
    sequence, model = sequence_of(worker), worker.writer.model  # type: ignore[attr-defined]
    held, cache, num_text = model._sequences[sequence.slot], sequence.cache, sequence.num_committed_rows
    assert model.mask_id not in held.token_ids
    assert held.token_ids[:num_text] == sequence.token_ids[:num_text]
    assert held.parents[:num_text] == [NO_PARENT, *range(num_text - 1)][:num_text]
    assert sorted(sequence.row_of.values()) == list(range(num_text, len(held.token_ids)))
    for node, row in sequence.row_of.items():
        parent = cache.parent(node)
        assert held.token_ids[row] == cache.token(node)
        assert held.positions[row] == sequence.root_position + cache.depth_of(node)
        assert held.parents[row] == (num_text - 1 if parent == cache.root_id else sequence.row_of[parent])


def assert_new_scores_are_guesses(worker: DrafterWorker, known: set[int]) -> None:
    """Check that each new node's score is the model's behind a node above it and as many masks as lie between."""
    sequence, model = sequence_of(worker), worker.writer.model  # type: ignore[attr-defined]
    cache, nodes = sequence.cache, sequence.cache.snapshot()
    for node, token, logprob in zip(nodes.ids, nodes.tokens, nodes.logprobs, strict=True):
        if node in known:
            continue
        path = [*sequence.token_ids, *cache.path_tokens(node)[:-1]]
        possible = []
        for offset in range(min(K, len(path))):  # one left over from an earlier pass was guessed before the root
            before = path[: len(path) - offset] + [model.mask_id] * offset
            scores = log_softmax(model.logits_after(before) / TEMPERATURES[offset])
            possible.append(float(scores[token]))
        assert min(abs(logprob - one) for one in possible) < 1e-4


# ---- rows and layers ------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    seed=st.integers(0, 99),
    spec=specs,
    turns=turns,
    max_tokens=st.sampled_from([1, 3, 9, 256]),
)
def test_rows_and_tree_are_those_of_the_text_after_any_corrections_and_no_mask_stays(
    seed: int, spec: DraftSpec, turns: list[tuple[int, int, int, list[int]]], max_tokens: int
) -> None:
    worker = worker_of(toy(seed), max_tokens_per_pass=max_tokens)
    replica = Replica(TEXT, spec)
    replica.receive(worker.receive(Open(7, TEXT, spec)))
    sequence = sequence_of(worker)
    for num_passes, which, length, others in turns:
        for _ in range(num_passes):
            known = {sequence.cache.root_id, *sequence.cache.alive_ids()}
            replica.receive(worker.step())
            assert_rows_are_those_of_text_and_nodes(worker)
            assert_new_scores_are_guesses(worker, known)
        tokens = tokens_to_commit(sequence, which, length, [token % 12 for token in others])
        replica.commit(tokens)
        replica.receive(worker.receive(correction(len(sequence.token_ids), tokens, beam_width=1 + which % 5)))
        replica.assert_equals(sequence)
        assert_rows_are_those_of_text_and_nodes(worker)
        assert sequence.cache.num_nodes <= spec.shape.max_nodes
        assert sequence.cache.depth <= spec.shape.lead
    for _ in range(400):
        if worker.is_idle:
            break
        replica.receive(worker.step())
    assert worker.is_idle, "every pass gets further, however few tokens it has"
    replica.assert_equals(sequence)


def test_one_pass_makes_as_many_layers_as_the_model_guesses_tokens() -> None:
    worker = worker_of(toy())
    worker.receive(Open(7, TEXT, draft_spec(beam_width=2, lead=11)))
    depths, sizes = [], []
    while not worker.is_idle:
        sizes += [len(layer.nodes) for layer in layers_of(worker.step())]
        depths.append(sequence_of(worker).cache.depth)
    assert depths[:3] == [K, 2 * K, 11], "a last step finds that there is nothing left to do"
    assert sizes == [2 * K, 2 * K, 2 * 3]
    assert worker.layers_per_pass == K


def test_a_sequence_without_room_for_masks_drafts_one_layer_a_pass() -> None:
    model = TableModel(3, 12, 2, max_model_len=32, num_tree_rows=4)
    worker = worker_of(model)
    worker.receive(Open(7, TEXT, draft_spec(beam_width=1, branch=1, lead=40, max_len=32)))
    for _ in range(60):
        worker.step()
    assert worker.is_idle
    assert_rows_are_those_of_text_and_nodes(worker)
    assert sequence_of(worker).cache.depth == 32 - len(TEXT), "the text ends there"


# ---- texts ----------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(seed=st.integers(0, 99), agreement=agreements, params=sampling, shape=shapes, faults=faults)
def test_text_is_that_of_plain_decoding_under_any_message_order(**drawn: Any) -> None:
    assert_plain_under_any_order(worker_of, **drawn)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 99),
    agreement=agreements,
    params=sampling,
    shape=shapes,
    method=st.sampled_from(["pard", "card", "specbranch", "ssd", "pearl"]),
)
def test_text_is_that_of_plain_decoding_when_taking_turns(**drawn: Any) -> None:
    assert_plain_in_turns(worker_of, **drawn)


@pytest.mark.parametrize("method", ["pard", "card"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eight_texts_at_once_are_those_of_plain_decoding_alone(method: str, temperature: float) -> None:
    target = toy_target(5)
    link = FakeLink(lambda: worker_of(toy_draft(target, 0.8)), Faults(max_passes=3))
    engine = make_engine(target, link, method, limits=Limits(max_num_seqs=8, prefill_chunk=4))  # type: ignore[arg-type]
    requests = [
        make_request(
            i,
            method=method,
            prompt=tuple((i + j) % 12 for j in range(3 + i)),
            params=SamplingParams(temperature=temperature, seed=i, max_tokens=30),
        )
        for i in range(8)
    ]
    texts = run_all(engine, {i: [request] for i, request in enumerate(requests)})
    assert texts == {one.request_id: plain(target, params=one.params, prompt=one.prompt_ids) for one in requests}


def test_a_drafter_whose_guesses_are_right_gives_k_tokens_a_pass() -> None:
    target = toy_target()
    params, shape = SamplingParams(temperature=0.0, seed=0, max_tokens=61), DraftSettings(num_speculative_tokens=K)
    _, _, stats = decode(target, InlineLink(worker_of(target)), method="pard", params=params, draft=shape)
    assert stats.drafter_passes <= stats.target_passes + 1
    assert stats.accepted_tokens == stats.verified_tokens == K * stats.target_passes


@pytest.mark.parametrize("after", [0, 3])
def test_text_is_that_of_plain_decoding_when_the_drafter_dies(after: int) -> None:
    target = unhurried(toy_target())
    worker = DrafterWorker(writer_of(toy_draft(target, 0.9)), clock=time.perf_counter)
    model, passes = worker.writer.model, []  # type: ignore[attr-defined]
    run = model.forward

    def dying(extensions):
        passes.append(len(extensions))
        if len(passes) > after:
            raise RuntimeError("dead")
        return run(extensions)

    model.forward = dying
    link = ThreadLink(worker)
    link.begin()
    try:
        deadline = time.monotonic() + 10
        while link.status.state == "up":
            assert decode(target, link)[:2] == plain(target)
            assert time.monotonic() < deadline
        link.receive()  # the thread may end before anybody takes its last message
        assert "dead" in link.status.reason
    finally:
        link.close()


# ---- folders --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a drafter that has hardly learnt anything, whose guesses are mostly wrong."""
    folder = tmp_path_factory.mktemp("adapted")
    load_adaptable(pair.draft).save(folder, K, TEMPERATURES, {})
    return str(folder)


@pytest.mark.parametrize("method", ["pard", "card"])
@pytest.mark.parametrize("placement", ["inline", "process"])
def test_an_adapted_folder_drafts_wherever_it_runs(pair: Pair, adapted: str, method: str, placement: str) -> None:
    settings: dict[str, Any] = {"target": pair.target, "dtype": "float32", "max_model_len": 200}
    prompts = ["the cat", "one two three", "the mat and the other"]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=24)
    with LLM(**settings, method="vanilla") as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with LLM(**settings, draft=adapted, method=method, placement=placement, policy="fixed") as llm:
        outputs = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    if placement == "inline":
        assert all(output.stats.drafter_passes for output in outputs)


@pytest.mark.slow  # integer kernels of these sizes are compiled
def test_an_adapted_folder_drafts_in_integers_and_for_any_target_of_its_family(pair: Pair, adapted: str) -> None:
    if why_not_int8() is not None:
        pytest.skip(str(why_not_int8()))
    params = SamplingParams(temperature=0.0, max_tokens=24)
    for target in (pair.target, pair.draft):
        settings: dict[str, Any] = {"target": target, "dtype": "int8", "max_model_len": 200}
        with LLM(**settings, method="vanilla") as llm:
            expected = llm.generate("the cat", params)[0].outputs[0].token_ids
        with LLM(**settings, draft=adapted, method="pard") as llm:
            output = llm.generate("the cat", params)[0]
        assert output.outputs[0].token_ids == expected
        assert output.stats.drafter_passes


def test_the_method_refuses_a_draft_model_that_makes_one_token_a_pass(pair: Pair) -> None:
    with pytest.raises(ModelError, match=r"method pard needs .*draft names no mask token .*pard_token.*: make one"):
        LLM(pair.target, pair.draft, method="pard")


@pytest.fixture(scope="module")
def published(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder as the authors publish theirs: an ordinary model whose config.json names a mask token."""
    folder = tmp_path_factory.mktemp("published") / "draft"
    shutil.copytree(pair.draft, folder)
    name_mask(folder, {"pard_token": 3})
    return str(folder)


def name_mask(folder: Path, fields: Mapping[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_published_folder_drafts_several_tokens_a_pass_and_the_text_is_that_of_plain_decoding(
    pair: Pair, published: str, temperature: float
) -> None:
    settings: dict[str, Any] = {"target": pair.target, "dtype": "float32", "max_model_len": 200}
    prompts = ["the cat", "one two three", "the mat and the other"]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=24)
    with LLM(**settings, method="vanilla") as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    stats = {}
    for method in ("pard", "card"):
        with LLM(**settings, draft=published, method=method, placement="inline", policy="fixed") as llm:
            outputs = llm.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        stats[method] = [output.stats for output in outputs]
    assert all(one.verified_tokens > 3 * one.drafter_passes > 0 for one in stats["pard"])


@pytest.mark.parametrize(
    ("fields", "mask_id"),
    [
        ({"pard_token": 3}, 3),
        ({"mask_token_id": 4}, 4),
        ({"ptd_token_id": 5}, 5),
        ({"dflash_config": {"mask_token_id": 6}}, 6),
        ({"pard_token": 3, "mask_token_id": 4, "ptd_token_id": 5}, 4),  # in the order in which vLLM looks
        ({"pard_token": 3, "mask_token_id": None, "dflash_config": {}}, 3),
    ],
)
def test_a_mask_token_is_found_under_each_key_that_other_engines_read(
    pair: Pair, tmp_path: Path, fields: dict[str, Any], mask_id: int
) -> None:
    shutil.copytree(pair.draft, tmp_path / "draft")
    name_mask(tmp_path / "draft", fields)
    for load in (load_decoder, load_model):
        facts = parallel_draft_of(load(tmp_path / "draft"))
        assert facts is not None and facts.mask_id == mask_id
        assert 8 <= facts.num_tokens <= 12 and set(facts.temperatures) == {1.0}


@pytest.mark.parametrize("mask", [1_000_000, -1, "<mask>", True])
def test_a_published_folder_whose_model_has_no_such_token_is_refused(pair: Pair, tmp_path: Path, mask: object) -> None:
    shutil.copytree(pair.draft, tmp_path / "draft")
    name_mask(tmp_path / "draft", {"pard_token": mask})
    with pytest.raises(ModelError, match=rf"'{mask}' as the mask token \(pard_token\), which must be the id of one of"):
        LLM(pair.target, str(tmp_path / "draft"), method="pard")


def test_an_adapted_folder_names_its_mask_token_as_other_engines_read_it(adapted: str) -> None:
    facts = ParallelDraft.load(Path(adapted))
    assert json.loads((Path(adapted) / "config.json").read_text())["pard_token"] == facts.mask_id
    assert parallel_draft_of(load_decoder(adapted)) == facts, "pard.json knows more, and comes first"


def test_an_adapted_folder_of_another_vocabulary_is_refused_by_name(pair: Pair, tmp_path: Path) -> None:
    load_adaptable(pair.foreign_draft).save(tmp_path, K, TEMPERATURES, {})
    with pytest.raises(VocabularyError, match="does not fit the target"):
        LLM(pair.target, str(tmp_path), method="pard")


def test_an_adapted_folder_that_was_cut_off_is_refused_by_name(pair: Pair, adapted: str, tmp_path: Path) -> None:
    shutil.copytree(adapted, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cut"):
        LLM(pair.target, str(tmp_path / "cut"), method="pard")


# ---- target features ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reading(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a drafter that reads the target's states and has hardly learnt anything."""
    folder, begun = tmp_path_factory.mktemp("reading"), load_adaptable(pair.draft)
    begun.save(folder, K, TEMPERATURES, {}, StateInput.for_target(load_decoder(pair.target), 32))
    return str(folder)


class Read:
    """Notes the tokens that draft models read, and the inputs of the first of them, by text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inputs: dict[tuple[int, ...], Floats | None] = {}  # by the text up to the token
        extension = ParallelSequence.extension

        def noted(sequence: ParallelSequence, frontier: list[int], max_tokens: int) -> Extension:
            first, made = sequence.num_committed_rows, extension(sequence, frontier, max_tokens)
            for i in range(min(len(made.token_ids), len(sequence.token_ids) - first)):
                text = tuple(sequence.token_ids[: first + i + 1])
                self.inputs[text] = None if made.inputs is None else made.inputs[i]
            return made

        monkeypatch.setattr(ParallelSequence, "extension", noted)


PROMPTS = ["the cat", "one two three", "the mat and the other", *(f"{i} cats sat" for i in range(5))]


@pytest.mark.parametrize("batch", [1, 8])
def test_a_drafter_in_turns_reads_each_token_with_the_states_that_it_came_of(
    pair: Pair, reading: str, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    read, params = Read(monkeypatch), SamplingParams(temperature=0.0, max_tokens=12)
    settings: dict[str, Any] = {"num_speculative_tokens": K, "max_model_len": 200, "prefill_chunk": 4}  # a pass a round
    with LLM(pair.target, reading, method="pard", dtype="float32", **settings) as llm:
        outputs = llm.generate(PROMPTS[:batch], params)
        texts = [(*output.prompt_token_ids, *output.outputs[0].token_ids) for output in outputs]
    layer = StateInput.load(Path(reading) / STATES_FILE)
    target = LlamaForCausalLM.from_pretrained(pair.target).train(False)
    embedded = LlamaForCausalLM.from_pretrained(reading).get_input_embeddings()
    for text in texts:
        with torch.no_grad():
            states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
        added = layer(torch.cat([states[number][0] for number in layer.layers], -1))
        embeddings = embedded(torch.tensor(text))
        for place in range(len(text)):
            if text[: place + 1] not in read.inputs:
                assert place > len(text) - K - 2, "the last round's tokens alone are not read"
                continue
            found = read.inputs[text[: place + 1]]
            assert found is not None, "none came late"
            expected = embeddings[place] + (added[place - 1] if place else 0.0)
            torch.testing.assert_close(as_tensor(found), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("placement", ["inline", "thread"])
@pytest.mark.parametrize("method", ["pard", "card"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_drafted_with_states_are_those_of_plain_decoding(
    pair: Pair, reading: str, method: str, placement: str, temperature: float
) -> None:
    settings: dict[str, Any] = {"target": pair.target, "dtype": "float32", "max_model_len": 200}
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=20)
    with LLM(**settings, method="vanilla") as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    with LLM(**settings, draft=reading, method=method, placement=placement, policy="fixed") as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
        alone = llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids
    assert (together, alone) == (expected, expected[0])


@settings(max_examples=40)
@given(
    seed=st.integers(0, 99),
    spec=specs,
    turns=turns,
    shown=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=8),
    max_tokens=st.sampled_from([1, 3, 256]),
)
def test_states_that_come_late_again_or_early_are_added_to_the_text_alone_and_change_no_row(
    seed: int,
    spec: DraftSpec,
    turns: list[tuple[int, int, int, list[int]]],
    shown: list[tuple[int, int]],
    max_tokens: int,
) -> None:
    writer, layer = writer_of(toy(seed)), StateInput.for_target(tiny_llama(29), 32)
    writer.state_input = layer
    worker = DrafterWorker(writer, clock=Clock(), max_tokens_per_pass=max_tokens)
    worker.receive(Open(7, TEXT, spec))
    sequence, forward, added = sequence_of(worker), writer.model.forward, dict[int, Floats]()

    def noted(extensions: list[Extension]) -> list[Floats]:
        (one,) = extensions
        num_text = min(len(one.token_ids), len(sequence.token_ids) - sequence.num_committed_rows)
        assert one.inputs is None or one.inputs.shape == (num_text, 32)
        for i, row in enumerate([] if one.inputs is None else one.inputs):
            place = sequence.num_committed_rows + i
            expected = one.token_ids[i] + added.get(place, np.zeros(32))
            np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6)
        return forward(extensions)

    writer.model.forward = noted  # type: ignore[method-assign]
    for num_passes, which, length, others in turns:
        for first, num_rows in shown[:2]:
            states = as_array(torch.randn(num_rows, 2 * 32))
            worker.receive(TargetStates(7, first, states))
            added |= {first + 1 + i: row for i, row in enumerate(layer.added_by(states))}
        shown = shown[2:]
        for _ in range(num_passes):
            worker.step()
            assert_rows_are_those_of_text_and_nodes(worker)
        tokens = tokens_to_commit(sequence, which, length, [token % 12 for token in others])
        worker.receive(correction(len(sequence.token_ids), tokens, beam_width=1 + which % 5))
        assert_rows_are_those_of_text_and_nodes(worker)


class Silenced(ParallelWriter):
    """Makes nothing of any pass, or dies, from some pass on."""

    passes_left, dies = 3, False

    def step(self, work: Any) -> Any:
        if self.passes_left > 0:
            self.passes_left -= 1
            return super().step(work)
        if self.dies:
            raise RuntimeError("dead")
        return [NewNodes.none() for _ in work]


@pytest.mark.parametrize("dies", [True, False])
def test_texts_are_those_of_plain_decoding_when_a_drafter_with_states_dies_or_falls_silent(
    pair: Pair, reading: str, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    monkeypatch.setattr(Silenced, "dies", dies)
    monkeypatch.setattr(writer, "ParallelWriter", Silenced)
    settings: dict[str, Any] = {"target": pair.target, "dtype": "float32", "max_model_len": 200}
    params = SamplingParams(temperature=0.0, max_tokens=20)
    with LLM(**settings, method="vanilla") as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:3], params)]
    with LLM(**settings, draft=reading, method="pard") as llm:
        outputs = llm.generate(PROMPTS[:3], params)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [bool(output.stats.declined) for output in outputs] == [dies] * 3


def test_states_that_nobody_can_show_are_refused_and_so_is_another_target(
    pair: Pair, reading: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="reads the target's hidden states, which do not leave the process"):
        LLM(pair.target, reading, method="pard", placement="process")
    with pytest.raises(
        ModelError, match=r"reads its target's hidden states, which reach no drafter in another process"
    ):
        make_writer(plain_runner(load_decoder(reading), max_model_len=64), takes_turns=True)
    other = tiny_llama(320, seed=8, num_hidden_layers=1, max_position_embeddings=200)
    other.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(pair.target).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"pard_features.safetensors was trained for another target"):
        LLM(str(tmp_path), reading, method="pard")


def test_a_layer_that_is_missing_or_cut_off_is_refused_by_name(pair: Pair, reading: str, tmp_path: Path) -> None:
    shutil.copytree(reading, tmp_path / "cut")
    path = tmp_path / "cut" / STATES_FILE
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ModelError, match=r"pard_features.safetensors is cut off or damaged"):
        LLM(pair.target, str(tmp_path / "cut"), method="pard")
    path.unlink()
    with pytest.raises(ModelError, match=r"there is no file .*pard_features.safetensors"):
        LLM(pair.target, str(tmp_path / "cut"), method="pard")


# ---- a family -------------------------------------------------------------------------------------------------------


def test_one_adapted_drafter_serves_two_targets_of_a_family(pair: Pair, adapted: str, tmp_path: Path) -> None:
    larger = tiny_llama(320, seed=8, num_hidden_layers=2, max_position_embeddings=200, eos_token_id=[0, 1])
    larger.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(pair.target).save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    accepted = []
    for target in (pair.target, str(tmp_path)):
        settings: dict[str, Any] = {"target": target, "dtype": "float32", "max_model_len": 200}
        with LLM(**settings, method="vanilla") as llm:
            expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
        with LLM(**settings, draft=adapted, method="pard") as llm:
            outputs = llm.generate(PROMPTS, params)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert all(output.stats.drafter_passes for output in outputs)
        accepted.append(sum(output.stats.accepted_tokens for output in outputs))
    assert accepted[0] > accepted[1], "the first is its own"
