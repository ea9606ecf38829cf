"""A connector that keeps whole blocks by their hashes, as vLLM's offloading connectors do: a child beside ours.

It asks nobody what a block is: what it gives back to whom is decided by the hashes, which begin with the request's salt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

Places = list[tuple[bytes, int]]


@dataclass
class HashedMetadata(KVConnectorMetadata):
    """Which blocks to keep, and which to give back: hash and number of each."""

    saves: Places = field(default_factory=list)
    loads: Places = field(default_factory=list)


class HashedConnector(KVConnectorBase_V1):
    """Both halves."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._known: set[bytes] = set()
        self._first: dict[str, int] = {}
        self._next = HashedMetadata()
        self._caches: dict[str, torch.Tensor] = {}
        self._kept: dict[bytes, list[torch.Tensor]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        first = self._first[request.request_id] = num_computed_tokens // self._size
        hashes = request.block_hashes[first : (request.num_tokens - 1) // self._size]
        count = next((i for i, each in enumerate(hashes) if each not in self._known), len(hashes))
        return count * self._size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            (ids,) = blocks.get_block_ids()
            first = self._first[request.request_id]
            wanted = slice(first, first + num_external_tokens // self._size)
            self._next.loads += list(zip(request.block_hashes[wanted], ids[wanted], strict=True))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        whole = min(request.num_computed_tokens, request.num_tokens - 1) // self._size
        self._next.saves += list(zip(request.block_hashes[:whole], block_ids[:whole], strict=True))
        self._known |= set(request.block_hashes[:whole])
        return False, None

    def build_connector_meta(self, scheduler_output: Any) -> HashedMetadata:
        metadata, self._next = self._next, HashedMetadata()
        return metadata

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Keep blocks before anything of this step writes into them: they are free already."""
        super().bind_connector_metadata(connector_metadata)
        for key, block in connector_metadata.saves:
            self._kept[key] = [cache[block].clone() for cache in self._caches.values()]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, HashedMetadata)
        for key, block in metadata.loads:
            for cache, kept in zip(self._caches.values(), self._kept[key], strict=True):
                cache[block] = kept

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
