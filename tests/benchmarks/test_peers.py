"""The comparison with other engines: its lines, tables and workers, with engines that are made up."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.benchmarks.scripts import BENCHMARKS

PEERS = BENCHMARKS / "peers"
MODULES = (
    "bench_model",
    "catalog",
    "environments",
    "peer_models",
    "peer_plot",
    "peer_results",
    "peer_table",
    "worker_card",
    "worker_process",
    "worker_protocol",
)
END = 3
FAKE_WORKER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from worker_protocol import Decoded, serve, up_to_end

class Fake:
    def load(self, job):
        print("printed by a library")
        os.system("echo printed by native code")
        return {"version": "1.0"}
    def prepare(self, method, option, prompts):
        return option
    def generate(self, method, option, prompt_ids, max_tokens):
        if method == "broken":
            raise RuntimeError("out of\\nmemory")
        if method == "dead":
            os._exit(1)
        if method == "late":
            time.sleep(60)
        ids = up_to_end([prompt_ids[0] + 1, 3, 9], [3])
        return Decoded(token_ids=ids, prefill_s=0.5, decode_s=0.25, decode_tokens=len(ids) - 1)
    def release(self, method, option):
        pass
    def close(self):
        pass

serve(Fake())
"""


@pytest.fixture(scope="module")
def peers(bench: dict[str, ModuleType]) -> SimpleNamespace:
    """The scripts that the tests here ask."""
    return SimpleNamespace(**{name: bench[name] for name in MODULES})


def answer(token_ids: list[int], decode_s: float) -> dict[str, Any]:
    return {
        "token_ids": token_ids,
        "prefill_s": 0.1,
        "decode_s": decode_s,
        "decode_tokens": len(token_ids) - 1,
        "accepted": 0,
        "peak_bytes": 1_500_000_000,
    }


def make_lines(peers: SimpleNamespace, repeats: int = 3) -> list[dict[str, Any]]:
    """Return lines of three engines: ours 8 bits at 40 tokens/s, theirs at 20 (8 bits) and 10 and 5 (16 bits)."""
    row = peers.catalog.RowKey
    rows = {
        row("card", "int8", "vanilla-all-cores"): answer([1, 2, 4, 5, 6], 0.1),
        row("openvino", "int8", "plain"): answer([1, 2, 4, 5, 6], 0.2),
        row("vllm", "bf16", "plain"): answer([1, 2, 4, 5, 6], 0.8),
        row("vllm", "bf16", "draft"): answer([1, 2, 4, 5, 7], 0.4),
    }
    facts = {one: {"version": "1.0", "settings": {"threads": 2}} for one in rows}
    facts[row("vllm", "bf16", "draft")]["settings"]["draft_tokens"] = 4
    common = {
        "benchmark": "peers",
        "run": "a",
        "model": "demo",
        "prompts": "questions",
        "prompt": 0,
        "machine": {"cpu": "a CPU", "cores_used": 2, "load_average": 0.0},
        "commit": "c" * 40,
        "max_tokens": 8,
    }
    return [
        line
        for repeat in range(repeats)
        for line in peers.peer_results.decode_lines(rows, facts, {**common, "repeat": repeat}, [END])
    ]


def test_texts_are_equal_with_or_without_an_end_token(peers: SimpleNamespace) -> None:
    parts_at = peers.peer_results.parts_at
    assert parts_at([1, 2, END], [1, 2], [END]) is None
    assert parts_at([1, 2, 4], [1, 2, 5], [END]) == 2
    assert parts_at([1, 2], [1, 2, 5], [END]) == 2


def test_a_line_tells_whether_its_text_is_that_of_plain_decoding(peers: SimpleNamespace) -> None:
    by_name = {f"{line['peer']} {line['method']}": line for line in make_lines(peers, repeats=1)}
    assert by_name["vllm plain"]["same_text"] and by_name["vllm plain"]["parts_at"] is None
    assert not by_name["vllm draft"]["same_text"] and by_name["vllm draft"]["parts_at"] == 4
    assert by_name["openvino plain"]["text"] == by_name["vllm plain"]["text"] != by_name["vllm draft"]["text"]


def test_a_row_without_its_reference_is_compared_with_nothing(peers: SimpleNamespace) -> None:
    row = peers.catalog.RowKey("vllm", "bf16", "draft")
    facts = {row: {"version": "1.0", "settings": {}}}
    (line,) = peers.peer_results.decode_lines({row: answer([1, 2], 0.1)}, facts, {"repeat": 0}, [END])
    assert line["same_text"] is None
    (summary,) = peers.peer_results.summarise([line])
    assert summary.num_texts == 0 and summary.vs_fastest.value == 1.0


