"""The beam: the best paths over all parents, refilled without draft passes, several requests in one pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import SamplingRule
from card.drafting.beam import BeamSequence, BeamWriter
from card.drafting.messages import DraftSpec
from card.drafting.window import num_skipped, read_part
from card.errors import CapacityError, ProtocolError
from card.tree.logits import log_softmax, top
from card.tree.nodes import NewNodes
from card.tree.sampling import Sampler
from tests.drafts import assert_rows_fit_the_tree, assert_scores_are_those_of_the_model, draft_spec
from tests.examples import settings
from tests.toy import TableModel

TEXT = [3, 1, 4, 1, 5]
Paths = dict[tuple[int, ...], float]  # tokens below the root -> path score


def toy(seed: int = 0, **settings: int) -> TableModel:
    return TableModel(seed, 12, 3, spread=1.0, **{"num_tree_rows": 256, **settings})


def opened(model: TableModel, text: list[int] = TEXT, **changes: object) -> tuple[BeamWriter, BeamSequence]:
    writer = BeamWriter(model)
    return writer, writer.open(text, draft_spec(**changes), epoch=0)


def grow(writer: BeamWriter, *beams: BeamSequence) -> list[NewNodes]:
    """Make one pass over the beams that can grow; the others get no nodes."""
    work = [(beam, num_tokens) for beam in beams if (num_tokens := beam.num_tokens_to_run())]
    made = iter(writer.step(work) if work else [])
    return [next(made) if any(beam is busy for busy, _ in work) else NewNodes.none() for beam in beams]


def paths(beam: BeamSequence) -> Paths:
    cache = beam.cache
    return {tuple(cache.path_tokens(node)): cache.path_logprob(node) for node in cache.alive_ids()}


def best_children(
    model: TableModel, text: list[int], parents: Paths, branch: int
) -> list[tuple[float, tuple[int, ...]]]:
    """Return the top ``branch`` children of each path with their path scores, best first over all."""
    found = []
    for path, score in parents.items():
        tokens, logprobs = top(log_softmax(model.logits_after(text + list(path))[None]), branch)
        for token, logprob in zip(tokens[0].tolist(), logprobs[0].tolist(), strict=True):
            found.append((score + logprob, (*path, token)))
    return sorted(found, reverse=True)


@settings(max_examples=40)
@given(seed=st.integers(0, 99), width=st.integers(1, 7), branch=st.integers(1, 5), depth=st.integers(1, 5))
def test_each_pass_keeps_the_best_paths_over_all_parents(seed: int, width: int, branch: int, depth: int) -> None:
    model = toy(seed)
    writer, beam = opened(model, beam_width=width, branch=branch)
    layer: Paths = {(): 0.0}
    for _ in range(depth):
        made = grow(writer, beam)[0]
        expected = best_children(model, TEXT, layer, branch)[:width]
        layer = {path: score for score, path in expected}
        assert [tuple(beam.cache.path_tokens(node)) for node in made.ids] == list(layer), "best path first"
        assert [paths(beam)[path] for path in layer] == pytest.approx(list(layer.values()), abs=1e-5)
    assert model.num_forward_passes == depth
    assert_scores_are_those_of_the_model(model, beam)
    assert_rows_fit_the_tree(model, beam)


def test_first_pass_runs_the_text_and_later_ones_only_the_frontier() -> None:
    model = toy()
    writer, beam = opened(model, beam_width=4, branch=4)
    counts = []
    for _ in range(4):
        grow(writer, beam)
        counts.append(model.num_forward_tokens)
    assert counts == [5, 9, 13, 17]


def test_a_prune_widens_the_beam_from_the_secondary_tier_without_a_draft_pass() -> None:
    model = toy()
    writer, beam = opened(model, beam_width=4, branch=4)
    grow(writer, beam)
    grow(writer, beam)
    worst = min((path for path in paths(beam) if len(path) == 1), key=paths(beam).__getitem__)
    survivors = {path[1:] for path in paths(beam) if path[:1] == worst and len(path) == 2}
    num_passes = model.num_forward_passes
    widened = beam.commit(worst)
    assert widened is not None, "the token is a candidate: a hit"
    assert len(widened) == 4 - len(survivors) > 0
    assert model.num_forward_passes == num_passes
    expected = {path for _, path in best_children(model, [*TEXT, *worst], {(): 0.0}, 4)}
    made = {tuple(beam.cache.path_tokens(node)) for node in widened.ids}
    assert made == expected - survivors, "the children that the beam had left out"
    assert set(paths(beam)) == expected
    assert len(beam.frontier()) == 4
    assert_scores_are_those_of_the_model(model, beam)
    grow(writer, beam)
    assert_rows_fit_the_tree(model, beam)
    assert_scores_are_those_of_the_model(model, beam)


@given(seed=st.integers(0, 99), width=st.integers(2, 6), num_passes=st.integers(2, 4))
def test_after_a_hit_the_beam_has_its_full_width_again(seed: int, width: int, num_passes: int) -> None:
    writer, beam = opened(toy(seed), beam_width=width, branch=12)
    for _ in range(num_passes):
        grow(writer, beam)
    beam.commit(next(path for path in paths(beam) if len(path) == 1))
    assert len(beam.frontier()) == width


@pytest.mark.parametrize("floor", [-1e9, -3.5])
def test_the_beam_is_widened_by_the_best_whole_paths_above_the_floor(floor: float) -> None:
    model = toy(3)
    writer, beam = opened(model, beam_width=3, branch=6, min_path_logprob=floor)
    for _ in range(4):
        grow(writer, beam)
    hit = next(path for path in paths(beam) if len(path) == 1)
    text = [*TEXT, *hit]
    expanded = {tuple(beam.cache.path_tokens(node)) for node in beam.row_of}
    below = {path[1:]: score - paths(beam)[hit] for path, score in paths(beam).items() if path[:1] == hit}
    parents = {path: below[path] for path in below if hit + path in expanded}
    spare = [(score, path) for score, path in best_children(model, text, parents, 6) if path not in below]
    beam.spec = draft_spec(beam_width=15, branch=6, min_path_logprob=floor)
    num_missing = 15 - sum(path not in parents for path in below)
    widened = beam.commit(hit)
    assert widened is not None
    made = [tuple(beam.cache.path_tokens(node)) for node in widened.ids]
    assert made == [path for score, path in spare if score >= floor][:num_missing]
    assert len({len(path) for path in made}) > 1, "of several depths"
    assert (len(made) < num_missing) == (floor == -3.5)


def test_a_token_that_the_beam_had_left_out_is_no_miss_and_runs_one_token() -> None:
    model = toy()
    writer, beam = opened(model, beam_width=2, branch=5, min_path_logprob=-3.0)
    grow(writer, beam)
    grow(writer, beam)
    fifth = best_children(model, TEXT, {(): 0.0}, 5)[4][1]
    assert fifth not in paths(beam)
    revived = beam.commit(fifth)
    assert revived is not None
    assert revived.tokens == fifth
    assert (beam.cache.epoch, beam.cache.root_id, beam.cache.num_nodes) == (0, revived.ids[0], 0)
    num_tokens = model.num_forward_tokens
    grow(writer, beam)
    assert model.num_forward_tokens == num_tokens + 1
    assert_rows_fit_the_tree(model, beam)
    assert_scores_are_those_of_the_model(model, beam)


def test_a_token_in_neither_tier_is_a_miss() -> None:
    model = toy()
    writer, beam = opened(model, beam_width=2, branch=5)
    grow(writer, beam)
    sixth = best_children(model, TEXT, {(): 0.0}, 6)[5][1]
    assert beam.commit(sixth) is None
    assert (beam.cache.epoch, beam.cache.num_nodes) == (1, 0)
    grow(writer, beam)
    assert model.num_forward_tokens == len(TEXT) + 1, "the text before it is not run again"
    assert_rows_fit_the_tree(model, beam)


@settings(max_examples=25)
@given(seed=st.integers(0, 99), lengths=st.lists(st.integers(1, 9), min_size=2, max_size=4), data=st.data())
def test_several_requests_in_one_pass_equal_each_alone(seed: int, lengths: list[int], data: st.DataObject) -> None:
    texts = [[(seed + 5 * i + 7 * j) % 12 for j in range(length)] for i, length in enumerate(lengths)]
    specs = [draft_spec(beam_width=1 + i, branch=2 + i, lead=2 + 2 * i) for i in range(len(texts))]
    model = toy(seed)
    writer = BeamWriter(model)
    together = [writer.open(text, spec, epoch=0) for text, spec in zip(texts, specs, strict=True)]
    alone = [opened(toy(seed), text)[0] for text in texts]
    singles = [w.open(text, spec, epoch=0) for w, text, spec in zip(alone, texts, specs, strict=True)]
    for _ in range(4):
        num_passes = model.num_forward_passes
        layers = grow(writer, *together)
        assert model.num_forward_passes == num_passes + any(layer.ids for layer in layers)
        assert layers == [grow(w, single)[0] for w, single in zip(alone, singles, strict=True)]
        committed = data.draw(st.integers(0, len(texts) - 1))
        for beams in (together, singles):
            beams[committed].commit([seed % 12])
    for beam in together:
        assert_rows_fit_the_tree(model, beam)


@pytest.mark.parametrize("coupled", [True, False])
def test_with_coupled_noise_the_first_path_is_what_the_draft_model_itself_would_sample(coupled: bool) -> None:
    model = toy()
    rule = SamplingRule(temperature=1.0, top_k=0, top_p=0.9, min_p=0.0, seed=5)
    sampler = Sampler(rule, 12)
    text, num_agreeing = list(TEXT), 0
    for _ in range(20):
        writer, beam = opened(model, text, temperature=1.0, top_p=0.9, beam_width=1, branch=1, coupled_noise=coupled)
        for _ in range(3):
            grow(writer, beam)
        sampled: list[int] = []
        for _ in range(3):
            here = text + sampled
            sampled += sampler.choose(model.logits_after(here)[None], [len(here)])
        num_agreeing += beam.cache.path_tokens(beam.cache.alive_ids()[-1]) == sampled
        text.append(sampled[0])
    assert num_agreeing == 20 if coupled else num_agreeing < 15


def test_paths_below_the_floor_are_not_made() -> None:
    writer, beam = opened(toy(), min_path_logprob=-3.5, beam_width=12, branch=12, lead=9)
    while beam.frontier():
        grow(writer, beam)
    assert min(paths(beam).values()) >= -3.5
    assert beam.cache.depth < 9, "the floor ends growth before the lead does"


@given(room=st.integers(1, 5), width=st.integers(1, 4))
def test_the_beam_stops_where_the_context_ends(room: int, width: int) -> None:
    model = toy(max_model_len=len(TEXT) + room)
    writer, beam = opened(model, beam_width=width, lead=20)
    while beam.frontier():
        grow(writer, beam)
    assert beam.cache.depth == room, "the last node predicts nothing: it has no position of its own in the model"
    assert max(model._sequences[beam.slot].positions) < model.max_model_len


@pytest.mark.parametrize(("num_tree_rows", "depth"), [(2, 2), (1, 1)])
def test_the_last_row_is_used(num_tree_rows: int, depth: int) -> None:
    writer, beam = opened(toy(max_model_len=7, num_tree_rows=num_tree_rows), beam_width=4, branch=4)  # 5 + 4 rows
    while beam.frontier():
        grow(writer, beam)
    assert beam.cache.depth == depth


@given(num_tree_rows=st.integers(0, 12), width=st.integers(1, 4))
def test_the_beam_stops_where_the_rows_end_and_goes_on_after_a_prune(num_tree_rows: int, width: int) -> None:
    model = toy(max_model_len=9, num_tree_rows=num_tree_rows)
    writer, beam = opened(model, beam_width=width, lead=4)
    while beam.frontier():
        grow(writer, beam)
    assert model.num_rows(beam.slot) <= model.max_rows
    beam.commit([0])
    beam.commit([1])
    assert grow(writer, beam)[0].ids
    assert_rows_fit_the_tree(model, beam)


def test_closing_a_beam_frees_its_rows() -> None:
    model = toy(max_slots=1)
    _, beam = opened(model)
    beam.close()
    assert not model._sequences, "too short a text to be worth keeping"
    opened(model)


# ---- rows that are there already ------------------------------------------------------------------------------------

LONG = [(3 * i) % 12 for i in range(40)]


def test_a_follow_up_runs_only_what_is_new() -> None:
    model = toy()
    writer, first = opened(model, LONG, beam_width=2, branch=2)
    grow(writer, first)
    grow(writer, first)
    first.close()
    before = model.num_forward_tokens
    beam = writer.open([*LONG, 7, 8, 9], draft_spec(beam_width=2, branch=2), epoch=0)
    assert beam.num_reused == len(LONG)
    made = grow(writer, beam)[0]
    assert model.num_forward_tokens == before + 3
    fresh_writer, fresh = opened(toy(), [*LONG, 7, 8, 9], beam_width=2, branch=2)
    assert fresh.num_reused == 0
    assert made == grow(fresh_writer, fresh)[0]
    assert_rows_fit_the_tree(model, beam)
    assert_scores_are_those_of_the_model(model, beam)


def test_a_text_that_begins_like_a_running_one_runs_only_the_rest() -> None:
    model = toy()
    writer, first = opened(model, LONG, beam_width=2, branch=2)
    grow(writer, first)
    before = model.num_forward_tokens
    second = writer.open([*LONG[:30], 11, 11], draft_spec(beam_width=2, branch=2), epoch=0)
    assert second.num_reused == 30
    for _ in range(3):
        grow(writer, first, second)
    assert model.num_forward_tokens == before + 3 * 2 + 2 + 2 * 2
    for beam in (first, second):
        assert_rows_fit_the_tree(model, beam)
        assert_scores_are_those_of_the_model(model, beam)


VERY_LONG = [(7 * i + i // 11) % 12 for i in range(3_000)]


def long_model() -> TableModel:
    return toy(max_model_len=8_192)


def long_spec() -> DraftSpec:
    return draft_spec(beam_width=2, branch=2, max_len=8_000)


def test_of_a_long_text_the_beginning_and_the_end_are_read() -> None:
    model = long_model()
    writer = BeamWriter(model)
    beam = writer.open(VERY_LONG, long_spec(), epoch=0)
    made = grow(writer, beam)[0]
    assert 1_024 <= model.num_forward_tokens < 1_600
    read = read_part(VERY_LONG, num_skipped(len(VERY_LONG)))
    assert read[:16] == VERY_LONG[:16] and read[16:] == VERY_LONG[16 + num_skipped(len(VERY_LONG)) :]
    short_writer = BeamWriter(long_model())
    assert made == grow(short_writer, short_writer.open(read, long_spec(), epoch=0))[0], "as of the text that it read"


@pytest.mark.parametrize("num_more", [300, 500])
def test_the_next_turn_of_a_long_chat_mostly_finds_its_rows(num_more: int) -> None:
    model = long_model()
    writer = BeamWriter(model)
    first = writer.open(VERY_LONG, long_spec(), epoch=0)
    grow(writer, first)
    first.close()
    before = model.num_forward_tokens
    more = [*VERY_LONG, *VERY_LONG[:num_more]]
    beam = writer.open(more, long_spec(), epoch=0)
    grow(writer, beam)
    has_moved = num_skipped(len(more)) != num_skipped(len(VERY_LONG))
    assert (model.num_forward_tokens - before == num_more) is not has_moved
    assert model.num_forward_tokens - before < 1_600


def test_what_was_written_without_the_drafter_is_skipped_if_it_is_much() -> None:
    model = long_model()
    writer = BeamWriter(model)
    beam = writer.open(VERY_LONG[:40], long_spec(), epoch=0)
    grow(writer, beam)
    beam.commit(VERY_LONG[40:2_900])
    before = model.num_forward_tokens
    grow(writer, beam)
    assert model.num_forward_tokens - before < 1_600
    beam.commit(VERY_LONG[2_900:2_905])
    for _ in range(3):
        grow(writer, beam)
    fresh_writer = BeamWriter(long_model())
    fresh = fresh_writer.open(VERY_LONG[:2_905], long_spec(), epoch=0)
    for _ in range(3):
        grow(fresh_writer, fresh)
    assert paths(beam) == paths(fresh)


def test_committed_candidates_are_reused_and_rejected_ones_are_not() -> None:
    model = toy()
    writer, beam = opened(model, LONG)
    for _ in range(3):
        grow(writer, beam)
    path = max(paths(beam), key=len)[:2]
    beam.commit(path)
    beam.commit([(path[0] + 1) % 12])
    text = list(beam.token_ids)
    num_run = beam.num_committed_rows
    assert num_run > len(LONG), "the path had been run as candidates"
    beam.close()
    again = writer.open([*text, 1], draft_spec(), epoch=0)
    assert again.num_reused == num_run
    grow(writer, again)
    assert_rows_fit_the_tree(model, again)
    assert_scores_are_those_of_the_model(model, again)


def test_a_beam_that_finds_no_room_raises_and_leaves_the_others_alone() -> None:
    model = toy(max_model_len=64, num_tree_rows=64)
    writer = BeamWriter(model, kv_cache_bytes=128 * model.row_bytes)
    spec = draft_spec(max_len=64)
    beam = writer.open(LONG, spec, epoch=0)
    assert not writer.has_room(spec)
    with pytest.raises(CapacityError):
        writer.open(LONG, spec, epoch=0)
    grow(writer, beam)
    beam.close()
    assert writer.has_room(spec), "what is only kept for reuse gives way"
    assert writer.open(LONG, spec, epoch=0).num_reused == len(LONG) - 1


def test_a_short_text_takes_less_room_and_is_not_drafted_beyond_its_end() -> None:
    model = toy(max_model_len=256, num_tree_rows=32)
    writer, beam = opened(model, beam_width=2, lead=50, max_len=len(TEXT) + 3)
    assert model.capacity(beam.slot) == 64 < model.max_rows, "in whole blocks"
    while beam.frontier():
        grow(writer, beam)
    assert beam.cache.depth == 3


@settings(max_examples=40)
@given(seed=st.integers(0, 99), chunk=st.integers(1, 9), width=st.integers(1, 5))
def test_a_text_run_in_parts_gives_the_same_layers(seed: int, chunk: int, width: int) -> None:
    whole_writer, whole = opened(toy(seed), beam_width=width)
    model = toy(seed)
    writer, beam = opened(model, beam_width=width)
    for _ in range(-(-len(TEXT) // chunk) - 1):
        assert writer.step([(beam, chunk)]) == [NewNodes.none()]
        assert_rows_fit_the_tree(model, beam)
    assert writer.step([(beam, chunk)]) == grow(whole_writer, whole)
    assert_rows_fit_the_tree(model, beam)


def test_of_a_text_that_is_read_in_parts_the_last_token_alone_has_logits() -> None:
    model = toy()
    _, beam = opened(model)
    told = []
    while not told or not told[-1][1]:
        part = beam.extension(beam.frontier(), 4)
        told.append((len(part.token_ids), len(part.token_ids) - part.first_logits_idx))
        beam.grow(beam.frontier(), model.forward([part])[0])
    assert told == [(4, 0)] * ((len(TEXT) - 1) // 4) + [((len(TEXT) - 1) % 4 + 1, 1)]


def test_a_pass_cut_short_expands_the_best_nodes_and_the_next_one_the_rest() -> None:
    model = toy()
    writer, beam = opened(model, beam_width=4, branch=4)
    grow(writer, beam)
    frontier = beam.frontier()
    best = frontier[0]
    assert len(frontier) == 4
    writer.step([(beam, 1)])
    assert set(beam.row_of) == {best}
    assert not {best} & set(beam.frontier())
    assert_rows_fit_the_tree(model, beam)
    assert_scores_are_those_of_the_model(model, beam)


def test_the_width_changes_while_it_runs() -> None:
    model = toy()
    writer, beam = opened(model, beam_width=2, branch=12, lead=2)
    for _ in range(5):
        grow(writer, beam)
    assert beam.frontier() == []
    beam.reshape(beam_width=5)
    beam.commit(next(path for path in paths(beam) if len(path) == 1))
    assert len(beam.frontier()) == 5
    beam.reshape()
    assert beam.spec.shape.beam_width == 5


def test_scores_that_are_no_numbers_are_one_beams_error() -> None:
    model = toy()
    writer, good = opened(model)
    bad = writer.open(TEXT, draft_spec(temperature=1e-320), epoch=0)
    error, nodes = writer.step([(beam, beam.num_tokens_to_run()) for beam in (bad, good)])
    assert isinstance(error, ProtocolError)
    assert isinstance(nodes, NewNodes) and nodes.ids
