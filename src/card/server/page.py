"""The playground at `/`: a static page that is sent from memory, and may neither run nor load anything else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).parent / "playground"
_INDEX = "index.html"
_TYPES = {  # spelled out: the system's own table may know others, and with nosniff a wrong one breaks the page
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # keep it, but ask each time whether it is still this one: upgrades show at once
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    headers: dict[str, str]

    @property
    def tag(self) -> str:
        return self.headers["ETag"]


class Playground:
    """The page and what belongs to it; needs no key, as it holds no secret: the page asks for one where it must."""

    def __init__(self) -> None:
        """Read the files, all of them small."""
        paths = [path for path in sorted(_FOLDER.rglob("*")) if path.suffix in _TYPES]
        self._files = {path.relative_to(_FOLDER).as_posix(): _read(path) for path in paths}

    async def index(self, request: Request) -> Response:
        """Send the page itself."""
        return self._send(request, _INDEX)

    async def asset(self, request: Request) -> Response:
        """Send a file that the page names. Raises: HTTPException 404 for any other."""
        return self._send(request, request.path_params["name"])

    def _send(self, request: Request, name: str) -> Response:
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404)
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if file.tag in known:
            return Response(status_code=304, headers=file.headers)
        return Response(file.content, headers=file.headers)


def _read(path: Path) -> _File:
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return _File(content, {**_HEADERS, "Content-Type": _TYPES[path.suffix], "ETag": tag})
