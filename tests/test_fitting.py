"""Stage 1: what is collected, resumed, refused, chosen; and what the controls are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from kvlingo import stats as stats_module
from kvlingo.collecting import Collector, counted_tokens, product_dtype
from kvlingo.corpus import examples, random_examples
from kvlingo.errors import BadInput, IncompatiblePair
from kvlingo.fitting import Fit, control, fit, solve_layers
from kvlingo.jobs import check_pair
from kvlingo.judging import held_out_kl
from kvlingo.language_model import read
from kvlingo.shapes import FitOptions, base_config, candidate_centres, source_free, text_free
from kvlingo.stats import GramStats, pieces_of
from kvlingo.texts import Document
from kvlingo.translator import HeadwiseMap, LinearMap, LowRankMap, MapKind, feature_blocks
from tests import tiny
from tests.tiny import unrelated_pair as pair

OPTIONS = FitOptions(
    reach=1,
    shift=0,
    tokens=1500,
    context_tokens=(48, 96),
    chat_share=0.2,
    held_out_share=0.2,
    held_out_examples=3,
    dampings=(1e-6, 1e-3, 1e-1),
)


def options(**changes: Any) -> FitOptions:
    return replace(OPTIONS, **changes)


@cache
def fitted() -> Fit:
    return fit(*pair(), tiny.documents(), OPTIONS)


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def sums(fit_: Fit) -> dict[str, Tensor]:
    return fit_.stats.state_dict()


# --- resuming --------------------------------------------------------------------------------------------------------


class Interrupt:
    """Presses Ctrl-C when so many pieces of training text have been read."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, what: str, done: int, total: int) -> None:
        if "training" in what:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


