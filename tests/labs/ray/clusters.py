"""A Ray cluster of several nodes on this machine, our application on it, and clients that compare every text."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray._private import state
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from card import LLM, SamplingParams
from card.labs.ray.target import DESK
from card.ray import app
from tests.waiting import PATIENCE_S

MODEL = "tiny"
ALWAYS_DRAFTS = {"policy": "fixed", "max_wait_s": 0.02}  # the tuned policy sees that a tiny target is faster alone
_RETRY_S = 0.2


def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S, what: str = "") -> None:
    """Wait for something that must happen; a question that fails is asked again."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it never happened: {what or condition}"
        time.sleep(0.1)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A head with Serve's controller and proxy, and other nodes."""

    cluster: Cluster
    port: int  # of the proxy

    def pids(self, deployment: str, name: str = "default") -> list[int]:
        """Return the processes of a deployment's replicas."""
        return [int(actor["Pid"]) for actor in self._actors() if self._is_of(actor, deployment, name)]

    def remove_node_of(self, pid: int) -> None:
        """Take a node away with all that runs on it, without a word to anybody."""
        node_id = next(actor["Address"]["NodeID"] for actor in self._actors() if actor["Pid"] == pid)
        node = next(node for node in self.cluster.worker_nodes if node.node_id == node_id)
        self.cluster.remove_node(node, allow_graceful=False)

    def logs(self) -> list[Path]:
        """Return all files that Ray, Serve and we have logged to."""
        folder = Path(self.cluster.head_node.get_logs_dir_path())
        return [path for path in folder.rglob("*") if path.is_file()]

    def _actors(self) -> list[dict[str, Any]]:
        return list(state.actors(actor_state_name="ALIVE").values())

    def _is_of(self, actor: dict[str, Any], deployment: str, name: str) -> bool:
        return str(actor["Name"]).startswith(f"SERVE_REPLICA::{name}#{deployment}#")


@contextlib.contextmanager
def running_cluster(head: Mapping[str, float], *nodes: Mapping[str, float]) -> Iterator[RayCluster]:
    """Start a head and more nodes, each with two CPUs and these resources."""
    cluster = Cluster()
    try:
        for resources in (head, *nodes):
            cluster.add_node(
                num_cpus=2, resources=dict(resources), node_ip_address="127.0.0.1", include_dashboard=False
            )
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield RayCluster(cluster, port)
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


def deploy(args: Mapping[str, Any], name: str = "default", route: str | None = "/") -> None:
    """Run the application as `serve run card.ray:app` does, and wait until it answers."""
    serve.run(app(dict(args)), name=name, route_prefix=route)


def figures(name: str = "default") -> dict[str, Any]:
    """Return how things stand at the desk; nothing is there while it does not answer."""
    try:
        answer = serve.get_deployment_handle(DESK, name).figures.remote().result(timeout_s=5.0)
    except (RayError, RayServeException, TimeoutError):
        return {"drafters": -1, "leases": -1, "load": -1}
    return dict(json.loads(answer))


def kill(pid: int) -> None:
    """End a process as the kernel does when memory is short."""
    os.kill(pid, signal.SIGKILL)


def num_running(deployment: str, name: str = "default") -> int:
    """Return how many replicas of a deployment Serve has running."""
    found = serve.status().applications[name].deployments[deployment]
    return int(found.replica_states.get("RUNNING", 0))


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and what plain decoding says to it."""

    prompt: str
    max_tokens: int
    text: str


def make_questions(target: str, number: int) -> list[Question]:
    """Let plain decoding answer so many short prompts, which all differ."""
    words = ("the cat", "one two", "there", "seven", "sat on", "mat", "other", "too")
    prompts = [f"{words[i % 8]} {i} {words[i // 8 % 8]}" for i in range(number)]
    lengths = [8 + i % 9 for i in range(number)]
    params = [SamplingParams(temperature=0.0, max_tokens=length) for length in lengths]
    with LLM(target, dtype="float32", threads=1, method="vanilla") as llm:
        outputs = llm.generate(prompts, params)
    return [
        Question(prompt, length, output.outputs[0].text)
        for prompt, length, output in zip(prompts, lengths, outputs, strict=True)
    ]


@dataclass
class Traffic:
    """Clients that ask one question after the other until they are told to end; each asks again after an error."""

    port: int
    questions: Sequence[Question]
    num_clients: int = 8
    path: str = "/v1/completions"
    key: str = ""
    num_answered: int = 0
    num_retries: int = 0
    accepted_tokens: int = 0
    wrong: list[tuple[Question, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # what was answered with another attempt

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._least: int | None = None
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(self.num_clients)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._least = 0 if kind is not None else (self._least or 0)
        for thread in self._threads:
            thread.join()

    def answered(self, number: int) -> None:
        """Wait until so many questions have been answered."""
        until(lambda: self.num_answered >= number, what=f"{number} answers; there are {self.num_answered}")

    def end(self, least: int) -> None:
        """Let the clients end once so many have been answered, all that were asked included."""
        self._least = least
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=60.0) as client:
            while self._least is None or self.num_answered < self._least:
                question = self.questions[next(self._numbers) % len(self.questions)]
                self._ask(client, question)

    def _ask(self, client: httpx.Client, question: Question) -> None:
        body = {
            "model": MODEL,
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "include_metrics": True,
        }
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                answer = client.post(self.path, json=body)
                if answer.status_code == 200:
                    self._note(question, answer.json())
                    return
                error = f"status {answer.status_code}: {answer.text[:200]}"
            except httpx.TransportError as failed:
                error = type(failed).__name__
            with self._lock:
                self.num_retries += 1
                self.errors.append(error)
            time.sleep(_RETRY_S)
        with self._lock:
            self.wrong.append((question, "no answer"))

    def _note(self, question: Question, answer: dict[str, Any]) -> None:
        text = answer["choices"][0]["text"]
        with self._lock:
            self.num_answered += 1
            self.accepted_tokens += answer["metrics"]["card"]["accepted_tokens"]
            if text != question.text:
                self.wrong.append((question, text))
