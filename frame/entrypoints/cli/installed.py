"""Subcommands of installed packages: entry points of the group `frame_commands`, each a click
command.

Used by the `frame` command. A command is imported when it is called; listing reads entry points
only.
"""

from __future__ import annotations

from importlib.metadata import Distribution, EntryPoint, entry_points

import click

from frame.core.errors import ConfigurationError, PluginError

GROUP = "frame_commands"


def find_commands() -> dict[str, list[EntryPoint]]:
    """The commands that plugins.allow and plugins.deny permit, by name. Raises ConfigurationError
    for a wrong configuration."""
    found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    if not found:
        return {}
    from frame.entrypoints.configuration.sources import load_config

    plugins = load_config().config.plugins
    allowed = None if plugins.allow is None else {_normalise(name) for name in plugins.allow}
    denied = {_normalise(name) for name in plugins.deny}
    commands: dict[str, list[EntryPoint]] = {}
    for entry in found:
        owner = _normalise(_distribution(entry).name)
        if owner not in denied and (allowed is None or owner in allowed):
            commands.setdefault(entry.name, []).append(entry)
    return commands


def list_help() -> list[tuple[str, str]]:
    """Name and origin of each command; none where the configuration is wrong, which its own
    commands report."""
    try:
        commands = find_commands()
    except ConfigurationError:
        return []
    return [(name, f"From {' and '.join(map(_describe, entries))}.") for name, entries in commands.items()]


def load_command(name: str) -> click.Command | None:
    """Import a command; None if no package has it. Raises PluginError that names the package if it
    does not load, is no click command, or another package has the same name."""
    entries = find_commands().get(name, [])
    if not entries:
        return None
    owners = [_distribution(entry).name for entry in entries]
    if len(entries) > 1:
        raise PluginError(f"The command {name!r} comes from {' and '.join(owners)}; uninstall one, or set plugins.deny: [{owners[0]}].")
    (entry,) = entries
    try:
        command = entry.load()
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # an import may raise any error, SystemExit included
        raise PluginError(
            f"The command {name!r} of {_describe(entry)} does not load from {entry.value}: {type(error).__name__}: {error}."
            f" Update the package, or uninstall it: pip uninstall {owners[0]}"
        ) from error
    if not isinstance(command, click.Command):
        raise PluginError(f"The command {name!r} of {_describe(entry)}: {entry.value} is no click command; decorate it with click.command.")
    return command


def _distribution(entry: EntryPoint) -> Distribution:
    if entry.dist is None:
        raise PluginError(f"The entry point {entry.name!r} of the group {GROUP} belongs to no distribution; install its package.")
    return entry.dist


def _describe(entry: EntryPoint) -> str:
    owner = _distribution(entry)
    return f"{owner.name} {owner.version}"


def _normalise(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
