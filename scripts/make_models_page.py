"""Try every causal architecture of the installed transformers, and write the tables of docs/models.md.

    python scripts/make_models_page.py                      # all of them: a quarter of an hour on two cores
    python scripts/make_models_page.py --only llama,gpt_oss # renews their rows

Each family is a tiny random model. Its logits by CARD's runner are compared with those of transformers' own forward:
for a text at once, token by token, as a tree, and beside a longer text.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from card.backends.transformers.row_check import check_rows, rows_that_differ
from card.errors import ModelError
from card.models.architectures import find_architecture
from card.models.protocol import Recurrent
from card.models.runners import plain_runner

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- made by scripts/make_models_page.py -->\n", "\n<!-- end -->"
# What refusals say of one family, and what is said of all that are refused alike.
_REASONS = (
    (r"^not tried: (.*?) \(.*", r"not tried: \1"),
    (r"^this \S+ model cannot be run(?: exactly)?[:,] ", ""),
    (r"^this \S+ model (attends)", r"it \1"),
    (r"^(?:\S+ models|they) (compute|keep)", r"they \1"),
    (r"^\S+ has layers of type", "it has layers of type"),
    (r"\w*Attention (is|attends)", r"its attention \1"),
    (r"^it has \d+ layers of attention, but \d+ called", "other layers than its own call"),
)
_LIMIT_S = 60  # of processor time, for one family
_LONGEST = 40  # tokens
_RUNNING_CELLS = 5  # of the table of families that run
# What configs call their sizes, and what they become. Where a family has no such field nothing changes.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 97),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(
        (
            "intermediate_size",
            "intermediate_size_mlp",
            "ffn_dim",
            "n_inner",
            "d_ff",
            "moe_intermediate_size",
            "ffn_hidden_size",
        ),
        48,
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "qk_nope_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("qk_rope_head_dim",), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("sliding_window", "attention_window", "attention_chunk_size", "floor_scale"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 2),
    **dict.fromkeys(("hidden_size_per_layer_input",), 8),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    "initializer_range": 0.3,
}
_ZAMBA: dict[str, Any] = {
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "n_mamba_heads": 2,
    "mamba_headdim": 32,
    "mamba_ngroups": 1,
    "mamba_dt_rank": 4,
    "attention_head_dim": 16,
    "attention_hidden_size": 64,
    "num_mem_blocks": 1,
    "adapter_rank": 4,
}
# What some families need besides.
_ODD: dict[str, dict[str, Any]] = {
    **{family: {"head_dim": 8} for family in ("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe")},
    **{family: {"rotary_dim": 4} for family in ("gptj", "codegen")},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_groups": 1, "mamba_d_head": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2},
    **{family: _ZAMBA for family in ("zamba", "zamba2")},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "granitemoeshared": {"shared_intermediate_size": 48},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 0},
    "zaya": {"num_experts_per_tok": 1, "sliding_window": 8, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gemma4_text": {"head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 2, "num_global_key_value_heads": 1},
}


@dataclass(frozen=True, slots=True)
class Row:
    """What was found out about a family."""

    family: str
    path: str  # how it runs; empty: not at all
    shape: str  # trees, or chains
    result: str  # equal, or why not

    @property
    def runs(self) -> bool:
        """Whether its logits are right."""
        return self.result == "equal"


def tiny_config(family: str) -> Any:
    """Return the config of a tiny model. Raises: almost anything, for families that cannot be made so small."""
    kind = CONFIG_MAPPING[family]
    config = kind()
    text = config.get_text_config()
    fitting = {name: value for name, value in _SIZES.items() if isinstance(_stated(text, name), int | float)}
    if _stated(text, "num_key_value_heads") == _stated(text, "num_attention_heads"):
        fitting["num_key_value_heads"] = _SIZES["num_attention_heads"]
    return type(text)(**{**fitting, **_layer_kinds(text), **_ODD.get(text.model_type, {})})


def _stated(config: Any, name: str) -> Any:
    if isinstance(getattr(type(config), name, None), property):  # follows from other fields
        return None
    try:
        return getattr(config, name, None)
    except Exception:  # some configs refuse to tell what differs between layers
        return None


def _layer_kinds(config: Any) -> dict[str, Any]:
    """Return four layers of which each kind of the family's is one."""
    name = (getattr(config, "attribute_map", None) or {}).get("layer_types", "layer_types")
    kinds = _stated(config, name)
    if not kinds:
        return {}
    distinct = list(dict.fromkeys(kinds))
    return {name: [distinct[i % len(distinct)] for i in range(4)]}


def tiny_model(family: str) -> Any:
    """Return a tiny random model in float32."""
    torch.manual_seed(0)
    config = tiny_config(family)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if not parameter.isfinite().all():
            parameter.normal_(0.0, 0.3)
    return model


