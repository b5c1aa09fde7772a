"""What a model thinks, in the playground: shown while it comes, folded once the answer begins, and kept."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.browser import faults_by_axe
from tests.server.browsing import Opener
from tests.server.running import Running
from tests.server.scripted import scripted_bytes, served
from tests.server.test_parts import THINKING, THINKING_TEMPLATE

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def thinker() -> Iterator[Running]:
    yield from served(scripted_bytes(THINKING, THINKING_TEMPLATE))


def event(delta: dict[str, str], reason: str | None = None) -> bytes:
    return f"data: {json.dumps({'choices': [{'delta': delta, 'tokens': [], 'finish_reason': reason}]})}\n\n".encode()


def test_thoughts_are_open_while_they_come_and_fold_when_the_answer_begins(opened: Opener, thinker: Running) -> None:
    with opened(thinker, is_fed=True) as tab:
        tab.ask("How many?")
        tab.wait_for("writing")
        tab.feed(event({"reasoning_content": "Six "}))
        thoughts = tab.page.locator(".answer details.thoughts")
        expect(thoughts).to_have_attribute("open", "")
        tab.feed(event({"reasoning_content": "<b>and</b> two"}))
        expect(thoughts).to_contain_text("Six <b>and</b> two")
        assert not tab.text()
        tab.feed(event({"content": "Eight"}))
        expect(thoughts).not_to_have_attribute("open", "")
        tab.feed(event({}, "stop") + b"data: [DONE]\n\n")
        tab.close_feed()
        tab.wait_for("done")
        assert tab.text() == "Eight"
        expect(thoughts).not_to_have_attribute("open", "")


def test_folded_thoughts_open_at_a_click_and_are_there_after_a_reload(opened: Opener, thinker: Running) -> None:
    with opened(thinker) as tab:
        tab.ask("plain")
        tab.wait_for("done")
        assert tab.text() == "No.\nYes"
        for _ in range(2):
            thoughts = tab.page.locator(".answer details.thoughts")
            expect(thoughts).to_have_count(1)
            expect(thoughts).not_to_have_attribute("open", "")
            thoughts.locator("summary").press("Enter")
            expect(thoughts).to_have_attribute("open", "")
            expect(thoughts).to_contain_text("I see.\nReally")
            assert not faults_by_axe(tab.page)
            tab.page.reload()
        assert [[one["role"] for one in asked["messages"]] for asked in tab.requests] == [["user"]]
