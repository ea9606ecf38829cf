"""`kvlingo bench`: every arm ends in the same logits, what is refused, what is said; times themselves are never asserted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor, nn

from bench import records, speed, speed_tables
from kvlingo import benchmark, calibration, cli
from kvlingo.arms import ARMS, READS_ALL, Arm, Dial, Pair, apply_alone, filled_cache, stage
from kvlingo.benchmark import BenchOptions, crossing, percentile, run_benchmark, timed_arms
from kvlingo.cache import read_cache
from kvlingo.calibration import (
    handoff_cost,
    idle_weights,
    map_weights,
    measure_reading,
    not_negative,
    pass_of_first,
    product_shapes,
    read_cost,
    sampled_layers,
)
from kvlingo.commands.options import numbers, two_names
from kvlingo.cost import mapped_flops, pass_flops
from kvlingo.environment import available_bytes, available_to_container, memory_bytes
from kvlingo.errors import BadInput
from kvlingo.jobs import Where
from kvlingo.language_model import LanguageModel, read_in_pieces
from kvlingo.manifest import Manifest, card_of
from kvlingo.public_shapes import (
    PUBLIC_SHAPES,
    SHAPE_MAPS,
    MapShape,
    Needed,
    bytes_needed,
    empty_translator,
    maps_bytes,
    random_model,
    random_translator,
    refuse_what_does_not_fit,
    shape_config,
    shape_outline,
)
from kvlingo.store import save_translator
from kvlingo.timing import peak_extra_bytes
from kvlingo.translator import Translator, identity_translator
from tests import tiny

CPU = torch.device("cpu")
HERE = Where("cpu", "float32")
TINY = {
    "small": {**PUBLIC_SHAPES["Qwen3-0.6B"]},
    "large": {**PUBLIC_SHAPES["Qwen3-1.7B"]},
    "experts": {**PUBLIC_SHAPES["MoE-0.8B-A0.2B"]},
}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 128,
}
TINY = {name: {**config, **SIZES} for name, config in TINY.items()}


def no_maps() -> Translator:
    raise AssertionError("these maps are not on disk")


def identity_pair(family: str, text: str | None) -> Pair:
    lm = tiny.language_model(family)
    twin = replace(lm, name="twin")
    translator = identity_translator(lm.geometry, torch.float64)
    return Pair(lm, twin, translator, lambda: identity_translator(lm.geometry, torch.float64), text)


def logits(arm: Arm) -> Tensor:
    with torch.no_grad():
        return arm.run(arm.prepare())


# --- the arms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("random_ids", [False, True], ids=["text", "random ids"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_arm_ends_in_the_logits_of_a_re_prefill(family: str, random_ids: bool) -> None:
    pair = identity_pair(family, None if random_ids else tiny.text(400))
    case = stage(pair, 48, Dial(sink=2, tail=3, delta=7), really_read=True)
    cold = tiny.cold_logits(pair.target, case.ids)[-1]
    for name, make in ARMS.items():
        for chunk in (None, 5):
            found = logits(make(case, chunk))
            assert torch.allclose(found, cold, atol=1e-8), f"{name}, in pieces of {chunk}"


def test_the_comparison_of_arms_sees_a_wrong_map() -> None:
    pair = identity_pair("llama", None)
    wrong = identity_translator(pair.source.geometry, torch.float64)
    with torch.no_grad():
        wrong.maps["1"].linear.weight.mul_(0.5)  # type: ignore[union-attr]
    case = stage(replace(pair, translator=wrong), 48, Dial(), really_read=True)
    cold = tiny.cold_logits(pair.target, case.ids)[-1]
    assert not torch.allclose(logits(ARMS["translate_warm"](case, None)), cold, atol=1e-4)
    assert torch.allclose(logits(ARMS["translate_cold"](case, None)), cold, atol=1e-8)  # loads its maps anew


def test_running_an_arm_leaves_what_was_there_as_it_was() -> None:
    case = stage(identity_pair("gemma3", None), 40, Dial(delta=6), really_read=True)
    for make in ARMS.values():
        arm = make(case, None)
        assert torch.equal(logits(arm), logits(arm))
    assert (case.older.get_seq_length(), case.nearly.get_seq_length()) == (case.tokens - 6, case.tokens - 1)


def test_the_apply_alone_makes_the_cache_before_the_tail() -> None:
    pair = identity_pair("llama", tiny.text(300))
    case = stage(pair, 40, Dial(sink=3, tail=4), really_read=True)
    plan, cache = apply_alone(case)()
    assert plan.fallback is None
    assert plan.translated == (3, case.tokens - 4)
    kv = read_cache(cache, pair.target.rotary, pair.target.geometry)
    native = read_cache(case.source_state.cache, pair.source.rotary, pair.source.geometry)
    for made, own in zip((*kv.keys, *kv.values), (*native.keys, *native.values), strict=True):
        assert torch.allclose(made, own[:, :, : case.tokens - 4], atol=1e-8)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_filled_cache_is_as_large_as_one_that_was_read(family: str) -> None:
    lm = tiny.language_model(family)
    ids = tiny.ids_of(lm, 30)
    for full_length in (True, False):
        filled = filled_cache(lm, 30, full_length=full_length)
        from kvlingo.language_model import prefill

        own = prefill(lm, ids, full_length=full_length).cache
        assert filled.get_seq_length() == own.get_seq_length() == 30
        assert [x.keys.shape for x in filled.layers] == [x.keys.shape for x in own.layers]
        assert [x.values.dtype for x in filled.layers] == [x.values.dtype for x in own.layers]
        read_in_pieces(lm, ids[:4], None, filled)
        assert filled.get_seq_length() == 34


def test_a_hand_over_that_falls_back_is_not_timed() -> None:
    lm = tiny.language_model("llama")
    pair = replace(identity_pair("llama", None), target=replace(lm, target_refusal="it keeps a state"))
    with pytest.raises(BadInput, match=r"can't be timed: .*keeps a state"):
        stage(pair, 24, Dial(), really_read=True)


# --- the clock around them -------------------------------------------------------------------------------------------


def test_rounds_are_interleaved_and_the_first_run_is_dropped() -> None:
    told: list[str] = []

    def arm(name: str) -> Arm:
        return Arm(lambda prepared: told.append(f"{name}{prepared}") or torch.zeros(1), lambda: "!")  # type: ignore[func-returns-value]

    lm = tiny.language_model("llama")
    times, memory = timed_arms({"a": arm("a"), "b": arm("b"), "c": arm("c")}, lm, 3)
    assert "".join(told).replace("!", "") == "abc" + "abc" + "bca" + "cab"
    assert {name: len(runs) for name, runs in times.items()} == {"a": 3, "b": 3, "c": 3}
    assert set(memory) == {"a", "b", "c"}


def test_memory_that_a_call_takes_is_seen() -> None:
    lm, size = tiny.language_model("llama"), 96 * 2**20
    found = peak_extra_bytes(lambda: torch.ones(size // 4).sum(), lm)
    if found is None:
        pytest.skip("this system does not tell a process's peak")
    assert 0.9 * size < found < 2 * size


def test_percentile_lies_between_values() -> None:
    assert percentile([4.0], 0.9) == 4.0
    assert percentile([5.0, 1.0, 2.0, 3.0, 4.0], 0.5) == 3.0
    assert percentile([1.0, 2.0], 0.9) == pytest.approx(1.9)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([0.5, 2.0], 141.42),
        ([2.0, 4.0], None),
        ([0.5, 0.9], None),
        ([0.5, 2.0, 0.5], None),
        ([2.0, 0.5, 2.0], 282.84),
    ],
    ids=["between", "always", "never", "not in the end", "for good"],
)
def test_the_crossing_is_where_translating_pays_for_good(ratios: list[float], expected: float | None) -> None:
    rows = [{"tokens": 100 * 2**i, "speedup_warm": ratio} for i, ratio in enumerate(ratios)]
    found = crossing(rows)
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-3))


# --- what it says ----------------------------------------------------------------------------------------------------

NUMBER, COUNT, TEXT = {"type": "number", "minimum": 0}, {"type": "integer", "minimum": 0}, {"type": "string"}
MAYBE = {"type": ["number", "null"]}


def record_of(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


WORK = record_of({"flops": {"type": "number", "exclusiveMinimum": 0}, "bytes": NUMBER, "ms": NUMBER})
ARM = record_of(
    {
        "measured": {"type": "boolean"},
        "median_ms": NUMBER,
        "predicted_error": {"type": ["number", "null"]},
        "p90_ms": MAYBE,
        "runs_ms": {"type": "array", "items": NUMBER},
        "peak_extra_bytes": {"type": ["integer", "null"]},
        "predicted": WORK,
    },
    oneOf=[
        {"properties": {"measured": {"const": True}, "runs_ms": {"minItems": 1}, "p90_ms": NUMBER}},
        {"properties": {"measured": {"const": False}, "runs_ms": {"maxItems": 0}, "p90_ms": {"type": "null"}}},
    ],
)
ROW = record_of(
    {
        "length": COUNT,
        "tokens": COUNT,
        "new_tokens": COUNT,
        "caches": {"enum": ["read", "filled at random"]},
        "reprefill_chunk": {"type": ["integer", "null"]},
        "target_cache_bytes": COUNT,
        "arms": {
            "type": "object",
            "propertyNames": {"enum": list(ARMS)},
            "additionalProperties": ARM,
            "minProperties": 1,
        },
        "speedup_warm": MAYBE,
        "speedup_cold": MAYBE,
        "speedup_ahead": MAYBE,
        "speedup_from": {"enum": ["measured", "predicted re-prefill", None]},
        "apply": record_of(
            {
                "ms": NUMBER,
                "flops": NUMBER,
                "gflops_per_s": NUMBER,
                "gemm_ms": NUMBER,
                "gemm_gflops_per_s": MAYBE,
                "share_of_gemm_rate": NUMBER,
            }
        ),
    }
)
READING = record_of(
    dict.fromkeys(
        ("s_per_flop", "s_per_attention_flop", "s_per_byte", "s_per_layer", "s_per_pass", "s_per_weight_byte"), NUMBER
    )
)
SCHEMA = record_of(
    {
        "benchmark": TEXT,
        "pair": record_of({"source": TEXT, "target": TEXT}),
        "maps": record_of(
            {
                "kind": TEXT,
                "rank": {"type": ["integer", "null"]},
                "weights": COUNT,
                "bytes": COUNT,
                "dtype": TEXT,
                "products": TEXT,
            }
        ),
        "weights": TEXT,
        "note": {"type": ["string", "null"]},
        "dtype": TEXT,
        "device": TEXT,
        "attention": TEXT,
        "tokens_are": {"enum": ["random", "text"]},
        "dial": record_of({"sink": COUNT, "tail": COUNT, "delta": COUNT}),
        "repeats": COUNT,
        "reprefill_up_to": COUNT,
        "rates": record_of(
            {
                "source_reading": READING,
                "reading": READING,
                "maps": record_of(dict.fromkeys(("s_per_flop", "s_per_byte", "s_per_handoff"), NUMBER)),
                "load_s": NUMBER,
                "reading_gflops_per_s": MAYBE,
                "reading_gb_per_s": MAYBE,
                "break_even_tokens": {"type": ["integer", "null"]},
            }
        ),
        "lengths": {"type": "array", "items": ROW, "minItems": 1},
        "crossing_tokens": MAYBE,
        "environment": {"type": "object", "required": ["cpu", "threads", "torch"]},
    }
)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `kvlingo bench` on a CPU with tiny shapes; return exit code, stdout and stderr."""
    for name, config in TINY.items():
        monkeypatch.setitem(PUBLIC_SHAPES, name, config)

    def run(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["bench", *map(str, arguments), "--device", "cpu", "--repeats", "2"])
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, captured.out, captured.err

    return run


