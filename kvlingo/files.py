"""Writing files whole or not at all, and checking that they are what was written, with errors that say what to do.

Knows the file system only. Everything is written beside its place first, on the same disk, and then takes the place of
what was there: a full disk or Ctrl-C leaves the old state and no litter.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvlingo.errors import BadArtifact, BadInput


@contextmanager
def clear_write_errors(place: Path, num_bytes: int, *, kept: str = "nothing was changed") -> Iterator[None]:
    """Turn the system's refusals to write `num_bytes` to `place` into `BadInput`, which says what was `kept`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BadInput(
                f"no space left to save {place} ({num_bytes / 1e6:.1f} MB); "
                f"free some or choose another place, and run again: {kept}"
            ) from error
        raise BadInput(f"can't write {place} ({error.strerror or error}); choose another place: {kept}") from error


def verify_file(file: Path, sha256: str, advice: str, *, num_bytes: int = 0) -> None:
    """Raise `BadArtifact` with `advice` unless a file is byte for byte what was written.

    `num_bytes`: fewer tell that it was cut off, without reading it.
    """
    if not file.is_file():
        raise BadArtifact(f"{file} is missing; {advice}")
    size = file.stat().st_size
    if size < num_bytes:
        raise BadArtifact(f"{file} is truncated: {size} of {num_bytes} bytes; {advice}")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != sha256:
        raise BadArtifact(f"{file} is damaged: SHA-256 {short(digest)}, expected {short(sha256)}; {advice}")


def short(digest: str) -> str:
    """Return the first characters of a hash, enough to tell two apart."""
    return digest[:12]


def write_file(file: Path, data: bytes) -> None:
    """Write one file, its folder included.

    Raises:
        BadInput: the place can't be written, or the disk is full.
    """
    partial = sibling(file, "partial")
    with clear_write_errors(file, len(data)):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_synced(partial, data)
            partial.replace(file)
            sync_folder(file.parent)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def whole_file(file: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a path to write to; what is there at the end takes the place of `file`, or nothing does.

    Raises:
        BadInput: the place can't be written, or the disk is full.
    """
    partial = sibling(file, "partial")
    with clear_write_errors(file, num_bytes):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)


def replace_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Put `files` into `folder`, all of them or none; what else is in it stays.

    Raises:
        BadInput: the place can't be written, or the disk is full.
    """
    partial, old = sibling(folder, "partial"), sibling(folder, "old")
    with clear_write_errors(folder, sum(map(len, files.values()))):
        try:
            partial.mkdir(parents=True)
            for name, data in files.items():
                write_synced(partial / name, data)
            sync_folder(partial)
            if folder.exists():
                folder.rename(old)
            partial.rename(folder)
            sync_folder(folder.parent)
        finally:
            if old.exists() and not folder.exists():
                old.rename(folder)
            elif old.exists():
                retire(old, folder, set(files))
            shutil.rmtree(partial, ignore_errors=True)


def retire(old: Path, new: Path, replaced: set[str]) -> None:
    """Move everything but what was replaced from the old folder to the new one; remove the old."""
    for entry in old.iterdir():
        if entry.name not in replaced:
            entry.rename(new / entry.name)
    shutil.rmtree(old, ignore_errors=True)


def sibling(place: Path, role: str) -> Path:
    """Return a hidden name beside `place` that nobody else uses."""
    return place.with_name(f".{place.name}.{os.getpid()}-{secrets.token_hex(4)}.{role}")


def write_synced(file: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has a folder's entries."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