def test_ctrl_c_and_a_second_run_give_the_same_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fitted()
    with pytest.raises(KeyboardInterrupt):
        fit(*pair(), tiny.documents(), OPTIONS, work_dir=tmp_path, progress=Interrupt(5))
    assert files(tmp_path) == ["stats-held-out.safetensors", "stats-training.safetensors"]
    read_again = counted(monkeypatch)
    resumed = fit(*pair(), tiny.documents(), OPTIONS, work_dir=tmp_path)
    assert 0 < len(read_again) < pieces(whole)
    for name, mine in sums(resumed).items():
        torch.testing.assert_close(mine, sums(whole)[name], rtol=1e-12, atol=1e-9)
    assert resumed.held_out_kl_nats == pytest.approx(whole.held_out_kl_nats, rel=1e-4)
    read_again.clear()
    fit(*pair(), tiny.documents(), OPTIONS, work_dir=tmp_path)
    assert not read_again


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the examples that a run reads."""
    seen: list[int] = []
    blocks = Collector.blocks

    def counting(self: Collector, example: Any) -> dict[str, Tensor]:
        seen.append(example.context_tokens)
        return blocks(self, example)

    monkeypatch.setattr(Collector, "blocks", counting)
    return seen


def pieces(of: Fit) -> int:
    return of.stats.tokens // min(OPTIONS.context_tokens)


def test_other_options_do_not_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(*pair(), tiny.documents(), OPTIONS, work_dir=tmp_path)
    read_again = counted(monkeypatch)
    fit(*pair(), tiny.documents(), options(context_tokens=(64,)), work_dir=tmp_path)
    assert read_again


def test_other_texts_do_not_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(*pair(), tiny.documents(), OPTIONS, work_dir=tmp_path)
    read_again = counted(monkeypatch)
    other = fit(*pair(), tiny.documents(seed=4), OPTIONS, work_dir=tmp_path)
    assert sum(read_again) > OPTIONS.tokens
    assert not torch.equal(sums(other)["sum:target/1"], sums(fitted())["sum:target/1"])


def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(tensors: Any, file: Path) -> None:
        file.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("kvlingo.stats.save_file", full_disk)
    with pytest.raises(BadInput, match="no space left to save") as error:
        fit(*pair(), tiny.documents(), OPTIONS, work_dir=tmp_path)
    assert "\n" not in str(error.value)
    assert files(tmp_path) == []


def test_damaged_statistics_are_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(*pair(), tiny.documents(), OPTIONS, work_dir=tmp_path)
    for name in files(tmp_path):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:500])
    read_again = counted(monkeypatch)
    fit(*pair(), tiny.documents(), OPTIONS, work_dir=tmp_path)
    assert sum(read_again) > OPTIONS.tokens


def test_ctrl_c_in_the_middle_of_a_sum_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that count some tokens in part would be wrong for ever after."""
    flush = GramStats.flush

    def interrupted(self: GramStats) -> None:
        self.summed_tokens += 1
        raise KeyboardInterrupt

    collector = Collector(*pair(), base_config(*pair(), OPTIONS), OPTIONS)
    monkeypatch.setattr(stats_module, "FLUSH_TOKENS", 100)
    monkeypatch.setattr(GramStats, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collector.collect(tiny.documents()[:2], "training", 500, tmp_path, None)
    monkeypatch.setattr(GramStats, "flush", flush)
    assert files(tmp_path) == []


# --- what is collected -----------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_module, "FLUSH_TOKENS", 128)
    config = base_config(*pair(), OPTIONS)
    sizes, waiting = [], []
    for tokens in (400, 1600):
        stats = Collector(*pair(), config, OPTIONS).collect(tiny.documents()[:4], "training", tokens, None, None)
        sizes.append({name: x.numel() * x.element_size() for name, x in stats._tensors().items()})
        waiting.append(sum(len(next(iter(b.values()))) for b in stats._waiting))
        assert stats.tokens >= tokens
    assert sizes[0] == sizes[1]
    assert max(waiting) < 128


@pytest.mark.parametrize(("kind", "is_kept"), [("linear", False), ("lowrank", True)])
def test_a_solved_layer_keeps_no_product_that_its_map_is_not_made_of(kind: MapKind, is_kept: bool) -> None:
    """With 30 layers of 5,000 features they would be 12 GB."""
    result = fit(*pair(), tiny.documents(), options(map_kind=kind))
    solved = solve_layers(result.translator.config, result.stats, result.held_out, result.options)
    products = [x for solutions in solved.values() for s in solutions for x in (s.moments.gram, s.moments.cross)]
    assert all(bool(x.numel()) == is_kept for x in products)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("bfloat16", "bfloat16"), torch.float32),
        (("float32", "bfloat16"), torch.float64),
        (("bfloat16", "float32"), torch.float64),
        (("float16", "float16"), torch.float64),  # its rounding is finer than float32's sums
    ],
)
def test_products_are_in_single_precision_where_features_have_fewer_digits(
    dtypes: tuple[str, str], expected: torch.dtype
) -> None:
    sides = [SimpleNamespace(dtype=getattr(torch, dtype)) for dtype in dtypes]
    assert product_dtype(*sides) == expected  # type: ignore[arg-type]


def test_a_fit_multiplies_as_its_models_allow() -> None:
    exact, halves = pair(), [replace(lm, model=tiny.clone(lm.model).bfloat16()) for lm in pair()]
    for (source, target), dtype in ((exact, torch.float64), (halves, torch.float32)):
        collector = Collector(source, target, base_config(source, target, OPTIONS), OPTIONS)
        stats = collector.collect(tiny.documents()[:2], "training", 100, None, None)
        assert stats.multiplied_in == dtype
        assert all(x.dtype == torch.float64 for x in stats._tensors().values())


def test_the_pieces_to_read_are_known_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read_again = counted(monkeypatch)
    collector = Collector(*pair(), base_config(*pair(), OPTIONS), OPTIONS)
    stats = collector.collect(tiny.documents(), "training", 700, None, None)
    pieces_ = list(collector.pieces(tiny.documents(), 700))
    assert [e.context_tokens for e in pieces_] == read_again
    counts = [stop - start for start, stop in map(counted_tokens, pieces_)]
    assert sum(counts) == stats.tokens
    assert sum(counts[:-1]) < 700 <= sum(counts)


