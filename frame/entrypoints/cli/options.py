"""Adds the configuration flags to a command: `--config`, `--set` and one flag per setting.

Use `@config_command(help=…)` in place of `@click.command`; the function receives `loaded:
LoadedConfig` and its own options.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from frame.core.errors import did_you_mean
from frame.entrypoints.configuration.flat_settings import ALIASES, OPTIONS_KEY, Setting, settings
from frame.entrypoints.configuration.sources import LoadedConfig, load_config
from frame.entrypoints.configuration.tier_flags import TIER_FLAGS

HELP = "frame.help"  # the key of a context's `meta` that names the flags to show
COMMON, OWN, ALL = "common", "own", "all"
COMMON_FLAGS = frozenset(
    {"model", "served-model-name", "tp", "dtype", "quantization", "max-model-len", "mem-fraction-static", "max-running-requests"}
    | {"tool-call-parser", "reasoning-parser", "host", "port", "api-key", "plugin"}
)
OWN_TITLE = "Options"
_SETTINGS = "Settings: "
_PREFIX = "setting_"  # of parameter names, so that a command's own options do not collide with settings


class SettingOption(click.Option):
    """A flag that sets a field of the configuration. Help groups these flags by section."""

    section = "Configuration"


class ConfigCommand(click.Command):
    """A command whose help lists its own options first, then the flags of settings: the common
    ones, those of a section, or all."""

    _help: click.Option | None = None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        arguments = list(args)  # click takes those that it has read out of the list
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption:
            from frame.entrypoints.configuration.equivalents import describe_flags

            known = [name for param in self.params for name in (*param.opts, *param.secondary_opts)]
            if hints := describe_flags(arguments, known):
                raise click.UsageError("\n".join(hints), ctx) from None
            raise
        except click.UsageError as error:
            if not error.message.startswith("Got unexpected extra argument"):
                raise
            raise click.UsageError(f"{error.message}; name the model with --model", ctx) from None  # as other servers take it

    @functools.cached_property
    def sections(self) -> list[str]:
        """The sections of the settings that this command has flags of."""
        titles = dict.fromkeys(param.section for param in self.params if isinstance(param, SettingOption))
        return [title.removeprefix(_SETTINGS) for title in titles if title.startswith(_SETTINGS)]

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        names = self.get_help_option_names(ctx)
        if self._help is None or set(self._help.opts) != set(names):  # a context may have other names
            self._help = click.Option(
                names, is_flag=False, flag_value=COMMON, is_eager=True, expose_value=False, callback=_show_help,
                metavar="[SECTION|all]", help="Show this message, the flags of a section of the settings, or all flags.",
            )  # fmt: skip
        return self._help

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags that `ctx.meta[HELP]` names: `common`, `own`, `all` or those of a
        section."""
        which = ctx.meta.get(HELP, COMMON)
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            title = _find_title(param, which)
            line = param.get_help_record(ctx)
            if title is not None and line is not None:
                groups.setdefault(title, []).append(line)
        for title in sorted(groups, key=lambda title: title != OWN_TITLE):
            with formatter.section(title):
                formatter.write_dl(groups[title])
        if which == COMMON:
            formatter.write_paragraph()
            formatter.write_text(
                f"--help all shows all flags, --help SECTION those of a section of the settings: {', '.join(self.sections)}."
            )


def _find_title(param: click.Parameter, which: str) -> str | None:
    """The title under which the help `which` lists an option; None if it does not."""
    if not isinstance(param, SettingOption):
        return OWN_TITLE if which in (COMMON, OWN, ALL) else None
    if which == COMMON and param.section.startswith(_SETTINGS):
        return "Common settings" if param.opts[0].removeprefix("--") in COMMON_FLAGS else None
    return param.section if which in (COMMON, ALL, param.section.removeprefix(_SETTINGS)) else None


def _show_help(ctx: click.Context, param: click.Parameter, which: str | None) -> None:
    if which is None or ctx.resilient_parsing:
        return
    sections = ctx.command.sections if isinstance(ctx.command, ConfigCommand) else []
    if which not in (COMMON, ALL, *sections):
        hint = did_you_mean(which, sections) or f"; sections: {', '.join(sections)}"
        raise click.UsageError(f"The settings have no section {which!r}{hint}", ctx)
    ctx.meta[HELP] = which
    click.echo(ctx.get_help())
    ctx.exit()


