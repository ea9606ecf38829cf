"""Alignment against a naive oracle, on tiny tokenizers of each kind, over texts of many scripts."""

import json
import os
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvlingo.alignment import align, last_at_source_start, tokenizer_relation
from kvlingo.assets import fetch_demo_models
from kvlingo.errors import BadInput, KVLingoError, UnsupportedModel
from kvlingo.models import convert_gguf, default_cache_dir
from kvlingo.reading import (
    Reading,
    first_tokens,
    leading_ids,
    read_chat,
    read_more,
    read_text,
    reading_of_ids,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog reads a book about the Hanzi.",
    "A Han emperor said: the cache is not the text, isn't it?  Two  spaces.\n\nA new paragraph.\n",
    "def read(text):\n\treturn text.encode()\n" * 2,
    "na\u00efve caf\u00e9 \u6f22\u5b57 \u6f22\u5b57 \U0001f600\U0001f600 \u05e9\u05dc\u05d5\u05dd",
] * 3

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Like Gemma's own: BOS from the template, contents stripped, the system message inside the first
# user turn.
TURNS = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% set first = messages[0]['content'] | trim + '\\n\\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{{ '<turn>' + m['role'] + '\\n' + (first if loop.first else '') }}"
    "{{ (m['content'] | trim) + '</turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}"
)


# --- tiny tokenizers ---


def trained(pre_tokenizer: Any, normalizer: Any, alphabet: list[str], size: int) -> tuple[dict[str, int], list[Any]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def wrap(tokenizer: Tokenizer, bos: str | None, specials: list[str], **names: Any) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    if bos is not None:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def byte_level(size: int = 400, bos: str | None = None, normalizer: Any = None) -> PreTrainedTokenizerFast:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocab, merges = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer, alphabet, size)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    specials = ["<|im_start|>", "<|im_end|>"] + ([bos] if bos else [])
    wrapped = wrap(tokenizer, bos, specials, eos_token="<|im_end|>", pad_token="<|im_end|>", bos_token=bos)
    wrapped.chat_template = CHATML
    return wrapped


def sentencepiece(*, prepend: bool = False, template: str | None = None, size: int = 330) -> PreTrainedTokenizerFast:
    """BPE over \u2581 with byte fallback, as Gemma; with `prepend` as Llama 2."""
    replace = normalizers.Replace(" ", "\u2581")
    normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if prepend else replace
    split = pre_tokenizers.Split("\u2581", "merged_with_next")
    learned, merges = trained(split, replace, [], size - 260)
    reserved = ["<reserved>"] if prepend else []  # so that no two of these tokenizers share their ids
    pieces = [
        *reserved,
        "<pad>",
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *learned,
    ]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizer
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prepend else steps)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    wrapped = wrap(tokenizer, "<s>", ["<pad>", "<unk>", "<s>", "</s>", "<turn>", "</turn>"], **names)
    if not prepend:
        wrapped.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("\t", normalized=False)])
    wrapped.chat_template = template
    return wrapped


BYTES = byte_level()
PIECES = sentencepiece()
TURNED = sentencepiece(template=TURNS, size=360)
LLAMA = sentencepiece(prepend=True)
NORMAL = byte_level(normalizer=normalizers.NFC())
ALL = {"bytes": BYTES, "pieces": PIECES, "turned": TURNED, "llama": LLAMA, "normal": NORMAL}


# --- texts and oracle ---

FRAGMENTS = st.sampled_from(
    [
        "The quick", " fox", " Han", "zi", "isn't", " 12345", ".", "  ", "     ", "\n", "\n\n",
        "\n\n\n", "\t", "\t\t", "\r\n", "\u6f22\u5b57", "\u3072\u3089", "\uac00\ub098",
        "\U0001f600", "\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea",
        "\u05e9\u05dc\u05d5\u05dd", "\u0645\u0631\u062d\u0628\u0627", "\u200f",
        "\u00e9", "x\u0301\u0323", "\u0e01\u0e34\u0e48", "<0x41>", "<unk>x", "\x00", "\x7f",
        "\u00a0", "\ufffd", "\u0100", "\u0120", "</a>", "user\n", "### User\n",
    ]
)  # fmt: skip
JUNK = st.binary(max_size=12).map(lambda data: data.decode(errors="replace"))
ANYTHING = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=12)
TEXTS = st.lists(st.one_of(FRAGMENTS, JUNK, ANYTHING), max_size=10).map("".join)
fuzz = settings(max_examples=60, deadline=None, derandomize=True)
PAIRS = [
    ("bytes", "pieces"),
    ("pieces", "bytes"),
    ("bytes", "llama"),
    ("llama", "pieces"),
    ("turned", "pieces"),
]


