"""Learn what a model's cache looks like from real short prefills.

Knows how a transformers module is called and what a cache's layers are. Nothing is computed from config names: what can't
be probed is refused. Loads nothing.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvlingo.cache import full_cache, native_cache
from kvlingo.errors import UnsupportedModel
from kvlingo.geometry import Geometry, LayerGeometry, LayerRope, Part, Repeat, RopeLayout
from kvlingo.rope import Rotary, one_per_plane

NEAR, FAR = 1, 777
SWITCH_SEARCH = 2**20
LAYOUTS: tuple[RopeLayout, ...] = ("half", "interleaved")
REPEATS: tuple[Repeat, ...] = ("half", "interleaved", "once")
Angles = Callable[[Tensor, str | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Probed:
    """What `probe_geometry` finds.

    Fields:
        target_refusal: why this model can only be a source; None where it can be both.
    """

    geometry: Geometry
    rotary: Rotary
    target_refusal: str | None


def run(module: nn.Module, *, cache: Any, **kwargs: Any) -> Any:
    """Call a transformers module with a cache under the name that this version uses.

    On a CPU the last hidden states that `logits_to_keep` asks for are gathered. Of a slice of them, PyTorch's product in bfloat16
    copies the whole output head each time: 3 s for 152,000 x 2,048 weights, where gathered ones take 0.04 s. Not where layers
    share keys and values: Gemma 4 leaves out the tokens that nobody asks for there, if it is given a number.
    """
    kept, ids = kwargs.get("logits_to_keep"), kwargs.get("input_ids")
    if kept and ids is not None and ids.device.type == "cpu" and not shares_layers(module):
        kwargs["logits_to_keep"] = torch.arange(-kept, 0) if kept < ids.shape[-1] else 0
    return module(**{cache_argument(module): cache}, use_cache=True, **kwargs)


def shares_layers(module: nn.Module) -> bool:
    """Tell whether some layers of a model read the keys and values of others."""
    config: Any = getattr(module, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "num_kv_shared_layers", 0))


def cache_argument(module: nn.Module) -> str:
    """Return the name under which this version of transformers takes a cache."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def decoder_of(model: Any) -> Any:
    """Return the part of a model that makes hidden states from ids, without its output head.

    A few classes name themselves as their decoder, or their output head; then it is the child that holds the embeddings.
    """
    decoder, embedding = model.get_decoder(), model.get_input_embeddings()

    def holds_it(module: nn.Module) -> bool:
        return any(part is embedding for part in module.modules())

    if decoder is not model and holds_it(decoder):
        return decoder
    return next((child for child in model.children() if holds_it(child)), decoder)


def probe_geometry(model: Any) -> Probed:
    """Read the cache's geometry off real short prefills.

    Shapes come from a prefill of two tokens. How keys rotate comes from single tokens read at several positions: a token that
    sees only itself has the same hidden states wherever it stands, so its keys differ by the rotation alone.
    Raises `UnsupportedModel` where that does not hold, or where a layer keeps something else than keys and values.
    """
    native = native_cache(model.config)
    ids = torch.arange(2, device=model.get_input_embeddings().weight.device)
    with torch.no_grad():
        run(model, input_ids=ids[None], cache=native)
    owners, target_refusal = cache_owners(model, native)
    layer_types = _layer_types(model)
    max_positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    limit = angle_limit(rotary_module(model), {layer_types[owner] for owner in owners})
    angles = angle_source(model, of_its_own=limit is not None)
    bounds = [bound for bound in (max_positions, limit) if bound is not None]
    last = min(bounds) - 1 if bounds else FAR
    at = {0, *(p for p in (NEAR, FAR, last) if p <= last)}
    read = {p: _one_token(model, p, owners) for p in at}
    ropes = tuple(
        _probe_rope(model, angles, owner, layer_types[owner], {p: layers[index] for p, layers in read.items()})
        for index, owner in enumerate(owners)
    )
    layers = tuple(layer_geometry(native.layers[owner], rope) for owner, rope in zip(owners, ropes, strict=True))
    return Probed(whole_geometry(model, layers, owners, limit), Rotary(angles or no_angles, ropes), target_refusal)