@pytest.mark.parametrize("kind", SHAPE_MAPS)
def test_shapes_are_timed_and_the_record_keeps_to_its_schema(run: Run, kind: str) -> None:
    flags = ("--lengths", "16,64", "--reprefill-up-to", "32", "--dtype", "float32", "--json")
    code, out, err = run("--shapes", "small,large", "--map-kind", kind, *flags)
    assert code == 0, err
    record = json.loads(out.splitlines()[-1])
    jsonschema.validate(record, SCHEMA)
    assert record["maps"]["kind"] == kind
    assert "timing needs no trained weights" in record["note"]
    assert "timing needs no trained weights" in " ".join(out.split())
    short, long = record["lengths"]
    assert all(arm["measured"] for arm in short["arms"].values())
    assert {name for name, arm in long["arms"].items() if not arm["measured"]} == READS_ALL
    assert (short["speedup_from"], long["speedup_from"]) == ("measured", "predicted re-prefill")
    assert (short["caches"], long["caches"]) == ("read", "filled at random")
    assert all(len(arm["runs_ms"]) == 2 for arm in short["arms"].values())
    for arm in (*short["arms"].values(), *long["arms"].values()):
        said = arm["median_ms"] * (1 + (arm["predicted_error"] or 0))
        assert said == pytest.approx(arm["predicted"]["ms"])
        assert (arm["predicted_error"] is None) == (not arm["measured"])
    assert "~" in out
    assert "predicted re-prefill" in " ".join(out.split())


