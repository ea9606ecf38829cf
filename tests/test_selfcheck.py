"""The load-time self-check: models that do something else than their cache says, each refused with its own sentence."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlingo import models
from kvlingo.errors import UnsupportedModel
from kvlingo.models import load_model, wrap
from tests import families, tiny

Change = Callable[[dict[str, Any]], dict[str, Any]]


def with_attention(model: Any, layer: int, change: Change) -> Any:
    """Change what one layer's attention is called with."""
    attention = model.model.layers[layer].self_attn
    whole = attention.forward

    def forward(**kwargs: Any) -> Any:
        return whole(**change(kwargs))

    attention.forward = forward
    return model


def past(kwargs: dict[str, Any]) -> int:
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    return 0 if cache is None else cache.get_seq_length(2)  # the last layer: not yet grown by this call


def another_theta() -> Any:
    other = tiny.llama(rope_parameters={**tiny.THETA, "rope_theta": 9_000.0}).model.rotary_emb

    def change(kwargs: dict[str, Any]) -> dict[str, Any]:
        hidden = kwargs["hidden_states"]
        start = kwargs["start"]["at"]
        positions = torch.arange(start, start + hidden.shape[1])[None]
        return {**{k: v for k, v in kwargs.items() if k != "start"}, "position_embeddings": other(hidden, positions)}

    model = tiny.scaled(tiny.llama())
    seen = {"at": 0}
    whole = model.model.forward

    @functools.wraps(whole)
    def forward(*args: Any, **kwargs: Any) -> Any:
        positions = kwargs.get("position_ids")
        seen["at"] = 0 if positions is None else int(positions[0, 0])
        return whole(*args, **kwargs)

    model.model.forward = forward
    return with_attention(model, 1, lambda kwargs: change({**kwargs, "start": seen}))


def not_causal() -> Any:
    def change(kwargs: dict[str, Any]) -> dict[str, Any]:
        tokens = kwargs["hidden_states"].shape[1]
        seen = torch.zeros(1, 1, tokens, past(kwargs) + tokens, dtype=torch.float64)
        return {**kwargs, "attention_mask": seen}

    return with_attention(tiny.scaled(tiny.llama()), 1, change)


def window_off_by_one() -> Any:
    """The mask lets through one token more than the cache keeps."""
    model = tiny.scaled(tiny.mistral())
    model.model.config = copy.deepcopy(model.config)
    model.model.config.sliding_window = tiny.WINDOW + 1
    return model


def other_after_a_cache(tokens: int) -> Any:
    def change(kwargs: dict[str, Any]) -> dict[str, Any]:
        hidden = kwargs["hidden_states"]
        wrong = past(kwargs) and hidden.shape[1] == tokens
        return {**kwargs, "hidden_states": hidden.flip(-1) if wrong else hidden}

    return with_attention(tiny.scaled(tiny.llama()), 1, change)


def counts_positions_itself() -> Any:
    """Position ids are thrown away: the model counts what its cache holds."""
    model = tiny.scaled(tiny.llama())
    whole = model.model.forward

    @functools.wraps(whole)
    def forward(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return whole(*args, **kwargs)

    model.model.forward = forward
    return model


def raises() -> Any:
    """A family that can't be called as others are."""

    def change(kwargs: dict[str, Any]) -> dict[str, Any]:
        raise TypeError("no such thing\nat all")

    return with_attention(tiny.scaled(tiny.llama()), 1, change)


BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "another theta": (another_theta, r"keys of layer 1 of this llama model do not follow its rotary module"),
    "not causal": (not_causal, r"not causal: layer 2 caches something else .* when later tokens change \(by \d"),
    "window": (window_off_by_one, r"sees more than 8 tokens in layer 0, whose cache keeps a window of 8"),
    "one after a cache": (
        lambda: other_after_a_cache(1),
        r"reads 1 new token after its own cache otherwise than without",
    ),
    "several after a cache": (lambda: other_after_a_cache(5), r"reads 5 new tokens after its own cache otherwise"),
    "raises": (raises, r"this llama model can't be probed \(TypeError: no such thing at all\)"),
    "counts by itself": (counts_positions_itself, r"other keys in layer 0 for one token at positions 0 and 5"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_model_that_does_something_else_is_refused(what: str) -> None:
    make, reason = BROKEN[what]
    with pytest.raises(UnsupportedModel, match=reason) as error:
        wrap(make(), tiny.byte_tokenizer())
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", [name for name, family in families.FAMILIES.items() if family.expected != "refused"])
def test_sound_models_pass_in_every_dtype(family: str, dtype: torch.dtype) -> None:
    wrap(families.FAMILIES[family].trained(dtype), tiny.byte_tokenizer())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_large_biases_do_not_hide_how_keys_rotate(dtype: torch.dtype) -> None:
    """Nearly all of the keys' norm stands still, in a plane that is too slow to be seen turning: as in Qwen2."""
    rope = {**tiny.THETA, "rope_theta": 1e6}
    model = tiny.scaled(tiny.qwen2(rope_parameters=rope, head_dim=64, max_position_embeddings=4096), dtype=dtype)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias.view(2, 2, 32)[:, :, 31] = 300.0
    found = wrap(model, tiny.byte_tokenizer()).geometry.layers
    assert found[0].rope is not None
    assert found[1].rope == found[0].rope


# --- remembered ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lm = tiny.language_model("llama", dtype=torch.float32)
    lm.model.save_pretrained(tmp_path / "model")
    lm.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Count self-checks."""
    made: list[Any] = []
    whole = models.self_check
    monkeypatch.setattr(models, "self_check", lambda *a, **k: (made.append(a), whole(*a, **k))[1])
    return made


def test_weights_that_have_passed_are_not_checked_again(
    folder: Path, checks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model(folder, dtype="float32", device="cpu")
    load_model(folder, dtype="float32", device="cpu")
    assert len(checks) == 1
    load_model(folder, dtype="bfloat16", device="cpu")
    assert len(checks) == 2
    note = next((models.default_cache_dir() / "checks").glob("*float32*.json"))
    assert json.loads(note.read_text())["transformers"]
    monkeypatch.setattr(models.transformers, "__version__", "5.99")
    load_model(folder, dtype="float32", device="cpu")
    assert len(checks) == 3
    note.write_text("{")
    load_model(folder, dtype="float32", device="cpu")
    assert len(checks) == 4


def test_a_folder_that_cannot_be_written_is_no_error(
    folder: Path, checks: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVLINGO_CACHE", str(tmp_path / "file"))
    load_model(folder, device="cpu")
    load_model(folder, device="cpu")
    assert len(checks) == 2


def test_a_model_that_fails_is_checked_every_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise UnsupportedModel("this model is broken")

    monkeypatch.setattr(models, "self_check", fails)
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="broken"):
            load_model(folder, device="cpu")
