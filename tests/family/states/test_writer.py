"""A block in the target's checkpoint drafts with the numbers of transformers' modules, and changes no text."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers.modeling_layers import MtpModel

from card import LLM, SamplingParams
from card.assembly.drafters import load_drafter
from card.errors import ModelError, SettingsError
from card.family.states.writer import StateWriter, make_writer
from card.links.process import DraftModel
from card.models.block_loading import load_block
from card.models.loading import load_decoder
from card.models.own import layers
from card.models.own.decoder_model import DecoderModel
from card.models.own.draft_block import DraftBlock
from card.models.own.layers import embedded
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from card.tree.nodes import NewNodes
from tests.cells import crossed
from tests.gguf_files import write_gguf
from tests.own_block import KINDS, Checkpoint, random_checkpoint, right_checkpoint
from tests.pair import make_tokenizer
from tests.state_drafting import (
    PROMPTS,
    TEXT,
    Drafting,
    assert_all_is_accepted,
    assert_close,
    assert_nodes_have_states_of_their_parents,
    assert_rounds_are_right,
    assert_texts_are_plain,
    plain_texts,
)
from tests.tiny import tiny_llama

GGUF_KINDS = [kind for kind in KINDS if not kind.startswith("qwen2")]  # no file of GGUF has MiMo's blocks


def drafting_of(folder: str, checkpoint: Checkpoint, block: str = "") -> Drafting:
    """Return the writer of a checkpoint's block, or of one in a file of its own."""

    def load(target: RowRunner, model: DecoderModel) -> DraftBlock:
        return load_block(block or folder, target, dtype="float32", cache_dir="", head=model.lm_head.weight)

    return Drafting(folder, load, checkpoint)


@functools.cache
def random_of(kind: str) -> Checkpoint:
    return random_checkpoint(kind)


def test_each_embedding_is_unpacked_once(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drafting, unpacked = drafting_of(folder("qwen3_5"), random_of("qwen3_5")), list[int]()

    def counted(embeddings: Any, token_ids: Sequence[int]) -> Any:
        unpacked.extend(token_ids)
        return embedded(embeddings, token_ids)

    monkeypatch.setattr(layers, "embedded", counted)
    assert_rounds_are_right(drafting, 2)
    assert len(unpacked) == len(set(unpacked)) >= len(set(TEXT))


def test_a_step_of_a_draft_calls_few_functions_of_python(folder: Any) -> None:
    drafting = drafting_of(folder("qwen3_5"), random_of("qwen3_5"))
    sequence, num_calls = drafting.open(TEXT), [0]
    drafting.show(sequence, TEXT)
    sequence.commit([7])
    drafting.step(sequence)
    drafting.step(sequence)

    def count(frame: Any, event: str, argument: Any) -> None:
        num_calls[0] += event == "call"

    sys.setprofile(count)
    try:
        drafting.writer.step([(sequence, 256)])
    finally:
        sys.setprofile(None)
    # 265 took 1.0 ms, where a pass of Qwen3.5-0.8B takes 44 to 50 of one core: 5 % are 2.2 ms.
    assert num_calls[0] <= 400


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
def test_logits_and_states_are_those_of_transformers_modules(folder: Any, kind: str, num_accepted: int) -> None:
    assert_rounds_are_right(drafting_of(folder(kind), random_of(kind)), num_accepted)


@pytest.mark.parametrize("kind", ["glm4_moe", "glm4_moe, norms of heads"])
def test_numbers_are_those_of_transformers_own_block(kind: str) -> None:
    checkpoint, text = random_of(kind), [*TEXT, 7]
    target = checkpoint.target
    block = MtpModel(target, 1).train(False)
    parts = {name: weight for name, weight in checkpoint.parts.items() if name.startswith("layers.0.")}
    weights = {f"layers.0.mtp_block.{name.removeprefix('layers.0.')}": weight for name, weight in parts.items()}
    names = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "post_norm"}
    weights |= {f"layers.0.{own}.weight": checkpoint.parts[f"{name}.weight"] for name, own in names.items()}
    missing, unknown = block.load_state_dict(weights, strict=False)
    assert not unknown and not [name for name in missing if name.startswith("layers.")]
    places = torch.arange(1, len(text))[None]
    with torch.no_grad():
        state = block.forward_layer(
            0, checkpoint.states(text[:-1])[None], places, None, input_ids=torch.tensor([text[1:]])
        )[0, -1]
        logits = target.lm_head(state)
    for one, other in zip(checkpoint.draft(text, [], first=1)[-1], (logits, state), strict=True):
        assert_close(one.numpy(), other)


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_a_block_of_a_gguf_file_gives_the_same_numbers(folder: Any, tmp_path: Path, kind: str) -> None:
    checkpoint = random_of(kind)
    file = checkpoint.save_gguf(Path(folder(kind)), tmp_path / "target.gguf")
    assert_rounds_are_right(drafting_of(file, checkpoint), 2)


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_a_block_in_a_file_of_its_own_gives_the_same_numbers(folder: Any, tmp_path: Path, kind: str) -> None:
    checkpoint = random_of(kind)
    file = checkpoint.save_block_file(Path(folder(kind)), tmp_path / "mtp-target.gguf")
    assert_rounds_are_right(drafting_of(folder(kind), checkpoint, file), 2)