def naive(source: Reading, target: Reading) -> list[int]:
    """Align verbatim contents by counting bytes, token by token.

    Gives each target token the offset of its end inside the target's contents, and walks the source
    for the first token that has got as far.
    """

    def progress(reading: Reading, end: int, *, empty: int) -> tuple[int, int]:
        """(content, bytes of it) that have been read at byte `end`; before any content (-1, 0).

        An empty content has been read `empty` bytes after its place.
        """
        best = (-1, 0)
        for k, (start, stop) in enumerate(reading.contents):
            if end >= start + (1 if start < stop else empty):
                best = (k, min(end, stop) - start)
        return best

    got = [progress(source, stop, empty=0) for _, stop in source.spans]
    result = []
    for _, stop in target.spans:
        wanted = progress(target, stop, empty=1)
        if wanted == (-1, 0):
            result.append(0)
        else:
            result.append(next((i for i, have in enumerate(got) if have >= wanted), -1))
    return result


def contents(reading: Reading) -> list[bytes]:
    return [reading.stream[start:stop] for start, stop in reading.contents]


def verbatim(reading: Reading, *texts: str) -> bool:
    """Tell whether the contents are the texts.

    Llama's tokenizer adds a space after a special token inside one.
    """
    return contents(reading) == [text.encode() for text in texts]


def tokens(reading: Reading) -> list[bytes]:
    return [reading.stream[start:stop] for start, stop in reading.spans]


def check_shape(source: Reading, target: Reading) -> list[int]:
    """Check what holds for every alignment, and return it."""
    alignment = align(source, target)
    assert alignment.dtype == torch.long
    assert alignment.shape == (len(target.ids),)
    fed = alignment.tolist()
    read = fed[: fed.index(-1)] if -1 in fed else fed
    assert all(i == -1 for i in fed[len(read) :])
    assert read == sorted(read)
    assert all(0 <= i < len(source.ids) for i in read)
    return fed


def check_tiles(reading: Reading) -> None:
    edges = [0, *(stop for _, stop in reading.spans)]
    assert [span[0] for span in reading.spans] == edges[:-1]
    assert edges[-1] == len(reading.stream)


# --- reading ---


@pytest.mark.parametrize("name", ALL)
@fuzz
@given(text=TEXTS)
def test_reading_spells_the_text(name: str, text: str) -> None:
    tokenizer = ALL[name]
    if name == "normal":
        text = unicodedata.normalize("NFC", text)
    reading = read_text(tokenizer, text)
    check_tiles(reading)
    assert verbatim(reading, text) or name == "llama"
    assert contents(reading)[0].split() == text.encode().split() or "<unk>" in text
    assert reading.ids == tuple(tokenizer(text)["input_ids"]) or not text
    assert reading_of_ids(tokenizer, torch.tensor(reading.ids, dtype=torch.long)).stream == reading.stream


def test_text_of_the_default_content_is_between_the_special_tokens() -> None:
    ids = [
        *PIECES("a b")["input_ids"],
        PIECES.eos_token_id,
        PIECES.pad_token_id,
        PIECES.pad_token_id,
    ]
    assert contents(reading_of_ids(PIECES, ids)) == [b"a b"]
    padded_left = [PIECES.pad_token_id] * 3 + ids
    assert contents(reading_of_ids(PIECES, padded_left)) == [b"a b"]
    assert contents(reading_of_ids(PIECES, [PIECES.pad_token_id] * 3)) == [b""]
    assert reading_of_ids(PIECES, []).contents == ((0, 0),)


def test_a_space_that_the_tokenizer_puts_before_a_text_is_not_content() -> None:
    ids = LLAMA("Hello fox")["input_ids"]
    assert tokens(reading_of_ids(LLAMA, ids))[1].startswith(b" ")
    for reading in (reading_of_ids(LLAMA, ids), read_text(LLAMA, "Hello fox")):
        assert contents(reading) == [b"Hello fox"]
    assert contents(read_text(LLAMA, "  two")) == [b"  two"]


