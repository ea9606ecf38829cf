"""The inside of blocks, by vLLM's own kernels; and what is refused by name before anything is served."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvlingo.errors import BadInput, UnsupportedModel

HEADS, BLOCKS, SLOTS = 2, 6, 64
CONNECTORS = ("KVLingoConnector", "KVLingoHybridConnector")


@pytest.fixture(scope="module")
def connector() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports warn of this and that
        yield importlib.import_module("kvlingo.serve.vllm")


def layer_of(isa: str, dtype: torch.dtype, dim: int, kept: str = "auto", scales: tuple[float, float] = (1, 1)) -> Any:
    """Return what the connector sees of an attention layer, with vLLM's own update of its cache; `kept` as --kv-cache-dtype."""
    backend = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
    importlib.import_module("vllm.platforms").current_platform.import_kernels()
    impl = object.__new__(backend.CPUAttentionBackendImpl)  # its constructor wants a whole engine's configuration
    impl.attn_type, impl.kv_cache_dtype = "decoder", kept
    return SimpleNamespace(
        attn_backend=backend.CPUAttentionBackend,
        impl=impl,
        isa=isa,
        dtype=dtype,
        kv_cache_dtype=kept,
        kv_cache=torch.zeros(BLOCKS, HEADS, SLOTS, 2 * dim, dtype=dtype if kept == "auto" else torch.uint8),
        num_kv_heads=HEADS,
        head_size=dim,
        _k_scale_float=float(scales[0]),
        _v_scale_float=float(scales[1]),
    )


KINDS = [
    ("vec", torch.float32, 32),
    ("vec", torch.bfloat16, 64),
    ("vec16", torch.float32, 80),
    ("amx", torch.bfloat16, 64),
]


def needs_amx(isa: str) -> None:
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no AMX tiles")


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize(("isa", "dtype", "dim"), KINDS)
def test_what_is_written_is_read(connector: Any, isa: str, dtype: torch.dtype, dim: int, cut: int) -> None:
    """Tokens over several blocks in no order; also where the scheduler's blocks are several of the backend's."""
    needs_amx(isa)
    layer = layer_of(isa, dtype, dim)
    pages = connector.VllmPages([layer], cut * SLOTS)
    tokens, start = 2 * cut * SLOTS - 5, 3
    keys, values = (torch.randn(tokens, HEADS, dim).to(dtype) for _ in "kv")
    pages.write([(0, keys, values)], [[2, 0]], start + tokens)
    ((got_keys, got_values),) = pages.read([2, 0], start + tokens)
    assert torch.equal(got_keys[start:], keys)
    assert torch.equal(got_values[start:], values)
    assert not got_keys[:start].any()
    assert not layer.kv_cache[cut : 2 * cut].any(), "another block was written"


@pytest.mark.parametrize(("isa", "dtype", "dim"), KINDS)
def test_the_check_at_the_start_passes_and_leaves_nothing(
    connector: Any, isa: str, dtype: torch.dtype, dim: int
) -> None:
    needs_amx(isa)
    layer = layer_of(isa, dtype, dim)
    connector.VllmPages([layer], SLOTS).check(BLOCKS - 1)
    assert not layer.kv_cache.any()


EIGHT = ["fp8", "fp8_e4m3", "fp8_e5m2"]
EIGHT_KINDS = [KINDS[0], KINDS[1], KINDS[3]]
"""vLLM keeps no fp8 where heads are no multiple of 32 (`vec16`)."""
SCALES = [(1.0, 1.0), (0.3, 2.7)]


def needs_eight(isa: str) -> None:
    needs_amx(isa)
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM keeps fp8 on processors with AVX-512 only")


