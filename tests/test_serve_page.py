"""The page in a real browser: headless Chromium, by keyboard, on a desk and on a phone."""

from __future__ import annotations

import io
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvlingo.serve.keys import digest_of
from kvlingo.serve.loading import build_engine
from kvlingo.serve.protocol import Busy, Route
from kvlingo.serve.routing.cascade import Cascade, CascadeRule
from kvlingo.serve.routing.choosing import Pair
from kvlingo.serve.routing.routed import RoutedEngine
from kvlingo.serve.settings import Settings
from tests.fake_engine import FakeEngine, Serving, serving
from tests.fake_vllm import FakeVllm, Store, running

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
Image = pytest.importorskip("PIL.Image", reason="needs the Python package pillow, which comes with matplotlib")
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
    with opened(browser, served.url, request.param) as page:
        until(page, "document.querySelectorAll('#model option').length > 0")
        yield page


@contextmanager
def opened(browser: Any, url: str, viewport: dict[str, int]) -> Iterator[Any]:
    """Open the page; it must neither fail nor break its own rules."""
    page = browser.new_page(viewport=viewport)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if "Content Security Policy" in said.text else None)
    page.goto(url)
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


def tab_to(page: Any, name: str, *, back: bool = False) -> None:
    """Press Tab, or Shift+Tab, until an element has the focus: nothing is focused by a script."""
    for _ in range(12):
        if page.evaluate("document.activeElement.id || document.activeElement.classList[0]") == name:
            return
        page.keyboard.press("Shift+Tab" if back else "Tab")
    raise AssertionError(f"no Tab leads to {name}")


def keep(page: Any, name: str) -> set[tuple[int, ...]]:
    """Take a picture and see that it is not blank; leave it in a folder where one is named. Return its colours."""
    png = page.screenshot()
    if folder := os.environ.get(SCREENSHOTS):
        (Path(folder) / f"{name}-{page.viewport_size['width']}.png").write_bytes(png)
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    width, height = picture.size
    assert {"width": width, "height": height} == page.viewport_size
    counts = sorted(((count, colour) for count, colour in picture.getcolors(width * height)), reverse=True)
    ink = 1 - counts[0][0] / (width * height)
    assert len(counts) > 30, "letters have many shades"
    assert ink > 0.02, f"all but {ink:.1%} is of one colour"
    return {colour for _, colour in counts}


def colour_of(page: Any, selector: str) -> tuple[int, ...]:
    """Return the colour that a part of a bar is filled with."""
    said = page.evaluate(f"getComputedStyle(document.querySelector('{selector}')).fill")
    return tuple(int(x) for x in re.findall(r"\d+", said)[:3])


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
    page.wait_for_timeout(50)
    seen = keep(page, "page")
    for number in (1, 2, 3):
        assert colour_of(page, f".turn:last-of-type svg rect:nth-of-type({number})") in seen


def test_every_control_is_reached_and_used_by_keyboard(page: Any, served: Serving[FakeEngine]) -> None:
    tab_to(page, "model", back=True)
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.getElementById('model').value") == "org/big"
    tab_to(page, "mode")
    page.keyboard.press("ArrowDown")
    tab_to(page, "text")
    say(page, "hello", 1)
    asked = served.engine.asked[-1]
    assert (asked.model, asked.dial.mode) == ("org/big", "translate")
    tab_to(page, "compare", back=True)
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.assistant .who').length == 2")
    assert served.engine.asked[-1].dial.mode == "reprefill"
    tab_to(page, "fresh", back=True)
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.assistant').length == 0")
    say(page, "once more", 1)
    assert [message["content"] for message in served.engine.asked[-1].prompt] == ["once more"]  # type: ignore[index]


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_auto_is_chosen_like_a_model_and_says_who_answered(browser: Any, viewport: dict[str, int]) -> None:
    """A cascade that always escalates: what the router says comes to the page by the whole server."""
    engine = RoutedEngine(FakeEngine(), Cascade(Pair("small", "org/big"), CascadeRule(0.0)))
    with serving(engine, Settings(max_tokens=12)) as running, opened(browser, running.url, viewport) as page:
        until(page, "document.querySelectorAll('#model option').length == 3")
        assert page.locator("#model option").all_inner_texts() == ["small", "org/big", "auto"]
        tab_to(page, "model", back=True)
        page.keyboard.press("End")
        assert page.evaluate("document.getElementById('model').value") == "auto"
        tab_to(page, "text")
        text = say(page, "hello", 1).inner_text()
        assert "org/big" in text
        assert "chosen by cascade: mean log-probability of small" in text
        keep(page, "auto")


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_a_key_is_typed(browser: Any, tmp_path: Path, viewport: dict[str, int]) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice: {digest_of('sk-of-alice')}\n")
    engine = FakeEngine()
    with (
        serving(engine, Settings(keys=keys, max_tokens=12)) as running,
        opened(browser, running.url, viewport) as page,
    ):
        until(page, "document.getElementById('counters').textContent.includes('key')")
        assert page.locator("#model option").count() == 0
        tab_to(page, "key", back=True)
        page.keyboard.type("sk-wrong")
        page.keyboard.press("Tab")
        until(page, "document.getElementById('counters').textContent.includes('key')")
        assert page.locator("#model option").count() == 0
        tab_to(page, "key", back=True)
        page.keyboard.press("Control+A")
        page.keyboard.type("sk-of-alice")
        page.keyboard.press("Tab")
        until(page, "document.querySelectorAll('#model option').length == 2")
        tab_to(page, "text")
        say(page, "hello", 1)
        assert engine.asked[-1].tenant == "alice"
        assert "sk-of-alice" not in page.content(), "a typed key is nowhere on the page"
        keep(page, "key")


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