def test_ids_the_tokenizer_does_not_know_are_masked() -> None:
    ids = BYTES("a fox")["input_ids"]
    reading = reading_of_ids(BYTES, [*ids, len(BYTES), len(BYTES) + 5000])
    assert tokens(reading)[-2:] == [b"", b""]
    assert contents(reading) == [b"a fox"]
    assert contents(reading_of_ids(BYTES, [*ids, BYTES.eos_token_id, len(BYTES)])) == [b"a fox"]
    assert check_shape(reading, reading) == list(range(len(reading)))
    assert check_shape(reading, read_text(PIECES, "a fox"))[-1] == len(ids) - 1
    assert check_shape(read_text(PIECES, "a fox"), reading)[-3:] == [len(PIECES("a fox")["input_ids"]) - 1] * 3


@pytest.mark.parametrize("wrong", [-1, -100, 2**40])
def test_numbers_that_are_no_ids_are_refused(wrong: int) -> None:
    with pytest.raises(BadInput, match=f"^{wrong} is no token id"):
        reading_of_ids(BYTES, [1, wrong])


def test_contents_outside_the_stream_are_refused() -> None:
    assert contents(reading_of_ids(BYTES, BYTES("a fox")["input_ids"], [(0, 1), (2, 5)])) == [
        b"a",
        b"fox",
    ]
    for wrong in ([(0, 6)], [(3, 2)], [(2, 3), (1, 5)]):
        with pytest.raises(BadInput, match="don't fit together"):
            reading_of_ids(BYTES, BYTES("a fox")["input_ids"], wrong)


def test_bos_comes_exactly_once() -> None:
    bos = PIECES.bos_token_id
    message = [{"role": "user", "content": "hi"}]
    for reading in (
        read_text(PIECES, "hi"),
        read_text(PIECES, "<s>hi"),
        read_chat(PIECES, message),  # the plain template has no BOS: put first
        read_chat(TURNED, message),  # this template has one: left alone
    ):
        assert reading.ids[0] == bos
        assert reading.ids.count(bos) == 1
    assert leading_ids(PIECES) == (bos,)
    assert leading_ids(BYTES) == ()
    assert read_text(PIECES, "").ids == (bos,)
    assert read_text(BYTES, "").ids == ()
    assert read_chat(BYTES, message).ids[0] == BYTES.convert_tokens_to_ids("<|im_start|>")


def test_a_closing_special_token_is_left_out() -> None:
    closing = sentencepiece()
    closing.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    assert closing("a")["input_ids"][-1] == 3
    assert read_text(closing, "a fox").ids == tuple(PIECES("a fox")["input_ids"])


def test_text_that_no_tokenizer_can_read_is_refused() -> None:
    with pytest.raises(BadInput, match="lone surrogate at character 1"):
        read_text(BYTES, "a\ud800")
    with pytest.raises(BadInput, match="got bytes"):
        read_text(BYTES, b"abc")  # type: ignore[arg-type]


def test_read_more_appends_a_content() -> None:
    prompt = read_chat(BYTES, [{"role": "user", "content": "hi"}])
    ids = [*BYTES(" yes")["input_ids"], BYTES.eos_token_id]
    reading = read_more(BYTES, prompt, ids)
    check_tiles(reading)
    assert contents(reading) == [b"hi", b" yes"]
    assert reading.ids == prompt.ids + tuple(ids)
    assert reading.stream == prompt.stream + b" yes<|im_end|>"
    assert contents(read_more(BYTES, prompt, [])) == [b"hi", b""]


def test_first_tokens_cuts_contents() -> None:
    chat = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "the dog"}]
    reading = read_chat(BYTES, chat)
    for count in range(len(reading) + 1):
        cut = first_tokens(reading, count)
        check_tiles(cut)
        assert cut.ids == reading.ids[:count]
        assert all(b"the dog".startswith(c) or b"fox".startswith(c) for c in contents(cut))
        assert check_shape(cut, reading) == [*range(count), *[-1] * (len(reading) - count)]
        assert check_shape(reading, cut) == [*range(count)]
    inside = next(n for n, (_, stop) in enumerate(reading.spans) if stop > reading.contents[1][0])
    assert len(first_tokens(reading, 3).contents) == 0
    assert len(first_tokens(reading, inside - 3).contents) == 1
    assert first_tokens(read_text(PIECES, "fox"), 1).contents == ((3, 3),)


# --- chat ---