def whole_geometry(
    model: Any, layers: tuple[LayerGeometry, ...], owners: tuple[int, ...], limit: int | None = None
) -> Geometry:
    """Put a model's layers together with what is known of the whole."""
    config = model.config.get_text_config(decoder=True)
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    every = owners == tuple(range(len(_layer_types(model))))
    max_positions = getattr(config, "max_position_embeddings", None)
    return Geometry(layers, hidden, vocabulary, max_positions, None if every else owners, limit)


def layer_geometry(layer: Any, rope: LayerRope | None) -> LayerGeometry:
    """Describe one filled cache layer of transformers."""
    return LayerGeometry(
        kv_heads=layer.keys.shape[1],
        key_dim=layer.keys.shape[3],
        value_dim=layer.values.shape[3],
        window=getattr(layer, "sliding_window", None) if layer.is_sliding else None,
        rope=rope,
    )


def cache_owners(model: Any, cache: Any) -> tuple[tuple[int, ...], str | None]:
    """Return which layers of a filled cache hold keys and values, and why the model can't be a target (None: it can).

    A layer that borrows another one's keys, or has no attention, holds nothing and needs nothing. A recurrent state is a
    summary of all hidden states below it: it can't be translated token by token, so such a model can be read but not written.
    Raises `UnsupportedModel` where a layer keeps something else again, or where none holds keys and values.
    """
    kind = model.config.model_type
    owners, recurrent = [], []
    for index, layer in enumerate(cache.layers):
        name = type(layer).__name__
        if hasattr(layer, "recurrent_states"):
            recurrent.append(index)
            name = name.removeprefix("LinearAttentionAnd").replace("Attention", "") if hasattr(layer, "keys") else ""
        if not name or name == "DummyLayer" or not layer.is_initialized:
            continue
        if name not in ("DynamicLayer", "FullLayer", "DynamicSlidingWindowLayer", "SlidingWindowLayer"):
            raise UnsupportedModel(
                f"layer {index} of this {kind} model keeps a cache of kind {name}, not keys and values per token; "
                "it can't be translated"
            )
        owners.append(index)
    if not owners:
        raise UnsupportedModel(
            f"no layer of this {kind} model keeps keys and values per token; nothing can be translated"
        )
    if not recurrent:
        return tuple(owners), None
    return tuple(owners), (
        f"layer {recurrent[0]} of this {kind} model keeps a recurrent state, which needs every layer below it; "
        "it can be a source, and as a target it reads the conversation anew"
    )


def _layer_types(model: Any) -> list[str | None]:
    config = model.config.get_text_config(decoder=True)
    return list(getattr(config, "layer_types", None) or [None] * config.num_hidden_layers)


