"""`frame plugins list | info | check | new`: what is installed, whether it works, and how to start
one's own. Reads records only."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from frame.config.resolution.plugins import BUILT_IN, FRAME_DISTRIBUTION, KEYS
from frame.config.server_sections import PluginsSection
from frame.core.errors import PluginError
from frame.core.interfaces.plugin import PluginRecord
from frame.entrypoints.cli.options import config_command
from frame.entrypoints.configuration.explain import as_data
from frame.entrypoints.configuration.sources import LoadedConfig
from frame.host.installation import install_command
from frame.host.interpreter import child_environment, python_command
from frame.interfaces.kinds import KINDS
from frame.plugins.loader import load_configured, observed_events

CHECK_SECONDS = 300
_PLUGIN_FILES = click.option(
    "--plugin", "paths", multiple=True, metavar="FILE", help="Read the plugins of a Python file too; may be repeated."
)


@click.group("plugins", help="List, inspect, check and create plugins.")
def command() -> None:
    pass


@config_command("list", help="List every plugin that is found. With who brought it and whether it can be used.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
@click.option("--kind", type=click.Choice(list(KINDS)), metavar="KIND", help="Only this kind.")
@click.option("--usable/--unusable", default=None, help="Only those that this machine can use, or only those that it cannot.")
def list_(loaded: LoadedConfig, is_json: bool, kind: str | None, usable: bool | None) -> None:
    registry = load_configured(loaded.config.plugins)
    records = [record for each in KINDS if kind in (None, each) for record in registry.records(each)]
    devices = {"cpu", "cuda"}
    if usable is not None:
        from frame.entrypoints.configuration.hardware_probe import probe  # its libraries take a while

        devices = {"cpu", *(accelerator.kind for accelerator in probe().accelerators)}
        records = [record for record in records if usable is not bool(record.problems or _missing_device(record, devices))]
    if is_json:
        failed = [dataclasses.asdict(each) for each in registry.broken]
        click.echo(json.dumps({"plugins": [as_data(record) for record in records], "broken": failed}, indent=2))
        return
    rows = [(r.kind, r.name, f"{r.distribution} {r.version}".strip(), _state(r) + _missing_device(r, devices)) for r in records]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    for row in rows:
        click.echo("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip())
    for broken in registry.broken:
        click.echo(f"broken: {broken}", err=True)


@config_command("info", help="Show one plugin: NAME or KIND/NAME.")
@click.argument("name")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def info(loaded: LoadedConfig, name: str, is_json: bool) -> None:
    registry = load_configured(loaded.config.plugins)
    records = registry.find(name)
    if is_json:
        click.echo(json.dumps([as_data(record) for record in records], indent=2))
        return
    observed = observed_events(registry)
    for record in records:
        for line in _described(record, observed.get(record.distribution, ())):
            click.echo(line)


@click.command(help="Load one plugin in a process of its own. NAME or KIND/NAME; reports success or the cause.")
@click.argument("name")
@click.option("--conformance", is_flag=True, help="Run the conformance suite of its interface too.")
@click.option("--against", "reference", metavar="REFERENCE", help="Compare it with this one, on tiny models, texts or grammars.")
@_PLUGIN_FILES
def check(name: str, conformance: bool, reference: str | None, paths: tuple[str, ...]) -> None:
    registry = load_configured(PluginsSection(paths=paths))
    for record in registry.find(name):
        _check(record, paths)
        click.echo(f"{record.kind}/{record.name}: loads ({record.target})")
        if conformance:
            _conformance(record, paths)
        if reference is not None and record.kind not in KEYS:
            raise PluginError(f"--against compares what an engine serves, and a {record.kind} is no part of an engine; leave it out.")
        if reference is not None:
            _compare(record, registry.get(record.kind, reference), paths)


@click.command(help=f"Write an installable package with a new plugin of KIND. It works, and has tests.\n\nKinds: {', '.join(KINDS)}.")
@click.argument("kind", type=click.Choice(list(KINDS)), metavar="KIND")
@click.argument("name")
@click.option("--package", metavar="PACKAGE", default="", help="Name of the package; frame-NAME by default.")
@click.option("--dir", "parent", type=click.Path(path_type=Path, file_okay=False), default=Path(), help="Folder to write the package into.")
def new(kind: str, name: str, package: str, parent: Path) -> None:
    from frame.entrypoints.tools.scaffold import write_plugin

    same = [record.distribution for record in load_configured(PluginsSection()).records(kind) if record.name == name]
    if same:
        raise PluginError(f"There is a {kind} called {name!r} already, from {same[0]}; choose another name.")
    written = write_plugin(kind, name, parent, package)
    click.echo(f"{written.distribution}: the {kind} {name!r}, in {written.folder}")
    click.echo(f"  pip install -e '{written.folder}[test]'\n  pytest {written.folder}\n  frame plugins check {kind}/{name}")


for _each in (list_, info, check, new):
    command.add_command(_each)


def _state(record: PluginRecord) -> str:
    if record.problems:
        return f"cannot be used: {'; '.join(map(str, record.problems))}"
    return record.summary


def _missing_device(record: PluginRecord, devices: set[str]) -> str:
    """What to say where the plugin runs on none of these devices."""
    able = getattr(record.capabilities, "devices", None)
    return "" if able is None or devices & set(able) else f" (runs on {' or '.join(able)}, which this machine lacks)"


def _described(record: PluginRecord, events: Sequence[str]) -> list[str]:
    """`events`: those that the record's distribution observes."""
    data = as_data(record)
    lines = [f"{record.kind}/{record.name}"]
    lines += [f"  selected by: {_selector(record)}"]
    lines += [f"  observes: {', '.join(events)} (the whole package {record.distribution})"] if events else []
    lines += [f"  {key}: {data[key]}" for key in ("summary", "distribution", "version", "target", "api", "rank") if data[key] != ""]
    lines += [f"  requires: {', '.join(record.requires)}"] if record.requires else []
    lines += [f"  capabilities.{key}: {value}" for key, value in data["capabilities"].items()]
    if record.options:
        lines += [
            f"  option {name}: {field.description or ''} [{field.get_default(call_default_factory=True)!r}]"
            for name, field in record.options.model_fields.items()
        ]
    return lines + [f"  cannot be used: {problem}" for problem in record.problems]