def test_ratios_are_over_the_fastest_row_that_is_not_ours(peers: SimpleNamespace) -> None:
    ours, openvino, draft, plain = peers.peer_results.summarise(make_lines(peers))
    assert (ours.row.peer, ours.vs_fastest.value, ours.vs_fastest_bits.value) == ("card", *[pytest.approx(2.0)] * 2)
    assert (openvino.vs_fastest.value, draft.vs_fastest_bits.value) == (pytest.approx(1.0), pytest.approx(1.0))
    assert (plain.vs_fastest.value, plain.vs_fastest_bits.value) == (pytest.approx(0.25), pytest.approx(0.5))
    assert (draft.num_same, draft.num_texts, draft.option) == (0, 3, "K=4")


def test_of_ours_tables_show_card_alone_over_the_best_fixed_row_of_the_same_weights(peers: SimpleNamespace) -> None:
    lines = make_lines(peers)
    ours = [line for line in lines if line["peer"] == "card"]
    for method, weights, factor in (("card", "int8", 0.8), ("sps-4", "int8", 0.5), ("sps-8", "Q4_0", 9.0)):
        lines += [
            {**one, "method": method, "quantisation": weights, "decode_s": one["decode_s"] / factor} for one in ours
        ]
    lines += [{**one, "method": "card-all-cores", "decode_s": one["decode_s"] / 2} for one in ours]
    shown = peers.peer_table.tables(lines)
    assert "0.80 (vanilla-all-cores) | 1.60 (openvino int8 plain)" in shown
    assert not any(row in shown for row in ("| vanilla-all-cores |", "| sps-4 |", "| card-all-cores |"))
    assert "| sps-4 |" in peers.peer_table.tables(lines, has_all=True)
    turned = peers.peer_table.overview([lines], by_engine=True).splitlines()
    assert turned[0] == "| tokens/s | demo, questions |" and turned[2] == "| card | 32 |"


def test_prompts_of_a_length_are_told_by_the_tokens_read_in_a_second_the_fastest_at_the_longest_first(
    peers: SimpleNamespace,
) -> None:
    short, longer = (
        [{**line, "prompts": f"{n} tokens", "prompt_tokens": n} for line in make_lines(peers)] for n in (90, 500)
    )
    for line in longer:
        line["prefill_s"] = {"card": 4.0, "openvino": 2.0, "vllm": 5.0}[line["peer"]] * (1 + (line["repeat"] == 2))
    lines = [*make_lines(peers), *short, *longer]
    for line in lines:
        line.setdefault("prompt_tokens", 7)
    head, _, *rows = peers.peer_table.first_tokens(lines).split("\n\n")[0].splitlines()
    assert head == "| engine | weights | method | 90 tokens | 500 tokens |"
    assert rows[:2] == ["| openvino | int8 | plain | 900 | 250 |", "| card | int8 | vanilla-all-cores | 900 | 125 |"]


def test_openvino_is_given_a_file_that_was_fetched_as_it_is(peers: SimpleNamespace, tmp_path: Path) -> None:
    qwen, demo = (peers.catalog.MODELS[name] for name in ("qwen", "demo"))
    assert peers.catalog.quantisations("openvino", demo) == ("int8",), "its file would be made by llama.cpp's programs"
    assert peers.catalog.quantisations("openvino", qwen) == ("int8", "Q4_K_M")
    for name in ("qwen-1.5b", "qwen-0.5b"):
        (tmp_path / f"{name}.gguf").touch()
    places = {role: tmp_path / f"qwen-{size}-bfloat16" for role, size in (("target", "1.5b"), ("draft", "0.5b"))}
    pair = peers.peer_models.Pair(spec=qwen, **places, end_ids=(END,), max_model_len=64)
    row = peers.catalog.RowKey("openvino", "Q4_K_M", "plain")
    assert peers.peer_models.files_for(pair, row, tmp_path).target == tmp_path / "qwen-1.5b.gguf"


def test_rows_of_ours_start_apart_but_for_those_that_differ_in_draft_length(peers: SimpleNamespace) -> None:
    row, name = peers.catalog.RowKey, peers.worker_process._worker_name
    names = {method: name(row("card", "int8", method), {}) for method in peers.catalog.OWN_ROWS}
    assert len({names[method] for method in names if method.startswith("sps-")}) == 1
    assert len(set(names.values())) == 7


