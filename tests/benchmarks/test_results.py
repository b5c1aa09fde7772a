"""Figures have lines: the files that pages name exist, and each line says its command, commit and machine."""

from __future__ import annotations

import ast
import bisect
import gzip
import itertools
import json
import re
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from card.tools.bench.results import Run, load
from card.tools.bench.summary import ratio

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README_PAGES = sorted((ROOT / "src" / "card").rglob("README.md"))
PAGES = [
    *sorted(page for place in (".", "docs", "benchmarks", "benchmarks/paper") for page in (ROOT / place).glob("*.md")),
    *README_PAGES,
]
EDGE = "src/card/tools/planner/edge/README.md"
CTC = "src/card/family/ctc/README.md"
EAGLE = "src/card/family/eagle/README.md"
STATES = "src/card/family/states/README.md"
SCRIPTS = sorted((ROOT / "benchmarks").rglob("*.py"))
COMMIT = re.compile(r"[0-9a-f]{7,40}")
TOLD_COMMIT = re.compile(r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,40}\b")  # in a page
NAMED = re.compile(r"results/([\w.*-]+\.jsonl(?:\.gz)?)")
TO_BE_MADE = re.compile(r"--out(?:=|\s+(?:\\\n\s*)?)\S+")


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a results file."""
    text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text("utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def fault_of(line: Mapping[str, Any]) -> str:
    """Return what a line's own facts lack; nothing if they are all there."""
    if not str(line.get("command", "")).startswith(("card ", "python ")):
        return "no command"
    if not COMMIT.fullmatch(str(line.get("commit", ""))):
        return f"commit {line.get('commit')!r}"
    return "" if isinstance(line.get("machine"), dict) and line["machine"].get("cpu") else "no machine"


