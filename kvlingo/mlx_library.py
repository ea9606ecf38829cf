"""The one place where MLX and mlx-lm are imported, so that a missing one is told in one line."""

from __future__ import annotations

from typing import Any

from kvlingo.errors import MissingExtra

try:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from mlx_lm.utils import load as load_both
    from mlx_lm.utils import load_config
except ImportError as missing:
    raise MissingExtra("models of mlx-lm need mlx and mlx-lm: pip install 'kvlingo[mlx]'") from missing

__all__ = [
    "Array",
    "KVCache",
    "QuantizedKVCache",
    "RotatingKVCache",
    "TokenizerWrapper",
    "load_both",
    "load_config",
    "make_prompt_cache",
    "mx",
    "nn",
]

Array = Any  # an mx.array
