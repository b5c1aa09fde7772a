"""The target's worker: what it commits, whom it believes, and what it tells the drafter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import DraftSettings, SamplingParams, SamplingRule
from card.drafting.messages import Close, Correction, Layer, Open, Pong, Resync, TargetMessage
from card.engine.policy.rounds import drop_unlikely
from card.engine.request import Request, StepResult, Update
from card.engine.sequence import Work
from card.engine.target import TargetWorker
from card.errors import ModelError, ProtocolError, TargetError
from card.tree.nodes import NewNodes
from card.tree.sampling import Sampler
from tests.decoding import GREEDY, PROMPT, drafter_for, plain, toy_draft, toy_target
from tests.examples import settings
from tests.reaching_in import has_lost_a_layer
from tests.routed import RoutedTable, chosen_by
from tests.toy import TableModel

CHAIN = DraftSettings(budget=4, min_verify_prob=0.0)


class Clock:
    def __init__(self) -> None:
        self._looks = itertools.count()

    def __call__(self) -> float:
        return float(next(self._looks))


def request(request_id: int = 7, **changes: Any) -> Request:
    values: dict[str, Any] = {"prompt_ids": PROMPT, "params": GREEDY, "draft": CHAIN, "end_ids": frozenset()}
    values |= changes
    return Request(request_id=request_id, **values | {"params": values["params"].resolved()})


def run_round(worker: TargetWorker, request_ids: list[int]) -> StepResult:
    """Run what is left of the prompts, or verify the candidates that are likely enough, in one pass."""
    work = []
    for request_id in request_ids:
        sequence = worker.find(request_id)
        offer = drop_unlikely(worker.query(sequence), sequence.request.draft)
        work.append(Work(sequence, num_prompt_tokens=sequence.prompt_tokens_left, offer=offer))
    return worker.step(work)


def started(target: TableModel | None = None, **changes: Any) -> TargetWorker:
    """Return a worker whose request has run its prompt: six tokens of text."""
    worker = TargetWorker(target or toy_target(), clock=Clock())
    worker.add(worker.check(request(**changes)))
    run_round(worker, [7])
    return worker


def text_of(worker: TargetWorker) -> list[int]:
    return worker.find(7).token_ids


def upcoming(count: int) -> list[int]:
    """Return the tokens that follow the first one in plain decoding."""
    return plain(toy_target())[0][1 : 1 + count]


def layer(*entries: tuple[int, int, int, float], **changes: Any) -> Layer:
    """Return the drafter's first message after the first token, with nodes of (id, parent, token, logprob)."""
    columns = [tuple(column) for column in zip(*entries, strict=True)] or [()] * 4
    names = ("ids", "parents", "tokens", "logprobs")
    nodes = dict(zip(names, columns, strict=True)) | {name: changes.pop(name) for name in names if name in changes}
    values: dict[str, Any] = {
        "nodes": NewNodes(**nodes),
        "request_id": 7,
        "seq": 0,
        "epoch": 0,
        "is_reset": True,
        "root_id": 0,
        "root_position": 5,
    }
    return Layer(
        **values
        | {"known_len": 6, "num_passes": 1, "busy_s": 0.5, "num_reused": 0, "num_dropped": 0}
        | {"num_rolled_back": 0}
        | changes
    )


def chain_layer(tokens: list[int], **changes: Any) -> Layer:
    return layer(*((i, i - 1, token, -0.5) for i, token in enumerate(tokens, start=1)), **changes)


def correction_of(result: StepResult) -> Correction:
    (message,) = result.messages
    assert isinstance(message, Correction)
    return message


# ---- believing layers -----------------------------------------------------------------------------------------------

