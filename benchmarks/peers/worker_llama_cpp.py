"""Worker for llama.cpp: one `llama-server` per method and draft length, asked with token ids over loopback.

Times are the server's own, so HTTP is not in them.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from worker_protocol import Batch, Decoded, serve, up_to_end

_START_S = 300.0
_ANSWER_S = 900.0
_CERTAIN = 1e6  # a bias that no difference of logits reaches


class LlamaCpp:
    """Servers by method and option."""

    def __init__(self) -> None:
        self._job: dict[str, Any] = {}
        self._servers: dict[str, tuple[subprocess.Popen[bytes], int]] = {}

    def load(self, job: dict[str, Any]) -> dict[str, Any]:
        """Remember what to run; servers start when they are prepared."""
        self._job = job
        return {"version": job["version"]}

    def prepare(self, method: str, option: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
        """Start a server. Raises: RuntimeError if it ends, or is not ready in time."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = subprocess.Popen(self._command(method, option, port), stdin=subprocess.DEVNULL)
        self._servers[_key(method, option)] = process, port
        deadline = time.monotonic() + _START_S
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                self.release(method, option)
                raise RuntimeError(f"llama-server did not come up (exit status {process.poll()}); see its log")
            time.sleep(0.1)
        return {**option, "threads": len(self._job["cores"])}

    def _command(self, method: str, option: dict[str, Any], port: int) -> list[str]:
        job, threads = self._job, str(len(self._job["cores"]))
        slots = option.get("at_once", 1)
        command = [job["server"], "-m", job["target"], "--host", "127.0.0.1", "--port", str(port)]
        command += ["-t", threads, "-tb", threads, "-c", str(job["context"] * slots), "-np", str(slots), "-ngl", "0"]
        if method == "draft":
            command += ["-md", job["draft"], "-td", threads, "-tbd", threads]
        return [*command, *self.own_flags(method, option)]

    def own_flags(self, method: str, option: dict[str, Any]) -> list[str]:
        """Return what only this server understands."""
        drafting = ["--spec-type", "draft-simple", "--spec-draft-n-max", str(option.get("draft_tokens"))]
        return ["--no-webui", *{"draft": drafting, "ngram": ["--spec-type", "ngram-simple"]}.get(method, [])]

    def token_ids(self, method: str, option: dict[str, Any], answer: dict[str, Any]) -> list[int]:
        """Return the tokens of an answer."""
        return list(answer["tokens"])

    def generate(self, method: str, option: dict[str, Any], prompt_ids: list[int], max_tokens: int) -> Decoded:
        """Decode one prompt greedily."""
        answer = self._ask(method, option, prompt_ids, max_tokens)
        timings = answer["timings"]
        return Decoded(
            token_ids=up_to_end(self.token_ids(method, option, answer), self._job["end_ids"]),
            prefill_s=timings["prompt_ms"] / 1e3,
            decode_s=timings["predicted_ms"] / 1e3,  # from the first token on
            decode_tokens=timings["predicted_n"] - 1,
            accepted=timings.get("draft_n_accepted", 0),
        )

    def generate_many(
        self, method: str, option: dict[str, Any], prompts: list[list[int]], max_tokens: int, at_once: int
    ) -> Batch:
        """Decode several prompts, so many requests in flight."""
        started = time.perf_counter()
        with ThreadPoolExecutor(at_once) as threads:
            answers = list(threads.map(lambda ids: self._ask(method, option, ids, max_tokens), prompts))
        wall_s = time.perf_counter() - started
        texts = [up_to_end(self.token_ids(method, option, one), self._job["end_ids"]) for one in answers]
        return Batch(token_ids=texts, wall_s=wall_s)

    def logprobs(self, method: str, option: dict[str, Any], token_ids: list[int]) -> tuple[list[float], list[int]]:
        """Return how likely each token but the first is after those before it, and which token is the likeliest there.

        Each is asked for by itself, with a bias that lets the server choose it; the logarithms are those without the
        bias. The server keeps the rows of what came before.
        """
        found, likeliest = [], []
        for length in range(1, len(token_ids)):
            question = _question(token_ids[:length], 1, cache_prompt=True)
            question |= {"logit_bias": [[token_ids[length], _CERTAIN]], "n_probs": 1}
            (told,) = self.post(method, option, question)["completion_probabilities"]
            if told["id"] != token_ids[length]:
                raise RuntimeError(f"llama-server chose token {told['id']}, asked for {token_ids[length]}")
            found.append(told["logprob"])
            likeliest.append(told["top_logprobs"][0]["id"])
        return found, likeliest

    def _ask(self, method: str, option: dict[str, Any], prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
        return self.post(method, option, _question(prompt_ids, max_tokens, cache_prompt=False))

    def post(
        self, method: str, option: dict[str, Any], question: dict[str, Any], path: str = "completion"
    ) -> dict[str, Any]:
        """Return what the server says to a question."""
        _, port = self._servers[_key(method, option)]
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/{path}",
            json.dumps(question).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def release(self, method: str, option: dict[str, Any]) -> None:
        """End a server."""
        process, _ = self._servers.pop(_key(method, option))
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End all servers."""
        for process, _ in self._servers.values():
            process.kill()
            process.wait()


def _question(prompt_ids: list[int], max_tokens: int, *, cache_prompt: bool) -> dict[str, Any]:
    return {
        "prompt": prompt_ids,
        "n_predict": max_tokens,
        "temperature": 0.0,
        "samplers": ["temperature"],
        "cache_prompt": cache_prompt,
        "return_tokens": True,
    }


def _key(method: str, option: dict[str, Any]) -> str:
    return json.dumps([method, option], sort_keys=True)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    serve(LlamaCpp())
