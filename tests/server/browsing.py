"""The playground in a real browser: a tab that notes what the page did, and answers that the test feeds it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect

from tests.browser import PATIENCE_MS
from tests.server.running import Running

_FED_BY_THE_TEST = """
const real = window.fetch;
window.fetch = async (url, options) => {
  if (!String(url).endsWith("chat/completions")) return real(url, options);
  const body = new ReadableStream({ start(controller) { window.feed = controller; } });
  return new Response(body, { headers: { "Content-Type": "text/event-stream" } });
};
"""
_REFUSED = re.compile("Failed to load resource: the server responded with a status of (4|503)")

TOKENS: list[dict[str, Any]] = [
    {"token_id": 7, "text": "Six", "origin": "plain", "alternatives": []},
    {"token_id": 8, "text": " eggs", "origin": "beam", "alternatives": []},
    {"token_id": 9, "text": "\ufffd", "origin": "suffix", "alternatives": []},
    {"token_id": 10, "text": "\ufffd", "origin": "beam+suffix", "alternatives": []},
    {
        "token_id": 11,
        "text": ".",
        "origin": "",
        "alternatives": [
            {"token_id": 12, "text": " and", "path_logprob": -0.6931, "writer": "beam"},
            {"token_id": 13, "text": "<b>", "path_logprob": -2.3026, "writer": "suffix"},
        ],
    },
    {"token_id": 3, "text": "<|end|>", "origin": "plain", "alternatives": []},
]
ANSWER = "Six eggs\u00e9."
CLASSES = [
    *("token plain", "token accepted by-beam", "token accepted by-local-1"),
    *("token accepted by-several", "token corrected", "token plain"),
]


def sse(*pieces: tuple[str, list[dict[str, Any]], str | None]) -> bytes:
    """Return events of a stream, in the lines and with the line ends that the page must bear as well."""
    events = [
        {"choices": [{"delta": {"content": text}, "tokens": tokens, "finish_reason": reason}]}
        for text, tokens, reason in pieces
    ]
    lines = [json.dumps(one, ensure_ascii=False).replace(": ", ":\r\ndata: ", 1) for one in events]
    return "".join(f": a comment\r\ndata: {line}\r\n\r\n" for line in [*lines, "[DONE]"]).encode()


@dataclass
class Tab:
    """The page in a browser of its own, and what it did."""

    page: Page
    requests: list[dict[str, Any]] = field(default_factory=list)  # bodies of chat requests
    urls: list[str] = field(default_factory=list)  # of all requests
    faults: list[str] = field(default_factory=list)  # errors on the console, and uncaught ones

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", self._note_message)
        self.page.on("request", self._note_request)

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.faults.append(message.text)

    def _note_request(self, request: Request) -> None:
        self.urls.append(request.url)
        if request.post_data:
            self.requests.append(dict(request.post_data_json or {}))

    def ask(self, text: str) -> None:
        self.page.fill("#question", text)
        self.page.press("#question", "Enter")

    def set(self, **values: object) -> None:
        """Change settings, by id with underscores."""
        for name, value in values.items():
            self.page.fill(f"#{name.replace('_', '-')}", str(value))

    def wait_for(self, state: str, answer_idx: int = 0) -> None:
        expect(self.page.locator(".answer").nth(answer_idx)).to_have_attribute("data-state", state)

    def text(self, answer_idx: int = 0) -> str:
        return self.page.locator(".answer .text").nth(answer_idx).text_content() or ""

    def feed(self, data: bytes) -> None:
        self.page.evaluate("bytes => window.feed.enqueue(new Uint8Array(bytes))", list(data))

    def close_feed(self) -> None:
        self.page.evaluate("window.feed.close()")

    def answer(self, data: bytes) -> None:
        """Ask something and let this be the answer."""
        self.ask("How many?")
        self.wait_for("writing")
        self.feed(data)
        self.close_feed()
        self.wait_for("done")

    def has_no_side_scroll(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


Opener = Callable[..., contextlib.AbstractContextManager[Tab]]


def opener(browser: Browser) -> Opener:
    """Return what opens the page of a server; in the end it must have asked nobody else, and found no fault."""

    @contextlib.contextmanager
    def open_page(server: Running, *, is_fed: bool = False, is_refused: bool = False, **options: Any) -> Iterator[Tab]:
        context = browser.new_context(viewport=options.pop("viewport", {"width": 1200, "height": 800}), **options)
        context.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        tab = Tab(context.new_page())
        if is_fed:
            tab.page.add_init_script(_FED_BY_THE_TEST)
        tab.page.goto(server.url)
        expect(tab.page.locator("#state")).not_to_be_empty()
        yield tab
        context.close()
        assert not [fault for fault in tab.faults if not (is_refused and _REFUSED.match(fault))]
        assert tab.urls and all(url.startswith(server.url) for url in tab.urls)

    return open_page
