"""Latencies kept between starts: found again under the same key, and never a reason to fail."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from card.api.llm import LLM
from card.assembly.latency import measuring
from card.assembly.latency import store as kept_latencies
from card.assembly.latency.store import LatencyKey, LatencyStore
from card.machine.expert_cost import ExpertCounts
from card.machine.folders import cache_folder
from card.machine.pass_cost import PassCost
from card.machine.threads import CoreSet
from tests.damage import damages
from tests.pair import Pair
from tests.shortage import no_more_files

COST = PassCost(((1, 0.001), (8, 0.002)), 0.0003, 0.00001)
WITH_EXPERTS = replace(COST, experts=ExpertCounts(num_experts=96, per_row=12, counted=((1, 12), (8, 60))))
CORES = CoreSet((0,), 1)


def key(what: str = "pass", model: str = "demo-target", **changes: object) -> LatencyKey | None:
    return LatencyKey.of(what, model, **{"dtype": "float32", "device": "cpu", "core_set": CORES, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("cost", [COST, WITH_EXPERTS])
def test_a_cost_is_found_by_the_next_start(tmp_path: Path, cost: PassCost):
    LatencyStore(tmp_path / "new" / "folder").keep_cost(key(), cost)
    assert LatencyStore(tmp_path / "new" / "folder").cost(key()) == cost


def test_what_was_measured_in_another_way_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept_latencies, "_METHOD", "passes of one token only")
    LatencyStore(tmp_path).keep_cost(key(), COST)
    assert LatencyStore(tmp_path).cost(key()) == COST
    monkeypatch.undo()
    assert LatencyStore(tmp_path).cost(key()) is None


@pytest.mark.parametrize(
    "other",
    [
        key("threads"),
        key(model="demo-draft"),
        key(dtype="bfloat16"),
        key(device="cuda"),
        key(core_set=CoreSet((0,), 2)),
        key(core_set=CoreSet((0, 1), 1)),
        key(more="90M"),
    ],
)
def test_another_key_finds_nothing(tmp_path: Path, other: LatencyKey):
    store = LatencyStore(tmp_path)
    store.keep_cost(key(), COST)
    assert store.cost(other) is None


@pytest.mark.parametrize("identity", ["", "other sources-avx2"])
def test_what_another_pass_took_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identity: str):
    store, on_a_gpu = LatencyStore(tmp_path), key(device="cuda")
    store.keep_cost(key(), COST)
    monkeypatch.setattr(kept_latencies, "kernels_identity", lambda: identity)
    assert store.cost(key()) is None, "torch's pass, or one of machine code that has changed, takes another time"
    assert key(device="cuda") == on_a_gpu


def test_a_folder_whose_weights_have_changed_is_another_model(pair: Pair, tmp_path: Path):
    for file in Path(pair.target).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = key(model=str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"other")
    after = key(model=str(tmp_path))
    assert before is not None and after is not None and after.digest != before.digest


def test_a_measurement_is_forgotten_alone(tmp_path: Path):
    store, other = LatencyStore(tmp_path), key("other")
    store.keep_cost(key(), COST)
    LatencyStore(tmp_path).keep_threads(other, 2)  # meanwhile, by another process
    store.forget(key())
    assert LatencyStore(tmp_path).cost(key()) is None
    assert LatencyStore(tmp_path).threads(other) == 2
    store.forget(None)


def test_an_old_measurement_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = LatencyStore(tmp_path)
    store.keep_cost(key(), COST)
    later = kept_latencies.time.time() + 400 * 86400
    monkeypatch.setattr(kept_latencies.time, "time", lambda: later)
    assert store.cost(key()) is None


def test_a_file_that_was_damaged_holds_nothing(tmp_path: Path):
    LatencyStore(tmp_path).keep_cost(key(), COST)
    file = tmp_path / "latencies.json"
    whole = file.read_bytes()
    for damage in [*damages(whole), whole.replace(b"0.001", b"9.001"), b"[" * 100_000]:
        file.write_bytes(damage)
        assert LatencyStore(tmp_path).cost(key()) in (None, COST), "half a number is a number too"


@pytest.mark.parametrize("is_file", [True, False])
def test_latencies_that_others_could_have_written_are_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_file: bool
):
    LatencyStore(tmp_path).keep_cost(key(), COST)
    file = tmp_path / "latencies.json"
    assert file.stat().st_mode & 0o077 == 0
    (file if is_file else tmp_path).chmod(0o777)
    for _ in range(2):
        assert LatencyStore(tmp_path).cost(key()) is None
    if not is_file:
        before = file.read_bytes()
        LatencyStore(tmp_path).keep_cost(key("other"), COST)
        assert file.read_bytes() == before
        (line,) = caplog.messages
        assert line.startswith(f"{tmp_path} is not used for measured latencies: others can write to {tmp_path} (mode")


def test_latencies_of_another_quota_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = LatencyStore(tmp_path)
    store.keep_cost(key(), COST)
    for quota in (1.5, None):
        kept_latencies._machine.cache_clear()
        monkeypatch.setattr(kept_latencies, "cpu_quota", lambda quota=quota: quota)
        assert (store.cost(key()) is None) == (quota is not None)


def test_without_files_to_open_nothing_is_found_kept_or_lost(pair: Pair, tmp_path: Path):
    store, known, other = LatencyStore(tmp_path), key(), key("other")
    store.keep_cost(known, COST)
    with no_more_files():
        assert key(model=pair.target) is None, "what its weights are is not known"
        assert LatencyStore(tmp_path).cost(known) is None
        store.keep_cost(other, COST)
        assert store.cost(known) == store.cost(other) == COST
        store.forget_times()
    assert LatencyStore(tmp_path).cost(known) == COST


def test_checks_and_agreements_outlive_times(tmp_path: Path):
    store = LatencyStore(tmp_path)
    store.keep_check(key("check"))
    store.keep_agreement(key("agreement"), 0.5)
    store.keep_cost(key("pass"), COST)
    store.keep_threads(key("threads"), 2)
    store.forget_times()
    for one in (store, LatencyStore(tmp_path)):
        assert one.was_checked(key("check")) and one.agreement(key("agreement")) == 0.5
        assert one.cost(key("pass")) is None and one.threads(key("threads")) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"a": 1}', b"\xff\xfe", b'{"a": {"about": {}, "pass_s": [[1]]}}', b'{"digest": "\xf0\x28"}'],
)
def test_a_broken_file_is_replaced(tmp_path: Path, content: bytes):
    (tmp_path / "latencies.json").write_bytes(content)
    store = LatencyStore(tmp_path)
    assert store.cost(key()) is None
    store.keep_cost(key(), COST)
    assert LatencyStore(tmp_path).cost(key()) == COST


def test_a_folder_that_cannot_be_written_changes_nothing_else(tmp_path: Path):
    (tmp_path / "file").write_text("")
    store = LatencyStore(tmp_path / "file" / "below")
    store.keep_cost(key(), COST)
    assert store.cost(key()) == COST, "it is known to this start"


def test_the_file_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept_latencies, "_MOST_ENTRIES", 3)
    store = LatencyStore(tmp_path)
    for number in range(5):
        store.keep_threads(key(more=str(number)), number)
    kept = [LatencyStore(tmp_path).threads(key(more=str(number))) for number in range(5)]
    assert kept == [None, None, 2, 3, 4]


def test_several_starts_at_once_leave_a_whole_file(tmp_path: Path):
    def write(number: int) -> None:
        for _ in range(20):
            LatencyStore(tmp_path).keep_threads(key(more=str(number)), number)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert any(LatencyStore(tmp_path).threads(key(more=str(number))) == number for number in range(4))
    assert [file.name for file in tmp_path.iterdir()] == ["latencies.json"]


def test_the_cache_lies_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / "card"
    assert cache_folder("/elsewhere") == Path("/elsewhere")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder(None) == Path.home() / ".cache" / "card"


def test_a_second_start_measures_nothing(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = {"method": "card", "writers": ("suffix",), "cache_dir": str(tmp_path)}
    with LLM(pair.target, **settings) as llm:
        measured = llm.host.policy.costs["off"].target  # type: ignore[attr-defined]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it measured again")

    monkeypatch.setattr(measuring, "_CHANGED_FACTOR", 1e9)  # whatever else this machine does
    monkeypatch.setattr(measuring, "measure_pass_cost", refuse)
    monkeypatch.setattr(measuring, "useful_threads", refuse)
    with LLM(pair.target, **settings) as llm:
        assert llm.host.policy.costs["off"].target == measured  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="it measured again"):
        LLM(pair.target, cache=False, **settings)


@pytest.mark.parametrize("factor", [0.01, 1e5])  # no busy machine makes a pass of 60 us take a second
def test_what_a_pass_now_contradicts_is_measured_again(pair: Pair, tmp_path: Path, factor: float):
    settings = {"method": "card", "writers": ("suffix",), "cache_dir": str(tmp_path)}
    with LLM(pair.target, **settings) as llm:
        core_set, measured = llm.host.plan.cores.alone, llm.host.policy.costs["off"].target  # type: ignore[attr-defined]
        latencies = llm.host.latencies
        key = latencies._measuring._key("pass", core_set)
        latencies._store.keep_cost(key, measured.scaled(factor))
    with LLM(pair.target, **settings) as llm:
        again = llm.host.policy.costs["off"].target.seconds(1)  # type: ignore[attr-defined]
    assert again != measured.scaled(factor).seconds(1), "what was kept was not believed"
