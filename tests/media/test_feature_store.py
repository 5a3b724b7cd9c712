"""Files of features are shared by digest and owner, and removed after the last request."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from frame.media.feature_store import FeatureStore
from frame.media.files import map_arrays, write_features

ARRAYS = {"values": np.arange(6, dtype=np.float32)}


def list_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_shared_by_requests_of_one_owner(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, grace=0.0)
    first, again, other = (store.add(b"1", ARRAYS, owner) for owner in ("a", "a", "b"))
    assert first is again
    assert first.path != other.path
    assert map_arrays(first.path, first.arrays)["values"].tolist() == ARRAYS["values"].tolist()
    for owner in ("a", "b"):
        store.release(b"1", owner)
    assert list_files(tmp_path) == [Path(first.path).name]
    store.release(b"1", "a")
    assert list_files(tmp_path) == []
    assert len(store) == 0
    assert store.acquire(b"1", "a") is None


def test_a_file_outlives_its_last_request_for_a_while(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path)
    path = store.add(b"1", ARRAYS).path
    store.release(b"1")
    assert store.add(b"1", ARRAYS).path == path
    store.sweep(is_end=True)
    assert len(store) == 1  # it is used again
    store.release(b"1")
    store.sweep()
    assert len(store) == 1
    store.sweep(is_end=True)
    assert list_files(tmp_path) == []


def test_a_second_file_of_a_digest_is_removed(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, grace=0.0)
    first, second = (store.adopt(b"1", *write_features(tmp_path, ARRAYS)) for _ in range(2))
    assert first is second
    assert len(list_files(tmp_path)) == 1


def test_a_lease_ends_once_and_takes_nothing_afterwards(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, grace=0.0)
    lease = store.open_lease("a")
    lease.add(b"1", ARRAYS)
    lease.add(b"1", ARRAYS)
    lease.close()
    lease.close()
    assert list_files(tmp_path) == []
    with pytest.raises(RuntimeError, match="has ended"):
        lease.add(b"2", ARRAYS)
    assert list_files(tmp_path) == []


def test_threads_share_files(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, grace=0.0)
    barrier = threading.Barrier(4)

    def use() -> None:
        barrier.wait()
        for number in range(50):
            lease = store.open_lease()
            for digest in (b"1", bytes([number])):
                file = lease.add(digest, ARRAYS)
                assert map_arrays(file.path, file.arrays)["values"][5] == 5
            lease.close()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list_files(tmp_path) == []


def test_its_own_folder_is_private() -> None:
    store = FeatureStore()
    folder = Path(store.add(b"1", ARRAYS).path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    del store
    assert not folder.exists()
