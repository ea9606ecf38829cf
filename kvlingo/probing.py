"""Learn what a model's cache looks like from real short prefills.

Knows how a transformers module is called and what a cache's layers are. Nothing is computed from config names: what can't
be probed is refused. Loads nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvlingo.cache import full_cache, native_cache
from kvlingo.errors import UnsupportedModel
from kvlingo.geometry import Geometry, LayerGeometry, LayerRope
from kvlingo.rope import Rotary, one_per_plane

PROBE_POSITIONS = (1, 777)


def run(module: nn.Module, *, cache: Any, **kwargs: Any) -> Any:
    """Call a transformers module with a cache under the name that this version uses."""
    return module(**{cache_argument(module): cache}, use_cache=True, **kwargs)


def cache_argument(module: nn.Module) -> str:
    """Return the name under which this version of transformers takes a cache."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def probe_geometry(model: Any) -> tuple[Geometry, Rotary]:
    """Read the cache's geometry off real short prefills.

    Shapes come from a prefill of two tokens. How keys rotate comes from single tokens read at several positions: a token that
    sees only itself has the same hidden states wherever it stands, so its keys differ by the rotation alone.
    Raises `UnsupportedModel` where that does not hold, or where a layer keeps something else than keys and values.
    """
    config = model.config.get_text_config(decoder=True)
    native = native_cache(model.config)
    ids = torch.arange(2, device=model.get_input_embeddings().weight.device)
    with torch.no_grad():
        run(model, input_ids=ids[None], cache=native)
    refuse_other_caches(model, native)
    max_positions = getattr(config, "max_position_embeddings", None)
    at = [p for p in PROBE_POSITIONS if max_positions is None or p < max_positions]
    keys_at = {p: _keys_of_one_token(model, p) for p in (0, *at)}
    angles = angle_source(model)
    ropes = tuple(
        _probe_rope(model, angles, index, {p: keys[index] for p, keys in keys_at.items()})
        for index in range(len(native.layers))
    )
    layers = tuple(layer_geometry(layer, rope) for layer, rope in zip(native.layers, ropes, strict=True))
    embedding = model.get_input_embeddings().weight
    return Geometry(layers, embedding.shape[1], embedding.shape[0], max_positions), Rotary(angles, ropes)


def layer_geometry(layer: Any, rope: LayerRope | None) -> LayerGeometry:
    """Describe one filled cache layer of transformers."""
    return LayerGeometry(
        kv_heads=layer.keys.shape[1],
        key_dim=layer.keys.shape[3],
        value_dim=layer.values.shape[3],
        window=getattr(layer, "sliding_window", None) if layer.is_sliding else None,
        rope=rope,
    )


def refuse_other_caches(model: Any, cache: Any) -> None:
    """Raise `UnsupportedModel` where a layer keeps something else than keys and values per token."""
    kinds = [type(layer).__name__ for layer in cache.layers]
    for index, (layer, kind) in enumerate(zip(cache.layers, kinds, strict=True)):
        if kind not in ("DynamicLayer", "DynamicSlidingWindowLayer") or not layer.is_initialized:
            what = "a recurrent state" if "Linear" in kind else f"a cache of kind {kind}"
            raise UnsupportedModel(
                f"layer {index} of this {model.config.model_type} model keeps {what}, not keys and values per token; "
                "it can't be translated"
            )


def _keys_of_one_token(model: Any, position: int) -> list[Tensor]:
    """Return every layer's cached key [1, heads, 1, dim] of one token alone at `position`, in float32 or better."""
    cache = full_cache()
    device = model.get_input_embeddings().weight.device
    ids, positions = torch.tensor([[5]], device=device), torch.tensor([[position]], device=device)
    with torch.no_grad():
        run(model, input_ids=ids, position_ids=positions, cache=cache)
    return [layer.keys.to(torch.promote_types(layer.keys.dtype, torch.float32)) for layer in cache.layers]


def angle_source(model: Any) -> Any:
    """Return the function (positions, layer type) -> cos, sin of the model's own rotary module."""
    modules = [m for n, m in model.get_decoder().named_modules() if n.split(".")[-1] == "rotary_emb"]
    if not modules:
        return None
    module = modules[0]
    takes_type = "layer_type" in inspect.signature(module.forward).parameters

    def angles(positions: Tensor, layer_type: str | None) -> tuple[Tensor, Tensor]:
        x = torch.zeros((), dtype=torch.float32, device=positions.device)
        args = (x, positions[None], layer_type) if takes_type else (x, positions[None])
        cos, sin = module(*args)
        return cos[0], sin[0]

    return angles


