"""Real vLLM servers for the tests in this folder, each started when the first test asks for it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvlingo.errors import KVLingoError
from kvlingo.extracts import extract_model
from kvlingo.models import load_model
from kvlingo.serve.external.entries import Entry, describe, new_id, parse
from kvlingo.serve.external.redis_store import PASSWORD
from kvlingo.serve.external.servers import HYBRID, Server, start_server, transfer_of
from kvlingo.serve.external.stores import FolderStore, Store
from kvlingo.serve.external.twins import (
    DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    exact_translator,
    make_twins,
    no_change,
)
from kvlingo.serve.external.versions import installed, refuse_version
from kvlingo.store import load_translator, save_translator
from tests.store_servers import MooncakeServer, RedisServer

HERE = Path(__file__).parent
STRANGER = "f" * 64  # the fingerprint of a source that does not exist: its translator is wrong, so what leaks is seen
TEMPLATE = (
    "{% for message in messages %}### {{ message['role'] }}: {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}### assistant: {% endif %}"
)
LOOKUP_SECONDS, LOAD_SECONDS = 5.0, 4.0
MAPPER = f"twins-full_head-bf16-tp1-h2-s{'1' * 40}-t{'2' * 40}-b1"  # what a router calls the wrong translator
ADAPTERS, RANK = ("one", "two"), 4
PIECE = 256  # tokens of a prompt that the servers `sync` and `ends` read at a time
PIECES = ("--max-num-batched-tokens", str(PIECE), "--enable-chunked-prefill")
SINK, TAIL = 2, 16  # of the server `ends`
FEW_BLOCKS = 24  # of the server `sync`: one longest prompt and a half, less than eight requests at a time want
REDIS_PASSWORD = "only in the environment"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: item.path.name == "test_vllm_kills.py"
    )  # what kills servers comes when nobody needs them
    try:
        refuse_version(installed())
        return
    except KVLingoError as error:
        skip = pytest.mark.skip(reason=f"{error} (make test-vllm runs these)")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(skip)


def wait_until(true: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for something that happens beside the test."""
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.05)
    assert true()


def write_stranger(made: Path) -> None:
    """Write the wrong translator under the name of a source of its own, as one that `kvlingo import` has read."""
    translator, manifest = load_translator(made / "wrong")
    imported = {"interchange": {"format": "semantic-router", "mapper_id": MAPPER}}
    stranger = replace(manifest, source=replace(manifest.source, fingerprint=STRANGER), options=imported)
    save_translator(made / "stranger", translator, stranger)


def write_own(made: Path) -> None:
    """Write the translator of the source to itself, which changes nothing."""
    lm = load_model(made / "source", device="cpu")
    _, manifest = load_translator(made / "translator")
    same = exact_translator(lm, lm, no_change(), text=False)
    save_translator(made / "own", same, replace(manifest, target=manifest.source))