def _one_token(model: Any, position: int, owners: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return what each owning layer caches of one token alone at `position`: keys and values [1, heads, 1, dim].

    In float32 or better.
    """
    cache = full_cache(model.config)
    device = model.get_input_embeddings().weight.device
    ids, positions = torch.tensor([[5]], device=device), torch.tensor([[position]], device=device)
    with torch.no_grad():
        run(model, input_ids=ids, position_ids=positions, cache=cache)
    layers = [cache.layers[owner] for owner in owners]
    return [(_at_least_float(layer.keys), _at_least_float(layer.values)) for layer in layers]


def _at_least_float(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def angle_source(model: Any, *, of_its_own: bool = False) -> Angles | None:
    """Return the function (positions, layer type) -> cos, sin of the model's own rotary module.

    `of_its_own`: of a copy that one thread at a time asks. A module that chooses its frequencies by the highest position of a
    call keeps them: asked while the model runs on another thread, both would get the other's.
    """
    module = rotary_module(model)
    if module is None:
        return None
    return _one_at_a_time(_angles_of(copy.deepcopy(module))) if of_its_own else _angles_of(module)


def _one_at_a_time(angles: Angles) -> Angles:
    lock = threading.Lock()

    def alone(positions: Tensor, layer_type: str | None) -> tuple[Tensor, Tensor]:
        with lock:
            return angles(positions, layer_type)

    return alone


def no_angles(positions: Tensor, layer_type: str | None) -> tuple[Tensor, Tensor]:
    """Stand for the angles of a model without a rotary module, none of whose layers rotates."""
    raise AssertionError("no layer of a model without a rotary module rotates")


def rotary_module(model: Any) -> nn.Module | None:
    """Return the module that makes the model's rotary angles, where it has one.

    Known by its usual name, or else by what it is: a part without weights that is asked for positions (LFM2-MoE).
    """
    named = list(decoder_of(model).named_modules())
    usual = (module for name, module in named if name.split(".")[-1] == "rotary_emb")
    return next(usual, None) or next((module for _, module in named if _makes_angles(module)), None)


def _makes_angles(module: nn.Module) -> bool:
    takes = inspect.signature(module.forward).parameters
    return list(takes)[1:2] == ["position_ids"] and next(module.parameters(), None) is None


def refuse_position_tables(model: Any) -> None:
    """Raise `UnsupportedModel` where a model's parts show that it looks positions up in a table of its own.

    For models without weights, whose keys can't be compared; `probe_geometry` compares those of loaded ones.
    """
    bare, embedding = rotary_module(model) is None, model.get_input_embeddings()
    for module in decoder_of(model).modules():
        second = bare and isinstance(module, nn.Embedding) and module is not embedding
        if second or hasattr(module, "embed_positions"):
            raise UnsupportedModel(
                f"this {model.config.model_type} model looks its positions up in a table, not in a rotary module "
                "(learned or unknown positions); a position-free cache can't be made from it"
            )


def _angles_of(module: nn.Module) -> Angles:
    takes_type = "layer_type" in inspect.signature(module.forward).parameters

    def angles(positions: Tensor, layer_type: str | None) -> tuple[Tensor, Tensor]:
        x = torch.zeros((), dtype=torch.float32, device=positions.device)
        got = module(x, positions[None], layer_type) if takes_type else module(x, positions[None])
        if isinstance(got, Tensor):  # one complex number a plane
            return got.real[0], got.imag[0]
        cos, sin = got
        return cos[0], sin[0]

    return angles


def forget_length(module: nn.Module | None) -> None:
    """Keep a rotary module without data from choosing its angles by the highest position, which it can't know.

    Their shapes are the same. Dynamic NTK and longrope would raise.
    """
    of_type = getattr(module, "rope_type", None)
    if module is not None and of_type is not None:
        plain: Any = dict.fromkeys(of_type, "default") if isinstance(of_type, dict) else "default"
        module.rope_type = plain


def angle_limit(module: nn.Module | None, layer_types: Iterable[str | None]) -> int | None:
    """Return the number of tokens beyond which the angles of earlier tokens change, by asking; None if they never do.

    Dynamic NTK and longrope choose their frequencies by the highest position of a call. Asks a copy: such modules remember.
    """
    if module is None:
        return None
    limits = [_angle_limit(_angles_of(copy.deepcopy(module).cpu()), kind) for kind in layer_types]
    return min((limit for limit in limits if limit is not None), default=None)


def _angle_limit(angles: Angles, layer_type: str | None) -> int | None:
    def of_one(highest: int) -> Tensor:
        return torch.stack(angles(torch.tensor([1, highest]), layer_type))[:, 0]

    def after_a_long_text(highest: int) -> Tensor:
        # Dynamic NTK goes back to its first angles only well below its switch.
        angles(torch.tensor([SWITCH_SEARCH]), layer_type)
        return of_one(highest)

    near, same, changed = of_one(1), 1, SWITCH_SEARCH
    try:
        if torch.equal(after_a_long_text(changed), near):
            return None
    except (IndexError, KeyError, AttributeError):
        # A table with one row a position: what it says of one does not depend on the others. Or no angles for layers of this
        # type: `_probe_rope` will find out whether they need some.
        return None
    while changed - same > 1:
        middle = (same + changed) // 2
        same, changed = (middle, changed) if torch.equal(after_a_long_text(middle), near) else (same, middle)
    return changed


def _probe_rope(
    model: Any,
    angles: Angles | None,
    index: int,
    layer_type: str | None,
    read: dict[int, tuple[Tensor, Tensor]],
) -> LayerRope | None:
    """Find the rotation that explains a layer's keys at all probed positions, by trying the known layouts."""
    # What bfloat16 or float16 weights round away must not look like a rotation.
    tolerance = {torch.float64: 1e-5, torch.float32: 1e-3}.get(model.get_input_embeddings().weight.dtype, 5e-2)
    scales = [_scale([pair[part] for pair in read.values()]) for part in (0, 1)]
    moving = [part for part in (0, 1) if not _same(tolerance, [pair[part] for pair in read.values()], scales[part])]
    if not moving:
        return None
    if angles is not None and len(moving) == 1:
        at, scale = {position: pair[moving[0]] for position, pair in read.items()}, scales[moving[0]]
        for rope in _rope_candidates(angles, layer_type, at[0], "values" if moving[0] else "keys"):
            rotary = Rotary(angles, (rope,))
            free = [rotary.unrotate(x, 0, torch.tensor([p], device=x.device)) for p, x in at.items()]
            if _same(tolerance, free, scale):
                return rope
    raise UnsupportedModel(
        f"the keys of layer {index} of this {model.config.model_type} model do not follow its rotary module "
        "(learned or unknown positions, or a norm after the rotation); a position-free cache can't be made from it"
    )


def _scale(tensors: Sequence[Tensor]) -> Tensor:
    """Return how large each dim gets, so that all dims weigh the same.

    Keys with large biases (Qwen2) have nearly all their norm in a few slow planes, and would hide how the others rotate.
    """
    largest = torch.stack(list(tensors)).abs().amax(0)
    return largest.clamp_min(float(largest.median())).clamp_min(torch.finfo(largest.dtype).tiny)


def _same(tolerance: float, tensors: Sequence[Tensor], scale: Tensor) -> bool:
    first = tensors[0]
    return all(bool(((x - first) / scale).square().mean().sqrt() <= tolerance) for x in tensors[1:])


def _rope_candidates(angles: Angles, layer_type: str | None, x: Tensor, part: Part) -> Iterator[LayerRope]:
    cos, _ = angles(torch.tensor([3], device=x.device), layer_type)
    width = x.shape[-1]
    for repeat in REPEATS:
        dims = (2 if repeat == "once" else 1) * cos.shape[-1]
        if dims > width or not _repeats(cos, repeat):
            continue
        for offset in dict.fromkeys((0, width - dims)):
            for layout in LAYOUTS:
                yield LayerRope(layer_type, layout, repeat, dims, offset, part)


def _repeats(cos: Tensor, repeat: Repeat) -> bool:
    one = one_per_plane(cos, repeat)
    again = {"interleaved": one.repeat_interleave(2, -1), "half": torch.cat((one, one), -1), "once": one}[repeat]
    return torch.equal(again, cos)


def probe_key_norms(model: Any, geometry: Geometry, rotary: Rotary) -> tuple[Tensor | None, ...]:
    """Find each layer's effective key-norm weight w: keys = w * x / rms(x), by probing (arXiv 2010.04245: QK-norm).

    A norm answers a vector of ones with its effective weight. The layer counts as normed only if its real keys, divided
    by that weight, have RMS 1.
    """
    owners = geometry.cache_layers
    one = torch.tensor([1])
    read = _one_token(model, 1, owners)
    keys = {
        owner: rotary.strip(k, v, i, one.to(k.device))[0]
        for i, (owner, (k, v)) in enumerate(zip(owners, read, strict=True))
    }
    norms: dict[int, Tensor | None] = dict.fromkeys(owners)
    for name, module in decoder_of(model).named_modules():
        if name.split(".")[-1] in ("k_norm", "k_layernorm", "key_layernorm"):
            owner = next((int(part) for part in name.split(".") if part.isdigit()), None)
            if owner in norms:
                norms[owner] = _effective_weight(module, keys[owner])
    return tuple(norms.values())


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
