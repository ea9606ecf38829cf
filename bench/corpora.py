"""Build the texts that results are measured on from Debian packages.

    python -m bench.corpora --cache FOLDER

writes `held_out.jsonl` and `training.jsonl` to the folder: novels, a handbook, scripture, and the
manuals of two languages. The packages come from the machine's own Debian mirror (`apt-get
download`) and are read where they lie; nothing is installed. The package versions, and so the
texts, are those of Debian 12. Knows the formats of six packages; knows no model.
"""

import argparse
import io
import itertools
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

from kvlingo.errors import BadInput, KVLingoError
from kvlingo.texts import (
    Document,
    Split,
    check_disjoint,
    documents_from_paths,
    split_documents,
    without_shared_passages,
    write_documents,
)

DEFAULT_CACHE = Path("~/.cache/kvlingo/corpora")
HELD_OUT_SHARE = 0.2
HELD_OUT_NOVELS = frozenset({"novel:northanger abbey", "novel:persuasion"})

# The default corpus (`texts.default_documents`) retells these parts of Python's documentation.
DOCUMENTATION_NEVER_HELD_OUT = frozenset({"library", "reference"})
# Release notes repeat each other and the manual, so they are one cluster, and only trained on.
RELEASE_NOTES = "perl:deltas"

# Not English, not prose, or licences.
_SKIPPED_PODS = frozenset(
    {
        "perlapi",
        "perlartistic",
        "perlcn",
        "perlgpl",
        "perlintern",
        "perljp",
        "perlko",
        "perltoc",
        "perltw",
        "perluniprops",
    }
)
_MIN_CHARS = 1500


def held_out_and_training(cache: Path, *, rebuild: bool = False) -> Split:
    """Return documents to evaluate on and documents to train on, and write both to `cache`.

    Files that are there are read, unless `rebuild`.

    Two of the six novels, the whole handbook and a fifth of the other kinds' books or pages are
    held out. Training paragraphs that share 13 consecutive words with a held-out text are dropped.
    The same packages give the same documents.

    Raises:
        KVLingoError: a package can't be fetched or read.
    """
    cache = cache.expanduser()
    held_out, training = cache / "held_out.jsonl", cache / "training.jsonl"
    if rebuild or not (held_out.exists() and training.exists()):
        split = split_corpora(all_documents(cache / "packages"))
        write_documents(split.held_out, held_out)
        write_documents(split.training, training)
    return Split(documents_from_paths([held_out]), documents_from_paths([training]))


def all_documents(packages: Path) -> list[Document]:
    """Fetch what is missing in the folder `packages` and return the documents of every kind."""
    packages.mkdir(parents=True, exist_ok=True)
    return [
        *novels(fetch("r-cran-janeaustenr", packages)),
        *handbook(fetch("debian-handbook", packages)),
        *scripture(fetch("bible-kjv-text", packages), fetch("bible-kjv", packages)),
        *documentation(fetch("python3.11-doc", packages)),
        *perl_manual(fetch("perl-doc", packages)),
    ]


def split_corpora(documents: list[Document]) -> Split:
    """Decide which documents are held out; see `held_out_and_training`."""
    always_held_out = [
        document for document in documents if document.kind == "handbook" or document.cluster in HELD_OUT_NOVELS
    ]
    never_held_out = [document for document in documents if _only_trained_on(document)]
    fixed = {document.cluster for document in [*always_held_out, *never_held_out]}
    rest = [document for document in documents if document.cluster not in fixed]
    drawn = split_documents(rest, held_out_share=HELD_OUT_SHARE)
    held_out = [*always_held_out, *drawn.held_out]
    training = without_shared_passages([*never_held_out, *drawn.training], held_out)
    split = Split(held_out, training)
    check_disjoint(split)
    return split


def _only_trained_on(document: Document) -> bool:
    if document.kind == "novel":
        return document.cluster not in HELD_OUT_NOVELS
    if document.kind == "documentation":
        return document.name.split("/")[0] in DOCUMENTATION_NEVER_HELD_OUT
    return document.cluster == RELEASE_NOTES


# --- packages -------------------------------------------------------------------------------------


def fetch(package: str, folder: Path) -> Path:
    """Return the .deb file of `package` in `folder`; download it if it isn't there."""
    present = sorted(folder.glob(f"{package}_*.deb"))
    if present:
        return present[-1]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as work:
        _run(["apt-get", "download", package], f"fetch {package}", folder=Path(work))
        downloaded = sorted(Path(work).glob("*.deb"))
        if not downloaded:
            raise KVLingoError(f"apt-get download {package} left no .deb file; run it by hand")
        return downloaded[-1].rename(folder / downloaded[-1].name)