GARBAGE: dict[str, dict[str, Any]] = {
    "root beyond the text": {"root_position": 6, "known_len": 7},
    "root before the text": {"root_position": -1},
    "root not known": {"root_position": 5, "known_len": 5},
    "more known than there is": {"known_len": 7},
    "token beyond the vocabulary": {"tokens": (1, 12)},
    "negative token": {"tokens": (1, -1)},
    "ids not increasing": {"ids": (9, 9)},
    "ids decreasing": {"ids": (9, 8)},
    "parent not before the node": {"parents": (0, 10)},
    "negative parent": {"parents": (-1, 0)},
    "NaN": {"logprobs": (-1.0, math.nan)},
    "probability above 1": {"logprobs": (-1.0, 0.5)},
    "probability 0": {"logprobs": (-math.inf, -1.0)},
    "unequal lengths": {"logprobs": (-1.0,)},
    "negative passes": {"num_passes": -1},
    "endless passes": {"num_passes": 2**62},
    "negative drops": {"num_dropped": -1},
    "endless drops": {"num_dropped": 2**62},
    "negative rollback": {"num_rolled_back": -1},
    "time that is no number": {"busy_s": math.nan},
    "pass that ends before it begins": {"pass_span_s": (2.0, 1.0)},
    "pass without an end": {"pass_span_s": (0.0, math.inf)},
    "pass at no time": {"pass_span_s": (math.nan, 0.0)},
    "more reused than there is": {"num_reused": 99},
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=list(GARBAGE))
@pytest.mark.parametrize("is_reset", [True, False])
def test_a_garbage_layer_raises_and_changes_neither_text_nor_candidates(
    garbage: dict[str, Any], is_reset: bool
) -> None:
    worker = started()
    candidates = upcoming(3)
    worker.receive(chain_layer(candidates))
    generation = worker.find(7)
    text, stats, nodes = list(text_of(worker)), generation.stats.as_dict(), generation.replica.tree.snapshot()
    bad = {"ids": (9, 10), "parents": (0, 0), "tokens": (1, 2), "logprobs": (-1.0, -2.0), "seq": 1} | garbage
    with pytest.raises(ProtocolError):
        worker.receive(layer(is_reset=is_reset, epoch=int(is_reset), **bad))
    assert (text_of(worker), generation.stats.as_dict()) == (text, stats)
    assert (generation.replica.tree.epoch, generation.replica.tree.snapshot()) == (0, nodes)
    assert not has_lost_a_layer(generation.replica)
    assert run_round(worker, [7]).updates[0].token_ids == tuple(upcoming(4)), "the candidates still serve"


def test_a_lost_layer_makes_the_next_corrections_ask_for_a_snapshot_until_it_comes() -> None:
    worker = started()
    tokens = upcoming(9)
    worker.receive(chain_layer(tokens[:1]))
    worker.receive(layer((3, 1, tokens[1], -0.5), seq=2, is_reset=False))
    assert worker.find(7).replica.tree.num_nodes == 1, "a layer after a gap is not believed"
    first, second = (correction_of(run_round(worker, [7])) for _ in range(2))
    assert first.wants_snapshot
    assert second.wants_snapshot
    length = len(text_of(worker))
    snapshot = chain_layer([tokens[length - 6]], seq=3, is_reset=True, root_position=length - 1, known_len=length)
    worker.receive(snapshot)
    result = run_round(worker, [7])
    assert len(result.updates[0].token_ids) == 2, "the snapshot's candidate was accepted"
    assert not correction_of(result).wants_snapshot


def test_repeated_and_overtaken_layers_are_ignored_whatever_they_hold() -> None:
    worker = started()
    worker.receive(chain_layer(upcoming(2), seq=4))  # a reset may skip numbers
    before = worker.find(7).replica.tree.snapshot()
    worker.receive(layer((5, 0, 11, -0.1), seq=4, is_reset=False))
    worker.receive(layer((5, 0, 11, -0.1), seq=3, is_reset=True, epoch=9))
    worker.receive(layer(seq=2, root_position=-5, tokens=(99,)))
    assert worker.find(7).replica.tree.snapshot() == before
    assert not correction_of(run_round(worker, [7])).wants_snapshot


