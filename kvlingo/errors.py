"""The errors a user can meet, each with one line that says what to do next.

Knows nothing of models. The CLI turns every `KVLingoError` into one line on stderr and exit code 2.
"""


class KVLingoError(Exception):
    """Base of all errors that are the input's fault, not the program's."""


class BadInput(KVLingoError):
    """Text, file or option that can't be used as given."""


class UnsupportedModel(KVLingoError):
    """A model whose cache can't be read or written exactly; the message names the reason."""


class UnsupportedCache(KVLingoError):
    """A cache that does not hold what a hand-over needs; the caller re-prefills."""


class IncompatiblePair(KVLingoError):
    """A translator, source or target that do not belong together."""


class BadArtifact(KVLingoError):
    """A saved translator that is damaged, truncated, or from a newer format."""


class MissingExtra(KVLingoError):
    """An optional dependency is not installed; the message names the install command."""
