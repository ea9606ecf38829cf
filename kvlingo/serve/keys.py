"""Who may ask, and how often. Knows API keys by their hashes only, and clocks. Does not know HTTP."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvlingo.errors import BadInput

LINE = re.compile(r"(?P<name>[\w.-]{1,64})\s*[:=]\s*(?P<digest>[0-9a-fA-F]{64})")


def digest_of(key: str) -> str:
    """Return what the key file holds in place of a key. Keys are long and random, so that one plain SHA-256 is enough."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True)
class Keys:
    """Tenants' names by the SHA-256 of their keys. `None` in place of it means that no key is asked for."""

    names: Mapping[str, str]

    @classmethod
    def read(cls, file: Path) -> Keys:
        """Read lines `NAME: SHA256`; blank lines and those that begin with # are left out."""
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise BadInput(f"can't read the API keys in {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise BadInput(f"{file} is not UTF-8 text; give lines NAME: SHA256") from error
        names: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            found = LINE.fullmatch(line.strip())
            if not found:  # the line may hold a key in the clear: it is not repeated
                raise BadInput(f"{file}, line {number}: give NAME: SHA256 (printf %s KEY | sha256sum)")
            if found["digest"].lower() in names or found["name"] in names.values():
                raise BadInput(f"{file}, line {number}: this name or key is there already; give each once")
            names[found["digest"].lower()] = found["name"]
        if not names:
            raise BadInput(f"{file} holds no API key; give lines NAME: SHA256 (printf %s KEY | sha256sum)")
        return cls(names)

    def tenant(self, authorization: str | None) -> str | None:
        """Return whose key this `Authorization` header holds, or None.

        All digests are compared, each in constant time: how long it takes tells neither how many characters of a digest fit
        nor which key it was.
        """
        scheme, _, key = (authorization or "").partition(" ")
        presented = digest_of(key.strip()).encode() if scheme.lower() == "bearer" else b""
        found = None
        for digest, name in self.names.items():
            if hmac.compare_digest(digest.encode(), presented):
                found = name
        return found


class Rate:
    """A bucket of tokens for each tenant, which fills up evenly. Tenants are those of the key file, so it stays small."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self.clock = clock
        self.buckets: dict[str, tuple[float, float]] = {}

    def wait_s(self, tenant: str) -> float:
        """Take one request out; return 0, or how long to wait for the next where there is none left."""
        now = self.clock()
        left, then = self.buckets.get(tenant, (float(self.per_minute), now))
        left = min(float(self.per_minute), left + (now - then) * self.per_minute / 60)
        if left < 1:
            self.buckets[tenant] = (left, now)
            return (1 - left) * 60 / self.per_minute
        self.buckets[tenant] = (left - 1, now)
        return 0.0