def test_sinks_of_both_sides_stay_out_of_the_statistics() -> None:
    source, target = pair()
    collector = Collector(source, target, base_config(source, target, OPTIONS), OPTIONS)
    example = next(examples(tiny.documents()[:1], source.tokenizer, target.tokenizer, context_tokens=(48,), seed=1))
    assert example.at_source_start >= 2  # BOS, and the first text token, both fed by the source's first
    blocks = collector.blocks(example)
    assert {len(x) for x in blocks.values()} == {48 - example.at_source_start}


def test_what_the_source_has_not_read_stays_out_of_the_statistics() -> None:
    """With one tokenizer on both sides, the target's generation prompt has no source token at all."""
    target = pair()[1]
    collector = Collector(target, target, base_config(target, target, OPTIONS), OPTIONS)
    example = next(
        examples(tiny.documents()[:1], target.tokenizer, target.tokenizer, context_tokens=(96,), chat_share=1.0, seed=1)
    )
    unread = int((example.alignment < 0).sum())
    assert unread > 5
    blocks = collector.blocks(example)
    assert {len(x) for x in blocks.values()} == {len(example.alignment) - unread - 1}
    own = read(target, target.ids(example.target.ids)).flat(1)[0]
    torch.testing.assert_close(blocks["source/1/0"], own[1 : len(own) - unread], atol=1e-5, rtol=1e-5)


def test_the_source_never_sees_what_comes_after_the_hand_over() -> None:
    source, target = pair()
    document = replace(tiny.documents()[0], text=tiny.text(400, seed=5))
    found = list(
        examples(
            [document], source.tokenizer, target.tokenizer, context_tokens=(40, 56), continuation_tokens=12, seed=2
        )
    )
    assert len(found) > 3
    for example in found:
        read = example.source.stream.decode()
        own = example.target.stream.decode().removeprefix("<s>")
        assert read == own
        assert document.text.count(own + example.continuation_text) == 1


def test_text_is_not_counted_when_the_source_alone_is_read() -> None:
    config = base_config(*pair(), options(embedding_lags=()))
    assert not config.reads_text
    assert config.first_layer == 0
    assert all(b.startswith("source/") for layer in range(4) for b in config.blocks(layer))


# --- what is fitted --------------------------------------------------------------------------------------------------


def columns_of(result: Fit) -> dict[str, list[Tensor]]:
    """Return the columns that a fit has read, text by text, as models give them."""
    collector = Collector(*pair(), result.translator.config, result.options)
    training = [d for d in tiny.documents() if d not in result.held_out_documents]
    columns: dict[str, list[Tensor]] = {}
    for example in collector.pieces(training, result.options.tokens):
        for name, x in collector.blocks(example).items():
            columns.setdefault(name, []).append(x.double())
    return columns


