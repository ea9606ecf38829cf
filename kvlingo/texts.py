"""Texts to fit and to evaluate on: where they come from, how they are cut and how they are split.

Knows files, JSON and the standard library's own prose. Knows neither tokens nor models: lengths are
counted in characters. Chat templates belong to the models; a chat record is read as its contents.
"""

import ast
import hashlib
import inspect
import json
import os
import re
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvlingo.errors import BadInput

TEXT_SUFFIXES = (".txt", ".md", ".rst")
JSON_SUFFIXES = (".json", ".jsonl")

_MIN_MODULE_CHARS = 400
_MIN_COMMENT_LINES = 4
_SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "ensurepip", "lib2to3", "site-packages", "test", "tests"})
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]")


@dataclass(frozen=True)
class Document:
    """A text with its origin.

    `kind` is the sort of text ("novel", "docstring"). `cluster` is the book, site or file it comes
    from: texts of one cluster resemble each other, so a split never separates them and a bootstrap
    draws them together. `name` tells a person which text it is.
    """

    text: str
    kind: str
    cluster: str
    name: str


class Split(NamedTuple):
    """Documents to be judged on, and documents to learn from; no cluster is on both sides."""

    held_out: list[Document]
    training: list[Document]


# --- the default corpus ---------------------------------------------------------------------------


def default_documents() -> list[Document]:
    """Return the prose that comes with every Python: its manual's topics and its docstrings.

    The order is fixed and nothing is imported but a table of strings, so the same Python gives the
    same documents; another Python version gives slightly different ones. About 3 MB.

    Raises:
        BadInput: this Python ships neither the topics nor the sources of its library.
    """
    documents = [*_manual_topics(), *_library_docstrings(Path(sysconfig.get_path("stdlib")))]
    if not documents:
        raise BadInput(
            "this Python comes without its manual and sources, so there is no default text; "
            "name files or folders of text instead"
        )
    return documents


def _manual_topics() -> list[Document]:
    """Return one document per topic of the interpreter's `help()`."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    texts = {str(text).strip(): name for name, text in sorted(topics.items(), reverse=True)}
    named = sorted((name, text) for text, name in texts.items() if text)
    return [Document(text, "manual", f"topic:{name}", f"topic:{name}") for name, text in named]


def _library_docstrings(library: Path) -> list[Document]:
    """Return one document per module under `library`: its docstrings and long comments.

    A piece that occurs twice is kept where it comes first: copied docstrings (`decimal` and
    `_pydecimal`, say) would otherwise end up on both sides of a split.
    """
    seen: set[str] = set()
    documents = []
    for path in _files(library, (".py",), _SKIPPED_FOLDERS):
        parts = path.relative_to(library).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        pieces = [piece for piece in _module_prose(path) if piece not in seen]
        seen.update(pieces)
        text = "\n\n".join(dict.fromkeys(pieces))
        if len(text) >= _MIN_MODULE_CHARS:
            documents.append(Document(text, "docstring", f"module:{parts[0]}", f"module:{module}"))
    return documents


def _module_prose(path: Path) -> list[str]:
    """Return docstrings and long comments of one source file in the order they are written."""
    try:
        with tokenize.open(path) as file:
            source = file.read()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return []
    pieces = sorted([*_docstrings(tree), *_long_comments(source)])
    return [text for _, text in pieces if text]


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each docstring, headed by the name of what it describes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is None or not text.strip():
            continue
        if isinstance(node, ast.Module):
            yield 1, text.strip()
        else:
            yield node.lineno, f"{_heading(node)}\n{text.strip()}"


def _heading(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return `class Name` or `name(arguments)`."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    return f"{node.name}({ast.unparse(node.args)})"


def _long_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of runs of whole-line comments that are long enough to be prose."""
    block: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], start=1):
        stripped = line.strip()
        if stripped.startswith("#"):
            block.append(stripped.lstrip("#"))
            continue
        if len(block) >= _MIN_COMMENT_LINES:
            yield number - len(block), inspect.cleandoc("\n".join(["", *block]))
        block = []