def test_a_rate_is_the_median_over_repeats_of_all_tokens_over_all_seconds(peers: SimpleNamespace) -> None:
    lines = [line for line in make_lines(peers) if line["peer"] == "openvino"]
    for line, decode_s in zip(lines, (0.2, 0.4, 0.1), strict=True):
        line["decode_s"] = decode_s
    (summary,) = peers.peer_results.summarise(lines)
    assert (summary.least, summary.tokens_per_s, summary.most) == pytest.approx((10.0, 20.0, 40.0))


def test_batches_are_rated_by_wall_time_and_have_a_table_of_their_own(peers: SimpleNamespace) -> None:
    row = peers.catalog.RowKey
    rows = {
        row("vllm", "bf16", "plain"): {"token_ids": [[1, 2], [4]], "wall_s": 0.5, "peak_bytes": 1},
        row("vllm", "bf16", "draft"): {"token_ids": [[1, 2], [5]], "wall_s": 0.25, "peak_bytes": 1},
    }
    facts = {one: {"version": "1.0", "settings": {}} for one in rows}
    common = {"model": "demo", "prompts": "questions", "repeat": 0, "at_once": 4}
    lines = peers.peer_results.batch_lines(rows, facts, common, [END])
    assert list(peers.peer_results.groups(lines)) == ["demo, questions, 4 at once"]
    draft, plain = peers.peer_results.summarise(lines)
    assert (draft.tokens_per_s, draft.num_same, draft.num_texts) == (12.0, 1, 2)
    assert (plain.tokens_per_s, plain.num_same) == (6.0, 2)


