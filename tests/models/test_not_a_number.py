"""A weight that is no number is refused by its name, and no pass makes numbers of it: its text would read well."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import safetensors.numpy
from gguf import GGMLQuantizationType as Kind

from card.errors import ModelError
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import Array, has_nan
from card.models.files.gguf import weights as gguf_weights
from card.models.files.gguf.header import read_header
from card.models.files.mapped_weights import MappedWeights
from card.models.loading import load_decoder
from card.models.own import exact_decoder, exact_layers, layer_tables
from card.models.own.decoder_model import DecoderModel
from card.models.own.exact_layers import check_numbers
from card.models.own.layers import Weight
from card.models.protocol import Extension
from card.models.runners import plain_runner
from tests.examples import EXAMPLES
from tests.gguf_files import KINDS as MADE
from tests.gguf_files import write_gguf

REASON = why_not_int8()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
# Biases, sinks, routers with and without biases, the delta rule, a convolution, numbers of tokens for each layer.
KINDS = ("llama, biases", "gpt_oss", "glm4_moe", "qwen3_5_moe", "lfm2", "gemma4, own inputs", "ernie4_5_moe")
KINDS += ("gemma4, experts", "olmo2")
assert set(KINDS) <= set(MADE)
DTYPES = ("auto", "int8")
CASES = [  # `make test` takes each kind in one dtype
    pytest.param(kind, dtype, marks=() if idx % len(DTYPES) == place else pytest.mark.slow)
    for idx, kind in enumerate(KINDS)
    for place, dtype in enumerate(DTYPES)
]
TEXT = [3 + 7 * i * i % 90 for i in range(24)]
READ_LATER = ("model.embed_tokens.weight", "model.embed_tokens_per_layer.weight")  # where they are stored, row by row


def changed(model: DecoderModel, name: str, value: float) -> DecoderModel:
    """Return a model with a number of one weight replaced, in the row of the text's first token if it is of tokens."""
    weights: dict[str, Array] = dict(model.weights)  # type: ignore[arg-type]
    weights[name] = weights[name].copy()
    weights[name][(TEXT[0] if name in READ_LATER else 0,) + (-1,) * (weights[name].ndim - 1)] = value
    made = DecoderModel(model.architecture, model.config, model.generation_config, weights)
    made.computes_int8 = model.computes_int8
    return made


def logits_of(model: DecoderModel) -> Array:
    runner = plain_runner(model, max_model_len=64)
    (logits,) = runner.forward([Extension.of_text(runner.open(), TEXT, first_logits=0)])
    return np.array(logits)


def packed_names(model: DecoderModel) -> Iterator[str]:
    for name, _ in model.weights:
        if name not in READ_LATER or (name == READ_LATER[0] and model.config.tie_word_embeddings):
            yield name


def of_each_kind(names: Iterable[str]) -> list[str]:
    """Return the last one of names that differ in numbers alone, those of layers; `make test-slow` takes them all."""
    known = list(names)
    return known if EXAMPLES == "new" else [*{re.sub(r"\d+", "", name): name for name in known}.values()]


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: tuple[ModuleType, ...] = (exact_decoder, layer_tables)
    for module in modules:
        monkeypatch.setattr(module, "check_numbers", lambda model, weights: None)


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_a_model_with_a_weight_that_is_no_number_is_refused_by_the_name_of_the_weight(
    folders: Callable[[str], Path], kind: str, dtype: str
) -> None:
    model = load_decoder(folders(kind), dtype=dtype)
    assert type(model) is DecoderModel
    for name in of_each_kind(packed_names(model)):
        with pytest.raises(ModelError, match=f"{name} holds NaN") as refused:
            plain_runner(changed(model, name, float("nan")), max_model_len=64)
        assert str(folders(kind)) in str(refused.value)


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_no_pass_makes_numbers_of_what_is_none(
    folders: Callable[[str], Path], unchecked: None, kind: str, dtype: str
) -> None:
    model = load_decoder(folders(kind), dtype=dtype)
    assert type(model) is DecoderModel
    clean = logits_of(model)
    assert np.isfinite(clean).all()
    for name in of_each_kind(name for name, _ in model.weights):
        found = logits_of(changed(model, name, float("nan")))
        assert (np.isnan(found) | (found == clean)).all(), name
        assert np.isnan(found).any() or ".experts." in name, name  # no row of the text may choose that expert