def test_a_saved_translator_is_timed_on_text_and_drawn(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    lms = {"a": tiny.language_model("llama"), "b": tiny.language_model("llama", seed=5)}
    for name, lm in lms.items():
        lm.model.save_pretrained(tmp_path / name)
        lm.tokenizer.save_pretrained(tmp_path / name)
    cards = [card_of(lm) for lm in lms.values()]
    save_translator(
        tmp_path / "t", identity_translator(lms["a"].geometry, torch.float64), Manifest(*cards, {}, {"verdict": "PASS"})
    )
    (tmp_path / "text.txt").write_text(tiny.text(600))
    places = [tmp_path / name for name in ("a", "b", "t")]
    picture = tmp_path / "times.png"
    flags = ("--text", tmp_path / "text.txt", "--lengths", "24,64", "--dtype", "float64", "--json")
    code, out, err = run(*places, *flags, "--picture", picture)
    assert code == 0, err
    record = json.loads(out.splitlines()[-1])
    jsonschema.validate(record, SCHEMA)
    assert record["tokens_are"] == "text"
    assert record["note"] is None
    assert [20 < row["tokens"] <= row["length"] for row in record["lengths"]] == [True, True]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_only_the_arms_asked_for_are_timed(run: Run) -> None:
    common = ("--shapes", "small,large", "--lengths", "16", "--dtype", "float32", "--json")
    code, out, err = run(*common, "--arms", "translate_warm,decode_step")
    assert code == 0, err
    record = json.loads(out.splitlines()[-1])
    jsonschema.validate(record, SCHEMA)
    (row,) = record["lengths"]
    assert list(row["arms"]) == ["translate_warm", "decode_step"]
    assert (row["speedup_warm"], row["speedup_from"]) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shapes", "small,large", "--lengths", "4"], "give lengths of 8 or more"),
        (["--shapes", "small,large", "--lengths", "256"], "small reads 128 tokens, the longest length is 256"),
        (["--shapes", "small"], "give two names separated by a comma"),
        (["--shapes", "small,huge"], "unknown shape 'huge'; there are Qwen3-0.6B"),
        (["--shapes", "small,large", "--arms", "teleport"], "unknown arm 'teleport'; there are reprefill"),
        (["--shapes", "small,large", "--rank", "8"], "a layer map has no rank"),
        (["a", "b"], "give SOURCE, TARGET and TRANSLATOR_DIR, or --shapes"),
        (["a", "b", "c", "--shapes", "small,large"], "give one or the other"),
        (["--shapes", "small,large", "--picture", "no/such/folder/x.png"], "is no folder"),
    ],
)
def test_what_can_not_be_timed_is_refused_in_one_line(run: Run, arguments: list[str], words: str) -> None:
    code, out, err = run(*arguments, *(() if "--lengths" in arguments else ("--lengths", "16")))
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