def _probe_rope(model: Any, angles: Any, index: int, keys_at: dict[int, Tensor]) -> LayerRope | None:
    """Find the rotation that explains a layer's keys at all probed positions, by trying the known layouts."""
    base, others = keys_at[0], {p: k for p, k in keys_at.items() if p}
    # What bfloat16 or float16 weights round away must not look like a rotation.
    tolerance = {torch.float64: 1e-5, torch.float32: 1e-3}.get(model.get_input_embeddings().weight.dtype, 5e-2)
    scale = base.norm()
    if all((k - base).norm() <= tolerance * scale for k in others.values()):
        return None
    if angles is not None:
        for rope in _rope_candidates(model, angles, index, base):
            rotary = Rotary(angles, (rope,))
            still = rotary.unrotate(base, 0, torch.tensor([0], device=base.device))
            if all(
                (rotary.unrotate(k, 0, torch.tensor([p], device=k.device)) - still).norm() <= tolerance * still.norm()
                for p, k in others.items()
            ):
                return rope
    raise UnsupportedModel(
        f"the keys of layer {index} of this {model.config.model_type} model do not follow its rotary module "
        "(learned or unknown positions); a position-free cache can't be made from it"
    )


def _rope_candidates(model: Any, angles: Any, index: int, key: Tensor) -> Iterator[LayerRope]:
    layer_types = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    layer_type = layer_types[index] if layer_types else None
    cos, _ = angles(torch.tensor([3], device=key.device), layer_type)
    dims = cos.shape[-1]
    if dims > key.shape[-1]:
        return
    repeats = [r for r in ("half", "interleaved") if _repeats(cos, r)]
    for repeat in repeats:
        for layout in ("half", "interleaved"):
            yield LayerRope(layer_type, layout, repeat, dims)  # type: ignore[arg-type]


def _repeats(cos: Tensor, repeat: Any) -> bool:
    one = one_per_plane(cos, repeat)
    again = one.repeat_interleave(2, -1) if repeat == "interleaved" else torch.cat((one, one), -1)
    return bool(torch.equal(again, cos))


def probe_key_norms(model: Any, geometry: Geometry, rotary: Rotary) -> tuple[Tensor | None, ...]:
    """Find each layer's effective key-norm weight w: keys = w * x / rms(x), by probing (arXiv 2010.04245: QK-norm).

    A norm answers a vector of ones with its effective weight. The layer counts as normed only if its real keys, divided
    by that weight, have RMS 1.
    """
    keys = [
        rotary.unrotate(k, i, torch.tensor([1], device=k.device)) for i, k in enumerate(_keys_of_one_token(model, 1))
    ]
    norms: list[Tensor | None] = [None] * len(geometry)
    for name, module in model.get_decoder().named_modules():
        if name.split(".")[-1] in ("k_norm", "k_layernorm", "key_layernorm"):
            index = next((int(part) for part in name.split(".") if part.isdigit()), None)
            if index is not None:
                norms[index] = _effective_weight(module, keys[index])
    return tuple(norms)


def _effective_weight(norm: nn.Module, key: Tensor) -> Tensor | None:
    weight = getattr(norm, "weight", None)
    if weight is None:
        return None
    key = key.transpose(1, 2)[0, 0]  # [heads, dim]
    width = weight.numel()
    if width == key.numel():
        key = key.reshape(1, -1)
    elif width != key.shape[-1]:
        return None
    ones = torch.ones(width, dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        effective = norm(ones).to(key.dtype)
    # Quantised weights can round a norm's weight to 0, or nearly so, in some dims. Those dims of a key are gone (what is left is
    # rounding noise of the rotation), and the RMS of the rest lies below 1 by what they held.
    visible = effective.abs() > 0.01 * effective.abs().median()
    effective = torch.where(visible, effective, torch.zeros_like(effective))
    unit = torch.where(visible, key / effective, torch.zeros_like(key))
    rms = unit.square().mean(-1).sqrt()
    least = 0.98 if bool(visible.all()) else 0.8
    return effective if bool(((rms >= least) & (rms <= 1.02)).all()) else None
