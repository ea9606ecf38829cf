"""A model with what was probed of it, and how it reads.

Models stay unwrapped: `LanguageModel` only keeps a model, its tokenizer and the facts probed from it together. Does not know how
a model is loaded (`models` does), nor what a translator is.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kvlingo.cache import full_cache, native_cache, read_cache
from kvlingo.errors import BadInput, UnsupportedModel
from kvlingo.fingerprints import fingerprint
from kvlingo.geometry import Geometry
from kvlingo.kv import KV
from kvlingo.probing import decoder_of, run
from kvlingo.rope import Rotary
from kvlingo.steps import Steps, finished, parts

PROBED_PARTS = (5, 3, 4)
PROBED_ERROR = 0.02
OPENING_TOKENS = 8


@dataclass(frozen=True)
class Identity:
    """What tells a model from others: its weights', and its tokenizer's and chat template's."""

    fingerprint: str
    tokenizer_hash: str


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A frozen causal model with its tokenizer and the facts probed from it.

    Fields:
        key_norms: per layer the effective weight of the model's own key norm (RMS over the last dim: [key_dim] for a norm per
            head, [kv_heads * key_dim] for one over all heads); None where keys are not normed.
        target_refusal: why this model can only be a source, in one sentence; None where it can be a target too.
        loader: what its weights went through before transformers loaded them ("gguf"); None for nothing.
        sinks: what it holds of first tokens that many conversations share (`read_sinks`); filled as it goes. Clear it should you
            ever change the weights.
        known_as: who it is where not all of its weights are here (`extracts`); None: that is taken of what is here.
    """

    name: str
    model: Any
    tokenizer: Any
    geometry: Geometry
    rotary: Rotary
    key_norms: tuple[Tensor | None, ...]
    target_refusal: str | None = None
    loader: str | None = None
    sinks: dict[tuple[object, ...], KV] = field(default_factory=dict, repr=False)
    known_as: Identity | None = None

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The model's floating-point type."""
        return self.model.get_input_embeddings().weight.dtype

    @cached_property
    def fingerprint(self) -> str:
        """Identify the weights by content and by how they were loaded: config, shapes, a sample of every parameter; not the name.

        A model read from a .gguf file is not the one it was made from, even where the sampled values agree.
        """
        if self.known_as is not None:
            return self.known_as.fingerprint
        of_weights = fingerprint(self.model)
        return hashlib.sha256(f"{self.loader}:{of_weights}".encode()).hexdigest() if self.loader else of_weights

    @cached_property
    def tokenizer_hash(self) -> str:
        """Identify the tokenizer by content: vocabulary, merges, normaliser, added tokens and chat template."""
        return hash_tokenizer(self.tokenizer) if self.known_as is None else self.known_as.tokenizer_hash

    @cached_property
    def goes_on(self) -> bool:
        """Whether several tokens after a filled cache are read as they are within one text; tried out on a few."""
        tokens = sum(PROBED_PARTS)
        ids = self.ids([(7919 * i) % self.geometry.vocab_size for i in range(1, tokens + 1)])
        with torch.no_grad():
            whole = prefill(self, ids, full_length=True).logits[-1]
            cache, start = None, 0
            for part in PROBED_PARTS:
                done = prefill(self, ids[start : start + part], cache=cache, full_length=True)
                cache, start = done.cache, start + part
        return bool((done.logits[-1] - whole).norm() <= PROBED_ERROR * whole.norm())

    def embed(self, ids: Tensor) -> Tensor:
        """Return the input embeddings of `ids` [tokens] as [tokens, hidden]."""
        return self.model.get_input_embeddings()(ids.to(self.device))

    def ids(self, values: Sequence[int]) -> Tensor:
        """Put token ids on the model's device: [tokens]."""
        return torch.tensor(values, dtype=torch.long, device=self.device)


def hash_tokenizer(tokenizer: Any) -> str:
    """Hash a tokenizer's vocabulary, merges, normaliser, added tokens and chat template."""
    body = tokenizer.backend_tokenizer.to_str() + str(tokenizer.chat_template)
    return hashlib.sha256(body.encode()).hexdigest()


@dataclass(frozen=True)
class Prefill:
    """A filled cache and the logits [positions, vocabulary] of the last tokens read into it."""

    cache: Any
    logits: Tensor


def prefill(
    lm: LanguageModel,
    ids: Tensor,
    *,
    cache: Any = None,
    full_length: bool = False,
    logits_to_keep: int = 1,
) -> Prefill:
    """Let the model read `ids` [tokens] after what `cache` holds.

    The cache grows in place. Without one, a new cache is made: the model's own kind, or with `full_length` one whose
    sliding layers keep every token (needed to translate from it). `logits_to_keep` = 0 keeps all.
    """
    if ids.ndim != 1 or not len(ids):
        raise BadInput(
            f"nothing to read: got token ids of shape {tuple(ids.shape)}, expected [tokens] with tokens >= 1"
        )
    if cache is None:
        cache = full_cache(lm.model.config) if full_length else native_cache(lm.model.config)
    past = int(cache.get_seq_length())  # a static cache counts in a tensor
    logits = run(
        lm.model,
        input_ids=ids[None],
        position_ids=torch.arange(past, past + len(ids), device=ids.device)[None],
        cache=cache,
        logits_to_keep=logits_to_keep,
    ).logits[0]
    return Prefill(cache, logits)


