"""A stand-in of the hub on this machine: facts of repositories, and their files, as huggingface_hub asks for them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the stand-in has, and what was asked of it."""

    files: Mapping[str, Path]  # by org/repo/name
    gated: frozenset[str] = frozenset()  # repositories
    url: str = ""
    fetched: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for a path."""
        if about := re.match(r"/api/models/([^/]+/[^/?]+)(/tree/)?", path):
            return self._tree(about[1]) if about[2] else self._about(about[1])
        found = re.match(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+?)(\?|$)", path)
        if found is None or not any(name.startswith(f"{found[1]}/") for name in self.files):
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        file = self.files.get(f"{found[1]}/{found[2]}")
        if file is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        body = file.read_bytes()
        return 200, {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}, body

    def _tree(self, repository: str) -> tuple[int, dict[str, str], bytes]:
        """Return the list of all files, which is asked for before several of them are fetched."""
        found = {name: file for name, file in self.files.items() if name.startswith(f"{repository}/")}
        entries = [
            {"type": "file", "path": name.removeprefix(f"{repository}/"), "size": file.stat().st_size, "oid": COMMIT}
            for name, file in found.items()
        ]
        return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()

    def _about(self, repository: str) -> tuple[int, dict[str, str], bytes]:
        if repository in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if not any(name.startswith(f"{repository}/") for name in self.files):
            return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."}, b""
        files = [name.removeprefix(f"{repository}/") for name in self.files if name.startswith(f"{repository}/")]
        facts = {
            "id": repository,
            "modelId": repository,
            "sha": COMMIT,
            "private": False,
            "tags": [],
            "siblings": [{"rfilename": file} for file in files],
        }
        return 200, {"Content-Type": "application/json"}, json.dumps(facts).encode()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Let the stand-in answer at its ``url``."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(is_whole=False)

        def do_GET(self) -> None:
            self._answer(is_whole=True)

        def _answer(self, *, is_whole: bool) -> None:
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if is_whole:
                self.wfile.write(body)
                if "/resolve/" in self.path and status == 200:
                    hub.fetched.append(self.path.rpartition("/")[2])

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
