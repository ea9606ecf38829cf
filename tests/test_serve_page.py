"""The page in a real browser: headless Chromium, by keyboard, on a desk and on a phone."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvlingo.serve.loading import build_engine
from kvlingo.serve.protocol import Busy, Route
from kvlingo.serve.settings import Settings
from tests.fake_engine import FakeEngine, Serving, serving
from tests.fake_vllm import FakeVllm, Store, running

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCREENSHOTS = "KVLINGO_SCREENSHOTS"  # a folder to leave pictures in
DESK, PHONE = {"width": 1100, "height": 760}, {"width": 390, "height": 780}
HANDED = {"native_tokens": 40, "translated_tokens": 1900, "recomputed_tokens": 60, "source": "small", "hops": 1}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def served() -> Iterator[Serving[FakeEngine]]:
    with serving(FakeEngine(), Settings(max_tokens=12)) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=[DESK, PHONE], ids=["desk", "phone"])
def page(request: pytest.FixtureRequest, browser: Any, served: Serving[FakeEngine]) -> Iterator[Any]:
    served.engine.__init__()  # type: ignore[misc]
    page = browser.new_page(viewport=request.param)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if "Content Security Policy" in said.text else None)
    page.goto(served.url)
    until(page, "document.querySelectorAll('#model option').length > 0")
    yield page
    page.close()
    assert not complaints


def until(page: Any, condition: str, seconds: float = 30.0) -> None:
    """Wait until a condition holds; the page's own rules forbid it the `eval` that `wait_for_function` needs."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"not within {seconds:g} s: {condition}"
        page.wait_for_timeout(20)


def say(page: Any, text: str, answers: int) -> Any:
    """Type and press Enter: no mouse; return the newest answer when it has ended."""
    page.keyboard.type(text)
    page.keyboard.press("Enter")
    until(page, f"document.querySelectorAll('.assistant .who').length >= {answers}")
    until(page, "!document.getElementById('send').disabled")
    return page.locator(".assistant").last


def keep(page: Any, name: str) -> None:
    if folder := os.environ.get(SCREENSHOTS):
        page.screenshot(path=str(Path(folder) / f"{name}-{page.viewport_size['width']}.png"))


def test_a_conversation_that_switches_by_keyboard_alone(page: Any, served: Serving[FakeEngine]) -> None:
    first = say(page, "hello", 1)
    assert "small · first token after 13 ms" in first.inner_text()
    page.locator("#model").select_option("org/big")
    page.locator("#text").focus()
    served.engine.begun = HANDED
    second = say(page, "and now you", 2)
    assert "org/big" in second.inner_text()
    assert "from small" in second.inner_text()
    assert second.locator("svg").get_attribute("aria-label") == "native 40, translated 1900, recomputed 60"
    widths = [float(r.get_attribute("width")) for r in second.locator("svg rect").all()]
    assert widths == pytest.approx([2, 95, 3])
    sent = served.engine.asked[-1].prompt
    assert [m["role"] for m in sent] == ["user", "assistant", "user"]  # type: ignore[index]
    keep(page, "page")


def test_the_same_turn_by_reprefill_stands_beside_it(page: Any, served: Serving[FakeEngine]) -> None:
    say(page, "hello", 1)
    page.locator(".compare").focus()
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.assistant .who').length == 2")
    assert [request.dial.mode for request in served.engine.asked[-2:]] == ["auto", "reprefill"]
    assert served.engine.asked[-1].prompt == served.engine.asked[-2].prompt
    boxes = [box.bounding_box() for box in page.locator(".sides .assistant").all()]
    is_desk = page.viewport_size == DESK
    assert (boxes[0]["y"] == boxes[1]["y"]) == is_desk


def test_how_much_longer_the_other_way_took_is_told(page: Any, served: Serving[FakeEngine]) -> None:
    say(page, "hello", 1)
    page.locator(".compare").press("Enter")
    until(page, "document.querySelectorAll('.times').length == 1")
    assert page.locator(".times").inner_text() == "by re-prefill the first token took 1.0× as long"


def test_a_long_text_is_folded_and_shown_by_keyboard(page: Any) -> None:
    page.fill("#text", "word " * 700)
    page.press("#text", "Enter")
    until(page, "document.querySelectorAll('.assistant .who').length == 1")
    button, text = page.locator(".fold"), page.locator(".user div")
    assert button.inner_text() == "Show all 700 words"
    folded = text.bounding_box()["height"]
    assert folded < 160
    button.press("Enter")
    assert (button.inner_text(), button.get_attribute("aria-expanded")) == ("Show less", "true")
    assert text.bounding_box()["height"] > 2 * folded
    button.press("Enter")
    assert text.bounding_box()["height"] == folded
    keep(page, "folded")


