"""`frame config check | explain | schema | show`: checks and prints the configuration, its sources
and the reasons of resolved values. Loads no weights; only `check` imports plugins."""

from __future__ import annotations

import json

import click

from frame.config.resolve import pinned
from frame.config.resolved import Resolved
from frame.config.server_sections import PluginsSection
from frame.core.errors import ConfigError, ConfigurationError, did_you_mean
from frame.core.garbage_collection import paused_collection
from frame.entrypoints.cli.options import config_command
from frame.entrypoints.configuration.explain import Explained, as_yaml, options
from frame.entrypoints.configuration.explain import explain as explain_one
from frame.entrypoints.configuration.flat_settings import by_key, by_keyword
from frame.entrypoints.configuration.json_schema import config_schema
from frame.entrypoints.configuration.plugin_imports import load_apart
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.configuration.sources import EVERY_KEY, SECRETS, LoadedConfig
from frame.plugins.loader import load_configured


@click.group("config", help="Check, explain and show the configuration.")
def command() -> None:
    pass


@config_command(help="Check what `frame serve` checks at its start. These are settings, ports, tokenizer, plugins, weights, memory.")
@click.pass_context
def check(ctx: click.Context, loaded: LoadedConfig) -> None:
    is_served = not loaded.config.parallel.node_rank
    prepared = prepare(loaded.config, is_served=is_served)
    resolved = prepared.resolved
    with paused_collection():
        import frame.entrypoints.processes.build_engine  # noqa: F401 - torch, once for both processes
    load_apart(prepared.registry, resolved)
    checked: list[str] = []
    if is_served:
        from frame.entrypoints.http.start import check_start

        try:
            check_start(prepared, checked.append)
        except RuntimeError as error:
            click.echo(f"frame: the start would fail: {error}", err=True)
            ctx.exit(1)
    click.echo(f"ok: {resolved.served_name} ({resolved.model.architecture}) on {resolved.device} in {resolved.dtype}")
    for kind, choices in sorted(resolved.plugins.items()):
        click.echo(f"  {kind}: {', '.join(choice.name for choice in choices) or 'none'}")
    click.echo("\n".join(["checked:", *(f"  {line}" for line in ("settings, and the imports of plugins", *checked))]))
    transfers = "" if resolved.user.disaggregation.mode is None else ", and transfers of blocks between two servers"
    click.echo(f"not checked: values of weights, and what a step computes{transfers}")


@config_command(help="Print value, source and reason of settings. Also lists rejected plugins. KEY: a setting or a section.")
@click.argument("key", required=False)
def explain(loaded: LoadedConfig, key: str | None) -> None:
    keys = _keys(key) if key else [*by_key()]
    try:
        resolved = prepare(loaded.config, is_served=True).resolved
    except ConfigurationError:
        for each in keys:
            click.echo(_line(explain_one(each, loaded, None), loaded.source(each)))
        raise
    for each in keys:
        _explain(each, loaded, resolved)


@config_command(help="Print the configuration as YAML. Comments give the source of each value; --resolved also prints resolved values.")
@click.option("--resolved", "is_resolved", is_flag=True, help="Print the values that resolve chooses on this machine.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def show(loaded: LoadedConfig, is_resolved: bool, is_json: bool) -> None:
    resolved = prepare(loaded.config, is_served=True).resolved if is_resolved else None
    config = pinned(resolved) if resolved else loaded.config
    data = config.model_dump(mode="json")
    for secret in SECRETS:
        section, _, name = secret.partition(".")
        if data[section][name] is not None:
            data[section][name] = "***"
    if is_json:
        click.echo(json.dumps(data, indent=2))
        return
    for section, values in data.items():
        click.echo(f"{section}:")
        for name, value in values.items():
            key = f"{section}.{name}"
            click.echo(f"  {name}: {as_yaml(value)}{_comment(key, loaded, resolved)}")


@click.command(help="Print the JSON Schema of configuration files. It includes the options of installed plugins.")
def schema() -> None:
    click.echo(json.dumps(config_schema(load_configured(PluginsSection())), indent=2))


for _each in (check, explain, schema, show):
    command.add_command(_each)


def _explain(key: str, loaded: LoadedConfig, resolved: Resolved) -> None:
    setting = explain_one(key, loaded, resolved)
    click.echo(_line(setting, f"chosen: {setting.reason}" if setting.reason and setting.source == "default" else setting.source))
    if setting.reason and setting.source != "default":
        click.echo(f"    {setting.reason}")
    for name, sentences in setting.rejected.items():
        click.echo(f"    not {name}: {'; '.join(sentences)}")
    if key == "plugins.options":
        for option in options(loaded, resolved):
            click.echo(f"    {_line(option, option.source).removeprefix('plugins.options.')}")


def _line(setting: Explained, why: str) -> str:
    return f"{setting.key} = {setting.value}  ({why})"


def _comment(key: str, loaded: LoadedConfig, resolved: Resolved | None) -> str:
    source = loaded.source(key)
    if source != "default":
        return f"  # {source}"
    reason = resolved.reasons.get(key) if resolved else None
    return f"  # {' '.join(reason.split())}" if reason else ""


def _keys(text: str) -> list[str]:
    """The keys that `text` names: one setting by key, flag or keyword, or a whole section."""
    known, short = by_key(), by_keyword()
    plain = text.lstrip("-").replace("-", "_")
    if text in known:
        return [text]
    if plain in short:
        return [short[plain].key]
    section = [key for key in known if key.startswith(f"{text}.")]
    if section:
        return section
    raise ConfigError(f"There is no setting {text!r}{did_you_mean(text, [*known, *short]) or f'; {EVERY_KEY}.'}")
