"""Load a model, learn what its cache looks like, run it.

Knows transformers' models and tokenizers. Models stay unwrapped: `LanguageModel` only keeps a model, its tokenizer and the
facts probed from it together. Does not know what a translator is.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from kvlingo import __version__
from kvlingo.cache import KV, full_cache, native_cache, read_cache
from kvlingo.errors import BadInput, KVLingoError, MissingExtra, UnsupportedModel
from kvlingo.files import write_file
from kvlingo.geometry import Geometry
from kvlingo.gguf_header import read_gguf_header
from kvlingo.probing import (
    cache_owners,
    decoder_of,
    forget_length,
    layer_geometry,
    probe_geometry,
    probe_key_norms,
    refuse_position_tables,
    rotary_module,
    run,
    whole_geometry,
)
from kvlingo.rope import Rotary
from kvlingo.selfcheck import SELF_CHECK_VERSION, self_check

OPENING_TOKENS = 8
LOADER_NOTE = "kvlingo.json"  # in a folder of converted weights: what they were converted from


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A frozen causal model with its tokenizer and the facts probed from it.

    Fields:
        key_norms: per layer the effective weight of the model's own key norm (RMS over the last dim: [key_dim] for a norm per
            head, [kv_heads * key_dim] for one over all heads); None where keys are not normed.
        target_refusal: why this model can only be a source, in one sentence; None where it can be a target too.
        loader: what its weights went through before transformers loaded them ("gguf"); None for nothing.
        sinks: what it holds of first tokens that many conversations share (`read_sinks`); filled as it goes.
    """

    name: str
    model: Any
    tokenizer: Any
    geometry: Geometry
    rotary: Rotary
    key_norms: tuple[Tensor | None, ...]
    target_refusal: str | None = None
    loader: str | None = None
    sinks: dict[tuple[int, ...], KV] = field(default_factory=dict, repr=False)

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
        of_weights = fingerprint(self.model)
        return hashlib.sha256(f"{self.loader}:{of_weights}".encode()).hexdigest() if self.loader else of_weights

    @cached_property
    def tokenizer_hash(self) -> str:
        """Identify the tokenizer by content: vocabulary, merges, normaliser, added tokens and chat template."""
        body = self.tokenizer.backend_tokenizer.to_str() + str(self.tokenizer.chat_template)
        return hashlib.sha256(body.encode()).hexdigest()

    def embed(self, ids: Tensor) -> Tensor:
        """Return the input embeddings of `ids` [tokens] as [tokens, hidden]."""
        return self.model.get_input_embeddings()(ids.to(self.device))

    def ids(self, values: Sequence[int]) -> Tensor:
        """Put token ids on the model's device: [tokens]."""
        return torch.tensor(values, dtype=torch.long, device=self.device)


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


def read_sinks(lm: LanguageModel, ids: Tensor, *, opening: int = 0) -> KV:
    """Return what `read` does of a conversation's first tokens, remembered where many conversations begin so.

    `opening` is how many of them hold nothing of any content (`Reading.opening`). More than those, or than `OPENING_TOKENS` (a
    template may begin with definitions of tools), is never remembered: nobody can tell by the time what others have said.
    """
    key = tuple(ids.tolist())
    if key in lm.sinks:
        return lm.sinks[key]
    kv = read(lm, ids)
    if len(key) <= min(opening, OPENING_TOKENS) and not torch.is_inference_mode_enabled():
        lm.sinks[key] = kv
    return kv


def read(lm: LanguageModel, ids: Tensor) -> KV:
    """Return the model's own position-free `KV` of `ids`, every layer in full.

    Only the decoder runs: a large vocabulary's logits would cost more than some layers.
    """
    cache = full_cache(lm.model.config)
    positions = torch.arange(len(ids), device=ids.device)[None]
    with torch.no_grad():
        run(decoder_of(lm.model), input_ids=ids[None], position_ids=positions, cache=cache)
    return read_cache(cache, lm.rotary, lm.geometry)


# --- the first layers alone ------------------------------------------------------------------------------------------


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

    A model spread over devices runs on to its end: what moves its weights has work to do after each layer.
    """
    if any(hasattr(part, "_hf_hook") for part in module.modules()):
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
    """Return a decoder's list of layers and the name it has there."""
    return next(
        (name, module)
        for name, module in decoder.named_children()
        if isinstance(module, nn.ModuleList) and len(module) == decoder.config.num_hidden_layers
    )


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


# --- loading ---------------------------------------------------------------------------------------------------------