def faults_of(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the fault of each faulty line; what `card bench` found has the facts of the run that it names."""
    runs = {line.get("run_id"): line for line in lines if line.get("kind") == "run"}
    for line in lines:
        told = line if "command" in line else runs.get(line.get("run_id"), line)
        if fault := fault_of(told):
            yield fault


def history(folder: Path) -> list[str]:
    """Return the commits that led to this checkout; none if it has no git of its own, or not the whole history."""

    def git(*question: str) -> list[str]:
        done = subprocess.run(["git", *question], cwd=folder, capture_output=True, text=True, check=False)
        return done.stdout.split() if done.returncode == 0 else []

    try:
        is_whole = git("rev-parse", "--is-shallow-repository") == ["false"] and git("rev-parse", "--show-prefix") == []
        return git("rev-list", "HEAD") if is_whole else []
    except FileNotFoundError:
        return []


def strangers(named: Iterable[str], known: Sequence[str]) -> list[str]:
    """Return the names of commits that are not among those that are known, in full or shortened."""
    known = sorted(known)
    places = ((name, bisect.bisect_left(known, name)) for name in named)
    return sorted({name for name, idx in places if not "".join(known[idx : idx + 1]).startswith(name)})


def missing(text: str) -> list[str]:
    """Return the results files that a text names and that are not there, packed or as they are."""
    return sorted({name for name in NAMED.findall(text) if not any(RESULTS.glob(f"{name}*"))})


def figures_of(page: Path) -> str:
    """Return a page without what its commands are to make, or the text at the head of a script, with that."""
    text = page.read_text("utf-8")
    return ast.get_docstring(ast.parse(text)) or "" if page.suffix == ".py" else TO_BE_MADE.sub("", text)


def results() -> list[Path]:
    """Return the files of results."""
    return sorted(RESULTS.glob("*.jsonl*"))


@pytest.mark.parametrize("file", results(), ids=lambda file: file.name)
def test_every_line_says_the_command_the_clean_commit_and_the_machine_that_made_it(file: Path) -> None:
    lines = lines_of(file)
    assert lines
    assert list(faults_of(lines)) == []


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_results_that_a_page_or_a_script_names_exist(page: Path) -> None:
    assert missing(figures_of(page)) == []


def faults_of_sources(rows: Sequence[Sequence[str]], names: Sequence[str]) -> list[str]:
    """Return what is wrong with a table of files of results: file, what made it, page and claim."""
    benchmarks = ROOT / "benchmarks"
    told = [name for files, *_ in rows for name in re.findall(r"[\w.]+\.jsonl(?:\.gz)?", files)]
    faults = [f"{name} stands in {told.count(name)} rows" for name in {*told, *names} if told.count(name) != 1]
    faults += [f"{name} is not there" for name in told if name not in names]
    for files, made_by, page, claim in rows:
        scripts = re.findall(r"[\w/]+\.py", made_by)
        faults += [f"{script} is not there" for script in scripts if not (benchmarks / script).is_file()]
        link = re.search(r"\]\(([^)]+)\)", page)
        text = (benchmarks / link[1]).read_text("utf-8") if link and (benchmarks / link[1]).is_file() else ""
        faults += [f"{page} does not name {name}" for name in re.findall(r"[\w.]+\.jsonl", files) if name not in text]
        if not (scripts or "card bench" in made_by) or not claim:
            faults.append(f"{files} lacks what made it, or its claim")
    return sorted(faults)


def test_every_file_of_results_has_what_made_it_a_page_that_names_it_and_a_claim() -> None:
    rows = rows_of("benchmarks/README.md", "| file | made by | page | claim |")
    assert faults_of_sources(rows, [file.name for file in results()]) == []


def test_a_file_without_script_page_or_claim_is_found() -> None:
    rows = [["`a.jsonl`", "`no/such.py`", "[LOG.md](LOG.md)", "speed"], ["`b.jsonl`", "by hand", "LOG.md", ""]]
    assert faults_of_sources(rows, ["a.jsonl", "c.jsonl"]) == [
        "LOG.md does not name b.jsonl",
        "[LOG.md](LOG.md) does not name a.jsonl",
        "`b.jsonl` lacks what made it, or its claim",
        "b.jsonl is not there",
        "c.jsonl stands in 0 rows",
        "no/such.py is not there",
    ]


def test_every_commit_that_a_line_or_a_page_names_led_to_this_one() -> None:
    if known := history(ROOT):  # a copy without its history cannot tell
        told = {file.name: {str(line.get("commit", known[0])) for line in lines_of(file)} for file in results()}
        told |= {str(page.relative_to(ROOT)): set(TOLD_COMMIT.findall(page.read_text("utf-8"))) for page in PAGES}
        assert {name: lost for name, commits in told.items() if (lost := strangers(commits, known))} == {}


def test_a_commit_that_is_not_in_the_history_is_found_and_a_shortened_one_is_known(tmp_path: Path) -> None:
    known = ["b" * 40, "0123abcd" * 5]
    assert strangers(["0123abc", "b" * 40, "0123abce", "ffff0000", "00000aa"], known) == [
        *("00000aa", "0123abce", "ffff0000")
    ]
    assert strangers(["0123abc"], []) == ["0123abc"]
    assert history(tmp_path) == [], "a folder without git says nothing"
    assert TOLD_COMMIT.findall("commit 902d773d, on 20261127, a facade: deadbee5") == ["902d773d", "deadbee5"]


def rows_of(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table below this row of headings; the page is named by its path from the root."""
    lines = (ROOT / page).read_text("utf-8").splitlines()
    body = itertools.takewhile(lambda line: line.startswith("|"), lines[lines.index(heading) + 2 :])
    return [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in body]


def test_the_table_of_the_edge_is_that_of_its_lines() -> None:
    found: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    for line in lines_of(RESULTS / "edge.jsonl"):
        names = (f"{line['overlap'].upper()}, {line['sent']}", line["servers_by"], line["shares"])
        found.setdefault(names, {})[line["devices"]] = line
    overlap = ""
    for first, ways, *cells in rows_of(
        EDGE, "| overlap, sent | servers by, shares | 30 devices | 180 devices | saved |"
    ):
        overlap = first or overlap
        policy, _, shares = ways.replace("`", "").partition(", ")
        alone = overlap == "none"
        lines = found[
            "PEARL, ids" if alone else overlap, *(("most-compute", "no drafters") if alone else (policy, shares))
        ]
        told = [f"{lines[count]['ms_a_token']:.0f} ± {lines[count]['range_95_ms']:.0f}" for count in (30, 180)]
        saved = 100 * statistics.fmean(line["saved"] for line in lines.values())
        assert cells == [*told, "" if alone else f"{saved:.0f} %"], (overlap, ways)


def means(line: Mapping[str, Any], *names: str) -> list[str]:
    return [line["overlap"].upper(), line["place"], *(f"{line['ms_a_token'][name]:.1f}" for name in names)]


def test_the_table_of_places_is_that_of_its_lines() -> None:
    names = ("no drafters", "random", "best-signal", "most-compute", "matching")
    told = [
        [*means(line, *names), f"{100 * line['saved_on_best']:.1f} ± {100 * line['saved_range_95']:.1f} %"]
        for line in lines_of(RESULTS / "edge_places.jsonl")
    ]
    heading = "| overlap | place | alone | `random` | `best-signal` | `most-compute` | `matching` | saved |"
    assert rows_of(EDGE, heading) == told


def test_the_table_of_batches_at_the_edge_is_that_of_its_lines() -> None:
    names = ("no drafters", "most-compute", "matching", "matching, held", "shortest-pass")
    told = []
    for line in lines_of(RESULTS / "edge_batched.jsonl"):
        overlap, place, *cells = means(line, *names)
        told.append([overlap, place, f"{line['walk_m']:.0f} m", *cells])
    names_shown = "alone | `most-compute` | `matching` | held | `shortest-pass`"
    assert rows_of(EDGE, f"| overlap | place | walk | {names_shown} |") == told


def times(run: Run, row: str) -> str:
    """Return a row's speed over that of the run's baseline, as tables have it."""
    (pair,), (workload,) = run.pairs, run.workloads
    found = ratio(run, row, run.baseline, pair=pair.name, workload=workload.name)
    assert found is not None
    return f"{found.median:.2f}"


def test_the_table_of_blocks_is_that_of_its_lines() -> None:
    told = [[times(run, "sps-all-cores"), times(run, "card")] for run in load(RESULTS / "blocks.jsonl")]
    assert [cells for _, *cells in rows_of(STATES, "| model | chains of 2 or 3 | the default |")] == told


def test_the_table_of_the_draft_server_is_that_of_its_lines_and_the_readme_rounds_it() -> None:
    told = [
        [
            times(run, "turns"),
            *(
                " / ".join(times(run, f"{row}, {ms} ms away") for ms in ("0.2", "5", "20"))
                for row in ("fixed", "default")
            ),
        ]
        for run in load(RESULTS / "draft_server.jsonl")
    ]
    heading = "| | turns, one core | fixed `card`, 0.2 / 5 / 20 ms away | the default |"
    assert [cells for _, *cells in rows_of("docs/draft-server.md", heading)] == told
    ((in_turns, _, default), _) = told
    words = " ".join((ROOT / "README.md").read_text("utf-8").split())
    away = float(default.split(" / ")[1])
    assert f"5 ms away: {away:.1f} times plain, in turns on one core {float(in_turns):.1f}." in words


def test_the_table_of_the_loop_on_a_real_pair_is_that_of_its_lines() -> None:
    best: dict[tuple[str, float], dict[str, tuple[float, int]]] = {}
    for line in lines_of(RESULTS / "paper_real_loop.jsonl"):
        column = f"K = {line['beam_width']}" if line["row"] == "loop" else line["row"]
        cells = best.setdefault((line["workload"], line["temperature"]), {})
        cells[column] = max(cells.get(column, (0.0, 0)), (line["speed_up"], line["layers_per_round"]))
    heading = "| set, temperature | K = 5 | 25 | 45 | 105 | 205 | turns, a core each | turns, both cores |"
    columns = [*(f"K = {width}" for width in (5, 25, 45, 105, 205)), "turns, one core each", "turns, all cores"]
    told = [
        [f"{workload}, {temperature:g}", *(f"{cells[name][0]:.2f} ({cells[name][1]})" for name in columns)]
        for (workload, temperature), cells in best.items()
    ]
    assert [[name.lower(), *cells] for name, *cells in rows_of("benchmarks/paper/README.md", heading)] == told


def test_the_table_of_heads_is_that_of_its_lines() -> None:
    losses = {"CTC": "ctc", "cross-entropy": "cross-entropy"}
    lines = {(line["loss"], line["candidates"]): line for line in lines_of(RESULTS / "ctc.jsonl")}
    rows = rows_of(CTC, "| loss | candidates | tokens a step | accepted to depth 1, 2, 3, 4 |")
    assert len(rows) == len(lines)
    for loss, candidates, tokens, depths in rows:
        line = lines[losses[loss], int(candidates.split(",")[0])]
        shares = ", ".join(f"{100 * share:.0f}" for share in line["accepted to depth"][:4])
        assert (tokens, depths) == (f"{line['tokens a step']:.2f}", f"{shares} %")


def test_the_table_of_eagle_heads_is_that_of_its_lines() -> None:
    told = []
    for line in lines_of(RESULTS / "eagle.jsonl"):
        names = (
            line["target"].removesuffix(".gguf"),
            line["data"].partition("_")[0],
            line["row"].removesuffix(".gguf"),
        )
        shares = ", ".join(f"{100 * share:.0f}" for share in line["accepted to depth"])
        told.append([*names, f"{line['tokens a step']:.2f}", f"{shares} %"])
    assert rows_of(EAGLE, "| target | data | draft | tokens a step | accepted to depth 1, 2, 3, 4 |") == told


WHOLE = {"command": "card bench", "commit": "0123abc", "machine": {"cpu": "a"}, "started": "2026-11-28T00:00:00Z"}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"command": ""}, "no command"),
        ({"commit": "0123abc-dirty"}, "commit '0123abc-dirty'"),
        ({"commit": "0123abc, before it was rebased"}, "commit '0123abc, before it was rebased'"),
        ({"commit": "unknown"}, "commit 'unknown'"),
        ({"machine": {}}, "no machine"),
    ],
)
def test_a_line_that_lacks_a_fact_is_found_with_its_day(changes: dict[str, Any], fault: str) -> None:
    assert list(faults_of([{**WHOLE, **changes}])) == [fault]
    run = {"kind": "run", "run_id": "a", **WHOLE, **changes}
    assert len(list(faults_of([run, {"kind": "sample", "run_id": "a"}]))) == 2


