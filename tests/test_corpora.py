"""Benchmark corpora: formats of the packages, read from packages made here."""

import io
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from bench import corpora
from kvlingo.errors import BadInput, KVLingoError
from kvlingo.texts import Document, documents_from_paths

LONG = "A sentence of six short words. " * 60


def r_vector(lines: list[str]) -> bytes:
    """Return lines as R serialises a vector of strings (an independent reading of the format)."""

    def number(value: int) -> bytes:
        return value.to_bytes(4, "big")

    body = b"X\n" + number(3) + number(0x040201) + number(0x030500) + number(5) + b"UTF-8"
    body += number(16) + number(len(lines))
    for line in lines:
        encoded = line.encode()
        body += number(0x00040009) + number(len(encoded)) + encoded
    return number(len(body)) + zlib.compress(body)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, bytes]]:
    """Return an empty table, package → path → contents, that stands for the .deb files."""
    contents: dict[str, dict[str, bytes]] = {}

    def run(command: list[str], aim: str, *, folder: Path | None = None) -> bytes:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as tar:
            for name, data in contents[Path(command[-1]).name].items():
                item = tarfile.TarInfo(f"./{name}")
                item.size = len(data)
                tar.addfile(item, io.BytesIO(data))
        return stream.getvalue()

    monkeypatch.setattr(corpora, "_run", run)
    return contents


def test_novels_are_cut_into_chapters(packages: dict[str, dict[str, bytes]]) -> None:
    novel = ["EMMA", "", "Chapter I", "", "Caf\u00e9", LONG, "", "Next.", "CHAPTER II", LONG]
    packages["a.deb"] = {"usr/lib/R/data/Rdata.rdb": r_vector(novel) + r_vector(["PERSUASION"])}
    first, second = corpora.novels(Path("a.deb"))
    assert first.cluster == second.cluster == "novel:emma"
    assert first.text == f"Chapter I\n\nCaf\u00e9 {LONG.strip()}\n\nNext."
    assert second.name == "emma, chapter 2"


def test_handbook_keeps_prose_and_listings_in_order(packages: dict[str, dict[str, bytes]]) -> None:
    def page(title: str, body: str) -> bytes:
        return (
            f"<html><head><title>{title}</title></head><body><div id='banner'>ad</div>"
            f"<p id='title'><img src='x'/></p><div class='toc'>contents</div>{body}"
            "<ul class='docnav'><li>Next</li></ul></body></html>"
        ).encode()

    listing = "<pre class='l'>a\n   b\n</pre>"
    packages["h.deb"] = {
        f"usr/share/doc/debian-handbook/html/{name}.html": data
        for name, data in {
            "en-US/z": page("Chapter 9. Services", f"<div>{LONG}<br>tail</div>"),
            "en-US/a": page("9.10. Backup", f"<p>one\n <b>two</b> &amp;</p>{listing}<p>three</p>"),
            "en-US/b": page("9.2. Login", "<p>login</p>"),
            "en-US/index": page("The Handbook", f"<p>{LONG}</p>"),
            "fr-FR/a": page("9.1. Sauvegarde", "<p>non</p>"),
        }.items()
    }
    [chapter] = corpora.handbook(Path("h.deb"))
    assert chapter.cluster == "handbook:9"
    assert chapter.text.split("\n\n") == [
        f"{LONG}tail",
        "login",
        "one two &",
        "a\n   b",
        "three",
    ]


