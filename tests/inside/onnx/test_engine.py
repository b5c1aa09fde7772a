"""The wrapper around an engine that behaves like ONNX Runtime GenAI's, without it."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from card.errors import SettingsError
from card.inside.adapters.proposer import ChainProposer
from card.inside.onnx import engine as module
from card.onnx import SpeculativeEngine
from tests.decoding import toy_draft, toy_target
from tests.inside.adapters.drafters import VOCAB_SIZE, DirectLink, greedy_of, plain, toy_proposer
from tests.inside.onnx.fake import MODULE, FakeEngine, FakeRequest
from tests.pair import Pair
from tests.toy import TableModel
from tests.unreliable_link import Faults

TARGET = toy_target()
FOLLOW = greedy_of(TARGET)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8], [3, 1, 4, 1, 5], [7]]
NUM_NEW = 40


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "genai", lambda: MODULE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"model": {"vocab_size": VOCAB_SIZE, "context_length": 128}}
    (tmp_path / "genai_config.json").write_text(json.dumps(config))
    return tmp_path


def wrapped(
    monkeypatch: pytest.MonkeyPatch, folder: Path, engine: FakeEngine, draft: TableModel | None, faults: Faults | None
) -> SpeculativeEngine:
    """Return an engine whose drafter works in this thread."""
    monkeypatch.setattr(module, "make_proposer", lambda *_, **__: toy_proposer(draft, faults))
    return SpeculativeEngine(engine, folder)


def decode(engine: FakeEngine, drafts: SpeculativeEngine, num_at_once: int = 3) -> list[FakeRequest]:
    """Decode all prompts, some at once, and check each text against plain decoding."""
    waiting = list(enumerate(PROMPTS))
    done: list[FakeRequest] = []
    while waiting or engine.has_pending_requests():
        while waiting and sum(request.num_left > 0 for request in engine.requests) < num_at_once:
            idx, prompt_ids = waiting.pop(0)
            done.append(engine.create_request())
            drafts.begin_turn(done[-1], prompt_ids, (NUM_NEW, idx % 3))
        drafts.run(None)
    assert [request.token_ids for request in done] == [plain(FOLLOW, prompt, NUM_NEW) for prompt in PROMPTS]
    return done


@pytest.mark.parametrize(
    "faults", [Faults(max_passes=8), Faults(drop=0.3, max_delay=3, max_passes=8), Faults(kill=0.1, max_passes=8)]
)
def test_texts_are_those_of_plain_decoding_whatever_becomes_of_the_drafter(
    monkeypatch: pytest.MonkeyPatch, folder: Path, faults: Faults
):
    engine = FakeEngine(FOLLOW)
    with wrapped(monkeypatch, folder, engine, toy_draft(TARGET, 0.9), faults) as drafts:
        decode(engine, drafts)
        assert 0 < engine.num_drafted <= sum(drafts.figures.proposed_by_writer.values())  # some for turns then over
        assert drafts.figures.requests_begun == len(PROMPTS)


def test_a_good_drafter_makes_runs_few_and_its_figures_are_the_engines(monkeypatch: pytest.MonkeyPatch, folder: Path):
    engine = FakeEngine(FOLLOW)
    with wrapped(monkeypatch, folder, engine, toy_draft(TARGET, 1.0), None) as drafts:
        decode(engine, drafts)
        assert engine.num_runs < 0.6 * NUM_NEW * len(PROMPTS) / 3
        told = sum(drafts.figures.accepted_by_writer.values())
        assert 0.9 * engine.num_accepted <= told <= engine.num_accepted  # of a last run's tokens some are cut off


def test_a_turn_that_is_over_or_whose_request_is_gone_leaves_the_drafter(monkeypatch: pytest.MonkeyPatch, folder: Path):
    engine = FakeEngine(FOLLOW)
    drafts = wrapped(monkeypatch, folder, engine, toy_draft(TARGET, 1.0), None)
    decode(engine, drafts)
    lost = engine.create_request()
    drafts.begin_turn(lost, [1, 2, 3], (NUM_NEW, 0))
    drafts.run(None)
    assert num_drafted_for(drafts.proposer) == 1
    engine.requests.remove(lost)
    del lost
    drafts.run(None)
    assert num_drafted_for(drafts.proposer) == 0


def num_drafted_for(proposer: ChainProposer | None) -> int:
    """Return how many requests the drafter holds."""
    assert proposer is not None
    link = proposer.link
    assert isinstance(link, DirectLink)
    link.link.draft(1)
    return len(link.link.worker.drafting)


def test_a_second_turn_is_drafted_for_with_the_whole_text(monkeypatch: pytest.MonkeyPatch, folder: Path):
    engine = FakeEngine(FOLLOW)
    with wrapped(monkeypatch, folder, engine, toy_draft(TARGET, 1.0), None) as drafts:
        request = engine.create_request()
        for turn_id, prompt_ids in ((1, [3, 1, 4]), (2, [2, 7])):
            before = list(request.token_ids)
            assert drafts.begin_turn(request, prompt_ids, (NUM_NEW, 1)) == turn_id
            num_accepted = engine.num_accepted
            while engine.has_pending_requests():
                drafts.run(None)
            assert request.token_ids == plain(FOLLOW, [*before, *prompt_ids], NUM_NEW)
            assert engine.num_accepted > num_accepted + 20


def test_a_request_that_refuses_drafts_is_soon_left_alone(monkeypatch: pytest.MonkeyPatch, folder: Path):
    engine = FakeEngine(FOLLOW)
    with wrapped(monkeypatch, folder, engine, toy_draft(TARGET, 1.0), None) as drafts:
        request = engine.create_request()
        request.refuses = True
        drafts.begin_turn(request, [3, 1, 4], (NUM_NEW, 0))
        while engine.has_pending_requests():
            drafts.run(None)
        assert request.token_ids == plain(FOLLOW, [3, 1, 4], NUM_NEW)
        assert 8 <= request.num_asked < 20
        assert sum(drafts.figures.accepted_by_writer.values()) == 0
        assert num_drafted_for(drafts.proposer) == 0
        request.refuses = False
        drafts.begin_turn(request, [2, 7], (NUM_NEW, 0))
        while engine.has_pending_requests():
            drafts.run(None)
        assert engine.num_accepted > 20
        assert drafts._turns[request].token_ids == request.token_ids  # what the first one said included


def test_a_fault_of_ours_ends_candidates_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
):
    engine = FakeEngine(FOLLOW)
    drafts = wrapped(monkeypatch, folder, engine, toy_draft(TARGET, 1.0), None)

    def fail(*_: Any) -> list[list[int]]:
        raise ValueError("the prompt was: secret")

    monkeypatch.setattr(drafts.proposer, "propose_for", fail)
    with caplog.at_level(logging.ERROR):
        decode(engine, drafts)
    assert caplog.text.count("CARD failed with ValueError at ") == 1
    assert "secret" not in caplog.text
    assert engine.num_drafted == 0


def test_closing_ends_the_drafter_and_can_be_done_twice(monkeypatch: pytest.MonkeyPatch, folder: Path):
    engine = FakeEngine(FOLLOW)
    drafts = wrapped(monkeypatch, folder, engine, toy_draft(TARGET, 1.0), None)
    link = drafts.proposer.link if drafts.proposer else None
    drafts.close()
    drafts.close()
    assert isinstance(link, DirectLink)
    assert link.is_closed
    decode(engine, drafts)
    assert engine.num_drafted == 0


def test_an_engine_that_verifies_no_drafts_is_refused_with_what_to_do(folder: Path):
    with pytest.raises(SettingsError, match="verifies no draft tokens; build the model with use_paged_attention=true"):
        SpeculativeEngine(FakeEngine(FOLLOW, most=0), folder)


def test_bad_settings_and_a_draft_of_another_tokenizer_are_refused(folder: Path, pair: Pair):
    with pytest.raises(SettingsError, match="unknown setting 'drafft'"):
        SpeculativeEngine(FakeEngine(FOLLOW), folder, drafft="demo-draft")
    with pytest.raises(SettingsError, match="metrics_port is for vLLM"):
        SpeculativeEngine(FakeEngine(FOLLOW), folder, metrics_port=9400)
    with pytest.raises(SettingsError, match=r"holds no genai_config\.json; give the folder"):
        SpeculativeEngine(FakeEngine(FOLLOW), pair.target)
    config = {"model": {"vocab_size": 320, "context_length": 128}}
    shutil.copytree(pair.target, folder, dirs_exist_ok=True)
    (folder / "genai_config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match="share one tokenizer"):
        SpeculativeEngine(FakeEngine(FOLLOW), folder, draft=pair.foreign_draft)


@pytest.mark.parametrize("version", ["0.17.9", "0.19.0", "0.180.0", "1.0.0"])
def test_another_version_of_the_package_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", SimpleNamespace(__version__=version))
    with pytest.raises(SettingsError, match=rf"GenAI 0\.18, and this is {version}; install onnxruntime-genai==0\.18"):
        module.genai()


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", None)
    with pytest.raises(SettingsError, match=r"needs ONNX Runtime GenAI; install onnxruntime-genai==0\.18") as caught:
        module.genai()
    assert "\n" not in str(caught.value)
