"""EAGLE-3 heads draft with the numbers of plain formulas, and change no text."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from card import LLM, SamplingParams
from card.assembly.drafters import load_drafter
from card.errors import ModelError, SettingsError
from card.links.process import DraftModel
from card.models.block_loading import load_head
from card.models.draft_vocab import drafted_ids
from card.models.loading import load_decoder, load_tokenizer
from card.models.runners import plain_runner
from tests.cells import crossed
from tests.own_head import FORMS, NUM_LAYERS, WIDTH, Head, drafting_of, random_head, right_head, save_target
from tests.state_drafting import (
    PROMPTS,
    TEXT,
    Drafting,
    assert_all_is_accepted,
    assert_nodes_have_states_of_their_parents,
    assert_rounds_are_right,
    assert_texts_are_plain,
    plain_texts,
)

TARGET_OF = "SafeAILab"


@functools.cache
def random_of(form: str) -> Head:
    return random_head(FORMS[form])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
def test_logits_and_states_are_those_of_the_formulas(target: str, folder: Any, form: str, num_accepted: int) -> None:
    assert_rounds_are_right(drafting_of(target, folder(form), random_of(form)), num_accepted)


def test_a_head_whose_weights_are_a_pickle_gives_the_same_numbers(target: str, tmp_path: Path) -> None:
    head, folder = random_of("SafeAILab"), tmp_path / "head"
    head.save(folder)
    (folder / "model.safetensors").unlink()
    torch.save(head.stored, folder / "pytorch_model.bin")
    assert_rounds_are_right(drafting_of(target, str(folder), head), 2)


@pytest.mark.parametrize("form", ["SafeAILab", "SpecForge", "speculators", "speculators, other layers"])
def test_a_head_in_a_gguf_file_gives_the_same_numbers(target: str, tmp_path: Path, form: str) -> None:
    head = random_of(form)
    file = head.save_gguf(tmp_path / "head.gguf")
    assert_rounds_are_right(drafting_of(target, file, head), 2)


def test_older_files_name_the_layers_that_are_read_by_another_key(target: str, tmp_path: Path) -> None:
    head = random_of("SafeAILab")
    layers = {"target_layers": None, "extract_layers": list(head.form.layers)}
    file = head.save_gguf(tmp_path / "head.gguf", stated=layers)
    runner = plain_runner(load_decoder(target, dtype="float32"), max_model_len=64)
    assert load_head(file, runner, dtype="float32", cache_dir="").inputs.target_layers == head.form.layers


def test_a_quantised_gguf_file_gives_the_numbers_of_its_weights(target: str, tmp_path: Path) -> None:
    head = random_of("SafeAILab")
    file = head.save_gguf(tmp_path / "head.gguf", kind=Kind.Q8_0)
    assert_rounds_are_right(drafting_of(target, file, head.rounded(Kind.Q8_0)), 2)


def test_texts_are_those_of_plain_decoding_with_a_head_in_a_gguf_file(target: str, tmp_path: Path) -> None:
    file = random_of("SafeAILab").save_gguf(tmp_path / "head.gguf", kind=Kind.Q8_0)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20)
    with LLM(target, file, dtype="float32", max_model_len=200, method="sps", placement="inline") as llm:
        outputs = llm.generate(PROMPTS, params)
    assert [output.outputs[0].token_ids for output in outputs] == plain_texts(target, params, "float32")
    assert sum(output.stats.verified_tokens for output in outputs)


GGUF_FAULTS: dict[str, dict[str, Any]] = {
    f"behind layer 9 of its target, which has {NUM_LAYERS}": {"stated": {"target_layers": [2, 4, 9]}},
    "its d2t names token 299": {"changes": {"d2t": np.arange(100, 300)}},
    "d2t is no list of whole numbers": {"changes": {"d2t": np.zeros(200, np.float32)}},
    "its tensor blk.0.attn_k.weight is missing": {"without": ["blk.0.attn_k.weight"]},
    "its tensor output_norm.weight is missing": {"without": ["output_norm.weight"]},
    "its tensor output.weight is missing": {"without": ["output.weight"]},
    r"blk.0.attn_q.weight has shape \[64, 64\], the config": {
        "changes": {"blk.0.attn_q.weight": np.zeros((64, 64), np.float32)}
    },
    "a tensor blk.0.other.weight, which is not known": {"changes": {"blk.0.other.weight": np.zeros(64, np.float32)}},
    "its eagle3.norm_before_fc is 1, it must be true": {"stated": {"norm_before_fc": 1}},
    "its eagle3.feed_forward_length is 0": {"stated": {"feed_forward_length": 0}},
}


@pytest.mark.parametrize("words", GGUF_FAULTS)
def test_a_gguf_file_that_does_not_fit_is_refused_in_a_line(target: str, tmp_path: Path, words: str) -> None:
    file = random_of("SafeAILab").save_gguf(tmp_path / "head.gguf", **GGUF_FAULTS[words])
    with pytest.raises(ModelError, match=words) as caught:
        LLM(target, file, dtype="float32", max_model_len=64)
    assert "\n" not in str(caught.value)
    assert file in str(caught.value)


@pytest.mark.parametrize("length", [0, 5000])
def test_a_head_whose_weights_are_cut_off_is_told_as_such(target: str, tmp_path: Path, length: int) -> None:
    folder = Path(random_of("SafeAILab").save(tmp_path / "head"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:length])
    with pytest.raises(ModelError, match=r"cannot draft .*model\.safetensors.*(cut off|damaged)") as caught:
        LLM(target, str(folder), dtype="float32", max_model_len=64)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("words", ["is cut off, or no file as torch.save", "something else than tensors by name"])
def test_a_pickle_without_tensors_is_refused_in_a_line(target: str, tmp_path: Path, words: str) -> None:
    folder = Path(random_of("SafeAILab").save(tmp_path / "head"))
    (folder / "model.safetensors").unlink()
    torch.save([1, 2], folder / "pytorch_model.bin", _use_new_zipfile_serialization="cut off" not in words)
    with pytest.raises(ModelError, match=f"its pytorch_model.bin .*{words}"):
        LLM(target, str(folder), dtype="float32", max_model_len=64)


class Harmful:
    """What a pickle runs when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_nothing_in_a_pickle_is_run(target: str, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    random_of("SafeAILab").save(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Harmful(tmp_path / "run")}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="head cannot draft") as caught:
        LLM(target, str(folder), dtype="float32", max_model_len=64)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_prompt_in_chunks_and_three_texts_in_a_pass_give_the_same_numbers(target: str, folder: Any) -> None:
    head = random_of("SafeAILab")
    drafting = drafting_of(target, folder("SafeAILab"), head)
    texts = [TEXT, TEXT[::-1], [3]]
    sequences = [drafting.open(text) for text in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        drafting.show(sequence, text)
        sequence.commit([8])
    while any(not drafting.path(sequence) for sequence in sequences):
        drafting.step(*(one for one in sequences if not drafting.path(one)), most=4)
    drafting.step(*sequences)
    for which, (sequence, text) in enumerate(zip(sequences, texts, strict=True)):
        drafting.assert_last(which, *head.draft([*text, 8], drafting.path(sequence)[:-1])[-1])


def test_a_tree_gives_each_node_the_state_of_its_own_parent(target: str, folder: Any) -> None:
    assert_nodes_have_states_of_their_parents(drafting_of(target, folder("speculators"), random_of("speculators")))


def test_rows_are_reused_by_a_text_that_begins_alike_and_not_by_one_with_another_first_token(
    target: str, folder: Any
) -> None:
    head = random_of("SafeAILab")
    drafting = drafting_of(target, folder("SafeAILab"), head)
    text = [int(one) for one in np.random.default_rng(0).integers(2, 300, 40)]
    for first, num_reused in ((text[0], 0), (text[0], 39), (text[0] + 1, 0)):
        its = [first, *text[1:], *([9] if num_reused else [])]
        sequence = drafting.open(its)
        assert sequence.num_reused == num_reused
        drafting.show(sequence, its)
        sequence.commit([11])
        drafting.step(sequence)
        drafting.assert_last(0, *head.draft([*its, 11], [])[-1])
        sequence.close()


def test_a_text_whose_beginning_is_never_shown_is_read_from_the_first_state_on(target: str, folder: Any) -> None:
    head = random_of("SafeAILab")
    drafting = drafting_of(target, folder("SafeAILab"), head)
    sequence = drafting.open(TEXT)
    drafting.show(sequence, TEXT, 4)
    sequence.commit([7])
    drafting.step(sequence)
    drafting.assert_last(0, *head.draft([*TEXT, 7], [], first=5)[-1])


@pytest.mark.parametrize("of", ["token", "state"])
@pytest.mark.parametrize("method", ["sps", "card"])
def test_a_head_that_finds_the_next_token_is_accepted_at_every_depth(tmp_path: Path, of: str, method: str) -> None:
    head = right_head(of)
    assert_all_is_accepted(save_target(head, tmp_path / "target"), head.save(tmp_path / "head"), method)


@pytest.mark.parametrize(
    ("form", "placement", "method", "temperature"),
    crossed(["SafeAILab", "speculators"], ["inline", "thread"], ["sps", "card"], [0.0, 1.0]),
)
def test_texts_are_those_of_plain_decoding(
    target: str, folder: Any, form: str, method: str, placement: str, temperature: float
) -> None:
    assert_texts_are_plain(target, folder(form), method=method, placement=placement, temperature=temperature)


@pytest.mark.parametrize("changes", [{"dtype": "int8"}, {"draft_vocab": 100}, {"method": "card"}, {"method": "pearl"}])
def test_texts_are_the_same_in_integers_with_a_smaller_head_and_by_other_methods(
    target: str, folder: Any, changes: Mapping[str, Any]
) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20)
    drafted: dict[str, Any] = {"dtype": "float32", "method": "sps", "max_model_len": 200, **changes}
    with LLM(target, folder("SafeAILab"), **drafted) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    assert found == plain_texts(target, params, drafted["dtype"])


