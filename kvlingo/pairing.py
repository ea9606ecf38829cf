"""Which source layers feed which target layer.

Knows layer counts only. The proportional pairing is the start; `fitting` shifts each window on held-out text.
"""

from __future__ import annotations


def proportional(target_layers: int, source_layers: int) -> tuple[int, ...]:
    """Return for each target layer the source layer at the same relative depth."""
    if target_layers == 1:
        return (source_layers - 1,)
    return tuple(round(i * (source_layers - 1) / (target_layers - 1)) for i in range(target_layers))


def window(centre: int, reach: int, source_layers: int) -> tuple[int, ...]:
    """Return the source layers centre - reach … centre + reach; at the ends the window is shifted, not cut.

    Every target layer thus reads the same number of source layers, as long as the source has that many.
    """
    count = min(2 * reach + 1, source_layers)
    first = min(max(centre - reach, 0), source_layers - count)
    return tuple(range(first, first + count))
