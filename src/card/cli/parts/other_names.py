"""Options of other programs (llama.cpp, vLLM, SGLang, TGI): what a user who types one is told."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

# Our option, and the names of others for it. The first of ours that the command has is the answer.
_OURS = {
    "--model --target": "-m --model-path --model-id -hf -hfr --hf-repo",
    "--draft": "-md --speculative-draft-model-path --assistant-model",
    "--method": "--speculative-algorithm --speculative-config --spec-type",
    "--num-speculative-tokens": "--draft-max --draft-n --speculative-num-steps",
    "--min-verify-prob": "--draft-p-min",
    "--budget": "--speculative-num-draft-tokens",
    "--draft-device": "-devd --device-draft",
    "--max-model-len": "-c --ctx-size --n-ctx --context-length --max-total-tokens --max-seq-len",
    "--max-num-seqs": "-np --parallel --max-running-requests --max-concurrent-requests --max-batch-size",
    "--max-tokens --max-request-tokens": "-n --n-predict --predict --max-new-tokens --num-predict",
    "--max-num-queued-reqs": "--max-queue-size --max-queued",
    "--prefill-chunk": "-b --batch-size -ub --ubatch-size --max-num-batched-tokens --chunked-prefill-size",
    "--kv-cache-memory": "--gpu-memory-utilization --mem-fraction-static --kv-cache-memory-bytes",
    "--kv-offload": "--swap-space --cpu-offload-gb --slot-save-path --kv-transfer-config",
    "--threads": "-t -tb --threads-batch --num-threads --n-threads",
    "--draft-threads": "-td --threads-draft",
    "--cores": "-C --cpu-mask --cpu-range --numa",
    "--dtype": "-q --quantization --quantize --torch-dtype",
    "--device": "-dev -ngl --gpu-layers --n-gpu-layers -sm --split-mode -mg --main-gpu -ts --tensor-split",
    "--temperature": "--temp",
    "--repetition-penalty": "--repeat-penalty",
    "--chat-template": "--chat-template-file",
    "--seed": "-s --random-seed",
    "--regex --json-schema": "--grammar --grammar-file",
    "--json-schema": "-j --json-schema-file",
    "--prompt-file": "-f --file",
    "--system": "-sys --system-prompt",
    "--max-images": "--limit-mm-per-prompt --mmproj",
    "--image-dir": "--allowed-local-media-path",
    "--cors-origin": "--allowed-origins --cors-allow-origin",
    "--config": "--api-key-file",
    "--request-timeout": "-to --timeout",
    "--log-level": "--log-verbosity --uvicorn-log-level --disable-log-requests --no-enable-log-requests",
    "--tool-parser": "--tool-parser-plugin",
    "--no-check": "--no-warmup --skip-server-warmup",
}
_ALWAYS = (
    "-cb --cont-batching --continuous-batching --enable-prefix-caching --cache-prompt --cache-reuse --jinja --metrics "
    "--enable-chunked-prefill --enable-auto-tool-choice --enable-metrics"
)
_ABSENT = {
    "merge the adapter into the weights first": "--lora --lora-scaled --lora-modules --enable-lora --lora-paths",
    "one process serves one model on one machine; the extra ray joins several": (
        "-tp --tp --tp-size --tensor-parallel-size -pp --pipeline-parallel-size -dp --data-parallel-size --num-shard "
        "--distributed-executor-backend --api-server-count --nnodes --rpc"
    ),
    "put a proxy with TLS in front (docs/server.md)": (
        "--ssl-key-file --ssl-cert-file --ssl-keyfile --ssl-certfile --ssl-ca-certs --root-path --api-prefix"
    ),
    "keys and values keep the precision of the pass": (
        "-ctk --cache-type-k -ctv --cache-type-v --kv-cache-dtype --quantize-kv-cache"
    ),
    "the model's own files say it": (
        "--tokenizer --tokenizer-mode --load-format --rope-scaling --rope-scale "
        "--rope-freq-base --rope-freq-scale --yarn-ext-factor --hf-overrides --override-kv"
    ),
    "no code of a model's folder is run": "--trust-remote-code",
    "an answer ends where the context is full": "--context-shift --keep",
    "the server writes text only": "--embedding --embeddings --rerank --reranking --pooling --task --runner",
    "the model stays loaded until the server ends": "--keep-alive --keepalive --enable-sleep-mode --sleep-idle-seconds",
    "weights are mapped, and passes are compiled for this processor, without a choice": (
        "-fa --flash-attn --mlock --mmap --no-mmap --enforce-eager --block-size --attention-backend "
        "--guided-decoding-backend"
    ),
    "each request says it": (
        "--temperature --temp --top-p --top-k --min-p --seed -s --presence-penalty --frequency-penalty "
        "--repetition-penalty --repeat-penalty --grammar --grammar-file --json-schema -j --system-prompt"
    ),
    "no exact law of these is known here; temperature, top-k, top-p, min-p and penalties are": (
        "--mirostat --mirostat-ent --mirostat-lr --typical --typical-p --xtc-probability --dry-multiplier "
        "--dynatemp-range"
    ),
}


def all_names() -> Mapping[str, tuple[str, ...]]:
    """Return the names of others, each with our options that may stand for it; without one there is none."""
    rest = {name: () for names in (_ALWAYS, *_ABSENT.values()) for name in names.split()}
    return rest | {name: tuple(ours.split()) for ours, names in _OURS.items() for name in names.split()}


def what_to_write(arguments: Sequence[str], options: Collection[str]) -> str | None:
    """Return what to say of the first argument that is another program's option; None if there is none.

    Args:
        options: of the command that was called.
    """
    for argument in arguments:
        name = argument.partition("=")[0]
        if name == "--":
            return None
        if name not in options and (words := _words_about(name, options)):
            return words
    return None


def _words_about(name: str, options: Collection[str]) -> str:
    """Return what to say of a name; empty if it is not known, or has no answer in this command."""
    ours = next((one for one in all_names().get(name, ()) if one in options), None)
    if ours is not None:
        return f"{name} is another program's name: write {ours}"
    if name in _ALWAYS.split():
        return f"{name} is always on: leave it out"
    why = next((why for why, names in _ABSENT.items() if name in names.split()), None)
    return "" if why is None else f"{name} is not here: {why}; leave it out"
