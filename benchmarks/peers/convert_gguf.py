"""Convert a model folder to GGUF with llama.cpp's own converter, also where it does not know the tokenizer.

    python benchmarks/peers/convert_gguf.py LLAMA_SOURCE PRE_TOKENIZER MODEL_FOLDER OUT

PRE_TOKENIZER is llama.cpp's name of what splits text before the merges, or `as-it-is` to let the converter find out.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def _no_sentencepiece(model: object) -> None:
    raise FileNotFoundError("no tokenizer.model is read here")


def main() -> None:
    """Convert what the command line names."""
    source, pre_tokenizer, model, out = sys.argv[1:]
    sys.path[:0] = [source, str(Path(source) / "gguf-py")]
    from conversion import base  # of llama.cpp's source

    # What it tries first needs a package that these models do not: they have a tokenizer.json.
    base.TextModel._create_vocab_sentencepiece = _no_sentencepiece
    if pre_tokenizer != "as-it-is":
        base.TextModel.get_vocab_base_pre = lambda self, tokenizer: pre_tokenizer
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", out, "--outtype", "bf16"]
    runpy.run_path(str(Path(source) / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