def test_a_head_in_integers_stays_near_its_floats(target: str, folder: Any) -> None:
    runner = plain_runner(load_decoder(target, dtype="float32"), max_model_len=64)
    head, text = random_of("SafeAILab"), [*TEXT, 7]
    drafting = Drafting(target, lambda one, _: load_head(folder("SafeAILab"), one, dtype="int8", cache_dir=""), head)
    assert drafting.writer.runner.precision == "int8"
    assert runner.precision == "float32"
    sequence = drafting.open(TEXT)
    drafting.show(sequence, TEXT)
    sequence.commit([7])
    drafting.step(sequence)
    expected = head.draft(text, [])[-1][0].numpy()
    found = drafting.passes[-1][0][0][-1]
    kept = np.isfinite(expected)
    assert np.corrcoef(found[kept], expected[kept])[0, 1] > 0.999


def test_embeddings_are_in_memory_once(target: str, folder: Any) -> None:
    runner = plain_runner(load_decoder(target, dtype="float32"), max_model_len=64)
    head = plain_runner(load_head(folder("SafeAILab"), runner, dtype="float32", cache_dir=""), max_model_len=64)
    assert head.lent.embeddings is runner.lent.embeddings
    assert head.max_model_len == 64, "the length of its training is no limit"


# ---- what cannot be used --------------------------------------------------------------------------------------------