def test_contents_are_found_by_place() -> None:
    chat = [
        {"role": "system", "content": "user"},
        {"role": "user", "content": "user\nuser"},
        {"role": "assistant", "content": "<turn>? ### User\n\n"},
        {"role": "user", "content": " \u6f22\u5b57 "},
    ]
    verbatim = [m["content"].encode() for m in chat]
    assert contents(read_chat(BYTES, chat)) == verbatim
    assert contents(read_chat(PIECES, chat)) == verbatim
    assert contents(read_chat(TURNED, chat)) == [text.strip() for text in verbatim]
    assert [text.replace(b" ", b"") for text in contents(read_chat(LLAMA, chat))] == [
        t.replace(b" ", b"") for t in verbatim
    ]


def test_empty_contents_and_parts() -> None:
    chat = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "fox"}],
        },
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": ""},
        {"role": "user"},
        {"role": "user", "content": "end"},
    ]
    for tokenizer in (BYTES, PIECES, TURNED):
        assert contents(read_chat(tokenizer, chat)) == [b"a fox", b"", b"", b"", b"end"]
    check_shape(read_chat(BYTES, chat), read_chat(TURNED, chat))


def test_a_rewriting_template_keeps_what_it_keeps() -> None:
    thinking = byte_level()
    thinking.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
        "{% if '</think>' in m['content'] %}{{ m['content'].split('</think>')[1] | trim }}"
        "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    )
    answer = "<think>" + "a fox or a dog? " * 30 + "</think>\n\nThe fox reads the book."
    chat = [
        {"role": "user", "content": "who?"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "ok"},
    ]
    target = read_chat(thinking, chat)
    assert contents(target) == [b"who?", b"The fox reads the book.", b"ok"]
    source = read_chat(PIECES, chat)
    fed = check_shape(source, target)
    book = tokens(target).index(b" book") if b" book" in tokens(target) else None
    end = next(j for j, (_, stop) in enumerate(target.spans) if stop >= target.contents[1][1])
    assert source.spans[fed[end]][1] >= source.contents[1][1] > source.spans[fed[end] - 1][1]
    assert book is None or b"book"[-1:] in tokens(source)[fed[book]]


def test_a_template_that_reads_contents() -> None:
    """Qwen3's keeps the last answer's thoughts, in its own words, and drops those before."""
    thinking = byte_level()
    thinking.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
        "{% set parts = m['content'].split('</think>') %}{% if m['role'] != 'assistant' %}"
        "{{ m['content'] }}{% elif loop.last %}"
        "{% set thought = parts[0] | replace('<think>', '') | trim if parts | length > 1 else '' %}"
        "{{ '<think>\\n' + thought "
        "+ '\\n</think>\\n\\n' + parts[-1].lstrip('\\n') }}"
        "{% else %}{{ parts[-1].lstrip('\\n') }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    )
    chat = [
        {"role": "user", "content": "who reads the book?"},
        {"role": "assistant", "content": "<think>a fox?</think>\n\nThe fox reads."},
        {"role": "user", "content": "why?"},
        {"role": "assistant", "content": "<think>books are text</think>\n\nIt likes the text."},
    ]
    wanted = [b"who reads the book?", b"The fox reads.", b"why?", b"It likes the text."]
    assert contents(read_chat(thinking, chat)) == wanted
    assert contents(read_chat(thinking, [*chat, chat[0]])) == [*wanted, wanted[0]]
    source, target = read_chat(PIECES, chat), read_chat(thinking, chat)
    fed, back = check_shape(source, target), check_shape(target, source)
    for one, other, ways in ((source, target, fed), (target, source, back)):
        for k in range(4):
            end = next(j for j, (_, e) in enumerate(other.spans) if e >= other.contents[k][1])
            assert one.spans[ways[end]][1] >= one.contents[k][1] > one.spans[ways[end] - 1][1]


