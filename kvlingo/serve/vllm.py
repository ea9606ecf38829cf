"""A translator inside vLLM, as a connector that vLLM loads by name (`kv_connector_module_path`).

Knows vLLM 0.32: the order in which it calls a connector, its requests, blocks and layouts. The only module that imports it. What
is kept, matched, translated and told is decided in `external/`.

Three things that vLLM leaves to a connector are done here: a request that goes on from a kept cache gets a salt of its own
before its first look into the prefix cache; keys are written by the backend's own cache update; and a load that fails is not
tried again.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import vllm
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from kvlingo.errors import BadInput, UnsupportedModel
from kvlingo.serve.external.carrying import Made, Target, head_range, map_anew, open_own, rehearse, side_of
from kvlingo.serve.external.matching import Matcher, read_link
from kvlingo.serve.external.opening import open_store
from kvlingo.serve.external.options import Options, read_options
from kvlingo.serve.external.scheduling import NO_BLOCK, Arrival, Desk, Load, Orders
from kvlingo.serve.external.telling import BOARD
from kvlingo.serve.external.versions import refuse_version
from kvlingo.serve.external.working import Layers, Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

IDLE_SECONDS = 0.001
REST_SECONDS = 0.01
"""So long a worker with nothing else to do sleeps at a time while it loads: vLLM's waits spin, on a core that loading needs."""
NULL_BLOCK = 0  # vLLM's block pool keeps this one for "nothing is kept here"
TOLD = "told"
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
FP8_STEP = 0.2
"""A backend may cut off what the format does not hold: so far, as a part of it, a power of two may come back from itself."""
MODEL_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


# --- what is refused before anything is served -----------------------------------------------------------------------


def check_config(config: VllmConfig) -> None:
    """Raise `BadInput` or `UnsupportedModel` for what a configuration says by itself, before there are blocks."""
    refuse_version(vllm.__version__)
    _check_options(config)
    _check_source(config)
    _check_model(config)