OFFSETS = random_of("SafeAILab").stored["d2t"]
MISSING = "midlayer.self_attn.k_proj.weight"
FAULTS: dict[str, dict[str, Any]] = {
    r"reads states of 32 numbers, and its target gives 64": {"changes": {"fc.weight": torch.zeros(WIDTH, 96)}},
    r"fc.weight has shape \[32, 192\]": {"changes": {"fc.weight": torch.zeros(32, 192)}},
    "made for a vocabulary of 400 tokens, and its target has 299": {"stated": {"vocab_size": 400}},
    f"behind layer 9 of its target, which has {NUM_LAYERS}": {
        "stated": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}}
    },
    "its d2t names token 299, and there are 0 to 298": {"changes": {"d2t": OFFSETS + 299 - OFFSETS[-1] - 199}},
    "its d2t names token -1": {"changes": {"d2t": torch.cat([torch.tensor([-1]), OFFSETS[1:]])}},
    "its d2t names a token twice": {"changes": {"d2t": torch.cat([OFFSETS[1:2] + 1, OFFSETS[1:]])}},
    r"its d2t is \[199\] of int64": {"changes": {"d2t": OFFSETS[1:]}},
    "200 rows for 299 tokens, and there is no d2t": {"without": ["d2t"]},
    f"its tensor {MISSING} is missing": {"without": [MISSING]},
    "its tensor midlayer.mlp.up_proj.weight is missing": {"without": ["midlayer.mlp.up_proj.weight"]},
    "its tensor norm.weight is missing": {"without": ["norm.weight"]},
    "its tensor lm_head.weight is missing": {"without": ["lm_head.weight"]},
    r"k_proj.weight has shape \[64, 64\]": {"changes": {MISSING: torch.zeros(WIDTH, WIDTH)}},
    "its tensor layers.1.self_attn.q_proj.weight is missing": {
        "changes": {"layers.1.input_layernorm.weight": torch.zeros(WIDTH)}
    },
    "the config asks for no other.weight": {"changes": {"other.weight": torch.zeros(WIDTH)}},
    "its weight fc.weight holds NaN": {"changes": {"fc.weight": torch.full((WIDTH, 3 * WIDTH), float("nan"))}},
    "its norm_before_embedding is True": {"stated": {"norm_before_embedding": True}},
    "its other_way is True": {"stated": {"eagle_config": {"other_way": True}}},
    "its norm_output is 7, it must be true or false": {"stated": {"norm_output": 7}},
    "its tensor input_norm.weight is missing": {"stated": {"norm_before_fc": True}},
    "several tokens a pass, and its mask_token_id is None": {"stated": {"parallel_drafting": True}},
    "its tensor mask_hidden is missing": {"stated": {"ptd_token_id": 3}},
    "its masks are token 299, and there are 0 to 298": {"stated": {"ptd_token_id": 299}},
    "it drafts 99 tokens a pass, it must be 1 to 64": {"stated": {"ptd_token_id": 3, "para_depths": 99}},
    r"mask_hidden has shape \[9\], and 192 numbers": {
        "stated": {"ptd_token_id": 3},
        "changes": {"mask_hidden": torch.zeros(9)},
    },
    "lacks sizes of a Llama layer": {"stated": {"intermediate_size": None}},
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_head_that_does_not_fit_is_refused_in_a_line(target: str, tmp_path: Path, words: str) -> None:
    folder = random_of("SafeAILab").save(tmp_path / "head", **FAULTS[words])
    with pytest.raises(ModelError, match=words) as caught:
        LLM(target, folder, dtype="float32", max_model_len=64)
    assert "\n" not in str(caught.value)
    assert folder in str(caught.value)
    assert "use the head of this target" in str(caught.value)