def test_the_calls_of_the_measured_tables_can_be_made() -> None:
    for name, words in speed.NAMES.items():
        given = dict(zip(words[::2], words[1::2], strict=True))
        assert all(shape in PUBLIC_SHAPES for shape in two_names(given["--shapes"])), name
        rank = given.get("--rank")
        MapShape(given["--map-kind"], None if rank is None else int(rank))  # type: ignore[arg-type]
        lengths = numbers(given["--lengths"], "--lengths")
        BenchOptions(lengths)
        rooms = [PUBLIC_SHAPES[shape]["max_position_embeddings"] for shape in given["--shapes"].split(",")]
        assert max(lengths) <= min(rooms), name


def test_a_table_marks_what_was_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert speed_tables.speed() == "Not measured yet.\n"
    record = {
        "maps": {"kind": "full", "rank": 8},
        "pair": {"source": "A", "target": "B"},
        "dtype": "float32",
        "environment": {"accelerator": None, "cpu": "a CPU"},
        "lengths": [
            {
                "tokens": 9000,
                "arms": {
                    "reprefill": {"measured": False, "median_ms": 1000.0},
                    "translate_warm": {"measured": True, "median_ms": 50.0},
                },
                "speedup_warm": 20.0,
                "speedup_cold": None,
                "speedup_ahead": None,
                "apply": {"share_of_gemm_rate": 0.7},
            }
        ],
    }
    (tmp_path / "speed-x.json").write_text(json.dumps(record))
    assert (
        "| A → B, full, rank 8, float32 | 9,000 | ~1,000 | 50 | – | – | – | 20.0× | – | – | 70% |"
        in speed_tables.speed()
    )
    assert "float32 on a CPU" in speed_tables.speed()
    record["maps"] = {"kind": "full", "rank": None, "products": "bfloat16"}
    (tmp_path / "speed-x.json").write_text(json.dumps(record))
    assert "| A → B, full, float32, maps in bfloat16 | 9,000 |" in speed_tables.speed()