def examine(family: str) -> Row:
    """Return what happens with a family."""
    try:
        with _limited():
            model = tiny_model(family)
            model(torch.tensor([[3, 4, 5]]), use_cache=False)
    except Exception as error:
        return Row(family, "", "", f"not tried: transformers makes no tiny model of it ({_few(error)})")
    try:
        with _limited():
            runner = plain_runner(model, max_model_len=_LONGEST, max_tree_rows=24)
            if runner.has_own_pass:
                wrong = rows_that_differ(
                    runner, lambda ids: model(torch.tensor([list(ids)]), use_cache=False).logits[0]
                )
            else:
                check_rows(runner, f"this {family} model")
                wrong = ""
    except ModelError as error:
        return Row(family, "", "", _few(error))
    except Exception as error:
        return Row(family, "", "", f"fails: {type(error).__name__}: {_few(error)}")
    path = "own pass" if runner.has_own_pass else "transformers' modules"
    shape = "chains" if isinstance(runner, Recurrent) else "trees"
    return Row(family, path, shape, f"tokens {wrong}" if wrong else "equal")


def _few(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].partition("; choose ")[0].partition("; use another ")[0][:200] if lines else type(error).__name__


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def end(*_: object) -> None:
        raise TimeoutError(f"took more than {_LIMIT_S} s")

    signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, _LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def page(rows: Sequence[Row], text: str) -> str:
    """Return docs/models.md with these rows in place of those that the text has; its prose stays."""
    running = [row for row in rows if row.runs]
    wrong = [row for row in rows if row.path and not row.runs]
    refused = [row for row in rows if not row.path]
    lines = [
        f"With transformers {transformers.__version__}: {len(running)} families run, {len(wrong)} are wrong, "
        f"{len(refused)} are refused or could not be tried.",
        "",
        "| how it runs | candidates | logits | families | GGUF files read, by `general.architecture` |",
        "|---|---|---|---|---|",
        *_grouped(rows=[*running, *wrong]),
        "",
        "| refused, because | families |",
        "|---|---|",
        *_grouped(refused),
    ]
    head, rest = text.split(BEGIN)
    return head + "\n".join([BEGIN, *lines, END]) + rest.split(END)[1]


def _grouped(rows: Sequence[Row]) -> list[str]:
    """Return a line for all families of which the same is known."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        known = (row.path, row.shape, row.result) if row.path else (summary(row.result),)
        groups.setdefault(known, []).append(row.family)
    return [
        f"| {' | '.join([*known, ', '.join(names), *([_files_of(names)] if len(known) > 1 else [])])} |"
        for known, names in sorted(groups.items())
    ]


def _files_of(names: Sequence[str]) -> str:
    """Return the architectures of GGUF files that are read as these families, each with those that it does not name."""
    found: dict[str, list[str]] = {}
    for name in names:
        entry = find_architecture(name)
        for known in () if entry is None else entry.gguf.names:
            found.setdefault(known, []).append(name)
    files = [file if its == [file] else f"{file} ({', '.join(its)})" for file, its in sorted(found.items())]
    return ", ".join(files) or "none"


def summary(result: str) -> str:
    """Return the reason of a refusal without what differs between the families that it holds for."""
    for pattern, words in _REASONS:
        result = re.sub(pattern, words, result)
    return result.replace("|", "/")


def rows_of(text: str) -> list[Row]:
    """Return the rows of docs/models.md."""
    rows = []
    for line in text.split(BEGIN)[1].split(END, maxsplit=1)[0].splitlines():
        cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
        facts, names = (cells[:3], cells[3]) if len(cells) == _RUNNING_CELLS else (["", "", cells[0]], cells[-1])
        if line.startswith("| ") and names != "families":
            rows += [Row(family, *facts) for family in names.split(", ")]
    return sorted(rows, key=lambda row: row.family)


def families() -> list[str]:
    """Return the model types of all causal architectures."""
    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)


def main() -> int:
    """Do what the command line says; the exit status is 1 if a family runs and is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="families, with commas")
    only = parser.parse_args().only
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # the models are tiny
    text = PAGE.read_text("utf-8")
    if only and f"With transformers {transformers.__version__}:" not in text:
        parser.error("the page was made with another version of transformers: leave --only out")
    rows = {row.family: row for row in rows_of(text)} if only else {}
    for family in only.split(",") if only else families():
        row = rows[family] = examine(family)
        print(f"{family}: {row.path or '-'}: {row.shape or '-'}: {row.result}", flush=True)
    PAGE.write_text(page([rows[family] for family in sorted(rows)], text), "utf-8")
    return int(any(row.path and not row.runs for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
