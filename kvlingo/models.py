"""Load a model by name, refuse what can't be used, check the rest once.

Knows transformers' loaders and .gguf files. What a loaded model is and how it reads is in `language_model`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from kvlingo import __version__
from kvlingo.errors import BadInput, KVLingoError, MissingExtra, UnsupportedModel
from kvlingo.files import write_file
from kvlingo.language_model import LanguageModel, layers_refusal
from kvlingo.probing import probe_geometry, probe_key_norms
from kvlingo.selfcheck import SELF_CHECK_VERSION, self_check

LOADER_NOTE = "kvlingo.json"  # in a folder of converted weights: what they were converted from


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
    device = chosen_device(device)
    dtype = chosen_dtype(dtype, device)
    path = convert_gguf(Path(name), cache_dir) if str(name).endswith(".gguf") else name
    with clear_load_errors(str(name)):
        config = AutoConfig.from_pretrained(path)
        refuse_by_config(config)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
        tokenizer = AutoTokenizer.from_pretrained(path)
    lm = _probed(model, tokenizer, Path(name).name if Path(name).exists() else str(name))
    lm = replace(lm, loader=_loader_of(Path(path)))
    _check_once(lm)
    return lm


def load_tokenizer(name: str | Path) -> Any:
    """Load a tokenizer alone, by hub id or local folder. Raises `BadInput` or `UnsupportedModel` with one sentence."""
    with clear_load_errors(str(name), weights=False):
        return AutoTokenizer.from_pretrained(name)


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
        refuse_other_vocabulary(name, tokenizer, rows)
        probed = probe_geometry(model)
        geometry, rotary = probed.geometry, probed.rotary
        key_norms = probe_key_norms(model, geometry, rotary)
    refusal = probed.target_refusal or layers_refusal(model)
    return LanguageModel(name, model, tokenizer, geometry, rotary, key_norms, refusal)


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


def refuse_other_vocabulary(name: str, tokenizer: Any, rows: int) -> None:
    """Raise `UnsupportedModel` where a tokenizer has more tokens than the embedding has rows."""
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


def chosen_device(device: torch.device | str | None) -> torch.device:
    """Return the device asked for, or the GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    try:
        found = torch.device(device or ("cuda" if has_gpu else "cpu"))
    except RuntimeError as error:
        raise BadInput(f"unknown device {device!r}; use cpu, or cuda, cuda:1 … where there is a GPU") from error
    if found.type == "cuda" and not has_gpu:
        raise BadInput(f"no GPU for device {str(found)!r} that this PyTorch can use; leave the device out, or use cpu")
    return found


def chosen_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """Return the floating-point type asked for, or the one that suits the device."""
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise BadInput(f"unknown dtype {dtype!r}; use float32, bfloat16 or float16")
    return found


@contextmanager
def clear_load_errors(name: str, *, weights: bool = True) -> Iterator[None]:
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
            inside = next(iter(sorted(folder.glob("*.gguf"))), None)
            instead = f"the file in it, {inside}" if inside else "a .gguf file"
            raise BadInput(
                f"{name} has no config.json; give a folder made by save_pretrained, {instead} or a hub id"
            ) from error
        if folder.is_file():
            raise BadInput(f"{name} is a file, but no .gguf file; give a model's folder or a hub id") from error
        if weights and folder.is_dir() and not any(folder.glob("*.safetensors")):
            raise BadInput(f"{name} holds no weights (*.safetensors); download the whole model") from error
        if folder.exists():
            raise UnsupportedModel(
                f"{name} can't be loaded: {reason.rstrip('.')}; if it is damaged, download it again"
            ) from error
        if name.startswith(("/", "./", "../", "~")):
            raise BadInput(f"there is no {name}; give a model's folder, a .gguf file or a hub id") from error
        raise BadInput(
            f"{name} is neither a folder nor a .gguf file, and can't be had from the model hub "
            f"({first_sentence(error)}); check the name and the network, or give its folder (--source and --target "
            "for a saved translator's models)"
        ) from error


def first_sentence(error: Exception) -> str:
    """Return what a long error says first, without the addresses in it."""
    said = re.split(r"(?<=\w)[.,:](?:\s|$)", " ".join(str(error).split()), maxsplit=1)[0]
    return re.sub(r"'?https?://\S+", "the hub", said)[:160] or type(error).__name__


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
        with clear_load_errors(str(file)):
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


def quiet_loading() -> None:
    """Switch off transformers' progress bars and the hub's lines about retries, for programs with words of their own."""
    hf_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


logging.getLogger("transformers.modeling_gguf_pytorch_utils").setLevel(logging.ERROR)
