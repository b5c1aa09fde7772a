"""Integer passes: exact sums, and bits of a row's logits that depend on its text alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from card.api.llm import LLM
from card.backends.transformers.loading import load_model
from card.config import SamplingParams
from card.config.registry import methods
from card.errors import ModelError
from card.kernels import int8_linear
from card.kernels.int8_linear import quantize_linear, why_not_int8
from card.kernels.jit.tables import PassTable
from card.kernels.machine_code import machine_code
from card.kernels.number_types import Floats
from card.kernels.packed_linear import GROUP, LANES, PANEL, multiply_rows
from card.machine.threads import use_threads
from card.models.features import FeatureWish
from card.models.inflation import inflate
from card.models.loading import load_decoder, load_tokenizer
from card.models.own import exact_decoder as int8
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from tests.pair import Pair
from tests.reaching_in import cache_of, say_why_not_int8
from tests.tiny import YARN, causal, tiny

REASON = why_not_int8()  # a kernel that is not exact is no reason to skip: it fails here
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(REASON is not None and "not exact" not in REASON, reason=f"no integer passes: {REASON}"),
]

# Neither 80 nor a head of 20 fills whole vectors.
SIZES = tiny(96, hidden_size=80, intermediate_size=112, max_position_embeddings=256)
WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA4 = {
    **SIZES,
    "head_dim": 24,
    "global_head_dim": 40,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "pad_token_id": 0,
}
KINDS: dict[str, transformers.PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gemma2": transformers.Gemma2Config(
        **SIZES, head_dim=20, sliding_window=9, attn_logit_softcapping=4.0, final_logit_softcapping=9.0
    ),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, head_dim=24, sliding_window=9, sliding_window_pattern=2),
    "granite": transformers.GraniteConfig(
        **SIZES,
        attention_bias=True,
        attention_multiplier=0.1,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        logits_scaling=2.0,
    ),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=9),
    "phi3": transformers.Phi3Config(**SIZES, pad_token_id=0, partial_rotary_factor=0.6),
    "glm4": transformers.Glm4Config(**SIZES, pad_token_id=0, head_dim=24),
    "olmo2": transformers.Olmo2Config(**SIZES),
    "olmo3": transformers.Olmo3Config(**SIZES, **WINDOWS),
    "exaone4": transformers.Exaone4Config(**SIZES, **WINDOWS, head_dim=24),
    "smollm3": transformers.SmolLM3Config(**SIZES, pad_token_id=0, no_rope_layers=[0, 1]),
    "ministral": transformers.MinistralConfig(**SIZES, **WINDOWS, head_dim=24),
    "cohere2": transformers.Cohere2Config(**SIZES, **WINDOWS, logit_scale=0.5),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=24),
    "lfm2": transformers.Lfm2Config(**{**SIZES, "num_hidden_layers": 4}, full_attn_idxs=[1, 3], block_multiple_of=16),
    "qwen3_5": transformers.Qwen3_5TextConfig(**{**SIZES, "num_hidden_layers": 4, "head_dim": 40}, **DELTA),
    "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig(
        **{**SIZES, "num_hidden_layers": 4, "head_dim": 40},
        **DELTA,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=72,
    ),
    "qwen3_next": transformers.Qwen3NextConfig(
        **{**SIZES, "num_hidden_layers": 4, "head_dim": 40},
        **DELTA,
        mlp_only_layers=[1],
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=72,
    ),
    "lfm2_moe": transformers.Lfm2MoeConfig(
        **{**SIZES, "num_hidden_layers": 4},
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        num_dense_layers=2,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        routed_scaling_factor=1.5,
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SIZES, head_dim=24, num_experts=24, num_experts_per_tok=3, moe_intermediate_size=40
    ),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **SIZES,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=72,
        norm_topk_prob=True,
    ),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "olmoe": transformers.OlmoeConfig(**SIZES, pad_token_id=0, eos_token_id=2, num_experts=16, num_experts_per_tok=4),
    "gpt_oss": transformers.GptOssConfig(
        **SIZES,
        **WINDOWS,
        pad_token_id=0,
        head_dim=24,
        num_local_experts=6,
        num_experts_per_tok=4,
        rope_parameters={**YARN, "truncate": False},
    ),
    "granitemoe": transformers.GraniteMoeConfig(**SIZES, residual_multiplier=0.4, logits_scaling=2.0),
    "gemma4": transformers.Gemma4TextConfig(
        **{**GEMMA4, "num_hidden_layers": 4, "layer_types": 2 * GEMMA4["layer_types"]},
        hidden_size_per_layer_input=24,
        vocab_size_per_layer_input=96,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        final_logit_softcapping=9.0,
    ),
    "gemma4_moe": transformers.Gemma4TextConfig(
        **GEMMA4,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=12,
        top_k_experts=3,
        moe_intermediate_size=40,
    ),
}
STORED = (  # kinds with weights as they are
    "llama float32",
    "gemma2 bfloat16",
    "qwen3 bfloat16",
    "granite float16",
    "qwen2_moe float32",
    "gpt_oss float32",
    "lfm2 float32",
    "lfm2 bfloat16",
    "lfm2_moe float32",
    "qwen3_5 float32",
    "qwen3_5 bfloat16",
    "qwen3_5_moe float32",
    "qwen3_next float32",
)
CASES = [*KINDS, *STORED]
SHARED = [  # `make test` takes each kind with two threads or with three
    pytest.param(kind, num_threads, marks=() if num_threads == 2 + idx % 2 else pytest.mark.slow)
    for idx, kind in enumerate(CASES)
    for num_threads in (1, 2, 3)
]
# Norms of weights around 1 let layers add much, heads of the delta rule have 16 channels, and routers choose others.
FAR = {"qwen3_5": 0.15, "qwen3_5_moe": 0.4, "qwen3_next": 0.4}
TEXT = [(7 * i * i + 3 * i) % 96 for i in range(70)]


def make_runner(kind: str, *, std: float = 0.3, in_integers: bool = True) -> RowRunner:
    kind, _, dtype = kind.partition(" ")
    torch.manual_seed(0)
    model = causal(copy.deepcopy(KINDS[kind]))  # which whoever runs the model writes to
    for name, parameter in model.named_parameters():
        parameter.data.normal_(mean=1.0 if name.endswith(("q_norm.weight", "k_norm.weight")) else 0.0, std=std)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.8)
        if name.endswith("expert_bias"):
            buffer.normal_(std=std)
    if dtype:
        model = model.to(getattr(torch, dtype))
    if in_integers and not dtype:
        model.computes_int8 = True
    return plain_runner(model, max_model_len=128, max_tree_rows=128, own_pass=None if in_integers else False)


@cache
def runner_of(kind: str) -> RowRunner:
    """Return a runner of a kind, made once in each process whose tests ask for it."""
    return make_runner(kind)


def chain(slot: int, token_ids: Sequence[int], start: int) -> Extension:
    return Extension(slot, token_ids, range(start - 1, start - 1 + len(token_ids)))


def logits_of(runner: RowRunner, token_ids: Sequence[int]) -> Floats:
    """Return the logits of every row of a text that is read in one pass, [T, V]."""
    slot = runner.open()
    try:
        return runner.forward([chain(slot, token_ids, 0)])[0]
    finally:
        runner.close(slot)


def distance(found: Floats, expected: Floats) -> float:
    """Return how far numbers are from others, as a share of these."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 6, 7, 12, 13, 16, 17, 33, 64])