@torch.inference_mode(False)  # weights that were made in the caller's inference mode can't carry gradients through
def load_model(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    cache_dir: Path | None = None,
) -> LanguageModel:
    """Load a causal language model by hub id, local folder or .gguf file; frozen and in eval mode.

    A .gguf file is dequantised once into a folder under `cache_dir` and loads from there in seconds afterwards.
    `device` defaults to the GPU if there is one; `dtype` to bfloat16 there and to float32 on a CPU.
    Raises `UnsupportedModel` or `BadInput` with one sentence.
    """
    device = _device(device)
    dtype = _dtype(dtype, device)
    path = convert_gguf(Path(name), cache_dir) if str(name).endswith(".gguf") else name
    with _clear_load_errors(str(name)):
        config = AutoConfig.from_pretrained(path)
        refuse_by_config(config)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
        tokenizer = AutoTokenizer.from_pretrained(path)
    lm = _probed(model, tokenizer, Path(name).name if Path(name).exists() else str(name))
    lm = replace(lm, loader=_loader_of(Path(path)))
    _check_once(lm)
    return lm


def _loader_of(folder: Path) -> str | None:
    """Return what `convert_gguf` noted of a folder that it made; None for any other folder."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return str(json.loads((folder / LOADER_NOTE).read_text(encoding="utf-8"))["loader"])
    return None


def wrap(model: Any, tokenizer: Any, *, name: str = "model") -> LanguageModel:
    """Freeze a model that is already in memory, probe what `LanguageModel` needs, and check that it holds."""
    lm = _probed(model, tokenizer, name)
    _check(lm)
    return lm


def _probed(model: Any, tokenizer: Any, name: str) -> LanguageModel:
    refuse_by_config(model.config)
    model.eval().requires_grad_(False)
    with _clear_probe_errors(model):
        rows = model.get_input_embeddings().weight.shape[0]
        _refuse_other_vocabulary(name, tokenizer, rows)
        probed = probe_geometry(model)
        geometry, rotary = probed.geometry, probed.rotary
        key_norms = probe_key_norms(model, geometry, rotary)
    return LanguageModel(name, model, tokenizer, geometry, rotary, key_norms, probed.target_refusal)


@contextmanager
def _clear_probe_errors(model: Any) -> Iterator[None]:
    """Refuse a model that can't even be asked: a family that nobody here has seen may raise anything."""
    try:
        yield
    except (KVLingoError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise UnsupportedModel(
            f"this {model.config.model_type} model can't be probed ({reason}); KV-Lingo can't use it"
        ) from error


def _check(lm: LanguageModel) -> None:
    with _clear_probe_errors(lm.model):
        self_check(lm.model, lm.geometry, lm.rotary, writable=lm.target_refusal is None)


def _check_once(lm: LanguageModel) -> None:
    """Run the self-check unless these weights have passed it before, under these versions, in this dtype and on this device."""
    facts = {
        "kvlingo": __version__,
        "checks": SELF_CHECK_VERSION,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "attention": str(getattr(lm.model.config, "_attn_implementation", None)),
        "dtype": str(lm.dtype),
        "device": lm.device.type,
    }
    note = default_cache_dir() / "checks" / f"{lm.fingerprint[:32]}-{lm.dtype}-{lm.device.type}.json"
    with suppress(OSError, ValueError):  # no note, or none that can be read: check
        if json.loads(note.read_text(encoding="utf-8")) == facts:
            return
    _check(lm)
    with suppress(BadInput):  # a folder that can't be written only costs the next load a second
        write_file(note, (json.dumps(facts, indent=1) + "\n").encode())


def _refuse_other_vocabulary(name: str, tokenizer: Any, rows: int) -> None:
    if tokenizer is not None and len(tokenizer) > rows:
        raise UnsupportedModel(
            f"the tokenizer of {name} has {len(tokenizer)} tokens, its embedding {rows} rows; "
            "give the tokenizer that belongs to these weights"
        )


def refuse_by_config(config: Any) -> None:
    """Raise `UnsupportedModel` for what can be told before any weight is loaded."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{config.model_type} is an encoder-decoder: its cross-attention cache belongs to the encoder's input; "
            "KV-Lingo translates between decoder-only models"
        )


def _device(device: torch.device | str | None) -> torch.device:
    """Return the device asked for, or the GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    try:
        found = torch.device(device or ("cuda" if has_gpu else "cpu"))
    except RuntimeError as error:
        raise BadInput(f"unknown device {device!r}; use cpu, or cuda, cuda:1 … where there is a GPU") from error
    if found.type == "cuda" and not has_gpu:
        raise BadInput(f"no GPU for device {str(found)!r} that this PyTorch can use; leave the device out, or use cpu")
    return found


def _dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise BadInput(f"unknown dtype {dtype!r}; use float32, bfloat16 or float16")
    return found


@contextmanager
def _clear_load_errors(name: str, *, weights: bool = True) -> Iterator[None]:
    """Turn the many-line errors of transformers and of the files' parsers into one line that says what to do.

    `weights` says whether they are needed, so that to lack them is a reason.
    """
    try:
        yield
    except KVLingoError:
        raise
    except Exception as error:  # damaged files make their parsers raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:240]
        folder = Path(name)
        if folder.is_dir() and not (folder / "config.json").exists():
            raise BadInput(
                f"{name} has no config.json; give a folder made by save_pretrained, a .gguf file or a hub id"
            ) from error
        if weights and folder.is_dir() and not any(folder.glob("*.safetensors")):
            raise BadInput(f"{name} holds no weights (*.safetensors); download the whole model") from error
        if folder.exists():
            raise UnsupportedModel(f"{name} can't be loaded: {reason}; if it is damaged, download it again") from error
        raise BadInput(
            f"{name} is neither a folder nor a .gguf file, and can't be had from the model hub; "
            f"check the name and the network ({reason})"
        ) from error


def default_cache_dir() -> Path:
    """Return where converted models and corpora are kept: $KVLINGO_CACHE or ~/.cache/kvlingo."""
    return Path(os.environ.get("KVLINGO_CACHE", Path.home() / ".cache" / "kvlingo"))


def convert_gguf(file: Path, cache_dir: Path | None = None) -> Path:
    """Dequantise a .gguf file into a folder that loads in seconds, once; return the folder.

    The folder appears under its name only when it is whole.
    """
    check_gguf(file)
    folder = (cache_dir or default_cache_dir() / "models") / f"{file.stem}-{_file_digest(file)[:12]}"
    if folder.is_dir():
        return folder
    try:
        import accelerate  # noqa: F401 - transformers asks for both
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            "reading .gguf files needs the gguf and accelerate packages: pip install 'kvlingo[gguf]'"
        ) from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as temporary:
        with _clear_load_errors(str(file)):
            model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        # The loader marks the model as quantised; the weights in memory are plain float32, and saving wants to hear so.
        model.config.__dict__.pop("quantization_config", None)
        model.hf_quantizer, model.is_quantized = None, False
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (Path(temporary) / LOADER_NOTE).write_text(json.dumps({"loader": "gguf", "file": file.name}))
        whole = Path(temporary) / "whole"
        whole.mkdir()
        for item in [p for p in Path(temporary).iterdir() if p != whole]:
            item.rename(whole / item.name)
        if not folder.is_dir():
            whole.rename(folder)
    return folder


