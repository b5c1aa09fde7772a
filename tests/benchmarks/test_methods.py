"""The benchmarks run on a tiny pair, compare texts before times, and their lines make tables."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from card.config import SamplingParams
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


@pytest.fixture(scope="module")
def greedy(bench: dict[str, ModuleType], common: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results") / "new" / "methods.jsonl"
    options = ["--max-tokens", "10", "--repeats", "2", "--sps-lengths", "2,3", "--target-cost", "100K"]
    assert bench["methods"].main([*common, *options, "--dtype", "float32", "--out", str(out)]) == 0
    return out


def test_every_method_writes_the_text_of_plain_decoding(greedy: Path, bench: dict[str, ModuleType]) -> None:
    lines = {line["method"]: line for line in lines_of(greedy)}
    assert list(lines) == [*bench["methods"].OURS, *bench["methods"].THEIRS]
    for line in lines.values():
        assert line["outputs_equal"] is True and line["first_differences"] == []
        assert line["decode_tokens_per_s"] > 0 and len(line["decode_tokens_per_s_runs"]) == 2
        assert line["num_prompts"] == 1 and line["repeats"] == 2 and line["dtype"] == "float32"
        assert "inflated" in line["target_cost"] and line["versions"]["torch"] == torch.__version__
    assert lines["vanilla"]["speedup_same_core"] == lines["vanilla-all-cores"]["speedup_all_cores"] == 1.0
    assert lines["card-tree"]["settings"]["verify"] == "tree"


def test_one_core_rows_have_one_core_and_the_fastest_draft_length_is_named(greedy: Path) -> None:
    lines = {line["method"]: line for line in lines_of(greedy)}
    for name, line in lines.items():
        on_all = name.endswith("all-cores") or name == "card"
        assert len(line["settings"]["cores"]) == 1 + on_all
        assert line["settings"]["threads"] == (None if name == "card" else 1 + on_all)
    tried = lines["sps"]["settings"]["chosen_among"]
    assert tried[str(lines["sps"]["settings"]["num_speculative_tokens"])] == max(tried.values())
    assert set(lines["transformers-assisted"]["settings"]["chosen_among"]) == {"defaults", "constant 2", "constant 3"}


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
