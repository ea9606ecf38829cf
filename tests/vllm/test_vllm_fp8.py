"""A target whose own cache is in fp8: what is translated is rounded by its backend, as what it reads itself is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import pytest
import torch

from kvlingo.serve.external.checking import prompt
from kvlingo.serve.external.matching import PARAMS
from kvlingo.serve.external.servers import Server
from kvlingo.serve.external.twins import VOCABULARY
from tests.vllm.conftest import Fleet

SEEDS = range(50, 56)
TOKENS, PIECE = 400, 128  # a piece is a block: what the prefix cache holds of a prompt was read apart from the rest


@dataclass(frozen=True)
class Next:
    """What may come after a prompt: log-probabilities of all tokens; and how many tokens of the prompt were not computed."""

    logprobs: torch.Tensor
    cached: int

    def kl_nats(self, other: Next) -> float:
        """Return the KL divergence of another answer from this one."""
        return float((self.logprobs.exp() * (self.logprobs - other.logprobs)).sum())


def next_token(server: Server, ids: Sequence[int], load: str | None = None, salt: str | None = None) -> Next:
    """Ask for one token; of a kept cache, all of the prompt but its last token is used."""
    body = {
        "model": server.model,
        "prompt": list(ids),
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": VOCABULARY,
        "return_tokens_as_token_ids": True,
        **({"kv_transfer_params": {PARAMS: {"load": load}}} if load is not None else {}),
        **({"cache_salt": salt} if salt is not None else {}),
    }
    reply = server.post("/v1/completions", body)
    if load is not None:
        told = reply["kv_transfer_params"][PARAMS]
        assert told["prompt"] == {"native": 0, "translated": len(ids) - 2, "recomputed": 2}, told
    (found,) = reply["choices"][0]["logprobs"]["top_logprobs"]
    logprobs = [found[f"token_id:{token}"] for token in range(VOCABULARY)]
    details = reply["usage"].get("prompt_tokens_details") or {}
    return Next(torch.tensor(logprobs, dtype=torch.float64), details.get("cached_tokens") or 0)


def gaps_of(fleet: Fleet, ids: Sequence[int]) -> dict[str, float]:
    """Return how far, in nats, the fp8 server's own answer is from others: handed over, read in pieces, not in fp8, wrong."""
    source, target, eight = fleet.get("source"), fleet.get("target"), fleet.get("eight")
    key = source.complete(ids, save=True, count=1).told["id"]
    handed = next_token(eight, ids, load=key)
    own = next_token(eight, ids)
    assert (handed.cached, own.cached) == (len(ids) - 1, 0)
    next_token(eight, ids[:PIECE], salt="pieces")
    pieces = next_token(eight, ids, salt="pieces")
    assert pieces.cached == PIECE
    wrong = next_token(eight, ids, load=fleet.as_strangers(key))
    others = {"handed": handed, "pieces": pieces, "format": next_token(target, ids), "wrong": wrong}
    return {name: own.kl_nats(other) for name, other in others.items()}


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM keeps fp8 on processors with AVX-512 only")
def test_a_hand_over_into_fp8_is_closer_than_the_format_moves_the_model(fleet: Fleet) -> None:
    """Its own answer is the same however it reads a prompt: each token sees the others rounded. The source has seen them whole.

    So the bound is what the format does to the same model's answers, and it is measured here.
    """
    fleet.begin("eight")
    gaps = [gaps_of(fleet, prompt(TOKENS, seed=seed)) for seed in SEEDS]
    handed, pieces, rounding, wrong = ([gap[name] for gap in gaps] for name in ("handed", "pieces", "format", "wrong"))
    assert max(pieces) <= 1e-6
    assert 1e-4 < mean(handed) <= mean(rounding), gaps
    assert max(handed) <= max(rounding), gaps
    assert min(wrong) > 5 * max(rounding), gaps
    assert mean(wrong) > 20 * mean(rounding), gaps
    fleet.end("eight")