def test_a_product_of_whole_numbers_is_exact(num_rows: int, num_parts: int) -> None:
    random = np.random.default_rng(num_rows)
    weight, x = (random.integers(-127, 128, (size, 200)).astype(np.float32) for size in (130, num_rows))
    weight[:, 0] = x[:, ::64] = 127.0  # all scales are 1
    bias = random.integers(-9, 9, 130).astype(np.float32)
    out = multiply_rows(x, quantize_linear(weight, bias), num_parts=num_parts)
    assert np.array_equal(out[:, :130], x @ weight.T + bias)
    assert not out[:, 130:].any()


def test_a_product_is_nearly_that_of_floats_also_beside_outliers_and_zeros() -> None:
    random = np.random.default_rng(1)
    weight, x = (random.standard_normal(shape, np.float32) for shape in ((130, 1000), (9, 1000)))
    weight[7] = x[3] = x[4, 64:128] = 0.0
    x[5, 100] = 1000.0  # spoils the scale of its own group alone
    out, expected = multiply_rows(x, quantize_linear(weight, None))[:, :130], x @ weight.T
    assert (np.linalg.norm(out - expected, axis=1) <= 0.015 * np.linalg.norm(expected, axis=1)).all()
    assert not out[3].any()
    assert not out[:, 7].any()