def test_waiting_is_told_until_the_first_word(page: Any, served: Serving[FakeEngine]) -> None:
    served.engine.prefill_s = 0.7
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    until(page, "/waiting … [0-9]+ ms/.test(document.querySelector('.waiting')?.textContent ?? '')")
    assert page.locator("#stop").is_visible()
    assert not page.locator("#send").is_visible()
    until(page, "document.querySelectorAll('.assistant .who').length == 1")
    assert page.locator(".waiting").count() == 0


def test_why_a_model_was_chosen_is_told(page: Any, served: Serving[FakeEngine]) -> None:
    served.engine.begun = {"route": Route("auto", "cascade", "its doubt was small")}
    assert "chosen by cascade: its doubt was small" in say(page, "hello", 1).inner_text()


def test_nothing_is_wider_than_the_window(page: Any) -> None:
    say(page, "w" * 300, 1)
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]


def test_an_error_is_told_and_the_text_is_given_back(page: Any, served: Serving[FakeEngine]) -> None:
    served.engine.error = Busy(3.0)
    box = say(page, "hello", 1)
    assert "the queue is full; try again in 3 s" in box.inner_text()
    assert page.locator("#text").input_value() == "hello"


def test_stopping_keeps_what_was_said(page: Any, served: Serving[FakeEngine]) -> None:
    served.engine.token_s = 0.2
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    until(page, "(document.querySelector('.assistant')?.textContent.length ?? 0) > 3")
    page.locator("#stop").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".assistant .who")
    assert "stopped" in page.locator(".assistant").inner_text()


def test_counters_tell_what_was_served(page: Any, served: Serving[FakeEngine]) -> None:
    def translated() -> int:
        found = re.search(r"translated (\d+)", page.locator("#counters").inner_text())
        return int(found[1]) if found else -1

    until(page, "document.getElementById('counters').textContent.includes('translated')")
    before = translated()
    served.engine.begun = HANDED
    say(page, "hello", 1)
    until(page, f"document.getElementById('counters').textContent.includes('translated {before + 1} ')")


def test_no_text_of_a_model_becomes_a_tag(page: Any) -> None:
    box = say(page, "<b>hello</b><img src=x onerror=alert(1)>", 1)
    assert page.locator("#turns b, #turns img").count() == page.locator("#turns .key b").count()
    assert box.count() == 1


def test_before_vllm_servers_a_switch_is_told_as_in_one_process(browser: Any) -> None:
    """The same page, with `kvlingo serve --engine vllm=…`: what the second server was passed is what the page draws."""
    store: Store = {}
    with running(FakeVllm("small", store), FakeVllm("big", store)) as servers:
        settings = Settings(engine="vllm=" + ",".join(server.url for server in servers), max_tokens=12)
        with ThreadPoolExecutor() as beside:  # the browser's loop has this thread
            engine = beside.submit(build_engine, settings, lambda _: None).result()
        with serving(engine, settings) as served:
            page = browser.new_page(viewport=DESK)
            page.goto(served.url)
            until(page, "document.querySelectorAll('#model option').length == 2")
            page.locator("#model").select_option("small")
            page.locator("#text").focus()
            first = say(page, "All of this was read by one model before the other one is asked. " * 14, 1)
            assert "small · first token after" in first.inner_text()
            page.locator("#model").select_option("big")
            page.locator("#text").focus()
            second = say(page, "And now you.", 2)
            assert "from small" in second.inner_text()
            big = servers[1].fake.asked[-1]
            kept = big["kv_transfer_params"]["kvlingo"]["load"]
            reach = sum(1 for a, b in zip(store[kept]["ids"], big["prompt"], strict=False) if a == b)
            told = second.locator("svg").get_attribute("aria-label")
            found = re.fullmatch(r"native 0, translated (\d+), recomputed (\d+)", told)
            assert found is not None, told
            assert int(found[1]) + int(found[2]) == len(big["prompt"])
            assert 900 < int(found[1]) <= reach
            until(page, "document.getElementById('counters').textContent.includes('translated 1 ')")
            page.close()