def test_a_dropped_message_has_an_empty_content() -> None:
    silent = byte_level()
    silent.chat_template = (
        "{% for m in messages if m['role'] != 'system' %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    )
    chat = [{"role": "system", "content": "obey"}, {"role": "user", "content": "hi obey"}]
    assert contents(read_chat(silent, chat)) == [b"", b"hi obey"]
    fed = check_shape(read_chat(silent, chat), read_chat(PIECES, chat))
    assert -1 not in fed
    check_shape(read_chat(PIECES, chat), read_chat(silent, chat))


def test_refused_messages_name_the_reason() -> None:
    strict = byte_level()
    strict.chat_template = "{{ raise_exception('roles must\nalternate') }}"
    with pytest.raises(BadInput, match=r"^the chat template refuses these messages: roles must alternate$"):
        read_chat(strict, [{"role": "user", "content": "x"}])
    with pytest.raises(BadInput, match="empty"):
        read_chat(BYTES, [])
    with pytest.raises(BadInput, match="something else than text"):
        read_chat(BYTES, [{"role": "user", "content": [{"type": "image"}]}])
    with pytest.raises(BadInput, match="mapping"):
        read_chat(BYTES, [{"content": "x"}])


@pytest.mark.parametrize("pair", [("bytes", "pieces"), ("pieces", "bytes"), ("bytes", "llama"), ("llama", "bytes")])
@fuzz
@given(said=st.lists(TEXTS, min_size=1, max_size=4), cut=st.integers(0, 4))
def test_chat_against_the_oracle(pair: tuple[str, str], said: list[str], cut: int) -> None:
    chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    source = read_chat(ALL[pair[0]], chat[: max(1, len(chat) - cut)], add_generation_prompt=cut % 2 == 0)
    target = read_chat(ALL[pair[1]], chat)
    fed = check_shape(source, target)
    if "llama" in pair:
        assume(verbatim(target, *said) and verbatim(source, *said[: len(source.contents)]))
    assert verbatim(target, *said)
    wanted = naive(source, target)
    stop = wanted.index(-1) if -1 in wanted else len(wanted)
    assert fed == wanted[:stop] + [-1] * (len(wanted) - stop)


@fuzz
@given(said=st.lists(TEXTS, min_size=1, max_size=4))
def test_a_template_that_strips_lines_up(said: list[str]) -> None:
    chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    stripped = [{**m, "content": m["content"].strip()} for m in chat]
    readings = [read_chat(BYTES, messages) for messages in (chat, stripped)]
    target = read_chat(TURNED, chat)
    for have, text in zip(contents(target), said, strict=True):
        assert have == text.strip().encode()
    # The source's stripped and unstripped rendering feed the same bytes.
    for source in readings:
        fed = check_shape(source, target)
        assert -1 not in fed
        for k, (start, stop) in enumerate(target.contents):
            offset = contents(source)[k].find(contents(target)[k])
            for j, (_, end) in enumerate(target.spans):
                if start < end <= stop:
                    image = source.contents[k][0] + offset + end - start
                    before, have = source.spans[fed[j]]
                    assert have >= image
                    assert before < image or fed[j] == 0
    check_shape(target, readings[0])


def test_template_tokens_take_the_preceding_content() -> None:
    chat = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]
    source, target = read_chat(BYTES, chat), read_chat(PIECES, chat)
    fed = check_shape(source, target)
    for j, (start, stop) in enumerate(target.spans):
        if start >= target.contents[1][1]:
            assert source.spans[fed[j]][1] == source.contents[1][1]
        elif stop <= target.contents[0][0]:
            assert fed[j] == 0


def test_templates_that_begin_alike_correspond() -> None:
    small, large = byte_level(300), byte_level(500)
    chat = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]
    source, target = read_chat(small, chat), read_chat(large, chat)
    assert source.stream == target.stream
    assert source.ids != target.ids
    ends = [stop for _, stop in source.spans]
    fed = check_shape(source, target)
    shared = next(j for j in range(len(fed)) if source.spans[j] != target.spans[j])
    assert fed[shared:] == [next(i for i, e in enumerate(ends) if e >= stop) for _, stop in target.spans[shared:]]


def test_a_conversation_that_went_on() -> None:
    chat = [{"role": "user", "content": "who reads?"}, {"role": "assistant", "content": "the fox"}]
    source = read_more(BYTES, read_chat(BYTES, chat[:1]), BYTES("the fox")["input_ids"])
    target = read_chat(PIECES, [*chat, {"role": "user", "content": "why?"}])
    fed = check_shape(source, target)
    first = next(j for j, (_, stop) in enumerate(target.spans) if stop > target.contents[2][0])
    assert fed[first:] == [-1] * (len(fed) - first)
    assert fed[first - 1] == len(source) - 1


