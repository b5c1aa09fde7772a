"""The playground in a real browser: answers as formatted text, copied, kept over a reload, and open to everybody."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Page, expect

import card.server
from card.api.async_llm import AsyncLLM
from tests.browser import faults_by_axe
from tests.server.browsing import ANSWER, CLASSES, TOKENS, Opener, Tab, sse
from tests.server.running import PROMPT, Running, serving

pytestmark = pytest.mark.timeout(240)

VENDOR = Path(card.server.__file__).parent / "playground" / "vendor"
Scheme = Literal["light", "dark"]
_UNREACHABLE = "() => { window.fetch = async () => { throw new TypeError('refused'); }; }"
_SILENT = """() => {
  window.fetch = (url, { signal }) =>
    new Promise((_, refuse) => signal.addEventListener("abort", () => refuse(signal.reason)));
}"""
_WITHOUT_STORAGE = """
for (const area of ["localStorage", "sessionStorage"]) {
  Object.defineProperty(window, area, { get() { throw new Error(area); } });
}
"""
PHONE = {"viewport": {"width": 360, "height": 700}, "has_touch": True, "is_mobile": True}
MARKDOWN = """# Sum

**Three** and *four* are `7`, see [here](https://example.org/a?b=c&d).
Next line, 3 \\* 4 &amp; <b>more</b>

3. one
4. two

| a | b |
|---|--:|
| 1 | 2 |

```python
print("<i>")
```
"""
HOSTILE = [
    "<img src=x onerror=window.hit=1>",
    "<script>window.hit=1</script>",
    "<svg onload=window.hit=1>",
    "[a](javascript:window.hit=1)",
    "[a](JaVaScRiPt&colon;window.hit=1)",
    "[a](&#x6A;avascript:window.hit=1)",
    "[a](data:text/html,<script>window.hit=1</script>)",
    "[a](vbscript:x) [a](file:///etc/passwd) [a](//example.org/x) [a](/metrics) [a](#settings)",
    "[a](ftp://example.org/x) [a](about:blank) [a](blob:https://example.org/x) [a](tel:1) <view-source:x>",
    "<javascript:window.hit=1>",
    "![x](https://example.org/tracker.png) ![x](/metrics) ![x](data:image/svg+xml,<svg/onload=alert(1)>)",
    '```"><img src=x onerror=window.hit=1>\n</code></pre><script>window.hit=1</script>\n```',
    '|a|\n|:-:" onmouseover="window.hit=1|\n|<img src=x onerror=window.hit=1>|',
    '[a](https://example.org/" onclick="window.hit=1)',
    "<style>body{display:none}</style><iframe src=/metrics></iframe><base href=https://example.org>",
    "[x]: javascript:window.hit=1\n\n[x]",
]


def told(text: str) -> bytes:
    """Return a stream whose answer is this text, in one token."""
    return sse((text, [{"token_id": 1, "text": text, "origin": "plain", "alternatives": []}], "stop"))


def is_formatted(tab: Tab) -> bool:
    return tab.page.locator(".formatted").is_visible() and tab.page.locator(".answer .text").is_hidden()


# ---- formatted text -------------------------------------------------------------------------------------------------


def test_markdown_is_shown_formatted_when_asked_for_and_the_tokens_stay_as_they_came(
    opened: Opener, server: Running
) -> None:
    with opened(server, is_fed=True) as tab:
        tab.ask("How many?")
        tab.wait_for("writing")
        expect(tab.page.get_by_role("button", name="Formatted")).to_be_hidden()
        tab.feed(told(MARKDOWN))
        tab.close_feed()
        tab.wait_for("done")
        assert tab.text() == MARKDOWN
        toggle = tab.page.get_by_role("button", name="Formatted")
        expect(toggle).to_have_attribute("aria-pressed", "false")
        toggle.focus()
        tab.page.keyboard.press("Enter")
        expect(toggle).to_have_attribute("aria-pressed", "true")
        assert is_formatted(tab)
        shown = tab.page.locator(".formatted")
        texts = {
            tag: shown.locator(tag).all_text_contents()
            for tag in ("h4", "strong", "em", "p code", "a", "li", "th", "td", "pre")
        }
        assert texts == {
            "h4": ["Sum"],
            "strong": ["Three"],
            "em": ["four"],
            "p code": ["7"],
            "a": ["here"],
            "li": ["one", "two"],
            "th": ["a", "b"],
            "td": ["1", "2"],
            "pre": ['print("<i>")\n'],
        }
        assert "Next line, 3 * 4 & <b>more</b>" in shown.inner_text().splitlines()
        assert shown.locator("ol").get_attribute("start") == "3"
        assert shown.locator("td").nth(1).evaluate("cell => getComputedStyle(cell).textAlign") == "right"
        link = shown.get_by_role("link")
        assert link.get_attribute("href") == "https://example.org/a?b=c&d"
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
        toggle.click()
        expect(shown).to_have_count(0)
        expect(tab.page.locator(".answer .text")).to_be_visible()
        assert tab.text() == MARKDOWN
        assert tab.page.locator(".text .token").count() == 1


def test_the_chosen_view_is_that_of_later_answers_and_holds_over_a_reload(opened: Opener, server: Running) -> None:
    with opened(server, is_fed=True) as tab:
        tab.answer(told("*one*"))
        tab.page.get_by_role("button", name="Formatted").click()
        tab.ask("And now?")
        tab.wait_for("writing", 1)
        expect(tab.page.locator(".answer .text").nth(1)).to_be_visible()  # tokens, as long as they come
        tab.feed(told("*two*"))
        tab.close_feed()
        tab.wait_for("done", 1)
        expect(tab.page.locator(".formatted em")).to_have_text(["one", "two"])
        tab.page.reload()
        expect(tab.page.locator(".formatted em")).to_have_text(["one", "two"])


def test_nothing_that_a_model_writes_runs_or_loads_or_leads_into_the_page(opened: Opener, server: Running) -> None:
    with opened(server, is_fed=True) as tab:
        for answer_idx, text in enumerate(HOSTILE):
            tab.ask("How many?")
            tab.wait_for("writing", answer_idx)
            tab.feed(told(text))
            tab.close_feed()
            tab.wait_for("done", answer_idx)
            if not answer_idx:
                tab.page.get_by_role("button", name="Formatted").click()
            assert tab.text(answer_idx) == text
        shown = tab.page.locator(".formatted")
        assert shown.count() == len(HOSTILE)
        links = shown.locator("a").all()
        hrefs = [link.get_attribute("href") or "" for link in links]
        assert hrefs
        assert all(href.startswith("https://example.org/") for href in hrefs)
        for link in shown.locator("a, span").all():
            link.dispatch_event("mouseover")
        names = shown.locator("*").evaluate_all("all => all.flatMap((one) => one.getAttributeNames())")
        assert set(names) <= {
            "class",
            "href",
            "target",
            "rel",
            "tabindex",
            "role",
            "aria-label",
            "start",
            "style",
            "type",
        }
        tags = set(shown.locator("*").evaluate_all("all => all.map((one) => one.tagName)"))
        assert not tags & {"IMG", "SCRIPT", "SVG", "IFRAME", "STYLE", "BASE", "OBJECT", "EMBED", "FORM", "INPUT"}
        assert tab.page.evaluate("window.hit") is None
        expect(tab.page.locator("#question")).to_be_visible()
        assert tab.page.url == f"{server.url}/"


def test_the_policy_alone_keeps_html_from_being_made_of_text(opened: Opener, server: Running) -> None:
    with opened(server) as tab:
        refused = """html => {
          try { document.body.innerHTML = html; return "made"; } catch (error) { return error.name; }
        }"""
        assert tab.page.evaluate(refused, HOSTILE[0]) == "TypeError"
        tab.faults.clear()  # the browser tells of the attempt


def test_code_of_others_is_what_was_published_and_names_its_licences(server: Running) -> None:
    said = (VENDOR / "LICENSES.txt").read_text("utf-8")
    files = [path for path in VENDOR.iterdir() if path.suffix == ".js"]
    assert files
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert re.search(rf"^{path.name}\n(  .*\n)*  sha256:  {digest}$", said, re.MULTILINE), path.name
        sent = server.client.get(f"/playground/vendor/{path.name}")
        assert (sent.content, sent.headers["content-type"]) == (path.read_bytes(), "text/javascript; charset=utf-8")
    sections = dict(re.findall(r"^---- (.+) ----\n\n(.+)$", said, re.MULTILINE))
    assert {"markdown-it", "linkify-it", "mdurl", "punycode.js", "uc.micro", "entities"} == set(sections)
    assert all(line.startswith("Copyright") for line in sections.values())


# ---- code ----------------------------------------------------------------------------------------------------------


CODE = [
    ("Take", False),
    (" `", True),
    ("len", True),
    ("`", True),
    (":\n\n", False),
    ("```", True),
    ("python\n", True),
    ("def f():\n", True),
    ("\n", True),
    ("    return 1", True),
    ("\n", True),
    ("```", True),
    ("\n\n", True),  # it ends the line of the fence
    ("That is all.", False),
]


def test_code_is_in_a_code_font_while_it_comes_before_its_fence_is_closed(opened: Opener, server: Running) -> None:
    fonts = """[...document.querySelectorAll(".answer .token")].map((one) => getComputedStyle(one).fontFamily)"""
    with opened(server, is_fed=True) as tab:
        tab.ask("Write a function")
        tab.wait_for("writing")
        for token_idx, (text, _) in enumerate(CODE):
            token = {"token_id": token_idx, "text": text, "origin": "plain", "alternatives": []}
            tab.feed(sse((text, [token], None)).removesuffix(b": a comment\r\ndata: [DONE]\r\n\r\n"))
            expect(tab.page.locator(".answer .token")).to_have_count(token_idx + 1)
            assert ("mono" in tab.page.evaluate(fonts)[-1].lower()) == CODE[token_idx][1], text
        tab.page.reload()
        tab.wait_for("stopped")
        shown = ["mono" in font.lower() for font in tab.page.evaluate(fonts)]
        assert shown == [is_code for _, is_code in CODE]
        assert faults_by_axe(tab.page) == []


@pytest.mark.parametrize(
    "text",
    [
        "a\n```\nb\n\nc\n```\nd\n",
        "a\n\n~~~~ py\n~~~\n```\n~~~~~\nb\n",
        "````\n```\n````\nb\n",
        "```\nopen to the end\n",
        "``` not ` a fence\nb\n",
        "```\n``` py\n```\nb\n",
        "1. a\n\n   ```sh\n   b\n   ```\n\n2. c\n",
        "- ```\n  b\n  ```\n\nc\n",
        "> ```\n> b\n> ```\n\nc\n",
    ],
)
def test_code_is_found_line_by_line_where_markdown_finds_it(opened: Opener, server: Running, text: str) -> None:
    """Letters stand for lines: those in code must be the ones that the finished, formatted answer has in code."""
    find = """async (text) => {
      const { CodeFinder } = await import("/playground/code.js");
      const { formatted } = await import("/playground/markdown.js");
      const finder = new CodeFinder();
      const lines = text.split(/(?<=\\n)/).filter((line) => finder.push(line)).filter((line) => /[a-z]/.test(line));
      return [lines.join(""), [...formatted(text).querySelectorAll("pre")].map((one) => one.textContent).join("")];
    }"""
    with opened(server) as tab:
        found, wanted = tab.page.evaluate(find, text)
    inside = [line.strip("> ") for line in found.splitlines() if not re.match(r"[\s>\-1.]*(```|~~~)", line)]
    assert inside == [line.strip() for line in wanted.splitlines() if re.match(r"\s*[a-z]", line)]


# ---- copying --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_clipboard", [True, False], ids=["clipboard", "no clipboard, as without TLS"])
def test_an_answer_and_its_code_are_copied_as_they_are(opened: Opener, server: Running, has_clipboard: bool) -> None:
    permissions = ["clipboard-read", "clipboard-write"]
    with opened(server, is_fed=True, permissions=permissions) as tab:
        if not has_clipboard:
            tab.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        tab.answer(told(MARKDOWN))
        tab.page.get_by_role("button", name="Copy the answer").click()
        expect(tab.page.get_by_role("button", name="Copied the answer")).to_be_focused()
        expect(tab.page.locator("#said")).to_have_text("Copied the answer.")
        assert _pasted(tab.page) == MARKDOWN
        tab.page.get_by_role("button", name="Formatted").click()
        tab.page.get_by_role("button", name="Copy the code").click()
        expect(tab.page.get_by_role("button", name="Copied the code")).to_be_visible()
        assert _pasted(tab.page) == 'print("<i>")\n'


def _pasted(page: Page) -> str:
    page.fill("#question", "")
    page.press("#question", "Control+V")
    return page.input_value("#question")


# ---- keeping --------------------------------------------------------------------------------------------------------


def test_a_conversation_survives_a_reload_with_all_that_is_known_of_it(opened: Opener, server: Running) -> None:
    with opened(server) as tab:
        tab.set(max_tokens=24, system="Be brief.")
        tab.page.check("#sends-earlier")
        tab.page.check("#races")
        tab.ask(PROMPT)
        expect(tab.page.locator(".verdict")).to_be_visible()
        tab.page.uncheck("#races")
        tab.ask("And more?")
        tab.wait_for("done", 2)
        before = _shown(tab)
        tab.page.reload()
        tab.wait_for("done", 2)
        assert _shown(tab) == before
        expect(tab.page.locator("#intro")).to_be_hidden()
        tab.page.locator(".text .token").nth(3).hover()
        expect(tab.page.locator("#peek")).to_contain_text("Number 4 of the answer")
        tab.set(max_tokens=4)
        tab.page.check("#sends-earlier")
        tab.ask("Again?")
        tab.wait_for("done", 3)
        asked = [(one["role"], one["content"]) for one in tab.requests[-1]["messages"]]
        assert asked == [
            ("system", "Be brief."),
            *(("user", PROMPT), ("assistant", tab.text(0))),
            *(("user", "And more?"), ("assistant", tab.text(2))),
            ("user", "Again?"),
        ]


def test_a_new_conversation_forgets_the_old_one(opened: Opener, server: Running) -> None:
    with opened(server, is_fed=True) as tab:
        tab.answer(sse((ANSWER, TOKENS, "stop")))
        tab.page.get_by_role("button", name="New conversation").click()
        expect(tab.page.locator("#intro")).to_be_visible()
        stored = "JSON.stringify([...Object.values(localStorage), ...Object.values(sessionStorage)])"
        assert "eggs" not in tab.page.evaluate(stored)
        tab.page.reload()
        expect(tab.page.locator("#state")).not_to_be_empty()
        assert tab.page.locator(".turn").count() == 0


def test_a_reload_while_an_answer_comes_keeps_what_has_come(opened: Opener, server: Running) -> None:
    with opened(server, is_fed=True) as tab:
        tab.ask("How many?")
        tab.wait_for("writing")
        tab.feed(sse(("Six", TOKENS[:1], None)).removesuffix(b": a comment\r\ndata: [DONE]\r\n\r\n"))
        expect(tab.page.locator(".answer .text")).to_have_text("Six")
        tab.page.reload()
        tab.wait_for("stopped")
        assert tab.text() == "Six"


def test_each_tab_keeps_its_own_conversation_and_a_new_one_goes_on_with_the_last(
    opened: Opener, server: Running
) -> None:
    with opened(server, is_fed=True) as tab:
        tab.answer(told("first"))
        other = tab.page.context.new_page()
        other.goto(server.url)
        expect(other.locator(".answer .text")).to_have_text("first")
        other.click("#new")
        expect(other.locator(".answer")).to_have_count(0)
        tab.page.reload()
        expect(tab.page.locator(".answer .text")).to_have_text("first")


def test_what_is_kept_is_bounded_and_the_newest_turns_stay(opened: Opener, server: Running) -> None:
    candidate = {"token_id": 2, "text": "x" * 300_000, "path_logprob": -1.0, "writer": "beam"}

    def turn(name: str) -> dict[str, Any]:
        token = {"token_id": 1, "text": name, "origin": "", "alternatives": [candidate]}
        piece = {"text": name, "tokens": [token], "finishReason": "stop", "metrics": None}
        answer = {"lane": "card", "title": "CARD", "state": "done", "steps": [[4, [piece]]]}
        return {"question": name, "answers": [answer]}

    fill = """async ({ turns }) => (await import("/playground/kept.js")).save("", turns)"""
    with opened(server) as tab:
        tab.page.evaluate(fill, {"turns": [turn(name) for name in "abcde"]})
        stored = tab.page.evaluate("localStorage['card.conversation']")
        assert len(stored) < 1_000_100
        assert tab.page.evaluate("sessionStorage['card.conversation']") == stored
        tab.page.reload()
        expect(tab.page.locator(".answer .text")).to_have_text(list("abcde"))
        tokens = tab.page.locator(".text .token")
        for token_idx, has_candidates in enumerate((False, False, True, True, True)):
            tokens.nth(token_idx).focus()
            expect(tab.page.locator("#peek table")).to_have_count(int(has_candidates))
        long = [turn("old"), turn("y" * 250_000), turn("new")]
        tab.page.evaluate(fill, {"turns": long})
        tab.page.reload()
        expect(tab.page.locator(".answer .text").last).to_have_text("new")
        assert "old" not in tab.page.locator(".question").all_text_contents()


@pytest.mark.parametrize("kept", ["{", "null", "[]", '{"version": 1}', '{"version": 1, "turns": [{}], "system": ""}'])
def test_what_cannot_be_read_is_no_conversation(opened: Opener, server: Running, kept: str) -> None:
    with opened(server, is_fed=True) as tab:
        tab.page.evaluate("kept => { localStorage['card.conversation'] = kept; }", kept)
        tab.page.reload()
        expect(tab.page.locator("#state")).not_to_be_empty()
        tab.answer(told("one"))
        assert tab.page.locator(".turn").count() == 1


def test_a_page_without_storage_works(opened: Opener, server: Running) -> None:
    with opened(server, is_fed=True) as tab:
        tab.page.add_init_script(_WITHOUT_STORAGE)
        tab.page.reload()
        expect(tab.page.locator("#state")).not_to_be_empty()
        tab.answer(told("*one*"))
        tab.page.get_by_role("button", name="Formatted").click()
        assert is_formatted(tab)


def test_no_key_is_kept_with_the_conversation(opened: Opener, demo_llm: AsyncLLM) -> None:
    with serving(demo_llm, api_keys=("sesame",)) as server, opened(server) as tab:
        tab.set(max_tokens=4, key="sesame")
        tab.ask(PROMPT)
        tab.wait_for("done")
        kept = tab.page.evaluate("JSON.stringify(localStorage)")
        assert json.loads(kept)["card.conversation"]
        assert "sesame" not in kept
        assert "sesame" not in tab.page.evaluate("sessionStorage['card.conversation']")


# ---- failures, settings ---------------------------------------------------------------------------------------------


def test_a_request_that_failed_or_was_stopped_at_once_leaves_no_empty_chart(opened: Opener, server: Running) -> None:
    with opened(server, is_refused=True, is_fed=True) as tab:
        tab.page.evaluate(_UNREACHABLE)
        tab.page.check("#races")
        tab.ask("How many?")
        expect(tab.page.locator(".error")).to_contain_text("cannot be reached")
        tab.wait_for("failed", 0)
        tab.wait_for("skipped", 1)
        tab.page.uncheck("#races")
        tab.page.evaluate(_SILENT)
        tab.ask("How many?")
        tab.wait_for("writing", 2)
        tab.page.keyboard.press("Escape")
        tab.wait_for("stopped", 2)
        assert tab.page.locator(".answer:visible").count() == 3
        empty = ".answer :is(.strip, .figures, .text, .formatted, .tools):visible"
        assert tab.page.locator(empty).count() == 0
        assert tab.page.evaluate("localStorage['card.conversation']") is None


def test_top_p_is_sent_and_a_value_that_it_cannot_have_is_named(opened: Opener, server: Running) -> None:
    with opened(server) as tab:
        tab.set(max_tokens=4, temperature=1, top_p=0.5)
        tab.ask(PROMPT)
        tab.wait_for("done")
        assert tab.requests[-1]["top_p"] == 0.5
        tab.set(top_p="")
        tab.ask(PROMPT)
        tab.wait_for("done", 1)
        assert "top_p" not in tab.requests[-1]
        for wrong in ("0", "1.5"):
            tab.set(top_p=wrong)
            tab.ask(PROMPT)
            expect(tab.page.locator(".error").last).to_contain_text("Top-p: ")
        assert len(tab.requests) == 2


# ---- for everybody --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("screen", "schemes"),
    [({"viewport": {"width": 1200, "height": 800}}, ("light", "dark")), (PHONE, ("dark", "light"))],
    ids=["desk", "phone"],
)
def test_axe_finds_no_fault_with_any_state_of_the_page(
    opened: Opener, server: Running, screen: dict[str, Any], schemes: tuple[Scheme, Scheme]
) -> None:
    with opened(server, is_fed=True, color_scheme=schemes[0], **screen) as tab:
        assert faults_by_axe(tab.page) == []
        tab.page.check("#races")
        tab.ask("How many?")
        for answer_idx, text in enumerate((ANSWER, MARKDOWN)):
            tab.wait_for("writing", answer_idx)
            assert faults_by_axe(tab.page) == []
            tab.feed(sse((text, TOKENS, "stop")))
            tab.close_feed()
        expect(tab.page.locator(".verdict")).to_be_visible()
        tab.page.locator(".text .token").nth(4).focus()
        expect(tab.page.locator("#peek table")).to_be_visible()
        assert faults_by_axe(tab.page) == []
        tab.page.get_by_role("button", name="Formatted").nth(1).click()
        tab.page.evaluate(_UNREACHABLE)
        tab.page.uncheck("#races")
        tab.ask("How many?")
        expect(tab.page.locator(".error")).to_be_visible()
        for scheme in reversed(schemes):  # all that was seen before is still on the page
            tab.page.emulate_media(color_scheme=scheme)
            assert faults_by_axe(tab.page) == []
        if screen is PHONE:
            tab.page.tap("#toggle-settings")
            expect(tab.page.locator("#temperature")).to_be_visible()
            assert faults_by_axe(tab.page) == []


def test_formatted_answers_are_no_wider_than_a_phone_but_scroll_where_they_are(opened: Opener, server: Running) -> None:
    wide = "|" + "column |" * 20 + "\n|" + "---|" * 20 + "\n|" + "value |" * 20
    with opened(server, is_fed=True, **PHONE) as tab:
        tab.answer(told(f"{MARKDOWN}\n{wide}\n\n```\n{'code ' * 60}\n```\n\n{'w' * 300} `{'v' * 300}`"))
        tab.page.get_by_role("button", name="Formatted").click()
        assert tab.has_no_side_scroll()
        boxes = tab.page.locator(".formatted .scrolling")
        is_wider = boxes.evaluate_all("all => all.map((box) => box.scrollWidth > box.clientWidth)")
        assert is_wider == [False, False, True, True]
        for box in boxes.all():
            expect(box).to_have_attribute("tabindex", "0")


def _shown(tab: Tab) -> list[Any]:
    """Return what the page shows of its turns."""
    parts = ".question, .answer .text, .answer h3, .answer .state, .strip, .figures, .verdict, #system"
    texts = tab.page.locator(parts).evaluate_all("all => all.map((one) => one.value ?? one.textContent)")
    classes = tab.page.locator(".text .token, .strip rect").evaluate_all("all => all.map((one) => one.className)")
    bars = tab.page.locator(".strip svg").evaluate_all("all => all.map((one) => one.outerHTML)")
    assert len(classes) > len(CLASSES)
    return [texts, classes, bars]


def test_nothing_is_sent_that_the_user_has_not_chosen_and_an_answer_that_was_cut_off_says_so(
    opened: Opener, server: Running
) -> None:
    with opened(server) as tab:
        tab.ask(PROMPT)
        tab.wait_for("done")
        assert not {"temperature", "top_p", "max_tokens"} & tab.requests[-1].keys(), "the server's defaults hold"
        tab.set(max_tokens=3)
        tab.ask(PROMPT)
        tab.wait_for("done", 1)
        assert tab.requests[-1]["max_tokens"] == 3
        expect(tab.page.locator(".answer").last).to_contain_text("cut off")
