"""Files whose tensors have blocks of many formats run as they are, each tensor with its own."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from card.errors import ModelError
from card.kernels.formats import BLOCK_FORMATS, BlockFormat
from card.kernels.int8_linear import why_not_int8
from card.machine.threads import integer_passes_on
from card.models.files.gguf import model as gguf_model
from card.models.files.gguf.model import open_gguf
from card.models.loading import load_decoder
from card.models.own import exact_decoder
from card.models.own.decoder_model import DecoderModel, is_int8
from card.models.protocol import Extension
from card.models.runners import how_it_runs, plain_runner
from card.models.warn_once import warn_once
from tests.blocks import random_blocks
from tests.gguf_files import demo_tokenizer, save_model, write_gguf

REASON = why_not_int8()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
WIDTH = 256
SIZES = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "head_dim": 32, "num_hidden_layers": 2}
TEXT = list(range(3, 40))
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def _scaled(kind: Kind, num_out: int, num_in: int, seed: int) -> np.ndarray:
    """Return random blocks whose numbers are about as large as those of a tiny model's weights."""
    form = BLOCK_FORMATS[kind]
    raw = random_blocks(form, num_out, num_in, seed)
    if form.shape.scale == "exponent":  # such blocks have numbers of many sizes already, around 2^-6
        blocks = raw.reshape(num_out, -1, form.num_bytes)
        blocks[..., form.halves] = np.random.default_rng(seed).integers(122, 126, (*blocks.shape[:2], 1))
        return raw
    factor = np.float16(0.06 / dequantize(raw, kind).std())
    blocks = raw.reshape(num_out, -1, form.num_bytes)
    halves = np.ascontiguousarray(blocks[..., form.halves]).view(np.float16) * factor
    blocks[..., form.halves] = halves.view(np.uint8)
    return raw


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a matrix of each format, which is a model of two layers."""
    folder = tmp_path_factory.mktemp("mixture")
    save_model(folder, "qwen3", demo_tokenizer(), sizes=SIZES)
    plain = write_gguf(folder, folder / "plain.gguf")
    shapes = {one.place.name: one.place.shape for one in open_gguf(plain).weights}
    places = [f"blk.{layer}.{name}.weight" for layer in range(2) for name in _MATRICES]
    kinds = [Kind(type_id) for type_id in BLOCK_FORMATS]
    chosen = [*kinds, *kinds[: len(places) - len(kinds)]]
    assert set(chosen) == set(kinds)
    blocks = {
        place: (kind, _scaled(kind, *shapes[place], seed))
        for seed, (place, kind) in enumerate(zip(places, chosen, strict=True))
    }
    embeddings = {"token_embd.weight": (Kind.Q3_K, _scaled(Kind.Q3_K, *shapes["token_embd.weight"], 99))}
    return write_gguf(folder, folder / "mixture.gguf", kind=Kind.F16, blocks={**blocks, **embeddings})


# What llama.cpp's mixtures have where rows of an expert are no multiple of 256, and beside it.
EXPERT_SIZES = {**SIZES, "moe_intermediate_size": 96, "num_experts": 4, "num_hidden_layers": 4}
_OF_EXPERTS = {
    "ffn_gate_exps": (Kind.Q4_K, Kind.Q3_K, Kind.IQ4_XS, Kind.Q2_K),
    "ffn_up_exps": (Kind.Q4_K, Kind.IQ4_XS, Kind.Q5_K, Kind.Q3_K),
    "ffn_down_exps": (Kind.Q5_0, Kind.Q8_0, Kind.IQ4_NL, Kind.Q5_1),
    "attn_v": (Kind.Q6_K, Kind.Q8_0, Kind.Q6_K, Kind.Q5_0),
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file whose layers have experts, gate, up and down of them in blocks of different formats."""
    folder = tmp_path_factory.mktemp("experts")
    save_model(folder, "qwen3_moe", demo_tokenizer(), sizes=EXPERT_SIZES)
    blocks: dict[str, tuple[Kind, np.ndarray]] = {}
    for seed, (name, kinds) in enumerate(_OF_EXPERTS.items()):
        for layer, kind in enumerate(kinds):
            if name == "attn_v":
                blocks[f"blk.{layer}.{name}.weight"] = kind, _scaled(kind, 64, WIDTH, seed + 10 * layer)
                continue
            rows, inputs = (WIDTH, 96) if "down" in name else (96, WIDTH)
            each = [_scaled(kind, rows, inputs, seed + 10 * layer + 100 * expert) for expert in range(4)]
            blocks[f"blk.{layer}.{name}.weight"] = kind, np.stack(each)
    return write_gguf(folder, folder / "experts.gguf", kind=Kind.Q8_0, blocks=blocks)


def _logits(model: DecoderModel) -> np.ndarray:
    runner = plain_runner(model, max_model_len=64)
    return np.asarray(runner.forward([Extension(runner.open(), TEXT, range(-1, len(TEXT) - 1))])[0])