@pytest.mark.parametrize("kept", EIGHT)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("isa", "dtype", "dim"), EIGHT_KINDS)
def test_fp8_is_made_by_the_backend_and_its_scales(
    connector: Any, isa: str, dtype: torch.dtype, dim: int, scales: tuple[float, float], kept: str
) -> None:
    """What is read is what was written, but for the format's own steps; the backend cuts off, and has one scale for each side."""
    needs_eight(isa)
    layer = layer_of(isa, dtype, dim, kept, scales)
    pages = connector.VllmPages([layer], SLOTS)
    keys, values = (torch.randn(100, HEADS, dim).to(dtype) for _ in "kv")
    pages.write([(0, keys, values)], [[2, 0]], 100)
    for got, wrote, scale in zip(pages.read([2, 0], 100)[0], (keys, values), scales, strict=True):
        large = wrote.abs() > scale / 16  # smaller ones have no mantissa of their own
        torch.testing.assert_close(got[large], wrote[large], rtol=0.26, atol=0)
        steps = (got.float() / scale).to(connector.FP8[kept]).float() * scale
        torch.testing.assert_close(got.float(), steps, rtol=0.01, atol=0)
        assert not torch.equal(got, wrote)
    assert not layer.kv_cache[1].any(), "another block was written"


@pytest.mark.parametrize("kept", EIGHT)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("isa", "dtype", "dim"), EIGHT_KINDS)
def test_the_check_at_the_start_knows_fp8(
    connector: Any, isa: str, dtype: torch.dtype, dim: int, scales: tuple[float, float], kept: str
) -> None:
    needs_eight(isa)
    layer = layer_of(isa, dtype, dim, kept, scales)
    connector.VllmPages([layer], SLOTS).check(BLOCKS - 1)
    assert not layer.kv_cache.any()


@pytest.mark.parametrize("wrong", ["scale", "format", "order", "bytes"])
def test_the_check_sees_fp8_that_is_kept_otherwise(connector: Any, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    needs_eight("vec")
    layer = layer_of("vec", torch.float32, 32, "fp8")
    if wrong == "scale":
        monkeypatch.setattr(connector, "unpacked", lambda layer, kept, _: kept.view(torch.float8_e4m3fn).float() * 0.5)
    elif wrong == "format":
        layer.kv_cache_dtype = "fp8_e5m2"
    elif wrong == "order":
        monkeypatch.setitem(connector.READERS, "CPU_ATTN", connector.read_split)
    else:
        monkeypatch.setattr(connector, "written_as", lambda layer: layer.kv_cache.dtype)
    with pytest.raises((BadInput, RuntimeError)):
        connector.VllmPages([layer], SLOTS).check(BLOCKS - 1)


@pytest.mark.parametrize("reader", ["read_split", "swapped", "untransposed"])
def test_the_check_sees_a_layout_that_is_not_known(
    connector: Any, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    def swapped(layer: Any, blocks: torch.Tensor) -> Any:
        return connector.read_cpu(layer, blocks)[::-1]

    def untransposed(layer: Any, blocks: torch.Tensor) -> Any:
        keys, values = connector.read_cpu(layer, blocks)
        return keys.transpose(-1, -2).reshape(keys.shape), values

    wrong = {"read_split": connector.read_split, "swapped": swapped, "untransposed": untransposed}[reader]
    monkeypatch.setitem(connector.READERS, "CPU_ATTN", wrong)
    pages = connector.VllmPages([layer_of("vec", torch.float32, 32)], SLOTS)
    with pytest.raises(BadInput, match="other keys and values than were written"):
        pages.check(BLOCKS - 1)


def test_a_backend_that_is_not_known_is_refused(connector: Any) -> None:
    layer = layer_of("vec", torch.float32, 32)
    layer.attn_backend = SimpleNamespace(get_name=lambda: "TURBO")
    with pytest.raises(BadInput, match="TURBO is not known"):
        connector.VllmPages([layer], SLOTS)


# --- refused by name ---------------------------------------------------------------------------------------------------


LONG = SimpleNamespace(rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 64})


def config_of(**changes: Any) -> Any:
    """Return what the connector looks at of an engine's configuration; a good one but for the changes."""
    model = {
        "model": "some-model",
        "architectures": ["SomeForCausalLM"],
        "use_mla": False,
        "is_hybrid": False,
        "is_attention_free": False,
        "dtype": torch.float32,
        "hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "default"}),
        "max_model_len": 2048,
        "hf_overrides": {},
        "hf_config_path": None,
        "revision": None,
        "tokenizer": "some-model",
        "tokenizer_revision": None,
    }
    parts = {
        "kv_transfer_config": {
            "kv_load_failure_policy": "recompute",
            "is_kv_producer": False,
            "kv_connector_extra_config": {"store": "x"},
        },
        "cache_config": {"cache_dtype": "auto"},
        "parallel_config": {"pipeline_parallel_size": 1},
        "model_config": model,
    }
    for name, value in changes.items():
        for part in parts.values():
            if name in part:
                part[name] = value
    config = SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in parts.items()})
    config.speculative_config = changes.get("speculative_config")
    return config


