"""Models with random weights and real widths, as GGUF files: how fast a family runs, without a download.

    python benchmarks/peers/structure_models.py --tokenizer qwen-0.5b.gguf --into FOLDER [NAME ...]

Blocks are random bits with a scale such that weights have a deviation of about 0.02. The tokenizer is that of another
file, cut or padded to the size of the vocabulary. Texts of such models say nothing; feed them set token ids. Those
named -mtp have a block that drafts, for `card bench --draft mtp --force-acceptance 0.8`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

_DEVIATION = 0.02
_UNUSED = 5  # the type of a token that stands for nothing
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Facts = Mapping[str, Any]
_Model = tuple[str, _Facts, Iterator[tuple[str, tuple[int, ...], Kind]]]


def _half(value: float) -> _Bytes:
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)


def _q4_0(random: np.random.Generator, num_blocks: int) -> _Bytes:
    blocks = random.integers(0, 256, (num_blocks, 18), np.uint8)
    blocks[:, :2] = _half(_DEVIATION / 4.6)
    return blocks


def _q8_0(random: np.random.Generator, num_blocks: int) -> _Bytes:
    blocks = random.integers(-127, 128, (num_blocks, 34), np.int8).view(np.uint8)  # quantisers never write -128
    blocks[:, :2] = _half(_DEVIATION / 74)
    return blocks


def _q6_k(random: np.random.Generator, num_blocks: int) -> _Bytes:
    blocks = random.integers(0, 256, (num_blocks, 210), np.uint8)
    blocks[:, 192:208] = random.integers(24, 40, (num_blocks, 16), np.uint8)  # the scales of sixteen parts
    blocks[:, 208:] = _half(_DEVIATION / (18.5 * 32))
    return blocks


def _mxfp4(random: np.random.Generator, num_blocks: int) -> _Bytes:
    blocks = random.integers(0, 256, (num_blocks, 17), np.uint8)
    blocks[:, 0] = 119  # 2^-9 times numbers of up to 12
    return blocks


_BLOCKS: Mapping[Kind, Callable[[np.random.Generator, int], _Bytes]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q8_0: _q8_0,
    Kind.Q6_K: _q6_k,
    Kind.MXFP4: _mxfp4,
}


def _moe(layers: int = 24) -> _Model:
    """Return a model of Qwen3's experts: 64, of which each token takes 4."""
    facts = {
        "block_count": layers, "context_length": 8192, "embedding_length": 1024, "feed_forward_length": 3072,
        "attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 128,
        "attention.value_length": 128, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
        "expert_count": 64, "expert_used_count": 4, "expert_feed_forward_length": 256,
    }  # fmt: skip

    def tensors() -> Iterator[tuple[str, tuple[int, ...], Kind]]:
        yield "token_embd.weight", (151936, 1024), Kind.Q6_K
        yield "output_norm.weight", (1024,), Kind.F32
        for begin in (f"blk.{layer}." for layer in range(layers)):
            yield from _attention(begin, 1024, 8, 2, 128, norms=True)
            yield f"{begin}ffn_norm.weight", (1024,), Kind.F32
            yield f"{begin}ffn_gate_inp.weight", (64, 1024), Kind.F32
            yield f"{begin}ffn_gate_exps.weight", (64, 256, 1024), Kind.Q4_0
            yield f"{begin}ffn_up_exps.weight", (64, 256, 1024), Kind.Q4_0
            yield f"{begin}ffn_down_exps.weight", (64, 1024, 256), Kind.Q4_0

    return "qwen3moe", facts, tensors()


def _oss(layers: int = 2) -> _Model:
    """Return a model of gpt-oss's widths with 2 layers and a small vocabulary."""
    width = 2880
    facts = {
        "block_count": layers, "context_length": 8192, "embedding_length": width, "feed_forward_length": width,
        "attention.head_count": 64, "attention.head_count_kv": 8, "attention.key_length": 64,
        "attention.value_length": 64, "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 128,
        "rope.freq_base": 150000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096, "expert_count": 32, "expert_used_count": 4,
        "expert_feed_forward_length": width,
    }  # fmt: skip

    def tensors() -> Iterator[tuple[str, tuple[int, ...], Kind]]:
        yield "token_embd.weight", (32064, width), Kind.Q8_0
        yield "output.weight", (32064, width), Kind.Q8_0
        yield "output_norm.weight", (width,), Kind.F32
        for begin in (f"blk.{layer}." for layer in range(layers)):
            yield from _attention(begin, width, 64, 8, 64, kind=Kind.Q8_0, has_biases=True)
            yield f"{begin}attn_sinks.weight", (64,), Kind.F32
            yield f"{begin}post_attention_norm.weight", (width,), Kind.F32
            yield f"{begin}ffn_gate_inp.weight", (32, width), Kind.F32
            yield f"{begin}ffn_gate_inp.bias", (32,), Kind.F32
            for part in ("gate", "up", "down"):
                yield f"{begin}ffn_{part}_exps.weight", (32, width, width), Kind.MXFP4
                yield f"{begin}ffn_{part}_exps.bias", (32, width), Kind.F32

    return "gpt-oss", facts, tensors()


