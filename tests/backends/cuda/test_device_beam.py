"""DeviceBeamWriter against BeamWriter: the same trees, node for node, though the host reads one step behind."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from card.backends.cuda import graphs
from card.backends.cuda.device_beam import DeviceBeamSequence, DeviceBeamWriter
from card.backends.cuda.device_step import BeamStep, DraftStepResult
from card.config import DraftSettings, SamplingParams
from card.drafting.beam import BeamSequence, BeamWriter
from card.drafting.draft_writers import make_writer
from card.drafting.drafter import DrafterWorker
from card.drafting.messages import DraftSpec
from card.errors import ProtocolError
from card.family.copying.phrase_drafting import PhraseDraftWriter
from card.links.in_process import InlineLink, ThreadLink
from card.models.protocol import Extension
from card.tree.nodes import NewNodes
from tests.decoding import decode, plain
from tests.drafts import draft_spec
from tests.examples import settings
from tests.static import MAX_MODEL_LEN, VOCAB_SIZE, bucketed, lane_of, operations_of, ordinary, synchronising

TEXT = [3, 1, 4, 1, 5, 9, 2, 6]
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "coupled": {"temperature": 1.0, "coupled_noise": True},
    "coupled-filtered": {"temperature": 0.7, "top_k": 5, "coupled_noise": True},
}


@pytest.fixture(scope="module")
def device() -> str:
    return "cpu"


def assert_same_nodes(one: NewNodes, other: NewNodes) -> None:
    assert (one.ids, one.parents, one.tokens) == (other.ids, other.parents, other.tokens)
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def joined(*parts: NewNodes) -> NewNodes:
    def all_of(name: str) -> Any:
        return tuple(value for part in parts for value in getattr(part, name))

    return NewNodes(all_of("ids"), all_of("parents"), all_of("tokens"), all_of("logprobs"))


class Twins:
    """The same request at both writers; what they say is compared."""

    def __init__(self, plain_writer: BeamWriter, writer: DeviceBeamWriter, text: list[int], spec: DraftSpec) -> None:
        self.plain_writer, self.writer = plain_writer, writer
        self.plain = plain_writer.open(text, spec, epoch=0)
        self.beam = writer.open(text, spec, epoch=0)

    def step(self) -> int:
        """Grow both by a layer; return how many nodes it has."""
        frontier = self.plain.frontier()
        assert self.beam.frontier() == frontier
        if not frontier:
            return 0
        (made,) = self.writer.step([(self.beam, self.beam.num_tokens_to_run())])
        (expected,) = self.plain_writer.step([(self.plain, self.plain.num_tokens_to_run())])
        assert isinstance(made, NewNodes)
        assert isinstance(expected, NewNodes)
        assert_same_nodes(made, expected)
        self.check()
        return len(made)

    def commit(self, token_ids: Sequence[int]) -> bool:
        """Commit tokens; what the device had begun counts as one more pass before. Return whether it was a hit."""
        before = NewNodes.none()
        if is_ahead(self.writer, self.beam) and self.writer._ahead:
            self.plain._frontier = self.writer._ahead.layer
            (made,) = self.plain_writer.step([(self.plain, self.plain.num_tokens_to_run())])
            assert isinstance(made, NewNodes)
            before = made
        expected = self.plain.commit(token_ids)
        made_by_device = self.beam.commit(token_ids)
        assert (made_by_device is None) == (expected is None)
        if expected is not None and made_by_device is not None:
            assert_same_nodes(made_by_device, joined(before, expected))
        self.check()
        return expected is not None

    def likely_token(self, rank: int) -> int:
        """Return the token of a child of the root."""
        kids = self.plain.cache.children(self.plain.cache.root_id)
        return self.plain.cache.token(kids[rank % len(kids)]) if kids else rank % VOCAB_SIZE

    def check(self) -> None:
        assert_same_nodes(self.beam.cache.snapshot(), self.plain.cache.snapshot())
        assert self.beam.cache.epoch == self.plain.cache.epoch
        assert self.beam.row_of == self.plain.row_of
        rows = [
            (writer.model._cache[beam.slot].kv, writer.model._cache[beam.slot].tree)  # type: ignore[attr-defined]
            for writer, beam in ((self.writer, self.beam), (self.plain_writer, self.plain))
        ]
        (kv, tree), (expected_kv, expected_tree) = rows
        assert tree.num_rows == expected_tree.num_rows
        assert tree.positions().tolist() == expected_tree.positions().tolist()
        num_rows = tree.num_rows
        torch.testing.assert_close(
            kv[:, :, :, :num_rows].clone(), expected_kv[:, :, :, :num_rows].clone(), atol=1e-4, rtol=1e-4
        )

    def close(self) -> None:
        self.plain.close()
        self.beam.close()


def is_ahead(writer: DeviceBeamWriter, beam: BeamSequence) -> bool:
    return writer._ahead is not None and writer._ahead.beam is beam


def twins(device: str, text: list[int] = TEXT, *, model: dict[str, int] | None = None, **changes: Any) -> Twins:
    settings = model or {}
    return Twins(
        BeamWriter(ordinary(device, **settings)),
        DeviceBeamWriter(bucketed(device, **settings)),
        text,
        draft_spec(**changes),
    )


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[BeamStep]:
    """The steps that were launched, in order."""
    seen: list[BeamStep] = []
    launch = BeamStep.launch

    def noted(step: BeamStep) -> Any:
        seen.append(step)
        return launch(step)

    monkeypatch.setattr(BeamStep, "launch", noted)
    return seen


@pytest.fixture(scope="module")
def writers(device: str) -> tuple[BeamWriter, DeviceBeamWriter]:
    return BeamWriter(ordinary(device)), DeviceBeamWriter(bucketed(device))


@settings(max_examples=30)
@given(data=st.data(), law=st.sampled_from(sorted(LAWS)), width=st.integers(1, 9), branch=st.integers(1, 6))
def test_trees_equal_those_of_the_beam_writer_node_for_node(
    writers: tuple[BeamWriter, DeviceBeamWriter], data: st.DataObject, law: str, width: int, branch: int
) -> None:
    seed, lead = data.draw(st.integers(0, 99)), data.draw(st.integers(2, 9))
    text = [(seed * 7 + 3 * i) % VOCAB_SIZE for i in range(data.draw(st.integers(1, 20)))]
    floor = data.draw(st.sampled_from([-1e9, -12.0, -4.0]))
    spec = draft_spec(beam_width=width, branch=branch, lead=lead, seed=seed, min_path_logprob=floor, **LAWS[law])
    pair = Twins(*writers, text, spec)
    for _ in range(data.draw(st.integers(2, 6))):
        for _ in range(data.draw(st.integers(0, 4))):
            pair.step()
        num_tokens = data.draw(st.integers(0, 3))
        token_ids = []
        for _ in range(num_tokens):
            token_ids.append(pair.likely_token(data.draw(st.integers(0, 2))) if not token_ids else seed % VOCAB_SIZE)
        if token_ids:
            pair.commit(token_ids)
    pair.close()


@pytest.mark.parametrize("law", sorted(LAWS))
def test_hits_along_the_best_path_and_misses_leave_both_with_the_same_tree(device: str, law: str) -> None:
    pair = twins(device, beam_width=4, branch=5, **LAWS[law])
    num_hits = 0
    for i in range(12):
        for _ in range(3):
            pair.step()
        path = list(pair.plain.cache.query(2 + i % 3, "chain").tokens)
        num_hits += pair.commit(path if i % 4 else [*path, 60])
    assert 6 <= num_hits < 12, "both kinds"


@pytest.mark.parametrize("growth", ["best-first", "branch", "fan-out", "phrases"])
def test_trees_that_grow_by_another_rule_are_those_of_the_beam_writer_and_no_step_is_recorded(
    device: str, launches: list[BeamStep], growth: str
) -> None:
    pair = twins(device, growth=growth, beam_width=4, branch=5, lead=9, branch_below=0.5)
    pair.writer.warm_up(pair.beam.spec, 64)
    for i in range(6):
        for _ in range(4):
            pair.step()
        pair.commit([pair.likely_token(i % 3)])
    assert not launches
    assert not pair.writer._steps


def test_the_device_is_one_step_ahead_and_no_step_is_in_vain(device: str, launches: list[BeamStep]) -> None:
    pair = twins(device, beam_width=4, branch=4, lead=50)
    pair.step()  # the text: an ordinary pass
    assert not launches
    for num_steps in range(1, 8):
        pair.step()
        assert len(launches) == num_steps + 1
        assert is_ahead(pair.writer, pair.beam)
    depth = pair.beam.cache.depth
    assert pair.commit([pair.likely_token(0)])
    assert pair.beam.cache.depth == depth + 1 - 1, "the step under way has added a layer, the commit has taken one"
    assert not is_ahead(pair.writer, pair.beam)
    pair.step()
    assert len(launches) == 8 + 2, "one on the corrected frontier, one ahead"


def test_the_next_step_is_launched_before_the_last_one_is_read(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    launch, result = BeamStep.launch, BeamStep.result

    def noted_launch(step: BeamStep) -> Any:
        order.append("launch")
        return launch(step)

    def noted_result(step: BeamStep, fetched: Any) -> Any:
        order.append("read")
        return result(step, fetched)

    monkeypatch.setattr(BeamStep, "launch", noted_launch)
    monkeypatch.setattr(BeamStep, "result", noted_result)
    pair = twins(device, beam_width=3, branch=3, lead=5)
    while pair.step():
        pass
    assert order == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"], "four layers below one"


def test_without_looking_ahead_nothing_is_under_way_between_steps(device: str, launches: list[BeamStep]) -> None:
    pair = twins(device, beam_width=3, branch=3)
    pair.writer = DeviceBeamWriter(bucketed(device), looks_ahead=False)
    pair.beam = pair.writer.open(TEXT, pair.plain.spec, epoch=0)
    for num_steps in range(4):
        pair.step()
        assert len(launches) == num_steps
        assert not is_ahead(pair.writer, pair.beam)


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        ({"lead": 3}, {}),
        ({"lead": 50, "max_nodes": 11}, {}),
        ({"lead": 50, "min_path_logprob": -4.5}, {}),
        ({"lead": 50, "max_len": len(TEXT) + 4}, {}),
        ({"lead": 50}, {"max_model_len": len(TEXT) + 3}),
        ({"lead": 50}, {"max_model_len": 20, "max_tree_rows": 10}),
        ({"lead": 50, "beam_width": 6, "branch": 1}, {}),
    ],
)
def test_a_beam_ends_where_that_of_the_beam_writer_ends_and_goes_on_after_a_hit(
    device: str, changes: dict[str, Any], model: dict[str, int]
) -> None:
    pair = twins(device, model=model, **{"beam_width": 4, "branch": 4, **changes})
    depths = []
    for _ in range(3):
        for _ in range(40):
            if not pair.step():
                break
        else:
            assert changes.get("branch") == 1 or "min_path_logprob" in changes
        depths.append(pair.beam.cache.depth)
        pair.commit([pair.likely_token(1)])
    assert depths[0] > 1


def test_a_beam_grows_through_the_spans_of_the_desk(device: str) -> None:
    text = [i * i % VOCAB_SIZE for i in range(200)]
    pair = twins(device, text, beam_width=8, branch=3, lead=30, max_len=MAX_MODEL_LEN)
    for _ in range(14):
        pair.step()
    assert {step.shape.span for step in pair.writer._steps.values()} == {256, 512}


def test_the_width_can_change_while_a_step_is_under_way(device: str, launches: list[BeamStep]) -> None:
    pair = twins(device, beam_width=5, branch=5, lead=12)
    for width in (3, 7, None, 20, 2):
        for _ in range(4):
            pair.step()
        for beam in (pair.plain, pair.beam):
            beam.reshape(beam_width=width)
        for _ in range(2):
            pair.step()
        pair.commit([pair.likely_token(0)])
    shapes = {step.shape.num_places for step in launches}
    assert shapes == {2, 4, 8, 32}, "of 2, 3, 5 and 7, and 20 nodes"


def test_host_and_device_agree_on_paths_below_the_floor(device: str, launches: list[BeamStep]) -> None:
    pair = twins(device, beam_width=8, branch=6, lead=30, min_path_logprob=-5.0)
    sizes = [pair.step() for _ in range(4)]
    assert 0 < sizes[-1] < 8, "the floor has cut a layer"
    assert is_ahead(pair.writer, pair.beam)
    assert len(launches) == 4, "one a layer and one ahead: none in vain"


def test_where_the_device_has_chosen_another_layer_its_step_is_dropped(
    device: str, monkeypatch: pytest.MonkeyPatch, launches: list[BeamStep]
) -> None:
    result = BeamStep.result

    def other_choice(step: BeamStep, fetched: Any) -> DraftStepResult:
        found = result(step, fetched)
        return DraftStepResult(found.tokens, found.logprobs, [*found.chosen[:-1], (0, found.tokens[0][-1])])

    monkeypatch.setattr(BeamStep, "result", other_choice)
    pair = twins(device, beam_width=3, branch=4, lead=20)
    for _ in range(5):
        pair.step()
        assert not is_ahead(pair.writer, pair.beam)
    assert len(launches) == 8, "two for each layer: one of them ahead, in vain"


def test_an_order_of_the_device_that_differs_at_a_tie_does_no_harm(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = BeamStep._best_children

    def rounded(step: BeamStep, logits: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, logprobs = choose(step, logits, positions)
        return tokens, (logprobs / 4).round() * 4  # most scores tie

    monkeypatch.setattr(BeamStep, "_best_children", rounded)
    writer = DeviceBeamWriter(bucketed(device))
    beam = writer.open(TEXT, draft_spec(beam_width=6, branch=6, lead=20), epoch=0)
    for i in range(14):
        made = writer.step([(beam, beam.num_tokens_to_run())])[0]
        assert isinstance(made, NewNodes)
        assert len(made) == 6
        assert_rows_are_those_of_the_text(beam)
        if i % 5 == 4:
            assert beam.commit([beam.cache.token(beam.cache.children(beam.cache.root_id)[0])]) is not None
            assert_rows_are_those_of_the_text(beam)


def assert_rows_are_those_of_the_text(beam: DeviceBeamSequence) -> None:
    """Check the rows of all expanded nodes against a fresh prefill of their paths."""
    fresh = ordinary(str(beam._runner.device))
    own = beam._runner._cache[beam.slot].kv
    for node, row in beam.row_of.items():
        text = beam.token_ids + beam.cache.path_tokens(node)
        slot = fresh.open()
        fresh.forward([Extension(slot, text, range(-1, len(text) - 1), len(text) - 1)])
        expected = fresh._cache[slot].kv[:, :, :, len(text) - 1]
        torch.testing.assert_close(own[:, :, :, row].clone(), expected.clone(), atol=1e-4, rtol=1e-4)
        fresh.close(slot)


@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 99))
def test_several_requests_share_the_writer_in_any_order(
    writers: tuple[BeamWriter, DeviceBeamWriter], data: st.DataObject, seed: int
) -> None:
    plain_writer, writer = writers
    laws = sorted(LAWS)
    pairs = [
        Twins(
            plain_writer,
            writer,
            [(seed + 5 * n + 3 * i) % VOCAB_SIZE for i in range(4 + n)],
            draft_spec(beam_width=2 + n, branch=4, lead=6, seed=seed + n, **LAWS[laws[n]]),
        )
        for n in range(3)
    ]
    for _ in range(data.draw(st.integers(4, 12))):
        active = data.draw(st.sets(st.integers(0, 2), min_size=1))
        if data.draw(st.integers(0, 3)) == 0:
            for n in active:
                pairs[n].commit([pairs[n].likely_token(n)])
            continue
        beams = [(pairs[n], share) for n in active if (share := pairs[n].plain.num_tokens_to_run())]
        if beams:
            made = writer.step([(pair.beam, share) for pair, share in beams])
            expected = plain_writer.step([(pair.plain, share) for pair, share in beams])
            for one, other, (pair, _) in zip(made, expected, beams, strict=True):
                assert isinstance(one, NewNodes)
                assert isinstance(other, NewNodes)
                assert_same_nodes(one, other)
                pair.check()
    for pair in pairs:
        pair.close()


def test_a_step_under_way_is_read_when_other_requests_join(device: str, launches: list[BeamStep]) -> None:
    writer = DeviceBeamWriter(bucketed(device))
    one, two = (writer.open([*TEXT, i], draft_spec(lead=20), epoch=0) for i in (1, 2))
    for beam in (two, one):
        writer.step([(beam, beam.num_tokens_to_run())])
        writer.step([(beam, beam.num_tokens_to_run())])
    assert is_ahead(writer, one)
    num_launches, depth = len(launches), one.cache.depth
    writer.step([(beam, beam.num_tokens_to_run()) for beam in (one, two)])
    assert one.cache.depth == depth + 1
    assert len(launches) == num_launches
    assert writer._ahead is None


def test_a_frontier_of_which_only_a_part_may_run_is_run_as_the_beam_writer_does(device: str) -> None:
    pair = twins(device, beam_width=5, branch=4, lead=30)
    for share in (100, 100, 100, 2, 1, 3, 100, 100, 2):
        (made,), (expected,) = (
            writer.step([(beam, share)]) for writer, beam in ((pair.writer, pair.beam), (pair.plain_writer, pair.plain))
        )
        assert isinstance(made, NewNodes)
        assert isinstance(expected, NewNodes)
        assert_same_nodes(made, expected)
        pair.check()


@pytest.mark.parametrize("law", sorted(LAWS))
def test_a_step_reads_nothing_back_and_does_the_same_whatever_its_state(device: str, law: str) -> None:
    writer = DeviceBeamWriter(bucketed(device))
    beam = writer.open(TEXT, draft_spec(beam_width=4, branch=4, **LAWS[law]), epoch=0)
    seen = []
    for _ in range(2):
        writer.step([(beam, beam.num_tokens_to_run())])
    (step,) = writer._steps.values()
    for scores in (None, [-1.0, -2.0, -math.inf, -math.inf], [-math.inf] * 4):
        if scores is not None:
            with torch.inference_mode():
                step._scores.tensor.copy_(torch.tensor(scores))
        seen.append(operations_of(step._compute))
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) > 30
    assert not synchronising(seen[0])


def test_recording_a_step_in_the_middle_of_a_text_does_no_harm(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "NUM_WARM_UPS_ON_CPU", 2)
    pair = twins(device, beam_width=4, branch=4, lead=12, **LAWS["coupled"])
    for width in (None, 8, 2):
        for beam in (pair.plain, pair.beam):
            beam.reshape(beam_width=width)
        for _ in range(5):
            pair.step()
        pair.commit([pair.likely_token(0)])


def test_steps_recorded_in_advance_are_the_ones_used(device: str) -> None:
    writer = DeviceBeamWriter(bucketed(device))
    spec = draft_spec(beam_width=5, branch=4, **LAWS["coupled"])
    writer.warm_up(spec, num_rows=300)
    recorded = list(writer._steps.values())
    assert [step.shape.span for step in recorded] == [256, 512]
    beam = writer.open(TEXT, spec, epoch=0)
    for _ in range(4):
        writer.step([(beam, beam.num_tokens_to_run())])
    assert {id(step) for step in writer._steps.values()} == {id(step) for step in recorded}


def test_recorded_steps_are_bounded_and_the_oldest_goes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("card.backends.cuda.device_beam._MAX_STEPS", 2)
    writer = DeviceBeamWriter(bucketed(device))
    for branch in (2, 3, 2, 4):
        writer.warm_up(draft_spec(branch=branch), num_rows=10)
    assert [step.shape.branch for step in writer._steps.values()] == [2, 4]


def broken(device: str) -> tuple[DeviceBeamWriter, DeviceBeamSequence]:
    """Return a beam whose next step gives scores that are no numbers."""
    writer = DeviceBeamWriter(bucketed(device))
    beam = writer.open(TEXT, draft_spec(), epoch=0)
    for _ in range(3):
        writer.step([(beam, beam.num_tokens_to_run())])
    writer._ahead = None
    (step,) = writer._steps.values()
    with torch.inference_mode():
        step._static._decoder._norm.fill_(math.nan)
    return writer, beam


def test_scores_that_are_no_numbers_are_reported_as_by_the_beam_writer(device: str) -> None:
    writer, beam = broken(device)
    snapshot, num_rows = beam.cache.snapshot(), beam.num_held_rows
    (made,) = writer.step([(beam, beam.num_tokens_to_run())])
    assert isinstance(made, ProtocolError)
    assert (beam.cache.snapshot(), beam.num_held_rows) == (snapshot, num_rows)


def test_such_scores_of_a_step_under_way_make_no_node_when_a_correction_comes(device: str) -> None:
    writer, beam = broken(device)
    with torch.inference_mode():
        writer._ahead = writer._launch(beam, beam.frontier())
    depth = beam.cache.depth
    assert beam.commit([beam.cache.token(beam.cache.children(beam.cache.root_id)[0])]) is not None
    assert beam.cache.depth <= depth
    (made,) = writer.step([(beam, beam.num_tokens_to_run())])
    assert isinstance(made, ProtocolError)


def test_the_writer_that_suits_a_runner_looks_ahead_unless_turns_are_taken(device: str) -> None:
    runner = bucketed(device)
    for takes_turns in (False, True):
        writer = make_writer(runner, takes_turns=takes_turns)
        assert isinstance(writer, DeviceBeamWriter)
        assert writer._looks_ahead is not takes_turns
    assert type(make_writer(ordinary(device), takes_turns=False)) is PhraseDraftWriter


def test_closing_a_beam_frees_its_rows_and_forgets_its_step(device: str) -> None:
    runner = bucketed(device)
    writer = DeviceBeamWriter(runner)
    beam = writer.open(TEXT, draft_spec(), epoch=0)
    for _ in range(3):
        writer.step([(beam, beam.num_tokens_to_run())])
    assert is_ahead(writer, beam)
    beam.close()
    assert writer._ahead is None
    again = writer.open([*TEXT, 1], draft_spec(), epoch=0)
    assert again.num_reused == len(TEXT)


PARAMS = [
    SamplingParams(temperature=0.0, seed=0, max_tokens=50),
    SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=50),
]
Make = Callable[[DrafterWorker], Any]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("make_link", [InlineLink, ThreadLink], ids=["inline", "thread"])
@pytest.mark.parametrize("noise", [0.0, 0.1, 2.0], ids=["same", "close", "other"])
def test_decoded_text_is_that_of_plain_decoding(
    device: str, params: SamplingParams, make_link: Make, noise: float
) -> None:
    lane = lane_of(device)
    with lane.entered():
        worker = DrafterWorker(DeviceBeamWriter(bucketed(device, noise=noise)), clock=time.perf_counter)
    link = make_link(worker)
    link.start()
    draft = DraftSettings(beam_width=4, branch=4, lead=8, verify="tree")
    token_ids, reason, stats = decode(bucketed(device), link, params=params, prompt=tuple(TEXT), draft=draft)
    link.close()
    assert (token_ids, reason) == plain(ordinary(device), params=params, prompt=tuple(TEXT))
    if make_link is InlineLink and noise == 0.0:
        assert stats.accepted_tokens > 20
