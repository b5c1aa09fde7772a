"""Methods with a drafter of their own in virtual time: what they did when they were recorded, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from card import LLM
from card.cli.main import cli
from card.config import SamplingParams
from card.config.registry import methods
from card.engine.metrics import RequestStats
from card.errors import PlanError, SettingsError
from card.family.ctc.train_ctc import CtcTrainSettings, train_head
from card.family.learning.checkpoint import Checkpoint
from card.family.learning.target_texts import write_texts
from card.family.pard.folders import load_adaptable
from card.models.loading import load_decoder
from card.models.runners import plain_runner
from card.tools.planner import recorder
from card.tools.planner.overheads import measure_overheads
from card.tools.planner.own_drafts import drafted_tokens, has_own_drafter
from card.tools.planner.profile import Overheads, PassTable, Profile, Setup
from card.tools.planner.recorder import RecordRequest, record
from card.tools.planner.recording import Recording, load_recording, save_recording
from card.tools.planner.scenario import Scenario, plan_method
from card.tools.planner.simulate import Simulator
from card.tools.planner.synthetic import make_synthetic
from card.tree.sampling import Sampler
from tests.pair import Pair
from tests.tools.planner.making import NO_OVERHEADS, flat

K, SELECTION = 4, "sparse:0.1:12"
OWN = ("sparsespec", "specpv", "pard", "ctc")
PROMPTS = tuple(tuple((7 * j * j + i) % 250 + 2 for j in range(20 + i)) for i in range(3))
PARAMS = SamplingParams(temperature=0.0, seed=0, max_tokens=40).resolved()
Setting = dict[str, Any]


@pytest.fixture(scope="module")
def made(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the folder of an adapted draft model and the file of a head, neither of which has learnt much."""
    folder = tmp_path_factory.mktemp("made")
    load_adaptable(pair.draft).save(folder / "adapted", 8, (1.0,) * 8, {})
    target = plain_runner(load_decoder(pair.target, dtype="float32"), max_model_len=128)
    texts = write_texts(target, PROMPTS, temperature=0.0, seed=0, max_tokens=24, end_ids=frozenset({0, 1}))
    sizes: Setting = {"num_slots": 4, "num_labels": 3, "window": 3, "width": 32, "batch_size": 64, "epochs": 8}
    done = train_head(
        target,
        texts,
        CtcTrainSettings(**sizes, learning_rate=1e-2),
        checkpoint=Checkpoint(folder / "training.pt", {"target": "tiny"}),
    )
    done.head.save(folder / "head", {})
    return {"draft": str(folder / "adapted"), "ctc": str(folder / "head")}


@pytest.fixture(scope="module")
def recording(pair: Pair, made: dict[str, str]) -> Recording:
    models = {"target": pair.target, "draft": made["draft"], "ctc": made["ctc"]}
    return record(
        RecordRequest(**models, prompts=PROMPTS, params=PARAMS, dtype="float32", methods=OWN, kv_selection=SELECTION)
    )


def settings_of(method: str) -> Setting:
    fixed: Setting = {"policy": "fixed"}
    if methods()[method].selection is not None:
        fixed["kv_selection"] = SELECTION
    return fixed | ({"placement": "inline"} if methods()[method].needs_draft else {})


def really(pair: Pair, made: dict[str, str], method: str, **settings: Any) -> list[RequestStats]:
    """Return the counters of a method that decodes the recorded prompts with the models."""
    models = [pair.target, made["draft"]] if methods()[method].needs_draft else [pair.target]
    own = {"ctc": made["ctc"]} if methods()[method].needs_head else {}
    with LLM(*models, method=method, dtype="float32", max_num_seqs=1, **settings_of(method), **own, **settings) as llm:
        return [one.stats for one in llm.generate([list(prompt) for prompt in PROMPTS], PARAMS)]


def counts(stats: Sequence[RequestStats]) -> list[tuple[int, ...]]:
    return [(one.num_new_tokens, one.target_passes, one.accepted_tokens) for one in stats]


def scenario_of(
    recording: Recording, row_s: float = 0.0, *, commit_s: float = 0.0, commit_row_s: float = 0.0, **overheads: Any
) -> Scenario:
    """Return a scenario in which a pass takes 10 ms, 0.1 ms a further token and so much a row of context.

    Args:
        commit_s: of a correction in the drafter, commit_row_s of each row of its tree.
        overheads: of the target.
    """
    table = PassTable(points=((1, 1e-2), (65, 1e-2 + 64e-4)), per_context_row_s=row_s)
    around = msgspec.structs.replace(NO_OVERHEADS, **overheads)
    setups = (Setup(threads=None, cost=table),)
    target = Profile(name="toy", measured=False, source="a test", setups=setups, overheads=around, kv_row_bytes=100)
    draft = flat(1e-3, overheads=msgspec.structs.replace(NO_OVERHEADS, commit_s=commit_s, commit_row_s=commit_row_s))
    return Scenario(target=target, draft=draft, recording=recording)