@pytest.mark.parametrize("kind", CASES)
@given(sizes=st.lists(st.integers(1, 33), min_size=1, max_size=12), num_threads=st.sampled_from([1, 2, 3]))
def test_logits_do_not_depend_on_how_a_text_is_cut_into_passes(kind: str, sizes: list[int], num_threads: int) -> None:
    runner = runner_of(kind)
    use_threads(1, in_integers=True)
    expected = logits_of(runner, TEXT)
    use_threads(num_threads, in_integers=True)
    slot, done, parts = runner.open(), 0, []
    for size in [*sizes, len(TEXT)]:
        piece = TEXT[done : done + size]
        if piece:
            parts.append(runner.forward([chain(slot, piece, done)])[0])
        done += len(piece)
    runner.close(slot)
    assert np.array_equal(np.concatenate(parts), expected)


@pytest.mark.parametrize("kind", CASES)
@given(data=st.data())
def test_a_node_of_a_tree_has_the_logits_of_its_own_path(kind: str, data: st.DataObject) -> None:
    runner = runner_of(kind)
    num_prefix = data.draw(st.integers(1, 40))
    num_nodes = data.draw(st.integers(1, 24))
    parents = [data.draw(st.integers(-1, idx - 1)) for idx in range(num_nodes)]  # -1: the last row of the prefix
    tokens = [data.draw(st.integers(0, 95)) for _ in range(num_nodes)]
    slot = runner.open()
    runner.forward([chain(slot, TEXT[:num_prefix], 0)])
    (logits,) = runner.forward([Extension(slot, tokens, [num_prefix + parent for parent in parents])])
    runner.close(slot)
    for idx in {0, num_nodes - 1, data.draw(st.integers(0, num_nodes - 1))}:
        path, node = [], idx
        while node >= 0:
            path.insert(0, tokens[node])
            node = parents[node]
        assert np.array_equal(logits[idx], logits_of(runner, TEXT[:num_prefix] + path)[-1])


@pytest.mark.parametrize("kind", CASES)
def test_logits_do_not_depend_on_the_batch_on_kept_rows_or_on_reused_prefixes(kind: str) -> None:
    runner = runner_of(kind)
    texts = [TEXT[:50], TEXT[5:8], TEXT[20:37], TEXT[3:4]]
    slots = [runner.open() for _ in texts]
    together = runner.forward([chain(slot, text, 0) for slot, text in zip(slots, texts, strict=True)])
    for text, logits in zip(texts, together, strict=True):
        assert np.array_equal(logits, logits_of(runner, text))
    runner.forward([Extension(slots[0], [1, 2, 3, 4], [49, 49, 51, 52])])  # 2 hangs beside 1, 3 and 4 below 2
    runner.keep(slots[0], 50, [51, 52, 53])
    (logits,) = runner.forward([chain(slots[0], [9], 53)])
    assert np.array_equal(logits[0], logits_of(runner, [*texts[0], 2, 3, 4, 9])[-1])
    reused = runner.open()
    runner.copy_rows(slots[0], reused, 30)
    (logits,) = runner.forward([chain(reused, [5, 6], 30)])
    assert np.array_equal(logits, logits_of(runner, [*TEXT[:30], 5, 6])[-2:])
    for slot in (*slots, reused):
        runner.close(slot)


