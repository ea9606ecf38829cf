"""Kept caches in a Redis server that all engines reach.

Knows Redis: one server, or a primary with its replicas; not a cluster, whose keys can't change together. Values go in pieces, for
a value of Redis is bounded and a layer of a long conversation is not. Does not know what the bytes mean.

    kvlingo:ID                   a hash: each part's manifest, and under which name how many pieces of it are
    kvlingo:ID:RANK:NAME:NUMBER  a piece
    kvlingo:index                what is there or on its way, with its size, by when it expires

A part's room is reserved first, then its pieces come, then its manifest at once with a look whether all are there. A writer that
dies on the way leaves what expires by itself. What the server throws out to keep within its own `maxmemory` is a miss, whichever
key it takes: a manifest without its pieces is found to be none, and a lost index is made anew.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvlingo.errors import BadInput
from kvlingo.serve.external.refusals import Refused
from kvlingo.serve.external.stores import UNFINISHED_SECONDS, gone, pieces, refuse_larger, taken

PASSWORD = "KVLINGO_STORE_PASSWORD"
PREFIX = "kvlingo:"
INDEX = "kvlingo:index"
PIECE_BYTES = 8 << 20
PATIENCE_SECONDS = 5.0  # for one piece: a request waits shorter or longer (`Options`), a thread never longer
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")

# What each script begins with. A member of the index is ID:RANK:NAME:PIECES:BYTES:DEADLINE; after its deadline it is there, or a
# dead writer's.
PRELUDE = """
local index, prefix = KEYS[1], 'kvlingo:'
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function read(member)
  local id, rank, name, count, size, deadline = member:match('^(%x+):(%d+):(%x+):(%d+):(%d+):(%d+)$')
  return {member = member, id = id, rank = rank, name = name, count = tonumber(count), size = tonumber(size),
          deadline = tonumber(deadline)}
end
local function there(part)
  return redis.call('HGET', prefix .. part.id, part.rank .. ':name') == part.name
end
local function forget(part)
  if there(part) then
    redis.call('HDEL', prefix .. part.id, part.rank, part.rank .. ':name', part.rank .. ':pieces')
  end
  for number = 0, part.count - 1 do
    redis.call('UNLINK', prefix .. part.id .. ':' .. part.rank .. ':' .. part.name .. ':' .. number)
  end
  redis.call('ZREM', index, part.member)
end
"""

# member, when it expires, how much all may be together
RESERVE = (
    PRELUDE
    + """
