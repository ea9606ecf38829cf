"""Texts: read strictly, cut without loss, split without leaks."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlingo.errors import BadInput
from kvlingo.texts import (
    Document,
    Split,
    _library_docstrings,
    check_disjoint,
    default_documents,
    documents_from_paths,
    split_documents,
    windows,
    without_shared_passages,
    write_documents,
)


def document(text: str, cluster: str = "c", kind: str = "k") -> Document:
    return Document(text, kind, cluster, f"{cluster}/{text[:8]}")


def test_default_corpus_is_large_and_free_of_repeats() -> None:
    documents = default_documents()
    assert {item.kind for item in documents} == {"manual", "docstring"}
    assert sum(len(item.text) for item in documents) > 1_500_000
    assert len({item.text for item in documents}) == len(documents)
    assert len({item.cluster for item in documents}) > 100
    split_documents(documents, held_out_share=0.1)


def test_docstrings_come_in_source_order_with_names_and_long_comments(tmp_path: Path) -> None:
    prose = "word " * 100
    (tmp_path / "a.py").write_text(
        f'"""Module: {prose}"""\n\n# one\n# two\n#  indented\n# four\n'
        f'class Thing:\n    """A thing: {prose}"""\n    def go(self, n=1):\n        """Go."""\n'
        "# short\n# comment\n"
    )
    (tmp_path / "b.py").write_text("def broken(:\n")
    (tmp_path / "c.py").write_text(f'"""Module: {prose}"""\n')
    [item] = _library_docstrings(tmp_path)
    assert [item] == _library_docstrings(tmp_path)
    assert (item.name, item.cluster) == ("module:a", "module:a")
    paragraphs = item.text.split("\n\n")
    assert paragraphs[0].startswith("Module: word")
    assert paragraphs[1] == "one\ntwo\n indented\nfour"
    assert paragraphs[2].startswith("class Thing\nA thing:")
    assert paragraphs[3] == "go(self, n=1)\nGo."
    assert len(paragraphs) == 4


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.md").write_text("second \U0001f600 \u05e9\u05dc\u05d5\u05dd")
    (tmp_path / "in" / "a.TXT").write_bytes(b"\xef\xbb\xbffirst")
    (tmp_path / "in" / "empty.txt").write_text("\n")
    (tmp_path / "in" / "picture.png").write_bytes(b"\x89PNG\x00")
    (tmp_path / "in" / ".hidden.txt").write_text("hidden")
    (tmp_path / "notes").write_text("no suffix")
    documents = documents_from_paths([tmp_path / "notes", tmp_path / "in", tmp_path / "in/b.md"])
    assert [item.text for item in documents] == [
        "no suffix",
        "first",
        "second \U0001f600 \u05e9\u05dc\u05d5\u05dd",
    ]
    assert len({item.cluster for item in documents}) == 3


def test_json_records(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "Hello\u2028there "},
    ]
    lines = [
        json.dumps({"text": "one", "kind": "novel", "cluster": "book"}),
        "",
        json.dumps({"messages": chat}, ensure_ascii=False),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "b.json").write_text(json.dumps([{"text": "three"}, "four"]))
    one, two, three, four = documents_from_paths([tmp_path / "a.jsonl", tmp_path / "b.json"])
    assert (one.kind, one.cluster) == ("novel", "book")
    assert two.text == "Hi\n\nHello\u2028there"
    assert two.cluster.endswith("a.jsonl:3")
    assert (three.text, four.text) == ("three", "four")


def test_written_documents_are_read_back(tmp_path: Path) -> None:
    documents = [document("a\u2028b\r\n\U0001f600", "x"), document("c", "y", "z")]
    write_documents(documents, tmp_path / "all.jsonl")
    assert documents_from_paths([tmp_path / "all.jsonl"]) == documents
    assert [path.name for path in tmp_path.iterdir()] == ["all.jsonl"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b" \n", "is empty"),
        ("a.txt", b"caf\xe9 au lait", "not UTF-8 text .byte 3 is 0xe9"),
        ("a.txt", b"\xff\xfeh\x00i\x00", "not UTF-8 text"),
        ("a.txt", b"GGUF\x00\x01", "binary file"),
        ("a.json", b"{", "not valid JSON"),
        ("a.json", b"[" * 100_000, "not valid JSON"),
        ("a.json", b'{"txt": "x"}', 'expected an object with "text" or "messages"'),
        ("a.jsonl", b'{"text": "x"}\n{"text": ""}', "a.jsonl:2: expected non-empty text"),
        ("a.jsonl", b'{"text": 3}', "expected non-empty text, got 3"),
        ("a.jsonl", b'{"text": "\\ud800"}', "surrogate"),
        ("a.jsonl", b'{"messages": "x"}', "list of objects"),
        ("a.jsonl", b'{"messages": []}', "expected non-empty text"),
        ("a.jsonl", b'{"messages": [{"content": 3}]}', 'expected "content" to be text'),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadInput, match=message) as caught:
        documents_from_paths([tmp_path / name])
    assert "\n" not in str(caught.value)


def test_nothing_to_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    for paths, message in (
        ([], "no text given"),
        ([tmp_path / "missing"], "no such file"),
        ([tmp_path], "no text in folder"),
    ):
        with pytest.raises(BadInput, match=message):
            documents_from_paths(paths)


@given(st.text(alphabet="ab \n\u00e9\U0001f600", max_size=200), st.integers(1, 30))
def test_windows_lose_and_repeat_nothing(text: str, num_chars: int) -> None:
    pieces = [piece.text for piece in windows([document(text)], num_chars=num_chars, min_chars=0)]
    assert "".join(pieces) == text
    assert all(1 <= len(piece) <= num_chars for piece in pieces)
    for piece in pieces[:-1]:
        no_space = len(piece) == num_chars and not any(c.isspace() for c in piece)
        assert piece[-1].isspace() or no_space


def test_windows_keep_origin_and_drop_short_pieces() -> None:
    pieces = windows([document("aaaa bbbb     cc", "book")], num_chars=5, min_chars=3)
    assert [(piece.text, piece.cluster) for piece in pieces] == [
        ("aaaa ", "book"),
        ("bbbb ", "book"),
    ]
    with pytest.raises(BadInput, match="at least 1 character, got 0"):
        windows([], num_chars=0)


def test_split_keeps_clusters_together_for_every_kind() -> None:
    documents = [
        document(f"{kind}{cluster}{part}", f"{kind}{cluster}", kind)
        for kind in "xyz"
        for cluster in range(10)
        for part in range(3)
    ]
    split = split_documents(documents, held_out_share=0.2, seed=1)
    assert sorted([*split.held_out, *split.training], key=repr) == sorted(documents, key=repr)
    for kind in "xyz":
        held_out = {item.cluster for item in split.held_out if item.kind == kind}
        training = {item.cluster for item in split.training if item.kind == kind}
        assert (len(held_out), len(training)) == (2, 8)
        assert held_out.isdisjoint(training)
    shuffled = random.Random(0).sample(documents, len(documents))
    again = split_documents(shuffled, held_out_share=0.2, seed=1)
    assert set(again.held_out) == set(split.held_out)
    other = split_documents(documents, held_out_share=0.2, seed=2)
    assert set(other.held_out) != set(split.held_out)


def test_split_of_single_clusters_pools_them() -> None:
    split = split_documents([document("a", "x", "p"), document("b", "y", "q")], held_out_share=0.1)
    assert len(split.held_out) == len(split.training) == 1


@pytest.mark.parametrize(
    ("documents", "share", "message"),
    [
        ([document("a")], 0.0, "between 0 and 1, got 0.0"),
        ([], 0.5, "got 0 from fewer than two files"),
        ([document("a"), document("b")], 0.5, "got 2 from fewer than two files or books"),
        ([document("a b", "x"), document("a  b\n", "y")], 0.5, "same text is held out and trained"),
    ],
)
def test_impossible_splits_are_refused(documents: list[Document], share: float, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        split_documents(documents, held_out_share=share)


def test_shared_cluster_is_refused() -> None:
    with pytest.raises(BadInput, match="same cluster"):
        check_disjoint(Split([document("a")], [document("b")]))


def test_paragraphs_that_quote_held_out_text_are_dropped() -> None:
    quoted = " ".join(f"w{i}" for i in range(13))
    held_out = [document(f"before {quoted} after")]
    training = [
        document(f"keep this\n\n{quoted.upper()}\nmore\n \nand this", "x"),
        document(quoted, "y"),
        document(" ".join(quoted.split()[:12]), "z"),
    ]
    kept = without_shared_passages(training, held_out)
    assert [item.text for item in kept] == ["keep this\n\nand this", training[2].text]