# --- a user's own files ---------------------------------------------------------------------------


def documents_from_paths(paths: Sequence[str | os.PathLike[str]]) -> list[Document]:
    """Read files, and every text or JSON file in folders, into documents.

    A text file is one document and one cluster. A record of a .jsonl or .json file is a document:
    a string, or an object with `text` or with `messages` (their contents, one paragraph each). A
    record may bring its own `kind`, `cluster` and `name`; without, it is a cluster of its own. A
    file that is named itself is read as text whatever its suffix; a folder gives the known suffixes
    only, without hidden files, and its empty files are passed over.

    Raises:
        BadInput: nothing to read, an unreadable or binary file, an empty text, malformed JSON.
    """
    found: dict[Path, list[Document]] = {}
    for path in (Path(path).expanduser() for path in paths):
        files = [path] if not path.is_dir() else _known_files(path)
        for file in files:
            if file.resolve() not in found:
                found[file.resolve()] = _read_file(file, may_be_empty=path.is_dir())
        if path.is_dir() and not any(found[file.resolve()] for file in files):
            raise BadInput(
                f"no text in folder {path}: expected non-empty files with one of the suffixes "
                f"{', '.join(TEXT_SUFFIXES + JSON_SUFFIXES)}; a file that is named itself may have any"
            )
    if not found:
        raise BadInput("no text given: name at least one file or folder of text")
    return [document for documents in found.values() for document in documents]


def write_documents(documents: Iterable[Document], path: Path) -> None:
    """Write one JSON object per line, as `documents_from_paths` reads it; atomically."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")
    partial.replace(path)


def _known_files(folder: Path) -> list[Path]:
    return list(_files(folder, TEXT_SUFFIXES + JSON_SUFFIXES, frozenset()))


def _files(folder: Path, suffixes: tuple[str, ...], skipped: frozenset[str]) -> Iterator[Path]:
    """Yield the files with one of `suffixes` under `folder`, hidden ones left out, sorted."""

    def fail(error: OSError) -> None:
        raise BadInput(f"can't read folder {error.filename}: {error.strerror}; check its permissions") from error

    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)
        for name in sorted(names):
            if not name.startswith(".") and name.lower().endswith(suffixes):
                yield Path(root, name)


def _read_file(path: Path, *, may_be_empty: bool) -> list[Document]:
    text = _decode(_read_bytes(path), path)
    if not text.strip():
        if may_be_empty:
            return []
        raise BadInput(f"{path} is empty: expected text; name a file that holds some")
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return _read_lines(text, path)
    if suffix == ".json":
        value = _parse_json(text, str(path))
        records = value if isinstance(value, list) else [value]
        return [_record(record, path, number) for number, record in enumerate(records, start=1)]
    return [Document(text, "text", str(path), str(path))]


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise BadInput(f"no such file or folder: {path}; check the spelling") from error
    except IsADirectoryError as error:
        raise BadInput(f"{path} is a folder; give a file") from error
    except OSError as error:
        raise BadInput(f"can't read {path}: {error.strerror}; check its permissions") from error


def _decode(data: bytes, path: Path) -> str:
    """Return `data` as text; strict, because a replaced character would be trained on."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path} is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}): "
            "convert it to UTF-8, or leave it out if it isn't text"
        ) from error
    control = _CONTROL_CHARACTERS.search(text)
    if control:
        raise BadInput(
            f"{path} looks like a binary file (control character 0x{ord(control.group()):02x} at "
            f"character {control.start()}): expected text; leave it out"
        )
    return text


def _read_lines(text: str, path: Path) -> list[Document]:
    """Return a document per non-blank line; split at newlines only (JSON may hold U+2028)."""
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            record = _parse_json(line, f"{path}, line {number}")
            documents.append(_record(record, path, number))
    return documents