# --- shapes ----------------------------------------------------------------------------------------------------------

# All parameters, tied ones once, as their makers' checkpoints have them.
PUBLISHED = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "Gemma-2-2B": 2_614_341_888,
    "Gemma-2-9B": 9_241_705_984,
}


@pytest.mark.parametrize("name", PUBLIC_SHAPES)
def test_a_public_shape_has_as_many_parameters_as_the_public_model(name: str) -> None:
    found = shape_outline(name, shape_config(name))
    if name in PUBLISHED:
        assert found.total_weights == PUBLISHED[name]
    else:
        config = shape_config(name)
        assert config["num_experts"] >= 32
        assert config["num_experts_per_tok"] == 8
    windows = {layer.window for layer in found.geometry.layers}
    assert windows == ({None, 4096} if name.startswith("Gemma") else {None})


def test_what_does_not_fit_is_refused_before_anything_is_allocated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocated(*_: Any, **__: Any) -> None:
        raise AssertionError("something was allocated")

    monkeypatch.setattr(benchmark, "random_model", allocated)
    monkeypatch.setattr(benchmark, "random_translator", allocated)
    monkeypatch.setattr(benchmark, "available_bytes", lambda _: 1000)
    code, out, err = run("--shapes", "Qwen3-0.6B,Qwen3-1.7B", "--dtype", "bfloat16", "--lengths", "64")
    assert (code, out) == (2, "")
    least = 2 * (PUBLISHED["Qwen3-0.6B"] + PUBLISHED["Qwen3-1.7B"])
    needed = int(err.split("needs ")[1].split(" bytes")[0].replace(",", ""))
    assert least < needed < 1.5 * least
    assert "available are 1,000 (0.0 GiB)" in err


def test_what_is_needed_counts_weights_maps_caches_and_activations() -> None:
    small, large = (shape_outline(name, TINY[name]) for name in ("small", "large"))

    def needed(**changes: Any) -> Needed:
        return bytes_needed(
            small, large, **{"maps": 1000, "tokens": 64, "read_tokens": 64, "bytes_per_value": 4, **changes}
        )

    assert needed().weights == 4 * (small.total_weights + large.total_weights)
    assert needed(bytes_per_value=2).weights == 2 * (small.total_weights + large.total_weights)
    assert needed(tokens=128).caches == 2 * needed().caches
    assert needed(read_tokens=32).activations == needed().activations // 2
    assert needed(maps=2000).maps - needed().maps >= 1000
    refuse_what_does_not_fit(needed(), needed().total, ("small", "large"))
    refuse_what_does_not_fit(needed(), None, ("small", "large"))
    with pytest.raises(BadInput, match=f"{needed().total:,} bytes"):
        refuse_what_does_not_fit(needed(), needed().total - 1, ("small", "large"))


