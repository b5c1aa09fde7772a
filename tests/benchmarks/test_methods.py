"""The benchmarks run on a tiny pair, compare texts before times, and their lines make tables."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from card.config import SamplingParams
from card.errors import SettingsError
from tests.benchmarks.scripts import BENCHMARKS, MODULES, lines_of  # noqa: F401

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"


def make_pair(folder: Path) -> tuple[Path, Path]:
    """Save a tiny target and a draft that is its first layer, with a tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([END, USER, ASSISTANT, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=END, extra_special_tokens=[USER, ASSISTANT]
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        initializer_range=0.3,
    )
    target = LlamaForCausalLM(config)
    draft = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 1}))
    draft.load_state_dict(target.state_dict(), strict=False)
    for model, name in ((target, "target"), (draft, "draft")):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder / "target", folder / "draft"


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of every script."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = make_pair(folder)
    (folder / "prompts.jsonl").write_text(json.dumps({"question": "How many?", "answer": "2"}) + "\n" * 2)
    return ["--prompts", str(folder / "prompts.jsonl"), "--limit", "1", "--target", str(target), "--draft", str(draft)]


# Rows of every kind with as few drafter processes as that takes: each costs seconds to start.
SOME = (
    "vanilla-all-cores,sps,ouroboros-all-cores,suffix-all-cores,recycling-all-cores,pearl,card-tree,card-best-first,"
    "card-turns-all-cores,card-writers,transformers-assisted"
)
EVERY = pytest.param("all", marks=[pytest.mark.slow, pytest.mark.timeout(600)])