@pytest.mark.parametrize("name", READ_LATER)
def test_a_table_that_passes_read_row_by_row_is_looked_at_once_for_each_state_of_its_file(
    folders: Callable[[str], Path], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = tmp_path / "model", str(tmp_path / "cache")
    shutil.copytree(folders("llama, biases" if name == READ_LATER[0] else "gemma4, own inputs"), folder)
    file, looked = folder / "model.safetensors", list[str]()
    weights = {one: array.copy() for one, array in MappedWeights(file).arrays.items()}

    def saved(value: float) -> DecoderModel:
        weights[name][TEXT[0], -1] = value
        safetensors.numpy.save_file(weights, file, {"format": "pt"})
        return load()

    def load() -> DecoderModel:
        looked.clear()
        model = load_decoder(folder, cache_dir=cache)
        assert type(model) is DecoderModel
        return model

    def look(model: DecoderModel, tables: Iterable[tuple[str, Weight]]) -> None:
        for table in tables:
            looked.append(table[0])
            check_numbers(model, [table])

    monkeypatch.setattr(exact_layers, "check_numbers", look)
    with pytest.raises(ModelError, match=f"{re.escape(str(folder))}: its weight {name} holds NaN"):
        saved(float("nan"))
    with pytest.raises(ModelError, match="holds NaN"):
        load()
    saved(1.0)
    assert looked == [name], "a file that was mended is looked at"
    load()
    assert looked == [], "and then no more"
    saved(2.0)
    assert looked == [name]


def damaged_file(folder: Path, file: Path, kind: Kind) -> Path:
    """Write a GGUF file of a folder whose embeddings hold NaN."""
    write_gguf(folder, file, kind=kind)
    place = read_header(file).tensors["token_embd.weight"]
    content = bytearray(file.read_bytes())
    num_bytes = {Kind.F32: 4}.get(kind, 2)  # of a block of Q8_0 the scale
    content[place.offset : place.offset + num_bytes] = b"\xff" * (num_bytes - 1) + b"\x7f"
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_gguf_file_with_a_number_that_is_none_in_its_embeddings_is_refused_by_the_name_of_the_tensor(
    folders: Callable[[str], Path], kind: Kind, dtype: str, tmp_path: Path
) -> None:
    file = damaged_file(folders("llama, biases"), tmp_path / "model.gguf", kind)
    for cache in ("", str(tmp_path / "cache")):
        with pytest.raises(ModelError, match=re.escape(f"{file} cannot be read: token_embd.weight")):
            load_decoder(file, dtype=dtype, cache_dir=cache)


def test_weights_that_an_earlier_version_kept_without_a_look_are_converted_anew(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = damaged_file(folders("llama, biases"), tmp_path / "model.gguf", Kind.F16), str(tmp_path / "cache")
    with monkeypatch.context() as earlier:
        earlier.setattr(gguf_weights, "has_nan", lambda numbers: False)
        load_decoder(file, dtype="float32", cache_dir=cache)
    for entry in list(Path(cache, "gguf").iterdir()):
        entry.rename(entry.with_name(re.sub(r"-v\d+-", "-v5-", entry.name)))  # the last format without a look
    with pytest.raises(ModelError, match=re.escape(f"{file} cannot be read: token_embd.weight holds NaN")):
        load_decoder(file, dtype="float32", cache_dir=cache)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, "bfloat16"])
def test_a_number_that_is_none_is_found_whatever_its_sign_and_its_bits(dtype: object) -> None:
    wanted = np.dtype(dtype)  # type: ignore[call-overload]
    numbers = np.array([-np.inf, -1.0, 0.0, 1e-4, np.inf] * 5, np.float32).astype(wanted)
    assert not has_nan(numbers) and not has_nan(numbers[:0]) and not has_nan(numbers[0])
    infinity, size = int(numbers[4].view(f"u{wanted.itemsize}")), 8 * wanted.itemsize
    for bits in (infinity + 1, infinity | infinity >> 1, (1 << size - 1) - 1):
        for sign in (0, 1 << size - 1):
            wrong = numbers.copy()
            wrong.view(f"u{wanted.itemsize}")[7] = bits | sign
            assert has_nan(wrong) and has_nan(wrong.reshape(5, 5).T) and has_nan(wrong[7])
            assert has_nan(np.concatenate([np.resize(numbers, 2**18), wrong])), "behind what a core's cache holds"
