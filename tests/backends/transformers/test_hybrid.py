"""Models with a recurrent or convolutional state: their texts are transformers' own, drafts or no drafts.

One family is looked at closely, the others by their logits and one text. transformers' `generate` is the truth.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import card.hf
from card.backends.transformers.hybrid import HybridRunner
from card.backends.transformers.loading import load_model
from card.backends.transformers.row_check import differing_rows
from card.backends.transformers.runner import TorchRunner
from card.backends.transformers.states import MAX_LANDMARKS, MAX_RECENT, State, Tail
from card.config import DraftSettings, SamplingParams
from card.config.registry import methods
from card.engine.engine import Engine
from card.engine.queue import Limits
from card.errors import CapacityError, ModelError, SettingsError
from card.models.features import FeatureWish
from card.models.protocol import Extension, LanguageModel, Recurrent, sequence_bytes
from card.models.rows.pool import SequencePool
from card.models.runner import RowRunner
from card.models.runners import how_it_runs, plain_runner
from card.tree.nodes import Nodes
from tests.decoding import decode, fake, inline, make_engine, make_request, plain, run_all, toy_draft, toy_target
from tests.models.test_torch_runner import assert_same
from tests.tiny import tiny
from tests.toy import TableModel
from tests.unreliable_link import Faults

VOCAB_SIZE = 64
NUM_NEW = 24
ENDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
SIZES = tiny(VOCAB_SIZE, head_dim=8, max_position_embeddings=160, **ENDS)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}
CONV = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
GRANITE = {**MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32}
SCAN = {"state_size": 8, "expand": 2}
NEMOTRON = {
    "layers_block_type": ["mamba", "moe", "attention"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}
KIMI = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 16,
}
ZAMBA = {
    "mamba_d_state": 8,
    "n_mamba_heads": 2,
    "attention_head_dim": 16,
    "attention_hidden_size": 64,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid"] * 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", DELTA),
    "qwen3_5_moe": ("Qwen3_5Moe", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_next": ("Qwen3Next", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "olmo_hybrid": ("OlmoHybrid", DELTA),
    "lfm2": ("Lfm2", CONV),
    "lfm2_moe": ("Lfm2Moe", {**CONV, **EXPERTS, "num_dense_layers": 1}),
    "granite": ("GraniteMoeHybrid", {**GRANITE, "layer_types": ["mamba", "attention"]}),
    "nemotron_h": ("NemotronH", NEMOTRON),
    "falcon_h1": ("FalconH1", {**MAMBA, "mamba_d_ssm": 64}),
    "kimi_linear": ("KimiLinear", KIMI),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "mamba2": ("Mamba2", {**SCAN, "num_heads": 8, "head_dim": 8, "n_groups": 1}),
    "mamba": ("Mamba", SCAN),
    "falcon_mamba": ("FalconMamba", SCAN),
    "zamba": ("Zamba", {**ZAMBA, "mamba_dt_rank": 4}),
    "zamba2": ("Zamba2", {**ZAMBA, "mamba_ngroups": 1, "mamba_headdim": 32, "num_mem_blocks": 1, "adapter_rank": 4}),
    "jamba": ("Jamba", {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}),
}
MIXERS = ("qwen3_5", "lfm2", "granite", "kimi_linear", "mamba", "zamba2")  # a family for each kind of state
SLOW = pytest.mark.slow
ROW_BY_ROW = ("mamba", "falcon_mamba", "jamba")
CHAINED: dict[str, Any] = {"num_speculative_tokens": 6, "min_verify_prob": 0.0, "min_path_logprob": -1e9}
TREES = DraftSettings(verify="tree", beam_width=4, branch=3, budget=8, lead=8, **CHAINED)
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_NEW)
LENGTHS = (5, 20, 90)  # of prompts

pytestmark = pytest.mark.timeout(180)


@functools.cache
def model_of(name: str, noise: float = 0.0) -> PreTrainedModel:
    """Return a tiny random model; ``noise`` changes its weights by so many times their own spread."""
    family, changes = FAMILIES[name]
    kind = f"{family}TextConfig" if name.startswith("qwen3_5") else f"{family}Config"
    torch.manual_seed(1)
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, kind)(**{**SIZES, **changes})
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2.0 if weight.dim() > 1 else 1.0)  # so that texts do not repeat one token
            if noise:
                weight.add_(noise * weight.std(unbiased=False) * torch.randn_like(weight))
    return model


@functools.cache
def runner_of(name: str, noise: float = 0.0) -> RowRunner:
    model = copy.deepcopy(model_of(name, noise))
    return plain_runner(model, max_model_len=160, max_tree_rows=40, own_pass=False)  # LFM2 has one


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(2, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist())


@functools.cache
def expected(name: str, length: int, num_new: int = NUM_NEW) -> list[int]:
    """Return what transformers writes after the prompt alone."""
    ids = torch.tensor([prompt_of(length)])
    model = copy.deepcopy(model_of(name))
    options = {"do_sample": False, "max_new_tokens": num_new, "eos_token_id": None}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, length:].tolist()


def chain(runner: LanguageModel, slot: int, token_ids: Sequence[int], first_logits_idx: int = 0) -> Extension:
    last_row = runner.num_rows(slot) - 1
    return Extension(slot, token_ids, range(last_row, last_row + len(token_ids)), first_logits_idx)


def written(engine: Engine, requests: Sequence[Any]) -> list[list[int]]:
    """Return the tokens that all requests get, which are asked for at once."""
    texts = run_all(engine, {0: list(requests)})
    return [texts[request.request_id][0] for request in requests]


def requests_of(*lengths: int, first_id: int = 1, **changes: Any) -> list[Any]:
    asked = {"method": "sps", "params": GREEDY, "draft": TREES, **changes}
    return [make_request(first_id + i, prompt=prompt_of(length), **asked) for i, length in enumerate(lengths)]


# ---- every family ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_one_pass_over_the_text_whatever_was_dropped_beside_it(name: str) -> None:
    runner, ids = runner_of(name), prompt_of(40)
    with torch.no_grad():
        truth = copy.deepcopy(model_of(name))(torch.tensor([ids]), use_cache=False).logits[0]
    text, other = runner.open(), runner.open()
    assert_same(runner.forward([chain(runner, text, ids[:9])])[0], truth[:9])
    assert_same(runner.forward([chain(runner, text, ids[9:12])])[0], truth[9:12])
    for num_right, wrong in ((1, [7, 8]), (3, [9]), (0, [2, 3, 4]), (2, []), (1, [5])):
        num_rows = runner.num_rows(text)
        new_ids = [*ids[num_rows : num_rows + 1 + num_right], *wrong]
        passes = [chain(runner, other, [6] * 3), chain(runner, text, new_ids)]
        logits = runner.forward(passes)[1]
        assert_same(logits[: 1 + num_right], truth[num_rows : num_rows + 1 + num_right])
        runner.keep(text, num_rows, range(num_rows, num_rows + 1 + num_right))
        runner.keep(other, runner.num_rows(other) - 1)
    num_rows = runner.num_rows(text)
    copied = runner.open()
    runner.copy_rows(text, copied, num_rows - 3)
    assert runner.num_rows(copied) == num_rows - 3
    passes = [chain(runner, copied, ids[num_rows - 3 :]), chain(runner, text, ids[num_rows:], 2)]
    for logits, start in zip(runner.forward(passes), (num_rows - 3, num_rows + 2), strict=True):
        assert_same(logits, truth[start:])
    for slot in (text, other, copied):
        runner.close(slot)


@pytest.mark.parametrize("name", [name if name in MIXERS else pytest.param(name, marks=SLOW) for name in FAMILIES])
def test_drafts_of_a_family_change_no_token(name: str) -> None:
    engine = make_engine(runner_of(name), inline(runner_of(name, 0.1)), "sps")
    requests = requests_of(*LENGTHS)
    assert written(engine, requests) == [expected(name, length) for length in LENGTHS]


@pytest.mark.parametrize("name", FAMILIES)
def test_only_scans_that_start_without_the_state_run_row_by_row(name: str) -> None:
    decoder = runner_of(name)._decoder
    assert {mixer.goes_on for mixer in decoder._mixers} == {name not in ROW_BY_ROW}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("lfm2", "chains only; 0.0 MB of states a request; no int8"),
        ("mamba", "chains only; 0.0 MB of states a request; no int8; prompts and candidates token by token"),
    ],
)
def test_users_are_told_the_path_and_the_limits_of_a_model_with_a_state(name: str, limits: str) -> None:
    assert how_it_runs(runner_of(name)).startswith(f"transformers' modules in float32 with a state; {limits}")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_check_at_the_start_finds_nothing_wrong(name: str) -> None:
    assert differing_rows(runner_of(name)) == ""


def test_the_check_at_the_start_finds_a_state_that_was_lost() -> None:
    runner = plain_runner(copy.deepcopy(model_of("falcon_mamba")), max_model_len=64)
    for mixer in runner._decoder._mixers:  # type: ignore[union-attr]
        mixer.goes_on = True
    assert differing_rows(runner).startswith("behind refused tokens differ by")


def test_a_family_with_layers_of_attention_only_is_run_as_any_other() -> None:
    torch.manual_seed(1)
    config = transformers.GraniteMoeHybridConfig(
        **{**SIZES, **GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0, "layer_types": ["attention"] * 2}
    )
    model = transformers.GraniteMoeHybridForCausalLM(config).eval()
    runner, ids = plain_runner(copy.deepcopy(model), max_model_len=64), prompt_of(20)
    assert not isinstance(runner, Recurrent)
    slot = runner.open()
    assert_same(runner.forward([chain(runner, slot, ids)])[0], model(torch.tensor([ids])).logits[0].detach())
    branches = runner.forward([Extension(slot, [3, 4], [19, 19])])[0]
    for logits, token in zip(branches, (3, 4), strict=True):
        assert_same(logits, model(torch.tensor([[*ids, token]])).logits[0, -1].detach())


def test_a_scan_in_chunks_is_not_filled_up_to_a_whole_one_in_a_short_pass() -> None:
    runner = runner_of("granite")
    (module,) = [module for module in runner._decoder.model.modules() if hasattr(module, "chunk_size")]  # type: ignore
    seen = []
    handle = module.in_proj.register_forward_pre_hook(lambda *_: seen.append(module.chunk_size))
    slot = runner.open()
    for length in (1, 5, 40):
        runner.forward([chain(runner, slot, prompt_of(length), length - 1)])
    runner.close(slot)
    handle.remove()
    assert seen == [16, 16, 64, 16], "the last token of a prompt has a part of its own"
    assert module.chunk_size == 256


# ---- whole texts of one family --------------------------------------------------------------------------------------

DEEP = "qwen3_5"
COUNTED = ("lfm2", "granite", "nemotron_h", "falcon_h1", "kimi_linear", "zamba2")  # whose passes are counted beside it
WAYS: dict[str, dict[str, Any]] = {
    "vanilla": {"method": "vanilla", "uses_drafter": False},
    "sps": {"method": "sps"},
    "card": {"method": "card"},
    "pearl": {"method": "pearl"},
    "specbranch": {"method": "specbranch"},
    "ssd": {"method": "ssd"},
    "suffix": {"method": "suffix", "uses_drafter": False},
    "recycling": {"method": "recycling", "uses_drafter": False},
    "lookahead": {"method": "lookahead", "uses_drafter": False},
}


def engine_of(way: str, limits: Limits | None = None) -> Engine:
    link = inline(runner_of(DEEP, 0.1)) if WAYS[way].get("uses_drafter", True) else None
    return make_engine(runner_of(DEEP), link, way, limits=limits)


@pytest.mark.parametrize("way", WAYS)
def test_a_text_is_that_of_transformers_alone_beside_others_in_chunks_and_on_reused_rows(way: str) -> None:
    engine = engine_of(way, Limits(prefill_chunk=7))
    assert written(engine, requests_of(20, **WAYS[way])) == [expected(DEEP, 20)]
    truth = [expected(DEEP, length) for length in LENGTHS]
    assert written(engine, requests_of(*LENGTHS, first_id=10, **WAYS[way])) == truth
    again = requests_of(*LENGTHS, first_id=20, **WAYS[way])
    assert written(engine, again) == truth
    assert engine.stats().prefix_hits > 0
    assert engine.stats().chains_only


@pytest.mark.parametrize("way", ["sps", "card", "suffix"])
def test_a_sampled_text_is_the_same_with_drafts(way: str) -> None:
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=NUM_NEW, top_p=0.95)
    drafted = written(engine_of(way), requests_of(*LENGTHS, **{**WAYS[way], "params": params}))
    truth = written(engine_of("vanilla"), requests_of(*LENGTHS, **{**WAYS["vanilla"], "params": params}))
    assert drafted == truth


def test_texts_of_one_prompt_at_once_read_it_once() -> None:
    engine = engine_of("sps")
    runner = runner_of(DEEP)
    requests = [make_request(i, method="sps", params=GREEDY, draft=TREES, prompt=prompt_of(90)) for i in (1, 2, 3)]
    assert written(engine, requests) == [expected(DEEP, 90)] * 3
    assert engine.stats().prefix_reused_tokens == 2 * 89
    assert isinstance(runner, Recurrent)


@pytest.mark.parametrize("num_rounds", [1, 4])
def test_a_request_aborted_in_the_middle_leaves_the_others_and_the_next_as_they_are(num_rounds: int) -> None:
    engine = engine_of("sps", Limits(prefill_chunk=16))
    first, second = requests_of(90, 20)
    texts: dict[int, list[int]] = {}
    for request in (first, second):
        engine.add(engine.check(request))
    for _ in range(num_rounds):
        for update in engine.step():
            texts.setdefault(update.request_id, []).extend(update.token_ids)
    assert engine.abort(first.request_id)
    while engine.has_work:
        for update in engine.step():
            texts.setdefault(update.request_id, []).extend(update.token_ids)
    assert texts[second.request_id] == expected(DEEP, 20)
    assert written(engine, requests_of(90, first_id=9)) == [expected(DEEP, 90)]


@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_that_is_killed_late_or_deaf_changes_no_token(seed: int) -> None:
    faults = Faults(seed=seed, drop=0.2, duplicate=0.3, max_delay=3, kill=0.1, max_passes=4)
    engine = make_engine(runner_of(DEEP), fake(runner_of(DEEP, 0.1), faults), "card")
    requests = requests_of(*LENGTHS, method="card")
    assert written(engine, requests) == [expected(DEEP, length) for length in LENGTHS]


@pytest.mark.parametrize(("name", "drafts"), [(DEEP, False), ("lfm2", True)])
def test_generate_of_transformers_gets_its_own_text(name: str, drafts: bool) -> None:
    """With an assistant model transformers refuses what it calls stateful before CARD is asked."""
    model = copy.deepcopy(model_of(name))
    ids = torch.tensor([prompt_of(20)])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_NEW, "eos_token_id": None}
    if drafts:
        options["assistant_model"] = copy.deepcopy(model_of(name, 0.1))
    for _ in range(2):
        written = model.generate(ids, custom_generate=card.hf.generate, **options)[0, 20:].tolist()
        assert written == expected(name, 20)
    options.pop("assistant_model", None)
    assert model.generate(ids, **options)[0, 20:].tolist() == expected(name, 20), "it can be used elsewhere again"


# ---- what a pass costs ----------------------------------------------------------------------------------------------


class Counted:
    """Counts the passes of a runner, and how often each place of a text is run."""

    def __init__(self, runner: RowRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_passes = 0
        self.times: dict[tuple[int, int], int] = {}  # of a slot and a row that was kept
        decoder = runner._decoder
        forward = decoder.forward

        def counting(*args: Any) -> Any:
            self.num_passes += 1
            for part in decoder.parts:  # type: ignore[union-attr]
                for row in range(part.start, part.start + len(part.extension.token_ids)):
                    self.times[part.extension.slot, row] = self.times.get((part.extension.slot, row), 0) + 1
            return forward(*args)

        monkeypatch.setattr(decoder, "forward", counting)


@pytest.mark.parametrize(
    ("name", "noise"),
    [
        *((DEEP, noise) for noise in (0.0, 0.1, 3.0)),
        *((name, 0.0) for name in COUNTED),
        *(pytest.param(name, 3.0, marks=SLOW) for name in COUNTED),
    ],
)
def test_no_token_is_run_in_a_pass_of_its_own_once_more(
    name: str, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(name)
    counted = Counted(runner, monkeypatch)
    token_ids, _, stats = decode(
        runner, inline(runner_of(name, noise)), method="sps", params=GREEDY, draft=TREES, prompt=prompt_of(20)
    )
    assert token_ids == expected(name, 20)
    assert counted.num_passes == 1 + stats.target_passes <= NUM_NEW, "plain decoding makes a pass for each token"
    if noise == 0.0:
        assert stats.accepted_tokens == stats.verified_tokens
        assert max(counted.times.values()) == 1, "all was accepted, so nothing is run twice"
    if name == DEEP:
        assert (stats.accepted_tokens > 0) == (noise < 1.0)


def test_a_kept_row_is_run_at_most_twice() -> None:
    runner = runner_of(DEEP)
    slot, ids, rng = runner.open(), prompt_of(150), random.Random(3)
    runner.forward([chain(runner, slot, ids[:20], 19)])
    num_tail = 0  # rows that are not absorbed
    while (num_rows := runner.num_rows(slot)) < 120:
        num_right, num_wrong = rng.randint(0, 3), rng.randint(0, 3)
        runner.forward([chain(runner, slot, [*ids[num_rows : num_rows + 1 + num_right], *[2] * num_wrong])])
        runner.keep(slot, num_rows + 1 + num_right)
        most = num_right if num_tail else 1 + num_right  # what was run twice is absorbed
        num_tail = runner.num_rows(slot) - runner.lendable_rows(slot, runner.num_rows(slot))  # type: ignore
        assert num_tail <= most
    runner.close(slot)


# ---- memory and reuse -----------------------------------------------------------------------------------------------


def test_states_of_a_sequence_are_few_however_long_it_gets() -> None:
    tail = Tail()
    for step in range(300):
        is_prompt = step < 50
        num_rows = len(tail.token_ids) + 3
        tail.add([0] * 3, [State(num_rows, {})], num_rows if is_prompt else None)
        assert len(tail._recent) <= MAX_RECENT
        assert len(tail._landmarks) <= MAX_LANDMARKS
        assert tail.num_absorbed == num_rows
    assert [state.num_rows for state in tail._landmarks][-1] == 150, "the end of the prompt is kept"
    assert [state.num_rows for state in tail._recent][-2:] == [897, 900]
    tail.cut(899)
    assert tail.num_absorbed == 897
    tail.cut(200)
    assert tail.num_absorbed == 150
    assert tail.copied(10).num_absorbed == 0


def test_states_count_as_kv_memory() -> None:
    runner = runner_of(DEEP)
    assert isinstance(runner, Recurrent)
    of_one = 32 * runner.row_bytes + runner.state_bytes
    assert runner.state_bytes > 0 and sequence_bytes(runner, 32) == of_one
    with pytest.raises(SettingsError, match=rf"must be {of_one} bytes or more for this model"):
        SequencePool(runner, of_one - 1)
    pool = SequencePool(runner, 2 * of_one)
    opened = [pool.open(prompt_of(20), 32) for _ in range(2)]
    assert pool.stats.used_bytes == 2 * of_one and not pool.has_room(1)
    with pytest.raises(CapacityError, match="do not fit"):
        pool.open(prompt_of(20), 32)
    for one in opened:
        pool.close(one.slot)


def test_a_prompt_is_reused_up_to_a_place_where_its_state_was_kept() -> None:
    runner = runner_of(DEEP)
    pool = SequencePool(runner, 1 << 30)
    ids = prompt_of(90)
    slot = pool.open(ids, 128).slot
    for start in range(0, 90, 30):
        part = ids[start : start + 30]
        runner.forward([chain(runner, slot, part, len(part) if start < 60 else len(part) - 1)])
        pool.note(slot, ids[: start + 30])
    pool.close(slot, ids)
    for length, num_reused in ((89, 60), (90, 89), (45, 30), (25, 0)):
        opened = pool.open(ids[:length], 128)
        assert (opened.num_reused, runner.num_rows(opened.slot)) == (num_reused, num_reused), length
        pool.close(opened.slot)
    longer = pool.open((*ids, 5, 6, 7), 128)
    assert longer.num_reused == 90
    pool.close(longer.slot)
    pool.clear()


# ---- chains only ----------------------------------------------------------------------------------------------------


class ChainTable(TableModel):
    """A table model that takes chains only, as a model with a state does."""

    state_bytes, runs_row_by_row = 100, False

    def lendable_rows(self, slot: int, num_rows: int) -> int:
        return num_rows

    def forward(self, extensions: Sequence[Extension]) -> list[torch.Tensor]:
        for extension in extensions:
            start = self.num_rows(extension.slot)
            assert list(extension.parents) == list(range(start - 1, start - 1 + len(extension.token_ids)))
        return super().forward(extensions)


@pytest.mark.parametrize("verify", ["chain", "tree", "trunk"])
@pytest.mark.parametrize(
    "way",
    [name for name, one in methods().items() if name != "vanilla" and not (one.needs_head or one.selection)],
)
def test_neither_target_nor_drafter_is_ever_asked_for_a_tree(way: str, verify: Any) -> None:
    target = toy_target()
    chained, drafts = copy.copy(target), toy_draft(target, 0.8)
    chained.__class__ = drafts.__class__ = ChainTable
    draft = TREES.replace(verify=verify)
    needs_draft = methods()[way].needs_draft
    for make_link in (inline, fake):
        link = make_link(drafts) if needs_draft else None
        writers = ("recycling", "suffix") if needs_draft else ()
        token_ids, reason, stats = decode(chained, link, method=way, draft=draft, writers=writers)
        assert (token_ids, reason) == plain(toy_target())
        assert stats.accepted_tokens > 0 or not needs_draft


def test_a_tree_drafter_gives_a_target_of_chains_its_best_chain() -> None:
    target = toy_target()
    chained = copy.copy(target)
    chained.__class__ = ChainTable
    perfect = toy_draft(target, 1.0)
    token_ids, reason, stats = decode(chained, inline(perfect), method="sps", draft=TREES.replace(beam_width=4))
    assert (token_ids, reason) == plain(toy_target())
    assert stats.accepted_tokens == stats.verified_tokens > 0


def test_the_best_chain_of_candidates_follows_the_likeliest_child() -> None:
    nodes = Nodes(
        (5, 6, 7, 8, 9), (-1, -1, 1, 1, 0), (-2.0, -1.0, -4.0, -3.0, -2.5), (1, 1, 2, 2, 2), (1, 2, 2, 3, 1), 1
    )
    assert nodes.best_chain() == Nodes((6, 8), (-1, 0), (-1.0, -3.0), (1, 2), (2, 3))
    assert Nodes().best_chain() == Nodes()


@pytest.mark.parametrize(
    "refused",
    [
        lambda runner, slot: runner.forward([Extension(slot, [3, 4], [2, 2])]),
        lambda runner, slot: runner.forward([Extension(slot, [3], [1])]),
        lambda runner, slot: runner.forward([Extension(slot, [], [])]),
        lambda runner, slot: runner.forward([Extension(slot, [VOCAB_SIZE], [2])]),
        lambda runner, slot: runner.keep(slot, 1, [2]),
        lambda runner, slot: runner.keep(slot, 4),
        lambda runner, slot: runner.copy_rows(slot, slot, 1),
    ],
)
def test_what_is_no_chain_is_refused_and_changes_nothing(refused: Callable[[Any, int], None]) -> None:
    runner, ids = runner_of(DEEP), prompt_of(5)
    slot = runner.open()
    runner.forward([chain(runner, slot, ids[:3])])
    with pytest.raises(ModelError):
        refused(runner, slot)
    assert runner.num_rows(slot) == 3
    with torch.no_grad():
        truth = copy.deepcopy(model_of(DEEP))(torch.tensor([ids])).logits[0]
    assert_same(runner.forward([chain(runner, slot, ids[3:])])[0], truth[3:])
    runner.close(slot)


def test_hidden_states_are_left_for_the_new_rows_and_for_no_row_twice() -> None:
    runner, ids = runner_of(DEEP), prompt_of(12)
    wishes = [FeatureWish((1, -1)), FeatureWish((-1,), "logits")]
    with torch.no_grad():
        hidden = copy.deepcopy(model_of(DEEP))(torch.tensor([ids]), output_hidden_states=True).hidden_states
    runner.features.wish(wishes)
    slots = runner.open(), runner.open()
    runner.forward([chain(runner, slot, ids[:8]) for slot in slots])
    for slot in slots:
        runner.keep(slot, 6)
    runner.forward([chain(runner, slot, ids[6:], 2) for slot in slots])
    for idx in range(2):
        assert_same(runner.features.of(idx, wishes[0]), torch.cat((hidden[1][0, 6:], hidden[-1][0, 6:]), -1))
        assert_same(runner.features.of(idx, wishes[1]), hidden[-1][0, 8:])
    runner.features.wish([])
    for slot in slots:
        runner.close(slot)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("RecurrentGemma", {"lru_width": 32, "num_hidden_layers": 3}),
        ("Rwkv", {}),
    ],
)
def test_a_family_that_keeps_its_state_elsewhere_is_refused_by_name(family: str, changes: dict[str, Any]) -> None:
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    kind = config.model_type
    with pytest.raises(ModelError, match=rf"{kind} models keep their state in a place of their own; choose a model"):
        plain_runner(model, max_model_len=64)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        (
            "MiniMax",
            {**DELTA, "num_local_experts": 2},
            "minimax model .* MiniMax uses cache of its own .* choose a model",
        ),
    ],
)
def test_a_family_that_cannot_be_taken_over_is_refused_in_one_line(
    family: str, changes: dict[str, Any], reason: str
) -> None:
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES | changes))
    with pytest.raises(ModelError, match=reason) as raised:
        plain_runner(model, max_model_len=64)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", [DEEP, "lfm2", "zamba2"])
def test_two_runners_may_share_a_model(name: str) -> None:
    model, ids = copy.deepcopy(model_of(name)), prompt_of(12)
    first, second = (plain_runner(model, max_model_len=64, own_pass=False) for _ in range(2))
    for runner in (first, second, first):
        assert differing_rows(runner) == ""
        slot = runner.open()
        with torch.no_grad():
            assert_same(runner.forward([chain(runner, slot, ids)])[0], model_of(name)(torch.tensor([ids])).logits[0])
        runner.close(slot)


def test_a_runner_for_rows_alone_refuses_a_state() -> None:
    with pytest.raises(ModelError, match="keeps a recurrent state"):
        TorchRunner(model_of(DEEP), max_model_len=64)


def test_a_kind_of_layer_that_cannot_run_is_named_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy.deepcopy(model_of(DEEP)).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"linear_attention"', '"compressed_sparse_attention"'))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(ModelError, match="has layers of type compressed_sparse_attention, which CARD cannot run"):
        load_model(tmp_path)


def test_a_failed_pass_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, ids = runner_of(DEEP), prompt_of(12)
    assert isinstance(runner, HybridRunner)
    slot = runner.open()
    runner.forward([chain(runner, slot, ids[:6])])
    runner.keep(slot, 5)
    lm_head = runner._decoder.model.lm_head
    with monkeypatch.context() as broken:
        broken.setattr(lm_head, "forward", lambda _: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            runner.forward([chain(runner, slot, ids[5:9])])
    assert runner.num_rows(slot) == 5
    with torch.no_grad():
        truth = copy.deepcopy(model_of(DEEP))(torch.tensor([ids])).logits[0]
    assert_same(runner.forward([chain(runner, slot, ids[5:])])[0], truth[5:])
    runner.close(slot)