@pytest.mark.parametrize("weight", [0.0, 4.0], ids=["alike", "shared"])
def test_each_layer_s_map_is_the_regression_of_the_definition(weight: float) -> None:
    """The whole of fit() against least squares on the collected columns themselves.

    What neighbours share counts more by `weight`: as if each piece's mean were so many tokens more.
    """
    source, target = pair()
    asked = options(dampings=(1e-3,), key_norm=False, shared_weight=weight, shared_tokens=8)
    result = fit(source, target, tiny.documents(), asked)
    translator, columns = result.translator, columns_of(result)
    table = {name: torch.cat(parts) for name, parts in columns.items()}
    pieces = [n for part in columns["target/0"] for n in pieces_of(len(part), 8)]
    assert sum(pieces) == len(table["target/0"])
    windows = [shape.window for shape in target.geometry.layers]
    for layer in range(1, len(windows)):
        x = torch.cat([table[b] for b in translator.config.blocks(layer)], 1)
        y = table[f"target/{layer}"]
        scale = x.std(0, unbiased=False)
        z = (x - x.mean(0)) / torch.where(scale > 1e-12 * scale.max(), scale, torch.ones_like(scale))
        moved = y - y.mean(0)
        gram, cross = z.T @ z, z.T @ moved
        if weight and windows[layer] is None:
            lengths = torch.tensor(pieces, dtype=torch.float64)[:, None]
            shared_z, shared_y = (torch.stack([p.mean(0) for p in each.split(pieces)]) for each in (z, moved))
            gram += weight * shared_z.T @ (lengths * shared_z)
            cross += weight * shared_z.T @ (lengths * shared_y)
        damped = gram + 1e-3 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
        wanted = z @ torch.linalg.solve(damped, cross) + y.mean(0)
        keys, values = translator.maps[str(layer)](x.float())
        got = torch.cat([part[0].transpose(0, 1).flatten(1) for part in (keys, values)], 1)
        torch.testing.assert_close(got.double(), wanted, atol=2e-3, rtol=0)
    assert None in windows


def test_errors_are_weighed_in_layers_without_a_window_alone() -> None:
    source, target = pair()
    plain, shared = (
        fit(source, target, tiny.documents(), options(key_norm=False, shared_weight=w, shift=0)) for w in (0.0, 30.0)
    )
    assert plain.stats.shared is None
    columns = columns_of(plain)
    pieces = [n for part in columns["target/0"] for n in pieces_of(len(part), plain.options.shared_tokens)]

    def shared_error(result: Fit, layer: int) -> float:
        x = torch.cat([torch.cat(columns[b]) for b in result.translator.config.blocks(layer)], 1)
        keys, values = result.translator.maps[str(layer)](x.float())
        error = torch.cat([part[0].transpose(0, 1).flatten(1) for part in (keys, values)], 1).double()
        error -= torch.cat(columns[f"target/{layer}"])
        return float(torch.stack([e.mean(0) for e in error.split(pieces)]).square().mean())

    windows = [shape.window for shape in target.geometry.layers]
    for layer in range(1, len(windows)):
        before, after = shared_error(plain, layer), shared_error(shared, layer)
        assert after < before if windows[layer] is None else after == pytest.approx(before)


def test_sums_over_pieces_are_kept_and_added_like_all_others(tmp_path: Path) -> None:
    source, target = pair()
    asked = options(shared_weight=2.0, shift=0)
    whole = fit(source, target, tiny.documents(), asked, work_dir=tmp_path)
    again = fit(source, target, tiny.documents(), asked, work_dir=tmp_path)  # of what the first one left
    state, restored = sums(whole), sums(again)
    assert any(name.startswith("shared:") for name in state)
    assert state.keys() == restored.keys()
    assert all(torch.equal(state[name], restored[name]) for name in state)
    for layer in whole.translator.maps:
        mine, theirs = (f.translator.maps[layer].bias for f in (whole, again))
        torch.testing.assert_close(mine, theirs)
    twice = Collector(source, target, base_config(source, target, asked), asked).empty()
    twice += whole.stats
    twice += again.stats
    blocks = whole.translator.config.blocks(3)
    one, two = (s.moments(blocks, "target/3", shared_weight=2.0) for s in (whole.stats, twice))
    torch.testing.assert_close(two.gram, one.gram)
    torch.testing.assert_close(two.judged_variance, one.judged_variance)


def test_statistics_of_errors_that_count_alike_are_those_of_older_versions() -> None:
    """Who fitted before there was such an option can still distil from what was kept."""
    source, target = pair()
    config = base_config(source, target, OPTIONS)
    alike, shared = (Collector(source, target, config, options(shared_weight=w)) for w in (0.0, 1.0))
    assert "shared_" not in alike.key(100)
    assert "shared_tokens" in shared.key(100)
    assert shared.key(100) == Collector(source, target, config, options(shared_weight=9.0)).key(100)
    assert not any(name.startswith("shared") for name in alike.empty().state_dict())