def _parse_json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadInput(f"{place} is not valid JSON: {error}; correct it or leave it out") from error


def _record(record: Any, path: Path, number: int) -> Document:
    """Return the document of one JSON record."""
    place = f"{path}:{number}"
    fields = {"text": record} if isinstance(record, str) else record
    if not isinstance(fields, dict) or not ("text" in fields or "messages" in fields):
        raise BadInput(
            f'{place}: expected an object with "text" or "messages", got {_shown(record)}; '
            "rename the field or leave the record out"
        )
    text = fields["text"] if "text" in fields else _contents(fields["messages"], place)
    if not isinstance(text, str) or not text.strip():
        raise BadInput(f"{place}: expected non-empty text, got {_shown(text)}; leave the record out")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise BadInput(f"{place}: half of a surrogate pair is not text; correct the record")
    kind, cluster, name = (
        str(fields.get(field, default)) for field, default in (("kind", "text"), ("cluster", place), ("name", place))
    )
    return Document(text, kind, cluster, name)


def _contents(messages: Any, place: str) -> str:
    """Return the contents of a chat, one paragraph a message; roles and templates are left out."""
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
        raise BadInput(f'{place}: expected "messages" to be a list of objects, got {_shown(messages)}')
    contents = [_content(message.get("content"), place) for message in messages]
    return "\n\n".join(content for content in contents if content)


