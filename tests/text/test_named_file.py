"""Files that settings name are read, or refused with one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from frame.core.errors import ConfigError
from frame.text.named_file import read_named


def test_a_file_is_read_or_its_setting_and_the_remedy_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    (tmp_path / "b").write_bytes(b"\xff")
    assert read_named("text.x", str(tmp_path / "a"), "name a file") == "text"
    for name, why in (("b", "it is not UTF-8 text"), ("c", "No such file or directory"), (".", "Is a directory")):
        with pytest.raises(ConfigError) as refused:
            read_named("text.x", str(tmp_path / name), "name a file")
        assert str(refused.value) == f"text.x {str(tmp_path / name)!r} cannot be read ({why}); name a file"