def write_adapter(folder: Path, seed: int) -> None:
    """Write an adapter (LoRA) for the twins, as PEFT does, that changes what they say by much."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator) / HIDDEN**0.5
            weights[f"{at}.lora_B.weight"] = torch.randn(rows * DIM, RANK, generator=generator) / RANK**0.5
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**described, "bias": "none", "task_type": "CAUSAL_LM"}))


@dataclass
class Fleet:
    """All servers of a test run, by name."""

    place: Path
    running: dict[str, Server] = field(default_factory=dict)
    redis: RedisServer | None = None
    mooncake: MooncakeServer | None = None

    @property
    def store(self) -> FolderStore:
        """Return the store that all share."""
        return FolderStore(self.place / "store", 1 << 30)

    @property
    def faults(self) -> Path:
        """Return the file that says what is wrong with the store of the servers `source`, `target` and `sync`."""
        return self.place / "faults.json"

    def options(self, made: str | None = None, **more: Any) -> dict[str, Any]:
        """Return a connector's options; with `made`, for the target of these twins."""
        usual = {"store": str(self.place / "store"), "lookup_seconds": LOOKUP_SECONDS, "load_seconds": LOAD_SECONDS}
        links = [str(self.place / made / name) for name in ("translator", "stranger")] if made else []
        return {**usual, "translators": links, **more}

    def get(self, name: str) -> Server:
        """Return a server by its name; start it where it does not run."""
        self.begin(name)
        return self.running[name].wait_until_up()

    def both(self, one: str, other: str) -> tuple[Server, Server]:
        """Return two servers; those that don't run start side by side."""
        self.begin(one)
        self.begin(other)
        return self.get(one), self.get(other)

    def begin(self, name: str) -> None:
        """Start a server and don't wait for it."""
        if name not in self.running:
            self.running[name] = getattr(self, f"_{name}")(self.place / f"{name}.log")

    def end(self, *names: str) -> None:
        """Stop servers, all at once; the next `get` starts another one."""
        ended = [self.running.pop(name) for name in names]
        for server in ended:
            server.process.terminate()
        for server in ended:
            server.stop()

    def _faulty(self, model: str, name: str, log: Path, options: dict[str, Any], *arguments: str) -> Server:
        """One whose store has faults."""
        return start_server(
            self.place / "twins" / model,
            log,
            options,
            module="tests.vllm.faulty",
            environment={"KVLINGO_TEST_FAULTS": str(self.faults)},
            arguments=arguments,
            name=name,
        )

    def _source(self, log: Path) -> Server:
        """It reads chats, and so does the next one: the gateway stands before these two."""
        return self._faulty("source", "source", log, self.options(), "--chat-template", TEMPLATE)

    def _target(self, log: Path) -> Server:
        return self._faulty("target", "target", log, self.options("twins"), "--chat-template", TEMPLATE)

    def _sync(self, log: Path) -> Server:
        """Loading within a step, prompts read in pieces, few blocks, and two adapters."""
        adapters = [f"{name}={self.place / 'adapters' / name}" for name in ADAPTERS]
        lora = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", *adapters]
        blocks = ["--num-gpu-blocks-override", str(FEW_BLOCKS)]
        options = self.options("twins", load_async=False)
        return self._faulty("target", "model", log, options, *PIECES, *blocks, *lora)

    def _ends(self, log: Path) -> Server:
        """Two sinks and a tail of sixteen tokens; loading between steps, prompts read in pieces."""
        options = self.options("twins", sink=SINK, tail=TAIL, **self._in_mooncake())
        return start_server(self.place / "twins" / "target", log, options, arguments=PIECES)

    def _scaled(self, log: Path) -> Server:
        """The source with YaRN in its configuration."""
        folder = shutil.copytree(self.place / "twins" / "source", self.place / "scaled")
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
        (folder / "config.json").write_text(json.dumps(config))
        return start_server(folder, log, self.options())

    def _source_mooncake(self, log: Path) -> Server:
        return start_server(self.place / "twins" / "source", log, self.options(**self._in_mooncake()))

    def _in_mooncake(self) -> dict[str, str]:
        return {"store": self.mooncake.url} if self.mooncake is not None else {}

    def _slides(self, log: Path) -> Server:
        """Sliding and full layers, every token in all of them: it keeps caches, and goes on from its own."""
        return start_server(self.place / "slides" / "source", log, self.options() | {"translators": self.own("slides")})

    def _hybrid(self, log: Path) -> Server:
        """The same with vLLM's hybrid cache manager on: sliding layers have their window's blocks only."""
        transfer = transfer_of(self.options("slides")) | {"kv_connector": HYBRID, "kv_role": "kv_consumer"}
        return start_server(self.place / "slides" / "target", log, None, transfer=transfer)

    def _window(self, log: Path) -> Server:
        """A window in every layer: one kind of blocks, which go where the window has passed."""
        return start_server(self.place / "window" / "target", log, self.options("window"))

    def _eight(self, log: Path) -> Server:
        """Its own cache in fp8: it goes on from caches only."""
        transfer = transfer_of(self.options("twins")) | {"kv_role": "kv_consumer"}
        eight = ["--kv-cache-dtype", "fp8"]
        return start_server(self.place / "twins" / "target", log, None, transfer=transfer, arguments=eight)

    def own(self, made: str) -> list[str]:
        """Return the translator of a model to itself."""
        return [str(self.place / made / "own")]

    def _multi(self, log: Path) -> Server:
        """With a child beside ours that keeps blocks by their hashes, and so few blocks that it is asked."""
        ours = transfer_of(self.options("twins"))
        child = {
            "kv_connector": "HashedConnector",
            "kv_connector_module_path": "tests.vllm.hashed",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
        both = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [ours, child]},
        }
        return start_server(
            self.place / "twins" / "target",
            log,
            None,
            transfer=both,
            arguments=["--num-gpu-blocks-override", "12", "--max-model-len", "1024"],
        )

    def _few(self, log: Path) -> Server:
        """Another tokenizer, and so few blocks that requests push each other out."""
        return start_server(
            self.place / "others" / "target",
            log,
            self.options("others", source_tokenizers=[str(self.place / "others" / "source")]),
            arguments=["--num-gpu-blocks-override", "14", "--max-model-len", "1024"],
        )

    def _source16(self, log: Path) -> Server:
        return start_server(self.place / "twins16" / "source", log, self.options(), dtype="bfloat16")

    def _target16(self, log: Path) -> Server:
        return start_server(self.place / "twins16" / "target", log, self.options("twins16"), dtype="bfloat16")

    def _two_ranks(self, made: str, log: Path, options: dict[str, Any]) -> Server:
        return start_server(
            self.place / "twins" / made,
            log,
            options,
            arguments=["--tensor-parallel-size", "2"],
        )

    def _source_of_two(self, log: Path) -> Server:
        return self._two_ranks("source", log, self.options(extract=self.extract("source")))

    def _target_of_two(self, log: Path) -> Server:
        return self._two_ranks("target", log, self.options("twins", extract=self.extract("target")))

    def extract(self, model: str) -> str:
        """Return an extract of one of the twins: no rank loads its checkpoint."""
        folder = self.place / "extracts" / model
        if not folder.exists():
            extract_model(
                str(self.place / "twins" / model), folder, dtype=None, systems=[], overwrite=False, tell=print
            )
        return str(folder)

    def _with_redis(self, model: str, log: Path, made: str | None) -> Server:
        assert self.redis is not None
        return start_server(
            self.place / "twins" / model,
            log,
            self.options(made, store=self.redis.url),
            environment={PASSWORD: REDIS_PASSWORD},
        )

    def _source_redis(self, log: Path) -> Server:
        return self._with_redis("source", log, None)

    def _target_redis(self, log: Path) -> Server:
        return self._with_redis("target", log, "twins")

    def set_faults(self, **faults: Any) -> None:
        """Say what is wrong with the store from now on; nothing by default."""
        self.faults.write_text(json.dumps(faults))

    def relabel(self, key: str, change: Callable[[Entry], Entry], store: Store | None = None) -> str:
        """Keep a copy of a kept cache under a new id, with something else said of it."""
        store = store or self.store
        wait_until(lambda: bool(store.manifests(key)))  # its client has the id before the cache is put away
        entry, data, new = parse(store.manifests(key)[0], key), store.data(key, 0), new_id()
        entry = replace(change(entry), id=new)
        store.put(new, 0, describe(entry), data, max(entry.expires, entry.created + 600))
        return new

    def as_strangers(self, key: str, store: Store | None = None) -> str:
        """Return the same cache as one that only the wrong translator reads."""
        return self.relabel(key, lambda entry: replace(entry, fingerprint=STRANGER), store)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    place = tmp_path_factory.mktemp("vllm")
    make_twins(place / "twins")
    make_twins(place / "others", other_ids=True)
    make_twins(place / "twins16", dtype="bfloat16")
    make_twins(place / "slides", kind="gemma3")
    make_twins(place / "window", kind="mistral")
    for name in ("twins", "others", "twins16", "slides", "window"):
        write_stranger(place / name)
    write_own(place / "slides")
    for seed, name in enumerate(ADAPTERS):
        write_adapter(place / "adapters" / name, seed)
    fleet = Fleet(place)
    try:
        for name in ("source", "target"):  # nearly every test needs these; they start side by side
            fleet.begin(name)
        yield fleet
    finally:
        fleet.end(*fleet.running)


@pytest.fixture(autouse=True)
def _no_faults(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "fleet" in request.fixturenames:
        request.getfixturevalue("fleet").set_faults()
