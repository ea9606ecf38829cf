"""From names to an engine: which translator goes between which models, and which may be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvlingo.errors import BadInput
from kvlingo.manifest import Manifest, card_of
from kvlingo.serve.engine import Limits, LocalEngine
from kvlingo.serve.loading import links_of, load_engine, refusal_of, warm_up
from kvlingo.serve.switching import Link
from kvlingo.store import save_translator
from kvlingo.translator import identity_translator
from tests import tiny
from tests.serving import ALWAYS, ask, closing, cold_ids, request_for

A, OTHER = tiny.language_model("llama"), tiny.language_model("llama", seed=5)
CARD = card_of(A)


def saved(folder: Path, held_out: dict[str, Any] | None, source: Any = CARD, target: Any = CARD) -> Path:
    save_translator(folder, identity_translator(A.geometry, torch.float64), Manifest(source, target, {}, held_out))
    return folder


def test_a_translator_goes_between_the_models_it_was_fitted_on(tmp_path: Path) -> None:
    folder = saved(tmp_path / "t", {"verdict": "PASS"}, target=card_of(OTHER))
    (link,) = links_of({"other": OTHER, "mine": A, "unrelated": tiny.language_model("qwen3")}, folder)
    assert (link.source, link.target, link.refusal) == ("mine", "other", None)
    with pytest.raises(BadInput, match="not both served"):
        links_of({"mine": A, "unrelated": tiny.language_model("qwen3")}, folder)


@pytest.mark.parametrize(
    ("held_out", "why"),
    [(None, "never evaluated"), ({"verdict": "FAIL"}, "FAIL"), ({}, "never evaluated"), ({"verdict": "PASS"}, None)],
)
def test_only_a_passed_report_lets_a_translator_in(held_out: dict[str, Any] | None, why: str | None) -> None:
    refusal = refusal_of(Manifest(CARD, CARD, {}, held_out), Path("t"))
    assert refusal is None if why is None else why in str(refusal)


def test_a_translator_that_never_passed_is_a_reprefill_that_says_so(tmp_path: Path) -> None:
    models = {"a": A, "b": A}
    links = links_of(models, saved(tmp_path / "t", None))
    assert {(link.source, link.target) for link in links} == {("a", "b"), ("b", "a")}
    text = tiny.text(40)
    with closing(LocalEngine(models, links, Limits(rule=ALWAYS))) as engine:
        ask(engine, request_for(A, "a", text))
        (found,) = ask(engine, request_for(A, "b", text))
        assert "never evaluated" in str(found.begun.fallback)
        assert found.ids == cold_ids(A, text)


def test_an_engine_from_folders(tmp_path: Path) -> None:
    for name, lm in (("small", A), ("big", OTHER)):
        lm.model.save_pretrained(tmp_path / name)
        lm.tokenizer.save_pretrained(tmp_path / name)
    folder = saved(tmp_path / "t", {"verdict": "PASS"}, target=card_of(OTHER))
    places = {name: str(tmp_path / name) for name in ("small", "big")}
    from kvlingo.jobs import Where

    with closing(load_engine(places, [folder], where=Where("cpu", "float64"), limits=Limits(rule=ALWAYS))) as engine:
        text = tiny.text(40)
        ask(engine, request_for(A, "small", text))
        (found,) = ask(engine, request_for(A, "big", text))
        assert found.begun.source == "small"
        assert found.begun.translated_tokens > 100


def test_warming_up_goes_the_whole_way_once_and_a_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    translator, told = identity_translator(A.geometry, torch.float64), list[str]()
    used, stream = list[int](), translator.stream

    def streams(*given: Any, **options: Any) -> Any:
        used.append(1)
        return stream(*given, **options)

    monkeypatch.setattr(translator, "stream", streams)
    warm_up({"a": A, "b": A}, Link("a", "b", translator), told.append)
    assert used
    assert not told
    used.clear()
    warm_up({"a": A, "b": A}, Link("a", "b", translator, refusal="it failed"), told.append)
    assert not used, "what is not used needs no warming"
    monkeypatch.setattr("kvlingo.serve.loading.WARM_UP", "")
    warm_up({"a": A, "b": A}, Link("a", "b", translator), told.append)
    assert "a → b: warming up failed" in told[0]