def _lfm(layers: int = 16) -> _Model:
    """Return a model of LFM2-350M's shape: ten short convolutions and six layers of attention."""
    with_attention = (2, 5, 8, 10, 12, 14)
    facts = {
        "block_count": layers, "context_length": 8192, "embedding_length": 1024, "feed_forward_length": 4608,
        "attention.head_count": 16, "attention.head_count_kv": [8 * (one in with_attention) for one in range(layers)],
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e6, "shortconv.l_cache": 3,
    }  # fmt: skip

    def tensors() -> Iterator[tuple[str, tuple[int, ...], Kind]]:
        yield "token_embd.weight", (65536, 1024), Kind.Q6_K
        yield "token_embd_norm.weight", (1024,), Kind.F32
        for layer in range(layers):
            begin = f"blk.{layer}."
            if layer in with_attention:
                yield from _attention(begin, 1024, 16, 8, 64, norms=True)
            else:
                yield f"{begin}attn_norm.weight", (1024,), Kind.F32
                yield f"{begin}shortconv.in_proj.weight", (3072, 1024), Kind.Q4_0
                yield f"{begin}shortconv.conv.weight", (1024, 3), Kind.F32
                yield f"{begin}shortconv.out_proj.weight", (1024, 1024), Kind.Q4_0
            yield from _mlp(begin, 1024, 4608)

    return "lfm2", facts, tensors()


def _q35(layers: int = 24) -> _Model:
    """Return a model of Qwen3.5-0.8B's shape: three layers of the gated delta rule, then one of attention."""
    width, heads, size = 1024, 16, 128
    inner = heads * size
    facts = {
        "block_count": layers, "context_length": 8192, "embedding_length": width, "feed_forward_length": 3584,
        "attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 256,
        "attention.value_length": 256, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e7,
        "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0], "full_attention_interval": 4,
        "ssm.conv_kernel": 4, "ssm.state_size": size, "ssm.group_count": heads, "ssm.time_step_rank": heads,
        "ssm.inner_size": inner,
    }  # fmt: skip

    def tensors() -> Iterator[tuple[str, tuple[int, ...], Kind]]:
        yield "token_embd.weight", (248320, width), Kind.Q6_K
        yield "output_norm.weight", (width,), Kind.F32
        for layer in range(layers):
            begin = f"blk.{layer}."
            if layer % 4 == 3:
                yield from _attention(begin, width, 8, 2, 256, norms=True, has_gate=True)
            else:
                yield f"{begin}attn_norm.weight", (width,), Kind.F32
                yield f"{begin}attn_qkv.weight", (3 * inner, width), Kind.Q4_0
                yield f"{begin}attn_gate.weight", (inner, width), Kind.Q4_0
                yield f"{begin}ssm_conv1d.weight", (3 * inner, 4), Kind.F32
                yield f"{begin}ssm_dt.bias", (heads,), Kind.F32
                yield f"{begin}ssm_a", (heads,), Kind.F32
                yield f"{begin}ssm_beta.weight", (heads, width), Kind.Q4_0
                yield f"{begin}ssm_alpha.weight", (heads, width), Kind.Q4_0
                yield f"{begin}ssm_norm.weight", (size,), Kind.F32
                yield f"{begin}ssm_out.weight", (width, inner), Kind.Q4_0
            yield from _mlp(begin, width, 3584, norm="post_attention_norm")

    return "qwen35", facts, tensors()


def _with_block(model: _Model) -> _Model:
    """Return the model with a block that drafts behind its last layer, of the same kind as that one."""
    architecture, facts, tensors = model
    listed, count = list(tensors), int(facts["block_count"])
    last, begin, width = f"blk.{count - 1}.", f"blk.{count}.", int(facts["embedding_length"])
    block = [(name.replace(last, begin, 1), shape, kind) for name, shape, kind in listed if name.startswith(last)]
    block.append((f"{begin}nextn.eh_proj.weight", (width, 2 * width), Kind.Q8_0))  # a coarser one costs acceptance
    block += [(f"{begin}nextn.{name}.weight", (width,), Kind.F32) for name in ("enorm", "hnorm", "shared_head_norm")]
    return architecture, {**facts, "block_count": count + 1, "nextn_predict_layers": 1}, iter([*listed, *block])


def _draft(vocab: int, layers: int = 4) -> _Model:
    """Return a small dense model, which drafts for the others."""
    facts = {
        "block_count": layers, "context_length": 8192, "embedding_length": 256, "feed_forward_length": 768,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64,
        "attention.value_length": 64, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
    }  # fmt: skip

    def tensors() -> Iterator[tuple[str, tuple[int, ...], Kind]]:
        yield "token_embd.weight", (vocab, 256), Kind.Q4_0
        yield "output_norm.weight", (256,), Kind.F32
        for begin in (f"blk.{layer}." for layer in range(layers)):
            yield from _attention(begin, 256, 4, 2, 64, norms=True)
            yield from _mlp(begin, 256, 768)

    return "qwen3", facts, tensors()