def test_a_prompt_in_chunks_and_three_texts_in_a_pass_give_the_same_numbers(folder: Any) -> None:
    checkpoint = random_of("qwen3_5")
    drafting = drafting_of(folder("qwen3_5"), checkpoint)
    texts = [TEXT, TEXT[::-1], [3, 1, 4]]
    sequences = [drafting.open(text) for text in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        drafting.show(sequence, text)
        sequence.commit([8])
    while any(not drafting.path(sequence) for sequence in sequences):
        drafting.step(*(one for one in sequences if not drafting.path(one)), most=4)
    drafting.step(*sequences)
    for which, (sequence, text) in enumerate(zip(sequences, texts, strict=True)):
        drafting.assert_last(which, *checkpoint.draft([*text, 8], drafting.path(sequence)[:-1])[-1])


def test_a_tree_gives_each_node_the_state_of_its_own_parent(folder: Any) -> None:
    assert_nodes_have_states_of_their_parents(drafting_of(folder("qwen3_5"), random_of("qwen3_5")))


def test_a_text_whose_beginning_is_never_shown_is_read_from_the_first_state_on(folder: Any) -> None:
    checkpoint = random_of("qwen3_5")
    drafting = drafting_of(folder("qwen3_5"), checkpoint)
    sequence = drafting.open(TEXT)
    sequence.commit([7])
    assert sequence.frontier() == [], "not even the newest token has a state"
    drafting.show(sequence, [*TEXT, 7], 4)
    sequence.commit([9])
    drafting.step(sequence)
    drafting.assert_last(0, *checkpoint.draft([*TEXT, 7, 9], [], first=5)[-1])


def test_rows_of_a_text_are_reused_by_one_that_begins_with_it_but_not_those_without_a_beginning(folder: Any) -> None:
    checkpoint = random_of("qwen3_5")
    drafting = drafting_of(folder("qwen3_5"), checkpoint)
    text = [int(one) for one in np.random.default_rng(0).integers(2, 300, 40)]
    for begin, num_reused in ((12, 0), (0, 0), (0, 40)):
        sequence = drafting.open([*text, 7] if num_reused else text)
        drafting.show(sequence, text, begin)
        if num_reused:
            drafting.show(sequence, [*text, 7], 40)
        assert sequence.num_reused == num_reused, "the last token is run anew"
        sequence.commit([11] if num_reused else [7])
        drafting.step(sequence)
        whole = [*text, 7, 11] if num_reused else [*text, 7]
        drafting.assert_last(0, *checkpoint.draft(whole, [], first=begin and begin + 1)[-1])
        sequence.close()


@pytest.mark.parametrize(
    ("kind", "of", "method"), crossed(["qwen3_5", "glm4_moe", "qwen2, of MiMo"], ["token", "state"], ["sps", "card"])
)
def test_a_block_that_finds_the_next_token_is_accepted_at_every_depth(
    tmp_path: Path, kind: str, of: str, method: str
) -> None:
    assert_all_is_accepted(right_checkpoint(of, kind).save(tmp_path / "target"), "mtp", method)


@pytest.mark.parametrize(
    ("kind", "placement", "method", "temperature"),
    crossed(
        ["qwen3_5", "qwen3_5_moe", "glm4_moe", "qwen2, of MiMo"], ["inline", "thread"], ["sps", "card"], [0.0, 1.0]
    ),
)
def test_texts_are_those_of_plain_decoding(
    folder: Any, kind: str, method: str, placement: str, temperature: float
) -> None:
    assert_texts_are_plain(folder(kind), "mtp", method=method, placement=placement, temperature=temperature)


@pytest.mark.parametrize("method", ["pearl", "ssd", "specbranch", "ouroboros"])
def test_texts_are_those_of_plain_decoding_with_every_method_that_has_a_draft_model(folder: Any, method: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20)
    expected = plain_texts(folder("qwen3_5"), params)
    with LLM(folder("qwen3_5"), "mtp", dtype="float32", max_model_len=200, method=method) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)] == expected


