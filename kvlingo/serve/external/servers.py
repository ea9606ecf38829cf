"""A vLLM server as a process of its own, and what it is asked, for the self-test and the tests. vLLM is not imported."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kvlingo.errors import BadInput
from kvlingo.serve.external.matching import PARAMS

MODULE, CONNECTOR = "kvlingo.serve.vllm", "KVLingoConnector"
HYBRID = "KVLingoHybridConnector"  # goes on from caches only, with the hybrid cache manager on
MIDDLEWARE = "kvlingo.serve.external.headers.RouterHeaders"
UP_SECONDS = 600.0
SMALL = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # tiny models, several servers: threads that spin on one core help nobody
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Answer:
    """What a server said.

    Fields:
        logprobs: of each token.
        cached: how many tokens of the prompt were not computed.
        told: what the connector tells.
        tops: of each step the log-probabilities of the likeliest tokens, as many as were asked for.
    """

    ids: list[int]
    logprobs: list[float]
    cached: int
    told: dict[str, Any]
    tops: list[dict[int, float]]

    def far_from(self, other: Answer) -> float:
        """Return the largest difference of log-probabilities; infinity where other tokens were said."""
        if self.ids != other.ids:
            return float("inf")
        return max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))

    def apart_from(self, other: Answer) -> float:
        """Return how far apart the first tokens' distributions are: the root mean square of what log-probabilities differ by.

        Weighted by this answer's own; over the tokens that both tell of.
        """
        mine, theirs = self.tops[0], other.tops[0]
        return math.sqrt(math.fsum(math.exp(mine[i]) * (mine[i] - theirs[i]) ** 2 for i in mine.keys() & theirs.keys()))


@dataclass
class Server:
    """A running server. Use it as a context, or call `stop`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    model: str = "model"
    names: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and wait for it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """End the server and all its processes at once, as a machine that fails would."""
        os.killpg(self.process.pid, 9)
        self.process.wait(30)

    def wait_until_up(self) -> Self:
        """Wait until it answers. Raises `BadInput` with what it said last where it does not come up."""
        until = time.monotonic() + UP_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        self.stop()
        raise BadInput(f"the vLLM server did not come up: {self.reason()}")

    def reason(self) -> str:
        """Return the line of its log that says most about why it ended."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [
            line.split("]", 1)[-1].strip()
            for line in lines
            if "Error: " in line or "BadInput: " in line or "Model: " in line
        ]
        own = [line for line in errors if "kvlingo.errors" in line]
        return (own or errors or lines or ["it said nothing"])[-1 if not own else 0]

    def complete(
        self,
        ids: Sequence[int],
        *,
        count: int = 6,
        load: str | None = None,
        save: bool = False,
        salt: str | None = None,
        timeout: float = 300,
        **more: Any,
    ) -> Answer:
        """Ask for `count` greedy tokens after a prompt of ids; `load` and `save` are the connector's."""
        asked = ({"load": load} if load is not None else {}) | ({"save": True} if save else {})
        asked |= more.pop("asked", {})
        body = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": count,
            "temperature": 0,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
            "ignore_eos": True,
            **({"kv_transfer_params": {PARAMS: asked}} if asked else {}),
            **({"cache_salt": salt} if salt is not None else {}),
            **more,
        }
        reply = self.post("/v1/completions", body, timeout)
        choice = reply["choices"][0]
        logprobs = choice["logprobs"]
        chosen = list(map(_number, logprobs["tokens"]))
        tops = [{_number(token): value for token, value in row.items()} for row in logprobs["top_logprobs"]]
        cached = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        told = (reply.get("kv_transfer_params") or {}).get(PARAMS) or {}
        return Answer(chosen, logprobs["token_logprobs"], cached, told, tops)

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 300) -> dict[str, Any]:
        """Send JSON, return JSON."""
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return dict(json.load(response))

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a figure at /metrics over all lines with these labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [line for line in lines if line.startswith(name + "{") and all(label in line for label in wanted)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def _number(token: str) -> int:
    """Return the id in `token_id:7`."""
    return int(token.removeprefix("token_id:"))


def transfer_of(extra: Mapping[str, Any], module: str = MODULE) -> dict[str, Any]:
    """Return what --kv-transfer-config takes, for a server that keeps caches and goes on from them."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(extra),
    }


def start_server(
    model: Path,
    log: Path,
    extra: Mapping[str, Any] | None,
    *,
    arguments: Sequence[str] = (),
    module: str = MODULE,
    transfer: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    environment: Mapping[str, str] | None = None,
    name: str = "model",
) -> Server:
    """Start a server for a tiny model on the CPU; it is not up yet when this returns.

    Args:
        extra: the connector's options; None for a server without a connector.
        transfer: the whole of --kv-transfer-config, where it is not the usual one.
        name: what requests call the model.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if transfer is None and extra is not None:
        transfer = transfer_of(extra, module)
    with_connector = ["--kv-transfer-config", json.dumps(transfer)] if transfer is not None else []
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    command += ["--middleware", MIDDLEWARE]
    command += ["--enforce-eager", "--max-model-len", "2048", "--enable-prompt-tokens-details", "--max-logprobs", "300"]
    command += [*with_connector, *arguments]
    paths = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **SMALL, "PYTHONPATH": paths, **(environment or {})},
            start_new_session=True,
        )
    return Server(f"http://127.0.0.1:{port}", process, log, name)