def _content(content: Any, place: str) -> str:
    """Return a message's text: a string, nothing (a tool call), or a list of typed parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content.strip()
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(part.strip() for part in parts if isinstance(part, str))
    raise BadInput(f'{place}: expected "content" to be text, got {_shown(content)}')


def _shown(value: Any) -> str:
    """Return `value` short enough for an error message."""
    shown = json.dumps(value, ensure_ascii=True, default=str)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def conversation_from_file(path: Path) -> str | list[dict[str, Any]]:
    """Read what is to be handed over: a text, or from a .json file a list of messages.

    Raises:
        BadInput: unreadable, binary or empty; JSON that is no list of messages with role and content.
    """
    text = _decode(_read_bytes(path), path)
    if not text.strip():
        raise BadInput(f"{path} is empty: expected a text, or a JSON list of messages")
    if path.suffix.lower() != ".json":
        return text
    messages = _parse_json(text, str(path))
    if isinstance(messages, dict) and "messages" in messages:
        messages = messages["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise BadInput(f'{path}: expected a list of {{"role": …, "content": …}}, got {_shown(messages)}')
    return messages


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


# --- cutting and splitting ------------------------------------------------------------------------


def windows(documents: Iterable[Document], *, num_chars: int, min_chars: int = 1) -> list[Document]:
    """Cut documents into consecutive pieces of at most `num_chars` characters.

    A piece ends after white space, or anywhere in a stretch without any (Chinese, base64). Nothing
    is lost or repeated but pieces with fewer than `min_chars` characters of text, which are left
    out. Pieces keep their document's kind and cluster.

    Raises:
        BadInput: `num_chars` is not positive.
    """
    if num_chars < 1:
        raise BadInput(f"a window needs at least 1 character, got {num_chars}")
    return [
        replace(document, text=piece, name=f"{document.name}#{number}")
        for document in documents
        for number, piece in enumerate(_pieces(document.text, num_chars))
        if len(piece.strip()) >= min_chars
    ]


def _pieces(text: str, num_chars: int) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = min(start + num_chars, len(text))
        if end < len(text):
            end = _last_break(text, start, end)
        yield text[start:end]
        start = end


def _last_break(text: str, start: int, end: int) -> int:
    """Return the last position in (start, end] that follows white space, else `end`."""
    for position in range(end, start, -1):
        if text[position - 1].isspace():
            return position
    return end


def split_documents(documents: Sequence[Document], *, held_out_share: float, seed: int = 0) -> Split:
    """Hold out whole clusters, about `held_out_share` of the clusters of every kind.

    Which clusters is decided by a hash of (seed, cluster), so neither the order nor other documents
    matter; kinds with one cluster are pooled. Both sides keep the order of `documents`.

    Raises:
        BadInput: a share outside (0, 1); fewer than two clusters; one text on both sides.
    """
    if not 0 < held_out_share < 1:
        raise BadInput(f"the held-out share must lie between 0 and 1, got {held_out_share}")
    strata = _strata(documents)
    if sum(len(clusters) for clusters in strata) < 2:
        raise BadInput(
            f"can't hold out documents: got {len(documents)} from fewer than two files or books; add texts from another one"
        )
    chosen: set[str] = set()
    for clusters in strata:
        ordered = sorted(clusters, key=lambda cluster: _draw(seed, cluster))
        chosen.update(ordered[: _num_held_out(len(ordered), held_out_share)])
    split = Split(
        [document for document in documents if document.cluster in chosen],
        [document for document in documents if document.cluster not in chosen],
    )
    check_disjoint(split)
    return split


def check_disjoint(split: Split) -> None:
    """Refuse a split that would judge a translator on what it has learnt.

    Raises:
        BadInput: a cluster, or a text up to white space, is on both sides.
    """
    for field, key in (("cluster", _cluster_of), ("text", _normalised_text)):
        names = {key(document): document.name for document in split.training}
        for document in split.held_out:
            if key(document) in names:
                raise BadInput(
                    f"the same {field} is held out and trained on: {document.name} and "
                    f"{names[key(document)]}; remove one of the two"
                )


def without_shared_passages(
    documents: Iterable[Document], held_out: Iterable[Document], *, num_words: int = 13
) -> list[Document]:
    """Leave out the paragraphs of `documents` that quote `held_out`.

    A paragraph quotes when any `num_words` consecutive words of it, letter case aside, occur in a
    held-out text: manuals repeat themselves across chapters, and gospels across books. Documents
    with nothing left are dropped. Source of the 13 words: GPT-3 (arXiv 2005.14165, appendix C).
    """
    known = {passage for document in held_out for passage in _passages(document.text, num_words)}

    def kept(text: str) -> str:
        paragraphs = re.split(r"(\n\s*\n)", text)
        return "".join(
            paragraph + gap
            for paragraph, gap in zip(paragraphs[::2], [*paragraphs[1::2], ""], strict=True)
            if known.isdisjoint(_passages(paragraph, num_words))
        )

    cleaned = (replace(document, text=kept(document.text)) for document in documents)
    return [document for document in cleaned if document.text.strip()]


def _passages(text: str, num_words: int) -> Iterator[str]:
    words = text.lower().split()
    for start in range(len(words) - num_words + 1):
        yield " ".join(words[start : start + num_words])


def _cluster_of(document: Document) -> str:
    return document.cluster


def _normalised_text(document: Document) -> str:
    return " ".join(document.text.split())


def _strata(documents: Sequence[Document]) -> list[list[str]]:
    """Return the clusters of each kind; kinds with a single cluster share one stratum."""
    kind_of: dict[str, str] = {}
    for document in documents:
        kind_of.setdefault(document.cluster, document.kind)
    by_kind: dict[str, list[str]] = {}
    for cluster, kind in kind_of.items():
        by_kind.setdefault(kind, []).append(cluster)
    single = [clusters[0] for clusters in by_kind.values() if len(clusters) == 1]
    strata = [clusters for clusters in by_kind.values() if len(clusters) > 1]
    if len(single) == 1 and strata:
        strata[0] = [*strata[0], *single]
        return strata
    return [*strata, single] if single else strata


def _num_held_out(num_clusters: int, share: float) -> int:
    """Return how many clusters to hold out: at least one, never all."""
    return min(max(round(share * num_clusters), 1), num_clusters - 1)


def _draw(seed: int, cluster: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{cluster}".encode()).digest()
