"""The perplexity script scores texts with both engines alike, and asks llama-server for the tokens that a text has."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

TEXT = [5, 2, 7, 7]


@pytest.fixture(scope="module")
def script(bench: dict[str, ModuleType]) -> ModuleType:
    return bench["perplexity"]


class Fixed:
    """Gives each token the same chance, and finds one token likeliest everywhere."""

    def __init__(self, chance: float, best: int) -> None:
        self._answer = math.log(chance), best

    def logprobs(self, token_ids: list[int]) -> tuple[list[float], list[int]]:
        count = len(token_ids) - 1
        return [self._answer[0]] * count, [self._answer[1]] * count


def test_perplexities_are_over_all_tokens_that_follow_another(script: ModuleType) -> None:
    found = script.compare(Fixed(0.25, 1), Fixed(0.2, 1), [TEXT, TEXT[:2]])
    assert found["tokens"] == 4
    assert found["perplexity"] == {"card": 4.0, "llama.cpp": 5.0}
    assert found["change"] == -0.2
    assert found["top1_agreement"] == 1.0
    assert script.compare(Fixed(0.5, 1), Fixed(0.5, 2), [TEXT])["top1_agreement"] == 0.0


def test_ours_gives_each_token_its_own_logprob(script: ModuleType, pair: Any) -> None:
    runner = script.make_runner(script.load_decoder(pair.target, dtype="float32"), max_model_len=16)
    logprobs, likeliest = script.Ours(runner).logprobs(TEXT)
    slot = runner.open()
    for place, token in enumerate(TEXT[:-1]):
        (logits,) = runner.forward([script.Extension(slot, [token], [place - 1])])
        expected = np.log(np.exp(logits[0]) / np.exp(logits[0]).sum())
        assert logprobs[place] == pytest.approx(float(expected[TEXT[place + 1]]), abs=1e-4)
        assert likeliest[place] == int(logits[0].argmax())


@pytest.fixture
def server() -> Iterator[SimpleNamespace]:
    """Serves what llama-server answers to a question for one token, and keeps the questions."""
    told = SimpleNamespace(questions=[], obeys=True)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            told.questions.append(question)
            chosen = question["logit_bias"][0][0] if told.obeys else 0
            one = {"id": chosen, "logprob": -0.5 * chosen, "top_logprobs": [{"id": 3, "logprob": -0.1}]}
            answer = json.dumps({"completion_probabilities": [one]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        told.port = http.server_port
        yield told
        http.shutdown()
        thread.join()


def test_the_server_is_made_to_choose_the_tokens_of_a_text(script: ModuleType, server: SimpleNamespace) -> None:
    worker = script.LlamaCpp()
    worker._servers['["plain", {}]'] = None, server.port
    logprobs, likeliest = script.Theirs(worker).logprobs(TEXT)
    assert logprobs == [-1.0, -3.5, -3.5]
    assert likeliest == [3, 3, 3]
    assert [one["prompt"] for one in server.questions] == [TEXT[:1], TEXT[:2], TEXT[:3]]
    assert all(one["cache_prompt"] and one["n_predict"] == 1 and one["n_probs"] == 1 for one in server.questions)
    server.obeys = False
    with pytest.raises(RuntimeError, match="chose token 0, asked for 2"):
        worker.logprobs("plain", {}, TEXT)


def test_texts_are_fields_of_lines_and_cut(script: ModuleType, tmp_path: Any) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"a": "x" * size, "b": "y"}) for size in (1, 9, 0)))
    letters = SimpleNamespace(encode=list)
    read = [len(ids) for ids in script.read_texts(f"{file}:a,b", letters, limit=2, max_tokens=5)]
    assert read == [3, 5]
