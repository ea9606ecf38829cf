"""The whole server, real engine and real HTTP, while things go wrong around it.

What the parts do about each fault is tested with them (`test_serve_shelf`, `test_serve_engine`, `test_serve_http`). Here: what a
client sees, that nothing it was told is lost, and that the figures say what happened.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import kvlingo.files as files
from kvlingo.serve.disk import FOLDER, Disk
from kvlingo.serve.engine import LocalEngine
from kvlingo.serve.protocol import Message
from kvlingo.serve.settings import Settings
from kvlingo.translator import identity_translator
from tests import tiny
from tests.fake_engine import Serving, serving
from tests.serving import assistant, cold_ids, letters_model, printable_only, twin_engine, user
from tests.test_serve_whole import listening

CHAT = "/v1/chat/completions"
LENGTH = 6
ROOM = 1 << 30


def opening(seed: int) -> list[Message]:
    """Return a conversation of one question, long enough to be worth keeping."""
    return [user(f"codeword {7919 * (seed + 1)} {tiny.text(12, seed=seed)}")]


def right(messages: list[Message], length: int = LENGTH) -> str:
    """Return what the model alone says."""
    lm = letters_model()
    return str(lm.tokenizer.decode(cold_ids(lm, messages, length, letters_only=False)))


def body_of(model: str, messages: list[Message], **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": messages, "max_tokens": LENGTH, "temperature": 0, **fields}


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return a reply's error, having seen that it is one of OpenAI's shape."""
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def figure(url: str, line: str) -> float:
    """Return one figure by its name and labels."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    found = [each for each in text.splitlines() if each.startswith(f"{line} ")]
    assert len(found) <= 1
    return float(found[0].rsplit(" ", 1)[1]) if found else 0.0


def until(done: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)


def at_rest(url: str) -> None:
    """Wait until nothing waits or runs."""
    until(lambda: figure(url, "kvlingo_engine_queued") == figure(url, "kvlingo_engine_running") == 0)


@contextmanager
def served(settings: Settings | None = None, **more: Any) -> Iterator[Serving[LocalEngine]]:
    """Serve a tiny model under two names with the identity between them."""
    buffer = more.pop("send_buffer_bytes", None)
    with (
        twin_engine(letters_model(), **more) as (engine, _),
        serving(engine, settings or Settings(), send_buffer_bytes=buffer) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def sound() -> Iterator[Serving[LocalEngine]]:
    """A server that every test must leave as well as it was."""
    with served(Settings(max_body_bytes=50_000)) as running:
        yield running
        messages = opening(99)
        assert text_of(httpx.post(f"{running.url}{CHAT}", json=body_of("a", messages), timeout=60)) == right(messages)
        at_rest(running.url)


# --- the disk --------------------------------------------------------------------------------------------------------

HANGING = """
import pathlib, sys, time
import kvlingo.files as files
from kvlingo import cli
hang, hung, real = pathlib.Path(sys.argv.pop(1)), pathlib.Path(sys.argv.pop(1)), files.write_synced
def write(path, data):
    if not hang.exists():
        return real(path, data)
    real(path, data[: len(data) // 2])
    hung.touch()
    time.sleep(3600)
files.write_synced = write
cli.main(sys.argv[1:])
"""
"""`kvlingo serve`, whose disk stops in the middle of a file once the file `hang` is there; it then makes the file `hung`."""


@contextmanager
def process(folder: Path, cache_bytes: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the server of a model in `folder` as a process; yield it with its address."""
    command = [sys.executable, "-c", HANGING, str(folder / "hang"), str(folder / "hung"), "serve"]
    command += ["--model", f"a={folder / 'model'}", "--port", "0", "--dtype", "float64", "--device", "cpu"]
    command += ["--cache-dir", str(folder / "kept")]
    environment = {**os.environ, "KVLINGO_CACHE_BYTES": str(cache_bytes)}
    place = Path(__file__).parents[1]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=place, env=environment) as run:
        try:
            assert run.stderr is not None
            yield run, listening(run.stderr)
        finally:
            run.kill()


def test_killed_while_it_spills_nothing_that_was_told_is_lost(tmp_path: Path) -> None:
    lm = tiny.language_model("llama")
    lm.model.save_pretrained(tmp_path / "model")
    lm.tokenizer.save_pretrained(tmp_path / "model")
    bias = {str(token): -100 for token in printable_only(lm)}

    def turn(url: str, name: str, messages: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Ask, hold the answer against the model alone, and return the conversation so far and what was told of it."""
        body, pinned = (
            body_of("a", messages, logit_bias=bias),
            {"X-Conversation": name},
        )  # else they share their first words
        answer = httpx.post(f"{url}{CHAT}", json=body, headers=pinned, timeout=120)
        said = text_of(answer)
        assert said == lm.tokenizer.decode(cold_ids(lm, messages, LENGTH))
        return [*messages, assistant(said), user("go on")], answer.json()["kvlingo"]

    kept = tmp_path / "kept" / FOLDER
    with process(tmp_path, cache_bytes=1) as (run, url):  # nothing stays in memory: all goes to disk
        first, _ = turn(url, "first", opening(1))
        until(
            lambda: figure(url, "kvlingo_engine_spill_written") >= 1 and not figure(url, "kvlingo_engine_spill_waiting")
        )
        (tmp_path / "hang").touch()
        second, _ = turn(url, "second", opening(2))  # the disk hangs, the client is answered
        until(lambda: (tmp_path / "hung").exists())
        run.kill()
        assert run.wait(timeout=60) == -signal.SIGKILL
    assert len(list(kept.glob(".*.partial"))) == 1
    (tmp_path / "hang").unlink()
    with process(tmp_path, ROOM) as (_, url):
        assert figure(url, "kvlingo_engine_spill_dropped_unfinished") == 1
        assert not list(kept.glob(".*.partial"))
        _, told = turn(url, "first", first)
        assert told["native_tokens"] > 0  # what was written before is there
        _, told = turn(url, "second", second)
        assert (told["native_tokens"], told["fallback"]) == (0, None)  # what was not is read again
        assert figure(url, "kvlingo_engine_spill_read") == 1
        assert figure(url, "kvlingo_engine_spill_dropped_corrupt") == 0


def test_a_corrupt_file_is_read_again_and_counted(tmp_path: Path) -> None:
    messages = opening(1)
    with served(disk=Disk(tmp_path, ROOM)) as running:
        said = text_of(httpx.post(f"{running.url}{CHAT}", json=body_of("a", messages), timeout=60))
    written = sorted((tmp_path / FOLDER).glob("*.safetensors"))
    assert written
    for file in written:
        data = bytearray(file.read_bytes())
        data[-9] ^= 1
        file.write_bytes(data)
    later = [*messages, assistant(said), user("and then?")]
    with served(disk=Disk(tmp_path, ROOM)) as running:
        answer = httpx.post(f"{running.url}{CHAT}", json=body_of("a", later), timeout=60)
        assert text_of(answer) == right(later)
        assert answer.json()["kvlingo"]["native_tokens"] == 0
        assert figure(running.url, "kvlingo_engine_spill_dropped_corrupt") == len(written)
        assert figure(running.url, "kvlingo_engine_spill_files") == 0


def hold_a_conversation(url: str, seed: int) -> None:
    """Hold three turns with both models, each answer held against the model alone."""
    messages = opening(seed)
    for model in "aba":
        said = text_of(httpx.post(f"{url}{CHAT}", json=body_of(model, messages), timeout=60))
        assert said == right(messages)
        messages = [*messages, assistant(said), user("next")]


def test_a_disk_that_fills_up_costs_no_answer_and_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with served(disk=Disk(tmp_path, ROOM), cache_bytes=1) as running:
        with monkeypatch.context() as patch:
            patch.setattr(files, "write_synced", full)
            hold_a_conversation(running.url, 1)
            until(lambda: figure(running.url, "kvlingo_engine_spill_dropped_disk_full") >= 1)
            until(lambda: not figure(running.url, "kvlingo_engine_spill_waiting"))
        assert figure(running.url, "kvlingo_engine_spill_written") == 0
        assert not list((tmp_path / FOLDER).glob(".*.partial"))
        hold_a_conversation(running.url, 2)
        until(lambda: figure(running.url, "kvlingo_engine_spill_written") >= 1)


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        with served(disk=Disk(tmp_path, ROOM), cache_bytes=1) as running:
            hold_a_conversation(running.url, 1)
            until(lambda: figure(running.url, "kvlingo_engine_spill_dropped_disk_full") >= 1)
            at_rest(running.url)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


# --- the translator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_translator_that_raises_is_told_and_counted(stream: bool) -> None:
    translator = identity_translator(letters_model().geometry, torch.float64)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the-secret-word")

    translator.stream = broken  # type: ignore[method-assign]
    with served(translator=translator) as running:
        messages = opening(1)
        said = text_of(httpx.post(f"{running.url}{CHAT}", json=body_of("a", messages), timeout=60))
        later = [*messages, assistant(said), user("and then?")]
        reply = httpx.post(f"{running.url}{CHAT}", json=body_of("b", later, stream=stream), timeout=60)
        answer, told = streamed(reply) if stream else (text_of(reply), reply.json()["kvlingo"])
        assert answer == right(later)
        assert told["fallback"].startswith("RuntimeError:")
        assert (told["translated_tokens"], told["recomputed_tokens"]) == (0, told["recomputed_tokens"])
        assert "secret" not in reply.text
        assert figure(running.url, 'kvlingo_fallbacks_total{reason="RuntimeError"}') == 1
        assert figure(running.url, 'kvlingo_switches_total{kind="reprefill"}') == 1


def streamed(reply: httpx.Response) -> tuple[str, dict[str, Any]]:
    """Return the text of a stream and the `kvlingo` object of its last chunk."""
    assert reply.status_code == 200
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    return text, chunks[-1]["kvlingo"]


# --- clients ---------------------------------------------------------------------------------------------------------


def test_a_client_that_does_not_read_holds_nobody_up_and_is_let_go() -> None:
    settings = Settings(stall_s=1.0, keepalive_s=0.5)
    with served(settings, send_buffer_bytes=8192) as running:
        fat = body_of("a", opening(1), stream=True, logprobs=True, top_logprobs=20, n=4) | {"max_tokens": 80}
        content = json.dumps(fat).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", running.port))
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            hold_a_conversation(running.url, 2)
            until(lambda: figure(running.url, "kvlingo_cancelled_total") == 1)
        at_rest(running.url)
        hold_a_conversation(running.url, 3)


def test_a_flood_is_refused_in_order_and_what_is_taken_is_right() -> None:
    flood, length = 60, 24
    with served(Settings(max_open=24), max_rows=2, max_queue=4) as running:

        async def all_at_once() -> list[httpx.Response]:
            limits = httpx.Limits(max_connections=flood)
            async with httpx.AsyncClient(base_url=running.url, timeout=120, limits=limits) as client:
                bodies = (body_of("a", opening(seed)) | {"max_tokens": length} for seed in range(flood))
                return await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))

        replies = asyncio.run(all_at_once())
        at_rest(running.url)
        taken = [seed for seed, reply in enumerate(replies) if reply.status_code == 200]
        refused = [reply for reply in replies if reply.status_code != 200]
        assert len(taken) >= 2
        assert len(refused) >= flood // 3
        for reply in refused:
            assert reply.status_code == 429
            assert error_of(reply)["code"] in ("queue_full", "too_many_open")
            assert int(reply.headers["retry-after"]) >= 1
        for seed in taken[:8]:
            assert text_of(replies[seed]) == right(opening(seed), length)
        assert figure(running.url, f'kvlingo_requests_total{{route="{CHAT}",status="429"}}') == len(refused)
        hold_a_conversation(running.url, 1)


def test_many_large_bodies_at_once(sound: Serving[LocalEngine]) -> None:
    async def all_at_once() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=sound.url, timeout=120) as client:
            large = b'{"model": "a", "messages": [{"role": "user", "content": "' + b"x" * 10_000_000
            headers = {"Content-Type": "application/json"}
            small = body_of("a", opening(1))
            work = [client.post(CHAT, content=large, headers=headers) for _ in range(8)]
            return await asyncio.gather(*work, client.post(CHAT, json=small))

    *large, small = asyncio.run(all_at_once())
    assert {(reply.status_code, error_of(reply)["code"]) for reply in large} == {(413, "request_too_large")}
    assert text_of(small) == right(opening(1))


@pytest.mark.parametrize(
    "content",
    [b'{"model": "\xff\xfe"}', b'{"model": "a", "messages": [{"role": "user", "content": "\xc3("}]}', b"\xed\xa0\x80"],
    ids=["model", "content", "nothing else"],
)
def test_bytes_that_are_no_utf8(sound: Serving[LocalEngine], content: bytes) -> None:
    reply = httpx.post(f"{sound.url}{CHAT}", content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert "UTF-8" in error_of(reply)["message"]


def test_half_a_character_as_an_escape_breaks_nothing(sound: Serving[LocalEngine]) -> None:
    """JSON can spell what UTF-8 can't: half of a pair. It is refused like other broken text."""
    content = rb'{"model": "a", "messages": [{"role": "user", "content": "\ud83d"}]}'
    reply = httpx.post(f"{sound.url}{CHAT}", content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    error_of(reply)


@pytest.mark.parametrize(
    "headers",
    [{b"X-Conversation": b"\xff\xfe"}, {b"Content-Type": b"application/\xff"}, {b"Authorization": b"Bearer \xff"}],
    ids=lambda headers: next(iter(headers)).decode(),
)
def test_headers_that_are_no_text(sound: Serving[LocalEngine], headers: dict[bytes, bytes]) -> None:
    content = json.dumps(body_of("a", opening(1))).encode()
    sent = {b"Content-Type": b"application/json", **headers}
    reply = httpx.post(f"{sound.url}{CHAT}", content=content, headers=sent, timeout=60)
    if b"Authorization" in headers:  # no key is asked for here
        assert text_of(reply) == right(opening(1))
    else:
        assert reply.status_code in (400, 415)
        error_of(reply)