def test_a_layer_of_an_old_epoch_adds_nothing() -> None:
    worker = started()
    worker.receive(chain_layer([], epoch=3))
    worker.receive(chain_layer(upcoming(2), seq=1, epoch=2, is_reset=False))
    assert worker.find(7).replica.tree.num_nodes == 0
    assert not has_lost_a_layer(worker.find(7).replica)


def test_layers_about_an_older_text_are_settled_against_the_text_of_now() -> None:
    worker = started()
    tokens = upcoming(6)
    for _ in range(2):
        run_round(worker, [7])  # eight tokens of text; the drafter knew six
    worker.receive(chain_layer(tokens))
    assert worker.find(7).stats.late_hits == 0, "what a reset brings was never waited for"
    assert run_round(worker, [7]).updates[0].token_ids == tuple(tokens[2:6]) + tuple(upcoming(7)[6:])
    assert worker.find(7).stats.hits == 0


def test_each_new_epoch_is_one_miss() -> None:
    worker = started()
    worker.receive(layer())
    assert worker.find(7).stats.misses == 0, "the first epoch follows no other"
    for seq, (epoch, num_misses) in enumerate([(1, 1), (1, 1), (2, 2), (2, 2)], start=1):  # a repeat is a snapshot
        worker.receive(layer(seq=seq, epoch=epoch))
        assert worker.find(7).stats.misses == num_misses


def test_a_token_that_comes_after_it_was_committed_is_a_late_hit() -> None:
    worker = started()
    tokens = upcoming(4)
    worker.receive(chain_layer([]))
    run_round(worker, [7])
    assert worker.find(7).is_short_of_candidates
    worker.receive(chain_layer(tokens[:3], seq=1, is_reset=False))
    assert worker.find(7).stats.late_hits == 1
    assert not worker.find(7).is_short_of_candidates
    assert run_round(worker, [7]).updates[0].token_ids == tuple(tokens[1:4])


def test_messages_about_unknown_requests_or_for_nobody_are_ignored() -> None:
    worker = started(uses_drafter=False)
    assert worker.receive(layer(request_id=8, root_position=99)) == []
    assert worker.receive(layer(root_position=99)) == [], "a request without a drafter listens to none"
    assert worker.receive(Resync(8, None)) == worker.receive(Resync(7, None)) == []
    assert worker.receive(Pong(1)) == []


# ---- telling the drafter --------------------------------------------------------------------------------------------


def test_corrections_start_where_the_drafter_is_known_to_be() -> None:
    worker = TargetWorker(toy_target(), clock=Clock())
    (opening,) = worker.add(worker.check(request())).opening()
    assert isinstance(opening, Open)
    assert opening.token_ids == PROMPT
    first = correction_of(run_round(worker, [7]))
    assert (first.start, first.token_ids) == (0, tuple(text_of(worker))), "nothing is known to have arrived yet"
    worker.receive(layer(root_position=4, known_len=5))
    second = correction_of(run_round(worker, [7]))
    assert (second.start, second.token_ids) == (5, tuple(text_of(worker)[5:]))
    assert second.round_idx == first.round_idx + 1


def test_a_drafter_that_asks_gets_the_text_from_where_it_is_or_a_new_opening() -> None:
    worker = started()
    worker.receive(layer())
    (message,) = worker.receive(Resync(7, 3))
    assert message == Correction(7, 1, 3, tuple(text_of(worker)[3:]), False)
    (message,) = worker.receive(Resync(7, None))
    assert isinstance(message, Open)
    assert message.token_ids == tuple(text_of(worker))
    (message,) = worker.receive(Resync(7, 10**9))
    assert message == Correction(7, 1, 6, (), False), "it cannot know more than there is"
    (message,) = worker.receive(Resync(7, -4))
    assert message == Correction(7, 1, 0, tuple(text_of(worker)), False), "nor less than nothing"


