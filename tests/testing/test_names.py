"""`frame.testing` offers what it lists, and loads nothing until it is asked."""

from __future__ import annotations

import subprocess
import sys

import frame.testing


def test_every_listed_name_is_there() -> None:
    for name in frame.testing.__all__:
        assert getattr(frame.testing, name).__name__ == name
    assert set(frame.testing.__all__) <= set(dir(frame.testing))


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, frame.testing, frame.testing.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
