"""Real servers of kept caches for the tests: Redis and Mooncake, each on free ports, killed, stopped and started at will."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

from kvlingo.errors import BadInput
from kvlingo.serve.external.mooncake_store import MooncakeStore, _library
from kvlingo.serve.external.redis_store import RedisStore
from kvlingo.serve.external.stores import FolderStore, Store

UP_SECONDS = 30.0
POOL_BYTES = 128 << 20
PIECE = 1000  # bytes, in tests: small entries are cut too


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def no_redis() -> str | None:
    """Say why there is no Redis here, or None."""
    if importlib.util.find_spec("redis") is None:
        return "the client for Redis is not installed: pip install 'kvlingo[redis]'"
    if shutil.which("redis-server") is None:
        return "no redis-server here: apt-get install redis-server"
    return None


@cache
def no_mooncake() -> str | None:
    """Say why there is no Mooncake here, or None."""
    try:
        _library()
    except BadInput as error:
        return str(error)
    return None


@dataclass
class RedisServer:
    """A redis-server without a file of its own. Use it as a context."""

    folder: Path
    arguments: Sequence[str] = ()
    tls: bool = False
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        listen = ["--port", "0", "--tls-port", str(self.port)] if self.tls else ["--port", str(self.port)]
        command = ["redis-server", *listen, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self.folder), *self.arguments]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for_port(self.port, self.process)

    def kill(self) -> None:
        """End it at once; what it held is lost."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)

    def hold(self) -> None:
        """Let it answer nobody."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def release(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def client(self, **more: Any) -> Any:
        """Return a client for looking at it and for harming it."""
        import redis

        return redis.Redis(host="127.0.0.1", port=self.port, **more)


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + UP_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), 1):
                return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"nothing listens on port {port} (ended with {process.poll()})")


@dataclass
class MooncakeServer:
    """A master, and a process that lends it memory. Use it as a context."""

    folder: Path
    port: int = field(default_factory=free_port)
    master: subprocess.Popen[bytes] | None = None
    pool: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start_master()
        self.pool = self._run(
            "mooncake_client",
            "--host=127.0.0.1",
            f"--port={free_port()}",
            f"--master_server_address=127.0.0.1:{self.port}",
            "--metadata_server=P2PHANDSHAKE",
            f"--global_segment_size={POOL_BYTES}",
        )
        wait_until(lambda: b"Mounting segment" in (self.folder / "mooncake_client.log").read_bytes())
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.pool, self.master):
            if process is not None:
                process.kill()
                process.wait(30)

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"

    def start_master(self) -> None:
        self.master = self._run(
            "mooncake_master",
            f"--rpc_port={self.port}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={free_port()}",
            "--metrics_host=127.0.0.1",
        )
        wait_for_port(self.port, self.master)

    def kill_master(self) -> None:
        assert self.master is not None
        self.master.kill()
        self.master.wait(30)

    def _run(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.submodule_search_locations
        program = Path(spec.submodule_search_locations[0]) / name
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [program, *arguments], stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )


def wait_until(true: Callable[[], Any], seconds: float = UP_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.02)
    assert true()


# --- what is in a store, whichever it is -----------------------------------------------------------------------------


def rewrite(store: Store, key: str, kind: str, change: Callable[[bytes], bytes], rank: int = 0) -> None:
    """Change the bytes that a store holds of a part, behind its back: its `manifest`, or its `data`, the last piece of it."""
    if isinstance(store, FolderStore):
        file = store.folder / f"{key}.{rank}.{'json' if kind == 'manifest' else 'safetensors'}"
        file.write_bytes(change(file.read_bytes()))
    elif isinstance(store, RedisStore):
        _rewrite_redis(store, key, kind, change, rank)
    else:
        assert isinstance(store, MooncakeStore)
        _rewrite_mooncake(store, key, kind, change, rank)


def _rewrite_redis(store: RedisStore, key: str, kind: str, change: Callable[[bytes], bytes], rank: int) -> None:
    server, head = store._server, f"kvlingo:{key}"
    if kind == "manifest":
        server.hset(head, str(rank), change(server.hget(head, str(rank))))
        return
    name, count = server.hmget(head, f"{rank}:name", f"{rank}:pieces")
    place = f"{head}:{rank}:{name.decode()}:{int(count) - 1}"
    server.set(place, change(server.get(place)), keepttl=True)


def _rewrite_mooncake(store: MooncakeStore, key: str, kind: str, change: Callable[[bytes], bytes], rank: int) -> None:
    head = store._head(key, rank)
    assert head is not None
    place, prefix = f"kvlingo/{key}/{rank}", b""
    if kind == "manifest":
        prefix = store._store.get(place)[: -len(head[3])]
    else:
        place += f"/{head[1]}/{head[2] - 1}"
    new = prefix + change(store._store.get(place)[len(prefix) :])
    assert store._store.remove(place, True) == 0
    if new:
        assert store._store.put(place, new) == 0


def lose_data(store: Store, key: str) -> None:
    """Take the data of a part away and leave its manifest, as a server does that needs memory."""
    if isinstance(store, FolderStore):
        (store.folder / f"{key}.0.safetensors").unlink()
    elif isinstance(store, RedisStore):
        name = store._server.hget(f"kvlingo:{key}", "0:name").decode()
        store._server.delete(f"kvlingo:{key}:0:{name}:0")
    else:
        assert isinstance(store, MooncakeStore)
        head = store._head(key, 0)
        assert head is not None
        assert store._store.remove(f"kvlingo/{key}/0/{head[1]}/0", True) == 0
