"""Models whose caches can't be translated, before real servers: they end at their start with a sentence of ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvlingo.errors import BadInput
from kvlingo.serve.external.servers import Server, start_server
from kvlingo.serve.external.twins import VOCABULARY, byte_tokenizer, write_tokenizer
from tests.families import FAMILIES, LONGROPE, rope

SHAPE = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": VOCABULARY}


@dataclass(frozen=True)
class Unfit:
    """A family of `tests/families.py`, in a shape that vLLM's CPU backend serves without a connector, and how it is refused.

    Fields:
        changes: of its tiny config.
        said: all of the sentence behind the checkpoint's folder.
    """

    family: str
    changes: dict[str, Any]
    dtype: str
    said: str


UNFIT = {
    "hybrid": Unfit(
        "falcon-h1",
        {"mamba_d_ssm": 256, "mamba_d_head": 64},
        "float32",
        "(FalconH1ForCausalLM) has recurrent layers, whose state can't be translated; it can't be used",
    ),
    "latents": Unfit(
        "deepseek-v2",
        {"kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "head_dim": 64},
        "bfloat16",
        "(DeepseekV2ForCausalLM) caches latents (MLA), not keys and values per head; it can't be used",
    ),
    "angles": Unfit(
        "phi3-longrope",
        {
            **rope(**LONGROPE | {"short_factor": [1.0] * 12, "long_factor": [4.0] * 12}),
            "max_position_embeddings": 4096,
        },
        "float32",
        "has other rotary angles beyond 64 tokens (longrope), and vLLM uses those for shorter texts too where it serves longer "
        "ones: set --max-model-len to 64",
    ),
}


def write_unfit(folder: Path, unfit: Unfit) -> None:
    """Write a checkpoint with random weights, and the twins' tokenizer."""
    FAMILIES[unfit.family].make(**SHAPE, **unfit.changes).save_pretrained(folder)
    write_tokenizer(folder, byte_tokenizer())


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """All of them, side by side: each ends by itself."""
    place = tmp_path_factory.mktemp("refused")
    servers: dict[str, Server] = {}
    try:
        for name, unfit in UNFIT.items():
            write_unfit(place / name, unfit)
            options = {"store": str(place / "store")}
            servers[name] = start_server(place / name, place / f"{name}.log", options, dtype=unfit.dtype)
        yield servers
    finally:
        for server in servers.values():
            server.stop()


@pytest.mark.parametrize("name", UNFIT)
def test_a_server_ends_with_a_sentence_that_names_the_model_and_why(started: dict[str, Server], name: str) -> None:
    server = started[name]
    with pytest.raises(BadInput) as error:
        server.wait_until_up()
    sentence = f"kvlingo.errors.UnsupportedModel: {server.log.with_suffix('')} {UNFIT[name].said}"
    assert str(error.value).endswith(sentence)
    assert server.process.returncode not in (0, None)
    assert "Failed to promote" not in server.log.read_text(), "vLLM's own words about what it can't do came first"