class FiniteRange(click.FloatRange):
    """A number in a range; NaN, which passes click's comparisons, and infinity are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class ParsedType(click.ParamType):
    """An option's type: `parse` makes the value of its text, and its ValueError is the error."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_output(text: str) -> Path:
    """A file that can be written. Raises ValueError."""
    path = Path(text)
    if path.is_dir():
        raise ValueError(f"{text!r} is a folder; name a file")
    try:
        if path.exists():
            can_write = os.access(path, os.W_OK)
        else:  # permissions do not tell it of every file system
            path.open("xb").close()
            path.unlink()
            can_write = True
    except OSError:
        can_write = False
    if not can_write:
        raise ValueError(f"{text!r} cannot be written; name a file in a folder that exists and is writable")
    return path


OUTPUT_FILE = ParsedType("FILE", parse_output)  # checked before the work whose result it gets


def join_options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One decorator of several `click.option`, in their order."""
    return lambda function: functools.reduce(lambda decorated, option: option(decorated), reversed(options), function)


def config_command(name: str | None = None, **attributes: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """`click.command` with all configuration flags; wrong values end it with exit code 78."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        return click.command(name, cls=ConfigCommand, **attributes)(config_options(function))

    return decorate


def refuse_engine_flags(loaded: LoadedConfig) -> None:
    """Raise UsageError for a flag of an engine beside --base-url."""
    for key, source in loaded.sources.items():
        if source.startswith("flag ") and key != "server.api_key":
            raise click.UsageError(f"{source.removeprefix('flag ')} has no effect on the server that --base-url names; leave one out")


def config_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags only; the decorated function is called with `loaded=LoadedConfig`."""

    @functools.wraps(function)
    def wrapped(*args: Any, config_file: str | None, set_values: tuple[str, ...], **options: Any) -> Any:
        flags = {key.removeprefix(_PREFIX): options.pop(key) for key in list(options) if key.startswith(_PREFIX)}
        flags = {key: ",".join(value) or None if isinstance(value, tuple) else value for key, value in flags.items()}
        return function(*args, loaded=load_config(config_file, flags, set_values), **options)

    decorated: Callable[..., Any] = wrapped
    for name, (key, _, text) in ALIASES.items():
        shown = _option_class(key.partition(".")[0])
        decorated = click.option(f"--{name}", _parameter(name), cls=shown, is_flag=True, default=None, help=text)(decorated)
    for name, (metavar, text) in reversed(list(TIER_FLAGS.items())):
        shown = _option_class("cache")
        decorated = click.option(
            f"--{name}", _parameter(name), cls=shown, is_flag=metavar is None, metavar=metavar, default=None, help=text
        )(decorated)
    for setting in reversed(list(settings())):
        if setting.path != OPTIONS_KEY:
            decorated = _flag(setting)(decorated)
    decorated = click.option(
        "--set", "set_values", cls=SettingOption, multiple=True, metavar="KEY=VALUE",
        help="Set a setting by its key; plugin options: plugins.options.KIND/NAME.KEY=VALUE.",
    )(decorated)  # fmt: skip
    return click.option(
        "--config", "config_file", cls=SettingOption, metavar="FILE", help="YAML file with settings. Default: the file in FRAME_CONFIG."
    )(decorated)


def _flag(setting: Setting) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    section = _option_class(setting.path[0])
    text = f"{setting.description.replace('`', '')} [{_shown_default(setting)}]"
    if setting.shape == "switch":
        declaration = f"--{setting.flag}/--no-{setting.flag}"
        return click.option(declaration, _parameter(setting.flag), cls=section, default=None, help=text)
    is_list = setting.shape == "list"  # given once with commas, or several times
    return click.option(f"--{setting.flag}", _parameter(setting.flag), cls=section, metavar=_metavar(setting), multiple=is_list, help=text)


def _shown_default(setting: Setting) -> str:
    if setting.default is None:
        return "auto" if setting.is_open else "not set"
    if isinstance(setting.default, bool):
        return "on" if setting.default else "off"
    if isinstance(setting.default, tuple):
        return ",".join(setting.default) or "none"
    return str(setting.default)


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "|".join(("auto", *setting.choices) if setting.is_open else setting.choices)
    if setting.shape == "list":
        return "A,B,…"
    return {int: "N", float: "X", str: "TEXT"}.get(setting.accepts[0] if setting.accepts else str, "VALUE")


def _option_class(section: str) -> type[SettingOption]:
    return type("SectionOption", (SettingOption,), {"section": f"{_SETTINGS}{section}"})


def _parameter(flag: str) -> str:
    return _PREFIX + flag.replace("-", "_")
