"""The quick demo's core on its two real models, with less of everything; skipped unless asked for."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvlingo import demo
from kvlingo.errors import KVLingoError
from kvlingo.models import default_cache_dir

pytestmark = pytest.mark.real_model

PLAN = replace(
    demo.QUICK,
    fit=replace(demo.QUICK.fit, tokens=6000, context_tokens=(192,), held_out_examples=2, dampings=(1e-1,)),
    distill=replace(demo.QUICK.distill, minutes=None, steps=1, batch=1, context_tokens=(128,), judged_examples=1),
    evaluation=replace(demo.QUICK.evaluation, documents=8, context_tokens=128),
    timed_tokens=(128,),
    repeats=1,
    max_new_tokens=8,
)


def test_the_core_of_the_quick_demo_on_real_models(tmp_path: Path) -> None:
    given = Path(os.environ.get("KVLINGO_REAL_MODELS", ""))
    folders = given / demo.SOURCE, given / demo.TARGET
    if not all((folder / "config.json").is_file() for folder in folders):
        try:
            folders = demo.fetch(default_cache_dir())
        except KVLingoError as error:
            pytest.skip(str(error))
    out = io.StringIO()
    result = demo.run_demo(
        cache_dir=tmp_path, console=Console(file=out, width=120), tell=print, plan=PLAN, folders=folders
    )
    kl = {name: arm["kl_nats"]["mean"] for name, arm in result["arms"].items() if arm["kl_nats"]}
    assert kl["native"] < 1e-6
    assert kl["translated"] < min(kl[name] for name in ("wrong_document", "random_map", "tail_only", "no_context"))
    assert kl["translated"] < 1.0
    assert result["pair"] == {"source": demo.SOURCE, "target": demo.TARGET}
    assert [turn["model"] for turn in result["conversation"]] == [demo.SOURCE, demo.TARGET]
    assert (tmp_path / "demo" / f"{demo.SOURCE}-to-{demo.TARGET}" / "translator.safetensors").is_file()