@pytest.mark.parametrize("method", OWN)
def test_a_plan_counts_the_passes_and_tokens_of_the_real_engine(
    pair: Pair, made: dict[str, str], recording: Recording, method: str
) -> None:
    run = Simulator(scenario_of(recording)).run(method, settings_of(method))
    stats = really(pair, made, method)
    assert counts(run.stats) == counts(stats)
    for name in ("verified_tokens", "self_draft_passes"):  # what specpv looks up behind a wrong token is not recorded
        planned, real = (sum(getattr(one, name) for one in some) for some in (run.stats, stats))
        assert planned == (pytest.approx(real, rel=0.15) if method == "specpv" else real)
    if method != "pard":  # whose drafter has learnt nothing
        assert sum(one.accepted_tokens for one in stats) > 0


@pytest.mark.parametrize("method", ["sparsespec", "specpv"])
def test_passes_that_read_few_rows_take_the_time_of_these_rows(recording: Recording, method: str) -> None:
    free, dear = (Simulator(scenario_of(recording, row_s)).run(method, settings_of(method)) for row_s in (0.0, 1e-3))
    read_bytes = sum(one.draft_kv_bytes + one.verify_kv_bytes for one in free.stats)
    num_passes = sum(one.self_draft_passes + one.target_passes for one in free.stats)
    new_rows = sum(one.self_draft_passes + one.verified_tokens + one.target_passes for one in free.stats)
    assert num_passes * 1e-2 <= free.decode_s
    if method == "sparsespec":  # its drafting passes have one token each
        assert dear.decode_s - free.decode_s == pytest.approx(1e-3 * (read_bytes / 100 - new_rows))
    slower = Simulator(scenario_of(recording, chosen_row_s=1e-4, scored_row_s=1e-4)).run(method, settings_of(method))
    assert slower.decode_s > free.decode_s


def test_a_head_takes_its_time_wherever_it_is_asked(recording: Recording) -> None:
    free, timed = (
        Simulator(scenario_of(recording, by_writer={"ctc": seconds})).run("ctc", settings_of("ctc"))
        for seconds in (0.0, 1e-2)
    )
    most = 1e-2 * free.total.target_passes  # nobody is asked where a text may grow by one token only
    assert most - len(PROMPTS) * 1e-2 <= timed.decode_s - free.decode_s <= most + 1e-9


def test_a_shorter_draft_is_planned_from_the_same_recording(recording: Recording) -> None:
    simulator = Simulator(scenario_of(recording))
    half = simulator.run("sparsespec", {**settings_of("sparsespec"), "num_speculative_tokens": 2})
    whole = simulator.run("sparsespec", settings_of("sparsespec"))
    assert half.total.target_passes >= whole.total.target_passes
    assert half.total.mean_acceptance_length <= 3


def test_a_recording_keeps_what_own_drafters_did(recording: Recording, tmp_path: Path) -> None:
    save_recording(recording, tmp_path / "pair.rec")
    assert load_recording(tmp_path / "pair.rec") == recording
    text = msgspec.structs.replace(recording.texts[0], drafted={"sparsespec": b"\1"})
    with pytest.raises(PlanError, match="another number of tokens"):
        save_recording(msgspec.structs.replace(recording, texts=(text,)), tmp_path / "wrong.rec")
    assert recording.texts[0].head is not None
    cut = msgspec.structs.replace(recording.texts[0].head, parents=b"\1\2\3\4")
    text = msgspec.structs.replace(recording.texts[0], head=cut)
    with pytest.raises(PlanError, match="make no tree"):
        save_recording(msgspec.structs.replace(recording, texts=(text,)), tmp_path / "wrong.rec")


@pytest.mark.parametrize(
    ("origins", "drafted"),
    [
        ((), []),
        (("plain", ""), [0, 0]),
        (("plain", "self", "self", "", "self", ""), [0, 1, 1, 1, 1, 0]),  # the draft of two was accepted whole
        (("plain", "self", "self"), [0, 1, 1]),
        (("self", "", "self", ""), [1, 0, 1, 0]),
    ],
)
def test_a_token_behind_a_whole_draft_counts_as_drafted(origins: tuple[str, ...], drafted: list[int]) -> None:
    assert list(drafted_tokens(origins, 2)) == drafted