def test_the_spec_of_an_opening_is_what_the_request_asks_for() -> None:
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.75, min_p=0.125, seed=2**62)
    tree = DraftSettings(beam_width=3, branch=2, lead=9, max_nodes=77, min_path_logprob=-3.0, coupled_noise=False)
    draft = tree.replace(growth="fan-out", branch_below=0.125, fan_out=(4, 2, 0), num_speculative_tokens=5)
    worker = TargetWorker(toy_target(), clock=Clock())
    (opening,) = worker.add(worker.check(request(params=params, draft=draft))).opening()
    assert isinstance(opening, Open)
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        assert getattr(opening.spec.sampling, name) == getattr(params, name)
    for name in ("beam_width", "branch", "lead", "max_nodes", "min_path_logprob", "coupled_noise"):
        assert getattr(opening.spec.shape, name) == getattr(draft, name)
    for name in ("growth", "branch_below", "fan_out", "num_speculative_tokens"):
        assert getattr(opening.spec.shape, name) == getattr(draft, name)


def test_a_new_incarnation_is_told_everything_and_the_old_ones_candidates_are_dropped() -> None:
    target = toy_target()
    worker = started(target)
    worker.receive(chain_layer(upcoming(3), seq=5, num_passes=4, busy_s=2.0, num_dropped=30, num_rolled_back=4))
    worker.add(worker.check(request(8, uses_drafter=False)))
    (opening,) = worker.reopen()
    assert isinstance(opening, Open)
    assert opening.token_ids == tuple(text_of(worker))
    result = run_round(worker, [7])
    assert len(result.updates[0].token_ids) == 1
    assert correction_of(result).start == 0
    length = len(text_of(worker))
    counts = {"num_passes": 3, "busy_s": 1.0, "num_dropped": 5, "num_rolled_back": 2}
    worker.receive(layer(seq=0, root_position=length - 1, known_len=length, **counts))
    stats = worker.find(7).stats
    assert (stats.drafter_passes, stats.drafter_busy_s) == (7, 3.0), "passes of both incarnations count"
    assert (stats.drafter_dropped_nodes, stats.rolled_back_tokens) == (35, 6)


def test_removing_a_request_frees_its_rows_and_closes_it_at_the_drafter() -> None:
    target = toy_target()
    worker = started(target)
    other = worker.add(worker.check(request(8, uses_drafter=False)))
    assert worker.remove(worker.find(7)) == [Close(7)]
    assert worker.remove(other) == []
    assert worker.find(7) is worker.find(8) is None
    assert not target._sequences


def test_a_request_without_a_drafter_says_nothing() -> None:
    worker = TargetWorker(toy_target(), clock=Clock())
    assert worker.add(worker.check(request(uses_drafter=False))).opening() == []
    assert run_round(worker, [7]).messages == []
    assert worker.reopen() == []


# ---- committing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["chain", "tree"])
@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_a_round_commits_the_right_candidates_and_one_token_more(verify: str, num_right: int) -> None:
    target = toy_target()
    worker = started(target, draft=DraftSettings(verify=verify, budget=3))
    tokens = upcoming(4)
    offered = tokens[:num_right] + [(token + 1) % 12 for token in tokens[num_right:3]]
    worker.receive(chain_layer(offered))
    result = run_round(worker, [7])
    assert result.updates == [Update(7, tuple(tokens[: num_right + 1]), None, worker.find(7).stats)]
    stats = worker.find(7).stats
    assert (stats.target_passes, stats.verified_tokens, stats.accepted_tokens) == (1, 3, num_right)
    assert stats.offered_per_depth == [1, 1, 1]
    assert stats.hits == 0, "the last token was no candidate"
    held = target._sequences[worker.find(7).slot]
    assert held.token_ids == text_of(worker)[:-1], "rejected rows are rolled back"
    assert held.positions == list(range(len(held.token_ids)))


