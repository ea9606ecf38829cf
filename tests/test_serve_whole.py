"""The whole server on tiny models: the OpenAI client, HTTP, the engine, translators, and `kvlingo serve` as a process."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from kvlingo import cli
from kvlingo.commands.console import BAD_INPUT
from kvlingo.errors import BadInput
from kvlingo.language_model import LanguageModel
from kvlingo.manifest import Manifest, ModelCard
from kvlingo.serve.engine import LocalEngine
from kvlingo.serve.loading import build_engine
from kvlingo.serve.settings import Settings
from kvlingo.store import save_report, save_translator
from kvlingo.translator import identity_translator
from tests import tiny
from tests.fake_engine import serving
from tests.serving import closing, printable_only, twin_engine

REPO = Path(__file__).parents[1]
ROOM = 12


@pytest.fixture(scope="module")
def twins() -> Iterator[tuple[openai.OpenAI, LanguageModel]]:
    """One model under two names, with the identity between them, behind a server."""
    with (
        twin_engine() as (engine, lm),
        serving(engine, Settings()) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client, lm


@pytest.fixture(scope="module")
def cold(twins: tuple[openai.OpenAI, LanguageModel]) -> Iterator[openai.OpenAI]:
    """The same model behind a server that reads everything anew: nothing fits into its store."""
    with (
        closing(LocalEngine({"a": twins[1]})) as engine,
        serving(engine, Settings()) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def ask(client: openai.OpenAI, lm: LanguageModel, model: str, messages: list[dict[str, str]], **fields: Any) -> Any:
    bias = {str(token): -100 for token in printable_only(lm)}
    return client.chat.completions.create(
        **{  # type: ignore[call-overload]
            "model": model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": ROOM,
            "logit_bias": bias,
            **fields,
        }
    )


def test_a_conversation_that_switches_is_answered_as_by_one_model(
    twins: tuple[openai.OpenAI, LanguageModel], cold: openai.OpenAI
) -> None:
    client, lm = twins
    messages: list[dict[str, str]] = []
    for turn, model in enumerate("abbaba"):
        messages.append({"role": "user", "content": f"{tiny.text(12, seed=turn)}"})
        answer = ask(client, lm, model, messages)
        alone = ask(cold, lm, "a", messages, extra_body={"kvlingo": {"mode": "reprefill"}})
        said = answer.choices[0].message.content
        assert said == alone.choices[0].message.content
        assert answer.model == model
        ours = answer.kvlingo
        assert ours["fallback"] is None
        parts = [ours[f"{kind}_tokens"] for kind in ("native", "translated", "recomputed")]
        assert sum(parts) == answer.usage.prompt_tokens
        assert answer.usage.prompt_tokens_details.cached_tokens == parts[0]
        assert (ours["translated_tokens"] > 0) is (turn > 0 and model != "abbaba"[turn - 1])
        messages.append({"role": "assistant", "content": said})


@pytest.mark.parametrize(
    "fields", [{}, {"seed": 3, "temperature": 1.0, "n": 2}, {"logprobs": True, "top_logprobs": 2}], ids=str
)
def test_streamed_or_not_the_answer_is_the_same(
    twins: tuple[openai.OpenAI, LanguageModel], fields: dict[str, Any]
) -> None:
    client, lm = twins
    messages = [{"role": "user", "content": tiny.text(10, seed=5)}]
    whole = ask(client, lm, "a", messages, **fields)
    texts: dict[int, str] = {}
    logprobs: list[Any] = []
    with ask(client, lm, "a", messages, stream=True, **fields) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                logprobs += choice.logprobs.content if choice.logprobs else []
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    if "logprobs" in fields:
        content = whole.choices[0].logprobs.content
        assert [entry.token for entry in logprobs] == [entry.token for entry in content]
        assert "".join(entry.token for entry in content) == whole.choices[0].message.content
        for entry in content:
            top = [other.logprob for other in entry.top_logprobs]
            assert top == sorted(top, reverse=True)
            assert entry.logprob <= top[0] + 1e-9


def test_a_conversation_that_is_too_long_is_refused(twins: tuple[openai.OpenAI, LanguageModel]) -> None:
    client, lm = twins
    limit = lm.geometry.max_positions
    assert limit is not None
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, lm, "a", [{"role": "user", "content": "x " * limit}])
    assert caught.value.code == "context_length_exceeded"


def test_a_token_that_the_model_does_not_have_is_refused(twins: tuple[openai.OpenAI, LanguageModel]) -> None:
    client, lm = twins
    with pytest.raises(openai.BadRequestError):
        ask(client, lm, "a", [{"role": "user", "content": "hi"}], logit_bias={"999999999": 1})


# --- from names to a server ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model, and a translator from it to itself, as folders."""
    root = tmp_path_factory.mktemp("served")
    lm = tiny.language_model("llama", dtype=torch.float32)
    lm.model.save_pretrained(root / "model")
    lm.tokenizer.save_pretrained(root / "model")
    card = ModelCard.of(lm)
    save_translator(
        root / "translator", identity_translator(lm.geometry, torch.float32), Manifest(card, card, options={})
    )
    save_report(root / "translator", {"verdict": "PASS", "num_documents": 1, "plan": {}, "arms": {}})
    return root / "model", root / "translator"