def groups_of(connector: Any, *kinds: str) -> Any:
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    made = [getattr(interface, kind).__new__(getattr(interface, kind)) for kind in kinds]
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in made])


@pytest.mark.parametrize("kept", ["auto", "float32", *EIGHT])
def test_a_good_engine_is_taken(connector: Any, kept: str) -> None:
    connector.check_engine(config_of(cache_dtype=kept), groups_of(connector, "FullAttentionSpec"))


def test_what_is_no_change_is_taken(connector: Any) -> None:
    """One revision of both, a configuration that lies with the weights, and texts that end before the angles change."""
    same = {"revision": "a", "tokenizer_revision": "a", "hf_config_path": "some-model"}
    config = config_of(**same, hf_text_config=LONG, max_model_len=64)
    connector.check_engine(config, groups_of(connector, "FullAttentionSpec"))
    other = config_of(revision="a", tokenizer="another", tokenizer_revision="b")  # each place has revisions of its own
    connector.check_engine(other, groups_of(connector, "FullAttentionSpec"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_mla": True}, r"some-model \(SomeForCausalLM\) caches latents"),
        ({"is_hybrid": True}, r"some-model \(SomeForCausalLM\) has recurrent layers"),
        ({"is_attention_free": True}, r"some-model \(SomeForCausalLM\) has recurrent layers"),
        ({"kv_load_failure_policy": "fail"}, "recompute"),
        ({"cache_dtype": "fp8", "is_kv_producer": True}, "cache is fp8: .*kv_consumer"),
        ({"cache_dtype": "fp8_e5m2", "is_kv_producer": True}, "cache is fp8_e5m2: .*kv_consumer"),
        ({"cache_dtype": "fp8_per_token_head"}, "cache is fp8_per_token_head, which is not known"),
        ({"cache_dtype": "bfloat16"}, "cache is bfloat16, which is not known"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"speculative_config": object()}, "speculative"),
        ({"hf_overrides": {"rope_parameters": {"rope_type": "yarn"}}}, "hf_overrides change"),
        ({"hf_overrides": lambda config: config}, "hf_overrides change"),
        ({"hf_config_path": "elsewhere"}, "configuration from elsewhere"),
        ({"revision": "a", "tokenizer_revision": "b"}, "of revision b, the model of a"),
        ({"hf_text_config": LONG}, "beyond 64 tokens .*--max-model-len to 64"),
        ({"hf_text_config": SimpleNamespace(rope_parameters={"full": LONG.rope_parameters})}, "beyond 64 tokens"),
    ],
)
def test_what_would_be_wrong_is_refused(connector: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises((BadInput, UnsupportedModel), match=said):
        connector.check_engine(config_of(**changes), groups_of(connector, "FullAttentionSpec"))


@pytest.mark.parametrize("name", CONNECTORS)
@pytest.mark.parametrize("flag", ["is_hybrid", "is_attention_free", "use_mla"])
def test_models_are_refused_before_there_are_blocks(connector: Any, name: str, flag: str) -> None:
    """vLLM asks a connector's class for a layout first; it gets to blocks of hybrids, and fails there, before it makes one."""
    kind = getattr(connector, name)
    assert kind.get_required_kvcache_layout(config_of()) is None
    with pytest.raises(UnsupportedModel, match=r"some-model \(SomeForCausalLM\)"):
        kind.get_required_kvcache_layout(config_of(**{flag: True}))


@pytest.mark.parametrize("kinds", [("MLAAttentionSpec",), ("MambaSpec",), ("FullAttentionSpec", "MambaSpec")])
def test_blocks_of_other_kinds_are_refused(connector: Any, kinds: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedModel, match="kind"):
        connector.check_engine(config_of(), groups_of(connector, *kinds))


SLIDING = ("FullAttentionSpec", "SlidingWindowSpec")


WITHIN_A_STEP = {"kv_connector_extra_config": {"store": "x", "load_async": False}}


@pytest.mark.parametrize(
    ("kinds", "changes", "said"),
    [
        (SLIDING, {"is_kv_producer": True}, "2 kinds of blocks.*kv_consumer"),
        (SLIDING, WITHIN_A_STEP, "load_async"),
        (SLIDING[1:], WITHIN_A_STEP, "load_async"),
    ],
)
def test_windows_are_refused_for_what_they_can_t_do(
    connector: Any, kinds: tuple[str, ...], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        connector.check_engine(config_of(**changes), groups_of(connector, *kinds))


@pytest.mark.parametrize(
    ("kinds", "changes"), [(SLIDING[:1], WITHIN_A_STEP), (SLIDING[1:], {"is_kv_producer": True}), (SLIDING[1:], {})]
)
def test_one_kind_of_blocks_is_taken(connector: Any, kinds: tuple[str, ...], changes: dict[str, Any]) -> None:
    connector.check_engine(config_of(**changes), groups_of(connector, *kinds))


def test_a_hybrid_manager_is_taken_where_caches_are_only_gone_on_from(connector: Any) -> None:
    connector.check_engine(config_of(), groups_of(connector, *SLIDING))
    factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    choices = [SimpleNamespace(kv_connector=name, kv_connector_module_path=connector.__name__) for name in CONNECTORS]
    assert [factory.supports_hma_config(choice) for choice in choices] == [False, True]


def test_kinds_of_blocks_of_several_sizes_are_refused(connector: Any) -> None:
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in (128, 64)]
    with pytest.raises(BadInput, match="64, 128"):
        connector.block_size_of(groups)


@pytest.mark.parametrize("kinds", [[0, 0], [0, 1]])
def test_layers_of_two_kinds_may_share_their_memory(connector: Any, kinds: list[int]) -> None:
    """As vLLM lays them out: one tensor for a layer of each kind. In one kind, that is two layers in one place: refused."""
    first, second = (layer_of("vec", torch.float32, 32) for _ in "ab")
    second.kv_cache = first.kv_cache
    pages = connector.VllmPages([first, second], SLOTS, kinds)
    if kinds == [0, 0]:
        with pytest.raises(BadInput, match="other keys and values than were written"):
            pages.check(BLOCKS - 1)
        return
    pages.check(BLOCKS - 1)
    assert not first.kv_cache.any()


def test_each_kind_is_written_into_its_own_blocks_and_nothing_into_none(connector: Any) -> None:
    layers = [layer_of("vec", torch.float32, 32) for _ in "ab"]
    pages, none = connector.VllmPages(layers, SLOTS, [0, 1]), connector.NO_BLOCK
    rows = [[3, 1, 5], [none, none, 4]]
    assert pages.first_held(rows) == [0, 2 * SLOTS]
    stop = 2 * SLOTS + 7
    pairs = [tuple(torch.randn(count, HEADS, 32) for _ in "kv") for count in (stop, 7)]
    pages.write([(layer, *pair) for layer, pair in enumerate(pairs)], rows, stop)
    (whole, _) = pages.read([3, 1, 5], stop)
    assert torch.equal(whole[0], pairs[0][0])
    (_, (keys, values)) = pages.read([4], 7)
    assert torch.equal(keys, pairs[1][0])
    assert torch.equal(values, pairs[1][1])
    assert not layers[1].kv_cache[[0, 1, 2, 3, 5]].any()


@pytest.mark.parametrize("version", ["0.16.0", "0.33.0", "0.320.0", "1.0"])
def test_other_versions_are_refused(connector: Any, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(connector.vllm, "__version__", version)
    with pytest.raises(UnsupportedModel, match=f"vLLM {version} is installed"):
        connector.check_engine(config_of(), groups_of(connector, "FullAttentionSpec"))
