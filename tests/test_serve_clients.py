"""Clients that people use, against the whole server: a conversation that changes its model, streamed and not, and an error.

Each runs its example in `examples/` as a process of its own, as its reader would. The right answers are what the tiny model says
alone, so a client that drops a message, a piece of a stream or a field is seen.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvlingo.serve.keys import digest_of
from kvlingo.serve.protocol import Message
from kvlingo.serve.settings import Settings
from tests.fake_engine import serving
from tests.serving import assistant, cold_ids, letters_model, twin_engine, user

REPO = Path(__file__).parents[1]
EXAMPLES = REPO / "examples"
CLIENTS = ("openai", "litellm", "langchain", "node", "curl")
"""Each has its own key, so that none finds what another's conversation left."""
LENGTH = 40
FIRST = [user("What is a key-value cache?")]
NODE_MODULES = REPO / ".venv" / "node" / "node_modules"
"""Where CI puts Node's packages; NODE_PATH names another folder."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One tiny model under two names with the identity between them, behind a server that asks for a key."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("".join(f"{name}: {digest_of(key_of(name))}\n" for name in CLIENTS))
    with twin_engine(letters_model()) as (engine, _), serving(engine, Settings(keys=keys)) as running:
        yield f"{running.url}/v1"


def key_of(client: str) -> str:
    """Return a client's key."""
    return f"sk-of-{client}"


def right(messages: Sequence[Message]) -> str:
    """Return what the model alone says."""
    lm = letters_model()
    return str(lm.tokenizer.decode(cold_ids(lm, messages, LENGTH, letters_only=False)))


@pytest.fixture(scope="module")
def talk() -> list[Message]:
    """Return the examples' conversation with its right answers."""
    messages = [*FIRST, assistant(right(FIRST)), user("And how large does it get?")]
    return [*messages, assistant(right(messages))]


def run(command: Sequence[str | Path], url: str, key: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a client."""
    environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "NO_PROXY": "127.0.0.1", **more}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=REPO)


def said(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return what an example printed, by who said it."""
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)


def check(found: dict[str, str], talk: list[Message], *, told: bool) -> None:
    """Hold what an example printed against the right answers; `told`: whether the client gives the `kvlingo` object."""
    assert (found["a"], found["b"]) == (talk[1]["content"], talk[3]["content"])
    if told:
        ours = json.loads(found["kvlingo"])
        assert (ours["model"], ours["source"], ours["fallback"]) == ("b", "a", None)
        assert ours["translated_tokens"] > 0
        assert ours["recomputed_tokens"] >= 4  # the tail that was asked for


def example(name: str) -> list[str]:
    """Return the command of an example in Python."""
    return [sys.executable, str(EXAMPLES / name), "a", "b"]


# --- Python ----------------------------------------------------------------------------------------------------------


def test_the_openai_client(url: str, talk: list[Message]) -> None:
    found = said(run(example("openai_chat.py"), url, key_of("openai")))
    check(found, talk, told=True)
    assert found["error"] == "NotFoundError 404 model_not_found"


def test_litellm(url: str, talk: list[Message]) -> None:
    pytest.importorskip("litellm", reason="needs the Python package litellm")
    found = said(run(example("litellm_chat.py"), url, key_of("litellm")))
    check(found, talk, told=False)
    assert found["error"] == "NotFoundError 404"


@pytest.mark.skipif(importlib.util.find_spec("langchain_openai") is None, reason="needs the package langchain-openai")
def test_langchain(url: str, talk: list[Message]) -> None:
    found = said(run(example("langchain_chat.py"), url, key_of("langchain")))
    check(found, talk, told=False)
    assert found["error"].endswith("404 model_not_found")


@pytest.mark.parametrize("name", ["openai_chat.py", "litellm_chat.py"])
def test_a_wrong_key_is_the_clients_own_error(url: str, name: str) -> None:
    if name.startswith("litellm"):
        pytest.importorskip("litellm", reason="needs the Python package litellm")
    done = run(example(name), url, key="sk-wrong")
    assert done.returncode == 1
    assert "AuthenticationError" in done.stderr


# --- Node ------------------------------------------------------------------------------------------------------------


def node_path() -> str | None:
    """Return the folder that holds Node's `openai`, or None."""
    folders = [*filter(None, os.environ.get("NODE_PATH", "").split(os.pathsep)), str(NODE_MODULES)]
    return next((folder for folder in folders if (Path(folder) / "openai" / "package.json").is_file()), None)


needs_node = pytest.mark.skipif(
    shutil.which("node") is None or node_path() is None,
    reason="needs Node and its package openai (npm install --prefix .venv/node openai, or NODE_PATH)",
)


def run_node(url: str, key: str) -> subprocess.CompletedProcess[str]:
    """Run Node's example."""
    return run(["node", EXAMPLES / "node_chat.mjs", "a", "b"], url, key, NODE_PATH=str(node_path()))


@needs_node
def test_the_openai_client_for_node(url: str, talk: list[Message]) -> None:
    found = said(run_node(url, key_of("node")))
    check(found, talk, told=True)
    assert found["error"] == "NotFoundError 404 model_not_found"


@needs_node
def test_a_wrong_key_is_an_authentication_error_in_node(url: str) -> None:
    done = run_node(url, key="sk-wrong")
    assert done.returncode == 1
    assert "AuthenticationError" in done.stderr


# --- curl ------------------------------------------------------------------------------------------------------------

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl (Debian: apt-get install curl)")


def curl(url: str, body: dict[str, Any], *flags: str, key: str = "sk-of-curl") -> subprocess.CompletedProcess[str]:
    """Send a body as the documents say."""
    headers = ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {key}"]
    return run(
        ["curl", "-sS", "--max-time", "100", *flags, f"{url}/chat/completions", *headers, "-d", json.dumps(body)],
        url,
        key,
    )


def asked(model: str, messages: Sequence[Message], **more: Any) -> dict[str, Any]:
    """Return a body."""
    return {"model": model, "messages": messages, "max_tokens": LENGTH, "temperature": 0, **more}


@needs_curl
def test_curl(url: str, talk: list[Message]) -> None:
    whole = json.loads(curl(url, asked("a", talk[:1])).stdout)
    assert whole["choices"][0]["message"]["content"] == talk[1]["content"]
    lines = curl(url, asked("b", talk[:3], stream=True), "-N").stdout.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == talk[3]["content"]
    assert chunks[-1]["kvlingo"]["native_tokens"] + chunks[-1]["kvlingo"]["translated_tokens"] > 0


@needs_curl
def test_curl_fails_on_an_error_and_shows_it(url: str, talk: list[Message]) -> None:
    done = curl(url, asked("nobody", talk[:1]), "--fail-with-body")
    assert done.returncode == 22  # what curl says of a status from 400 on
    assert json.loads(done.stdout)["error"]["code"] == "model_not_found"
    assert json.loads(curl(url, asked("a", talk[:1]), key="sk-wrong").stdout)["error"]["code"] == "invalid_api_key"