def _selector(record: PluginRecord) -> str:
    """The setting that selects the plugin."""
    if record.kind not in KEYS:
        return f"frame {record.name}"
    key = KEYS[record.kind]
    if not KINDS[record.kind].is_list:
        return f"{key}: {record.name}"
    is_default = record.distribution == FRAME_DISTRIBUTION and record.rank >= 0
    return f"{key}: [{record.name}]{f', or [{BUILT_IN}], the default' if is_default else ''}"


def _check(record: PluginRecord, paths: Sequence[str]) -> None:
    """Raises PluginError with the cause, also when the process was killed by its plugin."""
    command = python_command("-m", "frame.plugins.check", record.kind, record.name, *paths)
    try:
        done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise PluginError(f"{record.kind}/{record.name} does not load within {CHECK_SECONDS} seconds.") from None
    if done.returncode < 0:
        raise PluginError(f"{record.kind}/{record.name} kills its process with {signal.Signals(-done.returncode).name} when it is loaded.")
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PluginError(f"{record.kind}/{record.name} ends its process (exit code {done.returncode}) when it is loaded: {last}")
    result = json.loads(lines[-1])
    if not result["ok"]:
        raise PluginError(result["error"])


def _compare(record: PluginRecord, reference: PluginRecord, paths: tuple[str, ...]) -> None:
    """Raises PluginError where the two do not serve the same tokens, or cannot be compared."""
    who = f"{record.kind}/{record.name}"
    command = python_command("-m", "frame.testing.compare.plugins", record.kind, record.name, reference.name, *paths)
    code = subprocess.run(command, env=child_environment(), check=False).returncode
    if code < 0:
        raise PluginError(f"{who} or {reference.name} kills its process with {signal.Signals(-code).name} while it serves.")
    if code:
        raise PluginError(f"{who} does not serve what {reference.name} serves (see above).")


def _conformance(record: PluginRecord, paths: Sequence[str]) -> None:
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("frame.testing.pytest_plugin") is None:
        raise PluginError(f"The conformance suites need pytest; run {install_command('frame-serve[test-kit]')}")
    selected = [f"--frame-conformance={record.kind}:{record.name}", *(f"--frame-conformance-plugin={path}" for path in paths)]
    with tempfile.TemporaryDirectory() as folder:
        # Neither settings nor a conftest.py of the working folder and those above it are read.
        isolated = ["-c", os.devnull, "--rootdir", folder, "--noconftest", "-p", "no:cacheprovider", folder]
        command = python_command("-m", "pytest", "-q", *selected, *isolated)
        done = subprocess.run(command, env=child_environment(), check=False)
    if done.returncode:
        raise PluginError(f"{record.kind}/{record.name} does not pass the conformance suite of {record.api} (see above).")
