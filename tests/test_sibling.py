"""Relatives of a model: layers dropped and healed, low-rank changes merged; seeded, and gone on with after a stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import sibling
from bench.sibling import Training, add_low_rank, merge, shrink, spread, tune, with_layers
from kvlingo.errors import BadInput
from kvlingo.language_model import LanguageModel
from kvlingo.models import load_model
from kvlingo.texts import Split
from tests import tiny

SHORT = Training(minutes=None, steps=6, batch=2, tokens=24, learning_rate=3e-3, judge_every=3, judged=4)


@pytest.fixture(params=["llama", "gemma3"])
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    return tiny.language_model(request.param, dtype=torch.float32)


def quiet(_: str) -> None:
    pass


def test_layers_are_kept_evenly_with_both_ends() -> None:
    assert spread(30, 15)[0] == 0
    assert spread(30, 15)[-1] == 29
    assert len(set(spread(30, 15))) == 15
    assert spread(4, 4) == (0, 1, 2, 3)
    with pytest.raises(BadInput, match="can't be kept"):
        spread(4, 1)


def test_all_layers_are_the_model_itself(lm: LanguageModel) -> None:
    count = lm.model.config.num_hidden_layers
    whole = with_layers(lm.model, range(count))
    ids = tiny.ids_of(lm, 30)
    with torch.no_grad():
        assert torch.equal(whole(input_ids=ids[None]).logits[0], tiny.cold_logits(lm, ids))


def test_a_dropped_layer_is_gone_and_the_others_are_in_their_order(lm: LanguageModel) -> None:
    """A layer whose outputs are zero adds nothing: without it the model says the same."""
    model = tiny.clone(lm.model)
    with torch.no_grad():
        for name, parameter in model.model.layers[1].named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
    kept = [i for i in range(model.config.num_hidden_layers) if i != 1]
    small, ids = with_layers(model, kept), tiny.ids_of(lm, 30)
    assert small.config.num_hidden_layers == len(kept)
    with torch.no_grad():
        a, b = small(input_ids=ids[None]).logits, model(input_ids=ids[None]).logits
        swapped = with_layers(model, kept[::-1])(input_ids=ids[None]).logits
    assert torch.allclose(a, b, atol=1e-4)
    assert not torch.allclose(swapped, b, atol=1e-2)


def test_healing_lowers_the_loss_and_leaves_the_teacher_alone(lm: LanguageModel, tmp_path: Path) -> None:
    before = tiny.parameters([lm.model])
    options = Training(minutes=None, steps=25, batch=2, tokens=24, learning_rate=3e-3, judge_every=25, judged=4)
    documents = tiny.documents(4)
    small, record = shrink(lm, 2, documents, documents, options, tmp_path, quiet)
    assert record["held_out_nats"][-1] < 0.9 * record["held_out_nats"][0]
    assert record["kept_layers"] == [0, lm.model.config.num_hidden_layers - 1]
    assert tiny.same(before, tiny.parameters([lm.model]))
    assert small.config.num_hidden_layers == 2


def test_the_same_seed_trains_the_same_and_another_another(lm: LanguageModel, tmp_path: Path) -> None:
    documents = tiny.documents(4)
    runs = [
        shrink(lm, 2, documents, documents, Training(**{**vars(SHORT), "seed": seed}), tmp_path / str(n), quiet)[1]
        for n, seed in enumerate((0, 0, 1))
    ]
    assert runs[0]["loss_nats"] == runs[1]["loss_nats"]
    assert runs[0]["loss_nats"] != runs[2]["loss_nats"]


def test_a_stopped_training_goes_on_where_it_was(lm: LanguageModel, tmp_path: Path, monkeypatch: Any) -> None:
    documents = tiny.documents(4)
    _, whole = shrink(lm, 2, documents, documents, SHORT, tmp_path / "whole", quiet)

    one_step, taken = sibling.Run.one_step, []

    def stopping(self: sibling.Run) -> None:
        if len(taken) == 4:
            raise KeyboardInterrupt
        taken.append(1)
        one_step(self)

    monkeypatch.setattr(sibling.Run, "one_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        shrink(lm, 2, documents, documents, SHORT, tmp_path / "two", quiet)
    monkeypatch.setattr(sibling.Run, "one_step", one_step)
    _, again = shrink(lm, 2, documents, documents, SHORT, tmp_path / "two", quiet)
    assert again["loss_nats"] == whole["loss_nats"]
    assert again["held_out_nats"] == whole["held_out_nats"]


def test_low_rank_changes_start_at_nothing_and_merge_into_the_weights(lm: LanguageModel) -> None:
    model, ids = tiny.clone(lm.model), tiny.ids_of(lm, 20)
    names = set(model.state_dict())
    changed = add_low_rank(model, 2, 2.0, 0)
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids[None]).logits[0], tiny.cold_logits(lm, ids), atol=1e-5)
        for module in changed:
            module.parametrizations.weight[0].b.normal_(std=0.1)
        with_change = model(input_ids=ids[None]).logits
        merge(changed)
        merged = model(input_ids=ids[None]).logits
    assert set(model.state_dict()) == names
    assert torch.allclose(with_change, merged, atol=1e-5)
    assert not torch.allclose(merged[0], tiny.cold_logits(lm, ids), atol=1e-2)
    difference = model.model.layers[0].self_attn.q_proj.weight - lm.model.model.layers[0].self_attn.q_proj.weight
    assert int(torch.linalg.matrix_rank(difference.float(), atol=1e-4)) == 2


def test_tuning_learns_its_texts(lm: LanguageModel, tmp_path: Path) -> None:
    documents = tiny.documents(4)
    options = Training(minutes=None, steps=25, batch=2, tokens=24, learning_rate=1e-2, judge_every=25, judged=4)
    _, record = tune(lm, 4, documents, documents, options, tmp_path, quiet)
    assert record["held_out_nats"][-1] < record["held_out_nats"][0]


@pytest.mark.parametrize("what", ["shrink", "tune"])
def test_the_command_saves_an_ordinary_folder_and_keeps_it(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = tiny.language_model("llama", dtype=torch.float32)
    lm.model.save_pretrained(tmp_path / "whole")
    lm.tokenizer.save_pretrained(tmp_path / "whole")
    documents = list(tiny.documents(4))
    monkeypatch.setattr(sibling, "held_out_and_training", lambda _: Split(documents[2:], documents[:2]))
    out = tmp_path / "out"
    flags = [
        what,
        "--model",
        str(tmp_path / "whole"),
        "--out",
        str(out),
        "--layers",
        "2",
        "--rank",
        "2",
        "--steps",
        "2",
    ]
    flags += ["--kind", "letters", "--batch", "1", "--tokens", "24", "--dtype", "float32"]
    record = sibling.make(sibling.parse(flags), quiet)
    loaded = load_model(out)
    assert loaded.model.config.num_hidden_layers == (2 if what == "shrink" else 3)
    assert loaded.tokenizer_hash == lm.tokenizer_hash
    assert record == json.loads((out / "sibling.json").read_text())
    stamp = (out / "sibling.json").stat().st_mtime_ns
    assert sibling.make(sibling.parse(flags), quiet) == record
    assert (out / "sibling.json").stat().st_mtime_ns == stamp
    assert not list((out / "work").glob("*.safetensors"))


def test_an_end_is_needed() -> None:
    with pytest.raises(BadInput, match="needs an end"):
        Training(minutes=None)


def test_the_tables_know_the_relatives(tmp_path: Path) -> None:
    from argparse import Namespace

    from bench.quality import DIRECTIONS, FULL_NAMES, path_of

    assert {name for direction in DIRECTIONS for name in direction.split("-")} == set(FULL_NAMES)
    place = tmp_path / "siblings" / "healed"
    place.mkdir(parents=True)
    arguments = Namespace(cache=tmp_path, smollm2=tmp_path / "whole", gemma=None, sibling=None, tuned=tmp_path / "mine")
    with pytest.raises(BadInput, match=r"python -m bench\.sibling"):
        path_of("sibling", arguments)
    (place / "sibling.json").write_text("{}")
    assert path_of("sibling", arguments) == place
    assert path_of("full", arguments) == path_of("base", arguments) == tmp_path / "whole"