def test_a_translator_finds_its_models(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, translator = folders
    told: list[str] = []
    settings = Settings(models={"a": str(model), "b": str(model)}, translators=(translator,), dtype="float32")
    with closing(build_engine(settings, told.append)) as engine:
        assert [info.name for info in engine.models()] == ["a", "b"]
    assert [line.partition(":")[0] for line in told[-2:]] == ["a → b", "b → a"]
    with pytest.raises(BadInput, match="not both served"):
        build_engine(Settings(models={"a": str(model)}, translators=(translator,), dtype="float32"), told.append)
    with pytest.raises(BadInput, match="a second translator"):
        build_engine(Settings(models=settings.models, translators=(translator, translator)), told.append)


def test_a_translator_whose_report_failed_is_not_used(folders: tuple[Path, Path], tmp_path: Path) -> None:
    import shutil

    model, translator = folders
    copy = tmp_path / "failed"
    shutil.copytree(translator, copy)
    save_report(copy, {"verdict": "FAIL", "num_documents": 1, "plan": {}, "arms": {}})
    told: list[str] = []
    settings = Settings(models={"a": str(model), "b": str(model)}, translators=(copy,), dtype="float32")
    with closing(build_engine(settings, told.append)):
        assert [line.rpartition("; ")[2] for line in told[-2:]] == ["not used: its report says FAIL"] * 2


def test_kvlingo_serve_answers_and_ends_on_sigterm(folders: tuple[Path, Path]) -> None:
    model, translator = folders
    command = [sys.executable, "-m", "kvlingo.cli", "serve", "--model", f"a={model}", "--model", f"b={model}"]
    command += ["--translator", str(translator), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=REPO, env={**os.environ}) as process:
        try:
            assert process.stderr is not None
            url = listening(process.stderr)
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
                messages: list[Any] = [{"role": "user", "content": tiny.text(10, seed=1)}]
                first = client.chat.completions.create(model="a", messages=messages, max_tokens=3, temperature=0)
                second: Any = client.chat.completions.create(
                    model="b",
                    messages=messages,
                    max_tokens=3,
                    temperature=0,
                    extra_body={"kvlingo": {"mode": "translate"}},
                )
            assert first.usage.completion_tokens > 0  # type: ignore[union-attr]
            assert second.choices[0].message.content == first.choices[0].message.content
            assert second.kvlingo["translated_tokens"] > 0
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_cuts_answers_off_and_ends_in_order(folders: tuple[Path, Path], sig: signal.Signals) -> None:
    """Its client is told, the process ends by itself: no abort in a model's thread, no word of a command that was stopped."""
    model, _ = folders
    command = [sys.executable, "-m", "kvlingo.cli", "serve", "--model", f"a={model}", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=REPO, env={**os.environ}) as process:
        try:
            assert process.stderr is not None
            url = listening(process.stderr)
            body = {
                "model": "a",
                "prompt": "x",
                "max_tokens": 3000,
                "stream": True,
                "logit_bias": {"1": -100},
                "stop": ["@@@@"],
            }
            with (
                httpx.Client(timeout=60) as http,
                http.stream("POST", f"{url}/v1/completions", json=body) as response,
            ):
                lines = response.iter_lines()
                next(lines)
                process.send_signal(sig)
                wait_until_draining(url)
                process.send_signal(sig)
                said = [line for line in lines if line]
            assert process.wait(timeout=60) == 0
            rest = process.stderr.read()
        finally:
            process.kill()
    assert '"shutting_down"' in said[-1] or said[-1] == "data: [DONE]"
    assert "Aborted" not in rest
    assert "stopped:" not in rest


def wait_until_draining(url: str) -> None:
    end = time.monotonic() + 30
    while httpx.get(f"{url}/readyz").status_code != 503 and time.monotonic() < end:
        time.sleep(0.01)


def listening(lines: Iterator[str]) -> str:
    """Return where the server says that it listens."""
    end = time.monotonic() + 120
    for line in lines:
        assert time.monotonic() < end
        if line.startswith("{") and json.loads(line)["event"] == "listening":
            return str(json.loads(line)["url"])
    raise AssertionError("the server ended")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--model NAME=MODEL"),
        (["--model", "a"], "give NAME=MODEL"),
        (["--host", "0.0.0.0", "--model", "a=b"], "--keys FILE"),
        (["--config", "nowhere.toml"], "can't read the settings"),
    ],
    ids=["no model", "no name", "network", "no file"],
)
def test_what_kvlingo_serve_refuses_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", *arguments])
    assert caught.value.code == BAD_INPUT
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1


def test_without_the_extra_the_command_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "kvlingo.serve.gateway")
    monkeypatch.delattr("kvlingo.serve.gateway")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit):
        cli.main(["serve", "--model", "a=b"])
    assert "pip install 'kvlingo[serve]'" in capsys.readouterr().err