def test_a_container_s_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("300\n")
    for limit, left in (("1000\n", 700), ("max\n", None), ("200\n", 0)):
        (tmp_path / "memory.max").write_text(limit)
        assert available_to_container(tmp_path) == left
    assert available_to_container(tmp_path / "none") is None
    free, whole = available_bytes(CPU), memory_bytes()
    assert free is None or whole is None or 0 < free <= whole


@pytest.fixture(scope="module")
def shapes() -> dict[str, LanguageModel]:
    return {
        name: random_model(name, TINY[name], device=CPU, dtype=torch.float32, seed=i)
        for i, name in enumerate(("small", "large", "experts"))
    }


def test_maps_are_of_the_kind_that_was_asked_for(shapes: dict[str, LanguageModel]) -> None:
    source, target = shapes["small"], shapes["large"]
    width, half = source.geometry.layers[0].width, source.geometry.layers[0].key_width
    layers = len(target.geometry)
    weights = {
        "layer": layers * 2 * half * half,
        "head-wise": layers * 2 * half * half // 2,  # two heads, each by itself
        "low-rank": layers * 2 * width * 8,
        "full": (layers - 1) * (3 * width + 2 * target.geometry.hidden_size) * width,
    }
    for kind in SHAPE_MAPS:
        maps = MapShape(kind, 8 if kind == "low-rank" else None)
        config = maps.config(source, target)
        translator = random_translator(config, kind)
        flat = sum(p.numel() for p in translator.parameters() if p.ndim > 1)
        assert flat == weights[kind], kind
        assert maps_bytes(config, kind) == 4 * sum(p.numel() for p in translator.parameters())
        products = sum(2 * rows * torch.Size(shape).numel() for rows, shape in product_shapes(translator, 10))
        assert products == 2 * 10 * flat
    full = MapShape("full", 8).config(source, target)
    assert (full.map_kind, full.rank, full.embedding_lags) == ("lowrank", 8, (0, 1))


def test_a_layer_map_takes_keys_to_keys_and_values_to_values(shapes: dict[str, LanguageModel]) -> None:
    config = MapShape("layer").config(shapes["small"], shapes["large"])
    linear = random_translator(config, "layer").maps["0"].linear
    assert isinstance(linear, nn.Module)
    x = torch.randn(5, config.feature_width(0))
    keys_changed, half = x.clone(), config.source.layers[0].key_width
    keys_changed[:, :half] += 1.0
    with torch.no_grad():
        difference = linear(keys_changed) - linear(x)
    assert difference[:, :half].abs().min() > 0
    assert not difference[:, half:].any()


def test_random_maps_keep_the_size_of_what_they_map(shapes: dict[str, LanguageModel]) -> None:
    for kind in SHAPE_MAPS:
        config = MapShape(kind).config(shapes["small"], shapes["large"])
        layer_map = random_translator(config, kind).maps["1"]
        with torch.no_grad():
            keys, values = layer_map(torch.randn(400, config.feature_width(1)))
        for side in (keys, values):
            assert 0.3 < float(side.std()) < 3.0, kind


def test_maps_on_disk_load_as_they_were(shapes: dict[str, LanguageModel]) -> None:
    for kind in SHAPE_MAPS:
        maps = MapShape(kind)
        config = maps.config(shapes["small"], shapes["large"])
        translator = random_translator(config, kind)
        with benchmark.on_disk(translator, config, maps, CPU) as load:
            loaded = load()
        assert not any(p.any() for p in empty_translator(config, kind).parameters())
        assert tiny.same(list(loaded.parameters()), list(translator.parameters()))


def test_experts_are_timed_too(shapes: dict[str, LanguageModel]) -> None:
    source, target = shapes["small"], shapes["experts"]
    config = MapShape("layer").config(source, target)
    pair = Pair(source, target, random_translator(config, "layer"), lambda: random_translator(config, "layer"))
    record = run_benchmark(pair, BenchOptions((16,), repeats=1), lambda _: None)
    assert set(record["lengths"][0]["arms"]) == set(ARMS)


# --- what it should cost ---------------------------------------------------------------------------------------------


