"""The pytest side of the conformance suites: `pytest --frame-conformance=KIND:NAME`.

Loaded by pytest in every project that has frame installed, so it imports nothing heavy at the top
and does nothing without its option.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from frame.testing.conformance import Check, Subject

_GROUP = "frame"
_CPU_SECONDS = "frame_cpu_seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup(_GROUP, "frame: conformance of plugins")
    group.addoption(
        "--frame-conformance",
        action="append",
        default=[],
        metavar="KIND:NAME",
        help="Run the conformance suite of a plugin that is installed, e.g. attention_backend:torch_native; may be given again.",
    )
    group.addoption("--frame-conformance-json", metavar="FILE", help="Write the verdict as JSON.")
    group.addoption("--frame-conformance-device", default="cpu", metavar="DEVICE", help="Where to check: cpu (default) or cuda.")
    group.addoption("--frame-conformance-thorough", action="store_true", help="More and larger cases.")
    group.addoption(
        "--frame-conformance-plugin", action="append", default=[], metavar="FILE", help="Read the plugins of a file; may be given again."
    )
    group.addoption("--frame-conformance-options", default="{}", metavar="JSON", help="The plugin's own options, as a JSON object.")


def pytest_configure(config: pytest.Config) -> None:
    selectors = config.getoption("--frame-conformance")
    if selectors:
        config.pluginmanager.register(ConformanceRun(config, selectors), "frame-conformance-run")


class ConformanceRun:
    """One run with suites selected: collects nothing but their checks, and writes the verdict."""

    def __init__(self, config: pytest.Config, selectors: list[str]) -> None:
        self._config = config
        self._selectors = selectors
        self._reports: dict[str, dict[str, Any]] = {}
        self._cpu_seconds: dict[str, float] = {}  # by selector

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool:
        return True  # the project's own tests are not what was asked for

    @pytest.hookimpl(tryfirst=True)  # before -k and -m choose among the items
    def pytest_collection_modifyitems(self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
        items[:] = [item for selector in self._selectors for item in self._collect(session, selector)]
        session.testscollected = len(items)

    def _collect(self, session: pytest.Session, selector: str) -> Iterable[pytest.Item]:
        from frame.core.errors import PluginError
        from frame.testing import conformance

        try:
            checks = conformance.checks(selector.partition(":")[0], self._subject(selector))
        except PluginError as error:
            raise pytest.UsageError(str(error)) from error
        for check in checks:
            yield ConformanceItem.from_parent(session, name=f"{selector}[{check.name}]", check=check)

    def _subject(self, selector: str) -> Subject:
        from frame.config.server_sections import PluginsSection
        from frame.core.errors import PluginError
        from frame.plugins.loader import load_configured
        from frame.testing import conformance

        config = self._config
        try:
            setting = conformance.Setting(
                device=config.getoption("--frame-conformance-device"),
                thorough=config.getoption("--frame-conformance-thorough"),
                options=json.loads(config.getoption("--frame-conformance-options")),
            )
            plugins = PluginsSection(paths=tuple(config.getoption("--frame-conformance-plugin")))
            return conformance.find(load_configured(plugins), selector, setting)
        except (PluginError, json.JSONDecodeError) as error:
            raise pytest.UsageError(str(error)) from error

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, seconds in report.user_properties if report.when == "call" else ():
            if name == _CPU_SECONDS:
                selector = next(each for each in self._selectors if f"{each}[" in report.nodeid)
                self._cpu_seconds[selector] = self._cpu_seconds.get(selector, 0.0) + float(str(seconds))
        entry = self._reports.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0, "message": None})
        entry["seconds"] = round(entry["seconds"] + report.duration, 4)
        if report.outcome != "passed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            entry.update(outcome=report.outcome, message=str(reason))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The time of each suite, and what the default run leaves out."""
        from frame.testing.conformance import THOROUGH

        for selector, seconds in self._cpu_seconds.items():
            terminalreporter.write_line(f"{selector}: {seconds:.1f} s of CPU time")
        kinds = dict.fromkeys(selector.partition(":")[0] for selector in self._selectors)
        for kind in () if self._config.getoption("--frame-conformance-thorough") else kinds:
            if kind in THOROUGH:
                terminalreporter.write_line(f"{kind}: spot checks of shapes; --frame-conformance-thorough adds {THOROUGH[kind]}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        path = self._config.getoption("--frame-conformance-json")
        if path and not hasattr(self._config, "workerinput"):  # under xdist, the reports meet in the controller
            verdict = [self._verdict(selector, self._subject(selector)) for selector in self._selectors]
            Path(path).write_text(json.dumps(verdict, indent=2) + "\n")

    def _verdict(self, selector: str, subject: Subject) -> dict[str, Any]:
        prefix = f"{selector}["
        entries = {key.partition(prefix)[2][:-1]: entry for key, entry in self._reports.items() if prefix in key}
        record = subject.record
        capabilities, outcomes = record.capabilities, {entry["outcome"] for entry in entries.values()}
        return {
            "plugin": selector,
            "api": record.api,
            "target": record.target,
            "distribution": record.distribution,
            "version": record.version,
            "capabilities": asdict(capabilities) if is_dataclass(capabilities) and not isinstance(capabilities, type) else None,
            "device": subject.setting.device,
            "machine": _machine(subject.setting.device),
            "thorough": subject.setting.thorough,
            "passed": "passed" in outcomes and "failed" not in outcomes,  # skipped checks say nothing
            "counts": {outcome: sum(e["outcome"] == outcome for e in entries.values()) for outcome in ("passed", "failed", "skipped")},
            "checks": [{"name": name, **entry} for name, entry in entries.items()],
        }


class ConformanceItem(pytest.Item):
    """One check as a pytest item."""

    def __init__(self, *, check: Check, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._check = check

    def runtest(self) -> None:
        from frame.testing.conformance import SkipCheck

        began = os.times()
        try:
            self._check.run()
        except SkipCheck as reason:
            pytest.skip(str(reason))
        finally:  # with processes that have ended
            self.user_properties.append((_CPU_SECONDS, sum(os.times()[:4]) - sum(began[:4])))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, AssertionError) and excinfo.value.args:
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        return self.path, None, self.name


def _machine(device: str) -> dict[str, Any]:
    import torch

    from frame.plugins.devices import open_platform

    model_config: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }
    device_platform = open_platform(device)
    if device_platform.compute_capability is not None:
        model_config["gpu"] = device_platform.device_name
        model_config["compute_capability"] = list(device_platform.compute_capability)
    return model_config
