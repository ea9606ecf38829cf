"""What a model's key-value cache looks like, layer by layer.

Knows shapes, windows and rotary layouts as plain values. Does not know how they are found: `probing.probe_geometry` reads
them off a real prefill, so nothing here is computed from config names.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

RopeLayout = Literal["half", "interleaved"]
Repeat = Literal["half", "interleaved", "once"]
Part = Literal["keys", "values"]


@dataclass(frozen=True)
class LayerRope:
    """How one layer rotates its keys.

    Fields:
        layer_type: the name under which the model's rotary module keeps this layer's angles (None: it has one set).
        layout: which dims form a rotary plane: (i, i + dims/2) or (2i, 2i + 1).
        repeat: how the module repeats each plane's angle over the dims of its cos/sin, if it does.
        dims: rotated dims of a head; the rest passes through.
        offset: first rotated dim.
        part: which of the two cached tensors holds the rotated dims. Latent attention (MLA, arXiv 2405.04434) caches a latent
            without positions in the place of keys, and one small rotated key in the place of values.
    """

    layer_type: str | None
    layout: RopeLayout
    repeat: Repeat
    dims: int
    offset: int = 0
    part: Part = "keys"


@dataclass(frozen=True)
class LayerGeometry:
    """One cache-owning layer. `window` is None for full attention, else the number of tokens a query sees."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    rope: LayerRope | None

    @property
    def key_width(self) -> int:
        """Number of key features of one token: kv_heads * key_dim."""
        return self.kv_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Number of value features of one token: kv_heads * value_dim."""
        return self.kv_heads * self.value_dim

    @property
    def width(self) -> int:
        """Key and value features of one token together."""
        return self.key_width + self.value_width

    def first_held(self, tokens: int) -> int:
        """Return the first token that a cache of `tokens` tokens must hold for the next query in this layer.

        A sliding layer's next query sees itself and the `window - 1` tokens before it.
        """
        return 0 if self.window is None else max(0, tokens - self.window + 1)


@dataclass(frozen=True)
class Geometry:
    """The whole cache of one model.

    Fields:
        layers: the layers that own keys and values.
        owners: the model layer of each of them; None where all layers of the model own a cache. Layers that borrow another
            layer's keys, or that keep a recurrent state only, are left out.
        angle_limit: the number of tokens beyond which the rotary angles of all tokens change (dynamic NTK, longrope); None for
            angles that depend on the position alone. Keys read below it and keys read above it don't fit together.
    """

    layers: tuple[LayerGeometry, ...]
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    owners: tuple[int, ...] | None = None
    angle_limit: int | None = None

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """Return the place of each layer in the model's cache."""
        return tuple(range(len(self.layers))) if self.owners is None else self.owners

    @property
    def features_per_token(self) -> int:
        """Key and value features of one token over all layers."""
        return sum(layer.width for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict that `from_json` restores."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Geometry:
        """Restore what `to_json` gave."""
        layers = tuple(
            LayerGeometry(**{**layer, "rope": LayerRope(**layer["rope"]) if layer["rope"] else None})
            for layer in data["layers"]
        )
        owners = data.get("owners")
        return cls(**{**data, "layers": layers, "owners": None if owners is None else tuple(owners)})
