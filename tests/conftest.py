"""What every test shares: no network, one thread, a fixed seed, real models only on request."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

# Before anything imports a hub client: it reads these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

# A busy machine is no failure: speed is measured in bench/, not here.
settings.register_profile("kvlingo", deadline=None)
settings.load_profile("kvlingo")

REAL_MODELS = "KVLINGO_REAL_MODELS"


def pytest_configure() -> None:
    torch.set_num_threads(1)  # tiny models; the tests run side by side instead
    if os.environ.get(REAL_MODELS, "0") == "0":
        # What is made before a test's own folder is set (shared fixtures) must not end up with the user either.
        place = tempfile.mkdtemp(prefix="kvlingo-tests-")
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        os.environ["KVLINGO_CACHE"] = place


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(REAL_MODELS, "0") != "0":
        return
    skip = pytest.mark.skip(
        reason=f"needs real weights (about 350 MB); set {REAL_MODELS}=1, or to a folder of both, to run"
    )
    for item in items:
        if item.get_closest_marker("real_model"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _all_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give real models all cores: they are tested one after another."""
    few = torch.get_num_threads()
    if request.node.get_closest_marker("real_model"):
        torch.set_num_threads(os.cpu_count() or few)
    yield
    torch.set_num_threads(few)


@pytest.fixture(autouse=True)
def _own_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a test converts out of the user's cache; real weights stay there."""
    if not request.node.get_closest_marker("real_model"):
        folder = request.getfixturevalue("tmp_path_factory").mktemp("cache", numbered=True)
        monkeypatch.setenv("KVLINGO_CACHE", str(folder))