def _attention(
    begin: str, width: int, heads: int, kv_heads: int, size: int, *, kind: Kind = Kind.Q4_0, norms: bool = False,
    has_biases: bool = False, has_gate: bool = False,
) -> Iterator[tuple[str, tuple[int, ...], Kind]]:  # fmt: skip
    yield f"{begin}attn_norm.weight", (width,), Kind.F32
    rows = {"attn_q": (1 + has_gate) * heads * size, "attn_k": kv_heads * size, "attn_v": kv_heads * size}
    for name, count in rows.items():
        yield f"{begin}{name}.weight", (count, width), kind
    yield f"{begin}attn_output.weight", (width, heads * size), kind
    if has_biases:
        for name, count in {**rows, "attn_output": width}.items():
            yield f"{begin}{name}.bias", (count,), Kind.F32
    if norms:
        yield f"{begin}attn_q_norm.weight", (size,), Kind.F32
        yield f"{begin}attn_k_norm.weight", (size,), Kind.F32


def _mlp(begin: str, width: int, inner: int, *, norm: str = "ffn_norm") -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    yield f"{begin}{norm}.weight", (width,), Kind.F32
    yield f"{begin}ffn_gate.weight", (inner, width), Kind.Q4_0
    yield f"{begin}ffn_up.weight", (inner, width), Kind.Q4_0
    yield f"{begin}ffn_down.weight", (width, inner), Kind.Q4_0


_MODELS: Mapping[str, Callable[[], _Model]] = {
    "moe-1.4B": _moe,
    "oss-1.8B": _oss,
    "lfm-350M": _lfm,
    "q35-0.8B": _q35,
    "moe-1.4B-mtp": lambda: _with_block(_moe()),
    "oss-1.8B-mtp": lambda: _with_block(_oss()),
    "q35-0.8B-mtp": lambda: _with_block(_q35()),
    "draft-151936": lambda: _draft(151936),
    "draft-32064": lambda: _draft(32064),
    "draft-65536": lambda: _draft(65536),
    "draft-248320": lambda: _draft(248320),
}


def write_model(name: str, path: Path, tokenizer: gguf.GGUFReader) -> None:
    """Write a model. Raises: OSError."""
    architecture, facts, tensors = _MODELS[name]()
    writer = gguf.GGUFWriter(path, architecture, use_temp_file=False)
    for key, value in facts.items():
        _add(writer, f"{architecture}.{key}", value)
    listed, random = list(tensors), np.random.default_rng(0)
    _add_tokenizer(writer, tokenizer, listed[0][1][0])
    for tensor, shape, kind in listed:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        stored = np.dtype(np.float32) if kind == Kind.F32 else np.dtype(np.uint8)
        at_rest = shape if kind == Kind.F32 else (*shape[:-1], shape[-1] // block * size)
        writer.add_tensor_info(tensor, at_rest, stored, int(np.prod(at_rest)) * stored.itemsize, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, shape, kind in listed:
        writer.write_tensor_data(_values(tensor, shape, kind, random))
    writer.close()


def _values(name: str, shape: tuple[int, ...], kind: Kind, random: np.random.Generator) -> np.ndarray[Any, Any]:
    if kind == Kind.F32:
        if name.endswith("norm.weight"):
            return np.ones(shape, np.float32)
        noise = (_DEVIATION * random.standard_normal(shape)).astype(np.float32)
        return -1 - noise if name.endswith("ssm_a") else noise
    block, size = gguf.GGML_QUANT_SIZES[kind]
    num_blocks = int(np.prod(shape)) // block
    return _BLOCKS[kind](random, num_blocks).reshape(*shape[:-1], shape[-1] // block * size)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    (writer.add_array if isinstance(value, list) else kinds[type(value)])(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter, reader: gguf.GGUFReader, vocab: int) -> None:
    """Write the tokens of a file whose tokens are sorted by their merges, as many as there is room for."""
    fields = {key: one.contents() for key, one in reader.fields.items() if key.startswith("tokenizer.ggml.")}
    tokens, types, merges = (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "merges"))
    known = min(len(tokens), vocab)
    pads = [f"[PAD{idx}]" for idx in range(known, vocab)]
    held = {*tokens[:known]}
    writer.add_tokenizer_model(fields["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"])
    writer.add_token_list([*tokens[:known], *pads])
    writer.add_token_types([*types[:known], *[_UNUSED] * len(pads)])
    writer.add_token_merges([one for one in merges if one.replace(" ", "") in held])
    writer.add_eos_token_id(min(known - 1, fields["tokenizer.ggml.eos_token_id"]))


def main() -> None:
    """Write the models that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *_MODELS], help="default: all of them")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a GGUF file of Qwen's, whose tokens are used")
    parser.add_argument("--into", type=Path, required=True)
    args = parser.parse_args()
    args.into.mkdir(parents=True, exist_ok=True)
    tokenizer = gguf.GGUFReader(args.tokenizer)
    for name in args.names or _MODELS:
        write_model(name, args.into / f"{name}.gguf", tokenizer)
        print(args.into / f"{name}.gguf", flush=True)


if __name__ == "__main__":
    main()
