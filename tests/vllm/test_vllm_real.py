"""Real weights through two servers, each of a real model with a tokenizer of its own: the hand-over is the in-process one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import vllm as bench
from kvlingo.assets import fetch_demo_models
from kvlingo.errors import KVLingoError
from kvlingo.fitting import fit
from kvlingo.models import convert_gguf, default_cache_dir, load_model
from kvlingo.shapes import FitOptions
from kvlingo.store import Manifest, ModelCard, save_translator
from kvlingo.texts import default_documents

pytestmark = pytest.mark.real_model
NAMES = ("smollm2-135m-instruct", "gemma-3-270m")
MODELS, TRANSLATOR = "KVLINGO_REAL_MODELS", "KVLINGO_REAL_TRANSLATOR"
SMALL_FIT = FitOptions(
    tokens=2300,
    context_tokens=(256,),
    reach=0,
    embedding_lags=(0,),
    held_out_examples=1,
    dampings=(1e-1,),
    key_norm=False,
)
"""Nobody would serve what comes of it; two paths through it are compared."""


@pytest.fixture(scope="module")
def pair() -> tuple[Path, Path]:
    """Return both models' folders: KVLINGO_REAL_MODELS is a folder of them, or 1 to fetch them."""
    source, target = (Path(os.environ.get(MODELS, "")) / name for name in NAMES)
    if (source / "config.json").is_file() and (target / "config.json").is_file():
        return source, target
    try:
        files = fetch_demo_models(default_cache_dir() / "models", progress=False)
        source, target = (convert_gguf(files[name]) for name in NAMES)
    except KVLingoError as error:
        pytest.skip(str(error))
    return source, target


@pytest.fixture(scope="module")
def translator(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what KVLINGO_REAL_TRANSLATOR names, or a translator that is fitted in a minute."""
    if given := os.environ.get(TRANSLATOR):
        return Path(given)
    source, target = (load_model(folder, device="cpu") for folder in pair)
    fitted = fit(source, target, default_documents(), SMALL_FIT)
    folder = tmp_path_factory.mktemp("real") / "translator"
    save_translator(folder, fitted.translator, Manifest(ModelCard.of(source), ModelCard.of(target), {}))
    return folder


def test_the_continuation_is_as_far_from_the_model_s_own_as_in_process(
    pair: tuple[Path, Path], translator: Path, tmp_path: Path
) -> None:
    source, target = map(str, pair)
    sizes = ["--texts", "2", "--text-tokens", "700", "--continuation", "16", "--engines", "hybrid_on", "--tokens"]
    given = ["--translator", str(translator), "--source", source, "--target", target, *sizes]
    record = bench.measure(bench.parse(given), default_documents(), tmp_path)
    assert record["texts"] == 2
    found = record["engines"]["hybrid_on"]
    assert found["told"]["status"] == "applied"
    assert found["largest_gap_nats"] <= bench.SAME
    assert min(record["in_process"]["kl_nats"]) > 0