def test_the_table_and_the_picture_show_the_last_run(peers: SimpleNamespace, tmp_path: Path) -> None:
    file, image = tmp_path / "peers.jsonl", tmp_path / "peers.png"
    older = [{**line, "run": "older", "model": "other"} for line in make_lines(peers)]
    text = "".join(f"{json.dumps(line)}\n" for line in [*older, *make_lines(peers)])
    file.write_text(text, encoding="utf-8")
    table = peers.peer_table.tables(peers.peer_results.read_lines(file))
    assert "demo, questions:" in table and "other" not in table
    assert "| vllm | bf16 | draft (K=4) | 10.0 | 10.0–10.0 | 100 | 1.50 | – | 0.50 | 1.00 | 0 of 3 |" in table
    packed = tmp_path / "peers.jsonl.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert peers.peer_table.tables(peers.peer_results.read_lines(packed)) == table
    fastest = peers.peer_table.tables(peers.peer_results.read_lines(file), fastest=True)
    assert "| vllm | bf16 | draft" in fastest and "| vllm | bf16 | plain" not in fastest
    overview = peers.peer_table.overview([peers.peer_results.read_lines(file)] * 2).splitlines()
    assert overview[2] == overview[3] and len(overview) == 4
    assert overview[2].startswith("| demo, questions | ")
    assert peers.peer_plot.main([str(file), "--out", str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")


def test_patterns_choose_rows_and_bring_plain_decoding_along(peers: SimpleNamespace) -> None:
    catalog = peers.catalog
    chosen = catalog.chosen_rows(catalog.MODELS["qwen"], ["llama.cpp:Q4_K_M:draft", "card::card"])
    assert [str(row) for row in chosen] == [
        "llama.cpp:Q4_K_M:plain",
        "llama.cpp:Q4_K_M:draft",
        "card:bf16:vanilla-all-cores",
        "card:bf16:card",
        "card:int8:vanilla-all-cores",
        "card:int8:card",
        "card:Q4_K_M:vanilla-all-cores",
        "card:Q4_K_M:card",
    ]
    with pytest.raises(Exception, match="unknown peer"):
        catalog.chosen_rows(catalog.MODELS["qwen"], ["sglang"])


def test_the_real_pair_alone_has_a_row_without_copies_that_tables_show_and_do_not_call_fixed(
    peers: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = peers.catalog
    rows = {
        name: [one for one in catalog.all_rows(spec) if one.peer == "card"] for name, spec in catalog.MODELS.items()
    }
    beam = {name: [one for one in of if one.method == "card-beam"] for name, of in rows.items()}
    assert {name: len(of) for name, of in beam.items()} == {"demo": 0, "demo-90M": 0, "demo-300M": 0, "qwen": 3}
    assert not any(one.is_own_fixed for one in beam["qwen"])
    lines = make_lines(peers)
    lines += [{**line, "method": name} for line in lines if line["peer"] == "card" for name in ("card", "card-beam")]
    shown = peers.peer_table.tables(lines)
    assert "| card-beam |" in shown and "| vanilla-all-cores |" not in shown
    made: list[dict[str, Any]] = []

    def make(*_: object, **settings: Any) -> None:
        made.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(peers.worker_card, "LLM", make)
    worker = peers.worker_card.Card()
    worker.load({"target": "t", "draft": "d", "dtype": "int8", "cores": [0]})
    for method in ("card", "card-beam"):
        with pytest.raises(KeyboardInterrupt):
            worker.prepare(method, {}, [])
    assert [one.get("writers") for one in made] == [None, ("beam",)]


def fake_worker(peers: SimpleNamespace, folder: Path, timeout_s: float = 60.0) -> Any:
    script = folder / "fake_worker.py"
    script.write_text(FAKE_WORKER, encoding="utf-8")
    command = [sys.executable, script, PEERS]
    return peers.worker_process.WorkerProcess(command, {}, folder / "log", timeout_s)


def test_a_worker_answers_and_what_libraries_print_goes_to_the_log(peers: SimpleNamespace, tmp_path: Path) -> None:
    worker = fake_worker(peers, tmp_path)
    try:
        assert worker.ask("load", target="x") == {"version": "1.0"}
        with pytest.raises(peers.worker_process.PeerError, match="RuntimeError: out of memory"):
            worker.ask("generate", method="broken", option={}, prompt_ids=[7], max_tokens=4)
        done = worker.ask("generate", method="plain", option={}, prompt_ids=[7], max_tokens=4)
        assert done.pop("peak_bytes") > 1 << 20
        assert done == {"token_ids": [8, END], "prefill_s": 0.5, "decode_s": 0.25, "decode_tokens": 1, "accepted": None}
    finally:
        worker.close()
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert "printed by a library" in log and "printed by native code" in log
    assert not worker.is_alive


@pytest.mark.parametrize(("method", "message"), [("dead", "the worker has ended"), ("late", "no answer within 1 s")])
def test_a_worker_that_does_not_answer_is_ended(
    peers: SimpleNamespace, tmp_path: Path, method: str, message: str
) -> None:
    worker = fake_worker(peers, tmp_path, timeout_s=1.0 if method == "late" else 60.0)
    with pytest.raises(peers.worker_process.PeerError, match=message):
        worker.ask("generate", method=method, option={}, prompt_ids=[7], max_tokens=4)
    assert not worker.is_alive
    with pytest.raises(peers.worker_process.PeerError, match="has ended"):
        worker.ask("generate", method="plain", option={}, prompt_ids=[7], max_tokens=4)


class Recorder:
    """A worker that notes what it is asked."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked = name, asked

    def ask(self, do: str, **question: Any) -> dict[str, Any]:
        self.asked.append(f"{self.name} {do}")
        return {"chosen": 6} if do == "prepare" else answer([1, 2], 0.1)

    def close(self) -> None:
        self.asked.append(f"{self.name} close")


def test_the_worker_unused_for_longest_ends_for_want_of_memory_and_comes_back_as_it_was(peers: SimpleNamespace) -> None:
    asked: list[str] = []
    known: list[dict[str, Any]] = []

    def start(row: Any, settings: dict[str, Any]) -> Recorder:
        known.append(dict(settings))
        return Recorder(row.peer, asked)

    row = peers.catalog.RowKey
    first, second = row("card", "int8", "card"), row("openvino", "int8", "plain")
    workers = peers.worker_process.Workers(start, lambda _: 1 << 30, lambda: 0, [[5]])
    for one in (first, second, first):
        workers.ask("generate", one, {}, prompt_ids=[5], max_tokens=4)
    workers.close()
    assert asked == [
        *("card prepare", "card generate", "card generate", "card close"),
        *("openvino prepare", "openvino generate", "openvino generate", "openvino close"),
        *("card prepare", "card generate", "card generate", "card close"),
    ]
    assert known == [{}, {}, {"card": {"chosen": 6}}]


def test_a_peer_that_cannot_be_built_is_one_line_and_the_others_run(
    peers: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ensure(folder: Path, name: str) -> None:
        if name == "openvino":
            raise peers.environments.BuildError("pip failed")

    monkeypatch.setattr(peers.environments, "ensure", ensure)
    files = peers.peer_models.Files(target=tmp_path, draft=tmp_path)
    monkeypatch.setattr(peers.peer_models, "files_for", lambda *_: files)
    monkeypatch.setattr(peers.bench_model, "WorkerProcess", lambda *_: fake_worker(peers, tmp_path))
    monkeypatch.setattr(peers.bench_model, "_SETTLE_S", 0.0)
    spec = peers.catalog.MODELS["demo"]
    pair = peers.peer_models.Pair(spec=spec, target=tmp_path, draft=tmp_path, end_ids=(END,), max_model_len=64)
    settings = peers.bench_model.RunSettings(max_tokens=4, repeats=2, cores=(0,), folder=tmp_path, timeout_s=60.0)
    rows = peers.catalog.chosen_rows(spec, ["openvino", "llama.cpp:bf16"])
    said: list[str] = []
    bench = peers.bench_model.ModelBench(pair, rows, {"questions": [[7]]}, settings, said.append)
    try:
        lines = [line for some in bench.decode({}, random.Random(0)) for line in some]
    finally:
        bench.close()
    assert [text for text in said if "left out" in text] == ["demo: openvino:int8 left out: pip failed"]
    assert {(line["peer"], line["method"]) for line in lines} == {
        ("llama.cpp", "plain"),
        ("llama.cpp", "draft"),
        ("llama.cpp", "ngram"),
    }
    assert len(lines) == 6 and all(line["same_text"] for line in lines)
    assert {line["version"] for line in lines} == {"1.0"}


def rows_of_the_readme(heading: str) -> list[list[str]]:
    """Return the cells of the README's table below this row of headings."""
    lines = (BENCHMARKS.parent / "README.md").read_text("utf-8").splitlines()
    body = itertools.takewhile(lambda line: line.startswith("|"), lines[lines.index(heading) + 2 :])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


def fastest(peers: SimpleNamespace, title: str, weights: str, *files: str) -> list[Any]:
    """Return the README's rows of one group of lines: `card`, our plain decoding, llama.cpp's best, ik_llama.cpp's."""
    lines = [line for file in files for line in peers.peer_results.read_lines(BENCHMARKS / "results" / file)]
    found = [one for one in peers.peer_results.summarise(peers.peer_results.groups(lines)[title])]
    ours = {one.row.method: one for one in found if (one.row.peer, one.row.quantisation) == ("card", weights)}
    return [
        ours["card"],
        ours["vanilla-all-cores"],
        max((one for one in found if one.row.peer == "llama.cpp"), key=lambda one: one.tokens_per_s),
        *(one for one in found if (one.row.peer, one.row.method) == ("ik_llama.cpp", "draft")),
    ]


OF_THE_README = ("CARD as it starts", "plain decoding of ours", "fastest row of llama.cpp")
OF_A_REAL_PAIR = (*OF_THE_README, "ik_llama.cpp with the draft")


def test_the_readme_s_table_of_a_real_pair_is_that_of_its_lines(peers: SimpleNamespace) -> None:
    file = "peers_qwen_intel_vnni.jsonl"
    questions, code = (fastest(peers, f"qwen, {of}", "Q4_K_M", file) for of in ("questions", "code"))
    assert rows_of_the_readme("| Intel Xeon (AVX-512 VNNI), two cores | questions | code | first token |") == [
        [name, f"{asked.tokens_per_s:.0f}", f"{coded.tokens_per_s:.0f}", f"{1000 * asked.first_token_s:.0f} ms"]
        for name, asked, coded in zip(OF_A_REAL_PAIR, questions, code, strict=True)
    ]


def test_the_readme_s_table_of_the_inflated_target_is_that_of_its_lines(peers: SimpleNamespace) -> None:
    files = ("peers_90M_zen4_default.jsonl.gz", "peers_90M_at_once_zen4_default.jsonl.gz")
    of = ("questions", "code", "copy-edit"), ("questions, 4 at once", "questions, 16 at once")
    columns = [
        fastest(peers, f"demo-90M, {one}", "Q4_0", file) for file, some in zip(files, of, strict=True) for one in some
    ]
    assert rows_of_the_readme("| inflated, 4 bits | questions | code | copying | 4 at once | 16 at once |") == [
        [name, *(f"{column[place].tokens_per_s:.0f}" for column in columns)] for place, name in enumerate(OF_THE_README)
    ]