@pytest.fixture(scope="module", params=[pytest.param(SOME, id="some"), EVERY])
def greedy(
    bench: dict[str, ModuleType],
    common: list[str],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Path:
    out = tmp_path_factory.mktemp("results") / "new" / "methods.jsonl"
    options = ["--max-tokens", "10", "--repeats", "2", "--sps-lengths", "2,3", "--target-cost", "100K"]
    options += ["--dtype", "float32", "--methods", request.param, "--out", str(out)]
    assert bench["methods"].main([*common, *options]) == 0
    names = [line["method"] for line in lines_of(out)]
    assert set(names) == {"vanilla", *(bench["lineup"].PRESETS["all"] if request.param == "all" else SOME.split(","))}
    return out


def test_every_method_writes_the_text_of_plain_decoding(greedy: Path, bench: dict[str, ModuleType]) -> None:
    lines = {line["method"]: line for line in lines_of(greedy)}
    assert list(lines) == [name for name in bench["lineup"].KNOWN if name in lines]
    for line in lines.values():
        assert line["outputs_equal"] is True and line["first_differences"] == []
        assert line["decode_tokens_per_s"] > 0 and len(line["decode_tokens_per_s_runs"]) == 2
        assert line["num_prompts"] == 1 and line["repeats"] == 2 and line["dtype"] == "float32"
        assert line["workload"] == "prompts" and line.keys() == lines["vanilla"].keys()
        assert "inflated" in line["target_cost"] and line["versions"]["torch"] == torch.__version__
    assert lines["vanilla"]["speedup_same_core"] == lines["vanilla-all-cores"]["speedup_all_cores"] == 1.0


def test_rows_are_set_up_as_their_names_say(greedy: Path, bench: dict[str, ModuleType]) -> None:
    settings = {line["method"]: line["settings"] for line in lines_of(greedy)}
    tuned = {name for name, spec in bench["lineup"].OURS.items() if spec.is_tuned}
    for name, one in settings.items():
        on_all = name.endswith("all-cores") or name in tuned
        assert len(one["cores"]) == 1 + on_all
        assert one["threads"] == (None if name in tuned else 1 + on_all)
        assert (one.get("policy") == "auto") is (name in tuned)
    for name in {"pearl", "ssd", "specbranch"} & settings.keys():
        assert settings[name]["placement"] == "process" and settings[name]["draft_cores"] != settings[name]["cores"]
        assert settings[name]["length_from"] == "latencies" and settings[name]["num_speculative_tokens"] >= 2
        assert settings[name].get("hrad") == ("off" if name == "specbranch" else None)  # the tiny pair has none
    assert settings["card-tree"]["verify"] == settings["card-best-first"]["verify"] == "tree"
    assert (settings["card-tree"]["growth"], settings["card-best-first"]["growth"]) == ("layer", "best-first")
    assert settings["card-writers"]["writers"] == ["beam", "suffix", "recycling"]
    assert settings["ouroboros-all-cores"]["writers"] == ["phrases"]


def test_the_fastest_draft_length_is_chosen_and_named(greedy: Path) -> None:
    lines = {line["method"]: line for line in lines_of(greedy)}
    for name in ("sps", "ouroboros-all-cores", "card-turns-all-cores"):
        tried = lines[name]["settings"]["chosen_among"]
        assert set(tried) == {"2", "3"}
        assert tried[str(lines[name]["settings"]["num_speculative_tokens"])] == max(tried.values())
    assert set(lines["transformers-assisted"]["settings"]["chosen_among"]) == {"defaults", "constant 2", "constant 3"}


def test_each_row_says_what_its_candidates_cost_and_who_proposed_them(greedy: Path) -> None:
    lines = {line["method"]: line for line in lines_of(greedy)}
    for name in ("vanilla", "suffix-all-cores", "transformers-assisted"):
        for field in ("drafter_passes", "hit_rate", "rolled_back_per_emitted", "drafter_restarts"):
            assert lines[name][field] is None
    for name in ("sps", "ouroboros-all-cores", "card-turns-all-cores"):  # beside the target it depends on the time
        line = lines[name]
        assert line["drafter_passes"] > 0 and line["drafter_restarts"] == 0
        assert line["verified_per_emitted"] > 0 and line["rolled_back_per_emitted"] >= 0
        assert line["acceptance_per_depth"] and all(0 <= share <= 1 for share in line["acceptance_per_depth"])
        assert set(line["accepted_by_writer"]) <= {"beam", "phrases", "beam+phrases"}
    assert set(lines["recycling-all-cores"]["accepted_by_writer"] or ()) <= {"recycling"}
    writers = {name for label in lines["card-writers"]["accepted_by_writer"] or () for name in label.split("+")}
    assert writers <= {"beam", "suffix", "recycling"}


def test_several_writers_are_compared_with_each_of_them_alone(greedy: Path) -> None:
    lines = {line["method"]: line for line in lines_of(greedy)}
    ratios = lines["card-writers"]["vs_single_writers"]
    assert list(ratios) == [name for name in ("card", "suffix-all-cores", "recycling-all-cores") if name in lines]
    for name, ratio in ratios.items():
        pairs = zip(
            lines["card-writers"]["decode_tokens_per_s_runs"], lines[name]["decode_tokens_per_s_runs"], strict=True
        )
        assert ratio == pytest.approx(statistics.median(own / other for own, other in pairs), rel=0.01)
    assert all(line["vs_single_writers"] is None for name, line in lines.items() if name != "card-writers")


def test_a_row_whose_text_differs_makes_the_exit_status_1(
    bench: dict[str, ModuleType], common: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, out = bench["methods"].measure, tmp_path / "wrong.jsonl"

    def spoilt(*args: Any) -> Any:
        cells = measure(*args)
        decoded = cells[0].decoded["recycling-all-cores"]
        wrong = (5, *decoded.token_ids[1:])
        cells[0].decoded["recycling-all-cores"] = dataclasses.replace(decoded, token_ids=wrong)
        return cells

    options = ["--max-tokens", "8", "--repeats", "1", "--dtype", "float32", "--methods", "recycling-all-cores"]
    assert bench["methods"].main([*common, *options, "--out", str(out)]) == 0
    monkeypatch.setattr(bench["methods"], "measure", spoilt)
    assert bench["methods"].main([*common, *options, "--out", str(out)]) == 1
    wrong = lines_of(out)[-1]
    assert wrong["method"] == "recycling-all-cores" and wrong["outputs_equal"] is False
    assert (wrong["first_differences"][0]["position"], wrong["first_differences"][0]["token_id"]) == (0, 5)


def test_each_workload_has_lines_and_tables_of_its_own(
    bench: dict[str, ModuleType], common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "own.jsonl", tmp_path / "several.jsonl"
    prompts.write_text(json.dumps({"question": "abcabcabcabc", "raw": True}) + "\n")
    models = common[common.index("--limit") :]
    options = ["--prompts", f"first={common[1]}", str(prompts), "--max-tokens", "12", "--repeats", "1"]
    methods = ["--methods", "vanilla-all-cores,lookup-all-cores", "--dtype", "float32"]
    assert bench["methods"].main([*options, *models, *methods, "--out", str(out)]) == 0
    names = ["vanilla", "vanilla-all-cores", "lookup-all-cores"]
    assert [(line["workload"], line["method"]) for line in lines_of(out)] == [
        (workload, name) for workload in ("first", "own") for name in names
    ]
    capsys.readouterr()
    assert bench["table"].main([str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Against plain decoding on all cores:\n\n| method | first | own |")
    assert "Workload first, 1 prompts:" in printed and "Workload own, 1 prompts:" in printed
    assert printed.replace("**", "").count("| lookup-all-cores |") == 3  # in the comparison and for each workload


def test_lines_make_a_markdown_table(
    greedy: Path, bench: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench["table"].main([str(greedy)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("| method | tokens/s |") and "| card-tree" in printed.replace("**", "")
    assert "at commit" in printed


def test_sampling_compares_coupled_and_uncoupled_candidates(
    bench: dict[str, ModuleType], common: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "sampled.jsonl"
    options = ["--max-tokens", "8", "--repeats", "1", "--temperature", "1", "--coupling-report"]
    methods = ["--methods", "sps,transformers-assisted", "--sps-lengths", "2", "--dtype", "float32"]
    assert bench["methods"].main([*common, *options, *methods, "--out", str(out)]) == 0
    lines = {line["method"]: line for line in lines_of(out)}
    assert list(lines) == ["vanilla", "sps", "transformers-assisted", "sps-uncoupled"]
    for name in ("sps", "sps-uncoupled"):
        assert lines[name]["outputs_equal"] is True
        assert lines[name]["settings"]["coupled_noise"] is not name.endswith("uncoupled")
    assert lines["transformers-assisted"]["outputs_equal"] is None


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        (["ssd", "card-tree"], ["vanilla", "ssd", "card-tree"]),
        (["transformers", "vanilla"], ["vanilla", "transformers", "transformers-all-cores"]),
        (["writers"], ["vanilla", "vanilla-all-cores", "suffix-all-cores", "recycling-all-cores", "card"]),
    ],
)
def test_rows_are_asked_for_by_name_or_preset(bench: dict[str, ModuleType], asked: list[str], rows: list[str]) -> None:
    assert bench["lineup"].names_of(asked)[: len(rows)] == rows


def test_an_unknown_row_is_refused(bench: dict[str, ModuleType]) -> None:
    with pytest.raises(SettingsError, match=r"unknown method 'magic'; known: all, .*rivals.*pearl"):
        bench["lineup"].names_of(["card", "magic"])


def test_a_wrong_text_is_named_with_its_logit_gap(bench: dict[str, ModuleType], common: list[str]) -> None:
    target = LlamaForCausalLM.from_pretrained(common[common.index("--target") + 1])
    judge = bench["compare"].TextJudge(target, SamplingParams(temperature=0.0, seed=0))
    prompt = [1, 20, 30]
    with torch.inference_mode():
        logits = target(input_ids=torch.tensor([[*prompt, 7]])).logits[0, -1]
    best, worst = int(logits.argmax()), int(logits.argmin())
    pairs = [(0, (7, worst, 9), (7, best, 8)), (0, (7, worst, 9), (7, best, 8)), (0, (7,), (7, best)), (0, (7,), (7,))]
    wrong, short = judge.first_differences([prompt], pairs)
    assert (wrong.position, wrong.token_id, wrong.plain_token_id, wrong.is_near_tie) == (1, worst, best, False)
    assert wrong.logit_gap == pytest.approx(float(logits.max() - logits.min()), rel=1e-5)
    assert short.position == 1 and short.token_id is None and short.logit_gap is None


class StoppedRow:
    """A row whose user presses Ctrl-C in the middle of the n-th prompt."""

    def __init__(self, stop_at: int) -> None:
        self.name = "vanilla"
        self._left = stop_at

    def decode(self, prompt_ids: list[int], params: SamplingParams) -> list[int]:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt
        return prompt_ids


@pytest.mark.parametrize(("stop_at", "kept"), [(1, []), (2, [(0, 0)]), (4, [(0, 0), (0, 1)]), (9, "all")])
def test_an_interrupted_run_keeps_whole_repeats(
    bench: dict[str, ModuleType], stop_at: int, kept: list[tuple[int, int]] | str
) -> None:
    console = Console(quiet=True)
    cells = bench["methods"].measure([StoppedRow(stop_at)], [[1], [2]], SamplingParams(), 2, console)
    wanted = [(0, 0), (0, 1), (1, 0), (1, 1)] if kept == "all" else kept
    assert [(cell.repeat, cell.prompt_idx) for cell in cells] == wanted


def test_rounds_and_beam_steps_are_profiled_part_by_part(
    bench: dict[str, ModuleType], common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.jsonl"
    options = ["--max-tokens", "30", "--beam-widths", "2,4", "--out", str(out)]
    assert bench["profile_rounds"].main([*common, *options]) == 0
    lines = {line["what"]: line for line in lines_of(out)}
    assert list(lines) == [
        "plain round",
        "card round, chain",
        "card round, tree",
        "beam step, width 2",
        "beam step, width 4",
        "drafter's commit, width 4",
    ]
    for line in lines.values():
        assert line["num_rounds"] > 0 and 0 < line["overhead_us"] <= line["total_us"]
        assert "rest" in line["parts"]
    assert lines["card round, tree"]["parts"]["query"] > 0 and lines["beam step, width 4"]["parts"]["grow the tree"] > 0
    capsys.readouterr()
    assert bench["table"].main([str(out)]) == 0
    assert "beam step, width 4" in capsys.readouterr().out