@pytest.mark.parametrize("verify", ["chain", "tree"])
@pytest.mark.parametrize(("min_verify_prob", "num_verified"), [(0.0, 4), (0.02, 3), (0.3, 1), (0.9, 0)])
def test_candidates_on_unlikely_paths_are_not_verified(verify: str, min_verify_prob: float, num_verified: int) -> None:
    worker = started(draft=DraftSettings(verify=verify, min_verify_prob=min_verify_prob))
    tokens = upcoming(5)
    nodes = [
        (i, i - 1, token, -1.0) for i, token in enumerate(tokens[:4], start=1)
    ]  # paths of 0.37, 0.14, 0.05 and 0.018
    worker.receive(layer(*nodes))
    assert run_round(worker, [7]).updates[0].token_ids == tuple(tokens[: num_verified + 1])
    assert worker.find(7).stats.verified_tokens == num_verified


def test_a_hit_is_counted_when_the_last_token_was_a_candidate_too() -> None:
    worker = started(draft=DraftSettings(budget=2))
    worker.receive(chain_layer(upcoming(4)))
    run_round(worker, [7])
    assert worker.find(7).stats.hits == 1
    assert worker.find(7).replica.tree.num_nodes == 1
    assert run_round(worker, [7]).updates[0].token_ids == tuple(upcoming(5)[3:])


def test_every_round_equals_plain_decoding_whatever_is_offered() -> None:
    @settings(max_examples=30)
    @given(
        offers=st.lists(
            st.lists(st.tuples(st.integers(0, 9), st.integers(0, 11)), max_size=10), min_size=1, max_size=5
        ),
        temperature=st.sampled_from([0.0, 1.0]),
        verify=st.sampled_from(["chain", "tree"]),
    )
    def check(offers: list[list[tuple[int, int]]], temperature: float, verify: str) -> None:
        params = SamplingParams(temperature=temperature, seed=4, max_tokens=40)
        expected = [*PROMPT, *plain(toy_target(), params=params)[0]]
        worker = started(params=params, draft=DraftSettings(verify=verify, budget=8))
        for seq, offer in enumerate(offers):
            length = len(text_of(worker))
            nodes = [(i, min(parent, i - 1), token, -0.1 * i) for i, (parent, token) in enumerate(offer, start=1)]
            worker.receive(layer(*nodes, seq=seq, epoch=seq, root_position=length - 1, known_len=length))
            run_round(worker, [7])
            assert text_of(worker) == expected[: len(text_of(worker))]
            assert len(text_of(worker)) > length

    check()


@pytest.mark.parametrize("uses_drafter", [False, True])
def test_the_token_at_a_position_is_chosen_with_the_noise_of_that_position(uses_drafter: bool) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=12)
    sampler, text = Sampler(SamplingRule.of(params.resolved()), 12), list(PROMPT)
    for _ in range(12):
        text += sampler.choose(toy_target().logits_after(text)[None], [len(text)])
    worker = started(params=params, uses_drafter=uses_drafter)
    worker.receive(chain_layer(text[6:9]))
    while len(text_of(worker)) < len(text):
        run_round(worker, [7])
    assert text_of(worker) == text
    assert worker.find(7).stats.accepted_tokens == (3 if uses_drafter else 0)


