"""Which plugin an error comes from."""

from __future__ import annotations

import importlib
import types
from pathlib import Path

import pytest

from frame.core.blame import blaming, describe, explain, find_culprit, note_origin
from frame.core.errors import ConfigurationError, PluginError
from frame.core.interfaces.plugin import PluginRecord
from frame.interfaces.kinds import KINDS

CODE = """
class First:
    def call(self, other):
        return other.fail()

class Second:
    def fail(self):
        return shared()

def shared():
    raise KeyError("x")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A package with two plugins."""
    (tmp_path / "blamed_plugins.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("blamed_plugins")
    for name in ("First", "Second"):
        record = PluginRecord("moe_runner", name.lower(), f"blamed_plugins:{name}", "moe_runner/2", distribution="blamed", version="3")
        note_origin(getattr(module, name), record, KINDS[record.kind].change)
    return module


def test_the_innermost_plugin_is_blamed_and_not_its_caller(package: types.ModuleType) -> None:
    with pytest.raises(KeyError) as caught:
        package.First().call(package.Second())
    found = find_culprit(caught.value)
    assert found is not None
    assert (found[0].name, found[1]) == ("second", "Second.fail")
    assert explain(caught.value).startswith("moe_runner 'second' (blamed 3) failed in Second.fail: KeyError: 'x'; name another plugin with")


def test_a_cause_in_a_plugin_is_found_behind_another_error(package: types.ModuleType) -> None:
    try:
        try:
            package.Second().fail()
        except KeyError as error:
            raise RuntimeError("outer") from error
    except RuntimeError as error:
        found = find_culprit(error)
    assert found is not None
    assert str(found[0]) == "moe_runner 'second' (blamed 3)"


def test_errors_of_no_plugin_stay_as_they_are(package: types.ModuleType) -> None:
    for error in (RuntimeError("mine"), ConfigurationError("theirs"), MemoryError()):
        with pytest.raises(type(error)) as caught, blaming("at start"):
            raise error
        assert caught.value is error
    assert explain(RuntimeError("mine")) == "RuntimeError: mine"
    assert describe(RuntimeError()) == "builtins.RuntimeError"


def test_a_plugin_is_blamed_with_the_phase(package: types.ModuleType) -> None:
    words = r"^moe_runner 'second' \(blamed 3\) failed in Second.fail at start: KeyError: 'x' \("
    with pytest.raises(PluginError, match=words), blaming("at start"):
        package.Second().fail()