def check_engine(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise `BadInput` or `UnsupportedModel` for an engine in which a translation would be wrong or was never tried."""
    check_config(config)
    groups = kv_cache_config.kv_cache_groups
    for group in groups:
        if type(group.kv_cache_spec) not in (FullAttentionSpec, SlidingWindowSpec):
            kind = type(group.kv_cache_spec).__name__.removesuffix("Spec")
            raise UnsupportedModel(
                f"{config.model_config.model} has layers with a cache of kind {kind}; it can't be used"
            )
    if any(type(group.kv_cache_spec) is SlidingWindowSpec for group in groups):
        _check_windows(config, len(groups))


def _check_windows(config: VllmConfig, kinds: int) -> None:
    transfer = config.kv_transfer_config
    assert transfer is not None
    if kinds > 1 and transfer.is_kv_producer:
        raise BadInput(
            f"the engine keeps {kinds} kinds of blocks and forgets what lies outside a sliding window, so it can't keep whole "
            f'caches for others; set kv_role to "kv_consumer", or use {KVLingoConnector.__name__} (without the hybrid manager)'
        )
    if not read_options(transfer.kv_connector_extra_config).load_async:
        raise BadInput(
            "the engine lets go of blocks that a sliding window leaves behind, and vLLM can't take back a load within a step "
            "there: leave load_async on"
        )


def _check_options(config: VllmConfig) -> None:
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    assert transfer is not None
    if transfer.kv_load_failure_policy != "recompute":
        raise BadInput(
            'kv_load_failure_policy is "fail", vLLM\'s default: set it to "recompute" in --kv-transfer-config'
        )
    _check_cache_dtype(config.cache_config.cache_dtype, config.model_config.dtype, transfer.is_kv_producer)
    if config.speculative_config is not None:
        raise BadInput("speculative decoding keeps a cache of its own, which is not translated; switch it off")
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise BadInput(f"{name} is {getattr(parallel, name)}; the connector knows tensor parallelism only")


def _check_cache_dtype(kept: str, own: torch.dtype, keeps: bool) -> None:
    if kept in FP8 and keeps:
        raise BadInput(
            f"the engine's cache is {kept}: it holds rounded keys and values, on which no translator is judged, so it can't keep "
            'caches for others; set kv_role to "kv_consumer", or --kv-cache-dtype to auto'
        )
    if kept not in ("auto", str(own).removeprefix("torch."), *FP8):
        raise BadInput(f"the engine's cache is {kept}, which is not known here; choose auto or one of {', '.join(FP8)}")


def _check_model(config: VllmConfig) -> None:
    model = config.model_config
    named = f"{model.model} ({', '.join(model.architectures)})"
    if model.use_mla:
        raise UnsupportedModel(f"{named} caches latents (MLA), not keys and values per head; it can't be used")
    if model.is_hybrid or model.is_attention_free:
        raise UnsupportedModel(f"{named} has recurrent layers, whose state can't be translated; it can't be used")
    _check_angles(config)


def _check_source(config: VllmConfig) -> None:
    """Refuse an engine whose model is not what its checkpoint says: its keys would be taken for those of the checkpoint."""
    model = config.model_config
    if model.hf_overrides:
        raise BadInput(
            "hf_overrides change what the checkpoint's config.json says, by which translators know a model: write the changes "
            "into a copy of the checkpoint's folder, and serve and fit that"
        )
    if model.hf_config_path not in (None, model.model):
        raise BadInput(
            f"the engine takes its configuration from {model.hf_config_path}; it has to lie with the weights"
        )
    if model.tokenizer == model.model and model.tokenizer_revision != model.revision:
        raise BadInput(
            f"the tokenizer is of revision {model.tokenizer_revision}, the model of {model.revision}; name one"
        )


def _check_angles(config: VllmConfig) -> None:
    """Refuse LongRoPE where vLLM uses the angles of long texts for short ones too, which the model itself does not."""
    text = config.model_config.hf_text_config
    rope = getattr(text, "rope_parameters", None) or {}
    for kind in [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, dict)]:
        short = kind.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        if kind.get("rope_type") == "longrope" and (short is None or config.model_config.max_model_len > short):
            raise UnsupportedModel(
                f"{config.model_config.model} has other rotary angles beyond {short} tokens (longrope), and vLLM uses those for "
                f"shorter texts too where it serves longer ones: set --max-model-len to {short}"
            )


# --- blocks ----------------------------------------------------------------------------------------------------------


def read_cpu(layer: Any, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Read whole blocks of the CPU backend: keys and values, [blocks, heads, slots, dim] each.

    Each block and head is [2 slots, dim] to the kernels, keys first; inside, the order depends on the instruction set. Bytes of
    fp8 stand in the order of the engine's own type.
    """
    cache = layer.kv_cache[blocks]
    count, heads, slots, width = cache.shape
    dim = width // 2
    keys, values = cache.reshape(count, heads, 2 * slots, dim).chunk(2, dim=2)
    if layer.isa in ("vec", "vec16"):
        return keys.reshape(count, heads, dim, slots).transpose(-1, -2), values
    if layer.isa == "amx" and cache.dtype in (torch.bfloat16, torch.uint8):
        keys = keys.reshape(count, heads, slots // 16, dim // 2, 16, 2).permute(0, 1, 2, 4, 3, 5)
        values = values.reshape(count, heads, dim // 16, slots // 2, 16, 2).permute(0, 1, 3, 5, 2, 4)
        return keys.reshape(count, heads, slots, dim), values.reshape(count, heads, slots, dim)
    raise BadInput(f"the CPU backend keeps blocks for {layer.isa} in {cache.dtype}, which this version can't read")


def read_split(layer: Any, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Read whole blocks of a backend that keeps a token's keys and values side by side: [blocks, heads, slots, dim] each."""
    keys, values = layer.kv_cache[blocks].chunk(2, dim=-1)
    return keys, values


READERS: dict[str, Callable[[Any, Tensor], tuple[Tensor, Tensor]]] = {
    "CPU_ATTN": read_cpu,
    "FLASH_ATTN": read_split,
    "TRITON_ATTN": read_split,
    "FLEX_ATTENTION": read_split,
}


def written_as(layer: Any) -> torch.dtype:
    """Return the type in which a layer's backend takes keys and values; it makes fp8 of them itself, by its own scales."""
    own: torch.dtype = layer.dtype if is_fp8(layer) else layer.kv_cache.dtype
    return own


def is_fp8(layer: Any) -> bool:
    """Tell whether a layer's blocks hold one byte for each number."""
    return bool(layer.kv_cache.dtype.itemsize == 1)


def unpacked(layer: Any, kept: Tensor, scale: float) -> Tensor:
    """Return what fp8 blocks stand for, in the type of `written_as`; others as they are."""
    return (kept.view(FP8[layer.kv_cache_dtype]).float() * scale).to(layer.dtype) if is_fp8(layer) else kept


class VllmPages:
    """The blocks of one rank, written by the backend itself and read by what is known of it.

    Args:
        layers: the attention layers that own keys and values, in the order of the model's geometry.
        block_size: slots of a block as the scheduler counts them; a backend may cut it into several.
        kinds: per layer which kind of blocks it is kept in; all in one by default.
    """

    def __init__(self, layers: Sequence[Any], block_size: int, kinds: Sequence[int] | None = None) -> None:
        self._layers, self._block_size = layers, block_size
        self._kinds = kinds or [0] * len(layers)
        self._names = [layer.attn_backend.get_name() for layer in layers]
        for layer, name in zip(layers, self._names, strict=True):
            if name not in READERS or not hasattr(layer.impl, "do_kv_cache_update"):
                raise BadInput(f"the attention backend {name} is not known here; choose one of {', '.join(READERS)}")

    def first_held(self, blocks: Sequence[Sequence[int]]) -> list[int]:
        """See `working.Pages`."""
        missing = [next((i for i, block in enumerate(row) if block != NO_BLOCK), len(row)) for row in blocks]
        return [missing[kind] * self._block_size for kind in self._kinds]

    @torch.inference_mode()
    def write(self, layers: Iterable[Made], blocks: Sequence[Sequence[int]], stop: int) -> None:
        """See `working.Pages`."""
        device = self._layers[0].kv_cache.device
        with beside(device):
            slots: dict[tuple[int, int], Tensor] = {}
            for index, keys, values in layers:
                layer, kind = self._layers[index], self._kinds[index]
                if (kind, len(keys)) not in slots:
                    slots[kind, len(keys)] = self._slots(blocks[kind], stop - len(keys), stop).to(device)
                keys, values = (x.to(device, written_as(layer)) for x in (keys, values))
                layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots[kind, len(keys)])

    @torch.inference_mode()
    def read(self, blocks: Sequence[int], tokens: int) -> Layers:
        """See `working.Pages`."""
        with beside(self._layers[0].kv_cache.device):
            return [self._read(index, blocks, tokens) for index in range(len(self._layers))]

    def _read(self, index: int, blocks: Sequence[int], tokens: int) -> tuple[Tensor, Tensor]:
        layer = self._layers[index]
        inner = layer.kv_cache.shape[2]
        places = self._slots(blocks, 0, tokens)[::inner] // inner
        keys, values = READERS[self._names[index]](layer, places.to(layer.kv_cache.device))
        keys, values = unpacked(layer, keys, layer._k_scale_float), unpacked(layer, values, layer._v_scale_float)
        return _by_tokens(keys, tokens), _by_tokens(values, tokens)

    def _slots(self, blocks: Sequence[int], start: int, stop: int) -> Tensor:
        places = torch.arange(start, stop)
        return torch.tensor(blocks)[places // self._block_size] * self._block_size + places % self._block_size

    @torch.inference_mode()
    def check(self, last_block: int) -> None:
        """Write a pattern into a free block, read it back, and clear it, for one kind of blocks after the other.

        Layers of several kinds may share memory, in which no block is of two kinds at a time. Raises `BadInput`.
        """
        for kind in sorted(set(self._kinds)):
            own = [index for index, k in enumerate(self._kinds) if k == kind]
            part = VllmPages([self._layers[index] for index in own], self._block_size)
            pattern = [part._pattern(index) for index in range(len(own))]
            part.write(_numbered(pattern), [[last_block]], self._block_size)
            for index, wrote, got in zip(own, pattern, part.read([last_block], self._block_size), strict=True):
                step = FP8_STEP if is_fp8(self._layers[index]) else 0.0
                if not all(torch.allclose(a, b, rtol=step, atol=0) for a, b in zip(got, wrote, strict=True)):
                    raise BadInput(
                        f"layer {index} ({self._names[index]}) gives back other keys and values than were written: this "
                        "version keeps blocks in a way that is not known here; see kvlingo vllm-check"
                    )
            zeros = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in pattern]
            part.write(_numbered(zeros), [[last_block]], self._block_size)

    def _pattern(self, index: int) -> tuple[Tensor, Tensor]:
        layer = self._layers[index]
        shape = (2, self._block_size, layer.num_kv_heads, layer.head_size)
        if is_fp8(layer):
            return self._powers(layer, shape, index)
        unique = (torch.arange(torch.Size(shape).numel()) % 251 + index).to(layer.kv_cache.dtype)
        keys, values = unique.reshape(shape)
        return keys, values

    def _powers(self, layer: Any, shape: tuple[int, ...], index: int) -> tuple[Tensor, Tensor]:
        """Draw powers of two, with signs: what both formats hold exactly, and far enough from each other where a scale rounds."""
        generator = torch.Generator().manual_seed(index)
        signs = 2.0 * torch.randint(0, 2, shape, generator=generator) - 1
        keys, values = signs * 2.0 ** torch.randint(-2, 4, shape, generator=generator)
        return (keys * layer._k_scale_float).to(layer.dtype), (values * layer._v_scale_float).to(layer.dtype)


def _numbered(layers: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Made]:
    return ((layer, keys, values) for layer, (keys, values) in enumerate(layers))


def _by_tokens(blocks: Tensor, tokens: int) -> Tensor:
    """[blocks, heads, slots, dim] -> [tokens, heads, dim], a copy on the CPU."""
    return blocks.transpose(1, 2).flatten(0, 1)[:tokens].to("cpu", copy=True).contiguous()


def beside(device: torch.device) -> Any:
    """Work on a stream of its own where there are streams; what was begun before is waited for, and so is what is begun here."""
    return _Beside(device) if device.type == "cuda" else nullcontext()


class _Beside:
    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._inside = torch.cuda.stream(self._stream)

    def __enter__(self) -> None:
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        self._inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)
        self._stream.synchronize()


# --- what the two halves tell each other -----------------------------------------------------------------------------


@dataclass
class Metadata(KVConnectorMetadata):
    """From the scheduler to the workers, every step."""

    orders: Orders = field(default_factory=Orders)
    only_loads: bool = False
    """Whether workers have nothing to do in this step but what they load."""


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler, where there is something to tell."""

    failed: dict[str, tuple[str, str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Put together what two ranks tell."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.failed | other.failed, self.counts + other.counts)


@dataclass
class Stats(KVConnectorStats):
    """Counts of one interval, by their names, and under `TOLD` what became of requests."""

    def reset(self) -> None:
        """Forget them."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another interval."""
        told = {**self.data.get(TOLD, {}), **other.data.get(TOLD, {})}
        counts = Counter(self.reduce()) + Counter(Stats(other.data).reduce())
        return Stats({**counts, **({TOLD: told} if told else {})})

    def reduce(self) -> dict[str, int | float]:
        """Return what is logged."""
        return {what: count for what, count in self.data.items() if what != TOLD}

    def is_empty(self) -> bool:
        """Tell whether there is nothing."""
        return not self.data


class Figures(KVConnectorPromMetrics):
    """`vllm:kvlingo_total`, by what happened: requests by status and reason, tokens by kind, caches kept.

    Made in the server's process, which is told with the counts what became of streamed requests.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        BOARD.about = about(vllm_config)
        self._counter = self._counter_cls(
            name="vllm:kvlingo",
            documentation="KV-Lingo: what happened, and how often.",
            labelnames=[*labelnames, "what"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one interval."""
        BOARD.put(transfer_stats_data.get(TOLD, {}))
        for what, count in Stats(transfer_stats_data).reduce().items():
            self._counter.labels(*self.per_engine_labelvalues[engine_idx], what).inc(count)


# --- the connector ---------------------------------------------------------------------------------------------------


class KVLingoConnector(KVConnectorBase_V1):
    """Both halves of the connector: `role` says which one this is. Workers load what the scheduler has matched.

    vLLM switches its hybrid cache manager off for it: sliding layers keep every token, as the source of a hand-over has to.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config, kv_cache_config)
        self._options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        self._groups = kv_cache_config.kv_cache_groups
        self._block_size = block_size_of(self._groups)
        self._num_blocks = kv_cache_config.num_blocks
        self._keeps = bool(self._kv_transfer_config.is_kv_producer)
        if role == KVConnectorRole.SCHEDULER:
            self._desk = _desk(vllm_config, self._options, self._keeps)
            self._told_counts = Counter[str]()
        else:
            self._worker: Worker | None = None
            self._failed_blocks: set[int] = set()
            self._news = WorkerMetadata()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Require no layout, but check the configuration: the first that vLLM asks of a connector with a model in hand.

        Where there are recurrent layers it fails at its blocks, in words about none of this, before there is any connector.
        """
        check_config(vllm_config)
        return super().get_required_kvcache_layout(vllm_config)

    # --- the scheduler's half ---

    def on_new_request(self, request: Request) -> None:
        """Take a request in, and give it a salt of its own before the prefix cache is looked into for it."""
        lora = request.lora_request
        arrival = Arrival(
            id=request.request_id,
            params=request.kv_transfer_params,
            ids=tuple(request.prompt_token_ids or ()),
            salt=request.cache_salt,
            lora=lora.lora_name if lora is not None else None,
            unusable=_unusable(request),
        )
        salt = self._desk.arrive(arrival)
        if salt is not None:
            _salt(request, salt)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens will be translated, and whether that takes longer than a step."""
        tokens = self._desk.matched(request.request_id, num_computed_tokens)
        read_again, salt = self._desk.salt_again(request.request_id)
        if read_again:
            _salt(request, salt)
            return None, False  # what it found in the prefix cache was found under another salt: look again
        return tokens, bool(tokens) and self._options.load_async

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Order the load that was promised."""
        rows = [[NO_BLOCK if block.is_null else block.block_id for block in row] for row in blocks.blocks]
        self._desk.allocated(request.request_id, rows, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Metadata:
        """Hand over what has been ordered."""
        is_idle = not scheduler_output.total_num_scheduled_tokens
        if is_idle and self._desk.is_looking():
            time.sleep(IDLE_SECONDS)  # an engine that has nothing else to do asks without a pause
        self._desk.begin_step(_computed(scheduler_output) if self._desk.has_untold else {})
        return Metadata(self._desk.orders(), is_idle and self._desk.is_loading())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in what workers tell."""
        news = connector_output.kv_connector_worker_meta
        if isinstance(news, WorkerMetadata):
            for request, (reason, why) in news.failed.items():
                self._desk.failed(request, reason, why)
            self._desk.tell(news.counts)
        for request in connector_output.finished_recving or ():
            self._desk.arrived(request)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Tell what the client is told, and whether the blocks are still to be read."""
        held = min(request.num_computed_tokens, request.num_tokens - 1)  # the last token was said, not read
        whole = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        ids = request.all_token_ids[: max(0, held)]
        lost = NULL_BLOCK in block_ids[: -(-len(ids) // self._block_size)]
        return self._desk.finished(request.request_id, ids, block_ids, whole=whole, lost=lost)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what has been counted since this was asked last."""
        if self._role != KVConnectorRole.SCHEDULER:
            return None
        new = self._desk.counts - self._told_counts
        self._told_counts = Counter(self._desk.counts)
        told = self._desk.end_step()
        return Stats({**new, **({TOLD: told} if told else {})}) if new or told else None

    # --- the workers' half ---

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Get to know the blocks, check that they are understood, and load the model's own part and the translators."""
        config, options = self._vllm_config, self._options
        with torch.inference_mode(False):
            named = config.model_config
            own = open_own(named.model, named.dtype, options.extract, named.revision)
            lm = own.lm
            consumes = self._kv_transfer_config.is_kv_consumer and options.translators
            links = [read_link(t, options) for t in options.translators] if consumes else []
            target = Target(lm, links, own.extract) if links else None
            side = side_of(lm) if self._keeps else None
            if target is not None:
                if own.extract is None:
                    map_anew(lm, own.folder)
                rehearse(target)
        rank, world = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        layers = _layers(config, kv_caches, lm.geometry.cache_layers)
        pages = VllmPages(layers, self._block_size, _kinds(layers, self._groups))
        for layer, shape in zip(pages._layers, lm.geometry.layers, strict=True):
            mine = head_range(shape.kv_heads, rank, world)
            if (layer.num_kv_heads, layer.head_size) != (mine.stop - mine.start, shape.key_dim):
                raise UnsupportedModel(
                    f"{lm.name} has other heads in the engine than in its checkpoint; it can't be used"
                )
        pages.check(self._num_blocks - 1)
        store = open_store(options.store, options.max_bytes)
        self._worker = Worker(store, options, pages, target, side, rank=rank, world=world)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin with what was ordered; without asynchronous loading, wait for the loads."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        assert self._worker is not None
        orders = metadata.orders
        if not self._options.load_async:
            for load in orders.loads:
                self._load_now(load)
            orders.loads = []
        self._worker.start(orders)

    def _load_now(self, load: Load) -> None:
        assert self._worker is not None
        failed = self._worker.load_now(load)
        if failed is not None:
            # All of them: what an earlier request of this hand-over has left there is a translation too.
            _, stop = load.carry.plan.translated
            (blocks,) = load.blocks
            self._failed_blocks |= set(blocks[: (stop - 1) // self._block_size + 1]) - {NO_BLOCK}
            self._news.failed[load.request] = failed

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Tell which requests' loads and copies have ended, and which loads have failed."""
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        if isinstance(metadata, Metadata) and metadata.only_loads:
            self._worker.rest(REST_SECONDS)
        told = self._worker.told()
        self._news.failed |= told.failed
        self._news.counts += told.counts
        return KVConnectorTransferResults(
            finished_sending=told.sent, finished_recving=told.received, failed_recving=set(told.failed)
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks whose loads within a step have failed."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Tell why loads have failed."""
        news, self._news = self._news, WorkerMetadata()
        return news if news.failed or news.counts else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded layer by layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is kept before a request has ended."""

    def wait_for_save(self) -> None:
        """Copies go on beside the engine; their blocks are not free until they have ended."""

    # --- figures ---

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Return counts as they were sent."""
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Return the figures for /metrics."""
        return Figures(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class KVLingoHybridConnector(KVLingoConnector, SupportsHMA):
    """The connector for engines that only go on from kept caches, with vLLM's hybrid cache manager left on.

    Sliding layers keep their window's blocks only, and only those are translated.
    """

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell what the client is told. Blocks of several kinds are never kept (`check_engine`)."""
        return self.request_finished(request, block_ids[0])


def block_size_of(groups: Sequence[Any]) -> int:
    """Return how many tokens a block holds, as the scheduler counts them. Raises `BadInput` where that differs by kind."""
    sizes = sorted({group.kv_cache_spec.block_size for group in groups})
    if len(sizes) != 1:
        raise BadInput(f"the engine's blocks hold {sizes} tokens, by kind; pass --disable-hybrid-kv-cache-manager")
    return int(sizes[0])


def _kinds(layers: Sequence[Any], groups: Sequence[Any]) -> list[int]:
    """Return per layer which group of the cache its blocks are of."""
    kinds = {name: kind for kind, group in enumerate(groups) for name in group.layer_names}
    return [kinds[layer.layer_name] for layer in layers]


def _desk(config: VllmConfig, options: Options, keeps: bool) -> Desk:
    transfer = config.kv_transfer_config
    assert transfer is not None
    matcher = None
    if transfer.is_kv_consumer and options.translators:
        links = [read_link(folder, options) for folder in options.translators]
        store = open_store(options.store, options.max_bytes)
        matcher = Matcher(store, links, options, config.model_config.tokenizer or config.model_config.model)
    elif not keeps:
        raise BadInput("kv_role is kv_consumer and no translators are given; name the folders that kvlingo fit wrote")
    return Desk(matcher, options, saves=keeps)


def about(config: VllmConfig) -> dict[str, Any]:
    """Say what a server's connector does, for who sends it requests."""
    transfer = config.kv_transfer_config
    assert transfer is not None
    options = read_options(transfer.kv_connector_extra_config)
    servers = getattr(config.parallel_config, "_api_process_count", 1)
    return {
        "keeps": bool(transfer.is_kv_producer),
        "loads": bool(transfer.is_kv_consumer and options.translators),
        "tells": servers == 1,  # of several processes vLLM sends the figures to one
        "expires_seconds": options.expires_seconds,
    }


def _computed(scheduler_output: SchedulerOutput) -> dict[str, int]:
    """Return how many tokens of each request are computed when this step has ended."""
    cached, scheduled = scheduler_output.scheduled_cached_reqs, scheduler_output.num_scheduled_tokens
    before = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return {request: tokens + scheduled.get(request, 0) for request, tokens in before.items()}


def _salt(request: Request, salt: str | None) -> None:
    """Give a request another salt; its blocks' hashes begin with it, so they are made anew."""
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()


def _unusable(request: Request) -> str | None:
    """Say why nothing of a request can be kept or translated, or None."""
    if request.mm_features or request.prompt_embeds is not None or not request.prompt_token_ids:
        return "its prompt is not made of tokens alone"
    if request.resumable:
        return "its prompt comes in pieces"
    if request.pooling_params is not None:
        return "it asks for no text"
    if request.skip_reading_prefix_cache:
        return "it asks for what only reading the whole prompt gives (logprobs of the prompt)"
    return None


def _layers(config: VllmConfig, kv_caches: dict[str, Tensor], wanted: Sequence[int]) -> list[Any]:
    """Return the attention layers that own keys and values, in the model's order. Raises `UnsupportedModel`."""
    found: dict[int, Any] = {}
    context = config.compilation_config.static_forward_context
    for name in kv_caches:
        numbered = MODEL_LAYER.search(name)
        layer = context.get(name)
        if numbered is None or layer is None or getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        if int(numbered[1]) in found:
            raise UnsupportedModel(f"two caches belong to layer {numbered[1]} ({name}); this model can't be used")
        found[int(numbered[1])] = layer
    if sorted(found) != sorted(wanted):
        raise UnsupportedModel(
            f"the engine keeps keys in layers {sorted(found)}, the checkpoint in {sorted(wanted)}; it can't be used"
        )
    return [found[index] for index in wanted]


def register() -> None:
    """Make the connector known to vLLM by its name, in each of its processes (entry point `vllm.general_plugins`).

    With a module path in its options an engine finds it without; but beside other connectors the server's own process asks for
    every child by name, and failed at the first request.
    """
    for name in (KVLingoConnector.__name__, KVLingoHybridConnector.__name__):
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, __name__, name)