def test_a_made_up_recording_has_own_drafters_that_are_right_as_often() -> None:
    made_up = make_synthetic(0.8, num_texts=4, num_tokens=400)
    run = Simulator(scenario_of(made_up)).run("pard", {"num_speculative_tokens": 1})
    accepted, verified = (
        sum(getattr(one, name) for one in run.stats) for name in ("accepted_tokens", "verified_tokens")
    )
    assert accepted / verified == pytest.approx(0.8, abs=0.03)
    with pytest.raises(PlanError, match="does not say what ctc drafts"):
        plan_method(scenario_of(made_up), "ctc", {})


@pytest.mark.parametrize(
    ("methods", "complaint", "error"),
    [
        (("sps",), "every recording covers sps", PlanError),
        (("magic",), "unknown method", SettingsError),
    ],
)
def test_a_method_that_needs_no_record_of_its_own_is_refused(
    pair: Pair, methods: tuple[str, ...], complaint: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=complaint):
        record(RecordRequest(target=pair.target, draft=pair.draft, prompts=PROMPTS, params=PARAMS, methods=methods))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_the_same_however_many_the_target_writes_at_once(
    pair: Pair, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=12).resolved()
    asked = RecordRequest(target=pair.target, draft=pair.draft, prompts=PROMPTS, params=params, dtype="float32")
    found = []
    for at_once in (1, 2):
        monkeypatch.setattr(recorder, "AT_ONCE", at_once)
        said: list[str] = []
        found.append([(text.prompt_ids, text.token_ids) for text in record(asked, said.append).texts])
        assert [one for one in said if "has answered" in one] == [
            f"the target has answered {first} of {len(PROMPTS)} prompts" for first in range(0, len(PROMPTS), at_once)
        ]
    assert found[0] == found[1] and [prompt for prompt, _ in found[0]] == list(PROMPTS)


def test_the_command_says_what_to_give_for_a_head(pair: Pair, tmp_path: Path) -> None:
    arguments = ["record", "--target", pair.target, "--draft", pair.draft, "--methods", "ctc"]
    result = CliRunner().invoke(cli, [*arguments, "--out", str(tmp_path / "a.rec")])
    assert result.exit_code != 0
    assert "--ctc FILE" in str(result.exception)


def test_what_choosing_rows_and_a_head_take_is_measured(pair: Pair, made: dict[str, str]) -> None:
    runner = plain_runner(load_decoder(pair.target, dtype="float32"), max_model_len=256)
    found: Overheads = measure_overheads(runner)
    assert 0.0 <= found.chosen_row_s < 1e-3
    assert 0.0 < found.scored_row_s < 1e-3


def test_the_price_of_a_head_holds_what_verifying_its_candidates_takes(
    pair: Pair, made: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, choose = [0.0], Sampler.choose

    def slow(sampler: Sampler, logits: Any, positions: Sequence[int]) -> list[int]:
        now[0] += len(positions)
        return choose(sampler, logits, positions)

    monkeypatch.setattr("card.tools.planner.overheads.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Sampler, "choose", slow)
    runner = plain_runner(load_decoder(pair.target, dtype="float32"), max_model_len=256)
    found = measure_overheads(runner, ctc=made["ctc"])
    assert (found.round_s, found.by_writer["ctc"]) == (1.0, 16.0), "a row for each candidate that a round verifies"
    assert not runner.features.layers, "nobody reads hidden states any more"


def test_a_correction_takes_the_longer_the_more_rows_its_tree_has(recording: Recording) -> None:
    def row_s_of(method: str) -> float:
        free, dear = (
            Simulator(scenario_of(recording, commit_row_s=seconds)).run(method, settings_of(method))
            for seconds in (0.0, 1e-3)
        )
        return (dear.decode_s - free.decode_s) / free.total.target_passes

    assert row_s_of("pard") == pytest.approx(0.0, abs=1e-9), "no node of a chain of guesses has a row"
    assert row_s_of("sps") > 2e-3


def test_masks_that_are_dropped_are_no_correction(recording: Recording) -> None:
    free, dear = (
        Simulator(scenario_of(recording, commit_s=commit_s)).run("pard", settings_of("pard"))
        for commit_s in (0.0, 1e-3)
    )
    assert dear.decode_s - free.decode_s == pytest.approx(1e-3 * free.total.target_passes, abs=4e-3)


def test_all_methods_with_a_drafter_of_their_own_are_tested_here() -> None:
    assert {name for name, method in methods().items() if has_own_drafter(method)} == {*OWN}