def test_a_head_is_no_model(target: str, folder: Any) -> None:
    with pytest.raises(ModelError, match="is an EAGLE-3 head, and no model: give it as draft of its target"):
        LLM(folder("SafeAILab"), max_model_len=64)
    with pytest.raises(ModelError, match="is an EAGLE-3 head, and no model"):
        load_decoder(folder("SafeAILab"))


def test_places_where_no_states_come_are_refused(target: str, folder: Any) -> None:
    served = DraftModel.to_serve(folder("SafeAILab"), dtype="auto", device="cpu", max_model_len=64, kv_cache_bytes=None)
    with pytest.raises(ModelError, match="is an EAGLE-3 head, and no model: give it as draft of its target"):
        load_drafter(served, threads=1)
    with pytest.raises(SettingsError, match="hidden states, which do not leave the process"):
        LLM(target, folder("SafeAILab"), placement="process")
    with pytest.raises(ModelError, match="drafts several tokens in one pass"):
        LLM(target, folder("SafeAILab"), method="pard")
    with pytest.raises(ModelError, match="needs a target that runs in our own pass"):
        load_head(folder("SafeAILab"), None, dtype="auto", cache_dir="")


def test_a_smaller_vocabulary_that_leaves_a_head_no_token_is_refused(target: str, tmp_path: Path) -> None:
    drafted = {*drafted_ids(load_tokenizer(target), 50), *range(10)}  # the first ones end texts
    ids = torch.tensor([one for one in range(299) if one not in drafted][:200])
    late = random_of("SafeAILab").save(tmp_path / "head", changes={"d2t": ids - torch.arange(200)})
    with pytest.raises(SettingsError, match="draft_vocab leaves this drafter none of its 200 tokens"):
        LLM(target, late, draft_vocab=50, dtype="float32", max_model_len=64)
