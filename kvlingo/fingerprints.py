"""What identifies a model: its config and its weights, not its name.

Knows a transformers model's config and state. Loads nothing.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch


def fingerprint(model: Any) -> str:
    """Hash a model's config and a sample of its weights, so that equal names with other weights differ.

    Samples 64 evenly spaced values of each parameter, rounded to bfloat16: float32 and bfloat16 copies of the same weights
    agree, fine-tunes, merged adapters and quantised copies do not.
    """
    digest = hashlib.sha256()
    config = {k: v for k, v in model.config.to_dict().items() if k not in CONFIG_NOISE}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in sorted(model.state_dict().items()):
        flat = parameter.detach().reshape(-1)
        count = min(64, len(flat))
        index = torch.arange(count, device=flat.device) * len(flat) // max(count, 1)
        sample = flat[index].to(device="cpu", dtype=torch.bfloat16).view(torch.int16)
        digest.update(f"{name}{tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


# Where and how a model was made or saved, not what it computes. `architectures` is written by saving.
CONFIG_NOISE = {
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_attn_implementation",
    "use_cache",
}
