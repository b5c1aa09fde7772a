"""Two drafters for one text: whatever becomes of either, the text is that of plain decoding."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from card.api.llm import LLM
from card.config import DraftSettings, SamplingParams
from card.engine.engine import Engine
from card.engine.further import FURTHER, FurtherDrafter
from card.errors import ModelError, SettingsError, VocabularyError
from card.methods import find_method
from card.models.toy import TableModel
from card.transport.fake import FakeLink, Faults
from card.transport.process import ProcessLink
from card.tree.messages import DrafterMessage
from card.workers.metrics import RequestStats
from card.workers.target import TargetWorker
from tests.decoding import drafter_for, fake, make_request, plain, toy_draft, toy_target
from tests.pair import Pair

faults = st.builds(
    Faults,
    seed=st.integers(0, 2**31),
    drop=st.sampled_from([0.0, 0.3, 1.0]),
    duplicate=st.sampled_from([0.0, 0.3]),
    max_delay=st.integers(0, 3),
    kill=st.sampled_from([0.0, 0.1]),
    max_passes=st.integers(0, 6),
)


class Running(FakeLink):
    """A drafter that makes a few passes whenever it is listened to."""

    def __init__(self, target: TableModel, agreement: float, faults: Faults) -> None:
        super().__init__(lambda: drafter_for(toy_draft(target, agreement, 2)), faults)

    def receive(self) -> list[DrafterMessage]:
        self.draft(6)
        return super().receive()


def decode_by_two(
    target: TableModel,
    params: SamplingParams,
    agreements: tuple[float, float],
    both: tuple[Faults, Faults],
    second: Running | None = None,
) -> tuple[list[int], RequestStats, FurtherDrafter]:
    """Return the new tokens, the counters, and the second drafter; the two models are different ones."""
    first = fake(toy_draft(target, agreements[0], 1), both[0])
    second = second or Running(target, agreements[1], both[1])
    draft = DraftSettings(verify="tree")
    further = FurtherDrafter(second, draft, vocab_size=target.vocab_size, max_model_len=target.max_model_len)
    worker = TargetWorker(target, clock=time.perf_counter, writers={FURTHER: further.open})
    engine = Engine(worker, first, find_method("card"))
    engine.add(make_request(7, params=params, draft=draft))
    token_ids: list[int] = []
    while engine.has_work:
        for update in engine.step():
            token_ids += update.token_ids
    return token_ids, update.stats, further


@settings(max_examples=80)
@given(
    seed=st.integers(0, 99),
    agreements=st.tuples(*[st.sampled_from([0.0, 0.6, 1.0])] * 2),
    both=st.tuples(faults, faults),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_text_is_that_of_plain_decoding_whatever_happens_to_either_drafter(seed, agreements, both, temperature):
    target = toy_target(seed)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=40)
    token_ids, _, further = decode_by_two(target, params, agreements, both)
    assert token_ids == plain(target, params=params)[0]
    assert not further.link.status.reason, "no message of an honest drafter is rejected"


def test_the_second_drafter_helps_where_the_first_one_is_wrong():
    target = toy_target()
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=80)
    busy = (Faults(max_passes=6), Faults(max_passes=6))
    _, stats, _ = decode_by_two(target, params, (0.0, 1.0), busy)
    assert stats.accepted_by_writer[FURTHER] > 40
    assert stats.mean_acceptance_length > 2


def test_two_drafters_that_agree_are_one_candidate():
    target = toy_target()
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=80)
    busy = (Faults(max_passes=6), Faults(max_passes=6))
    _, stats, _ = decode_by_two(target, params, (1.0, 1.0), busy)
    assert stats.accepted_by_writer[f"beam+{FURTHER}"] > 10


def test_the_statistics_name_what_each_drafter_earned_and_what_both_did():
    target = toy_target()
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=80)
    busy = (Faults(max_passes=6), Faults(max_passes=6))
    _, stats, _ = decode_by_two(target, params, (0.7, 0.7), busy)
    assert stats.accepted_by_writer.keys() == {"beam", FURTHER, f"beam+{FURTHER}"}
    assert sum(stats.accepted_by_writer.values()) == stats.accepted_tokens
    assert sum(stats.verified_by_writer.values()) == stats.verified_tokens
    assert all(stats.accepted_by_writer[name] <= stats.verified_by_writer[name] for name in stats.accepted_by_writer)


def test_a_second_drafter_that_sends_impossible_candidates_is_rejected_and_the_text_goes_on():
    target = toy_target()
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=40)
    larger = TableModel(1, vocab_size=99, order=2, spread=1.5, max_model_len=128, num_tree_rows=512)
    foreign = Running(larger, 1.0, Faults(max_passes=6))
    token_ids, _, further = decode_by_two(target, params, (0.5, 1.0), (Faults(), Faults()), second=foreign)
    assert token_ids == plain(target, params=params)[0]
    assert "the target has tokens 0 to 11" in further.link.status.reason


def test_the_second_drafter_is_told_when_a_request_is_over():
    target = toy_target()
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=10)
    _, _, further = decode_by_two(target, params, (1.0, 1.0), (Faults(), Faults()))
    assert not further._open


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_draft_models_in_processes_of_their_own_write_for_one_target(pair: Pair, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=40, ignore_eos=True)
    cost = "20M"  # a target that takes longer than a drafter needs to begin
    with (
        LLM(pair.target, dtype="float32", target_cost=cost) as alone,
        LLM(
            pair.target,
            pair.draft,
            second_draft=pair.target,
            dtype="float32",
            target_cost=cost,
            policy="fixed",
            min_verify_prob=0.0,
        ) as both,
    ):
        (expected,) = alone.generate("a b c", params)
        for _ in range(50):  # on a busy machine the second drafter may come too late now and then
            (got,) = both.generate("a b c", params)
            assert got.outputs[0].token_ids == expected.outputs[0].token_ids
            if any(FURTHER in name for name in got.stats.verified_by_writer):
                break
        else:
            pytest.fail("the second drafter never proposed anything")


def test_the_text_goes_on_when_the_second_drafters_process_hangs_and_when_it_dies(pair: Pair) -> None:
    params = SamplingParams(temperature=0.0, seed=4, max_tokens=40, ignore_eos=True)
    fixed = {"policy": "fixed", "placement": "inline", "min_verify_prob": 0.0}
    with (
        LLM(pair.target, dtype="float32") as alone,
        LLM(pair.target, pair.draft, second_draft=pair.target, dtype="float32", **fixed) as both,
    ):
        (expected,) = alone.generate("a b c", params)
        assert both._host._further is not None
        link = both._host._further.link
        assert isinstance(link, ProcessLink)
        assert link.pid is not None
        os.kill(link.pid, signal.SIGSTOP)
        (hung,) = both.generate("a b c", params)
        os.kill(link.pid, signal.SIGKILL)
        give_up_s = time.monotonic() + 60
        while link.status.state == "up":
            (dead,) = both.generate("a b c", params)
            assert dead.outputs[0].token_ids == hung.outputs[0].token_ids == expected.outputs[0].token_ids
            assert time.monotonic() < give_up_s, "nobody notices that the process is gone"


def test_a_second_draft_of_another_tokenizer_is_refused_by_name(pair: Pair) -> None:
    with pytest.raises(
        VocabularyError, match=rf"draft {re.escape(pair.foreign_draft)} does not fit the target: .*token"
    ):
        LLM(pair.target, pair.draft, second_draft=pair.foreign_draft)


def test_a_second_draft_that_does_not_exist_is_refused_by_name(pair: Pair) -> None:
    with pytest.raises(ModelError, match=re.escape(pair.missing)):
        LLM(pair.target, pair.draft, second_draft=pair.missing)


@pytest.mark.parametrize("settings", [{"method": "vanilla"}, {"method": "suffix"}, {"writers": ("suffix",)}])
def test_a_second_draft_without_a_first_one_is_refused(pair: Pair, settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="second_draft joins a first one"):
        LLM(pair.target, pair.draft, second_draft=pair.target, **settings)