class StopAfter:
    """Stops at the first of some tokens and notes what it was fed."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id
        self.fed: list[int] = []

    def feed(self, token_id: int) -> bool:
        self.fed.append(token_id)
        return token_id == self.token_id


@pytest.mark.parametrize("num_kept", [1, 2, 3, 4])
@pytest.mark.parametrize("end", ["end token", "stop check", "max tokens"])
def test_the_text_ends_exactly_there_inside_and_after_accepted_candidates(num_kept: int, end: str) -> None:
    tokens = upcoming(4)
    assert len(set(tokens)) == 4
    last = tokens[num_kept - 1]
    check = StopAfter(last if end == "stop check" else -1)
    worker = started(
        end_ids=frozenset({last} if end == "end token" else ()),
        params=GREEDY.replace(max_tokens=1 + num_kept) if end == "max tokens" else GREEDY,
        stop_check=check,
        draft=DraftSettings(budget=3),
    )
    worker.receive(chain_layer(tokens[:3]))
    result = run_round(worker, [7])
    reason = "length" if end == "max tokens" else "stop"
    assert result.updates == [Update(7, tuple(tokens[:num_kept]), reason, worker.find(7).stats)]
    assert text_of(worker) == [*PROMPT, *plain(toy_target())[0][: 1 + num_kept]]
    assert check.fed == text_of(worker)[5:], "each token once, in order, and none beyond the end"
    assert result.messages == [], "the drafter has nothing more to do"
    stats = worker.find(7).stats
    num_verified = num_kept - 1 if end == "max tokens" else 3  # what could not be kept is not verified
    assert (stats.verified_tokens, stats.accepted_tokens) == (num_verified, min(num_kept, num_verified))
    assert stats.num_new_tokens == 1 + num_kept


def test_the_first_token_may_be_the_last() -> None:
    first = plain(toy_target())[0][0]
    for changes in ({"end_ids": frozenset({first})}, {"params": GREEDY.replace(max_tokens=1)}):
        worker = TargetWorker(toy_target(), clock=Clock())
        worker.add(worker.check(request(**changes)))
        assert run_round(worker, [7]).updates[0].token_ids == (first,)
        assert worker.find(7).stats.target_passes == 0


def test_the_text_ends_at_the_end_of_the_context() -> None:
    worker = started(toy_target(max_model_len=8))
    tokens = upcoming(2)
    worker.receive(chain_layer(upcoming(4)))
    assert run_round(worker, [7]).updates == [Update(7, tuple(tokens), "length", worker.find(7).stats)]


@pytest.mark.parametrize("num_tree_rows", [0, 1, 2])
def test_no_more_is_verified_than_rows_are_left_for(num_tree_rows: int) -> None:
    draft = DraftSettings(verify="tree", budget=10, min_verify_prob=0.0)
    worker = started(toy_target(max_model_len=8, num_tree_rows=num_tree_rows), draft=draft)
    worker.receive(layer(*((i, 0, i, -1.0) for i in range(1, 9))))
    run_round(worker, [7])
    assert worker.find(7).stats.verified_tokens == 2 + num_tree_rows


def test_times_are_counted_apart_from_the_prompt() -> None:
    worker = started()
    assert worker.find(7).stats.target_busy_s == 0
    run_round(worker, [7])
    run_round(worker, [7])
    assert worker.find(7).stats.target_busy_s == 2.0
    assert worker.find(7).stats.num_prompt_tokens == len(PROMPT)


# ---- several requests -----------------------------------------------------------------------------------------------


def run_together(
    target: TableModel, requests: list[Request], agreement: float, joins_at: Callable[[int], int]
) -> dict[int, tuple[list[int], str]]:
    """Run requests that join at different rounds, each until its end, with one drafter for all."""
    worker, drafter = TargetWorker(target, clock=Clock()), drafter_for(toy_draft(target, agreement))
    waiting, done, texts = list(requests), {}, {r.request_id: list[int]() for r in requests}
    running: list[int] = []

    def send(messages: list[TargetMessage]) -> None:
        for message in messages:
            for reply in drafter.receive(message):
                send(worker.receive(reply))

    for round_idx in itertools.count():
        while waiting and joins_at(len(requests) - len(waiting)) <= round_idx:
            running.append(waiting[0].request_id)
            send(worker.add(worker.check(waiting.pop(0))).opening())
        if not running and not waiting:
            worker.pool.clear()
            assert not target._sequences, "every request gave its rows back"
            return done
        num_passes = target.num_forward_passes
        result = run_round(worker, running)
        assert target.num_forward_passes == num_passes + bool(running), "one pass for all"
        send(result.messages)
        for update in result.updates:
            texts[update.request_id] += update.token_ids
            if update.finish_reason:
                running.remove(update.request_id)
                send(worker.remove(worker.find(update.request_id)))
                done[update.request_id] = (texts[update.request_id], update.finish_reason)
        for _ in range(2):
            for reply in drafter.step():
                send(worker.receive(reply))
    raise AssertionError("unreachable")


@settings(max_examples=15)
@given(seed=st.integers(0, 99), agreement=st.sampled_from([0.0, 0.8, 1.0]), data=st.data())
def test_several_requests_in_one_pass_equal_each_alone(seed: int, agreement: float, data: st.DataObject) -> None:
    draws = st.tuples(
        st.integers(1, 8), st.integers(1, 20), st.sampled_from([0.0, 1.0]), st.sampled_from(["chain", "tree"])
    )
    drawn = data.draw(st.lists(draws, min_size=2, max_size=4))
    requests = [
        request(
            i,
            prompt_ids=tuple((seed + i * j) % 12 for j in range(length)),
            params=SamplingParams(temperature=temperature, seed=seed + i, max_tokens=max_tokens),
            draft=DraftSettings(verify=verify, budget=5, lead=6),
            end_ids=frozenset({i}),
            uses_drafter=i != 1,
        )
        for i, (length, max_tokens, temperature, verify) in enumerate(drawn)
    ]
    target = toy_target(seed)
    assert run_together(target, requests, agreement, joins_at=lambda i: 3 * i) == {
        r.request_id: plain(toy_target(seed), params=r.params, prompt=r.prompt_ids, end_ids=r.end_ids) for r in requests
    }


def test_an_error_in_one_requests_part_of_a_round_leaves_it_as_it_was_and_the_others_go_on() -> None:
    target, turns = toy_target(), itertools.count(1)

    def process(ids: Any, row: Any) -> Any:
        if next(turns) == 4:  # of the second round, after the first request's
            raise RuntimeError("a bug")
        return row

    worker = TargetWorker(target, clock=Clock())
    for request_id in (7, 8):
        worker.add(worker.check(request(request_id, logits_processor=process)))
    run_round(worker, [7, 8])
    before = [list(worker.find(i).token_ids) for i in (7, 8)]
    result = run_round(worker, [7, 8])
    assert {i: type(error) for i, error in result.failures.errors.items()} == {8: TargetError}
    assert "a bug" in str(result.failures.errors[8])
    assert [len(worker.find(i).token_ids) for i in (7, 8)] == [len(before[0]) + 1, len(before[1])]
    assert worker.find(8).token_ids == before[1]
    for _ in range(9):
        run_round(worker, [7, 8])
    expected = plain(target)[0]
    assert [worker.find(i).token_ids[len(PROMPT) :] for i in (7, 8)] == [expected[:11], expected[:10]]


def test_a_round_tells_how_many_experts_its_pass_read() -> None:
    worker = started(RoutedTable(0, vocab_size=12, max_model_len=128))
    (token_id,) = text_of(worker)[-1:]
    assert run_round(worker, [7]).num_experts == len(chosen_by(token_id)) == 12
    assert run_round(started(), [7]).num_experts == 0, "a dense model"


def test_a_pass_that_raises_leaves_every_request_of_it_as_it_was() -> None:
    target = toy_target()
    worker = TargetWorker(target, clock=Clock())
    for request_id in (7, 8):
        worker.add(worker.check(request(request_id)))
    run_round(worker, [7, 8])
    before, forward = [list(worker.find(i).token_ids) for i in (7, 8)], target.forward
    target.forward = lambda extensions: [logits * math.nan for logits in forward(extensions)]  # type: ignore[method-assign]
    with pytest.raises(ModelError):
        run_round(worker, [7, 8])
    target.forward = forward  # type: ignore[method-assign]
    assert [worker.find(i).token_ids for i in (7, 8)] == before
    for _ in range(10):
        run_round(worker, [7, 8])
    expected = plain(target)[0][:11]
    assert [worker.find(i).token_ids[len(PROMPT) :] for i in (7, 8)] == [expected, expected]
