"""The header of a .gguf file, held against the reader of the `gguf` package; and what `outline` makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from transformers import AutoConfig

import kvlingo.outline as outline_module
from kvlingo.errors import BadInput
from kvlingo.facts import relation_of
from kvlingo.gguf_header import TOKENS, read_gguf_header
from kvlingo.outline import outline
from tests import tiny

WORDS = 5000  # more than what counts as a long array


def write_llama(file: Path, *, pieces: list[str], merges: list[str] | None = None, untied: bool = True) -> Path:
    """Write what llama.cpp writes of a small Llama: keys, vocabulary, a few tensors."""
    writer = GGUFWriter(str(file), "llama")
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(3)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(pieces)
    writer.add_token_types([1] * len(pieces))
    writer.add_token_scores([0.5] * len(pieces))
    if merges:
        writer.add_token_merges(merges)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("llama.some_per_layer", [1, 2, 3])
    for name in ("token_embd.weight", "blk.0.attn_q.weight", *(["output.weight"] if untied else [])):
        writer.add_tensor(name, np.ones((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def pieces() -> list[str]:
    return [f"w{i}é" for i in range(WORDS)]


@pytest.fixture
def file(tmp_path: Path, pieces: list[str]) -> Path:
    return write_llama(tmp_path / "tiny.gguf", pieces=pieces, merges=[f"w {i}" for i in range(WORDS)])


def test_the_header_says_what_the_whole_reader_says(file: Path, pieces: list[str]) -> None:
    header, reader = read_gguf_header(file), GGUFReader(str(file))
    keys = {key for key in reader.fields if not key.startswith("GGUF.")}
    long = {TOKENS, "tokenizer.ggml.merges", "tokenizer.ggml.token_type", "tokenizer.ggml.scores"}
    assert set(header.entries) == keys - long
    assert header.lengths == {**dict.fromkeys(long, WORDS), "llama.some_per_layer": 3}
    assert header.tensors == tuple(tensor.name for tensor in reader.tensors)
    assert [piece.decode() for piece in header.pieces] == pieces


@pytest.mark.parametrize("untied", [True, False])
def test_the_stub_gives_the_config_of_the_whole_file(untied: bool, tmp_path: Path, pieces: list[str]) -> None:
    file = write_llama(tmp_path / "whole.gguf", pieces=pieces, untied=untied)
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "stub.gguf").write_bytes(read_gguf_header(file).stub())
    assert (tmp_path / "stub" / "stub.gguf").stat().st_size < file.stat().st_size / 20
    whole, stub = (
        AutoConfig.from_pretrained(at.parent, gguf_file=at.name).to_dict()
        for at in (file, tmp_path / "stub" / "stub.gguf")
    )
    differing = {key for key in whole | stub if whole.get(key) != stub.get(key)}
    assert differing <= {"vocab_size", "_name_or_path"}
    assert whole["tie_word_embeddings"] is not untied


def test_an_outline_of_a_gguf_file_does_not_read_its_vocabulary_twice(
    file: Path, pieces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the tokenizer was built")

    monkeypatch.setattr(outline_module.AutoTokenizer, "from_pretrained", slow)
    found = outline(file)
    assert found.geometry.vocab_size == WORDS
    assert [(x.kv_heads, x.key_dim) for x in found.geometry.layers] == [(2, 8)] * 3
    assert found.pieces == {piece.encode() for piece in pieces}
    other = outline(write_llama(file.parent / "other.gguf", pieces=[f"v{i}" for i in range(WORDS)]))
    assert relation_of(found, other) == "different"
    with pytest.raises(AssertionError, match="the tokenizer was built"):
        relation_of(found, found)  # what looks alike is looked at closely


def test_a_config_without_a_tokenizer(tmp_path: Path) -> None:
    lm = tiny.language_model("llama")
    lm.model.config.save_pretrained(tmp_path / "bare")
    bare = outline(tmp_path / "bare")
    assert bare.geometry.layers[0].kv_heads == 2
    assert relation_of(bare, bare) == "unknown (bare brings no tokenizer)"


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 30, 200, 40_000])
def test_a_header_cut_short(keep: int, file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(BadInput, match=r"cut\.gguf is (damaged or cut short|not a GGUF file).*download it again"):
        read_gguf_header(cut)


def test_what_is_no_gguf_file(file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.gguf"
    page.write_bytes(b"<html>" + bytes(100))
    with pytest.raises(BadInput, match="not a GGUF file"):
        read_gguf_header(page)
    future = tmp_path / "future.gguf"
    raw = bytearray(file.read_bytes())
    raw[4] = 9
    future.write_bytes(raw)
    with pytest.raises(BadInput, match="GGUF version 9"):
        read_gguf_header(future)
    with pytest.raises(BadInput, match=r"none\.gguf does not exist"):
        read_gguf_header(tmp_path / "none.gguf")
