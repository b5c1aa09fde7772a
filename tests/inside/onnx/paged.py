"""A model that ONNX Runtime GenAI's engine batches on a CPU: packed rows, paged keys and values, stock operators.

The engine verifies drafts with paged attention alone. `onnxruntime_genai.models.builder` writes that for CUDA and
WebGPU only, as ONNX Runtime has no kernel of it for CPUs. This writes the same inputs and outputs with operators that
run anywhere. It gathers whole pages for every token, so that it is right and slow.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

BLOCK_SIZE = 16
END_ID = 0  # of a model that names none: the engine wants one
_CACHE = "past_key_values.{}.{}"
_PRESENT = "present.{}.{}"


class _Graph:
    """Collects nodes and constants; every method returns the name of what it made."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def add(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def whole(self, name: str) -> str:
        return self.add("Cast", name, to=TensorProto.INT64)


def export_paged(model: LlamaForCausalLM, folder: Path, *, num_blocks: int = 256) -> None:
    """Write a Llama as ``model.onnx`` and ``genai_config.json``, in float32.

    Args:
        num_blocks: pages of `BLOCK_SIZE` tokens for all requests together.
    """
    config = model.config
    weights = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    graph = _Graph()
    where = _Places(graph, num_blocks)
    x = graph.add("Gather", graph.constant(weights["model.embed_tokens.weight"]), "input_ids", axis=0)
    tables = _rotary(graph, config, where.position)
    for layer in range(config.num_hidden_layers):
        x = _layer(graph, config, weights, layer, x, where, tables)
    x = _norm(graph, x, weights["model.norm.weight"], config.rms_norm_eps)
    graph.add("MatMul", x, graph.constant(weights["lm_head.weight"].T), output="logits")
    folder.mkdir(parents=True, exist_ok=True)
    _save(graph, config, folder, num_blocks)
    (folder / "genai_config.json").write_text(json.dumps(_genai_config(config, num_blocks)))


