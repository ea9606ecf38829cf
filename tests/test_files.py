"""Files are written whole or not at all."""

import errno
from pathlib import Path

import pytest

from kvlingo import files
from kvlingo.errors import BadInput
from kvlingo.files import write_file


def test_a_file_is_written_over_and_its_folder_is_made(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "file"
    for data in (b"old, and longer", b"new"):
        write_file(file, data)
        assert file.read_bytes() == data
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    file = tmp_path / "file"
    write_file(file, b"old")

    def fail(path: Path, data: bytes) -> None:
        path.write_bytes(data[:1])
        raise OSError(code, "full")

    monkeypatch.setattr(files, "write_synced", fail)
    with pytest.raises(BadInput, match=r"no space left .* free some"):
        write_file(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"can't write .* choose another place"):
        write_file(tmp_path, b"new")
    assert list(tmp_path.iterdir()) == []