@pytest.mark.parametrize("name", ["mixture", "experts"])
def test_a_mixture_runs_as_it_is_and_is_the_model_of_the_file(request, name, tmp_path, monkeypatch) -> None:
    mixture = request.getfixturevalue(name)
    unpacked = load_decoder(mixture, dtype="float32", cache_dir="")

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was unpacked")

    with monkeypatch.context() as loading:
        loading.setattr(gguf_model, "are_equal", lambda *_: False)  # looks at the first rows of head and embeddings
        loading.setattr(BlockFormat, "numbers", refuse)
        own = load_decoder(mixture, cache_dir=str(tmp_path))
    types = {one.weight.type_id for layer in own.layers for one in layer.linears.values() if one.has_blocks}
    stated = {Kind.Q8_0, *(kind for kinds in _OF_EXPERTS.values() for kind in kinds)}
    assert own.has_blocks and types == (set(BLOCK_FORMATS) if name == "mixture" else stated)
    chosen = ", 2 of 4 experts in 4 layers" if name == "experts" else ""
    path = f"own pass in the blocks of the file{chosen}; trees of candidates"
    assert how_it_runs(plain_runner(own, max_model_len=64)) == path
    ours, theirs = _logits(own), _logits(unpacked)
    assert np.linalg.norm(ours - theirs) < 0.08 * np.linalg.norm(theirs)
    assert np.array_equal(_logits(load_decoder(mixture, cache_dir="")), ours)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", ["mixture", "experts"])
def test_a_long_prompt_has_the_logits_of_its_pieces(request, name, num_threads) -> None:
    """Read at once, each thread has so many tiles that weights are expanded for them; pieces have one."""
    runner = plain_runner(load_decoder(request.getfixturevalue(name), cache_dir=""), max_model_len=512)
    text = [3 + idx * idx % 90 for idx in range(330)]
    with integer_passes_on(num_threads):
        (at_once,) = runner.forward([Extension.of_text(runner.open(), text, 0, first_logits=0)])
        slot, pieces = runner.open(), []
        for done in range(0, len(text), 16):
            step = Extension.of_text(slot, text[: done + 16], done, first_logits=done)
            pieces.append(runner.forward([step])[0])
    assert np.array_equal(np.concatenate(pieces), at_once)


def test_expanded_weights_stay_in_the_memory_of_their_thread(tmp_path, monkeypatch) -> None:
    """The model is so wide that they need more of it than attention does; what lies behind it must stay as it is."""
    save_model(tmp_path, "qwen3", demo_tokenizer(), sizes={**SIZES, "hidden_size": 2048, "num_hidden_layers": 1})
    file = write_gguf(tmp_path, tmp_path / "wide.gguf", kind=Kind.Q4_0)
    made, guard = [], 2**20

    def guarded(shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
        if dtype != np.int8:
            return np.empty(shape, dtype)
        buffer = np.full(math.prod(shape) + guard, 0x5A, np.int8)
        made.append(buffer)
        return buffer[:-guard].reshape(shape)

    monkeypatch.setattr(exact_decoder, "empty", guarded)
    runner = plain_runner(load_decoder(file, cache_dir=""), max_model_len=512)
    with integer_passes_on(1):
        runner.forward([Extension.of_text(runner.open(), [3 + idx % 90 for idx in range(330)])])
    assert made and all((buffer[-guard:] == 0x5A).all() for buffer in made)


@pytest.mark.parametrize(("kind", "said"), [(Kind.IQ3_S, "IQ3_S"), (Kind.IQ2_XXS, "IQ2_XXS")])
def test_blocks_without_a_product_are_named_and_run_in_integers_of_8_bits(tmp_path, caplog, kind, said) -> None:
    save_model(tmp_path, "qwen3", demo_tokenizer(), sizes=SIZES)
    inputs, num_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (2 * WIDTH, WIDTH // inputs, num_bytes), dtype=np.uint8)
    raw[..., :2] = np.full((*raw.shape[:2], 1), 0.002, np.float16).view(np.uint8)
    blocks = {"blk.1.ffn_up.weight": (kind, raw.reshape(2 * WIDTH, -1))}
    file = write_gguf(tmp_path, tmp_path / "model.gguf", kind=Kind.Q8_0, blocks=blocks)
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        own = load_decoder(file, cache_dir="")
    (line,) = caplog.messages
    assert line.startswith(f"{file} cannot run with its own blocks, as some of its tensors are {said}, which have no")
    assert not own.has_blocks and is_int8(own)
    assert how_it_runs(plain_runner(own, max_model_len=64)).startswith("own pass in 8-bit integers")
    ours, theirs = _logits(own), _logits(load_decoder(file, dtype="float32", cache_dir=""))
    assert np.linalg.norm(ours - theirs) < 0.15 * np.linalg.norm(theirs)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_an_exponent_that_is_no_number_is_one_line(mixture, tmp_path, dtype) -> None:
    raw = bytearray(mixture.read_bytes())
    place = next(one.place for one in open_gguf(mixture).weights if one.place.type_id == Kind.MXFP4)
    raw[place.offset + 17 * 40] = 255
    (tmp_path / "model.gguf").write_bytes(raw)
    with pytest.raises(
        ModelError, match=rf"{place.name}: a scale in it is no finite number; copy or download .*again$"
    ):
        load_decoder(tmp_path / "model.gguf", dtype=dtype, cache_dir="")


def test_embeddings_are_checked_as_well(mixture, tmp_path) -> None:
    raw = bytearray(mixture.read_bytes())
    place = next(one.place for one in open_gguf(mixture).weights if one.place.name == "token_embd.weight")
    raw[place.offset + 108 : place.offset + 110] = np.array([np.inf], np.float16).tobytes()
    (tmp_path / "model.gguf").write_bytes(raw)
    with pytest.raises(ModelError, match=r"token_embd.weight: a scale in it is no finite number"):
        load_decoder(tmp_path / "model.gguf", cache_dir="")
