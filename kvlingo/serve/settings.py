"""What the server is told at its start: flags before environment before one TOML file before defaults.

Knows names, types and where a value came from. Does not know models or HTTP.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlingo.errors import BadInput

PREFIX = "KVLINGO_"
VLLM = "vllm="
ROUTERS = ("explicit", "threshold", "cascade", "learned", "token")
CACHE_DISK_BYTES = 8 << 30
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Settings:
    """All that can be set.

    Fields:
        models: name → hub id, folder or .gguf file.
        engine: `vllm=URL,URL`: the models are those that these vLLM servers serve, and none is loaded here.
        engine_key: what those servers ask for as their API key. No flag: a command line can be read by others.
        engine_salt: what whose a cache is over there is made from; the same again, and caches outlive a restart of this server.
        translators: folders that `kvlingo fit` wrote.
        keys: file of API keys' hashes (`keys.py`); None: no key is asked for.
        anyone: listen on the network without keys.
        rate_per_minute: requests a key may send; None: no limit.
        max_open: requests of one key that are read or answered at once.
        max_rows, max_queue: choices that decode together, and choices of one key that wait, for each model.
        part_tokens: of a prompt, read or translated at once, between two tokens of other answers.
        cache_bytes: of what all conversations were read as.
        cache_dir, cache_disk_bytes: where what memory has no room for is kept, and what it may take there (8 GiB unless told).
        max_tokens: of an answer whose request names none.
        router: who decides which model answers a request for `auto`; explicit: nobody, it is refused.
        rules: TOML file of limits, of switches (`kvlingo calibrate` writes those) and of the router.
        learned: folder that `kvlingo route fit` wrote, for the router learned.
        small, big: the models that the router chooses between, if not those served as small and big.
        heal: read approximate caches again, exactly, while nothing is asked for.
        ahead: translate each answered turn for the other models while nothing is asked for.
        cors_origins: pages of other hosts that may call from a browser; those of this computer always may.
        drain_s: how long running answers may go on after SIGTERM.
        keepalive_s: silence in a stream after which a comment is sent.
        otlp_endpoint: collector that takes a span for each request (OTLP over HTTP); None: as OpenTelemetry's variables say.
        stall_s: how long a client may leave a stream unread, and how long it may take to send a body.
    """

    models: Mapping[str, str] = dataclasses.field(default_factory=dict)
    engine: str | None = None
    engine_key: str | None = dataclasses.field(default=None, repr=False)
    engine_salt: str | None = dataclasses.field(default=None, repr=False)
    translators: tuple[Path, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    keys: Path | None = None
    anyone: bool = False
    rate_per_minute: int | None = None
    max_body_bytes: int = 4_000_000
    max_tokens: int = 1024
    max_open: int = 256
    max_rows: int = 8
    max_queue: int = 64
    part_tokens: int = 512
    cache_bytes: int = 2 << 30
    router: str = "explicit"
    rules: Path | None = None
    learned: Path | None = None
    small: str | None = None
    big: str | None = None
    cache_dir: Path | None = None
    cache_disk_bytes: int | None = None
    heal: bool = False
    ahead: bool = False
    cors_origins: tuple[str, ...] = ()
    drain_s: float = 30.0
    keepalive_s: float = 10.0
    stall_s: float = 60.0
    otlp_endpoint: str | None = None
    dtype: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        positive = (
            "rate_per_minute",
            "max_body_bytes",
            "max_tokens",
            "max_open",
            "max_rows",
            "max_queue",
            "part_tokens",
            "cache_bytes",
            "cache_disk_bytes",
        )
        for name, bound in {"port": 0, **dict.fromkeys(positive, 1)}.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise BadInput(f"{name} is {value}; give {bound} or more")
        if self.port > 65535:
            raise BadInput(f"port is {self.port}; give 65535 or less")
        for name in ("drain_s", "keepalive_s", "stall_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise BadInput(f"{name} is {getattr(self, name)}; give a number of seconds above 0")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise BadInput(f"otlp_endpoint is {self.otlp_endpoint!r}; give a URL like http://127.0.0.1:4318")
        if self.cache_disk_bytes is not None and self.cache_dir is None:
            raise BadInput("cache_disk_bytes is set and cache_dir is not; give --cache-dir DIR, or leave both out")
        if self.host not in LOOPBACK and self.keys is None and not self.anyone:
            raise BadInput(
                f"host {self.host} without API keys would let everyone on the network in; "
                f"give --keys FILE, or --anyone if that is meant"
            )
        self._check_router()
        self._check_engine()

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """Return the vLLM servers' URLs; none where the models are loaded here."""
        urls = (self.engine or "").removeprefix(VLLM).split(",")
        return tuple(url.strip().rstrip("/") for url in urls if url.strip())

    def _check_engine(self) -> None:
        if self.engine is None:
            needless = next((name for name in ("engine_key", "engine_salt") if getattr(self, name) is not None), None)
            if needless:
                raise BadInput(f"{needless} is for --engine; give that too, or leave it out")
            return
        urls = self.engine_urls
        if not self.engine.startswith(VLLM) or not all(url.startswith(("http://", "https://")) for url in urls):
            raise BadInput(f"engine is {self.engine!r}; give vllm=URL,URL like vllm=http://127.0.0.1:8001")
        if not urls or len(set(urls)) < len(urls):
            raise BadInput(f"engine is {self.engine!r}; give each server's URL once")
        for name in ("models", "translators", "cache_dir", "heal", "ahead", "dtype", "device"):
            if getattr(self, name):
                raise BadInput(f"{name} is for models that are loaded here, and the engine is vllm; leave one out")
        if self.router == "token":
            raise BadInput(
                "the router token needs both models in this process, and the engine is vllm; choose another router"
            )

    @property
    def routed_models(self) -> tuple[str, str]:
        """Return the names of the small and the big model of the router."""
        return self.small or "small", self.big or "big"

    def _check_router(self) -> None:
        if self.router not in ROUTERS:
            raise BadInput(f"router is {self.router!r}; give one of: {', '.join(ROUTERS)}")
        if (self.learned is None) == (self.router == "learned"):
            raise BadInput(
                "--router learned and --learned FOLDER (what kvlingo route fit wrote) go together; give both"
            )
        if self.router == "explicit":
            needless = next((name for name in ("small", "big") if getattr(self, name)), None)
            if needless:
                raise BadInput(f"--{needless} is for a router; give --router, or leave it out")
            return
        small, big = self.routed_models
        if small == big:
            raise BadInput(f"--small and --big are both {small!r}; a router chooses between two models")
        missing = next((name for name in (small, big) if name not in self.models), None)
        if missing and self.engine is None:  # else the servers are asked what they serve (`routed`)
            raise BadInput(
                f"the router {self.router} chooses between {small!r} and {big!r}, and {missing!r} is not served; "
                "name the two with --small and --big"
            )