def test_a_fit_tells_what_it_chose() -> None:
    result = fitted()
    assert [c["layer"] for c in result.choices] == [1, 2, 3]
    for choice in result.choices:
        assert choice["damping"] in OPTIONS.dampings
        assert choice["source_layers"] == list(result.translator.config.source_layers[choice["layer"]])
        assert 0 < choice["held_out_error"] < 1.5
    json.dumps(result.choices)
    held_out = {d.cluster for d in result.held_out_documents}
    assert held_out
    assert held_out < {d.cluster for d in tiny.documents()}
    assert not result.translator.training


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"map_kind": "linear"}, LinearMap),
        ({"map_kind": "lowrank", "rank": 6}, LowRankMap),
        ({"map_kind": "headwise"}, HeadwiseMap),
        ({"residual_width": 5}, LinearMap),
    ],
    ids=["linear", "lowrank", "headwise", "residual"],
)
def test_every_kind_of_map_beats_no_map(changes: dict[str, Any], kind: type) -> None:
    source, target = pair()
    result = fit(source, target, tiny.documents(), options(**changes, embedding_lags=()))
    assert all(isinstance(m.linear, kind) for m in result.translator.maps.values())  # type: ignore[union-attr]
    assert result.held_out_kl_nats is not None
    with torch.no_grad():
        still = fit(source, target, tiny.documents(), options(**changes, embedding_lags=())).translator
        for name, parameter in still.named_parameters():
            if "linear" in name:
                parameter.zero_()
    judged = held_out_of(result)
    assert result.held_out_kl_nats < float(held_out_kl(source, target, still, judged) or 0)


def held_out_of(result: Fit) -> list[Any]:
    from kvlingo.judging import held_out_examples

    return held_out_examples(result.held_out_documents, *pair(), result.options)


def test_searching_windows_is_never_worse_on_held_out_text() -> None:
    source, target = pair()
    without = fit(source, target, tiny.documents(), options(reach=0))
    searched = fit(source, target, tiny.documents(), options(reach=0, shift=1))
    assert searched.held_out_kl_nats is not None
    assert without.held_out_kl_nats is not None
    assert searched.held_out_kl_nats <= without.held_out_kl_nats + 1e-6


def test_candidates_are_near_the_proportional_layer() -> None:
    config = base_config(*pair(), OPTIONS)  # 3 source layers, 4 target layers
    assert candidate_centres(config, 0, 1) == (0, 1)
    assert set(candidate_centres(config, 3, 1)) == {2, 1}
    assert candidate_centres(config, 2, 0) == (1,)


# --- controls --------------------------------------------------------------------------------------------------------


def test_the_controls_are_fitted_alike_from_the_same_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = pair()
    result = fitted()
    read_again = counted(monkeypatch)
    token_only = control(source_free(result.translator.config), result, target)
    no_text = control(text_free(result.translator.config), result, target)
    assert not read_again
    assert not token_only.config.reads_source
    assert not no_text.config.reads_text
    direct = fit(source, target, tiny.documents(), options(embedding_lags=()))
    for layer in ("0", "2"):
        blocks = direct.translator.config.blocks(int(layer))
        width = direct.translator.config.feature_width(int(layer))
        x = torch.randn(5, width)
        mine, theirs = no_text.maps[layer](x), direct.translator.maps[layer](x)
        assert blocks == no_text.config.blocks(int(layer))
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=5e-2, rtol=1e-2)
    ours = result.held_out_kl_nats
    alone = held_out_kl(source, target, token_only, held_out_of(result))
    assert ours is not None
    assert alone is not None
    assert ours > 0
    assert alone > 0