class _Places:
    """Where each packed token stands in its text and in the cache, and which places it may look at."""

    def __init__(self, graph: _Graph, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        ends = graph.whole("cumulative_sequence_lengths")
        index = graph.add("Range", _scalar(graph, 0), self._num_tokens(graph), _scalar(graph, 1))
        column = graph.add("Unsqueeze", index, graph.ints(1))
        passed = graph.whole(graph.add("LessOrEqual", ends, column))
        self.row = graph.add("Sub", graph.add("ReduceSum", passed, graph.ints(1), keepdims=0), graph.ints(1))
        begin = graph.add("Gather", ends, self.row, axis=0)
        past = graph.add("Gather", graph.whole("past_sequence_lengths"), self.row, axis=0)
        self.position = graph.add("Add", past, graph.add("Sub", index, begin))
        pages = graph.add("Max", graph.whole("block_table"), graph.ints(0))
        self.pages = graph.add("Gather", pages, self.row, axis=0)  # [T, pages of a text]
        block = graph.ints(BLOCK_SIZE)
        page_idx = graph.add("Unsqueeze", graph.add("Div", self.position, block), graph.ints(1))
        page = graph.add("Squeeze", graph.add("GatherElements", self.pages, page_idx, axis=1), graph.ints(1))
        slot = graph.add("Add", graph.add("Mul", page, block), graph.add("Mod", self.position, block))
        self.slot = graph.add("Unsqueeze", slot, graph.ints(1))
        num_places = graph.add("Mul", graph.add("Gather", graph.add("Shape", self.pages), _scalar(graph, 1)), block)
        places = graph.add("Range", _scalar(graph, 0), graph.add("Squeeze", num_places), _scalar(graph, 1))
        self.is_seen = graph.add("LessOrEqual", places, graph.add("Unsqueeze", self.position, graph.ints(1)))

    def _num_tokens(self, graph: _Graph) -> str:
        return graph.add("Squeeze", graph.add("Shape", "input_ids"))


def _scalar(graph: _Graph, value: int) -> str:
    return graph.constant(np.array(value, np.int64))


def _norm(graph: _Graph, x: str, weight: Any, epsilon: float) -> str:
    square = graph.add("ReduceMean", graph.add("Mul", x, x), graph.ints(-1))
    root = graph.add("Sqrt", graph.add("Add", square, graph.constant(np.float32(epsilon))))
    return graph.add("Mul", graph.add("Div", x, root), graph.constant(weight))


def _rotary(graph: _Graph, config: Any, position: str) -> tuple[str, str]:
    """Return cosine and sine of each token, [T, 1, D]."""
    half = np.arange(0, config.head_dim, 2) / config.head_dim
    angles = np.outer(np.arange(config.max_position_embeddings), config.rope_parameters["rope_theta"] ** -half)
    angles = np.concatenate([angles, angles], axis=1).astype(np.float32)[:, None]
    cosine = graph.add("Gather", graph.constant(np.cos(angles)), position, axis=0)
    return cosine, graph.add("Gather", graph.constant(np.sin(angles)), position, axis=0)


def _rotated(graph: _Graph, x: str, size: int, tables: tuple[str, str]) -> str:
    low = graph.add("Slice", x, graph.ints(0), graph.ints(size // 2), graph.ints(-1))
    high = graph.add("Slice", x, graph.ints(size // 2), graph.ints(size), graph.ints(-1))
    turned = graph.add("Concat", graph.add("Neg", high), low, axis=-1)
    return graph.add("Add", graph.add("Mul", x, tables[0]), graph.add("Mul", turned, tables[1]))


def _layer(
    graph: _Graph, config: Any, weights: dict[str, Any], layer: int, x: str, where: _Places, tables: tuple[str, str]
) -> str:
    def dense(name: str, of: str) -> str:
        return graph.add("MatMul", of, graph.constant(weights[f"model.layers.{layer}.{name}.weight"].T))

    def norm(name: str, of: str) -> str:
        return _norm(graph, of, weights[f"model.layers.{layer}.{name}.weight"], config.rms_norm_eps)

    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    y = norm("input_layernorm", x)
    query, key, value = (
        graph.add("Reshape", dense(f"self_attn.{name}_proj", y), graph.ints(-1, num, size))
        for name, num in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    keys = _stored(graph, where, layer, "key", _rotated(graph, key, size, tables), (kv_heads, size))
    values = _stored(graph, where, layer, "value", value, (kv_heads, size))  # [T, H, S, D]
    query = _rotated(graph, query, size, tables)
    query = graph.add("Reshape", query, graph.ints(-1, kv_heads, heads // kv_heads, size))
    scores = graph.add("MatMul", query, graph.add("Transpose", keys, perm=[0, 1, 3, 2]))
    scores = graph.add("Mul", scores, graph.constant(np.float32(size**-0.5)))
    seen = graph.add("Unsqueeze", where.is_seen, graph.ints(1, 2))
    probs = graph.add("Softmax", graph.add("Where", seen, scores, graph.constant(np.float32(-1e9))), axis=-1)
    mixed = graph.add("Reshape", graph.add("MatMul", probs, values), graph.ints(-1, heads * size))
    x = graph.add("Add", x, dense("self_attn.o_proj", mixed))
    y = norm("post_attention_layernorm", x)
    gate = dense("mlp.gate_proj", y)
    gate = graph.add("Mul", gate, graph.add("Sigmoid", gate))
    return graph.add("Add", x, dense("mlp.down_proj", graph.add("Mul", gate, dense("mlp.up_proj", y))))


def _stored(graph: _Graph, where: _Places, layer: int, name: str, new: str, shape: tuple[int, int]) -> str:
    """Write the new tokens into their pages, and return those of each token's text, [T, H, S, D]."""
    flat = graph.add("Reshape", _CACHE.format(layer, name), graph.ints(where.num_blocks * BLOCK_SIZE, *shape))
    flat = graph.add("ScatterND", flat, where.slot, new)
    kept = graph.add(
        "Reshape",
        flat,
        graph.ints(where.num_blocks, BLOCK_SIZE, *shape),
        output=_PRESENT.format(layer, name),
    )
    pages = graph.add("Gather", kept, where.pages, axis=0)  # [T, pages, BLOCK_SIZE, H, D]
    texts = graph.add("Reshape", pages, graph.ints(0, -1, *shape))
    seen = graph.add("Unsqueeze", where.is_seen, graph.ints(2, 3))
    texts = graph.add("Where", seen, texts, graph.constant(np.float32(0.0)))  # nobody has written beyond the text
    return graph.add("Transpose", texts, perm=[0, 2, 1, 3])


def _save(graph: _Graph, config: Any, folder: Path, num_blocks: int) -> None:
    cache = [num_blocks, BLOCK_SIZE, config.num_key_value_heads, config.head_dim]
    layers = [(layer, name) for layer in range(config.num_hidden_layers) for name in ("key", "value")]
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["num_tokens"]),
        helper.make_tensor_value_info("cumulative_sequence_lengths", TensorProto.INT32, ["num_ends"]),
        helper.make_tensor_value_info("past_sequence_lengths", TensorProto.INT32, ["num_rows"]),
        helper.make_tensor_value_info("block_table", TensorProto.INT32, ["num_rows", "num_pages"]),
        *(helper.make_tensor_value_info(_CACHE.format(*one), TensorProto.FLOAT, cache) for one in layers),
    ]
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["num_tokens", config.vocab_size]),
        *(helper.make_tensor_value_info(_PRESENT.format(*one), TensorProto.FLOAT, cache) for one in layers),
    ]
    made = helper.make_graph(graph.nodes, "paged_llama", inputs, outputs, initializer=graph.constants)
    opsets = [helper.make_opsetid("", 18)]
    onnx.save_model(helper.make_model(made, opset_imports=opsets, ir_version=9), folder / "model.onnx")


def _genai_config(config: Any, num_blocks: int) -> dict[str, Any]:
    decoder = {
        "session_options": {"intra_op_num_threads": 1, "provider_options": []},
        "filename": "model.onnx",
        "head_size": config.head_dim,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "inputs": {
            **{name: name for name in ("input_ids", "block_table", "cumulative_sequence_lengths")},
            "past_sequence_lengths": "past_sequence_lengths",
            "past_key_names": _CACHE.format("%d", "key"),
            "past_value_names": _CACHE.format("%d", "value"),
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": _PRESENT.format("%d", "key"),
            "present_value_names": _PRESENT.format("%d", "value"),
        },
    }
    return {
        "model": {
            "type": "llama",
            "vocab_size": config.vocab_size,
            "context_length": config.max_position_embeddings,
            "eos_token_id": config.eos_token_id or END_ID,
            "pad_token_id": config.pad_token_id or 0,
            "decoder": decoder,
        },
        "search": {"max_length": config.max_position_embeddings, "do_sample": False},
        "engine": {"dynamic_batching": {"block_size": BLOCK_SIZE, "num_blocks": num_blocks, "max_batch_size": 8}},
    }