def test_the_last_content_may_have_been_cut() -> None:
    chat = [
        {"role": "user", "content": "who reads?"},
        {"role": "assistant", "content": "the quick brown fox"},
    ]
    source = read_more(BYTES, read_chat(BYTES, chat[:1]), BYTES("the quick bro")["input_ids"])
    target = read_chat(PIECES, chat)
    fed = check_shape(source, target)
    covered = target.contents[1][0] + len("the quick bro")
    assert [i == -1 for i in fed] == [stop > covered for _, stop in target.spans]


# --- text ---


@pytest.mark.parametrize("pair", PAIRS)
@fuzz
@given(text=TEXTS)
def test_text_against_the_oracle(pair: tuple[str, str], text: str) -> None:
    source, target = read_text(ALL[pair[0]], text), read_text(ALL[pair[1]], text)
    fed = check_shape(source, target)
    if "llama" in pair:
        assume(verbatim(source, text) and verbatim(target, text))
    if source.ids:
        assert fed == naive(source, target)
    else:
        assert fed == [-1] * len(target)


@pytest.mark.parametrize("pair", PAIRS)
@fuzz
@given(text=TEXTS.filter(bool), share=st.floats(0, 1))
def test_what_the_source_has_not_read_is_left_to_the_target(pair: tuple[str, str], text: str, share: float) -> None:
    """Cut the source's ids anywhere, inside of characters too."""
    whole = read_text(ALL[pair[0]], text)
    cut = 1 + int(share * (len(whole) - 1))
    source = first_tokens(whole, cut)
    target = read_text(ALL[pair[1]], text)
    fed = check_shape(source, target)
    if "llama" in pair:
        assume(verbatim(whole, text) and verbatim(target, text))
    read = len(source.stream) - whole.contents[0][0]
    ends = [max(0, stop - target.contents[0][0]) for _, stop in target.spans]
    assert [i == -1 for i in fed] == [end > max(0, read) for end in ends]
    known = [i for i in fed if i != -1]
    assert known == naive(whole, target)[: len(known)]


@pytest.mark.parametrize("name", ALL)
@fuzz
@given(text=TEXTS, more=TEXTS)
def test_equal_tokenizers_are_identity(name: str, text: str, more: str) -> None:
    source = read_text(ALL[name], text)
    assert check_shape(source, source) == list(range(len(source)))
    ids = ALL[name](more, add_special_tokens=False)["input_ids"]
    longer = read_more(ALL[name], source, ids)
    assert check_shape(source, longer) == list(range(len(source))) + [-1] * len(ids)


@fuzz
@given(ids=st.lists(st.integers(0, 420), max_size=30))
@pytest.mark.parametrize("pair", [("bytes", "pieces"), ("pieces", "bytes"), ("llama", "bytes")])
def test_any_ids_align_with_the_text_they_decode_to(pair: tuple[str, str], ids: list[int]) -> None:
    """Random ids spell broken characters; the other model reads replacement characters."""
    source = reading_of_ids(ALL[pair[0]], ids)
    check_tiles(source)
    text = source.stream[slice(*source.contents[0])].decode(errors="replace")
    target = read_text(ALL[pair[1]], text)
    fed = check_shape(source, target)
    back = check_shape(target, source)
    assert len(fed) == len(target)
    assert len(back) == len(source)


def test_sampled_ids_are_not_tokenised_again() -> None:
    """A model may sample [" Han", "zi"] where its tokenizer would say [" H", "anzi"]."""
    pieces = [b"the", b" Han", b"zi", b" emperor"]
    ids = [BYTES.convert_tokens_to_ids(p.decode().replace(" ", "\u0120")) for p in (b" Han", b"z", b"i")]
    assert None not in ids
    canonical = BYTES(" Hanzi")["input_ids"]
    assert ids != canonical
    source, target = reading_of_ids(BYTES, ids), read_text(PIECES, " Hanzi")
    assert tokens(source) == [b" Han", b"z", b"i"]
    assert check_shape(source, target) == naive(source, target)
    same = reading_of_ids(BYTES, canonical)
    assert check_shape(source, same)[-1] == len(ids) - 1
    assert pieces[1] in tokens(source)


def test_characters_split_over_tokens() -> None:
    emoji = "\U0001f98a"  # not in the corpus: one token a byte on either side
    split = reading_of_ids(PIECES, [PIECES.convert_tokens_to_ids(f"<0x{b:02X}>") for b in f"a{emoji}".encode()])
    assert tokens(split) == [b"a", b"\xf0", b"\x9f", b"\xa6", b"\x8a"]
    whole = reading_of_ids(BYTES, BYTES(f"a{emoji}")["input_ids"])
    assert check_shape(split, whole) == naive(split, whole)
    assert check_shape(reading_of_ids(PIECES, split.ids[:3]), whole)[-1] == -1


