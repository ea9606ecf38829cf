"""What figures were computed on: the card that stands beside every measurement.

Knows the machine and the installed packages; names neither the machine nor its owner.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kvlingo import __version__


def environment_card() -> dict[str, Any]:
    """Say what the figures were computed on; nothing that names the machine or its owner."""
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": installed_version("transformers"),
        "kvlingo": __version__,
        "commit": commit_of(Path(__file__).parents[1]),
        "load": load_average(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def commit_of(repo: Path) -> str | None:
    """Return which commit the package runs from, with a + where its sources are not those; None outside a clone."""
    if not (repo / ".git").exists():
        return None
    try:
        asked = [("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--", "kvlingo", "bench")]
        commit, changed = (
            subprocess.run(["git", "-C", str(repo), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + "+" * bool(changed)


def load_average() -> float | None:
    """Return how many threads wanted a core on average in the last minute, ours too: above the cores, a time is no time."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def cpu_model() -> str | None:
    """Return the processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or None)


def usable_cores() -> int | None:
    """Return the number of cores this process may use."""
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count()


def memory_bytes() -> int | None:
    """Return the machine's memory where the system tells it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def available_bytes(device: torch.device) -> int | None:
    """Return the memory that is free on a device now, where the system tells it; a container's limit counts."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    found = [size for size in (available_to_machine(), available_to_container()) if size is not None]
    return min(found, default=memory_bytes())


def available_to_machine() -> int | None:
    """Return what Linux says can be had without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((1024 * int(kib) for kib in found), None)


def available_to_container(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return what a container's limit leaves; None where there is no limit."""
    try:
        limit, used = ((folder / f"memory.{name}").read_text(encoding="utf-8").strip() for name in ("max", "current"))
    except OSError:
        return None
    return max(int(limit) - int(used), 0) if limit.isdecimal() and used.isdecimal() else None


def installed_version(package: str) -> str | None:
    """Return a package's version without importing it, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
