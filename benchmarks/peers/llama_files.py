"""Are logits those of llama.cpp, for the tiny random models that its own tests write? One of each architecture.

    python benchmarks/peers/llama_files.py --envs .build            # builds llama.cpp where it is missing

`test-llama-archs` writes into each file what no model of that architecture has: tensors that its loader may find, such
as scales of weights and biases, and settings of other architectures. We leave these out of a copy, which both engines
read. What is left is compared in float32. The exit status is 1 if a model that is read here differs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import environments
import gguf
import numpy as np
from environments import BuildError, llama_program, llama_source, run_logged
from gguf import GGUFValueType

from card.errors import CardError
from card.models.architectures import all_architectures
from card.models.files.gguf import source
from card.models.loading import load_decoder
from card.models.protocol import Extension
from card.models.runners import plain_runner

_BOUND = 1e-6  # of the mean square of differences over that of logits
_NUM_TOKENS = 60
_HERE = Path(__file__).parent
_JUNK_KEYS = {  # and the architectures that read them
    "attn_logit_softcapping": ("gemma2",),
    "router_logit_softcapping": (),
    "final_logit_softcapping": ("gemma2", "gemma3", "gemma4"),
    "attention.sliding_window": ("gemma2", "gemma3", "gemma4", "gpt-oss", "cohere2"),
    "rope.dimension_sections": ("qwen35", "qwen35moe", "qwen2vl", "qwen3vl", "qwen3vlmoe"),
    "expert_weights_norm": (),  # llama.cpp norms by the architecture
}
_JUNK_TENSORS = re.compile(r"\.(input_)?scale$|^cls|^output\.bias|^rope_freqs|^rope_factors|\.ssm_in\.")
_BIASES = re.compile(r"(attn_(q|k|v|output|qkv)|ffn_(gate|up|down|gate_inp)(_exps)?)\.bias$")
_WITH_BIASES = {"gpt-oss": ("attn", "ffn"), "qwen2": ("attn_q", "attn_k", "attn_v")}
_WITH_BIASES["qwen2moe"] = _WITH_BIASES["qwen2"]


def _build(envs: Path) -> Path:
    """Build what writes the files and what computes llama.cpp's logits; return the latter. Raises: BuildError."""
    environments.ensure(envs, "llama.cpp")
    build, tree, logs = envs / "llama-build", llama_source(envs), envs / "logs"
    run_logged(["cmake", "-S", tree, "-B", build, "-DLLAMA_BUILD_TESTS=ON"], logs / "llama-tests.log")
    run_logged(["cmake", "--build", build, "-j", "2", "--target", "test-llama-archs"], logs / "llama-archs.log")
    program, ggml = build / "bin" / "card-logits", build / "ggml" / "src"
    libraries = [build / "src" / "libllama.a", *(ggml / f"lib{name}.a" for name in ("ggml", "ggml-cpu", "ggml-base"))]
    command = ["c++", "-O1", f"-I{tree}/include", f"-I{tree}/ggml/include", _HERE / "logits.cpp", "-o", program]
    run_logged([*command, *libraries, "-lgomp", "-lpthread", "-ldl"], logs / "logits.log")
    return program


def _plain_copy(file: Path, copy: Path) -> None:
    """Write a file without what no model of its architecture has."""
    reader = gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(copy, architecture)
    for key, field in reader.fields.items():
        name, kind = key.removeprefix(f"{architecture}."), field.types[0]
        is_empty = kind == GGUFValueType.ARRAY and not field.contents()
        is_junk = name in _JUNK_KEYS and architecture not in _JUNK_KEYS[name]
        if not (key.startswith("GGUF.") or key == "general.architecture" or is_empty or is_junk):
            writer.add_key_value(key, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        is_bias = _BIASES.search(tensor.name) is not None
        has_bias = any(part in tensor.name for part in _WITH_BIASES.get(architecture, ()))
        if not _JUNK_TENSORS.search(tensor.name) and (has_bias or not is_bias):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _logits(file: Path) -> np.ndarray[Any, Any]:
    """Return our logits [T, V]. Raises: CardError if the file is not read here."""
    model = load_decoder(file, dtype="float32")
    runner = plain_runner(model, max_model_len=_NUM_TOKENS)
    (logits,) = runner.forward([Extension.of_text(runner.open(), _token_ids(runner.vocab_size), first_logits=0)])
    return np.array(logits)


def _token_ids(vocab: int) -> list[int]:
    return [(7 * idx * idx + 3 * idx) % vocab for idx in range(_NUM_TOKENS)]


def _compared(program: Path, folder: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield each file's name, what came out, and whether that is as it should be."""
    for file in sorted(folder.glob("*.gguf")):
        copy = folder / "plain" / file.name
        _plain_copy(file, copy)
        try:
            own = _logits(copy)
        except CardError as error:
            yield file.stem, f"not read: {str(error).removeprefix(str(copy))[:100]}", True
            continue
        out = folder / "logits"
        subprocess.run([program, copy, out, *map(str, _token_ids(own.shape[1]))], check=True, capture_output=True)
        other = np.fromfile(out, np.float32).reshape(own.shape)
        error_share = float(((own - other) ** 2).mean() / (other**2).mean())
        same = float((own.argmax(-1) == other.argmax(-1)).mean())
        yield file.stem, f"{error_share:.1e}, likeliest tokens equal: {same:.0%}", error_share < _BOUND


def main() -> int:
    """Do what the command line says. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path, default=environments.default_folder(), help="where llama.cpp is built")
    args = parser.parse_args()
    folder = args.envs.absolute() / "llama-files"
    (folder / "plain").mkdir(parents=True, exist_ok=True)
    # Those files have a tokenizer of no kind: what reads one is not asked.
    source.check_tokenizer = source.tokenizer_digest = lambda header: ""  # type: ignore[assignment]
    try:
        program = _build(args.envs.absolute())
        names = "|".join(dict.fromkeys(name for one in all_architectures() for name in one.gguf.names))
        archs = [llama_program(args.envs.absolute(), "test-llama-archs"), "-o", folder, "-a", f"^({names})$"]
        run_logged(archs, args.envs / "logs" / "llama-files.log")
    except (BuildError, OSError) as error:
        print(f"llama_files.py: {error}", file=sys.stderr)
        return 1
    failed = False
    for name, words, is_right in _compared(program, folder):
        print(f"{name}: {words}{'' if is_right else ': DIFFERS'}", flush=True)
        failed |= not is_right
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