def test_idle_experts_cost_no_arithmetic(shapes: dict[str, LanguageModel]) -> None:
    lm = shapes["experts"]
    cost = read_cost(lm)
    text_config = lm.model.config
    one = 3 * text_config.hidden_size * text_config.moe_intermediate_size
    assert idle_weights(lm.model.model.layers, text_config) == len(lm.geometry) * (32 - 8) * one
    assert cost.token_weights == cost.layer_weights - len(lm.geometry) * 24 * one
    assert read_cost(shapes["large"]).token_weights == read_cost(shapes["large"]).layer_weights
    assert pass_flops(cost, 100) < pass_flops(replace(cost, active_weights=None), 100)


def test_a_layer_costs_its_share(shapes: dict[str, LanguageModel]) -> None:
    lm = shapes["large"]
    one, whole = read_cost(lm, 1), read_cost(lm)
    assert 3 * one.layer_weights == whole.layer_weights
    assert (len(one.windows), len(whole.windows)) == (1, 3)
    assert whole.head_weights == SIZES["vocab_size"] * SIZES["hidden_size"]


def test_map_weights_and_features_of_a_hand_over(shapes: dict[str, LanguageModel]) -> None:
    config = MapShape("full").config(shapes["small"], shapes["large"])
    translator = random_translator(config, "full")
    cost = handoff_cost(translator)
    assert cost.map_weights == map_weights(translator)
    assert cost.map_weights[0] == 0
    assert cost.source_features == shapes["small"].geometry.features_per_token
    target = read_cost(shapes["large"])
    assert mapped_flops(target, cost.map_weights, 200) == 2 * mapped_flops(target, cost.map_weights, 100)


def test_layers_of_every_kind_are_sampled() -> None:
    """Gemma's first full layer is its second here; a model of one kind of layer shows all in two, or in the one it has."""
    slides_first = tiny.language_model("gemma3")
    assert [layer.window for layer in slides_first.geometry.layers][:2] == [tiny.WINDOW, None]
    assert sampled_layers(slides_first) == 2
    late = tiny.language_model(lambda: tiny.gemma3(layer_types=["sliding_attention"] * 3 + ["full_attention"]))
    assert sampled_layers(late) == 4
    assert sampled_layers(tiny.language_model("llama")) == 2
    assert sampled_layers(tiny.language_model(lambda: tiny.llama(num_hidden_layers=1))) == 1


def test_first_layers_read_in_pieces_into_the_model_s_own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a re-prefill does: a layer that slides meets a piece and its window, and never all at once."""
    monkeypatch.setattr(calibration, "PIECE_TOKENS", 16)
    seen: list[tuple[int, int]] = []
    read = calibration.run

    def noted(model: Any, **kwargs: Any) -> Any:
        done = read(model, **kwargs)
        seen.append((kwargs["input_ids"].shape[1], kwargs["cache"].layers[0].keys.shape[2]))
        return done

    monkeypatch.setattr(calibration, "run", noted)
    assert pass_of_first(tiny.language_model("gemma3"), 2, 40, 1) > 0
    assert seen == [(16, tiny.WINDOW - 1), (16, tiny.WINDOW - 1), (8, tiny.WINDOW - 1)] * 2


def test_rates_are_measured_and_never_negative(shapes: dict[str, LanguageModel]) -> None:
    rates = measure_reading(shapes["large"], repeats=1)
    assert all(value >= 0 for value in vars(rates).values())
    assert rates.s_per_flop + rates.s_per_attention_flop > 0
    assert rates.s_per_byte > 0


@pytest.mark.parametrize("truth", [(2e-12, 7e-12), (2e-12, 0.0), (0.0, 7e-12)])
def test_costs_are_found_again_from_the_times_they_make(truth: tuple[float, float]) -> None:
    rows = [(1e9 * n, 1e5 * n * n) for n in (256, 1024, 4096)]
    values = [sum(x * y for x, y in zip(row, truth, strict=True)) for row in rows]
    assert not_negative(rows, values) == pytest.approx(list(truth), rel=1e-6, abs=1e-18)


def test_a_cost_below_nothing_is_no_cost() -> None:
    rows = [(1.0, 1.0), (2.0, 4.0), (4.0, 16.0)]
    values = [5.0 * n - 0.5 * n * n for n in (1.0, 2.0, 4.0)]
    first, second = not_negative(rows, values)
    assert first > 0
    assert second == 0