@pytest.mark.parametrize(("kind", "num_threads"), SHARED)
def test_rows_that_are_shared_out_have_the_logits_and_states_of_few_rows(kind: str, num_threads: int) -> None:
    runner, wish = runner_of(kind), FeatureWish((0, 1, 2))
    texts = [TEXT[i:] + TEXT[:i] for i in range(4)]  # more rows than each thread computes at once
    runner.features.wish([wish])
    use_threads(num_threads, in_integers=True)
    slots = [runner.open() for _ in texts]
    together = runner.forward([chain(slot, text, 0) for slot, text in zip(slots, texts, strict=True)])
    states = [runner.features.of(i, wish) for i in range(len(texts))]
    use_threads(1, in_integers=True)
    for slot, text, logits, its_states in zip(slots, texts, together, states, strict=True):
        runner.close(slot)
        alone = runner.open()
        for first in range(0, len(text), 7):
            piece = slice(first, first + 7)
            (of_piece,) = runner.forward([chain(alone, text[piece], first)])
            assert np.array_equal(of_piece, logits[piece])
            assert np.array_equal(runner.features.of(0, wish), its_states[piece])
        runner.close(alone)
    runner.features.wish([])


def test_one_pass_warms_an_integer_runner_up(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, sizes = make_runner("llama"), list[int]()
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda new: sizes.append(len(new[0].token_ids)) or forward(new))
    runner.warm_up(9)
    assert sizes == [1]
    assert cache_of(runner).free_bytes == 0
    runner.warm_up(9)
    assert sizes == [1], "a pass has run"
    sizes.clear()
    floats = make_runner("llama", in_integers=False)
    forward = floats.forward
    monkeypatch.setattr(floats, "forward", lambda new: sizes.append(len(new[0].token_ids)) or forward(new))
    floats.warm_up(3)
    assert sizes == [1, 2, 3]


@pytest.mark.parametrize("kind", CASES)
def test_logits_and_features_are_nearly_those_of_floats(kind: str) -> None:
    found, features, wish = [], [], FeatureWish((0, 1, 2))
    for in_integers in (True, False):
        runner = make_runner(kind, std=0.15, in_integers=in_integers)
        runner.features.wish([wish])
        found.append(logits_of(runner, TEXT))
        features.append(runner.features.of(0, wish))
    most = FAR.get(kind, 0.05)
    assert distance(*found) < most
    assert features[0].shape == features[1].shape
    assert distance(*features) < most


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("llama float32", 2e-6),
        ("qwen2_moe float32", 2e-6),
        ("gpt_oss float32", 1e-5),
        ("lfm2 float32", 2e-6),
        ("lfm2_moe float32", 2e-6),
        ("qwen3_5 float32", 1e-5),
        ("qwen3_5_moe float32", 1e-5),
        ("qwen3_next float32", 1e-5),
        ("gemma2 bfloat16", 4e-2),
        ("granite float16", 4e-3),
    ],
)
def test_stored_weights_give_the_logits_of_torch_but_for_rounding(kind: str, error: float) -> None:
    found, expected = logits_of(runner_of(kind), TEXT), logits_of(make_runner(kind, in_integers=False), TEXT)
    assert (runner_of(kind).is_exact, runner_of(kind).precision) == (True, kind.partition(" ")[2])
    assert distance(found, expected) < error


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16", "float64"])
def test_models_that_are_loaded_for_a_cpu_run_on_the_exact_pass_in_every_dtype_but_float64(dtype: str) -> None:
    runner = plain_runner(load_decoder("demo-draft", dtype=dtype), max_model_len=64)
    assert runner.is_exact is (dtype != "float64")
    assert runner.precision == ("bfloat16" if dtype == "auto" else dtype)


def test_without_machine_code_transformers_modules_run_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    say_why_not_int8(monkeypatch, "not here")
    runner = plain_runner(load_decoder("demo-draft", dtype="bfloat16"), max_model_len=64)
    assert not runner.has_own_pass and runner.precision == "bfloat16"
    ids = [5, 6, 7, 8]
    with torch.no_grad():
        expected = load_model("demo-draft", dtype="bfloat16")(torch.tensor([ids])).logits[0]
    np.testing.assert_allclose(logits_of(runner, ids), expected.float(), atol=0.2, rtol=0.05)


