"""Rotation against complex numbers, and against what the models themselves put into their caches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlingo.geometry import LayerRope, RopeLayout
from kvlingo.language_model import LanguageModel, prefill
from kvlingo.rope import Rotary
from tests import families, tiny

POSITIONS = torch.tensor([0, 1, 2, 63, 64, 65, 777, 1500])
# The model's rotary module computes its angles in float32.
ANGLE_ERROR = 2e-3
EXACT = 1e-12  # float64


# --- the oracle ------------------------------------------------------------------------------------------------------


def frequencies(rope: dict[str, Any], dims: int) -> tuple[list[float], float]:
    """Return each plane's radians a position, and the factor on cos and sin, from the published formulas."""
    base = rope["rope_theta"]
    plain = [base ** (-2 * i / dims) for i in range(dims // 2)]
    kind, factor = rope["rope_type"], rope.get("factor", 1.0)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return [f / factor for f in plain], 1.0
    original = rope["original_max_position_embeddings"]
    if kind == "llama3":
        return [llama3_frequency(f, rope, original) for f in plain], 1.0
    low, high = (yarn_plane(turns, dims, base, original) for turns in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), dims - 1)
    kept = [1 - min(max((i - low) / max(high - low, 1e-3), 0), 1) for i in range(dims // 2)]
    mixed = [f * k + f / factor * (1 - k) for f, k in zip(plain, kept, strict=True)]
    return mixed, 0.1 * math.log(factor) + 1


def llama3_frequency(frequency: float, rope: dict[str, Any], original: int) -> float:
    wavelength = 2 * math.pi / frequency
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / rope["factor"]
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / rope["factor"] + smooth * frequency


def yarn_plane(turns: float, dims: int, base: float, original: int) -> float:
    """Return the plane that turns so many times over the original context (arXiv 2309.00071)."""
    return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))


def turned(keys: Tensor, rope: dict[str, Any], dims: int, layout: RopeLayout, positions: Tensor) -> Tensor:
    """Multiply each plane, seen as a complex number, by factor * exp(i * angle)."""
    out = keys.clone()
    radians, factor = frequencies(rope, dims)
    for plane, frequency in enumerate(radians):
        x, y = (plane, plane + dims // 2) if layout == "half" else (2 * plane, 2 * plane + 1)
        turn = torch.polar(torch.full((len(positions),), factor, dtype=torch.float64), positions.double() * frequency)
        z = torch.complex(keys[..., x], keys[..., y]) * turn
        out[..., x], out[..., y] = z.real, z.imag
    return out


def rope_of(lm: LanguageModel, layer: int) -> dict[str, Any]:
    parameters = lm.model.config.rope_parameters
    kinds = getattr(lm.model.config, "layer_types", None)
    return parameters[kinds[layer]] if kinds and kinds[layer] in parameters else parameters


def random_keys(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# --- models' own rotations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rotating_is_multiplying_complex_numbers(family: str) -> None:
    lm = tiny.language_model(family)
    for layer, shape in enumerate(lm.geometry.layers):
        assert shape.rope is not None
        keys = random_keys(1, 2, len(POSITIONS), shape.key_dim)
        got = lm.rotary.rotate(keys, layer, POSITIONS)
        wanted = turned(keys, rope_of(lm, layer), shape.rope.dims, shape.rope.layout, POSITIONS)
        torch.testing.assert_close(got, wanted, atol=ANGLE_ERROR, rtol=0)
        torch.testing.assert_close(lm.rotary.unrotate(got, layer, POSITIONS), keys, atol=EXACT, rtol=0)


def test_the_oracle_tells_scalings_apart() -> None:
    keys = random_keys(1, 1, len(POSITIONS), 8)
    ropes = [tiny.THETA, {**tiny.THETA, "rope_type": "linear", "factor": 4.0}, tiny.LLAMA3, tiny.YARN]
    turns = [turned(keys, rope, 8, "half", POSITIONS) for rope in ropes]
    turns.append(turned(keys, tiny.THETA, 8, "interleaved", POSITIONS))
    for i, one in enumerate(turns):
        for other in turns[:i]:
            assert float((one - other).abs().max()) > 0.1


KEY_MODULES = {"qwen3": "k_norm", "gemma3": "k_norm", "olmo2": "k_norm"}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_unrotating_a_cache_gives_what_the_model_had_before_it_rotated(family: str) -> None:
    lm = tiny.language_model(family)
    before: list[Tensor] = []
    name = KEY_MODULES.get(family, "k_proj")
    modules = [m for n, m in lm.model.named_modules() if n.endswith(f".{name}")]
    hooks = [m.register_forward_hook(lambda _m, _i, out: before.append(out)) for m in modules]
    cache = prefill(lm, tiny.ids_of(lm, 70), full_length=True).cache
    for hook in hooks:
        hook.remove()
    assert len(before) == len(lm.geometry)
    for layer, (raw, shape) in enumerate(zip(before, lm.geometry.layers, strict=True)):
        got = lm.rotary.unrotate(cache.layers[layer].keys, layer, torch.arange(70))
        tokens_first = raw.shape[1] == 70  # a norm per head may run before or after heads are moved
        heads = raw.reshape(1, 70, shape.kv_heads, -1).transpose(1, 2) if tokens_first else raw
        torch.testing.assert_close(got, heads, atol=1e-10, rtol=0)


def test_each_layer_type_has_its_own_frequencies() -> None:
    lm = tiny.language_model("gemma3")
    keys = random_keys(1, 1, 1, 16)
    sliding, full = (lm.rotary.rotate(keys, layer, torch.tensor([50])) for layer in (0, 1))
    assert float((sliding - full).abs().max()) > 0.1


def test_half_precision_keys_are_rotated_in_single() -> None:
    lm = tiny.language_model("llama-yarn", dtype=torch.bfloat16)
    keys = random_keys(1, 2, len(POSITIONS), 8).bfloat16()
    got = lm.rotary.rotate(keys, 0, POSITIONS)
    wanted = lm.rotary.rotate(keys.double(), 0, POSITIONS)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, wanted.float().bfloat16())


# --- laws ------------------------------------------------------------------------------------------------------------


@st.composite
def rotaries(draw: st.DrawFn) -> tuple[Rotary, LayerRope, int]:
    """Draw a rotary module of any layout, partial or not, with attention scaling in its cos and sin."""
    planes, rest = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    layouts = st.sampled_from(["half", "interleaved"])
    rope = LayerRope(None, draw(layouts), draw(layouts), 2 * planes)
    base, scaling = draw(st.sampled_from([10.0, 1e4, 1e6])), draw(st.sampled_from([1.0, 0.7, 1.3]))

    def angles(positions: Tensor, layer_type: str | None) -> tuple[Tensor, Tensor]:
        each = positions[:, None].double() * base ** (-torch.arange(planes).double() / planes)
        both = torch.cat((each, each), -1) if rope.repeat == "half" else each.repeat_interleave(2, -1)
        return both.cos() * scaling, both.sin() * scaling

    return Rotary(angles, (rope, None)), rope, 2 * planes + rest


@given(rotaries(), st.integers(0, 5000), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_rotation_laws(drawn: tuple[Rotary, LayerRope, int], start: int, tokens: int) -> None:
    rotary, rope, dim = drawn
    keys, queries = random_keys(2, 3, tokens, dim), random_keys(2, 3, tokens, dim)
    positions = torch.arange(start, start + tokens)
    given_keys = keys.clone()
    there = rotary.rotate(keys, 0, positions)
    assert torch.equal(keys, given_keys)
    torch.testing.assert_close(rotary.unrotate(there, 0, positions), keys, atol=1e-10, rtol=0)
    torch.testing.assert_close(
        rotary.rotate(rotary.unrotate(keys, 0, positions), 0, positions), keys, atol=1e-10, rtol=0
    )
    assert torch.equal(there[..., rope.dims :], keys[..., rope.dims :])
    # What a query sees in a key depends on the distance alone.
    later = rotary.rotate(keys, 0, positions + 100)
    seen = (rotary.rotate(queries, 0, positions + 7) * there).sum(-1)
    seen_later = (rotary.rotate(queries, 0, positions + 107) * later).sum(-1)
    torch.testing.assert_close(seen, seen_later, atol=1e-7, rtol=0)


@given(rotaries())
@settings(max_examples=30, deadline=None)
def test_what_is_put_is_what_is_applied(drawn: tuple[Rotary, LayerRope, int]) -> None:
    rotary, rope, dim = drawn
    states = random_keys(1, 2, len(POSITIONS), dim), random_keys(1, 2, len(POSITIONS), dim)
    wanted = rotary.apply(*states, 0, POSITIONS)
    for dtype in (torch.float64, torch.bfloat16):
        # Into a part of something larger, which stays as it is around it.
        large = [torch.full((1, 2, len(POSITIONS) + 4, dim), 7.0, dtype=dtype) for _ in states]
        rotary.put(states, 0, POSITIONS, tuple(x[:, :, 1:-3] for x in large))  # type: ignore[arg-type]
        for got, side in zip(large, wanted, strict=True):
            assert torch.equal(got[:, :, 1:-3], side.to(dtype))
            assert bool((got[:, :, 0] == 7).all() & (got[:, :, -3:] == 7).all())
    assert rope.dims <= dim


@given(rotaries())
@settings(max_examples=10, deadline=None)
def test_every_token_has_its_position(drawn: tuple[Rotary, LayerRope, int]) -> None:
    rotary, _, dim = drawn
    with pytest.raises(ValueError, match="1 tokens can't be turned at"):
        rotary.rotate(random_keys(1, 2, 1, dim), 0, POSITIONS)


def test_a_layer_without_positions_is_copied() -> None:
    rotary = Rotary(_no_angles, (None,))
    keys = random_keys(1, 1, 3, 4)
    assert torch.equal(rotary.rotate(keys, 0, torch.arange(3)), keys)
    read = rotary.unrotate(keys, 0, torch.arange(3))
    assert torch.equal(read, keys)
    assert read.data_ptr() != keys.data_ptr()


def _no_angles(positions: Tensor, layer_type: str | None) -> tuple[Tensor, Tensor]:
    raise AssertionError("a layer without positions has no angles")


@pytest.mark.parametrize("wrong", [lambda r: _with(r, layout="interleaved"), lambda r: _with(r, dims=4)])
def test_a_wrong_layout_is_not_the_inverse(wrong: Callable[[LayerRope], LayerRope]) -> None:
    lm = tiny.language_model("llama")
    rope = lm.rotary.layers[0]
    assert rope is not None
    keys = random_keys(1, 1, 5, 8)
    other = wrong(rope)

    def angles(positions: Tensor, layer_type: str | None) -> tuple[Tensor, Tensor]:
        cos, sin = lm.rotary._angles(positions, layer_type)
        return cos[:, : other.dims], sin[:, : other.dims]

    undone = Rotary(angles, (other,)).unrotate(lm.rotary.rotate(keys, 0, torch.arange(5)), 0, torch.arange(5))
    assert float((undone - keys).abs().max()) > 1e-2


def _with(rope: LayerRope, **changes: Any) -> LayerRope:
    return LayerRope(**{**rope.__dict__, **changes})


def test_angles_worked_out_once_for_all_layers_are_the_same() -> None:
    """One pass over the layers asks the model's rotary module once for each set of frequencies and positions."""
    lm = tiny.language_model("gemma3")
    asked = list[str | None]()

    def angles(positions: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        asked.append(kind)
        return lm.rotary._angles(positions, kind)

    rotary = Rotary(angles, lm.rotary.layers)
    once, again = rotary.for_one_pass(), torch.arange(9)
    shape = lm.geometry.layers[0]
    keys = torch.randn(1, shape.kv_heads, 9, shape.key_dim, dtype=torch.float64)
    for layer in range(len(lm.geometry)):
        for positions in (again, again + 40):
            assert torch.equal(once.rotate(keys, layer, positions), lm.rotary.rotate(keys, layer, positions))
        assert torch.equal(once.unrotate(keys, layer, again), lm.rotary.unrotate(keys, layer, again))
    kinds = len({rope.layer_type for rope in lm.rotary.layers if rope is not None})
    assert len(asked) == 2 * kinds + len(lm.geometry), "rotating and undoing it, and other positions each time"


@pytest.mark.parametrize("family", ["phi3-longrope", "llama-dynamic"])
def test_angles_that_a_module_keeps_are_not_those_of_the_running_model(family: str) -> None:
    """Such a module keeps the frequencies of its last call: asking it for a hand-over must not change what the model reads."""
    lm = families.language_model(family)
    own = next(m for n, m in lm.model.named_modules() if n.endswith("rotary_emb"))
    before = own.inv_freq.clone()
    limit = lm.geometry.angle_limit
    assert limit is not None
    keys = torch.randn(1, lm.geometry.layers[0].kv_heads, 1, lm.geometry.layers[0].key_dim, dtype=torch.float64)
    lm.rotary.rotate(keys, 0, torch.tensor([4 * limit]))
    assert torch.equal(own.inv_freq, before)
    assert lm.rotary.rotate(keys[:, :, :0], 0, torch.arange(0)).shape[2] == 0
