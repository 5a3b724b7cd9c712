"""Importing the chosen plugins in a process of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from frame.config.schema import FrameConfig
from frame.core.errors import PluginError
from frame.entrypoints.configuration.plugin_imports import load_apart
from frame.entrypoints.configuration.prepare import prepare
from frame.plugins.loader import load_registry
from frame.plugins.registry import Registry
from tests.entrypoints.fork_server import run_forked

KIND = "scheduling_policy"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import no_such_kernel", f"{KIND} 'mine' (theirs 2.1) was selected but does not load from m_import:Policy: ModuleNotFoundError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", f"{KIND} 'mine' (theirs 2.1) kills its process with SIGSEGV when"),
        ("import os; os._exit(3)", f"{KIND} 'mine' (theirs 2.1) ends its process (exit code 3) when it is loaded."),
    ],
    ids=["import", "crash", "exit"],
)
def test_a_plugin_that_does_not_load_is_named(body: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "m_import.py").write_text(body)
    command = [sys.executable, "-c", "from tests.entrypoints.configuration.test_plugin_imports import load_mine; load_mine()"]
    done = run_forked(command, paths=[str(tmp_path)])
    assert done.stdout.startswith(words), done.stderr


def load_mine() -> None:
    """In a process without threads, as the command's is: a fork of another may wait for a lock."""
    prepared = prepare(FrameConfig())
    (own,) = prepared.resolved.plugins[KIND]
    registry = Registry()
    part = registry.kind(KIND, "theirs", "2.1")
    part.add("mine", "m_import:Policy")
    registry.commit(part)
    choice = own.model_copy(update={"name": "mine", "target": "m_import:Policy", "distribution": "theirs", "version": "2.1"})
    with pytest.raises(PluginError) as caught:
        load_apart(registry, prepared.resolved.model_copy(update={"plugins": {KIND: [choice]}}))
    print(caught.value)


def test_what_loads_is_not_imported_here() -> None:
    program = "from tests.entrypoints.configuration.test_plugin_imports import load_all; load_all()"
    done = run_forked([sys.executable, "-c", program])
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def load_all() -> None:
    resolved = prepare(FrameConfig()).resolved
    load_apart(load_registry(installed=False), resolved)