def test_normalisers_and_lookalike_spaces_line_up() -> None:
    decomposed = unicodedata.normalize("NFD", "na\u00efve caf\u00e9 \uac00\ub098\ub2e4 fox \u1ec7 end")
    composed = unicodedata.normalize("NFC", decomposed)
    source, target = read_text(BYTES, decomposed), read_text(NORMAL, decomposed)
    assert contents(target) == [composed.encode()]
    fed = check_shape(source, target)
    assert -1 not in fed
    end = next(j for j, (_, stop) in enumerate(target.spans) if target.stream[:stop].endswith(b" fox"))
    assert source.stream[: source.spans[fed[end]][1]].endswith(b"fox")
    marked = read_text(PIECES, "a\u2581fox \u2581 dog")  # this tokenizer can't tell U+2581 from a space
    assert contents(marked) == [b"a fox   dog"]
    back = check_shape(read_text(BYTES, "a\u2581fox \u2581 dog"), marked)
    assert back[-1] == len(read_text(BYTES, "a\u2581fox \u2581 dog")) - 1


def test_different_texts_are_refused() -> None:
    source = read_text(BYTES, "The quick brown fox jumps over the lazy dog.")
    target = read_text(PIECES, "Nothing of this was ever seen by that source; another conversation!")
    with pytest.raises(BadInput, match=r"^content 0 differs between the two readings"):
        align(source, target)


def test_an_empty_source_feeds_nothing() -> None:
    assert check_shape(read_text(BYTES, ""), read_text(PIECES, "fox")) == [-1] * len(read_text(PIECES, "fox"))
    bos_only = read_text(TURNED, "")
    fed = check_shape(bos_only, read_text(PIECES, "fox"))
    assert fed == [0] + [-1] * (len(fed) - 1)
    assert check_shape(read_text(PIECES, "fox"), bos_only) == [0]
    assert align(bos_only, read_text(BYTES, "")).shape == (0,)


def test_last_at_source_start() -> None:
    assert last_at_source_start(torch.tensor([0, 0, 0, 1, 2, -1])) == 3
    assert last_at_source_start(torch.tensor([1, 2])) == 0
    assert last_at_source_start(torch.tensor([0, 0])) == 2
    assert last_at_source_start(torch.tensor([0, -1])) == 1
    assert last_at_source_start(torch.tensor([-1, -1])) == 0
    assert last_at_source_start(torch.tensor([], dtype=torch.long)) == 0
    # No BOS at the source: the target's BOS and first text tokens fall on its position 0.
    source, target = read_text(BYTES, "The quick"), read_text(PIECES, "The quick")
    inside = sum(stop <= source.spans[0][1] + len("<s>") for _, stop in target.spans)
    assert last_at_source_start(align(source, target)) == inside >= 1


@pytest.mark.parametrize("text", ["The quick brown fox \u6f22\u5b57. ", "a\u2581fox \u00e9 reads. "])
def test_long_texts_are_fast(text: str) -> None:
    source, target = read_text(BYTES, text * 4000), read_text(PIECES, text * 4000)
    assert len(target) > 32_000
    started = time.process_time()
    alignment = align(source, target)
    assert time.process_time() - started < 5
    assert alignment[-1] == len(source) - 1


# --- kinds and relations ---


def test_metaspace_and_unknown_tokens() -> None:
    """A vocabulary without byte fallback reads what it can; the rest is its unknown token."""
    vocab, merges = trained(
        pre_tokenizers.Metaspace(prepend_scheme="first"),
        None,
        [chr(c) for c in range(33, 127)],
        200,
    )
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, "<unk>": len(vocab)}, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    plain = wrap(tokenizer, None, ["<unk>"], unk_token="<unk>")
    assert contents(read_text(plain, "The fox")) == [b"The fox"]
    source, target = (
        read_text(plain, "The \U0001f98a reads the book"),
        read_text(BYTES, "The \U0001f98a reads the book"),
    )
    assert b"<unk>" in source.stream
    assert check_shape(source, target)[-1] == len(source) - 1
    check_shape(target, source)


