"""`frame config check | explain | schema | show`: what is configured, what becomes of it, and why. Loads no plugin and no weight."""

from __future__ import annotations

import json
from typing import Any

import click
import yaml

from frame.core.config import FrameConfig
from frame.core.errors import ConfigError, ConfigurationError, did_you_mean
from frame.core.resolve import pinned
from frame.core.resolved import Resolved
from frame.entrypoints.cli.options import config_command
from frame.entrypoints.config_schema import config_schema
from frame.entrypoints.config_sources import LoadedConfig
from frame.entrypoints.prepare import prepare, registry_of
from frame.entrypoints.settings import by_key, by_keyword

SECRETS = ("server.api_key",)


@click.group("config", help="Check, explain and show the configuration.")
def command() -> None:
    pass


@config_command(help="Resolve the configuration for its model and this machine; print what would run, or why it cannot.")
def check(loaded: LoadedConfig) -> None:
    resolved = prepare(loaded.config, is_served=True).resolved
    click.echo(f"ok: {resolved.served_name} ({resolved.facts.architecture}) on {resolved.device} in {resolved.dtype}")
    for kind, choices in sorted(resolved.plugins.items()):
        click.echo(f"  {kind}: {', '.join(choice.name for choice in choices) or 'none'}")


@config_command(help="Print a setting's value, its source, the reason, and every plugin that was turned down; all settings without KEY.")
@click.argument("key", required=False)
def explain(loaded: LoadedConfig, key: str | None) -> None:
    keys = [_key(key)] if key else [*by_key()]
    try:
        resolved: Resolved | None = prepare(loaded.config, is_served=True).resolved
    except ConfigurationError:
        for each in keys:
            click.echo(_line(each, _value(loaded.config, each), loaded.source(each)))
        raise
    for each in keys:
        _explain(each, loaded, resolved)


@config_command(help="Print the configuration as YAML with the source of each value that was set; --resolved fills in what was left open.")
@click.option("--resolved", "is_resolved", is_flag=True, help="Show every value as it would run on this machine.")
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
            click.echo(f"  {name}: {_yaml(value)}{_comment(key, loaded, resolved)}")


@click.command(help="Print the JSON Schema of configuration files, installed plugins' options included (for editors).")
def schema() -> None:
    click.echo(json.dumps(config_schema(registry_of(FrameConfig())), indent=2))


for _each in (check, explain, schema, show):
    command.add_command(_each)


def _explain(key: str, loaded: LoadedConfig, resolved: Resolved | None) -> None:
    value = _value(pinned(resolved) if resolved else loaded.config, key)
    reason = resolved.reasons.get(key) if resolved else None
    source = loaded.source(key)
    click.echo(_line(key, value, f"chosen: {reason}" if reason and source == "default" else source))
    if reason and source != "default":
        click.echo(f"    {reason}")
    for name, sentences in (resolved.rejected.get(key, {}) if resolved else {}).items():
        click.echo(f"    not {name}: {'; '.join(sentences)}")
    if resolved and key == "plugins.options":
        for kind, choices in sorted(resolved.plugins.items()):
            for choice in choices:
                for option, option_value in choice.options.items():
                    where = f"plugins.options.{kind}/{choice.name}.{option}"
                    click.echo(f"    {kind}/{choice.name}.{option} = {_yaml(option_value)}  ({loaded.source(where)})")


def _line(key: str, value: Any, why: str) -> str:
    shown = "***" if key in SECRETS and value is not None else _yaml(value)
    return f"{key} = {shown}  ({why})"


def _comment(key: str, loaded: LoadedConfig, resolved: Resolved | None) -> str:
    source = loaded.source(key)
    if source != "default":
        return f"  # {source}"
    reason = resolved.reasons.get(key) if resolved else None
    return f"  # {' '.join(reason.split())}" if reason else ""


def _value(config: FrameConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _key(text: str) -> str:
    """A setting by its key, its flag or its keyword."""
    known, short = by_key(), by_keyword()
    plain = text.lstrip("-").replace("-", "_")
    if text in known:
        return text
    if plain in short:
        return short[plain].key
    raise ConfigError(f"There is no setting {text!r}{did_you_mean(text, [*known, *short]) or '.'}")


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    value = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()