def check_gguf(file: Path) -> None:
    """Raise `BadInput` unless there is a file that says it is GGUF."""
    if not file.is_file():
        raise BadInput(f"{file} does not exist; give the path of a .gguf file")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise BadInput(f"{file} is not a GGUF file (no GGUF magic); download it again")


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fingerprint(model: Any) -> str:
    """Hash a model's config and a sample of its weights, so that equal names with other weights differ.

    Samples 64 evenly spaced values of each parameter, rounded to bfloat16: float32 and bfloat16 copies of the same weights
    agree, fine-tunes, merged adapters and quantised copies do not.
    """
    digest = hashlib.sha256()
    config = {k: v for k, v in model.config.to_dict().items() if k not in _CONFIG_NOISE}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in sorted(model.state_dict().items()):
        flat = parameter.detach().reshape(-1)
        count = min(64, len(flat))
        index = torch.arange(count, device=flat.device) * len(flat) // max(count, 1)
        sample = flat[index].to(device="cpu", dtype=torch.bfloat16).view(torch.int16)
        digest.update(f"{name}{tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


# Where and how a model was made or saved, not what it computes. `architectures` is written by saving.
_CONFIG_NOISE = {
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_attn_implementation",
    "use_cache",
}


def quiet_loading() -> None:
    """Switch off transformers' progress bars and the hub's lines about retries, for programs with words of their own."""
    hf_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


# --- without weights -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outline:
    """What can be known of a model before its weights are loaded.

    Fields:
        geometry: shapes and windows of its cache; `rope` is None throughout, rotation is probed on real keys.
        total_weights: all parameters, tied ones once.
        layer_weights: those of the decoder's layers: what one token passes through (all experts, where there are experts).
        query_widths: query features of each layer.
        load_tokenizer: gives the tokenizer, or None where the model brings none; slow for a .gguf file.
        pieces: the vocabulary as it is spelled; None without a tokenizer.
        target_refusal: why it can only be a source; None where it can be a target too.
    """

    name: str
    kind: str
    load_tokenizer: Callable[[], Any]
    pieces: frozenset[bytes] | None
    geometry: Geometry
    total_weights: int
    layer_weights: int
    query_widths: tuple[int, ...]
    target_refusal: str | None


@torch.no_grad()
def _fill_without_data(model: Any, cache: Any) -> None:
    """Let a model without weights read two tokens, for the shapes of what it keeps.

    Raises `UnsupportedModel` for one that looks at values on the way (OPT on older releases).
    """
    try:
        run(model, input_ids=torch.arange(2)[None], cache=cache)
    except RuntimeError as error:
        if "meta tensor" not in str(error):
            raise
        raise UnsupportedModel(
            f"what keys and values this {model.config.model_type} model keeps can't be told without its weights; "
            "load it to know"
        ) from error


def outline(name: str | Path, *, cache_dir: Path | None = None) -> Outline:
    """Describe a model by hub id, folder or .gguf file from its config and tokenizer alone.

    Shapes are read off a prefill of a model whose weights have no data (PyTorch's meta device), by the same code that a
    loaded model is probed with. Raises `UnsupportedModel` or `BadInput` with one sentence.
    """
    with _clear_load_errors(str(name), weights=False):
        config, load_tokenizer, pieces = _described(name)
        refuse_by_config(config)
        with torch.device("meta"):
            # Tensors without data can't tell which expert a token goes to; this form of the experts does not ask.
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, experts_implementation="batched_mm"
            ).eval()
            forget_length(rotary_module(model))
            cache = native_cache(model.config)
            _fill_without_data(model, cache)
        refuse_position_tables(model)
    owners, target_refusal = cache_owners(model, cache)
    text_config = model.config.get_text_config(decoder=True)
    decoder_layer_weights = decoder_layers(decoder_of(model))[1].parameters()
    layers = tuple(layer_geometry(cache.layers[owner], None) for owner in owners)
    if not str(name).endswith(".gguf"):  # a .gguf file keeps its embedding's rows as its vocabulary
        _refuse_other_vocabulary(str(name), load_tokenizer(), model.get_input_embeddings().weight.shape[0])
    return Outline(
        name=Path(name).name if Path(name).exists() else str(name),
        kind=model.config.model_type,
        load_tokenizer=load_tokenizer,
        pieces=pieces,
        geometry=whole_geometry(model, layers, owners),
        total_weights=sum(p.numel() for p in model.parameters()),
        layer_weights=sum(p.numel() for p in decoder_layer_weights),
        query_widths=tuple(text_config.num_attention_heads * layer.key_dim for layer in layers),
        target_refusal=target_refusal,
    )


