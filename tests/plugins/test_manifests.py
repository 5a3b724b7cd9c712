"""Failures of manifests and observers: each names the package, its version and what to do."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from frame.config.server_sections import PluginsSection
from frame.core.errors import PluginError
from frame.plugins import loader, manifests
from frame.plugins.loader import load_configured, load_registry, observers
from frame.plugins.registry import Provenance, Registry
from tests.plugins.faulty import Faulty, make_faulty


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    return make_faulty(tmp_path, monkeypatch)


HOOK = "from frame import hookimpl\n@hookimpl\ndef {name}({arguments}):\n    {body}\n"


def read(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, **arguments: Any) -> Registry:
    """The registry with an installed package whose manifest has this text."""
    (folder / "theirs_manifest.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "theirs_manifest", raising=False)
    found = [*loader._entry_points(), (Provenance("theirs", "2.1"), EntryPoint("theirs", "theirs_manifest", "frame"))]
    monkeypatch.setattr(loader, "_entry_points", lambda: found)
    monkeypatch.setattr(loader, "version", lambda name: "2.1")
    return load_registry(**arguments)


def test_a_manifest_that_exits_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (broken,) = read(tmp_path, monkeypatch, "raise SystemExit(3)").broken
    assert str(broken).startswith("theirs 2.1 (entry point theirs = theirs_manifest): SystemExit: 3 (")


def test_a_manifest_that_ends_the_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (broken,) = read(tmp_path, monkeypatch, "import os; os._exit(3)").broken
    assert str(broken).startswith("theirs 2.1 (entry point theirs = theirs_manifest): SystemExit: it calls os._exit(3) (")
    assert str(broken).endswith(f"({tmp_path}/theirs_manifest.py:1)")


@pytest.mark.slow
def test_a_manifest_that_crashes_the_process_leaves_its_stack(tmp_path: Path) -> None:
    """A process that the manifest forks ends as it asks."""
    manifest = tmp_path / "theirs_manifest.py"
    manifest.write_text(
        "import ctypes, os\nchild = os.fork()\nif not child:\n    os._exit(5)\n"
        "print('ended with', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\nctypes.string_at(0)\n"
    )
    code = (
        "from frame.plugins.files import load_file\nfrom frame.plugins.manifests import guarded\n"
        f"with guarded('x'):\n    load_file({str(manifest)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr
    assert f'File "{manifest}", line 6 in <module>' in done.stderr


def test_a_manifest_that_hangs_is_named_after_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert manifests.HANG_SECONDS == 10
    code = (
        "import time\nfrom frame.plugins import manifests\nmanifests.HANG_SECONDS = 0.1\n"
        "with manifests.guarded('theirs 2.1'):\n    time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 78
    assert done.stderr == (
        "frame: theirs 2.1 has not been read after 0.1 s; update or uninstall the package, or exclude it with plugins.deny\n"
    )


def test_a_slow_manifest_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert manifests.SLOW_SECONDS == 1
    monkeypatch.setattr(manifests, "SLOW_SECONDS", 0.05)
    read(tmp_path, monkeypatch, "import time; time.sleep(0.1)\n" + HOOK.format(name="on_stop", arguments="", body="pass"))
    assert "theirs 2.1 (entry point theirs = theirs_manifest) takes 0.1 s to import" in caplog.text


def test_a_slow_file_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A file has the plugin itself, which may import torch; there is no manifest to be light."""
    monkeypatch.setattr(manifests, "SLOW_SECONDS", 0.05)
    file = tmp_path / "newest.py"
    file.write_text(
        "import time; time.sleep(0.1)\nfrom frame.core.interfaces.scheduling import SchedulingPolicy\n"
        "class Newest(SchedulingPolicy):\n    def sort_waiting(self, waiting, view):\n        return waiting[::-1]\n"
    )
    load_configured(PluginsSection(paths=(str(file),)))
    assert "to import" not in caplog.text


def test_what_a_manifest_prints_does_not_reach_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path, monkeypatch, "print('hello')\n" + HOOK.format(name="on_stop", arguments="", body="pass"))
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "hello\n")


@pytest.mark.parametrize("arguments", [{"deny": ["theirs"]}, {"allow": ["others"]}], ids=["denied", "not allowed"])
def test_denied_is_said_as_denied(arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = read(tmp_path, monkeypatch, "raise RuntimeError", **arguments)
    assert registry.broken == []  # not even imported
    words = r"plugins\.allow or plugins\.deny excludes these packages, which may contain it: (frame-automata, )?theirs\."
    with pytest.raises(PluginError, match=words):
        registry.get("scheduling_policy", "fair")


def test_an_observer_of_the_start_that_fails_stops_it(faulty: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty.registry.hooks = read(
        tmp_path, monkeypatch, HOOK.format(name="on_start", arguments="resolved", body="raise RuntimeError(resolved.dtype)")
    ).hooks
    with pytest.raises(PluginError) as caught:
        faulty.start()
    text = str(caught.value)
    assert text.startswith("observer on_start of theirs 2.1 failed at start: RuntimeError: float32 (")
    assert text.endswith("; update or uninstall the package, or exclude it with plugins.deny.")


def test_an_observer_in_a_file_is_named_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "licence.py"
    file.write_text(HOOK.format(name="on_start", arguments="", body="raise RuntimeError('expired')"))
    found = observers(load_configured(PluginsSection(paths=(str(file),))))
    assert found.on_start is not None
    with pytest.raises(PluginError) as caught:
        found.on_start(resolved=None)
    text = f"observer on_start of {file} failed at start: RuntimeError: expired ({file}:4)"
    assert str(caught.value) == f"{text}; correct the file, or take it out of plugins.paths."


@pytest.mark.parametrize("event", ["on_step", "on_request_finished", "on_stop"])
def test_an_observer_that_fails_is_named_and_switched_off(
    event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = read(tmp_path, monkeypatch, HOOK.format(name=event, arguments="", body="raise RuntimeError('boom')"))
    observe = getattr(observers(registry), event)
    observe()
    observe()
    (named,) = [line for line in caplog.messages if "observer" in line]
    assert named == (
        f"observer {event} of theirs 2.1 raised and is switched off until the next start; update or uninstall the package, or exclude it "
        "with plugins.deny"
    )
