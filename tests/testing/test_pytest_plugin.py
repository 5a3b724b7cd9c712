"""`pytest --frame-conformance=…`: what it collects, what it says of mistakes, and the verdict that
it writes."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import Any

import pytest
import torch  # noqa: F401 - a run unloads what it imports, and torch and numpy load once in a process

from frame.core.blame import note_origin
from frame.core.errors import PluginError
from frame.core.interfaces.scheduling import SchedulingPolicy
from frame.interfaces.kinds import KINDS
from frame.plugins import loader
from frame.plugins.registry import Registry
from frame.testing import conformance

pytest_plugins = ("pytester",)


class Forgetful(SchedulingPolicy):
    """Loses the last request."""

    def sort_waiting(self, waiting: Any, view: Any) -> Any:
        return list(waiting)[:-1]


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Once for all runs: each unloads what it imports."""
    importlib.import_module("frame.config.server_sections")
    registry = loader.load_registry(installed=False)
    for selector in ("scheduling_policy:fcfs", "prefix_cache:none", "eviction_policy:lru"):
        conformance.checks(selector.partition(":")[0], conformance.find(registry, selector, conformance.Setting()))


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs pytest in this process, over our own plugins and a broken policy."""
    registry: Registry = loader.load_registry(installed=False)
    part = registry.kind("scheduling_policy", "strange", "1.0")
    part.add("forgetful", f"{__name__}:Forgetful")
    registry.commit(part)
    registry.load = lambda record, load=registry.load: Forgetful if record.name == "forgetful" else load(record)  # type: ignore[method-assign,misc]
    monkeypatch.setattr(loader, "load_registry", lambda *_, **__: registry)
    pytester.makepyfile(test_other="def test_other(): raise RuntimeError('the project own tests are not asked for')")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # tests/examples finds ours by its entry point
    return lambda *arguments: pytester.runpytest_inprocess("-p", "frame.testing.pytest_plugin", "-p", "no:cacheprovider", *arguments)


@pytest.mark.slow
def test_runs_the_checks_of_a_plugin_and_nothing_else(run: Any, pytester: pytest.Pytester) -> None:
    result = run("--frame-conformance=scheduling_policy:fcfs", "--frame-conformance-json=verdict.json")
    assert result.ret == 0
    (verdict,) = json.loads((pytester.path / "verdict.json").read_text())
    assert verdict["passed"]
    assert verdict["counts"] == {"passed": len(verdict["checks"]), "failed": 0, "skipped": 0}
    assert verdict["distribution"] == "frame-serve"
    result.assert_outcomes(passed=len(verdict["checks"]))


def test_the_default_run_says_what_thorough_adds(run: Any) -> None:
    line = "prefix_cache: spot checks of shapes; --frame-conformance-thorough adds *"
    result = run("--frame-conformance=prefix_cache:none")
    result.stdout.fnmatch_lines([line])
    run("--frame-conformance=prefix_cache:none", "--frame-conformance-thorough").stdout.no_fnmatch_line(line)


@pytest.mark.slow
def test_a_broken_plugin_fails_and_says_why(run: Any, pytester: pytest.Pytester) -> None:
    result = run("--frame-conformance=scheduling_policy:forgetful", "--frame-conformance-json=verdict.json")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*sort_waiting() returned*requests*"])
    (verdict,) = json.loads((pytester.path / "verdict.json").read_text())
    assert not verdict["passed"]
    failed = {check["name"]: check["message"] for check in verdict["checks"] if check["outcome"] == "failed"}
    assert "sort_waiting() returned none of 1 requests" in failed["order_is_a_permutation"]


def test_a_skipped_check_is_neither_passed_nor_failed(run: Any, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    def skip() -> None:
        raise conformance.SkipCheck("it cannot run here")

    def verdict(*checks: conformance.Check) -> dict[str, Any]:
        monkeypatch.setattr(conformance, "checks", lambda *_: list(checks))
        run("--frame-conformance=eviction_policy:lru", "--frame-conformance-json=verdict.json")
        (found,) = json.loads((pytester.path / "verdict.json").read_text())
        return dict(found)

    skipped, passing = conformance.Check("a", skip), conformance.Check("b", lambda: None)
    both, alone = verdict(skipped, passing), verdict(skipped)
    assert both["passed"]
    assert both["counts"] == {"passed": 1, "failed": 0, "skipped": 1}
    assert "it cannot run here" in both["checks"][0]["message"]
    assert not alone["passed"]


def test_checks_can_be_chosen_by_name(run: Any) -> None:
    run("--frame-conformance=eviction_policy:lru", "-k", "ordered_tuple").assert_outcomes(passed=1, deselected=9)


@pytest.mark.slow
def test_two_plugins_in_one_run(run: Any, pytester: pytest.Pytester) -> None:
    families = ("eviction_policy:lru", "scheduling_policy:fcfs")
    run(*(f"--frame-conformance={name}" for name in families), "--frame-conformance-json=verdict.json")
    verdicts = json.loads((pytester.path / "verdict.json").read_text())
    assert [verdict["plugin"] for verdict in verdicts] == list(families)
    assert all(verdict["passed"] and verdict["checks"] for verdict in verdicts)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--frame-conformance=attention_bakend:torch_native"], "*did you mean 'attention_backend'*"),
        (["--frame-conformance=attention_backend"], "*Write KIND:NAME*"),
        (["--frame-conformance=attention_backend:torch_nativ"], "*did you mean 'torch_native'*"),
        (["--frame-conformance=eviction_policy:lru", "--frame-conformance-options={"], "*Expecting*"),
    ],
)
def test_mistakes_are_usage_errors(run: Any, arguments: list[str], sentence: str) -> None:
    result = run(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([sentence])


def test_without_the_option_nothing_changes(run: Any, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_other="def test_other(): pass")
    run().assert_outcomes(passed=1)


def test_without_the_option_no_torch_is_loaded() -> None:
    code = "import sys, frame.testing, frame.testing.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_constructor_that_raises_is_named() -> None:
    class Broken(Forgetful):
        def __init__(self, context: Any, options: Any = None) -> None:
            raise RuntimeError("boom")

    record = loader.load_registry(installed=False).get("scheduling_policy", "fcfs")
    note_origin(Broken, record, KINDS[record.kind].change)
    subject = conformance.Subject(record, Broken, None, conformance.Setting(device="cpu"))
    with pytest.raises(PluginError, match=r"Broken.__init__ in the conformance suite: RuntimeError: boom"):
        conformance.checks("scheduling_policy", subject)
