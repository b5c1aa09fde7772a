"""The playground at `/`: a static page that may not load or run anything from elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

_FOLDER = Path(__file__).parent / "playground"
_TYPES = {  # explicit: the system's table may differ, and with nosniff a wrong type breaks the page
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
    "Cache-Control": "no-cache",  # cached, but checked each time, so that upgrades show at once
}


class Playground(StaticFiles):
    """The page and its files; needs no key, as it holds no secret: the page itself asks the user for a key."""

    def __init__(self) -> None:
        super().__init__(directory=_FOLDER)

    async def index(self, request: Request) -> Response:
        """Send the page itself."""
        return await self.get_response("index.html", request.scope)

    def file_response(self, full_path: str | os.PathLike[str], *args: Any, **options: Any) -> Response:
        """Return a file with our headers. Raises: HTTPException 404 for a file outside the page."""
        kind = _TYPES.get(Path(full_path).suffix)
        if kind is None:
            raise HTTPException(404)
        response = super().file_response(full_path, *args, **options)
        response.headers.update({**_HEADERS, "Content-Type": kind})
        return response
