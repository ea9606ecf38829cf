"""Back and forth many times: exact maps stay exact, bad ones drift only where translations are translated."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import quality_tables, records
from kvlingo.drift import DriftOptions, Link, conversations, cut, drift, piece_words
from kvlingo.errors import BadInput
from kvlingo.language_model import LanguageModel
from kvlingo.models import wrap
from kvlingo.translator import Translator, identity_translator
from tests import tiny

OPTIONS = DriftOptions(switches=4, first_tokens=24, turn_tokens=8, documents=3)


def noisy(lm: LanguageModel, share: float, seed: int) -> Translator:
    translator = identity_translator(lm.geometry, torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in translator.parameters():
            if parameter.ndim == 2:
                parameter += share * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return translator


def links(family: str, share: float) -> tuple[Link, Link]:
    """Two names for one model: what a switch loses is the maps' alone."""
    a = tiny.language_model(family)
    b = wrap(a.model, a.tokenizer, name="other")
    return Link(a, b, noisy(a, share, 1)), Link(b, a, noisy(a, share, 2))


@cache
def record(family: str, share: float) -> dict[str, Any]:
    return drift(*links(family, share), tiny.documents(6, 60), options=OPTIONS)


def kl_of(found: dict[str, Any], rule: str) -> list[float]:
    return [row["kl_nats"]["mean"] for row in found["turns"] if row["rule"] == rule]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_exact_maps_stay_exact(family: str) -> None:
    found = record(family, 0.0)
    for rule in OPTIONS.rules:
        assert len(kl_of(found, rule)) == 4
        assert max(kl_of(found, rule)) < 1e-8, rule


def test_translations_of_translations_drift_and_the_rule_holds_it() -> None:
    found = record("llama", 0.05)
    with_rule, without, one = (kl_of(found, rule) for rule in ("provenance", "no_rule", "one_switch"))
    assert with_rule[0] == pytest.approx(without[0]) == pytest.approx(one[0])
    assert without[-1] > 1.5 * without[0]
    assert with_rule[-1] < without[-1]
    assert not any(row["fallbacks"] for row in found["turns"])


def test_only_what_was_missed_is_translated() -> None:
    rows = record("llama", 0.05)["turns"]
    with_rule = [row["translated_tokens"] for row in rows if row["rule"] == "provenance"]
    without = [row["translated_tokens"] for row in rows if row["rule"] == "no_rule"]
    assert without == sorted(without)
    assert without[-1] > without[0] + 20
    # First the beginning, then at the first way back the first turn, then always two turns.
    assert max(with_rule[1:]) < with_rule[0]


def test_what_slid_out_of_a_window_is_counted_as_a_fallback() -> None:
    """A side that was handed a cache holds its windows only; without the rule it would have to hand on more."""
    rows = record("gemma3", 0.0)["turns"]
    assert any(row["fallbacks"] for row in rows if row["rule"] == "no_rule")
    assert not any(row["fallbacks"] for row in rows if row["rule"] != "no_rule")


def test_directions_take_turns_and_have_their_ratio() -> None:
    found = json.loads(json.dumps(record("llama", 0.05), allow_nan=False))
    assert [row["direction"] for row in found["turns"][:4]] == ["llama → other", "other → llama"] * 2
    for rule in OPTIONS.rules:
        told = found["last_against_first"][rule]
        assert told["llama → other"]["turns"] == [1, 3]
        assert told["other → llama"]["turns"] == [2, 4]
        first, last = (kl_of(found, rule)[place] for place in (0, 2))
        assert told["llama → other"]["ratio"]["mean"] == pytest.approx(last / first, rel=0.2)


def test_texts_are_cut_before_spaces_one_a_cluster() -> None:
    lm = tiny.language_model("llama")
    found = conversations(tiny.documents(6, 60), lm, OPTIONS)
    assert len(found) == 3
    assert len({cluster for cluster, _ in found}) == 3
    for _, pieces in found:
        assert len(pieces) == 5
        assert any(d.text.startswith("".join(pieces)) for d in tiny.documents(6, 60))
        assert all(piece.startswith(" ") for piece in pieces[1:])
        assert len(pieces[0]) >= 24 > len(pieces[0].rsplit(" ", 1)[0])


def test_too_little_text_is_said() -> None:
    lm = tiny.language_model("llama")
    assert cut("too short", lm, OPTIONS) is None
    assert piece_words([], lm, 3) is None
    with pytest.raises(BadInput, match="no piece of 56 tokens"):
        conversations(tiny.documents(2, 4), lm, OPTIONS)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(BadInput, match="no rule 'luck'"):
        DriftOptions(rules=("luck",))


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from kvlingo.plots import draw_drift

    file = tmp_path / "switches.png"
    draw_drift(record("llama", 0.05), file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 20_000


def test_the_command_measures_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    import bench.switches as command
    from kvlingo.texts import Split

    monkeypatch.setattr(command, "links", lambda _: links("llama", 0.0))
    monkeypatch.setattr(command, "held_out_and_training", lambda _: Split(list(tiny.documents(6, 60)), []))
    out = tmp_path / "switches.json"
    arguments = ["--there", "x", "--back", "y", "--a", "m", "--b", "n", "--first", "24", "--turn", "8"]
    arguments += ["--switches", "2", "--documents", "2", "--rules", "provenance,one_switch", "--out", str(out)]
    found = command.measure(command.parse(arguments))
    assert json.loads(out.read_text()) == json.loads(json.dumps(found))
    assert {row["rule"] for row in found["turns"]} == {"provenance", "one_switch"}
    assert out.with_suffix(".png").exists()


def test_the_table_shows_first_and_last_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "load", lambda _: record("llama", 0.05))
    rows = [row for row in quality_tables.switches().splitlines() if "→" in row]
    assert len(rows) == 2 * len(OPTIONS.rules)
    assert f"{kl_of(record('llama', 0.05), 'provenance')[0]:.3f}" in rows[0]
    monkeypatch.setattr(records, "load", lambda _: None)
    assert quality_tables.switches() == "Not measured yet.\n"
