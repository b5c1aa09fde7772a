"""A server of OpenAI's API that lies where a test wants it to; what it says depends on the question alone otherwise."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_WORDS = ("apple", "bread", "coin", "door", "egg", "fish", "gate", "hill", "ink", "jar", "key", "lamp", "moon", "nest")
_NUM_TOKENS = 12
_LIE_IDX = 5
_OTHER = " pear"
_GAP = 0.02  # by which each token is likelier than the other one
_FORM = ['{"answer"', ": 3", ', "unit"', ': "pieces"', ', "is_certain"', ": true", "}"]
MODEL = "fake"
AT_ONCE = 3  # questions in flight that make a batch
_PROBE_TOKENS = 8  # of a question that only finds out what the server can do
_PATIENCE_S = 60.0


class Fake(ThreadingHTTPServer):
    """The server; `lies` names what it does wrong."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, lies: frozenset[str], key: str | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lies, self.key = lies, key
        self.ended = threading.Event()  # what hangs waits for it
        self.asked = Counter[str]()
        self.requests: list[dict[str, Any]] = []
        self.together = threading.Barrier(AT_ONCE)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that have gone."""


@contextlib.contextmanager
def lying(*lies: str, key: str | None = None) -> Iterator[Fake]:
    """Run such a server in a thread."""
    with Fake(frozenset(lies), key) as fake:
        thread = threading.Thread(target=fake.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield fake
        finally:
            fake.ended.set()
            fake.shutdown()
            thread.join(60)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Fake

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """List the models."""
        lies = self.server.lies
        if self._is_stopped() or self.path != "/v1/models":
            return self._send(404, {"error": {"message": f"no path {self.path}"}})
        if "hang" in lies:
            self.server.ended.wait()
        if "redirect" in lies:
            return self._send(307, {}, {"Location": "https://elsewhere.example/v1/models"})
        if "html" in lies:
            return self._send_bytes(200, b"<html><body>\x1b[31mWelcome</body></html>", "text/html")
        owner = "card" if "no-switch" not in lies else "someone"
        models = [{"id": MODEL, "owned_by": owner}] if "no-models" not in lies else []
        return self._send(200, {"data": models})

    def do_POST(self) -> None:
        """Answer a chat."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        lies = self.server.lies
        if self._is_stopped():
            return None
        self.server.requests.append(body)
        if self.path != "/v1/chat/completions" or "no-chat" in lies:
            return self._send(400, {"error": {"message": "this model has no chat template"}})
        if "no-ids" in lies and "return_token_ids" in body:
            return self._send(400, {"error": {"message": "return_token_ids is not known"}})
        if "no-logprobs" in lies and "logprobs" in body:
            return self._send(400, {"error": {"message": "no \x1b[31mlogprobs here"}})
        if "broken-n" in lies and "n" in body:
            return self._send_bytes(200, b"oh no", "text/plain")
        if "broken-schema" in lies and "response_format" in body:
            return self._send(500, {"error": {"message": "the grammar crashed"}})
        choices = [self._choice(body, idx) for idx in range(1 if "no-n" in lies else body.get("n", 1))]
        if not body.get("stream") or "no-stream" in lies:
            return self._send(200, {"choices": choices})
        return self._stream(body, choices)

    def _is_stopped(self) -> bool:
        if self.server.key is None or self.headers.get("Authorization") == f"Bearer {self.server.key}":
            return False
        given = self.headers.get("Authorization", "nothing").removeprefix("Bearer ")
        self._send(401, {"error": {"message": f"wrong key {given}"}})
        return True

    def _choice(self, body: Mapping[str, Any], choice_idx: int) -> dict[str, Any]:
        tokens, reason = self._tokens(body, choice_idx)
        message = {"role": "assistant", "content": "".join(tokens)}
        told: dict[str, Any] = {"index": choice_idx, "message": message, "finish_reason": reason, "logprobs": None}
        if body.get("logprobs"):
            told["logprobs"] = {"content": self._scores(tokens, is_fast=body.get("speculation") != "off")}
        if body.get("return_token_ids"):
            ids = [sum(token.encode()) for token in tokens]
            is_lie = "ids" in self.server.lies and body.get("speculation") != "off"
            told["token_ids"] = [*ids[:-1], 7] if is_lie and ids else ids
        return told

    def _tokens(self, body: Mapping[str, Any], choice_idx: int) -> tuple[list[str], str]:
        lies, is_fast = self.server.lies, body.get("speculation") != "off"
        said = [message["content"] for message in body["messages"]]
        seed = body.get("seed") if body["temperature"] else None
        key = json.dumps([said, seed])
        self.server.asked[key] += 1
        if seed is not None and "no-seeds" in lies:
            key += str(self.server.asked.total())
        digest = hashlib.sha256(key.encode()).digest()
        tokens = [f" {_WORDS[byte % len(_WORDS)]}" for byte in digest[:_NUM_TOKENS]]
        if "response_format" in body and "no-schema" not in lies:
            tokens = list(_FORM)
        is_lie = is_fast and (
            "speculation" in lies
            or ("batch" in lies and body["max_tokens"] > _PROBE_TOKENS and self._is_in_a_batch())
            or ("seeded" in lies and seed is not None)
            or ("again" in lies and self.server.asked[key] > 2)
            or ("extended" in lies and len(said) > 1)
            or ("schema" in lies and "response_format" in body)
            or ("stream" in lies and body.get("stream"))
            or ("n" in lies and choice_idx == 1)
            or ("with-logprobs" in lies and body.get("logprobs"))
        )
        if is_lie:
            tokens[_LIE_IDX] = _OTHER
        text = "".join(tokens)
        for mark in body.get("stop", ()) if "no-stop" not in lies else ():
            if mark in text:
                overshoot = len(mark) if "stop" in lies and is_fast else 0
                return [text[: text.index(mark) + overshoot]], "stop"
        return tokens, "length" if "finish" in lies and is_fast and body.get("stream") else "stop"

    def _is_in_a_batch(self) -> bool:
        """Whether other questions are in flight; waits for them."""
        try:
            self.server.together.wait(_PATIENCE_S)
        except threading.BrokenBarrierError:
            return False
        return True

    def _scores(self, tokens: list[str], *, is_fast: bool) -> list[dict[str, Any]]:
        lies = self.server.lies if is_fast else frozenset[str]()
        entries = []
        for idx, token in enumerate(tokens):
            is_lie = idx == _LIE_IDX
            shown = _OTHER if "logprob-token" in lies and is_lie else token
            logprob = -0.5 - ("logprob-value" in lies and is_lie)
            best = logprob + 0.25 if "unlikely" in lies and is_lie else logprob - _GAP
            tops = [{"token": shown, "logprob": logprob}, {"token": _OTHER, "logprob": best}]
            entries.append({"token": shown, "logprob": logprob, "top_logprobs": tops})
        return entries

    def _stream(self, body: Mapping[str, Any], choices: list[dict[str, Any]]) -> None:
        lies = self.server.lies
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for choice in choices:
            text = choice["message"]["content"]
            for idx in range(0, len(text), 7):
                delta = {"content": text[idx : idx + 7]}
                self._event({"choices": [{"index": choice["index"], "delta": delta, "finish_reason": None}]})
                if "cut" in lies:
                    self.close_connection = True
                    return
                if "hang-stream" in lies:
                    self.server.ended.wait()
                if "error-stream" in lies:
                    self._event({"error": {"message": "the engine died"}})
            ids = {"token_ids": choice["token_ids"]} if "token_ids" in choice else {}
            last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"], **ids}
            self._event({"choices": [last]})
        if "no-done" not in lies:
            self._chunk(b": a comment\n\ndata: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, content: object) -> None:
        self._chunk(f"data: {json.dumps(content)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _send(self, status: int, content: object, headers: Mapping[str, str] | None = None) -> None:
        self._send_bytes(status, json.dumps(content).encode(), "application/json", headers)

    def _send_bytes(self, status: int, data: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