@pytest.mark.parametrize("changes", [{"dtype": "int8"}, {"draft_vocab": 100}, {"method": "card"}])
def test_texts_are_the_same_in_integers_with_a_small_head_and_by_a_tuned_policy(
    folder: Any, changes: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20)
    drafted = {"dtype": "float32", "method": "sps", "max_model_len": 200, **changes}
    with LLM(folder("qwen3_5"), "mtp", **drafted) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    assert found == plain_texts(folder("qwen3_5"), params, drafted["dtype"])


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe, norms of heads"])
@pytest.mark.parametrize("in_own_file", [False, True])
def test_a_block_of_a_quantised_file_runs_in_its_own_blocks_and_gives_nearly_the_same_numbers(
    folder: Any, tmp_path: Path, kind: str, in_own_file: bool
) -> None:
    checkpoint, source = random_of(kind), Path(folder(kind))
    name = checkpoint.save_gguf(source, tmp_path / "target.gguf", kind=Kind.Q8_0)
    block = checkpoint.save_block_file(source, tmp_path / "mtp.gguf", kind=Kind.Q8_0) if in_own_file else name
    target = plain_runner(load_decoder(name), max_model_len=64)
    tokens, found = [5, 9, 30, 2], []
    states = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    for dtype in ("auto", "float32"):
        loaded = load_block(block, target, dtype=dtype, cache_dir="")
        assert any(one.has_blocks for one in loaded.layers[0].linears.values()) == (dtype == "auto")
        runner = plain_runner(loaded, max_model_len=64)
        rows = loaded.inputs.rows(tokens, states)
        whole = plain_runner(load_decoder(name, dtype=dtype), max_model_len=64)
        found.append(
            (
                runner.forward([Extension(runner.open(), tokens, range(-1, 3), 0, inputs=rows)])[0],
                whole.forward([Extension(whole.open(), tokens, range(-1, 3), 0)])[0],
            )
        )
    of_block, of_target = (
        np.linalg.norm(one - other) / np.linalg.norm(other) for one, other in zip(*found, strict=True)
    )
    assert of_block < 0.5 * of_target, "inputs of products have eight bits in both; a misplaced weight is far off"


@pytest.mark.parametrize("draft_vocab", [None, 100])
def test_texts_are_the_same_with_the_block_of_a_gguf_file_that_runs_by_its_own_blocks(
    folder: Any, tmp_path: Path, draft_vocab: int | None
) -> None:
    file = random_of("qwen3_5").save_gguf(Path(folder("qwen3_5")), tmp_path / "target.gguf", kind=Kind.Q8_0)
    settings: dict[str, Any] = {"target": file, "max_model_len": 200, "cache_dir": str(tmp_path)}
    params = SamplingParams(temperature=0.0, max_tokens=20)
    with LLM(**settings, method="vanilla") as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    with LLM(**settings, draft="mtp", method="sps", placement="inline", draft_vocab=draft_vocab) as llm:
        outputs = llm.generate(PROMPTS, params)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert sum(output.stats.verified_tokens for output in outputs)


@pytest.mark.parametrize("kind", ["qwen3_5", "glm4_moe"])
def test_a_right_block_of_a_gguf_file_is_accepted_at_every_depth_in_eight_bits(tmp_path: Path, kind: str) -> None:
    checkpoint = right_checkpoint("state", kind)
    checkpoint.save(tmp_path / "folder")
    file = checkpoint.save_gguf(tmp_path / "folder", tmp_path / "target.gguf", kind=Kind.Q8_0)
    params = SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True)
    settings: dict[str, Any] = {"num_speculative_tokens": 4, "max_model_len": 200, "cache_dir": str(tmp_path)}
    with LLM(file, "mtp", method="sps", placement="inline", **settings) as llm:
        assert llm.generate(PROMPTS[0], params)[0].stats.mean_acceptance_length == pytest.approx(5.0)


