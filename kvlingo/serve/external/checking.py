"""`kvlingo vllm-check`: does the connector work with the vLLM that is installed here?

Two tiny twins (`twins`) in two servers: the first one reads and speaks, the second one goes on from what it kept. What it says
has to be what it says by itself, with one token of the prompt computed; afterwards nothing of it may be kept as its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvlingo.serve.external.servers import Answer, Server, start_server
from kvlingo.serve.external.twins import VOCABULARY, make_twins
from kvlingo.serve.external.versions import installed, refuse_version

ALLOWED = {"float32": 1e-4, "bfloat16": 0.1}
"""In nats. The twins by themselves are up to 0.04 apart in bfloat16, where a wrong translation is 0.9 off and more."""
PROMPT_TOKENS = 300


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    passed: bool
    what: str


def prompt(tokens: int = PROMPT_TOKENS, seed: int = 0) -> list[int]:
    """Return token ids of the twins: BOS and then bytes in no order."""
    return [0, *(2 + (7919 * (i + 1) + 104729 * seed * (i + 3)) % 251 for i in range(tokens - 1))]


def check_engine_pair(dtype: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run the self-test; return what was found, with a verdict."""
    found = installed()
    refuse_version(found)
    with tempfile.TemporaryDirectory(prefix="kvlingo-vllm-check-") as place:
        folder = Path(place)
        tell("making two tiny models")
        make_twins(folder, dtype=dtype)
        store = {"store": str(folder / "store")}
        told = {"translators": [str(folder / "translator")]}
        tell(f"starting two servers with vLLM {found}; their blocks are written and read back first")
        source = start_server(folder / "source", folder / "source.log", store, dtype=dtype)
        target = start_server(folder / "target", folder / "target.log", store | told, dtype=dtype)
        with source, target:
            up = source.wait_until_up(), target.wait_until_up()
            checks = hand_over(*up, ALLOWED[dtype], rounded=dtype != "float32")
    verdict = "PASS" if all(check.passed for check in checks) else "FAIL"
    return {"vllm": found, "dtype": dtype, "verdict": verdict, "checks": [asdict(check) for check in checks]}


def hand_over(
    source: Server,
    target: Server,
    allowed: float,
    *,
    seed: int = 0,
    as_other: Callable[[str], str] = str,
    rounded: bool = False,
) -> list[Check]:
    """Hand one conversation over, go on with it, and look at what is left behind.

    Args:
        as_other: may put another cache in place.
        rounded: the models compute in few bits, where greedy answers part at the first close call: the first tokens'
            distributions are compared, else every token's log-probability.
    """
    ids = prompt(seed=seed)
    key = as_other(source.complete(ids, save=True).told["id"])
    handed = target.complete(ids, load=key, logprobs=VOCABULARY)
    later = [*ids, *handed.ids, 5, 6, 7]
    handed_later = target.complete(later, load=key, logprobs=VOCABULARY)
    own, own_later = (target.complete(each, logprobs=VOCABULARY) for each in (ids, later))
    gap = Answer.apart_from if rounded else Answer.far_from
    total = len(ids)
    return [
        Check(
            "one token of the prompt is computed", handed.cached == total - 1, f"{handed.cached} of {total} were not"
        ),
        _close("the answer is the model's own", gap(handed, own), allowed),
        _close("so is the next turn", gap(handed_later, own_later), allowed),
        Check("nothing of it is the model's own afterwards", own.cached == 0, f"{own.cached} tokens were found"),
        Check("the client is told", handed.told.get("status") == "applied", str(handed.told.get("status"))),
    ]


def _close(name: str, gap: float, allowed: float) -> Check:
    return Check(name, gap <= allowed, f"log-probabilities differ by {gap:.1e} nats, {allowed:.0e} are allowed")