def members(deb: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yield (path, contents) of the files in a .deb whose path matches `pattern`, sorted."""
    archive = _run(["dpkg-deb", "--fsys-tarfile", str(deb)], f"read {deb.name}")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        names = {item.name.removeprefix("./"): item for item in tar if item.isfile()}
        found = sorted(name for name in names if re.fullmatch(pattern, name))
        if not found:
            raise BadInput(f"{deb.name} holds no file like {pattern}; remove it and fetch again")
        for name in found:
            stream = tar.extractfile(names[name])
            if stream is not None:
                yield name, stream.read()


def _run(command: list[str], aim: str, *, folder: Path | None = None) -> bytes:
    """Return what `command` writes to stdout."""
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise KVLingoError(f"can't {aim}: {command[0]} not found; this corpus needs Debian or Ubuntu") from error
    if result.returncode != 0:
        reason = (result.stderr.decode("utf-8", "replace").strip() or "no message").splitlines()[-1]
        raise KVLingoError(f"can't {aim}: {reason}; run `apt-get update` (as root) and try again")
    return result.stdout


# --- kinds ----------------------------------------------------------------------------------------


def novels(deb: Path) -> list[Document]:
    """Return the chapters of six novels by Jane Austen; a novel is a cluster.

    An R lazy-load database is a row of records, each 4 bytes of length (big-endian, uncompressed)
    and a zlib stream; each of these six holds one serialised vector of strings, a line each.
    """
    (_, data), *_ = members(deb, r".*/data/Rdata\.rdb")
    return [chapter for lines in _r_vectors(data) for chapter in _chapters(lines)]


def _r_vectors(data: bytes) -> Iterator[list[str]]:
    position = 0
    while position < len(data):
        stream = zlib.decompressobj()
        record = stream.decompress(data[position + 4 :])
        position = len(data) - len(stream.unused_data)
        yield list(_r_strings(record))


def _r_strings(record: bytes) -> Iterator[str]:
    r"""Yield the strings of a serialised R character vector (XDR, version 3).

    Layout: "X\n", three 4-byte versions, the length and name of the encoding, 4 bytes of vector
    type, the vector's length; then per string 4 bytes of flags, 4 bytes of length, its bytes.
    """
    if record[:2] != b"X\n":
        raise BadInput("the novels' R data is not in the XDR format; use Debian 12's package")
    position = 14
    position += 4 + _big_endian(record, position) + 4
    for _ in range(_big_endian(record, position)):
        length = _big_endian(record, position + 8)
        start = position + 12
        yield record[start : start + length].decode("utf-8")
        position = start + length - 4


def _big_endian(record: bytes, position: int) -> int:
    return int.from_bytes(record[position : position + 4], "big")


def _chapters(lines: list[str]) -> Iterator[Document]:
    title = lines[0].strip().lower()
    starts = [i for i, line in enumerate(lines) if re.match(r"\s*chapter\b", line, re.IGNORECASE)]
    for number, (start, end) in enumerate(itertools.pairwise([*starts, len(lines)]), start=1):
        text = _unwrapped(lines[start:end])
        if len(text) >= _MIN_CHARS:
            yield Document(text, "novel", f"novel:{title}", f"{title}, chapter {number}")


def _unwrapped(lines: Iterable[str]) -> str:
    """Join the lines of each paragraph; paragraphs are separated by blank lines."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    joined = (" ".join(paragraph.split()) for paragraph in paragraphs)
    return "\n\n".join(paragraph for paragraph in joined if paragraph)


def scripture(data_deb: Path, reader_deb: Path) -> list[Document]:
    """Return the books of the King James Bible; a verse is a paragraph, a book is a cluster.

    The text is stored in a compressed format of its own, read by the program of the second package.
    """
    with tempfile.TemporaryDirectory() as work:
        for deb in (data_deb, reader_deb):
            _run(["dpkg-deb", "-x", str(deb), work], f"unpack {deb.name}")
        reader = [f"{work}/usr/bin/bible", "-p", f"{work}/usr/lib", "-f", "gen1:1-rev22:21"]
        output = _run(reader, "read the Bible's text").decode("utf-8")
    books: dict[str, list[str]] = {}
    for line in output.splitlines():
        reference, verse = line.split(" ", 1)
        books.setdefault(re.sub(r"\d+:\d+$", "", reference), []).append(verse)
    return [
        Document("\n\n".join(verses), "scripture", f"scripture:{book}", f"scripture:{book}")
        for book, verses in books.items()
        if len("".join(verses)) >= _MIN_CHARS
    ]


def documentation(deb: Path) -> list[Document]:
    """Return the pages of Python's documentation as reStructuredText; a page is a cluster."""
    folder = "usr/share/doc/python3.11/html/_sources/"
    return [
        Document(text, "documentation", f"documentation:{page}", page)
        for path, data in members(deb, re.escape(folder) + r".*\.rst\.txt")
        if len(text := data.decode("utf-8")) >= _MIN_CHARS
        for page in [path.removeprefix(folder).removesuffix(".rst.txt")]
    ]


def perl_manual(deb: Path) -> list[Document]:
    """Return the pages of Perl's manual as POD; a page is a cluster, all release notes are one."""
    documents = []
    for path, data in members(deb, r"usr/share/perl/[^/]+/pod/[^/]+\.pod"):
        page = Path(path).stem
        text = _decode_pod(data)
        if page not in _SKIPPED_PODS and len(text) >= _MIN_CHARS:
            cluster = RELEASE_NOTES if page.endswith("delta") else f"perl:{_pod_series(page)}"
            documents.append(Document(text, "perl-manual", cluster, page))
    return documents


def _pod_series(page: str) -> str:
    """Return the series a page belongs to: the nine parts of the FAQ are one."""
    return page.rstrip("0123456789") if page.startswith("perlfaq") else page


def _decode_pod(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def handbook(deb: Path) -> list[Document]:
    """Return the chapters of the Debian handbook in English; a chapter is a cluster.

    A chapter is its pages in the order of their section numbers; pages without one are left out.
    """
    chapters: dict[int, list[tuple[tuple[int, ...], str]]] = {}
    for _, data in members(deb, r"usr/share/doc/debian-handbook/html/en-US/[^/]+\.html"):
        page = HandbookPage()
        page.feed(data.decode("utf-8"))
        numbered = re.match(r"(?:Chapter )?(\d+(?:\.\d+)*)\.\s", page.title)
        if numbered:
            section = tuple(int(number) for number in numbered.group(1).split("."))
            chapters.setdefault(section[0], []).append((section, page.text()))
    return [
        Document(text, "handbook", f"handbook:{number}", f"Debian handbook, chapter {number}")
        for number, pages in sorted(chapters.items())
        if len(text := "\n\n".join(text for _, text in sorted(pages))) >= _MIN_CHARS
    ]


class HandbookPage(HTMLParser):
    """The title and running text of one page: no navigation, paragraphs apart, listings kept."""

    _BLOCKS = frozenset({"div", "dd", "dt", "h1", "h2", "h3", "h4", "h5", "li", "p", "pre", "tr"})
    _VOID = frozenset({"br", "col", "hr", "img", "input", "link", "meta"})
    _SKIPPED_CLASSES = frozenset({"toc", "docnav"})
    _SKIPPED_IDS = frozenset({"banner", "title"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title = ""
        self._open: list[tuple[str, bool]] = []
        self._blocks: list[tuple[bool, list[str]]] = [(False, [])]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what opens; a block starts a paragraph."""
        if tag in self._VOID:
            return
        values = dict(attrs)
        classes = set((values.get("class") or "").split())
        skipped = bool(classes & self._SKIPPED_CLASSES) or values.get("id") in self._SKIPPED_IDS
        self._open.append((tag, skipped))
        self._break_block(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Start a paragraph where an empty block stands."""
        self._break_block(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost open `tag`; one that was never opened is ignored."""
        if tag not in (name for name, _ in self._open):
            return
        while self._open.pop()[0] != tag:
            continue
        self._break_block(tag)

    def handle_data(self, data: str) -> None:
        """Keep running text, and the title."""
        tags = [name for name, _ in self._open]
        if "title" in tags:
            self.title += data
        elif "body" in tags and not any(skipped for _, skipped in self._open):
            self._blocks[-1][1].append(data)

    def _break_block(self, tag: str) -> None:
        if tag in self._BLOCKS:
            self._blocks.append((any(name == "pre" for name, _ in self._open), []))

    def text(self) -> str:
        """Return the page's blocks, a blank line between them."""
        texts = (
            "".join(parts).strip("\n") if listing else " ".join("".join(parts).split())
            for listing, parts in self._blocks
        )
        return "\n\n".join(text for text in texts if text.strip())


# --- command --------------------------------------------------------------------------------------


def summary(documents: Iterable[Document]) -> dict[str, dict[str, float]]:
    """Return documents, clusters and megabytes (10⁶ bytes of UTF-8) by kind."""
    documents = list(documents)
    num_documents = Counter(document.kind for document in documents)
    clusters = Counter(kind for kind, _ in {(item.kind, item.cluster) for item in documents})
    num_bytes: Counter[str] = Counter()
    for document in documents:
        num_bytes[document.kind] += len(document.text.encode())
    return {
        kind: {
            "documents": num_documents[kind],
            "clusters": clusters[kind],
            "megabytes": round(num_bytes[kind] / 1e6, 3),
        }
        for kind in sorted(num_documents)
    }


def main() -> int:
    """Build both files and print what they hold, one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="folder for packages")
    parser.add_argument("--rebuild", action="store_true", help="write the files anew")
    options = parser.parse_args()
    try:
        split = held_out_and_training(options.cache, rebuild=options.rebuild)
    except KVLingoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({side: summary(getattr(split, side)) for side in Split._fields}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