@pytest.mark.parametrize("target", ["folder", "file"])
def test_a_block_in_a_file_of_its_own_proposes_the_tokens_that_the_file_names(tmp_path: Path, target: str) -> None:
    checkpoint, vocab_size = right_checkpoint("state"), len(make_tokenizer())
    name = checkpoint.save(tmp_path / "folder")
    ids = [one for one in reversed(range(vocab_size)) if one % 4]
    block = checkpoint.save_block_file(tmp_path / "folder", tmp_path / "mtp-target.gguf", ids=ids, kind=Kind.Q8_0)
    if target == "file":
        name = str(write_gguf(tmp_path / "folder", tmp_path / "target.gguf", kind=Kind.Q8_0))
    params = SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True)
    settings: dict[str, Any] = {"num_speculative_tokens": 4, "max_model_len": 200, "cache_dir": str(tmp_path)}
    with LLM(name, block, method="sps", placement="inline", **settings) as llm:
        assert llm.settings.draft == block
        output = llm.generate(PROMPTS[0], params)[0]
    (first, *others), stats = output.outputs[0].token_ids, output.stats
    assert others == [(first + i + 1) % vocab_size for i in range(40)]
    assert 3.2 <= stats.mean_acceptance_length < 4.0, "one of four tokens is the target's own"


@pytest.mark.parametrize("dies", [True, False])
def test_texts_are_those_of_plain_decoding_when_a_block_dies_or_falls_silent(
    folder: Any, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    settings: dict[str, Any] = {"target": folder("qwen3_5"), "dtype": "float32", "max_model_len": 200}
    params = SamplingParams(temperature=0.0, max_tokens=20)
    with LLM(**settings, method="vanilla") as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    num_steps, step = [0], StateWriter.step

    def failing(writer: StateWriter, work: Any) -> Any:
        num_steps[0] += 1
        if num_steps[0] <= 3:
            return step(writer, work)
        if dies:
            raise RuntimeError("dead")
        return [NewNodes.none() for _ in work]

    monkeypatch.setattr(StateWriter, "step", failing)
    with LLM(**settings, draft="mtp", method="sps", placement="inline") as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)] == expected
    assert num_steps[0] > 3


def test_head_and_embeddings_are_in_memory_once(folder: Any) -> None:
    for kind in ("qwen3_5", "qwen3_5, tied"):
        target = plain_runner(load_decoder(folder(kind), dtype="float32"), max_model_len=64)
        runner = plain_runner(load_block(folder(kind), target, dtype="float32", cache_dir=""), max_model_len=64)
        assert runner.lent.head is target.lent.head
        assert runner.lent.embeddings is target.lent.embeddings


# ---- what cannot be used --------------------------------------------------------------------------------------------