def prefill_in_parts(
    lm: LanguageModel,
    ids: Tensor,
    *,
    most: int | None,
    cache: Any = None,
    full_length: bool = False,
    logits_to_keep: int = 1,
) -> Steps[Prefill]:
    """Do what `prefill` does, at most `most` tokens a step; None: all at once. `logits_to_keep` is 1 or more.

    The cache that is given holds, between two steps, the tokens of those taken.
    """
    if not len(ids):
        return prefill(lm, ids, cache=cache)  # which refuses
    rows, tokens = list[Tensor](), len(ids)
    for start, stop in parts(0, tokens, most):
        if start:
            yield None
        kept = min(stop - start, max(0, logits_to_keep - (tokens - stop)))
        done = prefill(lm, ids[start:stop], cache=cache, full_length=full_length, logits_to_keep=max(1, kept))
        cache, rows = done.cache, [*rows, done.logits] if kept else rows
    return Prefill(cache, rows[0] if len(rows) == 1 else torch.cat(rows))


def reads_in_parts(lm: LanguageModel, tokens: int) -> bool:
    """Tell whether a text of so many tokens, read in parts, is what it is when read at once.

    Not where the angles of all tokens change on the way. A model with a recurrent state is tried out: some forget it where
    several tokens follow (Jamba, in transformers 5.24).
    """
    limit = lm.geometry.angle_limit
    return (limit is None or tokens <= limit) and (lm.target_refusal is None or lm.goes_on)


def read_in_pieces(lm: LanguageModel, ids: Tensor, tokens: int | None, cache: Any = None) -> Prefill:
    """Let a model read ids at once, or so many tokens at a time."""
    return finished(prefill_in_parts(lm, ids, most=tokens, cache=cache))


def read_sinks(lm: LanguageModel, ids: Tensor, *, opening: int = 0) -> KV:
    """Return what `read` does of a conversation's first tokens, remembered where many conversations begin so.

    `opening` is how many of them hold nothing of any content (`Reading.opening`). More than those, or than `OPENING_TOKENS` (a
    template may begin with definitions of tools), is never remembered: nobody can tell by the time what others have said.
    """
    key = _sink_key(lm, ids)
    if key in lm.sinks:
        return lm.sinks[key]
    kv = read(lm, ids)
    if is_remembered(lm, ids, opening=opening):
        lm.sinks[key] = kv
    return kv


def is_remembered(lm: LanguageModel, ids: Tensor, *, opening: int) -> bool:
    """Tell whether `read_sinks` knows these first tokens, or will remember them."""
    may_be = len(ids) <= min(opening, OPENING_TOKENS) and not torch.is_inference_mode_enabled()
    return may_be or _sink_key(lm, ids) in lm.sinks


def _sink_key(lm: LanguageModel, ids: Tensor) -> tuple[object, ...]:
    return (lm.dtype, lm.device, *ids.tolist())


def read(lm: LanguageModel, ids: Tensor) -> KV:
    """Return the model's own position-free `KV` of `ids`, every layer in full.

    Only the decoder runs: a large vocabulary's logits would cost more than some layers.
    """
    cache = full_cache(lm.model.config)
    positions = torch.arange(len(ids), device=ids.device)[None]
    with torch.no_grad():
        run(decoder_of(lm.model), input_ids=ids[None], position_ids=positions, cache=cache)
    return read_cache(cache, lm.rotary, lm.geometry)


