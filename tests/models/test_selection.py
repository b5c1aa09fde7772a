"""Scores of KV rows, the choice of the best, and passes that read the chosen rows alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from card.backends.transformers.attention import MEANS
from card.config.selection import BLOCK_ROWS, SelectionRule, parse_selection
from card.errors import ModelError, SettingsError
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import Floats
from card.models.protocol import Extension, Selective
from card.models.rows.selection import ChosenRows, bound_scores, choose_blocks, choose_rows
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from tests.reaching_in import cache_of, kv_of, set_kv
from tests.static import Ordinary
from tests.tiny import tiny, tiny_llama

VOCAB_SIZE = 61
TEXT = [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(48)]
NO_INTEGERS = why_not_int8()
pytestmark = pytest.mark.timeout(240)  # machine code may have to be made first


def make_runner(kind: str) -> RowRunner:
    """Return a runner of a tiny model; one with a window has it in every second layer."""
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "initializer_range": 0.3}
        return plain_runner(GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, **sizes)), max_model_len=80)
    if kind.startswith("window"):
        sizes = tiny(VOCAB_SIZE, head_dim=8, sliding_window=9, attn_logit_softcapping=4.0, initializer_range=0.3)
        model = Gemma2ForCausalLM(Gemma2Config(**sizes))
    else:
        model = tiny_llama(VOCAB_SIZE, max_position_embeddings=96)
    if kind.endswith("int8"):
        if NO_INTEGERS is not None:
            pytest.skip(f"no integer passes: {NO_INTEGERS}")
        model.computes_int8 = True
    return (Ordinary if kind.endswith("torch") else plain_runner)(model, max_model_len=80)


KINDS = ["llama", "gpt2", "window", "llama-int8", "window-int8", "llama-torch", "window-torch"]


def chain(slot: int, token_ids: Sequence[int], start: int, **wishes: object) -> Extension:
    return Extension(slot, token_ids, range(start - 1, start - 1 + len(token_ids)), **wishes)  # type: ignore[arg-type]


def some_rows(runner: RowRunner, since: int, count: int, seed: int) -> ChosenRows:
    layout = cache_of(runner).layout
    scores = np.random.default_rng(seed).random((len(layout.layers), layout.shape.num_kv_heads, since))
    return ChosenRows(choose_rows(scores.astype(np.float32), count), since)


@given(st.data())
def test_the_best_rows_are_chosen_in_ascending_order(data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.floats(-9, 9), min_size=1, max_size=40, unique=True))
    count = data.draw(st.integers(0, 50))
    best = sorted(sorted(range(len(numbers)), key=lambda row: -numbers[row])[:count])
    assert choose_rows(np.array([numbers]), count).tolist() == [best]


def test_weights_and_logits_rank_rows_differently() -> None:
    logits = torch.tensor([9.0, 0.0, 0.0, 0.0, 4.0, 5.0]).view(1, 2, 1, 3)  # two new rows, three old ones
    weights = MEANS["weights"](logits)
    torch.testing.assert_close(weights, torch.softmax(logits[0, :, 0], -1).mean(0)[None])
    assert MEANS["logits"](logits).tolist() == [[4.5, 2.0, 2.5]]
    assert choose_rows(weights.numpy(), 2).tolist() == [[0, 2]]


def test_a_share_of_the_rows_is_read_and_never_less_than_the_least_number() -> None:
    rule = parse_selection("sparse")
    assert [rule.num_read(rows) for rows in (50, 2000, 2561, 8000)] == [50, 128, 129, 400]
    assert parse_selection("vegas:0.1:64") == SelectionRule("logits", 0.1, 64)


@pytest.mark.parametrize("text", ["", "best", "sparse:", "sparse:-1", "sparse:2", "vegas:0.1:0", "vegas:0.1:8:9"])
def test_a_selection_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"must be one of sparse, vegas, quest, .* such as sparse:0.05:128, got"):
        parse_selection(text)


@given(st.integers(0, 2**31), st.integers(1, 70), st.integers(0, 60))
def test_chosen_blocks_are_the_best_and_those_at_both_ends(seed: int, num_rows: int, count: int) -> None:
    of_blocks = np.random.default_rng(seed).standard_normal((2, 1, -(-num_rows // BLOCK_ROWS)), np.float32)
    scores = of_blocks.repeat(BLOCK_ROWS, 2)[..., :num_rows]
    chosen = choose_blocks(scores, count, num_first=BLOCK_ROWS, num_last=5)
    for rows, of_rows in zip(chosen[:, 0].tolist(), scores[:, 0], strict=True):
        assert rows == sorted(set(rows)) and set(range(num_rows - 5, num_rows)) & set(range(num_rows)) <= set(rows)
        assert set(range(min(BLOCK_ROWS, num_rows))) <= set(rows)
        read = {row // BLOCK_ROWS for row in rows}
        assert len(rows) == sum(min(BLOCK_ROWS, num_rows - BLOCK_ROWS * block) for block in read), "whole blocks"
        firsts_and_lasts = {0, *(row // BLOCK_ROWS for row in range(max(0, num_rows - 5), num_rows))}
        free = read - firsts_and_lasts
        left = {row // BLOCK_ROWS for row in range(num_rows)} - read
        score_of = {block: float(of_rows[block * BLOCK_ROWS]) for block in free | left}
        assert all(score_of[a] >= score_of[b] for a in free for b in left)
        assert not left or len(free) >= count // BLOCK_ROWS


@given(st.integers(0, 2**31), st.integers(1, 40))
def test_no_logit_of_a_block_exceeds_its_bound(seed: int, num_rows: int) -> None:
    random = np.random.default_rng(seed)
    query, keys = (random.standard_normal(shape, np.float32) for shape in ((2, 1, 1, 8), (2, num_rows, 8)))
    logits = (query[:, 0] @ keys.transpose(0, 2, 1))[:, 0]
    bounds = bound_scores(query, keys)
    assert (bounds >= logits - 1e-4).all()
    if num_rows % BLOCK_ROWS == 1:
        np.testing.assert_allclose(bounds[:, -1], logits[:, -1], atol=1e-4, rtol=1e-4)  # a block of its own


@pytest.mark.parametrize("kind", ["llama", "llama-int8", "llama-torch"])
def test_kept_bounds_are_those_of_queries_and_keys(kind: str) -> None:
    runner, held = make_runner(kind), 2 * BLOCK_ROWS + 1
    slot = runner.open()
    runner.forward([chain(slot, TEXT[:held], 0)])
    scores = {}
    for score_kind in ("logits", "bounds"):
        runner.forward([chain(slot, TEXT[held : held + 3], held, scores=score_kind)])
        scores[score_kind] = runner.attention_scores.of(slot)
        runner.keep(slot, held)
    assert (scores["bounds"] >= scores["logits"] - 1e-3).all()
    assert np.array_equal(scores["bounds"][..., 0], scores["bounds"][..., BLOCK_ROWS - 1])
    np.testing.assert_allclose(scores["bounds"][..., -1], scores["logits"][..., -1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_reads_all_rows_by_name_has_the_logits_of_any_other(kind: str) -> None:
    runner, held = make_runner(kind), 40
    assert isinstance(runner, Selective)
    logits = []
    for reads in (None, some_rows(runner, held - 3, held - 3, seed=0)):
        slot = runner.open()
        runner.forward([chain(slot, TEXT[:held], 0)])
        logits.append(runner.forward([chain(slot, TEXT[held:44], held, reads=reads)])[0])
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_new", [1, 3])
def test_a_pass_reads_the_chosen_rows_and_the_newest_and_no_other(kind: str, num_new: int) -> None:
    runner, held, since = make_runner(kind), 40, 36
    reads = some_rows(runner, since, 7, seed=num_new)
    slot = runner.open()
    runner.forward([chain(slot, TEXT[:held], 0)])
    new = chain(slot, TEXT[held : held + num_new], held, reads=reads)

    def logits() -> Floats:
        found = runner.forward([new])[0].copy()
        runner.keep(slot, held)
        return found

    before, kv = logits(), kv_of(runner, slot, held)
    with torch.inference_mode():
        for layer, heads in enumerate(reads.rows):
            for head, rows in enumerate(heads):
                unread = np.setdiff1d(np.arange(since), rows)
                if kind.startswith("window") and layer == 0:  # a layer with a window reads that
                    unread = np.arange(held - 9)
                kv[layer, :, head, unread] = 1e4
        set_kv(runner, slot, kv)
        assert np.array_equal(logits(), before)
        last = int(reads.rows[1, 0, -1])
        kv[1, 1, 0, last] += 3.0
        set_kv(runner, slot, kv)
        assert not np.array_equal(logits(), before)


@pytest.mark.parametrize("score_kind", ["weights", "logits"])
@pytest.mark.parametrize("kind", ["llama", "llama-int8", "llama-torch"])
def test_kept_scores_are_the_means_of_what_transformers_attends_with(kind: str, score_kind: str) -> None:
    runner, held = make_runner(kind), 40
    slot = runner.open()
    runner.forward([chain(slot, TEXT[:held], 0)])
    plain = runner.forward([chain(slot, TEXT[held:45], held)])[0].copy()
    runner.keep(slot, held)
    scored = runner.forward([chain(slot, TEXT[held:45], held, scores=score_kind)])[0]
    assert np.array_equal(scored, plain), "scores cost a pass no bit of its logits"
    model = tiny_llama(VOCAB_SIZE, max_position_embeddings=96, attn_implementation="eager")
    with torch.no_grad():
        attended = torch.cat(model(torch.tensor([TEXT[:45]]), output_attentions=True).attentions)  # [L, H, S, S]
    wanted = attended[:, :, held:, :held]
    if score_kind == "logits":
        own = attended[:, :, held:].log()
        wanted = (own - own[..., :1])[..., :held]  # up to the sum that a softmax loses
    wanted = wanted.unflatten(1, (2, 2)).mean((2, 3))
    scores = torch.from_numpy(runner.attention_scores.of(slot))
    if score_kind == "logits":
        scores = scores - scores[..., :1]
    if kind != "llama-int8":
        torch.testing.assert_close(scores, wanted, atol=1e-4, rtol=1e-3)
    else:  # 8 bits move single scores of such a model far, but not their pattern
        both = torch.stack((scores.flatten(1), wanted.flatten(1)), 1)
        assert min(torch.corrcoef(one)[0, 1] for one in both) > 0.9


@pytest.mark.parametrize("kind", ["window", "window-int8"])
def test_layers_with_a_window_score_nothing(kind: str) -> None:
    runner = make_runner(kind)
    slots = [runner.open(), runner.open()]
    runner.forward([chain(slot, TEXT[:40], 0) for slot in slots])
    runner.forward([chain(slots[0], TEXT[40:43], 40, scores="weights"), chain(slots[1], TEXT[40:41], 40)])
    scores = runner.attention_scores.of(slots[0])
    assert scores.shape == (2, 2, 40) and not scores[0].any() and scores[1].any()
    with pytest.raises(ModelError, match="kept no attention scores"):
        runner.attention_scores.of(slots[1])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_tree_read_the_chosen_rows_as_a_chain_of_their_path_does(kind: str) -> None:
    runner, held, since = make_runner(kind), 40, 37
    reads = some_rows(runner, since, 7, seed=1)
    slot = runner.open()
    runner.forward([chain(slot, TEXT[:held], 0)])
    parents = [
        held - 1,
        held,
        held + 1,
        held + 1,
        held,
        held + 4,
    ]  # below the first row two branches, one of which forks
    tokens = TEXT[3 : 3 + len(parents)]
    tree = runner.forward([Extension(slot, tokens, parents, reads=reads)])[0].copy()
    for path in ([0, 1, 2], [0, 1, 3], [0, 4, 5]):
        runner.keep(slot, held)
        alone = runner.forward([chain(slot, [tokens[idx] for idx in path], held, reads=reads)])[0]
        np.testing.assert_allclose(tree[path], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fault", ["beyond", "older", "shape", "scored"])
def test_a_selection_that_does_not_fit_is_refused_and_changes_nothing(fault: str) -> None:
    runner = make_runner("llama")
    slot = runner.open()
    runner.forward([chain(slot, TEXT[:20], 0)])
    reads = some_rows(runner, 21 if fault == "beyond" else 12, 5, seed=1)
    if fault == "shape":
        reads = ChosenRows(reads.rows[:1], reads.since)
    parents = [19, 18] if fault == "older" else [19, 20]
    scores = "logits" if fault == "scored" else None
    with pytest.raises(ModelError, match="were chosen to be read"):
        runner.forward([Extension(slot, [1, 2], parents, reads=reads, scores=scores)])
    assert runner.num_rows(slot) == 20


def test_bytes_read_are_those_of_chosen_rows_and_of_windows() -> None:
    llama, window = make_runner("llama"), make_runner("window")
    reads = some_rows(llama, 40, 10, seed=0)
    assert llama.bytes_read(44, None) == 44 * llama.row_bytes
    assert llama.bytes_read(44, reads) == 14 * llama.row_bytes
    assert window.bytes_read(44, reads) == (9 + 14) * window.row_bytes // 2
