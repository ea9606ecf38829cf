"""Why a kept cache is not used: a word that is counted, a sentence for people.

Whatever is refused, the engine reads the prompt itself: an answer never depends on this package.
"""

from __future__ import annotations


class Refused(Exception):
    """A hand-over that is not made.

    Fields:
        reason: one of a few words, for figures.
        unsupported: nothing that comes later would change it; else the same request may do better another time.
    """

    def __init__(self, reason: str, why: str, *, unsupported: bool = False) -> None:
        super().__init__(why)
        self.reason = reason
        self.why = why
        self.unsupported = unsupported

    @property
    def status(self) -> str:
        """Return the word that the client is told."""
        return "unsupported" if self.unsupported else "fallback_reprefill"
