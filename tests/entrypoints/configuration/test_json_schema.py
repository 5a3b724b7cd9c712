"""The JSON Schema of configuration files: complete, closed, and with every plugin's options."""

from __future__ import annotations

import json

from click.testing import CliRunner
from pydantic import BaseModel, Field

from frame.entrypoints.cli.main import cli
from frame.entrypoints.configuration.flat_settings import settings
from frame.entrypoints.configuration.json_schema import config_schema
from frame.plugins.loader import load_registry
from frame.plugins.registry import Registry


class Inner(BaseModel):
    depth: int = 1


class Options(BaseModel):
    splits: int = Field(8, description="Parts of a long sequence.", ge=1)
    inner: Inner = Inner()


def test_schema_is_valid_complete_and_takes_auto() -> None:
    registry = load_registry(installed=False)
    schema = config_schema(registry)
    assert schema["$schema"].endswith("2020-12/schema")
    for setting in settings():
        section, name = setting.path
        definition = schema["$defs"][schema["properties"][section]["$ref"].rpartition("/")[2]]
        assert definition["additionalProperties"] is False
        assert definition["properties"][name]["description"], setting.key
    page_size = schema["$defs"]["CacheSection"]["properties"]["page_size"]
    assert {"const": "auto"} in page_size["anyOf"]
    options = schema["$defs"]["PluginsSection"]["properties"]["options"]["properties"]
    assert set(options) == {f"{r.kind}/{r.name}" for records in registry.all_records().values() for r in records}
    assert "fcfs" in schema["$defs"]["SchedulerSection"]["properties"]["policy"]["examples"]


def test_a_plugins_options_stand_under_its_name_with_their_definitions() -> None:
    registry = Registry()
    part = registry.kind("grammar_backend", "one", "1")
    part.add("x", "m:C", options=Options)
    part.add("plain", "m:D")
    registry.commit(part)
    schema = config_schema(registry)
    options = schema["$defs"]["PluginsSection"]["properties"]["options"]["properties"]
    assert options["grammar_backend/x"]["properties"]["splits"]["minimum"] == 1
    assert options["grammar_backend/x"]["additionalProperties"] is False
    assert schema["$defs"]["Inner"]["properties"]["depth"]["default"] == 1
    assert options["grammar_backend/plain"]["maxProperties"] == 0


def test_the_command_prints_it() -> None:
    printed = json.loads(CliRunner().invoke(cli, ["config", "schema"]).output)
    assert printed == json.loads(json.dumps(config_schema(load_registry())))
