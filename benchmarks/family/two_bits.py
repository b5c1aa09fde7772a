"""Make a draft model that matches its target badly: every linear layer rounded to two bits a weight.

Each 32 neighbouring weights keep four levels at equal distances, chosen for the least squared error among ranges that
are cut at both ends. Embeddings, heads, norms and biases stay. A GGUF file keeps its header; its rounded weights are of
type Q4_1, whose 16 levels hold the four exactly. A folder keeps its other files.

    python benchmarks/family/two_bits.py qwen-0.5b.gguf qwen-0.5b-two-bits.gguf
    python benchmarks/family/two_bits.py demo-draft demo-draft-two-bits
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from card.models.demo import demo_folder

GROUP, LEVELS = 32, 4
CUTS = np.linspace(0.4, 1.0, 13)  # of the range of a group, tried in turn
ROWS_AT_ONCE = 4096
OWN_FIELDS = ("general.architecture",)  # the writer states them itself
Floats = npt.NDArray[np.float32]


def rounded(groups: Floats) -> tuple[Floats, Floats, npt.NDArray[np.uint8]]:
    """Return step and least level [N, 1] float16 values, and the codes [N, 32] in 0 to 3, of groups [N, 32]."""
    middle = (groups.max(-1, keepdims=True) + groups.min(-1, keepdims=True)) / 2
    half = np.ptp(groups, axis=-1, keepdims=True) / 2
    best_error = np.full(middle.shape, np.inf, np.float32)
    step, least, codes = np.zeros_like(middle), np.zeros_like(middle), np.zeros(groups.shape, np.uint8)
    for cut in CUTS:
        each = (2 * cut / (LEVELS - 1) * half).astype(np.float16).astype(np.float32)
        low = (middle - cut * half).astype(np.float16).astype(np.float32)
        found = np.clip(np.rint((groups - low) / np.maximum(each, 1e-12)), 0, LEVELS - 1)
        error = np.square(groups - low - each * found).sum(-1, keepdims=True)
        is_better = error < best_error
        best_error = np.where(is_better, error, best_error)
        step, least = np.where(is_better, each, step), np.where(is_better, low, least)
        codes = np.where(is_better, found, codes).astype(np.uint8)
    return step, least, codes


def as_q4_1(weight: Floats) -> npt.NDArray[np.uint8]:
    """Return a weight [out, in] in two bits as rows of blocks of Q4_1, [out, in / 32 * 20]."""
    step, least, codes = rounded(weight.reshape(-1, GROUP))
    packed = codes[:, : GROUP // 2] | codes[:, GROUP // 2 :] << 4
    heads = np.concatenate((step, least), -1).astype(np.float16).view(np.uint8)
    return np.concatenate((heads, packed), -1).reshape(len(weight), -1)


def round_file(source: Path, out: Path) -> None:
    """Write a GGUF file whose layers' matrices have two bits a weight."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in OWN_FIELDS:
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[0] if inner else None)
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and tensor.name.endswith(".weight") and len(tensor.shape) == 2:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            parts = [as_q4_1(values[i : i + ROWS_AT_ONCE]) for i in range(0, len(values), ROWS_AT_ONCE)]
            writer.add_tensor(tensor.name, np.concatenate(parts), raw_dtype=Kind.Q4_1)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def round_folder(source: Path, out: Path) -> None:
    """Write a folder of transformers whose layers' matrices have two bits a weight."""
    shutil.copytree(source, out)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if ".layers." in name and tensor.ndim == 2:
            step, least, codes = rounded(tensor.float().numpy().reshape(-1, GROUP))
            tensors[name] = torch.from_numpy(least + step * codes).view(tensor.shape).to(tensor.dtype)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rounded model. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="GGUF file, folder or demo-draft")
    parser.add_argument("out", type=Path, help="file or folder to write")
    args = parser.parse_args(argv)
    source = demo_folder("draft") if args.source == "demo-draft" else Path(args.source)
    (round_folder if source.is_dir() else round_file)(source, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