MISSING = "mtp.layers.0.self_attn.k_proj.weight"
BEHIND = "model.layers.3."  # of GLM's three layers
FAULTS: dict[str, dict[str, Any]] = {
    "holds no block that drafts": {"without": ["mtp.fc.weight"]},
    f"its tensor {MISSING} is missing": {"without": [MISSING]},
    "its tensor mtp.pre_fc_norm_hidden.weight is missing": {"without": ["mtp.pre_fc_norm_hidden.weight"]},
    r"mtp.fc.weight has shape \[64, 96\], th": {"changes": {"mtp.fc.weight": torch.zeros(64, 96)}},
    r"mtp.norm.weight has shape \[32\]": {"changes": {"mtp.norm.weight": torch.zeros(32)}},
    "it has several blocks": {"changes": {"mtp.layers.1.input_layernorm.weight": torch.zeros(64)}},
    "the config asks for no model.other": {"changes": {"mtp.other.weight": torch.zeros(64)}},
    "its weight mtp.fc.weight holds NaN": {"changes": {"mtp.fc.weight": torch.full((64, 128), float("nan"))}},
    "holds no block that drafts ": {"kind": "glm4_moe", "without": [f"{BEHIND}eh_proj.weight"]},
    f"its tensor {BEHIND}hnorm.weight is missing": {"kind": "glm4_moe", "without": [f"{BEHIND}hnorm.weight"]},
    f"its tensor {BEHIND}self_attn.k_proj.weight is missing": {
        "kind": "glm4_moe",
        "without": [f"{BEHIND}self_attn.k_proj.weight"],
    },
    rf"{BEHIND}eh_proj.weight has shape \[64, 96\], th": {
        "kind": "glm4_moe",
        "changes": {f"{BEHIND}eh_proj.weight": torch.zeros(64, 96)},
    },
    rf"{BEHIND}shared_head.norm.weight has shape \[32\]": {
        "kind": "glm4_moe",
        "changes": {f"{BEHIND}shared_head.norm.weight": torch.zeros(32)},
    },
    "its tensor model.mtp_layers.0.hidden_layernorm.weight is missing": {
        "kind": "qwen2, of MiMo",
        "without": ["model.mtp_layers.0.hidden_layernorm.weight"],
    },
    r"model.mtp_layers.0.input_proj.weight has shape \[64, 96\], th": {
        "kind": "qwen2, of MiMo",
        "changes": {"model.mtp_layers.0.input_proj.weight": torch.zeros(64, 96)},
    },
    r"it has several blocks \(model.mtp_layers.1.input_layernorm.weight\), and one": {
        "kind": "qwen2, of MiMo",
        "changes": {"model.mtp_layers.1.input_layernorm.weight": torch.zeros(64)},
    },
    r"it has several blocks \(model.layers.4.input_layernorm.weight\), and one": {
        "kind": "glm4_moe",
        "changes": {"model.layers.4.input_layernorm.weight": torch.zeros(64)},
    },
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_checkpoint_without_a_block_that_can_draft_is_refused_in_a_line(tmp_path: Path, words: str) -> None:
    changes = dict(FAULTS[words])
    target = random_of(changes.pop("kind", "qwen3_5")).save(tmp_path / "target", **changes)
    with pytest.raises(ModelError, match=words) as caught:
        LLM(target, "mtp", dtype="float32", max_model_len=64)
    assert "\n" not in str(caught.value)
    assert "name a draft model" in str(caught.value)


GGUF_FAULTS: dict[str, dict[str, Any]] = {
    "no tensor blk.N.nextn.eh_proj.weight: llama.cpp's converter keeps none of MiMo-7B": {
        "without": ["eh_proj.weight"]
    },
    "its tensor blk.4.attn_k.weight is missing": {"without": ["blk.4.attn_k.weight"]},
    "its tensor blk.4.nextn.hnorm.weight is missing": {"without": ["nextn.hnorm.weight"]},
    r"blk.4.nextn.eh_proj.weight has shape \[64, 96\], th": {
        "changes": {"blk.4.nextn.eh_proj.weight": np.zeros((64, 96), np.float32)}
    },
    r"blk.4.attn_q_norm.weight has shape \[8\], th": {"changes": {"blk.4.attn_q_norm.weight": np.ones(8, np.float32)}},
    "blk.4.nextn.enorm.weight holds NaN, which is no number": {
        "changes": {"blk.4.nextn.enorm.weight": np.full(64, np.nan, np.float32)}
    },
    "a tensor blk.4.other.weight, which is not known": {"changes": {"blk.4.other.weight": np.ones(64, np.float32)}},
    "holds 2 blocks that draft, and one is run here": {
        "num_blocks": 2,
        "changes": {"blk.5.nextn.eh_proj.weight": np.zeros((64, 128), np.float32)},
    },
    "a tensor blk.4.nextn.other.weight, which": {"changes": {"blk.4.nextn.other.weight": np.ones(64, np.float32)}},
    "its tensor blk.3.ffn_down_exps.weight is missing": {
        "kind": "glm4_moe",
        "without": ["blk.3.ffn_down_exps.weight"],
    },
}


@pytest.mark.parametrize("words", GGUF_FAULTS)
def test_a_gguf_file_without_a_whole_block_is_refused_in_a_line_by_the_names_of_the_file(
    folder: Any, tmp_path: Path, words: str
) -> None:
    changes, file = dict(GGUF_FAULTS[words]), tmp_path / "target.gguf"
    kind = changes.pop("kind", "qwen3_5")
    random_of(kind).save_gguf(Path(folder(kind)), file, **changes)
    with pytest.raises(ModelError, match=words) as caught:
        LLM(str(file), "mtp", dtype="float32", max_model_len=64, cache_dir=str(tmp_path))
    assert "\n" not in str(caught.value)
    assert any(advice in str(caught.value) for advice in ("name a draft model", "use a folder", "download the file"))


@pytest.mark.parametrize(
    ("ids", "num_rows", "words"),
    [
        ([1, 2, 9999], 0, "d2t has ids from 1 to 9999, of "),
        ([1, -1], 0, "d2t has ids from -1 to 1, of "),
        ([1, 2, 1], 0, "d2t has an id twice"),
        ([1, 2, 3], 2, "d2t has 3 ids, and its head 2 outputs"),
    ],
)
def test_wrong_ids_in_the_file_of_a_block_are_refused_in_a_line(
    folder: Any, tmp_path: Path, ids: list[int], num_rows: int, words: str
) -> None:
    target = folder("qwen3_5")
    block = random_of("qwen3_5").save_block_file(Path(target), tmp_path / "mtp.gguf", ids=ids, num_rows=num_rows)
    with pytest.raises(ModelError, match=words):
        LLM(target, block, dtype="float32", max_model_len=64, cache_dir=str(tmp_path))


def test_the_file_of_a_block_is_no_model_and_fits_no_other_target(folder: Any, tmp_path: Path) -> None:
    target, settings = folder("qwen3_5"), {"max_model_len": 64, "cache_dir": str(tmp_path)}
    block = random_of("qwen3_5").save_block_file(Path(target), tmp_path / "mtp.gguf")
    with pytest.raises(ModelError, match="holds a block that drafts, and no model; give it as draft of its target"):
        LLM(block, **settings)
    with pytest.raises(ModelError, match="made for a model of 4 layers, and the target has 8"):
        LLM("demo-target", block, **settings)
    tiny_llama(len(make_tokenizer()), num_hidden_layers=4, hidden_size=32).save_pretrained(tmp_path / "narrow")
    make_tokenizer().save_pretrained(tmp_path / "narrow")
    with pytest.raises(ModelError, match="made for a model of 299 tokens and a width of 64, and the target has "):
        LLM(str(tmp_path / "narrow"), block, **settings)


def test_a_block_on_another_device_is_refused_in_a_line(folder: Any) -> None:
    with pytest.raises(SettingsError, match="own pass on a CPU: leave draft_device out"):
        LLM(folder("qwen3_5"), "mtp", dtype="float32", max_model_len=64, draft_device="cuda")


def test_a_draft_server_refuses_a_block_in_a_line(folder: Any, tmp_path: Path) -> None:
    target = Path(folder("qwen3_5"))
    alone = random_of("qwen3_5").save_block_file(target, tmp_path / "mtp.gguf")
    for name, words in (
        ("mtp", "in the target's process alone; name a draft"),
        (alone, "give it as draft of its target"),
    ):
        served = DraftModel.to_serve(name, dtype="float32", device="cpu", max_model_len=64, kv_cache_bytes=None)
        with pytest.raises(ModelError, match=words):
            load_drafter(served, threads=1)


def test_a_block_of_another_width_than_its_target_is_refused(folder: Any) -> None:
    target = plain_runner(load_decoder(folder("qwen3_5"), dtype="float32"), max_model_len=64)
    block = load_block(folder("qwen3_5"), target, dtype="float32", cache_dir="")
    runner = plain_runner(block, max_model_len=64)
    target.original = runner.original.__class__(num_parameters=1, num_layers=4, hidden_size=32)
    with pytest.raises(ModelError, match="reads states of 64 numbers, and its target gives 32"):
        make_writer(runner, target=target, find_grammar=None)
    with pytest.raises(ModelError, match="and its target gives none"):
        make_writer(runner, target=None, find_grammar=None)


def test_places_where_no_states_come_are_refused(folder: Any) -> None:
    with pytest.raises(SettingsError, match="hidden states, which do not leave the process"):
        LLM(folder("qwen3_5"), "mtp", placement="process")
    with pytest.raises(ModelError, match="mtp is no model of its own"):
        load_decoder("mtp")
    with pytest.raises(ModelError, match="give the target by name"):
        LLM(load_decoder(folder("qwen3_5")), "mtp", tokenizer=folder("qwen3_5"))
    with pytest.raises(ModelError, match="mtp is no model of its own"):
        LLM(folder("qwen3_5"), "mtp", method="pard")
    with pytest.raises(ModelError, match="runs in our own pass on a CPU"):
        load_block("a folder", None, dtype="auto", cache_dir="")
