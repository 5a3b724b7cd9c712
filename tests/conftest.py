"""For all tests: child processes import from this checkout, TLS clients trust one authority,
garbage collections skip what is there when a file begins, and `covering` and `pairwise` are
applied.

Clients read the certificates of all authorities whenever they are made, 25 ms of CPU each; the
tests make thousands, to servers without TLS.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.covering import mark_exhaustive
from tests.metadata import keep_metadata

# Processes of frame do not import from the working folder, and some run a module of the tests.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))

os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("authority.pem"))  # read by Python, httpx and the libraries of clients

keep_metadata()
gc.disable()  # till the tests are collected: what imports make stays alive, and was traversed for a fifth of their time


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for servers whose text does not matter."""
    from frame.testing.checkpoints import make_checkpoint

    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("checkpoints") / "tiny-llama")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of a checkpoint, for updates of weights."""
    from frame.testing.checkpoints import make_checkpoint

    folder = tmp_path_factory.mktemp("versions")
    return [make_checkpoint("Qwen3ForCausalLM", folder / f"v{seed}", seed) for seed in range(2)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave cases of products to `make test-full`. Files with slow tests run first: none of these
    is left for one process at the end."""
    mark_exhaustive(items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def _freeze() -> None:
    """Take what is alive from the objects that collections traverse."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """The modules of tests and libraries stay alive: a collection, which each capture of graphs
    begins with, would traverse their objects every time."""
    _freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """After the last test of a file, the same for the libraries that its tests imported and for
    what they cached."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        _freeze()
    return result