def test_only_the_rows_that_are_asked_for_have_logits() -> None:
    runner = runner_of("llama")
    texts, firsts = [TEXT[:20], TEXT[3:14], TEXT[9:10]], [17, 11, 0]
    slots = [runner.open() for _ in texts]
    rows = [range(-1, len(text) - 1) for text in texts]
    found = runner.forward([Extension(*one) for one in zip(slots, texts, rows, firsts, strict=True)])
    for text, first, logits in zip(texts, firsts, found, strict=True):
        assert np.array_equal(logits, logits_of(runner, text)[first:])
    (logits,) = runner.forward([Extension(slots[0], TEXT[20:30], range(19, 29), 7)])
    assert np.array_equal(logits, logits_of(runner, TEXT[:30])[27:])
    for slot in slots:
        runner.close(slot)


@pytest.mark.parametrize("kind", CASES)
def test_rows_without_logits_leave_to_later_rows_what_those_with_logits_leave(kind: str) -> None:
    runner = runner_of(kind)
    use_threads(1, in_integers=True)
    expected = logits_of(runner, TEXT)
    use_threads(2, in_integers=True)
    for first, later in ((67, 70), (40, 40)):  # logits of the last rows of a pass, and of none
        slot = runner.open()
        (logits,) = runner.forward([Extension(slot, TEXT[:later], range(-1, later - 1), first)])
        assert np.array_equal(logits, expected[first:later])
        if later < len(TEXT):
            assert np.array_equal(runner.forward([chain(slot, TEXT[later:], later)])[0], expected[later:])
        runner.close(slot)


def test_of_a_prompt_the_last_layer_runs_the_rows_with_logits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, team, ran = runner_of("llama"), machine_code("team").ThreadTeam, list[tuple[int, ...]]()
    names = ("num_rows", "first_layer", "keeps_alone", "num_chosen")
    monkeypatch.setattr(
        team,
        "run",
        lambda self, table, run=team.run: (
            ran.append(tuple(table[getattr(PassTable, n)] for n in names)),
            run(self, table),
        ),
    )
    slot = runner.open()
    for piece, first in ((TEXT[:40], 40), (TEXT[40:], 29), ([5, 6], 0)):
        held = runner.num_rows(slot)
        runner.forward([Extension(slot, piece, range(held - 1, held - 1 + len(piece)), first)])
    runner.close(slot)
    assert ran == [(40, 0, 1, 0), (30, 0, 1, 0), (1, 1, 0, 1), (2, 0, 0, 2)]


PROMPTS = ["the cat sat on the mat and", "one two three"]
GREEDY_AND_SAMPLED = [SamplingParams(temperature=temperature, seed=5, max_tokens=40) for temperature in (0.0, 1.0)]


def texts(llm: LLM) -> list[tuple[int, ...]]:
    """Return the tokens of both prompts at once, greedy and sampled."""
    results = [one for params in GREEDY_AND_SAMPLED for one in llm.generate(PROMPTS, params)]
    return [one.outputs[0].token_ids for one in results]


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[tuple[int, ...]]:
    """What plain decoding writes; not even a batch of plain texts changes it."""
    with LLM(pair.target, dtype="int8", method="vanilla") as plain:
        together = texts(plain)
        alone = [plain.generate(prompt, params)[0] for params in GREEDY_AND_SAMPLED for prompt in PROMPTS]
        assert together == [one.outputs[0].token_ids for one in alone]
    return together


@pytest.mark.parametrize("method", [name for name, one in methods().items() if not one.needs_training])
def test_every_method_writes_the_text_of_plain_decoding(
    pair: Pair, expected: list[tuple[int, ...]], method: str
) -> None:
    draft = pair.draft if methods()[method].needs_draft else None
    settings: dict[str, Any] = {"placement": "inline"} if draft else {}
    with LLM(pair.target, draft, method=method, dtype="int8", **settings) as llm:
        assert texts(llm) == expected


