"""The playground in a real browser: what it shows is what the server wrote, and it loads and runs nothing else."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from playwright.sync_api import expect

from card.api.async_llm import AsyncLLM
from card.engine.engine import Engine
from tests.server.browsing import ANSWER, CLASSES, TOKENS, Opener, Tab, sse
from tests.server.running import PROMPT, Running, serving
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)


# ---- what is sent ---------------------------------------------------------------------------------------------------


def test_the_page_needs_no_key_and_may_load_and_run_nothing_from_elsewhere(demo_llm: AsyncLLM) -> None:
    with serving(demo_llm, api_keys=("sesame",)) as server:
        page = server.client.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert not re.search(r"<style|<script>|\sstyle=|\son\w+=|https?:", page.text)
        links = re.findall(r'(?:src|href)="(playground/[^"]+)"', page.text)
        types = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
        assert {link.rpartition(".")[2] for link in links} == set(types)
        for link in links:
            got = server.client.get(f"/{link}")
            assert got.headers["content-type"] == types[link.rpartition(".")[2]]
            assert got.headers["x-content-type-options"] == "nosniff"
            assert got.headers["content-security-policy"] == policy
        for missing in ("playground/nothing.js", "playground/..%2fapp.py", "playground/__init__.py"):
            assert server.client.get(f"/{missing}").status_code == 404
        assert server.client.get("/v1/models").status_code == 401


def test_a_kept_copy_of_the_page_is_asked_about_each_time(shared_server: Running) -> None:
    page = shared_server.client.get("/")
    assert page.headers["cache-control"] == "no-cache"
    known = {"If-None-Match": f'"other", W/{page.headers["etag"]}'}
    again = shared_server.client.get("/", headers=known)
    assert (again.status_code, again.content) == (304, b"")
    assert shared_server.client.get("/", headers={"If-None-Match": '"other"'}).status_code == 200
    assert shared_server.client.get("/playground/main.js", headers=known).status_code == 200


# ---- an answer ------------------------------------------------------------------------------------------------------


def test_an_answer_is_the_apis_own_and_each_token_has_the_tint_of_its_origin(opened: Opener, server: Running) -> None:
    asked = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40, "seed": 0}
    wanted = server.post("/v1/chat/completions", asked).json()["choices"][0]["message"]["content"]
    with opened(server) as tab:
        tab.set(max_tokens=40)
        with tab.page.expect_response("**/v1/chat/completions") as answered:
            tab.ask(PROMPT)
        tab.wait_for("done")
        assert tab.text() == wanted
        assert {**asked, **tab.requests[0]} == tab.requests[0]
        lines = answered.value.text().splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        origins = [token["origin"] for event in events for c in event["choices"] for token in c.get("tokens", ())]
        kinds = {"": "corrected", "plain": "plain"}
        shown = tab.page.locator(".text .token").evaluate_all("all => all.map(one => one.classList[1])")
        assert shown == [kinds.get(origin, "accepted") for origin in origins]
        assert len(shown) == 40
        assert "40 tokens in" in (tab.page.locator(".figures").text_content() or "")
        label = tab.page.locator(".strip svg").get_attribute("aria-label") or ""
        assert label.startswith(f"Timeline: 40 tokens in {tab.page.locator('.strip g').count()} passes")


def test_text_is_shown_while_it_comes_however_the_events_are_cut(opened: Opener, server: Running) -> None:
    first, *others = TOKENS
    data = sse(("Six", [first], None), (ANSWER[3:], others, "stop"))
    with opened(server, is_fed=True) as tab:
        tab.ask("How many?")
        tab.wait_for("writing")
        cut = data.index(b"\r\n\r\n") + 3
        tab.feed(data[:cut])
        tab.feed(data[cut : cut + 1])
        expect(tab.page.locator(".answer .text")).to_have_text("Six")
        tab.wait_for("writing")
        each_alone = "bytes => bytes.forEach((byte) => window.feed.enqueue(new Uint8Array([byte])))"
        tab.page.evaluate(each_alone, list(data[cut + 1 :]))
        tab.close_feed()
        tab.wait_for("done")
        assert tab.text() == ANSWER
        assert tab.page.locator(".text .token").evaluate_all("all => all.map(one => one.className)") == CLASSES
        assert "suffix" in (tab.page.locator("#legend").text_content() or "")


def test_a_token_tells_of_its_alternatives_to_pointer_and_keyboard(opened: Opener, server: Running) -> None:
    with opened(server, is_fed=True) as tab:
        tab.answer(sse((ANSWER, TOKENS, "stop")))
        peek, tokens = tab.page.locator("#peek"), tab.page.locator(".text .token")
        tokens.nth(4).hover()
        expect(peek).to_be_visible()
        told = peek.inner_text()
        assert "token 11" in told
        assert re.search(r"␣and\s+50 %\s+beam\s+<b>\s+10 %\s+suffix", told)
        tab.page.mouse.move(2, 2)
        expect(peek).to_be_hidden()
        tab.page.focus("#question")
        for _ in range(20):
            tab.page.keyboard.press("Shift+Tab")
            if tokens.first.evaluate("token => token === document.activeElement"):
                break
        expect(peek).to_contain_text("Plain")
        tab.page.keyboard.press("ArrowRight")
        expect(peek).to_contain_text("the draft model had proposed it")
        tab.page.keyboard.press("End")
        tab.page.keyboard.press("ArrowLeft")
        expect(tokens.nth(4)).to_be_focused()
        expect(peek).to_contain_text("50 %")
        expect(tokens.nth(4)).to_have_attribute("aria-describedby", "peek")
        assert tab.page.locator('.text .token[tabindex="0"]').count() == 1
        tab.page.keyboard.press("Escape")
        expect(peek).to_be_hidden()


def test_html_in_questions_answers_and_candidates_is_text(opened: Opener, server: Running) -> None:
    html = "<img src=x onerror=window.hit=1>"
    beside = {"token_id": 2, "text": html, "path_logprob": -1.0, "writer": html}
    token = {"token_id": 1, "text": html, "origin": html, "alternatives": [beside]}
    with opened(server, is_fed=True) as tab:
        tab.ask(html)
        tab.wait_for("writing")
        tab.feed(sse((html, [token], "stop")))
        tab.close_feed()
        tab.wait_for("done")
        tab.page.locator(".text .token").hover()
        expect(tab.page.locator("#peek")).to_contain_text("onerror")
        assert tab.page.locator(".question").text_content() == tab.text() == html
        assert tab.page.locator("main img, #peek img").count() == 0
        assert tab.page.evaluate("window.hit") is None


# ---- racing, stopping, failing --------------------------------------------------------------------------------------


def test_a_race_runs_both_after_each_other_and_compares_speed_and_text(opened: Opener, server: Running) -> None:
    with opened(server) as tab:
        tab.set(max_tokens=32, temperature=1, seed="")
        tab.page.check("#races")
        tab.ask(PROMPT)
        verdict = tab.page.locator(".verdict")
        expect(verdict).to_contain_text(re.compile(r"Both texts are the same, all \d+ tokens\."))
        assert re.match(
            r"(CARD was [\d.]+ times as fast as plain decoding|Plain decoding was [\d.]+ times as fast as CARD"
            r"|CARD and plain decoding were equally fast)\. "
            r"Time after the first token: CARD [\d.]+ m?s, plain decoding [\d.]+ m?s\. ",
            verdict.inner_text(),
        )
        assert tab.text(0) == tab.text(1) != ""
        num_tokens = tab.page.locator('[data-lane="plain"] .token').count()  # fewer than asked for where the text ends
        assert f"all {num_tokens} tokens" in verdict.inner_text()
        ours, theirs = tab.requests
        assert theirs == {**ours, "speculation": "off"} and isinstance(ours["seed"], int)
        assert tab.page.locator('[data-lane="plain"] .token:not(.plain)').count() == 0


def test_a_race_marks_where_the_texts_part(opened: Opener, server: Running) -> None:
    with opened(server, is_fed=True) as tab:
        tab.page.check("#races")
        tab.ask("How many?")
        for answer_idx, (text, token_id) in enumerate((("a", 1), ("b", 2))):
            tab.wait_for("writing", answer_idx)
            told = [TOKENS[0], {"token_id": token_id, "text": text, "origin": "plain", "alternatives": []}]
            tab.feed(sse((f"Six{text}", told, "stop")))
            tab.close_feed()
        expect(tab.page.locator(".verdict")).to_contain_text("The texts differ from token 2 on, which is outlined")
        assert tab.page.locator(".parts").all_text_contents() == ["a", "b"]


RACES = [
    ({"cardMs": 100, "plainMs": 200}, "CARD was 2.00 times as fast as plain decoding."),
    ({"cardMs": 200, "plainMs": 100}, "Plain decoding was 2.00 times as fast as CARD."),
    ({"cardMs": 1000, "plainMs": 1001}, "CARD and plain decoding were equally fast."),
    ({"cardMs": 0, "plainMs": 0}, "The answers are too short to compare."),
    ({"cardMs": 100, "plainMs": 100, "state": "stopped"}, "The race was stopped before both had finished"),
]


@pytest.mark.parametrize(("race", "said"), RACES, ids=["won", "lost", "even", "short", "stopped"])
def test_a_verdict_says_who_was_faster_whoever_it_was(
    opened: Opener, server: Running, race: dict[str, Any], said: str
) -> None:
    judge = """async ({ cardMs, plainMs, state }) => {
      const answer = (lane, title, writingMs) =>
        ({ lane, title, writingMs, tokensPerS: 1000 / writingMs, state: state ?? "done", tokenIds: [1, 2] });
      const { verdict } = await import("/playground/race.js");
      return verdict(answer("card", "CARD", cardMs), answer("plain", "Plain decoding", plainMs)).textContent;
    }"""
    with opened(server) as tab:
        assert tab.page.evaluate(judge, race).startswith(said)


def test_the_figures_of_an_answer_agree_with_its_tokens_and_with_each_other(opened: Opener, server: Running) -> None:
    found = {"mean_acceptance_length": 2.5, "num_spec_steps": 2, "draft_acceptance_rate": 0.6}
    counts = {"num_accepted_draft_tokens": 3, "num_draft_tokens": 5}
    card = {"hit_rate": 0.0, "speculation": "turns: by measurement"}
    metrics = {"tokens_per_second": 50, "generation_time_ms": 100, "speculative_decoding": found | counts, "card": card}
    with opened(server, is_fed=True) as tab:
        tab.ask("How many?")
        tab.wait_for("writing")
        tab.feed(sse((ANSWER, TOKENS, None)).partition(b": a comment\r\ndata: [DONE]")[0])
        shares = {"of text": "50 %", "of passes": "50 %"}
        for unit, share in shares.items():
            expect(tab.page.locator(".figures dd", has_text=unit)).to_have_text(f"{share} {unit}")
        last = {"choices": [{"delta": {}, "finish_reason": "stop"}], "metrics": metrics}
        tab.feed(f"data: {json.dumps(last)}\r\n\r\ndata: [DONE]\r\n\r\n".encode())
        tab.close_feed()
        tab.wait_for("done")
        for unit, share in {**shares, "of candidates": "60 %"}.items():
            expect(tab.page.locator(".figures dd", has_text=unit)).to_have_text(f"{share} {unit}")
        overflow = "all => Math.max(...all.map((one) => one.scrollWidth - one.clientWidth))"
        assert tab.page.locator(".figures > div").evaluate_all(overflow) <= 0, "none runs into its neighbour"
        told = tab.page.locator(".figures").inner_text()
        assert "accepted: 3 of 5" in told
        assert "hit" not in told, "what the drafter had ready says nothing about the text"


def test_a_stop_frees_the_place_on_the_server_and_keeps_what_was_written(
    opened: Opener, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step

    def step_slowly(engine: Engine) -> Any:  # a fast machine would have ended the text before the browser stops it
        time.sleep(0.01)
        return step(engine)

    monkeypatch.setattr(Engine, "step", step_slowly)
    with opened(server) as tab:
        tab.set(temperature=20, max_tokens=900)
        for stops_by_key in (True, False):
            num_before = server.service.ledger.finished["abort"]
            tab.page.click("#new")
            tab.ask(PROMPT)
            expect(tab.page.locator(".text .token").first).to_be_attached()
            if stops_by_key:
                tab.page.keyboard.press("Escape")
            else:
                tab.page.click("#stop")
            tab.wait_for("stopped")
            until(server.is_idle)
            assert server.service.ledger.finished["abort"] == num_before + 1
            assert tab.text()


def test_errors_are_told_and_the_next_question_works(opened: Opener, server: Running) -> None:
    with opened(server, is_refused=True) as tab:
        tab.set(max_tokens=4)
        error = tab.page.locator(".error")
        tab.ask("too long " * 2000)
        expect(error).to_contain_text("This model's maximum context length is")
        busy = {"error": {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}}
        tab.page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=429, headers={"Retry-After": "7"}, json=busy),
            times=1,
        )
        tab.ask(PROMPT)
        expect(error.nth(1)).to_contain_text("its queue is full. Ask again in 7 s.")
        error.nth(1).get_by_text("Ask again", exact=True).click()
        tab.wait_for("done", 2)
        assert tab.text(2)


def test_an_answer_that_breaks_off_says_so(opened: Opener, server: Running) -> None:
    begun = sse(("Six", TOKENS[:1], None)).removesuffix(b": a comment\r\ndata: [DONE]\r\n\r\n")
    failed = {"error": {"message": "the target has failed", "type": "server_error", "param": None, "code": "x"}}
    tails = {"The target has failed.": f"data: {json.dumps(failed)}\n\n".encode(), "The connection broke off": b""}
    with opened(server, is_fed=True) as tab:
        for answer_idx, (told, tail) in enumerate(tails.items()):
            tab.ask("How many?")
            tab.wait_for("writing", answer_idx)
            tab.feed(begun + tail)
            if not tail:
                tab.close_feed()
            tab.wait_for("failed", answer_idx)
            expect(tab.page.locator(".error").nth(answer_idx)).to_contain_text(told)
            assert tab.text(answer_idx) == "Six"


def test_a_key_is_typed_once_and_kept_in_the_tab_only(opened: Opener, demo_llm: AsyncLLM) -> None:
    with serving(demo_llm, api_keys=("sesame",)) as server, opened(server, is_refused=True) as tab:
        tab.set(max_tokens=4, key="wrong")
        tab.ask(PROMPT)
        expect(tab.page.locator(".error")).to_contain_text("needs an API key")
        tab.page.get_by_text("To the key").click()
        expect(tab.page.locator("#key")).to_be_focused()
        tab.set(key="sesame")
        tab.page.get_by_text("Ask again", exact=True).click()
        tab.wait_for("done", 1)
        assert "sesame" not in tab.page.evaluate("JSON.stringify(localStorage)")
        tab.page.reload()
        tab.set(max_tokens=4)
        tab.ask(PROMPT)
        tab.wait_for("done")


def test_the_page_shows_the_name_by_which_clients_ask(opened: Opener, demo_llm: AsyncLLM) -> None:
    with serving(demo_llm, served_model_names=("apples", "pears")) as server, opened(server) as tab:
        name = server.client.get("/v1/models").json()["data"][0]["id"]
        assert name == "apples"
        expect(tab.page.locator("#served")).to_have_text("apples · demo-target with demo-draft · method card")


def test_the_page_says_how_the_server_and_its_drafter_do(opened: Opener, server: Running) -> None:
    with opened(server, is_refused=True) as tab:
        state = tab.page.locator("#state")
        expect(state).to_have_text("drafter up")
        down = 'card_drafter_up{model_name="demo-target"} 0.0\n'
        stuck = {"status": "unavailable", "error": {"message": "the engine is stuck", "code": "stuck"}}
        tab.page.route("**/metrics", lambda route: route.fulfill(body=down))
        tab.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        expect(state).to_have_text("drafter down: same text, plain speed")
        tab.page.route("**/health/ready", lambda route: route.fulfill(status=503, json=stuck))
        tab.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        expect(state).to_have_text("the engine is stuck")


# ---- looks ----------------------------------------------------------------------------------------------------------


def test_every_tint_can_be_read_in_both_themes_and_a_chosen_theme_stays(opened: Opener, server: Running) -> None:
    with opened(server, is_fed=True, color_scheme="light") as tab:
        tab.answer(sse((ANSWER, TOKENS, "stop")))
        pages = {"light": _colours(tab)}
        tab.page.emulate_media(color_scheme="dark")
        pages["dark"] = _colours(tab)
        tab.page.check('input[value="light"]')
        assert _colours(tab) == pages["light"] != pages["dark"]
        for colours in pages.values():
            assert len({tint for _, tint in colours}) >= 5
            assert min(_contrast(ink, tint) for ink, tint in colours) >= 4.5
        tab.page.reload()
        assert tab.page.evaluate("document.documentElement.dataset.theme") == "light"


def test_nothing_is_wider_than_a_phone(opened: Opener, server: Running) -> None:
    phone = {"viewport": {"width": 375, "height": 700}, "has_touch": True, "is_mobile": True}
    long: dict[str, Any] = {"token_id": 1, "text": "w" * 300, "origin": "plain", "alternatives": []}
    with opened(server, is_fed=True, **phone) as tab:
        assert tab.has_no_side_scroll()
        tab.page.check("#races")
        tab.ask("x" * 300)
        for answer_idx in range(2):
            tab.wait_for("writing", answer_idx)
            tab.feed(sse((ANSWER + long["text"], [*TOKENS[:-1], long], "length")))
            tab.close_feed()
        expect(tab.page.locator(".verdict")).to_be_visible()
        assert tab.has_no_side_scroll()
        tab.page.locator(".text .token").nth(4).tap()
        expect(tab.page.locator("#peek")).to_be_in_viewport(ratio=1)
        tab.page.tap("#toggle-settings")
        expect(tab.page.locator("#temperature")).to_be_in_viewport()
        assert tab.has_no_side_scroll()
        tab.page.tap("#toggle-settings")
        expect(tab.page.locator("#question")).to_be_in_viewport()


def _colours(tab: Tab) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Return ink and ground of the tokens and of quiet text, in 0 to 255."""
    found = tab.page.evaluate(
        """[...document.querySelectorAll(".text .token, .state, .figures dt, #legend li, .hint, #send")].map((one) => {
          let ground = one;
          while (getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
          return [getComputedStyle(one).color, getComputedStyle(ground).backgroundColor];
        })"""
    )
    return [(_rgb(ink), _rgb(ground)) for ink, ground in found]


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(map(float, re.findall(r"[\d.]+", colour)[:3]))


def _contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Return the ratio of two colours' luminances, from 1 to 21. Source: WCAG 2.2, contrast ratio."""
    low, high = sorted(map(_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: tuple[float, ...]) -> float:
    parts = [part / 255 for part in colour]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
