"""What became of a request, for a client whose answer is streamed: from the engine's process to the server's.

vLLM puts what a connector tells into whole answers only. Figures go to the server's process all the same, a moment after the
tokens of the same step; with them goes what was told (`vllm.Figures`), and `headers.RouterHeaders`, which the same process loads
by its name, writes it into the stream. Both know no other place to meet than this module.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_WAITING = 4096
"""What nobody fetches is dropped, the oldest first."""


@dataclass
class Board:
    """What was told, by names that clients have drawn, until it is fetched. Used by one thread only.

    Fields:
        about: what the connector of this server does; None where none has said so.
    """

    about: Mapping[str, Any] | None = None
    _waiting: OrderedDict[str, Mapping[str, Any]] = field(default_factory=OrderedDict)

    def put(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        """Take in what was told, by name."""
        self._waiting.update(told)
        while len(self._waiting) > MOST_WAITING:
            self._waiting.popitem(last=False)

    def take(self, name: str) -> Mapping[str, Any] | None:
        """Return what was told under a name, once; None where nothing was, or not yet."""
        return self._waiting.pop(name, None)


BOARD = Board()
