"""The picture of the page in the README: a real conversation that goes from the small model to the large one and back.

    python -m bench.page --there DIR --back DIR [--out docs/page.png] [--phone FILE]

Serves SmolLM2-135M-Instruct and Gemma-3-270M on a loopback port as `small` and `big`, with a translator each way, and types into
the page with headless Chromium: a long text to the small model, a question to the big one with the same turn by re-prefill beside
it, and one more to the small one. Needs the Python package playwright and Chromium.
"""

from __future__ import annotations

import argparse
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.gateway import LARGE, SMALL, load_both, long_texts
from kvlingo.models import default_cache_dir
from kvlingo.serve import loading
from kvlingo.serve.engine import Limits, LocalEngine
from kvlingo.serve.gateway import listen, make_server
from kvlingo.serve.settings import Settings
from kvlingo.serve.switching import Link
from kvlingo.store import load_translator

DESK, PHONE = {"width": 1000, "height": 760}, {"width": 390, "height": 780}
NAMES = {"small": SMALL, "big": LARGE}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ANSWER_TOKENS = 32
PATIENCE_MS = 600_000


def main() -> None:
    """Take the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--there", type=Path, required=True, help="translator from small to big")
    parser.add_argument("--back", type=Path, required=True, help="translator from big to small")
    parser.add_argument("--cache", type=Path, default=default_cache_dir())
    parser.add_argument("--smollm2", type=Path, help="a folder or .gguf; fetched if not given")
    parser.add_argument("--gemma", type=Path, help="a folder or .gguf; fetched if not given")
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=Path("docs/page.png"))
    parser.add_argument("--phone", type=Path, help="one more picture, of a phone's size")
    arguments = parser.parse_args()
    arguments.repeats = 2  # a text for each picture: nothing is held of the one before
    loaded = load_both(arguments)
    models = {name: loaded[full] for name, full in NAMES.items()}
    texts = long_texts(loaded[LARGE], arguments)
    with served(models, arguments.there, arguments.back) as url, browser() as chromium:
        take(chromium, url, texts[0], DESK, arguments.out)
        if arguments.phone:
            take(chromium, url, texts[1], PHONE, arguments.phone)


@contextmanager
def served(models: dict[str, Any], there: Path, back: Path) -> Iterator[str]:
    """Serve both models with translators both ways, whether or not they were evaluated."""
    links = [link_of(models, "small", "big", there), link_of(models, "big", "small", back)]
    engine, settings = LocalEngine(models, links, Limits()), Settings(port=0, drain_s=1.0, max_tokens=ANSWER_TOKENS)
    with listen(settings) as listener:
        server = make_server(engine, settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


def link_of(models: dict[str, Any], source: str, target: str, folder: Path) -> Link:
    """Load a translator and use it once."""
    translator, _ = load_translator(folder, source=models[source], target=models[target])
    link = Link(source, target, translator.eval())
    loading.warm_up(models, link, print)
    return link


@contextmanager
def browser() -> Iterator[Any]:
    """Start headless Chromium."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise SystemExit("no Chromium here (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def take(chromium: Any, url: str, text: str, size: dict[str, int], out: Path) -> None:
    """Hold a conversation and keep a picture of it."""
    page = chromium.new_page(viewport=size)
    page.route("**/v1/chat/completions", greedily)
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    say(page, "small", "auto", f"{text}\n\nGo on in the same manner.", 1)
    say(page, "big", "translate", "What is this text about?", 2)
    page.locator(".compare").last.click()
    settled(page, 3)
    say(page, "small", "translate", "Thank you. Sum it up in a sentence.", 4)
    page.evaluate("document.getElementById('turns').scrollTop = 1e6")
    page.wait_for_timeout(300)
    page.screenshot(path=str(out))
    page.close()
    print(f"{out}: {out.stat().st_size / 1e3:.0f} kB")


def greedily(route: Any) -> None:
    """Send a request on with a temperature of 0: the same picture each time. The large one is no chat model: headings end it."""
    route.continue_(post_data=json.dumps({**route.request.post_data_json, "temperature": 0, "stop": ["\n#"]}))


def say(page: Any, model: str, mode: str, text: str, answers: int) -> None:
    """Ask a model, and wait until it has answered."""
    page.select_option("#model", model)
    page.select_option("#mode", mode)
    page.fill("#text", text)
    page.press("#text", "Enter")
    settled(page, answers)


def settled(page: Any, answers: int) -> None:
    """Wait until so many answers stand there and nothing runs."""
    page.locator(".assistant .legend").nth(answers - 1).wait_for(timeout=PATIENCE_MS)
    page.locator("#send:not([disabled])").wait_for(timeout=PATIENCE_MS)


if __name__ == "__main__":
    main()