local mine, expires, most = read(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
if redis.call('HEXISTS', prefix .. mine.id, mine.rank) == 1 then return 'taken' end
local total, order, parts = mine.size, {}, {}
local listed = redis.call('ZRANGE', index, 0, -1, 'WITHSCORES')
for i = 1, #listed, 2 do
  local part = read(listed[i])
  if tonumber(listed[i + 1]) <= now or (part.deadline <= now and not there(part)) then
    forget(part)
  elseif part.member ~= mine.member then
    if not parts[part.id] then
      parts[part.id] = {}
      table.insert(order, part.id)
    end
    table.insert(parts[part.id], part)
    total = total + part.size
  end
end
for _, id in ipairs(order) do
  if total <= most then break end
  if id ~= mine.id then
    for _, part in ipairs(parts[id]) do
      forget(part)
      total = total - part.size
    end
  end
end
if total > most then return 'full' end
redis.call('ZADD', index, expires, mine.member)
return 'ok'
"""
)

# member, when it expires, the manifest
PUBLISH = (
    PRELUDE
    + """
local mine, expires = read(ARGV[1]), ARGV[2]
local head = prefix .. mine.id
if there(mine) then return 'ok' end
if redis.call('HEXISTS', head, mine.rank) == 1 then return 'taken' end
if not redis.call('ZSCORE', index, mine.member) then return 'full' end
for number = 0, mine.count - 1 do
  local piece = head .. ':' .. mine.rank .. ':' .. mine.name .. ':' .. number
  if redis.call('PEXPIREAT', piece, expires) == 0 then return 'full' end
end
redis.call('HSET', head, mine.rank, ARGV[3], mine.rank .. ':name', mine.name, mine.rank .. ':pieces', mine.count)
redis.call('PEXPIREAT', head, expires)
return 'ok'
"""
)

# member
DROP = PRELUDE + "forget(read(ARGV[1]))\nreturn 'ok'\n"

# id
FORGET = (
    PRELUDE
    + """
for _, member in ipairs(redis.call('ZRANGE', index, 0, -1)) do
  local part = read(member)
  if part.id == ARGV[1] then forget(part) end
end
redis.call('UNLINK', prefix .. ARGV[1])
return 'ok'
"""
)


@dataclass(frozen=True)
class Address:
    """Where a Redis server is, without its password."""

    host: str
    port: int
    database: int
    username: str | None
    tls: dict[str, str] | None


def read_address(url: str) -> Address:
    """Read `redis://[USER@]HOST[:PORT][/DATABASE]`, or `rediss://` for TLS. Raises `BadInput`, which never repeats a password."""
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
    except ValueError as error:
        raise BadInput("the store's URL can't be read; give redis://HOST:PORT/DATABASE") from error
    if parts.password is not None:
        # Engines log their options; by now this one has.
        raise BadInput(
            f"the store's URL holds a password, which is logged: change it, and give it in {PASSWORD} instead"
        )
    if not parts.hostname:
        raise BadInput("the store's URL names no host; give redis://HOST:PORT/DATABASE")
    database = parts.path.strip("/") or "0"
    if not (database.isascii() and database.isdigit()):
        raise BadInput(f"the store's database is {database!r}; give a number: redis://HOST:PORT/DATABASE")
    user = unquote(parts.username) if parts.username else None
    return Address(parts.hostname, port, int(database), user, _tls(parts))


def _tls(parts: SplitResult) -> dict[str, str] | None:
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(given) - set(TLS_OPTIONS))
    if unknown or (given and parts.scheme != "rediss"):
        raise BadInput(
            f"the store's URL has the option {(unknown or sorted(given))[0]!r}; rediss:// takes {', '.join(TLS_OPTIONS)}"
        )
    return given if parts.scheme == "rediss" else None


def _library() -> Any:
    try:
        import redis
    except ImportError as error:
        raise BadInput("the client for Redis is not installed: pip install 'kvlingo[redis]'") from error
    return redis


class RedisStore:
    """A Redis server. Raises `BadInput` for a bad URL and for a server that does not let us in; one that is down may come back.

    Args:
        url: see `read_address`; the password is taken from the environment.
        max_bytes: what all kept caches together may take. The server may have a limit of its own besides.
        patience: how long one command may take, in seconds.
    """

    def __init__(self, url: str, max_bytes: int, patience: float = PATIENCE_SECONDS) -> None:
        self.max_bytes, self._redis = max_bytes, _library()
        self._server = self._client(read_address(url), patience)
        scripts = (RESERVE, PUBLISH, DROP, FORGET)
        self._reserve, self._publish, self._drop, self._forget = map(self._server.register_script, scripts)
        self._look_once()

    def _client(self, address: Address, patience: float) -> Any:
        redis = self._redis
        encrypted = {} if address.tls is None else {"ssl": True, "ssl_cert_reqs": "required", **address.tls}
        return redis.Redis(
            host=address.host,
            port=address.port,
            db=address.database,
            username=address.username,
            password=os.environ.get(PASSWORD) or None,
            socket_timeout=patience,
            socket_connect_timeout=patience,
            # Once, for a connection that has gone stale; what is slow is not asked again.
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            **encrypted,
        )

    def _look_once(self) -> None:
        errors = self._redis.exceptions
        try:
            self._server.ping()
        except (errors.AuthenticationError, errors.NoPermissionError) as error:
            raise BadInput(f"the Redis server does not let us in; set {PASSWORD} and the URL's user") from error
        except errors.ResponseError as error:
            if "NOAUTH" in str(error) or "WRONGPASS" in str(error):
                raise BadInput(f"the Redis server does not let us in; set {PASSWORD} and the URL's user") from error
            raise BadInput(f"the Redis server can't be used: {error}") from error
        except errors.RedisError:
            pass  # requests are told so, each; it may come back

    def put(self, key: str, rank: int, manifest: bytes, data: bytes, expires: float) -> None:
        """See `Store`."""
        size, parts = len(manifest) + len(data), pieces(data, PIECE_BYTES)
        refuse_larger(size, self.max_bytes)
        milliseconds, name = int(expires * 1000), secrets.token_hex(8)
        with self._reached():
            deadline = int(self._now() + 1000 * UNFINISHED_SECONDS)
            member = f"{key}:{rank}:{name}:{len(parts)}:{size}:{deadline}"
            self._said(self._reserve(keys=[INDEX], args=[member, milliseconds, self.max_bytes]))
            try:
                for number, piece in enumerate(parts):
                    place = f"{PREFIX}{key}:{rank}:{name}:{number}"
                    self._server.set(place, piece, px=int(1000 * UNFINISHED_SECONDS))
                self._said(self._publish(keys=[INDEX], args=[member, milliseconds, manifest]))
            except BaseException:
                with suppress(self._redis.RedisError):  # else it expires
                    self._drop(keys=[INDEX], args=[member])
                raise

    def _now(self) -> float:
        seconds, micro = self._server.time()
        return float(seconds) * 1000 + float(micro) / 1000

    @staticmethod
    def _said(answer: bytes) -> None:
        if answer == b"taken":
            raise taken()
        if answer != b"ok":
            raise Refused("store_full", "the store of kept caches has no room")

    def manifests(self, key: str) -> list[bytes]:
        """See `Store`."""
        with self._reached():
            held: dict[bytes, bytes] = self._server.hgetall(PREFIX + key)
        found: list[bytes] = []
        while (manifest := held.get(b"%d" % len(found))) is not None:
            found.append(manifest)
        return found

    def data(self, key: str, rank: int) -> bytes:
        """See `Store`."""
        with self._reached():
            name, count = self._server.hmget(PREFIX + key, f"{rank}:name", f"{rank}:pieces")
            if name is None or count is None:
                raise gone()
            return b"".join(self._pieces(f"{PREFIX}{key}:{rank}:".encode() + name, count))

    def _pieces(self, place: bytes, count: bytes) -> Iterator[bytes]:
        if not count.isdigit():
            raise Refused("corrupt", "the kept cache is not what was written")
        for number in range(int(count)):
            piece = self._server.get(place + b":%d" % number)
            if piece is None:
                raise gone()
            yield piece

    def delete(self, key: str) -> None:
        """See `Store`."""
        with self._reached():
            self._forget(keys=[INDEX], args=[key])

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Turn what the client raises into `Refused`. A client of ours is told it: no address, and never a password, is in it."""
        errors = self._redis.exceptions
        try:
            yield
        except errors.TimeoutError as error:
            raise Refused("store_slow", "the store of kept caches did not answer in time") from error
        except errors.OutOfMemoryError as error:
            raise Refused("store_full", "the store of kept caches has no room") from error
        except errors.RedisError as error:
            raise Refused("store_down", f"the store of kept caches: {type(error).__name__}") from error