def read_padded(lm: LanguageModel, ids: Tensor, multiple: int = 64) -> KV:
    """Return what `read` does, reading on to a multiple of so many tokens: nothing that comes later changes what was before.

    For many texts of many lengths. Each new length costs a CPU the making of its products, which are then kept: hundreds of
    megabytes, growing with the text.
    """
    tokens = len(ids)
    limits = [n for n in (lm.geometry.max_positions, lm.geometry.angle_limit) if n is not None]
    padded = min([-(-tokens // multiple) * multiple, *limits])
    if padded <= tokens:
        return read(lm, ids)
    return read(lm, torch.cat((ids, ids[:1].expand(padded - tokens)))).narrow(0, tokens)


def native_layers(lm: LanguageModel, ids: Tensor, count: int) -> KV:
    """Return the exact KV of the target's first `count` layers for `ids` [tokens], each in full.

    Layer 0 depends on the token alone, so each distinct id is read once, by itself, at position 0: no attention over the
    context is paid for. Deeper layers need the layers below them over the whole prefix.
    """
    if count > len(lm.geometry):
        raise BadInput(f"{count} native layers asked for, {lm.name} has {len(lm.geometry)}; ask for no more than those")
    owners = lm.geometry.cache_layers[:count]
    view = first_layers(lm.model, owners[-1] + 1)
    cache = full_cache(lm.model.config)
    if count == 1:
        distinct, index = torch.unique(ids, return_inverse=True)
        positions = torch.zeros(len(distinct), 1, dtype=torch.long, device=ids.device)
        layer = cache.layers[owners[0]]
        with _no_further_than(layer, view):
            run(view, input_ids=distinct[:, None], position_ids=positions, cache=cache)
        keys, values = lm.rotary.strip(layer.keys, layer.values, 0, positions[0])
        return KV((_batch_to_tokens(keys, index),), (_batch_to_tokens(values, index),), len(ids))
    run(view, input_ids=ids[None], position_ids=torch.arange(len(ids), device=ids.device)[None], cache=cache)
    geometry = replace(lm.geometry, layers=lm.geometry.layers[:count], owners=owners)
    return read_cache(cache, lm.rotary, geometry)


class _Filled(Exception):
    """The cache layer that was waited for holds its keys and values."""


@contextmanager
def _no_further_than(layer: Any, module: nn.Module) -> Iterator[None]:
    """Leave a forward pass as soon as one cache layer is filled: its attention and MLP change nothing in there.

    A model with hooks runs on to its end: what moves its weights, say, has work to do after each layer.
    """
    if any(hasattr(part, "_hf_hook") or part._forward_hooks for part in module.modules()):
        yield
        return
    update = layer.update

    def fill(*args: Any, **kwargs: Any) -> Any:
        update(*args, **kwargs)
        raise _Filled

    layer.update = fill
    try:
        with suppress(_Filled):
            yield
    finally:
        del layer.update  # the class's own again


def _batch_to_tokens(x: Tensor, index: Tensor) -> Tensor:
    """[ids, heads, 1, dim] -> [1, heads, tokens, dim], taking row `index[t]` for token t."""
    return x[index, :, 0].transpose(0, 1)[None]


def first_layers(model: Any, count: int) -> nn.Module:
    """Return a decoder made of the model's first `count` layers; it shares all weights with the model."""
    decoder = decoder_of(model)
    name, layers = decoder_layers(decoder)
    view = copy.copy(decoder)
    view._modules = {**decoder._modules, name: nn.ModuleList(layers[:count])}
    return view


def decoder_layers(decoder: Any) -> tuple[str, nn.ModuleList]:
    """Return a decoder's list of layers and the name it has there. Raises `UnsupportedModel` where it has no such list."""
    count = decoder.config.num_hidden_layers
    for name, module in decoder.named_children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise UnsupportedModel(
        f"this {decoder.config.model_type} model has no list of its {count} layers, so its first layers can't run alone; "
        "it can be a source, and as a target it reads the conversation anew"
    )


def layers_refusal(model: Any) -> str | None:
    """Say why a model's layers can't be run or placed one by one, or None."""
    try:
        decoder_layers(decoder_of(model))
    except UnsupportedModel as error:
        return str(error)
    return None


def layer_weights(model: Any) -> int:
    """Return the number of weights in a decoder's layers; of all but its embedding where they are no list."""
    decoder = decoder_of(model)
    if layers_refusal(model) is None:
        return sum(p.numel() for p in decoder_layers(decoder)[1].parameters())
    return sum(p.numel() for p in decoder.parameters()) - model.get_input_embeddings().weight.numel()


def layer_devices(model: Any) -> tuple[torch.device, ...]:
    """Return where each layer computes, which is where its part of a cache has to be.

    A model spread over devices (`device_map`) says so on its layers' hooks: the weights of a layer that is kept elsewhere
    are nowhere (on PyTorch's meta device) until it runs.
    """
    _, layers = decoder_layers(decoder_of(model))
    return tuple(_device_of(layer) for layer in layers)


def cache_devices(lm: LanguageModel) -> tuple[torch.device, ...]:
    """Return where the layers that own keys and values compute."""
    devices = layer_devices(lm.model)
    return tuple(devices[place] for place in lm.geometry.cache_layers)


def _device_of(layer: nn.Module) -> torch.device:
    device = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
    return next(layer.parameters()).device if device is None else torch.device(device)


def with_vocabulary(lm: LanguageModel, ids: Tensor) -> LanguageModel:
    """Return the same model, sharing all weights, with an output head that knows only the tokens `ids` [kept].

    Its logits [..., kept] are those of the whole model at these columns. With a vocabulary of 262,144 the head costs more
    than all layers of a small model together.
    """
    head = lm.model.get_output_embeddings()
    name = next((n for n, m in lm.model.named_children() if m is head), None)
    if name is None:
        raise UnsupportedModel(
            f"the output head of {lm.name} is not a direct child of the model; train with its full vocabulary"
        )
    small = nn.Linear(head.in_features, len(ids), bias=head.bias is not None, device="meta")
    small.weight = nn.Parameter(head.weight.detach()[ids].clone(), requires_grad=False)
    if head.bias is not None:
        small.bias = nn.Parameter(head.bias.detach()[ids].clone(), requires_grad=False)
    view = copy.copy(lm.model)
    view._modules = {**lm.model._modules, name: small}
    return replace(lm, model=view, sinks={})
