"""Identity and a planted twin on two real models; skipped unless asked for."""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlingo.assets import fetch_demo_models
from kvlingo.cache_writing import write_cache
from kvlingo.errors import KVLingoError, UnsupportedModel
from kvlingo.fitting import fit
from kvlingo.handoff import hand_off
from kvlingo.language_model import LanguageModel, prefill, read
from kvlingo.models import convert_gguf, default_cache_dir, load_model, wrap
from kvlingo.shapes import FitOptions
from kvlingo.texts import default_documents
from kvlingo.translator import identity_translator
from tests.test_twins import EXACT_NATS, rebase_values, turn_keys
from tests.tiny import cold_logits, kl

NAMES = ("smollm2-135m-instruct", "gemma-3-270m")
WINDOW = 512  # of Gemma's sliding layers

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module", params=NAMES)
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    """Load a real model: KVLINGO_REAL_MODELS is a folder of both, or 1 to fetch them."""
    folder = Path(os.environ.get("KVLINGO_REAL_MODELS", "")) / request.param
    if not (folder / "config.json").is_file():
        try:
            folder = convert_gguf(fetch_demo_models(default_cache_dir() / "models", progress=False)[request.param])
        except KVLingoError as error:
            pytest.skip(str(error))
    return load_model(folder, dtype=torch.float32)


def prose(tokens: int, lm: LanguageModel) -> str:
    """Return a text of about so many tokens."""
    text = max((d.text for d in default_documents()), key=len)
    ids = lm.tokenizer(text[: 8 * tokens], add_special_tokens=False)["input_ids"]
    return lm.tokenizer.decode(ids[:tokens])


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("tokens", [100, WINDOW + 90])
@torch.no_grad()
def test_identity_on_a_real_model(lm: LanguageModel, tokens: int) -> None:
    """No further from cold than 3 times the model's own chunked prefill."""
    text = prose(tokens, lm)
    done = hand_off(text, lm, lm, identity_translator(lm.geometry), tail=4)
    assert done.plan.fallback is None
    assert done.logits is not None
    ids = lm.ids(done.state.reading.ids)
    cold = cold_logits(lm, ids)[-1]
    chunked = prefill(lm, ids[-4:], cache=prefill(lm, ids[:-4]).cache).logits[-1]
    allowed = max(1e-4, 3 * gap(chunked, cold))
    assert gap(done.logits, cold) <= allowed
    kv = read(lm, ids[:-4])
    swapped = type(kv)(kv.keys[::-1], kv.values[::-1], kv.tokens)
    if len({(x.kv_heads, x.key_dim) for x in lm.geometry.layers}) == 1:
        cache = write_cache(swapped, lm.rotary, lm.geometry, lm.model.config)
        assert gap(prefill(lm, ids[-4:], cache=cache).logits[-1], cold) > 100 * allowed


@pytest.mark.parametrize("tokens", [1, 5])
def test_positions_off_by_one_are_found_in_bfloat16(lm: LanguageModel, tokens: int) -> None:
    """The least that is worth finding, in the dtype that rounds most: `tokens` at once are misplaced after a cache."""
    model = copy.deepcopy(lm.model).bfloat16()
    wrap(model, lm.tokenizer)
    whole = model.model.forward

    @functools.wraps(whole)
    def misplaced(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        held = 0 if cache is None else cache.get_seq_length()
        if position_ids is not None and held and position_ids.shape[1] == tokens:
            position_ids = position_ids + 1
        return whole(*args, position_ids=position_ids, **kwargs)

    model.model.forward = misplaced
    with pytest.raises(
        UnsupportedModel, match=rf"reads {tokens} new tokens? after its own cache otherwise than without"
    ):
        wrap(model, lm.tokenizer)


def test_twin_of_a_real_model(lm: LanguageModel) -> None:
    """The same model with its values in another basis: fit alone finds the map."""
    torch.manual_seed(0)
    twin = copy.deepcopy(lm.model).double()
    rebase_values(twin)
    if not any(n is not None for n in lm.key_norms):
        turn_keys(twin)
    other = wrap(twin.float(), lm.tokenizer, name="twin")
    options = FitOptions(reach=0, shift=0, embedding_lags=(), tokens=4000, context_tokens=(192,), held_out_examples=2)
    fitted = fit(lm, other, default_documents()[:60], options)
    assert fitted.held_out_kl_nats is not None
    assert fitted.held_out_kl_nats < EXACT_NATS
    done = hand_off(prose(150, lm), lm, other, fitted.translator)
    assert done.logits is not None
    cold = cold_logits(other, other.ids(done.state.reading.ids))[-1]
    assert float(kl(cold[None].double(), done.logits[None].double())) < EXACT_NATS
