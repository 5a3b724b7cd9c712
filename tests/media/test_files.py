from pathlib import Path

import numpy as np
import pytest

from frame.core.interfaces.media import MediaItem
from frame.media.files import map_features, write_features


def test_arrays_are_read_as_they_were_written(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "pixel_values": np.arange(7, dtype=np.uint8),
        "grid": np.array([[1, 2, 3]], np.int64),
        "empty": np.empty((0, 4), np.float32),
        "transposed": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    }
    path, described = write_features(tmp_path, arrays)
    item = MediaItem("image", b"", [], 0, path, described)
    for name, array in map_features(item).items():
        assert array.dtype == arrays[name].dtype
        np.testing.assert_array_equal(array, arrays[name])
    assert Path(path).stat().st_mode & 0o077 == 0


def test_mapped_arrays_outlive_the_file(tmp_path: Path) -> None:
    path, described = write_features(tmp_path, {"a": np.ones(100, np.float32)})
    item = MediaItem("image", b"", [], 0, path, described)
    mapped = map_features(item)
    Path(path).unlink()
    assert mapped["a"].sum() == 100
    with pytest.raises(FileNotFoundError):
        map_features(item)


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(array: np.ndarray) -> np.ndarray:
        raise OSError("no space left")

    monkeypatch.setattr(np, "ascontiguousarray", fail)
    with pytest.raises(OSError, match="no space"):
        write_features(tmp_path, {"a": np.ones(3)})
    assert not list(tmp_path.iterdir())
