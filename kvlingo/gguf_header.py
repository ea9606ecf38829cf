"""The header of a .gguf file, read in a fraction of a second.

Knows the file format (github.com/ggml-org/ggml/blob/master/docs/gguf.md). The usual readers build an object for each of a
million vocabulary strings; here they are stepped over, and cut out only when asked for. Does not know models.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvlingo.errors import BadInput

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY, FLOAT32 = 8, 9, 0
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
ALIGNMENT = 32
LONG_ARRAY = 4096  # vocabularies; what describes layers is shorter
TOKENS = "tokenizer.ggml.tokens"
ALIGNMENT_KEY = "general.alignment"


@dataclass(frozen=True)
class GgufHeader:
    """What a file says before its tensors.

    Fields:
        entries: key → the bytes of its type and value; long arrays are left out.
        lengths: key → how many items an array has, long ones included.
        tensors: the tensors' names.
        pieces: the vocabulary in the order of its ids, as bytes.
    """

    version: int
    entries: dict[str, bytes]
    lengths: dict[str, int]
    tensors: tuple[str, ...]
    pieces: tuple[bytes, ...]

    def stub(self) -> bytes:
        """Return a small file that says the same of the model, without vocabulary and with one number for each tensor.

        For a reader that maps keys to a config and takes a minute over the vocabulary.
        """
        entries = {key: value for key, value in self.entries.items() if key != ALIGNMENT_KEY}
        parts = [MAGIC, struct.pack("<IQQ", self.version, len(self.tensors), len(entries))]
        parts += [packed(key) + value for key, value in entries.items()]
        parts += [
            packed(name) + struct.pack("<IQIQ", 1, 1, FLOAT32, ALIGNMENT * number)
            for number, name in enumerate(self.tensors)
        ]
        head = b"".join(parts)
        return head + bytes(-len(head) % ALIGNMENT + ALIGNMENT * len(self.tensors))


def packed(text: str) -> bytes:
    """Return a string as the format keeps it: its length in bytes, then UTF-8."""
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def read_gguf_header(file: Path) -> GgufHeader:
    """Read the header of a .gguf file. Raises `BadInput` for what is none, or is cut short."""
    if not file.is_file():
        raise BadInput(f"{file} does not exist; give the path of a .gguf file")
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(data, file)
    except (struct.error, ValueError, IndexError, UnicodeDecodeError, KeyError) as error:
        raise BadInput(f"{file} is damaged or cut short in its header ({error}); download it again") from error


def _read(data: mmap.mmap, file: Path) -> GgufHeader:
    if data[:4] != MAGIC:
        raise BadInput(f"{file} is not a GGUF file (no GGUF magic); download it again")
    version, tensors, keys = struct.unpack_from("<IQQ", data, 4)
    if version not in VERSIONS:
        raise BadInput(f"{file} is GGUF version {version}, got to read {VERSIONS}; convert it with a current llama.cpp")
    place = 4 + struct.calcsize("<IQQ")
    entries: dict[str, bytes] = {}
    lengths: dict[str, int] = {}
    pieces: tuple[bytes, ...] = ()
    for _ in range(keys):
        key, place = _text(data, place)
        end, length = _end_of_value(data, place)
        if length is not None:
            lengths[key] = length
        if key == TOKENS:
            pieces = tuple(_strings(data, place + 16, length or 0))
        if length is None or length < LONG_ARRAY:
            entries[key] = data[place:end]
        place = end
    names = []
    for _ in range(tensors):
        name, place = _text(data, place)
        (dims,) = struct.unpack_from("<I", data, place)
        place += 4 + 8 * dims + 12
        names.append(name)
    if place > len(data):
        raise ValueError("its end is missing")
    return GgufHeader(version, entries, lengths, tuple(names), pieces)


def _text(data: mmap.mmap, place: int) -> tuple[str, int]:
    (size,) = struct.unpack_from("<Q", data, place)
    end = place + 8 + size
    if end > len(data):
        raise ValueError("its end is missing")
    return data[place + 8 : end].decode(), end


def _end_of_value(data: mmap.mmap, place: int) -> tuple[int, int | None]:
    """Return where the value at `place` (its type first) ends, and its number of items if it is an array."""
    (kind,) = struct.unpack_from("<I", data, place)
    if kind == STRING:
        return _text(data, place + 4)[1], None
    if kind != ARRAY:
        return place + 4 + SCALAR_BYTES[kind], None
    of, length = struct.unpack_from("<IQ", data, place + 4)
    place += 16
    if of == STRING:
        for _ in range(length):
            place += 8 + int.from_bytes(data[place : place + 8], "little")
            if place > len(data):
                raise ValueError("its end is missing")
        return place, length
    return place + SCALAR_BYTES[of] * length, length


def _strings(data: mmap.mmap, place: int, count: int) -> Iterator[bytes]:
    for _ in range(count):
        end = place + 8 + int.from_bytes(data[place : place + 8], "little")
        yield data[place + 8 : end]
        place = end