def test_a_whole_line_and_what_a_whole_run_found_are_no_faults() -> None:
    assert list(faults_of([WHOLE, {"kind": "run", "run_id": "a", **WHOLE}, {"kind": "sample", "run_id": "a"}])) == []
    assert len(list(faults_of([{"kind": "sample", "run_id": "b"}]))) == 1


def test_a_results_file_that_is_named_and_not_there_is_found() -> None:
    text = "`benchmarks/results/none.jsonl`, results/edge.jsonl\n    --out benchmarks/results/made.jsonl"
    assert missing(text) == ["made.jsonl", "none.jsonl"] and missing(TO_BE_MADE.sub("", text)) == ["none.jsonl"]


SERIES = "src/card/labs/series/README.md"
SERIES_NAMES = {
    "ETTh1": "ETTh1.csv",
    "ETTh2": "ETTh2.csv",
    "San Francisco": "sf-temps.csv",
    "Seattle": "seattle-temps.csv",
}


def test_the_tables_of_forecasts_are_those_of_their_lines() -> None:
    lines = lines_of(RESULTS / "forecasts.jsonl")
    told = []
    for name, file in SERIES_NAMES.items():
        found = [line for line in lines if line.get("series") == file]
        plain, drafted = ([line for line in found if bool(line["draft"]) == is_drafted] for is_drafted in (False, True))
        assert [line["continuations"] for line in drafted] == [1, 8, 50]
        assert {one["target"]["passes"] / one["forecasts"] for one in plain} == {12}
        passes = ([line[model]["passes"] / line["forecasts"] for line in drafted] for model in ("target", "draft"))
        rows = [one["target"]["rows"] / other["target"]["rows"] for one, other in zip(drafted, plain, strict=True)]
        accepted = ", ".join(f"{100 * line['acceptance']:.0f}" for line in drafted)
        told.append([name, accepted, *(", ".join(f"{one:.1f}" for one in some) for some in (*passes, rows))])
    heading = "| series | accepted, % | target passes | draft passes | target rows, over plain |"
    assert rows_of(SERIES, heading) == told
    shapes = [line for line in lines if line["question"] == "shape"]
    dear, free = ([one for one in shapes if (sum(one["parameters"]) > 0) == is_dear] for is_dear in (True, False))
    seconds = {(one["continuations"], one["forced"]): _seconds(one) for one in dear}
    told = []
    for line in free:
        if of_passes_s := seconds.get((line["continuations"], line["forced"])):
            target, draft, num = line["target"], line["draft"] or {"passes": 0}, line["forecasts"]
            counts = [target["rows"], target["rows_without_cache"], line["calls"]]
            passes = [f"{one['passes'] / num:.1f}" for one in (target, draft)]
            forced = f"{line['forced']:g}" if line["draft"] else "no draft"
            told.append(
                [str(line["continuations"]), forced, *passes, *(f"{one / num:,.0f}" for one in counts), of_passes_s]
            )
    counted = "target passes | draft passes | rows | rows without a cache | calls | s of passes"
    heading = f"| continuations | accepted | {counted} |"
    assert rows_of(SERIES, heading) == told