def test_tokenizers_whose_bytes_are_unknown_are_refused() -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "fox": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UnsupportedModel, match="neither byte-level nor sentencepiece-like"):
        read_text(wrap(words, None, ["[UNK]"], unk_token="[UNK]"), "fox")
    lower = byte_level(normalizer=normalizers.Lowercase())
    with pytest.raises(UnsupportedModel, match="can't be aligned"):
        read_text(lower, "fox")
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        reading_of_ids(object(), [1])
    without = byte_level()
    without.backend_tokenizer.decoder = None  # the pre-tokenizer tells as much
    assert verbatim(read_text(without, "fox \U0001f98a"), "fox \U0001f98a")


def test_added_tokens_are_seen_after_the_first_use() -> None:
    tokenizer = byte_level()
    assert tokens(reading_of_ids(tokenizer, [len(tokenizer)])) == [b""]
    tokenizer.add_tokens(["<\u6f22>"])
    assert tokens(read_text(tokenizer, "a<\u6f22>"))[-1] == "<\u6f22>".encode()


def test_tokenizer_relation() -> None:
    assert tokenizer_relation(BYTES, BYTES).kind == "same"
    again = byte_level()
    assert tokenizer_relation(BYTES, again).kind == "same"
    again.add_special_tokens({"additional_special_tokens": ["<tool>", "<|think|>"]})
    related = tokenizer_relation(BYTES, again)
    assert (related.kind, related.differing) == ("same_base", ("<tool>", "<|think|>"))
    assert str(related) == "same base, differing specials: <tool>, <|think|>"
    assert tokenizer_relation(BYTES, PIECES).kind == "different"
    assert tokenizer_relation(BYTES, NORMAL).kind == "different"
    assert tokenizer_relation(LLAMA, PIECES).kind == "different"


def test_equal_sizes_do_not_make_equal_tokenizers() -> None:
    swapped = json.loads(BYTES.backend_tokenizer.to_str())
    vocab = swapped["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(swapped)))
    assert len(other) == len(BYTES)
    assert tokenizer_relation(BYTES, other).kind == "different"
    digits = json.loads(BYTES.backend_tokenizer.to_str())  # the same vocabulary, cut up in another way
    pre_tokenizer = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}],
    }
    pre_tokenizer["pretokenizers"].append(digits["pre_tokenizer"])
    digits["pre_tokenizer"] = pre_tokenizer
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(digits)))
    assert tokenizer_relation(BYTES, other).kind == "same"


# --- real tokenizers ---


@pytest.fixture(scope="module")
def real() -> tuple[Any, Any]:
    """Load two real tokenizers: KVLINGO_REAL_MODELS is a folder, or 1 to fetch them."""
    folder = Path(os.environ.get("KVLINGO_REAL_MODELS", ""))
    names = ("smollm2-135m-instruct", "gemma-3-270m")
    folders = [folder / name for name in names]
    if not all((path / "tokenizer.json").is_file() for path in folders):
        try:
            files = fetch_demo_models(default_cache_dir() / "models", progress=False)
        except KVLingoError as error:
            pytest.skip(str(error))
        folders = [convert_gguf(files[name]) for name in names]
    first, second = (AutoTokenizer.from_pretrained(path) for path in folders)
    return first, second


@pytest.mark.real_model
def test_real_tokenizers(real: tuple[Any, Any]) -> None:
    texts = [
        *CORPUS[:4],
        "\U0001f98a\u200d \u0645\u0631\u062d\u0628\u0627\n\n\n\t\t x\u0301 <0x41> \ufffd <table>  ",
        "1" * 50,
    ]
    chat = [{"role": "user", "content": t} for t in texts]
    for source, target in (real, real[::-1]):
        assert tokenizer_relation(source, target).kind == "different"
        for text in texts:
            a, b = read_text(source, text), read_text(target, text)
            assert contents(a) == contents(b) == [text.encode()]
            assert check_shape(a, b) == naive(a, b)
        a, b = read_chat(source, chat[:-1]), read_chat(target, chat)
        assert contents(a) == [t.encode() for t in texts[:-1]]
        fed, wanted = check_shape(a, b), naive(a, b)
        stop = wanted.index(-1)
        assert fed[:stop] == wanted[:stop]
        assert fed[stop:] == [-1] * (len(fed) - stop)
    assert read_chat(real[1], chat).ids.count(real[1].bos_token_id) == 1