def test_manual_pages(packages: dict[str, dict[str, bytes]]) -> None:
    pods = {"perlfaq1": LONG, "perlfaq2": LONG, "perl56delta": LONG, "perlko": LONG, "perlrun": "x"}
    packages["p.deb"] = {f"usr/share/perl/5/pod/{name}.pod": text.encode() for name, text in pods.items()}
    packages["p.deb"]["usr/share/perl/5/pod/perlre.pod"] = f"{LONG}\u00e9".encode("latin-1")
    pages = {page.name: page for page in corpora.perl_manual(Path("p.deb"))}
    assert set(pages) == {"perlfaq1", "perlfaq2", "perl56delta", "perlre"}
    assert pages["perlfaq1"].cluster == pages["perlfaq2"].cluster == "perl:perlfaq"
    assert pages["perl56delta"].cluster == corpora.RELEASE_NOTES
    assert pages["perlre"].text.endswith("\u00e9")
    packages["d.deb"] = {
        "usr/share/doc/python3.11/html/_sources/howto/x.rst.txt": LONG.encode(),
    }
    [page] = corpora.documentation(Path("d.deb"))
    assert (page.name, page.cluster) == ("howto/x", "documentation:howto/x")
    with pytest.raises(BadInput, match="holds no file like"):
        corpora.documentation(Path("p.deb"))


def sample_documents() -> list[Document]:
    """Return ten clusters of each kind."""
    novels = [*sorted(corpora.HELD_OUT_NOVELS), "novel:emma", "novel:mansfield park"]
    clusters = {
        "novel": novels,
        "handbook": [f"handbook:{i}" for i in range(10)],
        "scripture": [f"scripture:{i}" for i in range(10)],
        "documentation": [f"documentation:library/{i}" for i in range(5)]
        + [f"documentation:howto/{i}" for i in range(10)],
        "perl-manual": [corpora.RELEASE_NOTES, *(f"perl:{i}" for i in range(10))],
    }
    return [
        Document(f"{cluster} {LONG}{cluster}", kind, cluster, cluster.split(":", 1)[1])
        for kind, names in clusters.items()
        for cluster in names
    ]


def unlike(documents: list[Document]) -> list[Document]:
    """Return the documents with texts that share no passage."""
    texts = (" ".join(f"{item.cluster}{i}" for i in range(40)) for item in documents)
    return [replace(item, text=text) for item, text in zip(documents, texts, strict=True)]


def test_split_rules() -> None:
    split = corpora.split_corpora(unlike(sample_documents()))
    assert len({item.kind for item in split.held_out}) == 5
    held_out = {item.cluster for item in split.held_out}
    assert held_out.isdisjoint(item.cluster for item in split.training)
    assert {name for name in held_out if name.startswith("novel:")} == corpora.HELD_OUT_NOVELS
    assert not any(item.kind == "handbook" for item in split.training)
    assert not any("library/" in name for name in held_out)
    assert corpora.RELEASE_NOTES not in held_out


def test_training_text_never_quotes_held_out_text() -> None:
    split = corpora.split_corpora(sample_documents())
    assert split.training == []


def test_files_are_written_once_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def all_documents(folder: Path) -> list[Document]:
        built.append(folder)
        return unlike(sample_documents())

    monkeypatch.setattr(corpora, "all_documents", all_documents)
    split = corpora.held_out_and_training(tmp_path)
    assert corpora.held_out_and_training(tmp_path) == split
    assert documents_from_paths([tmp_path / "held_out.jsonl"]) == split.held_out
    assert built == [tmp_path / "packages"]
    corpora.held_out_and_training(tmp_path, rebuild=True)
    assert len(built) == 2
    assert set(corpora.summary(split.held_out)) == {
        "documentation", "handbook", "novel", "perl-manual", "scripture",
    }  # fmt: skip


def test_failing_commands_give_one_line(tmp_path: Path) -> None:
    with pytest.raises(KVLingoError, match="can't fetch x: apt-nothing not found"):
        corpora._run(["apt-nothing"], "fetch x")
    with pytest.raises(KVLingoError, match="can't fetch x: boom; run `apt-get update`"):
        corpora._run(["sh", "-c", "echo first >&2; echo boom >&2; exit 1"], "fetch x")
    (tmp_path / "some-doc_2_all.deb").touch()
    assert corpora.fetch("some-doc", tmp_path).name == "some-doc_2_all.deb"
