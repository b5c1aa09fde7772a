"""Whatever stands in config.json, a model loads or is refused in one line."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerBase

from card.errors import CardError, ModelError
from card.models.loading import check_pair, load_decoder, state_bytes_of
from tests.fuzzing import altered, as_json
from tests.pair import make_tokenizer
from tests.tiny import NO_ENDS, SIZES

ODD: Sequence[Any] = (None, -1, 0, 1e308, "x", [1], {}, {"a": 1})
_GONE = object()
# Fields that plain models do not have.
STRAY = ("text_config", "partial_rotary_factor", "rope_scaling", "quantization_config", "vision_config", "layer_types")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A model whose angles may turn a part of each head; not to be changed."""
    made = tmp_path_factory.mktemp("glm4")
    torch.manual_seed(1)
    sizes = {**SIZES, **NO_ENDS, "head_dim": 8, "max_position_embeddings": 256}
    transformers.Glm4ForCausalLM(transformers.Glm4Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


def changed_once(good: dict[str, Any], odd: Sequence[Any] = ODD) -> Iterator[tuple[str, Any]]:
    """Yield each way to give one field another value, or none, with its name."""
    for field in dict.fromkeys((*good, *STRAY)):
        for value in (_GONE, *odd):
            document = copy.deepcopy(good)
            document.pop(field, None)
            yield f"{field} {value!r:.20}", document if value is _GONE else {**document, field: value}
    for name, one in good.items():
        for key in one if isinstance(one, dict) else ():
            for value in odd:
                yield f"{name}.{key} {value!r:.20}", {**good, name: {**one, key: value}}
    yield from ((f"{value!r:.20}", value) for value in odd)


def fault_of(good: Path, document: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what is wrong with how a model with this config ends; empty if nothing is."""
    with altered(good, "config.json", as_json(document)) as made:
        name = str(made)
        for use in (
            lambda: check_pair(tokenizer, name, name),
            lambda: state_bytes_of(name),
            lambda: load_decoder(name),
        ):
            try:
                use()
            except CardError as error:
                if len(str(error).splitlines()) != 1:
                    return f"not one line: {error}"
            except Exception as error:
                return f"{type(error).__name__}: {error}"
    return ""


def test_each_field_of_another_type_or_gone_is_one_line(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    good = json.loads((folder / "config.json").read_text())
    cases = list(changed_once(good, ODD[:3] + ODD[4:7]))[::3]
    faults = {what: fault for what, document in cases if (fault := fault_of(folder, document, tokenizer))}
    assert len(cases) > 70 and not faults


@pytest.mark.parametrize("value", [-1, "x", [1], {}])
def test_a_text_config_of_another_type_is_named(folder: Path, value: Any) -> None:
    good = json.loads((folder / "config.json").read_text())
    with (
        altered(folder, "config.json", as_json({**good, "text_config": value})) as made,
        pytest.raises(ModelError, match="text_config is "),
    ):
        load_decoder(made)


def test_a_model_without_layers_is_refused_by_the_field(folder: Path) -> None:
    good = json.loads((folder / "config.json").read_text())
    with (
        altered(folder, "config.json", as_json({**good, "num_hidden_layers": 0})) as made,
        pytest.raises(ModelError, match="its num_hidden_layers is 0, it must be a number above 0"),
    ):
        load_decoder(made)


@pytest.mark.parametrize("field", ["rope_scaling", "unknown"])
def test_a_config_that_is_nested_as_deeply_as_is_possible_loads_or_is_one_line(
    folder: Path, tokenizer: PreTrainedTokenizerBase, field: str
) -> None:
    good = json.loads((folder / "config.json").read_text())
    nested: Any = 1
    for i in range(99):
        nested = {"a": nested} if i % 2 else [nested]
    assert not fault_of(folder, {**good, field: nested}, tokenizer)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Lfm2", {"conv_bias": True, "layer_types": ["conv", "full_attention"]}),
        ("Ernie4_5_Moe", {"use_bias": True, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    ],
)
def test_biases_that_the_own_pass_lacks_run_in_transformers_modules(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(transformers, f"{kind}Config")(vocab_size=64, num_key_value_heads=1, **sizes, **changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path)
    loaded: Any = load_decoder(tmp_path)
    assert type(loaded) is type(model)
    ids = torch.tensor([[3, 5, 7, 9]])
    torch.testing.assert_close(loaded.float()(ids).logits, model(ids).logits, atol=0.05, rtol=0.05)