def test_draft_and_target_may_compute_differently(pair: Pair) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30)
    with LLM(pair.target, dtype="float32", method="vanilla") as plain:
        expected = plain.generate("the cat", params)[0].outputs[0].token_ids
    settings: dict[str, Any] = {
        "placement": "process",
        "policy": "fixed",
        "max_wait_s": 60.0,
        "drafter_timeout_s": 90.0,
    }
    with LLM(pair.target, pair.draft, dtype="float32", draft_dtype="int8", **settings) as llm:
        result = llm.generate("the cat", params)[0]
    assert result.outputs[0].token_ids == expected
    assert result.stats.drafter_passes > 0


def test_the_demo_target_says_nearly_the_same_in_integers() -> None:
    text = "A farmer has 7 rows of apple trees with 9 trees in each row. How many trees has he? He has 7*9=63 trees."
    ids = load_tokenizer("demo-target").encode(text)
    exact, integers = (
        logits_of(plain_runner(load_decoder("demo-target", dtype=dtype), max_model_len=128), ids)
        for dtype in ("float32", "int8")
    )
    assert distance(integers, exact) < 0.03
    assert (exact.argmax(1) == integers.argmax(1)).mean() >= 0.9


def test_an_inflated_model_computes_in_integers_too() -> None:
    model = load_decoder("demo-draft", dtype="int8")
    runner = plain_runner(inflate(model, 12_000_000), max_model_len=64)
    assert (plain_runner(model, max_model_len=64).precision, runner.precision) == ("int8", "int8")


def test_what_cannot_run_in_integers_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 32, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"^{re.escape(str(tmp_path))} cannot run in int8: .* use dtype bfloat16"):
        plain_runner(load_decoder(tmp_path, dtype="int8"), max_model_len=32)
    say_why_not_int8(monkeypatch, "this processor is too old")
    with pytest.raises(ModelError, match=r"cannot run in int8: this processor is too old"):
        plain_runner(load_decoder("demo-draft", dtype="int8"), max_model_len=32)
    with pytest.raises(ModelError, match="unknown dtype 'int4'; allowed: auto, int8, float64"):
        load_decoder("demo-draft", dtype="int4")


def test_the_probe_names_a_kernel_that_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_off(x: Floats, linear: Any, *, num_parts: int) -> Floats:
        return multiply_rows(x, linear, num_parts=num_parts) + (len(x) == 16)

    monkeypatch.setattr(int8_linear, "multiply_rows", one_off)
    why_not_int8.cache_clear()
    try:
        assert "products of 16 rows in 1 parts are not exact" in str(why_not_int8())
    finally:
        why_not_int8.cache_clear()


def test_an_interrupt_before_a_pass_leaves_no_thread_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner("llama")
    expected = logits_of(runner, TEXT)
    use_threads(2, in_integers=True)
    assert np.array_equal(logits_of(runner, TEXT), expected)

    def interrupted(code: int, team: int, table: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine_code("team"), "lead", interrupted)
    with pytest.raises(KeyboardInterrupt):
        logits_of(runner, TEXT)
    monkeypatch.undo()
    assert np.array_equal(logits_of(runner, TEXT), expected)


def test_without_llvmlite_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_linear, "find_spec", lambda name: None)
    why_not_int8.cache_clear()
    try:
        assert "pip install llvmlite" in str(why_not_int8())
    finally:
        why_not_int8.cache_clear()


def test_a_thread_that_cannot_be_started_is_not_waited_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = machine_code("team")
    runner = make_runner("llama")
    expected = logits_of(runner, TEXT)

    def refuse(self: object) -> None:
        raise RuntimeError("can't start new thread")

    use_threads(3, in_integers=True)
    monkeypatch.setattr(crew.threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        logits_of(make_runner("llama"), TEXT)
    with pytest.raises(RuntimeError, match="new thread"):
        logits_of(runner, TEXT)
    monkeypatch.undo()
    assert np.array_equal(logits_of(runner, TEXT), expected)


def test_both_sides_of_the_machine_code_count_alike() -> None:
    vectors, tiles = machine_code("vectors"), machine_code("tiles")
    theirs = tiles.PANEL, vectors.GROUP, vectors.LANES
    assert theirs == (PANEL, GROUP, LANES)
    assert 1 <= tiles.MOST_ROWS <= int8.MOST_TILE_ROWS