def test_the_token_only_control_is_a_function_of_the_tokens() -> None:
    _, target = pair()
    token_only = control(source_free(fitted().translator.config), fitted(), target)
    ids = torch.randint(5, 200, (6,))
    embeddings = target.embed(ids)
    blocks = feature_blocks(
        ("embedding/0", "embedding/1"), source=None, alignment=torch.zeros(6), embeddings=embeddings
    )
    keys, _ = token_only.maps["2"](torch.cat(list(blocks.values()), 1))
    assert keys.shape == (1, 2, 6, 16)


# --- bad input -------------------------------------------------------------------------------------------------------


def test_too_little_text_is_refused() -> None:
    few = tuple(replace(d, text=d.text[:80]) for d in tiny.documents()[:4])
    with pytest.raises(BadInput, match=r"\d+ tokens are too few to fit \d+ features.*at least \d+ tokens"):
        fit(*pair(), few, options(context_tokens=(32,), chat_share=0.0))


@pytest.mark.parametrize("text", ["x", "too short", "\N{GRINNING FACE}" * 3])
def test_texts_shorter_than_a_window_are_refused(text: str) -> None:
    documents = [Document(text=f"{text}{i}", kind="k", cluster=f"c{i}", name=f"n{i}") for i in range(4)]
    with pytest.raises(BadInput, match="too short: no piece of 48 tokens"):
        fit(*pair(), documents, OPTIONS)


def test_a_map_of_no_kind_is_refused() -> None:
    with pytest.raises(BadInput, match=r"unknown map kind 'cubic'; use one of linear"):
        fit(*pair(), tiny.documents(), options(map_kind="cubic"))


@pytest.mark.parametrize("changes", [{"shared_weight": -1.0}, {"shared_weight": 1.0, "shared_tokens": 0}])
def test_weights_and_pieces_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"errors that neighbours share: .*, got shared_weight="):
        fit(*pair(), tiny.documents(), options(**changes))


def test_a_model_needs_no_translator_to_itself() -> None:
    source, target = pair()
    check_pair(source, target)
    with pytest.raises(IncompatiblePair, match="same model"):
        check_pair(source, source)


@pytest.mark.parametrize("text", ["emoji", "right-to-left"])
def test_other_scripts_are_read(text: str) -> None:
    """Characters of four bytes end inside no token's piece of text; letters run the other way."""
    pieces_ = {
        "emoji": "\U0001f600\U0001f680 ab \U0001f469\u200d\U0001f467 ",
        "right-to-left": "\u05e9\u05dc\u05d5\u05dd ",
    }
    documents = [Document(text=pieces_[text] * 60, kind="k", cluster=f"c{i}", name=f"n{i}") for i in range(2)]
    documents = [replace(d, text=d.text + str(i)) for i, d in enumerate(documents)]
    source, target = pair()
    found: Iterator[Any] = examples(
        documents, source.tokenizer, target.tokenizer, context_tokens=(48,), continuation_tokens=8, seed=0
    )
    count = 0
    for example in found:
        count += 1
        assert "\N{REPLACEMENT CHARACTER}" not in example.continuation_text
        assert example.source.stream.decode() == example.target.stream.decode().removeprefix("<s>")
    assert count >= 4


def two_kinds() -> list[Document]:
    """One document of one kind, six of another."""
    return [replace(d, kind="rare" if n == 0 else "common") for n, d in enumerate(tiny.documents(7))]


def test_kinds_take_turns_whatever_their_number_of_documents() -> None:
    source, target = pair()
    options = FitOptions(context_tokens=(16,), chat_share=0.0)
    collector = Collector(source, target, base_config(source, target, options), options)
    kinds = [e.kind for e, _ in zip(collector._examples(two_kinds()), range(8), strict=False)]
    assert kinds == ["rare", "common"] * 4


def test_random_examples_are_of_every_kind_alike() -> None:
    source, target = pair()
    drawn = random_examples(
        two_kinds(),
        source.tokenizer,
        target.tokenizer,
        context_tokens=(16,),
        continuation_tokens=4,
        chat_share=0.0,
        seed="kinds",
        count=100,
    )
    assert 35 <= sum(e.kind == "rare" for e in drawn) <= 65