def _seconds(line: Mapping[str, Any]) -> str:
    return f"{sum(line[one]['cpu_s'] for one in ('target', 'draft') if line[one]) / line['forecasts']:.1f}"


SPECBRANCH = "src/card/family/specbranch/README.md"


PAIRS = {
    "demo-questions.rec": "demo pair",
    "demo-two-bits.rec": "its draft in two bits",
    "qwen.rec": "Qwen2.5-Coder 1.5 B and 0.5 B",
    "qwen-two-bits.rec": "the 0.5 B in two bits",
}  # by recording


def test_the_tables_of_rollbacks_are_those_of_their_lines() -> None:
    lines = lines_of(RESULTS / "rollback.jsonl")
    told: list[list[str]] = []
    foreseen: list[list[str]] = []
    for recording, name in PAIRS.items():
        found = [line for line in lines if line["recording"] == recording]
        agreement = f"{100 * found[0]['agreement']:.0f} %"
        for length in (2, 4, 7):
            alike = [line for line in found if line["num_speculative_tokens"] == length]
            cells = {line["branch_below"]: _rollback(line) for line in alike if line["hrad"] == "off"}
            told.append([name, agreement, str(length), *(cells[below] for below in (None, 0.7, 0.97))])
            if "perfect" in (uses := {line["hrad"]: _drafted(line) for line in alike if line["branch_below"] == 0.7}):
                (pearl,) = {_drafted(line) for line in alike if line["method"] == "pearl"}
                names = ("off", "evidence", "obeyed", "perfect")
                foreseen.append([name, pearl, *(uses.get(use, "–") for use in names)])
    heading = "| pair | agreement | K | `pearl` | `specbranch` | `--branch-below 0.97` |"
    assert rows_of(SPECBRANCH, heading) == told
    heading = "| pair, K = 4 | `pearl` | `specbranch` | H-RAD as evidence | obeyed | perfect, obeyed |"
    assert rows_of(SPECBRANCH, heading) == foreseen


def _drafted(line: Mapping[str, Any]) -> str:
    drafted = line["drafter_dropped_nodes"] + line["accepted_tokens"]
    return f"{_rollback(line)}, {drafted / line['tokens']:.2f}"


def _rollback(line: Mapping[str, Any]) -> str:
    return f"{line['tokens'] / line['target_passes']:.2f}, {line['rolled_back_tokens'] / line['tokens']:.2f}"
