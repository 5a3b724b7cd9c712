"""Subcommands of packages and files (kind `cli_command`): entry points of the group
`frame_commands`, and the classes of plugin files.

Used by the `frame` command. A command is imported when it is called; help reads entry points only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from types import MappingProxyType

import click

from frame.core.errors import ConfigurationError, PluginError

GROUP = "frame_commands"
KIND = "cli_command"
PACKAGES: Mapping[str, str] = MappingProxyType({"quantize": "frame-quantize"})  # a command -> the package of ours that has it


def list_help(paths: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Name and origin of each command of packages, and of the files `paths`; none where the
    configuration is wrong, which its own commands report. Raises PluginError for a file that cannot
    be read."""
    entries = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    if not entries and not paths:
        return []
    from frame.config.server_sections import PluginsSection
    from frame.entrypoints.configuration.sources import load_config
    from frame.plugins.loader import load_commands

    try:
        plugins = load_config().config.plugins
    except ConfigurationError:
        plugins = PluginsSection(allow=())
    origins: dict[str, list[str]] = {}
    for record in load_commands(plugins.model_copy(update={"paths": tuple(paths)})).records(KIND):
        if not any(problem.sentence.startswith("plugins.deny") for problem in record.problems):
            origins.setdefault(record.name, []).append(record.distribution + (f" {record.version}" if record.version else ""))
    return [(name, f"From {' and '.join(owners)}.") for name, owners in sorted(origins.items())]


def load_command(name: str, paths: Sequence[str] = ()) -> click.Command | None:
    """Import and make a command of a package, of `plugins.paths` or of the files `paths`; None if
    there is none of this name. Raises ConfigurationError that names the plugin at fault."""
    from frame.core.blame import blaming
    from frame.entrypoints.configuration.sources import load_config
    from frame.interfaces.cli import CommandContext
    from frame.plugins.loader import load_commands

    plugins = load_config().config.plugins
    registry = load_commands(plugins.model_copy(update={"paths": (*plugins.paths, *paths)}))
    if all(record.name != name for record in registry.records(KIND)):
        return None
    record = registry.get(KIND, name)
    target = registry.load(record)
    record = replace(record, options=record.options or getattr(target, "Options", None))
    options = registry.options(record, plugins.options.get(f"{KIND}/{name}", {}))
    with blaming("when it is called"):
        command = target(CommandContext(), options).make_command()
    if not isinstance(command, click.Command):
        raise PluginError(f"{KIND} {name!r} ({record.distribution}): make_command returns no click command; decorate it.")
    return command