def read_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None
) -> tuple[Settings, dict[str, str]]:
    """Return the settings, and for each that was set where its value came from. A flag that is None was not given."""
    from_file = read_file(file) if file else {}
    from_environment = {
        name: environment[PREFIX + name.upper()] for name in READERS if environment.get(PREFIX + name.upper())
    }
    given = {name: value for name, value in flags.items() if value is not None and value != []}
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for where, source in (
        (str(file), from_file),
        ("the environment", from_environment),
        ("the command line", given),
    ):
        for name, value in source.items():
            values[name] = read_value(name, value, where)
            origin[name] = where
    return Settings(**values), origin


def read_file(file: Path) -> dict[str, Any]:
    """Read a TOML file of settings by their names; one that is not a setting is an error, not a surprise later."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"can't read the settings in {file}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{file} is not TOML: {error}") from error
    unknown = sorted(set(table) - set(READERS))
    if unknown:
        raise BadInput(f"{file} sets {unknown[0]!r}, which is not a setting; there are: {', '.join(READERS)}")
    return table


def read_value(name: str, value: Any, where: str) -> Any:
    """Read one value by its setting's type; text from the environment counts as what it spells."""
    try:
        return READERS[name](value)
    except (TypeError, ValueError) as error:
        given = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        raise BadInput(f"{name} is {given!r} in {where}; {error}") from error


# --- types -----------------------------------------------------------------------------------------------------------


def text(value: Any) -> str:
    """Take text as it is."""
    if not isinstance(value, str) or not value:
        raise ValueError("give text")
    return value


def whole(value: Any) -> int:
    """Take a whole number, or text that spells one."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("give a whole number")
    return value


def seconds(value: Any) -> float:
    """Take a number, or text that spells one."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("give a number of seconds")
    try:
        return float(value)
    except ValueError:
        raise ValueError("give a number of seconds") from None


def truth(value: Any) -> bool:
    """Take true or false, or text that spells one."""
    spelled = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    value = spelled.get(value.lower(), value) if isinstance(value, str) else value
    if not isinstance(value, bool):
        raise ValueError("give true or false")
    return value


def several(value: Any) -> tuple[str, ...]:
    """Take a list of texts, or one text with commas."""
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)
    return tuple(map(text, parts))


def paths(value: Any) -> tuple[Path, ...]:
    """Take a list of paths, or one text with commas."""
    return tuple(map(Path, map(str, value if not isinstance(value, str) else several(value))))


def path(value: Any) -> Path:
    """Take a path."""
    return value if isinstance(value, Path) else Path(text(value))


def named(value: Any) -> dict[str, str]:
    """Take a table of names, or texts like small=FOLDER."""
    if isinstance(value, Mapping):
        return {name: text(place) for name, place in value.items()}
    pairs = [part.partition("=") for part in several(value)]
    if not all(name and place for name, _, place in pairs):
        raise ValueError("give NAME=MODEL, like small=./smollm2")
    names = [name for name, _, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError("give each name once")
    return {name: place for name, _, place in pairs}


READERS: dict[str, Callable[[Any], Any]] = {
    "models": named,
    "engine": text,
    "engine_key": text,
    "engine_salt": text,
    "translators": paths,
    "host": text,
    "port": whole,
    "keys": path,
    "anyone": truth,
    "rate_per_minute": whole,
    "max_body_bytes": whole,
    "max_tokens": whole,
    "max_open": whole,
    "max_rows": whole,
    "max_queue": whole,
    "part_tokens": whole,
    "cache_bytes": whole,
    "router": text,
    "rules": path,
    "learned": path,
    "small": text,
    "big": text,
    "cache_dir": path,
    "cache_disk_bytes": whole,
    "heal": truth,
    "ahead": truth,
    "cors_origins": several,
    "drain_s": seconds,
    "keepalive_s": seconds,
    "stall_s": seconds,
    "otlp_endpoint": text,
    "dtype": text,
    "device": text,
}
"""How each setting is read. `tests/test_serve_settings.py` checks that these are all of them."""