def _described(name: str | Path) -> tuple[Any, Callable[[], Any], frozenset[bytes] | None]:
    """Return a model's config, what loads its tokenizer, and the pieces of its vocabulary."""
    if str(name).endswith(".gguf"):
        return _described_gguf(Path(name))
    config = AutoConfig.from_pretrained(name)
    if Path(name).is_dir() and not any((Path(name) / file).exists() for file in TOKENIZER_FILES):
        return config, lambda: None, None
    tokenizer = AutoTokenizer.from_pretrained(name)
    return config, lambda: tokenizer, frozenset(piece.encode() for piece in tokenizer.get_vocab())


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def _described_gguf(file: Path) -> tuple[Any, Callable[[], Any], frozenset[bytes] | None]:
    """As `_described`, with the config read off a copy of the file's header that has no vocabulary."""
    header = read_gguf_header(file)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / file.name).write_bytes(header.stub())
        config = AutoConfig.from_pretrained(folder, gguf_file=file.name)
    if header.pieces and not any(key.endswith(".vocab_size") for key in header.entries):
        config.get_text_config(decoder=True).vocab_size = len(header.pieces)
    load = lru_cache(maxsize=1)(lambda: AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))
    return config, load, frozenset(header.pieces) or None


logging.getLogger("transformers.modeling_gguf_pytorch_utils").setLevel(logging.ERROR)
